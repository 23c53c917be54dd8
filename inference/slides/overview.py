"""A slide at a glance: a low-resolution picture of all of it, read block by block past any damage."""

import math
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from inference.errors import TileReadError
from inference.slides.pixels import block_mean, edge_padded, reduce_area
from inference.slides.reader import Pixels, SlideReader
from inference.slides.resolution import REDUCTIONS

A = TypeVar("A", bound=np.generic)

MASK_MPP = 8.0
"""µm per mask pixel aimed at: a 224-pixel tile at 0.5 µm/px is 14 mask pixels wide."""

MAX_MASK_PIXELS = 1 << 26
"""Mask pixels at most (64 x 64 mm at 8 µm), below what Pillow takes for a bomb; larger slides get a coarser mask."""

THUMBNAIL_PX = 1536
"""Longest side of the thumbnail, at most."""

BLOCK_PX = 2048
"""Side of the blocks that are read, in pixels of the level read; a power of two."""


@dataclass(frozen=True, eq=False)
class Overview:
    """All of a slide, small.

    Attributes:
        rgb: uint8 (H, W, 3) at mask scale, composited on the slide's background.
        missing: float32 (H, W), share of each mask pixel without pixels in the slide (alpha 0).
        unreadable: bool (H, W), mask pixels touched by compressed tiles that do not decode.
        scale: level-0 pixels per mask pixel, x and y.
        thumbnail: uint8 (h, w, 3), the same view at another size, for people.
    """

    rgb: NDArray[np.uint8]
    missing: NDArray[np.float32]
    unreadable: NDArray[np.bool_]
    scale: tuple[float, float]
    thumbnail: NDArray[np.uint8]


def read_overview(reader: SlideReader, mpp: tuple[float, float]) -> Overview:
    """Read the whole slide once, from the coarsest level that is still fine enough for the mask, reduced as it comes.

    `mpp` is the level-0 µm/px. Memory does not grow with the level read, only with the results.
    """
    level = _choose_level(reader, max(mpp))
    width, height = reader.level_sizes[level]
    down = (reader.level_sizes[0][0] / width, reader.level_sizes[0][1] / height)
    factor = _mask_factor((width, height), MASK_MPP / (max(mpp) * max(down)))
    shrink = _power_of_two(max(width, height) / THUMBNAIL_PX, up=True)
    reduction = min(factor, shrink, max(REDUCTIONS))
    size = (-(-width // reduction), -(-height // reduction))
    canvas = _Canvas((size[1], size[0]), factor // reduction, shrink // reduction)
    side = BLOCK_PX // reduction
    for y in range(0, size[1], side):
        for x in range(0, size[0], side):
            block = (x, y, min(side, size[0] - x), min(side, size[1] - y))
            try:
                canvas.paint(block, reader.read_reduced(level, reduction, *block))
            except TileReadError:
                _paint_readable_parts(canvas, reader, (level, reduction), block)
    scale = (down[0] * factor, down[1] * factor)
    return Overview(canvas.rgb, canvas.missing, canvas.unreadable, scale, canvas.thumbnail)


def _paint_readable_parts(
    canvas: "_Canvas", reader: SlideReader, reduced: tuple[int, int], block: tuple[int, int, int, int]
) -> None:
    """Read a damaged block again by the slide's own compressed tiles, so that one bad tile costs only itself."""
    level, reduction = reduced
    tile_w, tile_h = (math.lcm(side, reduction) // reduction for side in reader.stored_tile(level))
    x0, y0, width, height = block
    rgb = np.zeros((height, width, 3), np.uint8)
    rgb[:] = reader.background
    missing = np.ones((height, width), np.float32)
    for top in range(y0 // tile_h * tile_h, y0 + height, tile_h):
        for left in range(x0 // tile_w * tile_w, x0 + width, tile_w):
            x, y = max(left, x0), max(top, y0)
            w, h = min(left + tile_w, x0 + width) - x, min(top + tile_h, y0 + height) - y
            here = slice(y - y0, y - y0 + h), slice(x - x0, x - x0 + w)
            try:
                part = reader.read_reduced(level, reduction, x, y, w, h)
            except TileReadError:
                canvas.mark_unreadable((x, y, w, h))
            else:
                rgb[here], missing[here] = part.rgb, 0 if part.missing is None else part.missing
    canvas.paint(block, Pixels(rgb, missing))


class _Canvas:
    """Collects blocks of a reduced level into the mask-scale picture and the thumbnail."""

    def __init__(self, size: tuple[int, int], factor: int, shrink: int) -> None:
        self._factor, self._shrink = factor, shrink
        mask, small = (tuple(-(-side // f) for side in size) for f in (factor, shrink))
        self.rgb = np.zeros((*mask, 3), np.uint8)
        self.missing = np.zeros(mask, np.float32)
        self.unreadable = np.zeros(mask, np.bool_)
        self.thumbnail = np.zeros((*small, 3), np.uint8)

    def paint(self, block: tuple[int, int, int, int], pixels: Pixels) -> None:
        x, y = block[:2]
        _paste(self.rgb, x // self._factor, y // self._factor, _reduce(pixels.rgb, self._factor))
        _paste(self.thumbnail, x // self._shrink, y // self._shrink, _reduce(pixels.rgb, self._shrink))
        if pixels.missing is not None:
            share = block_mean(edge_padded(pixels.missing, self._factor), self._factor)
            _paste(self.missing, x // self._factor, y // self._factor, share)

    def mark_unreadable(self, region: tuple[int, int, int, int]) -> None:
        x, y, width, height = region
        f = self._factor
        self.unreadable[y // f : -(-(y + height) // f), x // f : -(-(x + width) // f)] = True


def _choose_level(reader: SlideReader, mpp: float) -> int:
    """The coarsest level that is not coarser than the mask and large enough for the thumbnail; else level 0."""
    width = reader.level_sizes[0][0]
    fine = [
        k
        for k, size in enumerate(reader.level_sizes)
        if mpp * width / size[0] <= MASK_MPP and max(size) >= THUMBNAIL_PX
    ]
    return max(fine, key=lambda k: width / reader.level_sizes[k][0]) if fine else 0


def _mask_factor(size: tuple[int, int], wanted: float) -> int:
    """Level pixels per mask pixel: at most as many as wanted, but so many that the mask keeps its bound."""
    factor = _power_of_two(wanted)
    while factor < BLOCK_PX and math.prod(-(-side // factor) for side in size) > MAX_MASK_PIXELS:
        factor *= 2
    return factor


def _power_of_two(ratio: float, *, up: bool = False) -> int:
    """The power of two next to a ratio, at least 1 and at most a block; below it, or above it with `up`."""
    power = 1
    while power < BLOCK_PX and (power < ratio if up else power * 2 <= ratio):
        power *= 2
    return power


def _reduce(rgb: NDArray[np.uint8], factor: int) -> NDArray[np.uint8]:
    return reduce_area(edge_padded(rgb, factor), factor)


def _paste(target: NDArray[A], x: int, y: int, patch: NDArray[A]) -> None:
    target[y : y + patch.shape[0], x : x + patch.shape[1]] = patch
