"""Heatmap cells under padded and shifted tiles: every planned tile is painted, and nothing beyond the slide."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from inference.outputs.raster import Validity, canvas_shape, rasterise
from inference.slides.grid import EdgePolicy, TileGrid


@st.composite
def grids(draw: st.DrawFn, edge: EdgePolicy) -> TileGrid:
    """Small grids: any footprint, some strides, sides from below one tile to several tiles."""
    tile_px = draw(st.sampled_from([1, 4, 6, 8]))
    stride_px = draw(st.integers(1, tile_px))
    footprint = (draw(st.floats(2, 40)), draw(st.floats(2, 40)))
    size = (draw(st.integers(1, 80)), draw(st.integers(1, 80)))
    return TileGrid(size, tile_px, stride_px, (0.5, 0.5), footprint, edge)


def _cover(grid: TileGrid, axis: int, n_cells: int, side: float) -> NDArray[np.float64]:
    """Share of each cell's part on the slide that each tile covers along one axis: (tiles, cells)."""
    count = grid.n_cols if axis == 0 else grid.n_rows
    begins = grid.positions(np.arange(count), axis)[:, None]
    low = np.arange(n_cells) * side
    high = np.minimum(low + side, grid.slide_size[axis])
    overlap = np.minimum(begins + grid.footprint[axis], high) - np.maximum(begins, low)
    return np.asarray(np.clip(overlap, 0, None) / (high - low))


def _painted(grid: TileGrid, row: int, col: int) -> NDArray[np.bool_]:
    """The cells of one tile."""
    at = np.array([row], np.int32), np.array([col], np.int32)
    raster = rasterise(grid, *at, np.ones(1, np.float32), np.ones(1, np.bool_))
    return np.asarray(raster.validity == Validity.PREDICTED)


@settings(deadline=None)
@given(st.one_of(grids("shift"), grids("pad"), grids("drop")))
def test_a_tile_is_painted_into_the_cells_it_covers_at_least_half_of_and_no_others(grid: TileGrid) -> None:
    height, width = canvas_shape(grid)
    rows, cols = grid.cells()
    side = tuple(footprint * np.gcd(grid.tile_px, grid.stride_px) / grid.tile_px for footprint in grid.footprint)
    shares = _cover(grid, 1, height, side[1]), _cover(grid, 0, width, side[0])
    for row, col in {(0, 0), (grid.n_rows - 1, grid.n_cols - 1)} if rows.size else ():
        values = ((rows == row) & (cols == col)).astype(np.float32)
        raster = rasterise(grid, rows, cols, values, np.ones(rows.size, np.bool_))
        assert raster.values.shape == (height, width)
        painted = raster.values > 0
        assert painted.any()
        least, most = 0.5 - 1e-4, 0.5 + 1e-4  # either is right where a cell is half covered to the last bits
        surely = (shares[0][row] > most)[:, None] & (shares[1][col] > most)
        possibly = (shares[0][row] >= least)[:, None] & (shares[1][col] >= least)
        assert not (surely & ~painted).any()
        assert not (painted & ~possibly).any()


@settings(deadline=None, max_examples=40)
@given(st.one_of(grids("shift"), grids("pad")), st.integers(0, 2**32 - 1))
def test_each_cell_is_the_mean_of_the_tiles_painted_into_it_and_its_validity_their_greatest(
    grid: TileGrid, seed: int
) -> None:
    random = np.random.default_rng(seed)
    rows, cols = grid.cells()
    planned = np.flatnonzero(random.random(rows.size) < 0.7)
    ok = random.random(planned.size) < 0.8
    values = random.random(planned.size).astype(np.float32)
    raster = rasterise(grid, rows[planned], cols[planned], values, ok)

    over_rows = [_painted(grid, row, 0).any(axis=1) for row in range(grid.n_rows if grid.n_cols else 0)]
    over_cols = [_painted(grid, 0, col).any(axis=0) for col in range(grid.n_cols if grid.n_rows else 0)]
    sums, counts = np.zeros(raster.values.shape), np.zeros(raster.values.shape)
    validity = np.zeros(raster.values.shape, np.uint8)
    state = np.full(rows.size, Validity.SKIPPED, np.uint8)
    state[planned] = np.where(ok, Validity.PREDICTED, Validity.FAILED)
    worth = np.zeros(rows.size)
    worth[planned] = values
    for index in range(rows.size):
        cells = over_rows[rows[index]][:, None] & over_cols[cols[index]]
        validity[cells] = np.maximum(validity[cells], state[index])
        if state[index] == Validity.PREDICTED:
            sums[cells] += worth[index]
            counts[cells] += 1
    assert np.array_equal(raster.validity, validity)
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(raster.values, sums / counts, rtol=1e-5)


@pytest.mark.parametrize("edge", ["pad", "shift"])
def test_tiles_leave_no_cell_of_the_slide_uncovered(edge: EdgePolicy) -> None:
    grid = TileGrid((1000, 730), 224, 112, (0.5, 0.5), (224.0, 224.0), edge)
    rows, cols = grid.cells()
    raster = rasterise(grid, rows, cols, np.ones(rows.size, np.float32), np.ones(rows.size, np.bool_))
    assert (raster.validity == Validity.PREDICTED).all()
    bare = rasterise(replace(grid, edge="drop"), rows[:1], cols[:1], np.ones(1, np.float32), np.ones(1, np.bool_))
    assert (bare.validity == Validity.NOT_COVERED).any()


def test_a_shifted_column_is_painted_where_it_lies_and_not_at_the_next_regular_place() -> None:
    """10 tiles of 100 and a rest of 40: the last begins at 940 of 1040, in the cells from 900 and from 1000."""
    grid = TileGrid((1040, 100), 100, 100, (0.5, 0.5), (100.0, 100.0), "shift")
    values = np.arange(11, dtype=np.float32)
    raster = rasterise(grid, np.zeros(11, np.int32), np.arange(11, dtype=np.int32), values, np.ones(11, np.bool_))
    assert raster.values.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9.5, 10]]
    wide = replace(grid, slide_size=(1060, 100))  # begins at 960: the cell from 900 is covered less than half
    raster = rasterise(wide, np.zeros(11, np.int32), np.arange(11, dtype=np.int32), values, np.ones(11, np.bool_))
    assert raster.values.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10]]


def test_the_padding_of_a_tile_is_not_on_the_canvas() -> None:
    grid = TileGrid((50, 30), 224, 56, (0.5, 0.5), (224.0, 224.0), "pad")
    one = np.zeros(1, np.int32)
    raster = rasterise(grid, one, one, np.ones(1, np.float32), np.ones(1, np.bool_))
    assert raster.values.tolist() == [[1]]
