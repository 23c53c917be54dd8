"""The edges of the tile grid: padded and shifted tiles, where they lie and how much of them is tissue."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from inference.errors import ConfigError
from inference.slides.grid import MAX_TILES, EdgePolicy, TileGrid
from inference.slides.overview import Overview
from inference.slides.tissue import coverage


def _grid(
    size: tuple[int, int], edge: EdgePolicy, footprint: tuple[float, float] = (224.0, 224.0), stride_px: int = 224
) -> TileGrid:
    return TileGrid(size, 224, stride_px, (0.5, 0.5), footprint, edge)


def _starts(grid: TileGrid, axis: int = 0) -> list[float]:
    count = grid.n_cols if axis == 0 else grid.n_rows
    return [float(x) for x in grid.positions(np.arange(count), axis)]


@pytest.mark.parametrize(
    ("side", "drop", "pad", "shift"),
    [
        (448, [0, 224], [0, 224], [0, 224]),  # fits exactly: nothing is left
        (449, [0, 224], [0, 224, 448], [0, 224, 225]),  # a pixel is left
        (671, [0, 224], [0, 224, 448], [0, 224, 447]),
        (672, [0, 224, 448], [0, 224, 448], [0, 224, 448]),
        (224, [0], [0], [0]),
        (223, [], [0], []),  # smaller than a tile
        (1, [], [0], []),
    ],
)
def test_the_rest_of_a_slide_is_dropped_padded_or_covered_by_a_shifted_tile(
    side: int, drop: list[float], pad: list[float], shift: list[float]
) -> None:
    assert _starts(_grid((side, 448), "drop")) == drop
    assert _starts(_grid((side, 448), "pad")) == pad
    assert _starts(_grid((side, 448), "shift")) == shift
    assert _starts(_grid((448, side), "shift"), axis=1) == shift


@pytest.mark.parametrize(("rest", "extra"), [(1, 0), (2, 1), (3, 1)])
@pytest.mark.parametrize("edge", ["pad", "shift"])
def test_a_rest_of_less_than_half_a_model_pixel_gets_no_tile(edge: EdgePolicy, rest: int, extra: int) -> None:
    """A model pixel is four level-0 pixels here."""
    assert _grid((2 * 896 + rest, 896), edge, (896.0, 896.0)).n_cols == 2 + extra


def test_with_overlap_padding_stops_as_soon_as_the_slide_is_covered() -> None:
    assert _starts(_grid((500, 224), "pad", stride_px=56)) == [0, 56, 112, 168, 224, 280]
    assert _starts(_grid((500, 224), "shift", stride_px=56)) == [0, 56, 112, 168, 224, 276]


def test_a_shifted_tile_ends_on_the_edge_also_where_a_footprint_is_no_whole_number() -> None:
    grid = _grid((1000, 777), "shift", (224.4489, 223.77))
    for axis in (0, 1):
        assert _starts(grid, axis)[-1] + grid.footprint[axis] == pytest.approx(grid.slide_size[axis], abs=1e-9)
    last = np.array([grid.n_cols - 1])
    assert grid.origins(last, 0).tolist() == [math.floor(1000 - 224.4489 + 0.5)]
    assert grid.origins(last, 0).dtype == np.int64


@settings(deadline=None)
@given(
    st.integers(1, 5000),
    st.floats(1, 600),
    st.integers(1, 64).flatmap(lambda tile: st.tuples(st.just(tile), st.integers(max(1, tile // 4), tile))),
)
def test_regular_tiles_stay_where_they_are_and_the_slide_is_covered_by_one_more_at_most(
    size: int, footprint: float, tiling: tuple[int, int]
) -> None:
    drop = TileGrid((size, 100_000), *tiling, (0.5, 0.5), (footprint, 1e5))
    half = 0.5 * footprint / tiling[0]
    for edge in ("pad", "shift"):
        grid = replace(drop, edge=edge)
        assert grid.n_cols - drop.n_cols in (0, 1)
        starts = _starts(grid)
        assert starts[: drop.n_cols] == _starts(drop)
        assert starts == sorted(set(starts))
        assert all(0 <= x < size for x in starts)
        if starts:
            assert starts[-1] + footprint >= size - half - 1e-9
        if edge == "shift":
            assert all(x + footprint <= size + min(0.5, half) + 1e-6 for x in starts)
        else:
            assert starts, "whatever has pixels has a tile"


def test_positions_are_what_origins_round_and_never_drift() -> None:
    grid = _grid((2_000_000, 3000), "shift", (224.4489, 223.77), stride_px=37)
    index = np.arange(grid.n_cols)
    positions = grid.positions(index, 0)
    assert positions.dtype == np.float64
    assert np.array_equal(grid.origins(index, 0), np.floor(positions + 0.5))
    step = Fraction(224.4489) * 37 / 224
    for i in (1, 17, 40_000, grid.n_cols - 2):
        assert abs(Fraction(float(positions[i])) - step * i) < Fraction(1, 10**6)
        assert grid.positions(np.array([i], np.int32), 0)[0] == positions[i]


@pytest.mark.parametrize("edge", ["drop", "pad", "shift"])
def test_a_million_tiles_come_row_major(edge: EdgePolicy) -> None:
    grid = _grid((224_100, 224_100), edge)
    rows, cols = grid.cells()
    side = 1000 if edge == "drop" else 1001
    assert (grid.n_rows, grid.n_cols, rows.size) == (side, side, side * side)
    assert np.array_equal(rows.astype(np.int64) * side + cols, np.arange(side * side))
    assert grid.origins(cols, 0).max() == {"drop": 999 * 224, "pad": 224_000, "shift": 224_100 - 224}[edge]


def test_an_unknown_edge_policy_is_refused() -> None:
    with pytest.raises(ConfigError, match="no edge policy: give drop, pad, shift"):
        _grid((500, 500), "crop")  # type: ignore[arg-type]


def test_the_bound_on_tiles_counts_those_at_the_edge() -> None:
    assert MAX_TILES == 8192 * 4096
    size = (8192 * 2 + 1, 4096 * 2)
    assert TileGrid(size, 1, 1, (0.5, 0.5), (2.0, 2.0)).n_cols == 8192
    with pytest.raises(ConfigError, match="choose a larger stride"):
        TileGrid(size, 1, 1, (0.5, 0.5), (2.0, 2.0), "pad")


@settings(deadline=None, max_examples=60)
@given(st.data(), st.sampled_from(["pad", "shift"]))
def test_coverage_is_the_share_of_the_tiles_own_area_on_the_slide(data: st.DataObject, edge: EdgePolicy) -> None:
    """Against exact overlaps of each tile with each mask pixel, cut at the slide's edge."""
    height, width = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 7))
    scale = (data.draw(st.floats(1, 20)), data.draw(st.floats(1, 20)))
    size = (max(1, int(width * scale[0])), max(1, int(height * scale[1])))
    footprint = (data.draw(st.floats(1, 1.5 * size[0])), data.draw(st.floats(1, 1.5 * size[1])))
    grid = TileGrid(size, 8, data.draw(st.sampled_from([8, 5])), (0.5, 0.5), footprint, edge)
    mask = data.draw(hnp.arrays(np.bool_, (height, width)))
    rgb = np.zeros((height, width, 3), np.uint8)
    found = coverage(Overview(rgb, mask.astype(np.float32), mask, scale, rgb), mask, grid)
    tables = []
    for axis, n_pixels in ((1, height), (0, width)):
        count = grid.n_cols if axis == 0 else grid.n_rows
        begins = grid.positions(np.arange(count), axis)[:, None]
        low = np.arange(n_pixels) * scale[axis]
        # Whole tiles overhang by rounding at most, within the last mask pixel.
        high = np.minimum(low + scale[axis], size[axis] if edge == "pad" else np.inf)
        overlap = np.minimum(begins + footprint[axis], high) - np.maximum(begins, low)
        tables.append(np.clip(overlap, 0, None) / footprint[axis])
    expected = np.einsum("ry,cx,yx->rc", *tables, mask.astype(float)).ravel()
    assert np.abs(found.tissue - expected).max(initial=0) < 1e-5
    assert np.abs(found.missing - expected).max(initial=0) < 1e-5


def test_padding_is_no_tissue_and_a_shifted_tile_counts_its_own_area() -> None:
    """A slide of 30 x 20 of which the right third is tissue; tiles of 20 x 20."""
    mask = np.zeros((2, 3), np.bool_)
    mask[:, 2] = True
    rgb = np.zeros((2, 3, 3), np.uint8)
    overview = Overview(rgb, np.zeros((2, 3), np.float32), np.zeros((2, 3), np.bool_), (10.0, 10.0), rgb)
    for edge, shares in (("drop", [0.0]), ("pad", [0.0, 0.5]), ("shift", [0.0, 0.5])):
        grid = TileGrid((30, 20), 20, 20, (0.5, 0.5), (20.0, 20.0), edge)  # type: ignore[arg-type]
        assert coverage(overview, mask, grid).tissue.tolist() == shares
