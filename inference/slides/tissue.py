"""Where tissue is, on the overview, and which tiles are worth running."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inference.slides.grid import TileGrid
from inference.slides.overview import Overview

METHOD = "chroma"

MIN_CHROMA = 16
"""Brightest minus darkest channel, in grey levels, from which a bright-field pixel counts as stained."""

MIN_DARKNESS = 60
"""Grey levels below the glass from which a colourless bright-field pixel counts as tissue."""

DARK_BACKGROUND = 40
"""Median grey level below which a slide is taken for fluorescence: tissue is what is brighter."""

MIN_GLOW = 10
"""Grey levels above a dark background from which a pixel counts as tissue."""

GLASS = (200, 256)
"""Grey levels among which the glass of a bright-field slide is looked for."""

NOISE = 1e-6
"""Shares of a tile below this are rounding: less than a twentieth of a pixel of 224 x 224."""

STRIP_PX = 1024
"""Mask rows or columns taken at a time where that saves memory."""


@dataclass(frozen=True, eq=False)
class Coverage:
    """Per grid tile, row-major: float32 shares of tissue and of missing pixels, and whether damage touches it."""

    tissue: NDArray[np.float32]
    missing: NDArray[np.float32]
    damaged: NDArray[np.bool_]

    def planned(self, min_tissue: float) -> NDArray[np.bool_]:
        """Tiles to run: enough tissue, or damage, which must not hide behind the mask."""
        return (self.tissue >= min_tissue) & (self.tissue > 0) | self.damaged


def tissue_mask(overview: Overview) -> NDArray[np.bool_]:
    """Tissue at mask scale.

    Fixed thresholds on colour, against the slide's own glass or dark background: a damaged region
    cannot move the decision anywhere else. Missing pixels are background, unreadable ones tissue.
    """
    red, green, blue = np.moveaxis(overview.rgb, 2, 0)
    brightest = np.maximum(np.maximum(red, green), blue)
    darkest = np.minimum(np.minimum(red, green), blue)
    total = red.astype(np.uint16) + green + blue  # three times the grey level
    present = overview.missing < 0.5
    seen = _histogram(total, present & ~overview.unreadable)
    if 0 <= _median(seen) < DARK_BACKGROUND:
        mask = brightest > _mode(seen, (0, DARK_BACKGROUND)) + MIN_GLOW
    else:
        mask = (brightest - darkest >= MIN_CHROMA) | (total < 3 * (_mode(seen, GLASS) - MIN_DARKNESS))
    return np.asarray(_majority(mask & present) | overview.unreadable)


def coverage(overview: Overview, mask: NDArray[np.bool_], grid: TileGrid) -> Coverage:
    """Exact area shares of each grid tile's footprint."""
    tissue = _tile_means(mask, overview.scale, grid)
    missing = _tile_means(overview.missing, overview.scale, grid)
    damaged = _tile_means(overview.unreadable, overview.scale, grid) > 0
    return Coverage(tissue.ravel(), missing.ravel(), damaged.ravel())


def _tile_means(
    plane: NDArray[np.bool_] | NDArray[np.float32], scale: tuple[float, float], grid: TileGrid
) -> NDArray[np.float32]:
    """Mean of a mask-scale plane over every tile's footprint: (n_rows, n_cols)."""
    if not plane.any():  # most slides miss nothing
        return np.zeros((grid.n_rows, grid.n_cols), np.float32)
    rows = _interval_means(plane, grid.n_rows, grid.step[1] / scale[1], grid.footprint[1] / scale[1])
    columns = _interval_means(rows.T, grid.n_cols, grid.step[0] / scale[0], grid.footprint[0] / scale[0])
    columns[columns < NOISE] = 0
    return np.ascontiguousarray(np.minimum(columns.T, 1), np.float32)


def _interval_means(
    plane: NDArray[np.bool_] | NDArray[np.float32] | NDArray[np.float64], count: int, step: float, length: float
) -> NDArray[np.float64]:
    """Means along axis 0 over intervals [i * step, i * step + length], from the integral with linear steps."""
    size, width = plane.shape
    start = np.arange(count, dtype=np.float64) * step
    means = np.empty((count, width))
    for left in range(0, width, STRIP_PX):
        part = plane[:, left : left + STRIP_PX]
        integral = np.zeros((size + 1, part.shape[1]))
        np.cumsum(part, axis=0, dtype=np.float64, out=integral[1:])
        means[:, left : left + STRIP_PX] = (_at(integral, start + length) - _at(integral, start)) / length
    return means


def _at(integral: NDArray[np.float64], position: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rows of an integral at positions between its rows; the same number along a stretch where it is constant."""
    position = np.clip(position, 0, len(integral) - 1)
    low = np.minimum(position.astype(np.intp), len(integral) - 2)
    return np.asarray(integral[low] + (position - low)[:, None] * (integral[low + 1] - integral[low]))


def _majority(mask: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """What most of the 3 x 3 pixels around each one are: removes specks and gaps, and nothing far away moves it."""
    padded = np.pad(mask.view(np.uint8), 1, mode="edge")
    rows = padded[:-2] + padded[1:-1] + padded[2:]
    return np.asarray(rows[:, :-2] + rows[:, 1:-1] + rows[:, 2:] >= 5)


def _histogram(total: NDArray[np.uint16], where: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Counts of the 256 grey levels, from three times the grey."""
    counts = np.zeros(256, np.int64)
    for top in range(0, len(total), STRIP_PX):
        strip = slice(top, top + STRIP_PX)
        counts += np.bincount(total[strip][where[strip]] // 3, minlength=256)
    return counts


def _median(histogram: NDArray[np.integer]) -> int:
    """The (lower) median grey level, -1 of nothing."""
    reached = np.cumsum(histogram)
    return int(np.searchsorted(reached, (reached[-1] + 1) // 2)) if reached[-1] else -1


def _mode(histogram: NDArray[np.integer], window: tuple[int, int]) -> int:
    """The commonest grey level within a window, its middle where there is none."""
    part = histogram[window[0] : window[1]]
    return window[0] + int(part.argmax()) if part.any() else sum(window) // 2
