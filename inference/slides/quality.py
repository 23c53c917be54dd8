"""Quality figures: ink, folds, saturation and glass from the overview, focus from a tile's own pixels."""

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray
from pydantic import JsonValue

from inference.slides.grid import TileGrid
from inference.slides.overview import Overview
from inference.slides.tissue import Appearance, tile_means

SOME_PEN = 0.005
"""Share of a slide from which ink is worth a warning; what is pen and what is stain is said from `MUCH_PEN`."""

MUCH_PEN = 0.2
"""Share of all that is coloured; more is hardly drawn by hand."""

MUCH_DARK = 0.2
"""Share of the tissue that is dark from which a slide is worth a warning; the test slides have up to 0.1."""

PALE = 0.08
"""Mean saturation of tissue below which it is hardly stained; on the test slides fat has 0.12, others above 0.2."""

BLURRED = 0.4
"""Focus below which a tile is out of focus: sharp tiles have 0.77 or more at 20x and 40x, blurred by a Gaussian of
1.5 pixels 0.53 or less, of 2 pixels 0.34 or less."""

MIN_TISSUE = 0.5
"""Share of tissue from which a tile counts in a slide's focus: glass has none."""

_EVERY = 11
"""The Laplacian is taken in one of so many rows: no multiple of 8, where JPEG has its edges."""

_CONTRAST = 10.0
"""Squared grey levels added to the gradient, so that the noise of plain glass does not count as sharp."""


@dataclass(frozen=True, eq=False)
class TileQuality:
    """Per grid tile, row-major: float32 shares of its area that are ink, dark or blank, and its mean saturation."""

    pen: NDArray[np.float32]
    dark: NDArray[np.float32]
    saturation: NDArray[np.float32]
    blank: NDArray[np.float32]


def tile_quality(seen: Appearance, scale: tuple[float, float], grid: TileGrid) -> TileQuality:
    """Exact area means over each grid tile's footprint; `scale` is the overview's."""
    return TileQuality(
        pen=tile_means(seen.pen, scale, grid).ravel(),
        dark=tile_means(seen.dark, scale, grid).ravel(),
        saturation=tile_means(seen.saturation, scale, grid, full=255).ravel(),
        blank=tile_means(seen.blank, scale, grid).ravel(),
    )


@dataclass(frozen=True)
class SlideQuality:
    """Shares of a whole slide's area, its mean saturation and that of its tissue (0 without any)."""

    tissue: float
    pen: float
    dark: float
    blank: float
    missing: float
    unreadable: float
    saturation: float
    tissue_saturation: float
    bright_field: bool

    def to_json(self) -> dict[str, JsonValue]:
        """The figures by name, rounded to a millionth."""
        return {name: value if isinstance(value, bool) else round(value, 6) for name, value in asdict(self).items()}

    def warnings(self, *, by_model: bool = False) -> list[str]:
        """What a person should look at, in plain words; `by_model` says who found the tissue."""
        found = []
        if not self.bright_field:
            glows = "" if by_model else ": tissue is what glows"
            found.append(f"the background is dark, so the slide is taken for fluorescence{glows}")
        if self.pen >= SOME_PEN:
            found.append(f"{percent(self.pen)} of the slide is ink of a pen, which counts as no tissue")
        if self.pen >= MUCH_PEN * (self.pen + self.tissue) and self.pen >= SOME_PEN:
            found.append("if the slide is stained green, blue or red all over, this is no ink: give a --tissue-model")
        if self.dark >= MUCH_DARK * self.tissue > 0:
            found.append(f"{percent(self.dark / self.tissue)} of the tissue is very dark: folds, pigment or thick cuts")
        if self.bright_field and self.tissue > 0 and self.tissue_saturation < PALE:
            found.append("the tissue is hardly stained, or what was found is none")
        if self.unreadable:
            found.append(f"{percent(self.unreadable)} of the slide cannot be read")
        return found

    def seen(self) -> str:
        """What there is instead of tissue, the largest share first: `98 % bare glass, 2 % ink`."""
        parts = {
            "bare glass" if self.bright_field else "dark background": self.blank,
            "ink": self.pen,
            "without pixels": self.missing,
            "tissue": self.tissue,
        }
        known = sorted(((share, name) for name, share in parts.items() if share > 0), key=lambda part: -part[0])
        return ", ".join(f"{percent(share)} {name}" for share, name in known)


def slide_quality(overview: Overview, seen: Appearance, mask: NDArray[np.bool_]) -> SlideQuality:
    """Figures of the whole overview; `mask` is the tissue, whoever found it."""
    saturation = seen.saturation[mask]
    return SlideQuality(
        tissue=float(mask.mean()),
        pen=float(seen.pen.mean()),
        dark=float((seen.dark & mask).mean()),
        blank=float(seen.blank.mean()),
        missing=float(overview.missing.mean()),
        unreadable=float(overview.unreadable.mean()),
        saturation=float(seen.saturation.mean()) / 255,
        tissue_saturation=float(saturation.mean()) / 255 if saturation.size else 0.0,
        bright_field=seen.bright_field,
    )


def percent(share: float) -> str:
    """`2 %`, and two digits below one: `0.034 %`."""
    return f"{100 * share:.0f} %" if share >= 0.01 or not share else f"{100 * share:.2g} %"


def focus(rgb: NDArray[np.uint8]) -> float:
    """How sharp a tile is, whatever its stain: about 1 to 4 if sharp, below `BLURRED` if not; about 0 on bare glass.

    Mean square of the Laplacian of luma (variance of the Laplacian: Pech-Pacheco et al. 2000, DOI
    10.1109/ICPR.2000.903548) over that of its gradient, so that contrast cancels. Taken in one of 11 rows, in whole
    numbers: the same on any machine. Comparable between tiles of one pixel size.

    Args:
        rgb: uint8 (H, W, 3); of fewer than 3 x 3 pixels, the focus is 0.
    """
    height, width = rgb.shape[:2]
    if min(height, width) < 3:
        return 0.0
    every = min(_EVERY, height)
    groups = height // every
    luma = _luma(rgb[: groups * every].reshape(groups, every, width, 3)[:, :3])
    here = luma[:, 1]
    across, down = here[:, 1:] - here[:, :-1], here - luma[:, 0]
    bend = luma[:, 2, 1:-1] - here[:, 1:-1] - down[:, 1:-1]
    bend += across[:, 1:]
    bend -= across[:, :-1]
    return _energy(bend) / (_energy(across) + _energy(down) + _CONTRAST)


def _luma(rgb: NDArray[np.uint8]) -> NDArray[np.int16]:
    """ITU-R BT.601 luma, in 256ths that 16 bits just hold, then in whole grey levels."""
    luma = np.multiply(rgb[..., 0], 77, dtype=np.uint16)
    luma += np.multiply(rgb[..., 1], 150, dtype=np.uint16)
    luma += np.multiply(rgb[..., 2], 29, dtype=np.uint16)
    luma >>= 8
    return luma.view(np.int16)


def _energy(plane: NDArray[np.int16]) -> float:
    """Mean square; whole numbers, so the order in which they are added does not matter."""
    values = plane.astype(np.float64).ravel()
    return float(np.dot(values, values)) / values.size


class FocusTally:
    """Collects the focus of a slide's tiles; not safe to use from several threads."""

    def __init__(self) -> None:
        self._values: list[float] = []

    def add(self, value: float, tissue_fraction: float = 1.0) -> None:
        """Count a tile, if at least half of it is tissue."""
        if tissue_fraction >= MIN_TISSUE:
            self._values.append(value)

    def summary(self) -> dict[str, float | int | None]:
        """Tiles counted, median and 5th percentile of their focus, and the share out of focus; None where none was."""
        if not self._values:
            return {"focus_tiles": 0, "focus_median": None, "focus_p5": None, "out_of_focus_share": None}
        values = np.array(self._values)
        low, median = np.percentile(values, [5, 50])
        return {
            "focus_tiles": len(values),
            "focus_median": round(float(median), 4),
            "focus_p5": round(float(low), 4),
            "out_of_focus_share": round(float((values < BLURRED).mean()), 6),
        }
