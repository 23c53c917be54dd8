"""Cuts the tiles of a grid from a slide, at the model's resolution."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inference.slides.blocks import BUFFER_BYTES, BlockPass
from inference.slides.grid import EdgePolicy, TileGrid
from inference.slides.pixels import resample_area, resample_bilinear
from inference.slides.reader import SlideReader
from inference.slides.resolution import ReadPlan


@dataclass(frozen=True, eq=False)
class SampledTile:
    """Pixels of one tile, (tile_px, tile_px, 3) uint8 RGB, and the share of it that the slide has no pixels for.

    What a padded tile has beyond the slide is background, and no part of that share.
    """

    rgb: NDArray[np.uint8]
    missing_fraction: float


class TileSampler:
    """Reads chosen tiles of a grid in one pass over the slide; safe to use from several threads.

    Args:
        rows, cols: grid cells of the tiles, best in the order in which they are read.
        buffer_bytes: decoded blocks kept at most for tiles still to come.
        convert: what is done to a tile's colours last, if anything.

    Attributes:
        positions: float64 (2, n), where each tile begins in level-0 pixels, x and y.
        extent: pixels of the reduced level that a tile covers, x and y.
    """

    def __init__(
        self,
        reader: SlideReader,
        plan: ReadPlan,
        grid: TileGrid,
        rows: NDArray[np.integer],
        cols: NDArray[np.integer],
        buffer_bytes: int = BUFFER_BYTES,
        convert: Callable[[NDArray[np.uint8]], NDArray[np.uint8]] | None = None,
    ) -> None:
        self.plan, self._convert = plan, convert
        self._side, self._background = grid.tile_px, reader.background
        # Pixels of the reduced level per level-0 pixel, x and y.
        scale = tuple(1 / (d * plan.reduction) for d in plan.downsample)
        self.extent = (grid.footprint[0] * scale[0], grid.footprint[1] * scale[1])
        self.positions = np.stack([grid.positions(cols, 0), grid.positions(rows, 1)])
        self._starts = self.positions * np.array(scale)[:, None]
        size = [-(-side // plan.reduction) for side in reader.level_sizes[plan.level]]
        first, last = self._spans()
        inside_first = np.maximum(first, 0)
        inside_last = np.minimum(last, np.array(size)[:, None])
        self._edge: EdgePolicy = grid.edge
        if plan.resample != "none" and grid.edge != "pad":
            # What lies outside has no colour that could be averaged in.
            first, last = inside_first, inside_last
        self._first, self._last = first, last
        rectangles = np.concatenate([inside_first, inside_last - inside_first]).T
        self._pass = BlockPass(reader, plan.level, plan.reduction, rectangles, buffer_bytes)
        self._inside = inside_first

    def __len__(self) -> int:
        return len(self._starts[0])

    def blocks(self) -> list[tuple[int, int]]:
        """Column and row of each block that the tiles touch; see `SlideReader.block_size`."""
        return self._pass.touched()

    def read(self, index: int) -> SampledTile:
        """One of the chosen tiles.

        Raises:
            TileReadError: its pixels cannot be decoded.
            UnreadableSlide, SlideChanged, SourceUnavailable: see `SlideReader.read_region`.
        """
        pixels = self._pass.read(index)
        missing = 0.0 if pixels.missing is None else float(pixels.missing.mean(dtype=np.float64))
        rgb = self._padded(pixels.rgb, index)
        if self.plan.resample != "none":
            x, y = (float(value) for value in self._starts[:, index] - self._first[:, index])
            resample = resample_bilinear if self.plan.resample == "bilinear" else resample_area
            rgb = resample(rgb, x, y, self.extent[0], self.extent[1], (self._side, self._side))
        return SampledTile(rgb if self._convert is None else self._convert(rgb), missing)

    def _spans(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """First pixel of each tile and the one after its last, x and y: int64 (2, n), beyond the level too."""
        if self.plan.resample == "none":
            first = np.rint(self._starts)
            return first.astype(np.int64), (first + self._side).astype(np.int64)
        margin = 1 if self.plan.resample == "bilinear" else 0
        last = np.ceil(self._starts + np.array(self.extent)[:, None]) + margin
        return (np.floor(self._starts) - margin).astype(np.int64), last.astype(np.int64)

    def _padded(self, rgb: NDArray[np.uint8], index: int) -> NDArray[np.uint8]:
        """The tile's whole rectangle: its edge repeated where rounding overhangs the level, background if padded."""
        left, top = (int(value) for value in self._inside[:, index] - self._first[:, index])
        width, height = (int(value) for value in self._last[:, index] - self._first[:, index])
        if rgb.shape[:2] == (height, width):
            return rgb
        if self._edge != "pad":
            rest = ((top, height - top - rgb.shape[0]), (left, width - left - rgb.shape[1]), (0, 0))
            return np.pad(rgb, rest, mode="edge")
        whole = np.empty((height, width, 3), np.uint8)
        whole[:] = self._background
        whole[top : top + rgb.shape[0], left : left + rgb.shape[1]] = rgb
        return whole


def read_tile(reader: SlideReader, plan: ReadPlan, grid: TileGrid, row: int, col: int) -> SampledTile:
    """A single tile; see `TileSampler.read`. To read many, a sampler decodes what they share once."""
    return TileSampler(reader, plan, grid, np.array([row]), np.array([col])).read(0)


def make_grid(
    slide_size: tuple[int, int],
    mpp: tuple[float, float],
    plan: ReadPlan,
    tile_px: int,
    stride_px: int,
    edge: EdgePolicy = "drop",
) -> TileGrid:
    """The grid of a slide under a read plan; `mpp` is the slide's level-0 µm/px."""
    footprint = (tile_px * plan.mpp[0] / mpp[0], tile_px * plan.mpp[1] / mpp[1])
    return TileGrid(slide_size, tile_px, stride_px, plan.mpp, footprint, edge)
