"""The proof that compressed tiles read directly give the pixels that OpenSlide gives."""

import numpy as np
from numpy.typing import NDArray

from inference.errors import TileReadError
from inference.slides._compressed import CompressedLevel
from inference.slides.openslide_reader import OpenSlideReader
from inference.slides.pixels import reduce_area
from inference.slides.resolution import REDUCTIONS

MAX_DIFFERENCE = 2.0
"""Grey levels by which the fast reader may differ from OpenSlide in the mean of a region: of the area mean where it
reduces, and on levels where OpenSlide interpolates. Elsewhere not one pixel may differ."""

DIFFERENT = "its pixels differ from OpenSlide's"
"""How a disproof begins."""

_PROOF_PX = 512  # side of the regions compared


def disproof(slow: OpenSlideReader, index: int, level: CompressedLevel) -> str | None:
    """How the compressed tiles of a level differ from what OpenSlide reads; None where they agree.

    Compared are the corner, where OpenSlide never interpolates, and the tile of most bytes, that one also reduced.
    What is damaged or missing there is skipped: it is left to OpenSlide anyway.
    """
    exact = slow.downsamples[index].is_integer()
    column, row = level.heaviest()
    for place, exactly in (((0, 0), True), ((column, row), exact)):
        problem = _difference(slow, index, level, place, exactly)
        if problem:
            return problem
    level.decoder.reduces = level.decoder.reduces and _reduces_well(level, column, row)
    return None


def _difference(
    slow: OpenSlideReader, index: int, level: CompressedLevel, place: tuple[int, int], exactly: bool
) -> str | None:
    x, y = (i * side for i, side in zip(place, level.tile, strict=True))
    width, height = (
        min(side, _PROOF_PX, whole - at) for side, whole, at in zip(level.tile, level.size, (x, y), strict=True)
    )
    try:
        fast = level.decode(*place, 1)[:height, :width]
        theirs = slow.read_region(index, x, y, width, height)
    except (ValueError, OSError, TileReadError):
        return None
    if theirs[..., 3].min() < 255:
        return None
    off = np.abs(fast.astype(np.int16) - theirs[..., :3])
    if (off.max() > 0) if exactly else (off.mean() > _interpolated_bound(theirs)):
        return f"{DIFFERENT} by {off.mean():.1f} grey levels in the mean at ({x}, {y})"
    return None


def _interpolated_bound(rgba: NDArray[np.uint8]) -> float:
    """What interpolating between neighbours can do: half a step along each axis."""
    rgb = rgba[..., :3].astype(np.int16)
    steps = sum(float(np.abs(np.diff(rgb, axis=axis)).mean()) if rgb.shape[axis] > 1 else 0.0 for axis in (0, 1))
    return MAX_DIFFERENCE + steps / 2


def _reduces_well(level: CompressedLevel, column: int, row: int) -> bool:
    """Whether the decoder's reductions of a tile are near its area mean; of noise or fine lines they may not be."""
    try:
        whole = level.decode(column, row, 1)
        return all(
            np.abs(level.decode(column, row, r).astype(np.int16) - reduce_area(whole, r)).mean() <= MAX_DIFFERENCE
            for r in REDUCTIONS[1:]
            if level.reduces(r)
        )
    except (ValueError, OSError):
        return True  # damaged there: nothing to compare
