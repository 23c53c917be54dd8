"""Where tissue is, on the overview, and which tiles are worth running."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inference.slides.grid import TileGrid
from inference.slides.overview import Overview
from inference.slides.pen import find_ink, majority

METHOD = "chroma-ink"

MIN_CHROMA = 16
"""Brightest minus darkest channel, in grey levels, from which a bright-field pixel counts as stained."""

MIN_DARKNESS = 60
"""Grey levels below the glass from which a colourless bright-field pixel counts as tissue."""

DARK_SHARE = 1 / 3
"""Share of the glass's grey level below which tissue is dark: some 3 % of skin's epidermis, next to none elsewhere."""

DARK_BACKGROUND = 40
"""Median grey level below which a slide is taken for fluorescence: tissue is what is brighter."""

MIN_GLOW = 10
"""Grey levels above a dark background from which a pixel counts as tissue."""

GLASS = (200, 256)
"""Grey levels among which the glass of a bright-field slide is looked for."""

NOISE = 1e-6
"""Shares of a tile below this are rounding: less than a twentieth of a pixel of 224 x 224."""

STRIP_PX = 1024
"""Mask columns integrated at a time, to save memory."""

STRIP_ROWS = 256
"""Mask rows looked at a time, to save memory."""


@dataclass(frozen=True, eq=False)
class Coverage:
    """Per grid tile, row-major: float32 shares of tissue and of missing pixels, and whether damage touches it."""

    tissue: NDArray[np.float32]
    missing: NDArray[np.float32]
    damaged: NDArray[np.bool_]

    def planned(self, min_tissue: float) -> NDArray[np.bool_]:
        """Tiles to run: enough tissue, or damage, which must not hide behind the mask."""
        return (self.tissue >= min_tissue) & (self.tissue > 0) | self.damaged


@dataclass(frozen=True, eq=False)
class Appearance:
    """What the pixels of an overview look like: planes (H, W) at mask scale.

    Attributes:
        tissue: what is stained, or glows on a dark background. Fixed thresholds on colour, against the slide's own
            glass or background: a damaged region cannot move the decision anywhere else. Ink and missing pixels are
            no tissue, unreadable ones are.
        pen: ink on the glass.
        dark: neither ink nor glass, and darker than single layers of well stained tissue: folds, dense pigment.
        blank: glass, or a dark background, that was read.
        saturation: uint8, of hue-saturation-value, 255 for a pure colour.
        bright_field: whether the background is glass, and not dark as in fluorescence, where ink and folds are not
            looked for.
    """

    tissue: NDArray[np.bool_]
    pen: NDArray[np.bool_]
    dark: NDArray[np.bool_]
    blank: NDArray[np.bool_]
    saturation: NDArray[np.uint8]
    bright_field: bool


def tissue_mask(overview: Overview) -> NDArray[np.bool_]:
    """Tissue at mask scale; see `Appearance.tissue`."""
    return appearance(overview).tissue


def appearance(overview: Overview) -> Appearance:
    """Look at every pixel of an overview; memory beyond the planes does not grow with it."""
    rgb, present = overview.rgb, overview.missing < 0.5
    seen = present & ~overview.unreadable
    greys = _histogram(rgb, seen)
    bright_field = not 0 <= _median(greys) < DARK_BACKGROUND
    glass = _mode(greys, GLASS) if bright_field else _mode(greys, (0, DARK_BACKGROUND))
    pen = find_ink(rgb, glass, seen) if bright_field else np.zeros_like(seen)
    stained, dark = np.zeros_like(seen), np.zeros_like(seen)
    saturation = np.zeros(seen.shape, np.uint8)
    for strip in _strips(len(rgb)):
        brightest, darkest, total = _extremes(rgb[strip])
        saturation[strip] = np.float32(255) * (brightest - darkest) / np.maximum(brightest, 1)
        if bright_field:
            stained[strip] = (brightest - darkest >= MIN_CHROMA) | (total < 3 * (glass - MIN_DARKNESS))
            dark[strip] = total < 3 * DARK_SHARE * glass
        else:
            stained[strip] = brightest > glass + MIN_GLOW
    stained &= present & ~pen
    return Appearance(
        tissue=np.asarray(majority(stained) & ~pen | overview.unreadable),
        pen=pen,
        dark=dark & seen & ~pen,
        blank=seen & ~stained & ~pen,
        saturation=saturation,
        bright_field=bright_field,
    )


def _extremes(rgb: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.uint16]]:
    """Brightest and darkest channel of every pixel, and three times its grey level."""
    red, green, blue = np.moveaxis(rgb, 2, 0)
    brightest = np.maximum(np.maximum(red, green), blue)
    darkest = np.minimum(np.minimum(red, green), blue)
    return brightest, darkest, red.astype(np.uint16) + green + blue


def coverage(overview: Overview, mask: NDArray[np.bool_], grid: TileGrid) -> Coverage:
    """Exact area shares of each grid tile's footprint."""
    tissue = tile_means(mask, overview.scale, grid)
    missing = tile_means(overview.missing, overview.scale, grid)
    damaged = tile_means(overview.unreadable, overview.scale, grid) > 0
    return Coverage(tissue.ravel(), missing.ravel(), damaged.ravel())


def tile_means(
    plane: NDArray[np.bool_] | NDArray[np.uint8] | NDArray[np.float32],
    scale: tuple[float, float],
    grid: TileGrid,
    *,
    full: float = 1,
) -> NDArray[np.float32]:
    """Mean of a mask-scale plane over every tile's footprint, as a share of `full`: (n_rows, n_cols)."""
    if not plane.any():  # most slides miss nothing
        return np.zeros((grid.n_rows, grid.n_cols), np.float32)
    rows = _interval_means(plane, *_intervals(grid, 1, grid.n_rows, scale[1]))
    columns = _interval_means(rows.T, *_intervals(grid, 0, grid.n_cols, scale[0]))
    columns /= full
    columns[columns < NOISE] = 0
    return np.ascontiguousarray(np.minimum(columns.T, 1), np.float32)


def _intervals(
    grid: TileGrid, axis: int, count: int, scale: float
) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """Where tiles begin and end along an axis, and how long each is, in mask pixels."""
    start = grid.positions(np.arange(count), axis)
    stop = start + grid.footprint[axis]
    if grid.edge == "pad":  # the last mask pixel may reach beyond the slide, where a tile has only padding
        stop = np.minimum(stop, grid.slide_size[axis])
    return start / scale, stop / scale, grid.footprint[axis] / scale


def _interval_means(
    plane: NDArray[np.bool_] | NDArray[np.uint8] | NDArray[np.float32] | NDArray[np.float64],
    start: NDArray[np.float64],
    stop: NDArray[np.float64],
    length: float,
) -> NDArray[np.float64]:
    """Means along axis 0 over intervals of one length, from the integral with linear steps; 0 beyond the plane."""
    size, width = plane.shape
    means = np.empty((len(start), width))
    for left in range(0, width, STRIP_PX):
        part = plane[:, left : left + STRIP_PX]
        integral = np.zeros((size + 1, part.shape[1]))
        np.cumsum(part, axis=0, dtype=np.float64, out=integral[1:])
        means[:, left : left + STRIP_PX] = (_at(integral, stop) - _at(integral, start)) / length
    return means


def _at(integral: NDArray[np.float64], position: NDArray[np.float64]) -> NDArray[np.float64]:
    """Rows of an integral at positions between its rows; the same number along a stretch where it is constant."""
    position = np.clip(position, 0, len(integral) - 1)
    low = np.minimum(position.astype(np.intp), len(integral) - 2)
    return np.asarray(integral[low] + (position - low)[:, None] * (integral[low + 1] - integral[low]))


def _histogram(rgb: NDArray[np.uint8], where: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Counts of the 256 grey levels."""
    counts = np.zeros(256, np.int64)
    for strip in _strips(len(rgb)):
        total = rgb[strip].sum(axis=2, dtype=np.uint16)
        counts += np.bincount(total[where[strip]] // 3, minlength=256)
    return counts


def _strips(height: int) -> Iterator[slice]:
    """Rows of a picture, a few at a time."""
    return (slice(top, top + STRIP_ROWS) for top in range(0, height, STRIP_ROWS))


def _median(histogram: NDArray[np.integer]) -> int:
    """The (lower) median grey level, -1 of nothing."""
    reached = np.cumsum(histogram)
    return int(np.searchsorted(reached, (reached[-1] + 1) // 2)) if reached[-1] else -1


def _mode(histogram: NDArray[np.integer], window: tuple[int, int]) -> int:
    """The commonest grey level within a window, its middle where there is none."""
    part = histogram[window[0] : window[1]]
    return window[0] + int(part.argmax()) if part.any() else sum(window) // 2
