"""Small slides written by the tests, whose pixels are known."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import tifffile
from numpy.typing import NDArray

from inference.slides.discovery import SlideRef, discover

Pixels = NDArray[np.uint8]

GLASS = (243, 243, 243)
POISON = (150, 30, 120)
"""Colour of a tile that a scripted model refuses; tissue by its chroma, and no ink of a pen."""

TILE_PX = 224
JPEG_TILE_PX = 256


def section(rows: int = 4, cols: int = 5, *, seed: int = 1, glass_cols: int = 1) -> Pixels:
    """Stained tissue with nuclei over a grid of 224-pixel tiles; the last columns are glass."""
    height, width = rows * TILE_PX + 10, cols * TILE_PX + 10
    rng = np.random.default_rng(seed)
    image = np.empty((height, width, 3), np.uint8)
    image[:] = GLASS
    width -= glass_cols * TILE_PX + 10
    tissue = image[:, : max(width, 0)]
    tissue[:] = np.array([225, 150, 190]) + rng.integers(-12, 13, tissue.shape)
    yy, xx = np.mgrid[:9, :9]
    disc = (yy - 4) ** 2 + (xx - 4) ** 2 <= 16
    for y, x in rng.random((rows * cols * 40 if tissue.size else 0, 2)):
        top, left = int(y * (height - 9)), int(x * (width - 9))
        tissue[top : top + 9, left : left + 9][disc] = (90, 60, 140)
    return image


def poisoned(image: Pixels, row: int, col: int) -> Pixels:
    """The image with one tile in the colour that a scripted model refuses."""
    image = image.copy()
    image[row * TILE_PX : (row + 1) * TILE_PX, col * TILE_PX : (col + 1) * TILE_PX] = POISON
    return image


def write_slide(path: Path, image: Pixels, *, mpp: str | None = "0.5", damaged: Sequence[tuple[int, int]] = ()) -> Path:
    """An Aperio slide of one level; lossless, or JPEG with garbage for the damaged compressed tiles (row, column)."""
    height, width = image.shape[:2]
    text = f"Aperio Image Library v12.0.0 \n{width}x{height} ({JPEG_TILE_PX}x{JPEG_TILE_PX})"
    if mpp is not None:
        text += f"|MPP = {mpp}"
    options = {"compression": "jpeg", "compressionargs": {"level": 90}} if damaged else {"compression": "zlib"}
    path.parent.mkdir(parents=True, exist_ok=True)
    with tifffile.TiffWriter(path) as tif:
        tif.write(
            image, photometric="rgb", tile=(JPEG_TILE_PX, JPEG_TILE_PX), description=text, metadata=None,
            software=False, **options,
        )  # fmt: skip
    for row, col in damaged:
        _damage(path, row * -(-width // JPEG_TILE_PX) + col)
    return path


def _damage(path: Path, index: int) -> None:
    with tifffile.TiffFile(path) as tif:
        offset, count = tif.pages[0].dataoffsets[index], tif.pages[0].databytecounts[index]
    with path.open("r+b") as stream:
        stream.seek(offset)
        stream.write(np.random.default_rng(index).bytes(count))


def ref(path: Path, *, secret: str | None = None, mpp: float | None = None) -> SlideRef:
    """The one slide at a path, as discovery finds it; `mpp` as a cohort file gives it."""
    (found,) = discover([path], secret=secret).slides
    return replace(found, mpp=mpp)
