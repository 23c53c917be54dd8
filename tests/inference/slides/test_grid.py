"""The tile grid: its size, its order, and origins that never drift."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.errors import ConfigError
from inference.slides.grid import MAX_TILES, TileGrid
from inference.slides.resolution import plan_reading
from inference.slides.sampling import make_grid


def _grid(
    size: tuple[int, int],
    footprint: tuple[float, float] = (224.0, 224.0),
    *,
    tile_px: int = 224,
    stride_px: int | None = None,
) -> TileGrid:
    return TileGrid(size, tile_px, stride_px or tile_px, (0.5, 0.5), footprint)


def _brute_force_count(size: int, footprint: float, stride_px: int, tile_px: int) -> int:
    """Tiles laid one after the other until one no longer fits, in exact arithmetic."""
    length = Fraction(footprint)
    slack = min(Fraction(1), length / tile_px) / 2
    count = 0
    while count * length * stride_px / tile_px + length <= size + slack:
        count += 1
    return count


@pytest.mark.parametrize(
    ("size", "columns", "rows"),
    [
        ((2240, 448), 10, 2),  # fits exactly: the last column and row are there
        ((2239, 447), 9, 1),  # a pixel short: they are not
        ((2463, 671), 10, 2),  # almost another one
        ((224, 224), 1, 1),
        ((223, 224), 0, 1),  # narrower than a tile
        ((50, 50), 0, 0),
        ((1, 1), 0, 0),
    ],
)
def test_only_whole_tiles_are_in_the_grid(size: tuple[int, int], columns: int, rows: int) -> None:
    grid = _grid(size)
    assert (grid.n_cols, grid.n_rows) == (columns, rows)
    found_rows, found_cols = grid.cells()
    assert len(found_rows) == len(found_cols) == columns * rows


def test_a_last_tile_that_overhangs_by_rounding_alone_is_kept() -> None:
    footprint = 1000 / 3
    assert _grid((1000, 1000), (footprint, footprint)).n_cols == 3
    assert _grid((1000, 1000), (333.4, 333.4)).n_cols == 3  # 0.2 of a pixel beyond
    assert _grid((1000, 1000), (333.6, 333.6)).n_cols == 2  # 0.8 of a pixel beyond


def test_an_enlarged_slides_last_tile_overhangs_by_half_a_model_pixel_at_most() -> None:
    """Half a level-0 pixel would be 29 model pixels of nothing on a slide of 29 µm/px."""
    footprint = 224 * 0.5 / 28.969
    grid = _grid((1152, 700), (footprint, footprint), stride_px=32)
    model_px = footprint / 224
    for axis, count in enumerate((grid.n_cols, grid.n_rows)):
        end = (count - 1) * grid.step[axis] + footprint
        assert end <= grid.slide_size[axis] + model_px / 2 + 1e-9
        assert end + grid.step[axis] > grid.slide_size[axis]


@settings(deadline=None)
@given(
    st.integers(1, 5000),
    st.floats(1, 600),
    st.integers(1, 64).flatmap(lambda tile: st.tuples(st.just(tile), st.integers(max(1, tile // 4), tile))),
)
def test_the_number_of_tiles_is_what_laying_them_out_gives(
    size: int, footprint: float, tiling: tuple[int, int]
) -> None:
    tile_px, stride_px = tiling
    grid = _grid((size, 100_000), (footprint, 1e5), tile_px=tile_px, stride_px=stride_px)
    expected = _brute_force_count(size, footprint, stride_px, tile_px)
    if grid.n_cols != expected:
        # A last tile that overhangs by exactly the slack: float and fraction may differ by one rounding.
        edge = Fraction(grid.step[0]) * (max(grid.n_cols, expected) - 1) + Fraction(footprint)
        assert abs(float(edge - size) - 0.5 * min(1, footprint / tile_px)) < 1e-6


def test_tiles_are_row_major_int32() -> None:
    rows, cols = _grid((224 * 3, 224 * 2)).cells()
    assert rows.dtype == cols.dtype == np.int32
    assert rows.tolist() == [0, 0, 0, 1, 1, 1]
    assert cols.tolist() == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize(
    ("mpp", "target", "tile_px", "stride_px"),
    [
        (0.499, 0.5, 224, 224),
        (0.2325, 0.5, 256, 256),
        (0.2525, 0.5, 224, 112),
        (0.243094, 1.0, 224, 223),
        (0.6, 0.5, 224, 224),
        (0.23, 0.5, 224, 37),
        (1 / 3, 0.5, 224, 224),
    ],
)
def test_origins_of_a_thousand_columns_and_rows_never_drift(
    mpp: float, target: float, tile_px: int, stride_px: int
) -> None:
    sizes = [(120_000, 90_000), (30_000, 22_500)]
    pair = (mpp, mpp * 1.0007)
    plan = plan_reading("S1", sizes, pair, target)
    grid = make_grid(sizes[0], pair, plan, tile_px, stride_px)
    index = np.arange(1000)
    for axis in (0, 1):
        origins = grid.origins(index, axis)
        assert origins.dtype == np.int64
        step = Fraction(plan.mpp[axis]) / Fraction(pair[axis]) * stride_px
        for i in index.tolist():
            exact = step * i
            nearest = math.floor(exact + Fraction(1, 2))
            if abs(exact - math.floor(exact) - Fraction(1, 2)) > Fraction(1, 10**6):
                assert origins[i] == nearest
            else:
                assert abs(int(origins[i]) - nearest) <= 1  # a tie, decided by the last bit


def test_one_origin_does_not_depend_on_which_others_are_asked_for() -> None:
    grid = _grid((100_000, 100_000), (224.4489, 223.77))
    every = grid.origins(np.arange(400), 0)
    for i in (0, 1, 17, 399):
        assert grid.origins(np.array([i], np.int32), 0)[0] == every[i]


def test_ties_round_up_so_that_equal_steps_stay_equal() -> None:
    assert _grid((10_000, 10_000), (224.5, 224.5)).origins(np.arange(5), 0).tolist() == [0, 225, 449, 674, 898]


def test_x_and_y_have_steps_of_their_own() -> None:
    grid = _grid((2240, 2240), (448.0, 224.0))
    assert (grid.n_cols, grid.n_rows) == (5, 10)
    assert grid.step == (448.0, 224.0)
    assert grid.origins(np.array([2]), 0)[0] == 896
    assert grid.origins(np.array([2]), 1)[0] == 448


def test_a_stride_below_the_tile_overlaps() -> None:
    grid = _grid((448, 448), stride_px=56)
    assert grid.n_cols == 5
    assert grid.origins(np.arange(5), 0).tolist() == [0, 56, 112, 168, 224]


@pytest.mark.parametrize(("tile_px", "stride_px"), [(224, 225), (0, 0), (-1, 1)])
def test_a_stride_beyond_the_tile_is_refused(tile_px: int, stride_px: int) -> None:
    with pytest.raises(ConfigError, match="stride"):
        TileGrid((1000, 1000), tile_px, stride_px, (0.5, 0.5), (224.0, 224.0))


@pytest.mark.parametrize("side", [0.0, -1.0, math.nan, math.inf])
def test_a_footprint_that_covers_nothing_is_refused(side: float) -> None:
    with pytest.raises(ConfigError, match="positive area"):
        _grid((1000, 1000), (224.0, side))


def test_a_grid_beyond_the_bound_is_refused_before_anything_is_allocated() -> None:
    side = math.isqrt(MAX_TILES)
    assert _grid((side, side), (1.0, 1.0), tile_px=1).n_cols == side
    with pytest.raises(ConfigError, match="choose a larger stride") as raised:
        _grid((side + 1, side + 2), (1.0, 1.0), tile_px=1)
    assert raised.value.code == "bad_config"
    with pytest.raises(ConfigError, match="choose a larger stride"):
        _grid((1 << 31, 1 << 31))
