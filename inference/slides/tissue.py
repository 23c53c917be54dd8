"""Where tissue is, on the overview, and which tiles are worth running."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

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
    rgb = overview.rgb.astype(np.int16)
    grey = rgb.mean(axis=2)
    present = (overview.missing < 0.5) & ~overview.unreadable
    seen = grey[present]
    if seen.size and np.median(seen) < DARK_BACKGROUND:
        mask = rgb.max(axis=2) > _mode(seen, (0, DARK_BACKGROUND)) + MIN_GLOW
    else:
        chroma = rgb.max(axis=2) - rgb.min(axis=2)
        mask = (chroma >= MIN_CHROMA) | (grey < _mode(seen, GLASS) - MIN_DARKNESS)
    mask &= overview.missing < 0.5
    # Specks of dust and gaps of one pixel; a local filter, so that nothing far away changes.
    mask = ndimage.median_filter(mask.astype(np.uint8), size=3, mode="nearest").astype(np.bool_)
    return np.asarray(mask | overview.unreadable)


def coverage(overview: Overview, mask: NDArray[np.bool_], grid: TileGrid) -> Coverage:
    """Exact area shares of each grid tile's footprint."""
    tissue = _tile_means(mask.astype(np.float32), overview.scale, grid)
    missing = _tile_means(overview.missing, overview.scale, grid)
    damaged = _tile_means(overview.unreadable.astype(np.float32), overview.scale, grid) > 1e-6
    return Coverage(tissue.ravel(), missing.ravel(), damaged.ravel())


def _tile_means(plane: NDArray[np.float32], scale: tuple[float, float], grid: TileGrid) -> NDArray[np.float32]:
    """Mean of a mask-scale plane over every tile's footprint: (n_rows, n_cols) float32."""
    rows = _interval_means(plane.astype(np.float64), grid.n_rows, grid.step[1] / scale[1], grid.footprint[1] / scale[1])
    columns = _interval_means(rows.T, grid.n_cols, grid.step[0] / scale[0], grid.footprint[0] / scale[0])
    return np.asarray(np.clip(columns.T, 0, 1).astype(np.float32))


def _interval_means(plane: NDArray[np.float64], count: int, step: float, length: float) -> NDArray[np.float64]:
    """Means along axis 0 over intervals [i * step, i * step + length], from the integral with linear steps."""
    integral = np.concatenate([np.zeros((1, plane.shape[1])), np.cumsum(plane, axis=0)])
    start = np.arange(count, dtype=np.float64) * step

    def at(position: NDArray[np.floating]) -> NDArray[np.float64]:
        position = np.clip(position, 0, plane.shape[0])
        low = np.minimum(position.astype(np.int64), plane.shape[0] - 1)
        part = (position - low)[:, None]
        return np.asarray(integral[low] * (1 - part) + integral[low + 1] * part)

    return np.asarray((at(start + length) - at(start)) / length)


def _mode(values: NDArray[np.floating], window: tuple[int, int]) -> float:
    """The commonest grey level within a window, its middle where there is none."""
    histogram = np.bincount(np.clip(values, 0, 255).astype(np.int64).ravel(), minlength=256)[window[0] : window[1]]
    return float(window[0] + histogram.argmax()) if histogram.any() else (window[0] + window[1]) / 2
