"""Tile values to a raster whose pixels lie exactly on the tile grid."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from math import ceil, gcd
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from inference.errors import ConfigError, ModelContractError
from inference.slides.grid import TileGrid

# A canvas that is wider than the slide by less than this share of a cell is float noise, not a cell.
_EDGE_TOLERANCE = 1e-6

MAX_CELLS = 2**28  # 17 bytes each while a raster is made: 4.6 GB

_Cell = TypeVar("_Cell", bound=np.generic)
_Summed = TypeVar("_Summed", np.int32, np.float64)


class Validity(IntEnum):
    """What a raster cell without, or with, a value means; where tiles overlap the greatest holds."""

    NOT_COVERED = 0
    SKIPPED = 1
    FAILED = 2
    PREDICTED = 3


@dataclass(frozen=True, eq=False)
class HeatmapRaster:
    """One value per cell over the whole slide canvas, with its origin at level-0 pixel (0, 0).

    Attributes:
        values: float32 (H, W), NaN where nothing is predicted.
        validity: uint8 (H, W) of `Validity`.
        cell_px: cell side in model pixels.
        cell_footprint: level-0 pixels that one cell covers, x and y.
        cell_mpp: µm that one cell covers, x and y.
    """

    values: NDArray[np.float32]
    validity: NDArray[np.uint8]
    cell_px: int
    cell_footprint: tuple[float, float]
    cell_mpp: tuple[float, float]


def rasterise(
    grid: TileGrid,
    rows: NDArray[np.int32],
    cols: NDArray[np.int32],
    values: NDArray[np.float32],
    ok: NDArray[np.bool_],
) -> HeatmapRaster:
    """Lay the planned tiles of a grid on the largest cells that divide both tile and stride.

    `rows` and `cols` name each planned tile once; `values` counts only where `ok`. Cells under
    several predicted tiles hold their mean. What of a tile reaches beyond the slide is dropped; a
    last row or column that was shifted off the cells counts for those it covers at least half of,
    of a last cell that reaches beyond the slide half of the part on it. Raises `ModelContractError`
    where an ok tile has no finite value.
    """
    if not np.isfinite(values[ok]).all():
        raise ModelContractError("a tile is marked ok without a finite value; its output was not checked")
    height, width = canvas_shape(grid)
    cell_px, footprint = _cell(grid)
    last = (_shifted_cell(grid, 1, footprint[1]), _shifted_cell(grid, 0, footprint[0]))
    lattice = _Lattice(grid.tile_px // cell_px, grid.stride_px // cell_px, (height, width), last)

    tiles = np.zeros((grid.n_rows, grid.n_cols), np.float64)
    tiles[rows[ok], cols[ok]] = values[ok]
    state = np.full(tiles.shape, Validity.SKIPPED, np.uint8)
    state[rows, cols] = np.where(ok, Validity.PREDICTED, Validity.FAILED)

    counts = lattice.sum((state == Validity.PREDICTED).astype(np.int32))
    mean = np.full(counts.shape, np.nan, np.float32)
    np.divide(lattice.sum(tiles), counts, out=mean, where=counts > 0, casting="same_kind")
    return HeatmapRaster(
        values=mean,
        validity=lattice.maximum(state),
        cell_px=cell_px,
        cell_footprint=footprint,
        cell_mpp=(grid.mpp[0] * cell_px, grid.mpp[1] * cell_px),
    )


def canvas_shape(grid: TileGrid) -> tuple[int, int]:
    """Height and width of the raster of a grid: as many cells as span the whole slide.

    Raises `ConfigError` above `MAX_CELLS`; ask before computing, not after.
    """
    cell_px, footprint = _cell(grid)
    width, height = (
        max(1, ceil(extent / side - _EDGE_TOLERANCE)) for extent, side in zip(grid.slide_size, footprint, strict=True)
    )
    if width * height > MAX_CELLS:
        raise ConfigError(
            f"a heatmap of tiles of {grid.tile_px} px, {grid.stride_px} px apart, has cells of {cell_px} px, "
            f"{width} x {height} of them: choose a stride that shares a larger divisor with the tile"
        )
    return height, width


def halvings(raster: HeatmapRaster, levels: int) -> Iterator[tuple[NDArray[np.float32], NDArray[np.uint8]]]:
    """Values and validity of the raster and of `levels` reductions, each half the size of the one before.

    Every reduced pixel is the mean of the predicted cells beneath it, however many there are, and
    its validity is their greatest; odd sizes round up.
    """
    values, validity = raster.values, raster.validity
    yield values, validity
    sums = np.nan_to_num(values, nan=0.0).astype(np.float64)
    counts = (validity == Validity.PREDICTED).astype(np.int32)
    for _ in range(levels):
        sums, counts, validity = _quad_sum(sums), _quad_sum(counts), _quad_max(validity)
        values = np.full(counts.shape, np.nan, np.float32)
        np.divide(sums, counts, out=values, where=counts > 0, casting="same_kind")
        yield values, validity


def _cell(grid: TileGrid) -> tuple[int, tuple[float, float]]:
    """Side of a cell in model pixels and in level-0 pixels, x and y."""
    cell_px = gcd(grid.tile_px, grid.stride_px)
    return cell_px, (grid.footprint[0] * cell_px / grid.tile_px, grid.footprint[1] * cell_px / grid.tile_px)


def _shifted_cell(grid: TileGrid, axis: int, side: float) -> int | None:
    """The first cell that a shifted last column (axis 0) or row (axis 1) covers at least half of; None without one."""
    if not grid.shifted(axis):
        return None
    begins = (grid.slide_size[axis] - grid.footprint[axis]) / side
    return ceil(begins - 0.5 - _EDGE_TOLERANCE)


@dataclass(frozen=True)
class _Lattice:
    """Where tiles of `tile` cells, `stride` cells apart, lie on a canvas of `shape` cells.

    Attributes:
        last: first cell of a last row and of a last column that are off the stride and reach to the canvas's end.
    """

    tile: int
    stride: int
    shape: tuple[int, int]
    last: tuple[int | None, int | None]

    # Tiles that are `stride` apart never share a cell at one offset inside the tile, so each offset
    # is one strided assignment; rows and columns separate, so tile + tile passes do, not tile * tile.

    def sum(self, tiles: NDArray[_Summed]) -> NDArray[_Summed]:
        return self._spread(self._spread(tiles, 1, np.add), 0, np.add)

    def maximum(self, tiles: NDArray[np.uint8]) -> NDArray[np.uint8]:
        return self._spread(self._spread(tiles, 1, np.maximum), 0, np.maximum)

    def _spread(self, tiles: NDArray[_Cell], axis: int, combine: np.ufunc) -> NDArray[_Cell]:
        """Combine every tile into the cells it covers along one axis."""
        last, size = self.last[axis], self.shape[axis]
        source = np.moveaxis(tiles, axis, 0)
        regular = source if last is None else source[:-1]
        count = len(regular)
        # A last tile may overhang the canvas, by rounding or as padding: cut after laying it down.
        span = max(size, (count - 1) * self.stride + self.tile)
        out = np.zeros((*tiles.shape[:axis], span, *tiles.shape[axis + 1 :]), tiles.dtype)
        along = np.moveaxis(out, axis, 0)
        for offset in range(self.tile):
            target = along[offset : offset + count * self.stride : self.stride]
            combine(target, regular, out=target)
        if last is not None:
            combine(along[last:size], source[-1], out=along[last:size])
        return np.ascontiguousarray(np.moveaxis(along[:size], 0, axis))


def _quad_sum(plane: NDArray[_Summed]) -> NDArray[_Summed]:
    quads = _quads(plane)
    return quads[0] + quads[1] + quads[2] + quads[3]


def _quad_max(plane: NDArray[np.uint8]) -> NDArray[np.uint8]:
    quads = _quads(plane)
    return np.maximum(np.maximum(quads[0], quads[1]), np.maximum(quads[2], quads[3]))


def _quads(plane: NDArray[_Cell]) -> list[NDArray[_Cell]]:
    """The four pixels beneath each pixel of the reduction, 0 beyond the edge."""
    height, width = plane.shape
    even = np.pad(plane, ((0, height % 2), (0, width % 2)))
    return [even[y::2, x::2] for y in (0, 1) for x in (0, 1)]
