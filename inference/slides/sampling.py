"""Cuts the tiles of a grid from a slide, at the model's resolution."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inference.slides.grid import TileGrid
from inference.slides.pixels import composite, reduce_area, resample_area, resample_bilinear
from inference.slides.reader import SlideReader
from inference.slides.resolution import ReadPlan

BAND_PIXELS = 1 << 22
"""Level pixels read at a time; 16 MiB as RGBA."""


@dataclass(frozen=True, eq=False)
class SampledTile:
    """Pixels of one tile, (tile_px, tile_px, 3) uint8 RGB, and the share of it that the slide has no pixels for."""

    rgb: NDArray[np.uint8]
    missing_fraction: float


class TileSampler:
    """Reads single tiles through a `SlideReader`; safe to use from several threads."""

    def __init__(self, reader: SlideReader, plan: ReadPlan, grid: TileGrid) -> None:
        self._reader, self._plan, self._grid = reader, plan, grid
        # Pixels of the reduced level per level-0 pixel, x and y, and its size.
        self._scale = tuple(1 / (d * plan.reduction) for d in plan.downsample)
        self._size = tuple(-(-side // plan.reduction) for side in reader.level_sizes[plan.level])

    def read(self, row: int, col: int) -> SampledTile:
        """The tile of one grid cell.

        Raises:
            TileReadError: its pixels cannot be decoded.
            UnreadableSlide, SourceUnavailable: see `SlideReader.read_region`.
        """
        left, top = col * self._grid.step[0] * self._scale[0], row * self._grid.step[1] * self._scale[1]
        side = self._grid.tile_px
        if self._plan.resample == "none":
            reduced, missing = self._read_reduced(round(left), round(top), side, side)
            return SampledTile(reduced, missing)
        width, height = (self._grid.footprint[axis] * self._scale[axis] for axis in (0, 1))
        margin = 1 if self._plan.resample == "bilinear" else 0
        # Within the level: what lies outside has no colour that could be averaged in.
        x0, x1 = _span(left, width, margin, self._size[0])
        y0, y1 = _span(top, height, margin, self._size[1])
        source, missing = self._read_reduced(x0, y0, x1 - x0, y1 - y0)
        resample = resample_bilinear if self._plan.resample == "bilinear" else resample_area
        return SampledTile(resample(source, left - x0, top - y0, width, height, (side, side)), missing)

    def _read_reduced(self, x: int, y: int, width: int, height: int) -> tuple[NDArray[np.uint8], float]:
        """A rectangle of the reduced level: composited pixels, and the share that is missing.

        Read in bands, so that a far too fine level costs time and not memory. Where a last reduced pixel reaches
        beyond the level it is the mean of what there is.
        """
        r, level = self._plan.reduction, self._plan.level
        right, bottom = self._reader.level_sizes[level]
        band = max(1, BAND_PIXELS // (width * r * r))
        reduced = np.empty((height, width, 3), np.uint8)
        absent = seen = 0
        for top in range(0, height, band):
            rows = min(band, height - top)
            w, h = min(width * r, right - x * r), min(rows * r, bottom - (y + top) * r)
            rgba = self._reader.read_region(level, x * r, (y + top) * r, w, h)
            rgb = composite(rgba, self._reader.background)
            if (w, h) != (width * r, rows * r):
                rgb = np.pad(rgb, ((0, rows * r - h), (0, width * r - w), (0, 0)), mode="edge")
            reduced[top : top + rows] = reduce_area(rgb, r)
            absent += int(np.count_nonzero(rgba[..., 3] == 0))
            seen += w * h
        return reduced, absent / seen


def _span(start: float, length: float, margin: int, size: int) -> tuple[int, int]:
    """Whole pixels that an interval touches, with a margin, within 0..size."""
    return max(0, int(np.floor(start)) - margin), min(size, int(np.ceil(start + length)) + margin)


def make_grid(
    slide_size: tuple[int, int], mpp: tuple[float, float], plan: ReadPlan, tile_px: int, stride_px: int
) -> TileGrid:
    """The grid of a slide under a read plan; `mpp` is the slide's level-0 µm/px."""
    footprint = (tile_px * plan.mpp[0] / mpp[0], tile_px * plan.mpp[1] / mpp[1])
    return TileGrid(slide_size, tile_px, stride_px, plan.mpp, footprint)
