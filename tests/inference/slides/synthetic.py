"""Slides made in code, whose every pixel is a known function of its coordinates."""

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import tifffile
from numpy.typing import NDArray

from inference.errors import TileReadError
from inference.slides.reader import RegionReader

Pixels = NDArray[np.uint8]
Size = tuple[int, int]
"""Width and height."""

Rectangle = tuple[float, float, float, float]
"""x, y, width and height in level-0 pixels."""


class ArrayReader(RegionReader):
    """A slide in memory, of RGB or RGBA levels; `damaged` tiles (level, row, column) do not decode."""

    vendor, kind, reason = "memory", "array", "its pixels are in memory"
    quickhash: str | None = None
    objective_power: float | None = None
    icc_profile: bytes | None = None

    def __init__(
        self,
        levels: Sequence[Pixels],
        *,
        mpp: tuple[float, float] | None = (0.5, 0.5),
        background: tuple[int, int, int] = (255, 255, 255),
        tile: int = 256,
        damaged: Sequence[tuple[int, int, int]] = (),
    ) -> None:
        self._levels, self._tile, self._damaged = levels, tile, frozenset(damaged)
        self.level_sizes: tuple[Size, ...] = tuple((level.shape[1], level.shape[0]) for level in levels)
        self.mpp, self.background = mpp, background
        self._lock = threading.Lock()
        self.requests: list[tuple[int, int, int, int, int]] = []

    def read_region(self, level: int, x: int, y: int, width: int, height: int) -> Pixels:
        with self._lock:
            self.requests.append((level, x, y, width, height))
        rows = range(y // self._tile, -(-(y + height) // self._tile))
        columns = range(x // self._tile, -(-(x + width) // self._tile))
        if any((level, row, column) in self._damaged for row in rows for column in columns):
            raise TileReadError("damaged")
        assert x >= 0, "sampling stays within the level"
        assert y >= 0, "sampling stays within the level"
        part = self._levels[level][y : y + height, x : x + width]
        region = np.zeros((height, width, 4), np.uint8)
        region[: part.shape[0], : part.shape[1], 3] = 255
        region[: part.shape[0], : part.shape[1], : part.shape[2]] = part
        return region

    def stored_tile(self, level: int) -> Size:
        return (self._tile, self._tile)

    def close(self) -> None:
        """Nothing to close."""


def write_pyramid(
    path: Path,
    sizes: Sequence[Size],
    paint: Callable[[int, Size], Pixels],
    *,
    mpp: tuple[float, float] | None = None,
    description: str | None = None,
    compression: str = "zlib",
    tile: int = 256,
) -> Path:
    """A tiled TIFF pyramid that OpenSlide opens; `paint` gives the pixels of a level of a size."""
    with tifffile.TiffWriter(path) as tiff:
        for level, (width, height) in enumerate(sizes):
            tiff.write(
                paint(level, (width, height)),
                tile=(tile, tile),
                photometric="rgb",
                compression=compression,
                compressionargs={"level": 1} if compression == "zlib" else None,
                subfiletype=int(level > 0),
                resolution=(1e4 / mpp[0], 1e4 / mpp[1]) if mpp else None,
                resolutionunit="CENTIMETER" if mpp else None,
                description=description if level == 0 else None,
                metadata=None,
                software=False,
            )
    return path


def coordinates(level: int, size: Size) -> Pixels:
    """RGB that tells its own column, row and level."""
    y, x = np.mgrid[: size[1], : size[0]]
    return np.stack([x % 251, y % 241, (7 * x + 13 * y + 41 * level) % 239], axis=2).astype(np.uint8)


def dark_rectangles(slide: Size, size: Size, marks: Sequence[Rectangle]) -> Pixels:
    """A slide's black rectangles on white at any level's size, each pixel grey by the share that is covered."""
    ink = np.zeros((size[1], size[0]))
    for x, y, width, height in marks:
        columns = _covered(x, width, slide[0] / size[0], size[0])
        ink = np.maximum(ink, _covered(y, height, slide[1] / size[1], size[1])[:, None] * columns)
    grey = np.round(255 * (1 - ink)).astype(np.uint8)
    return np.repeat(grey[..., None], 3, axis=2)


def noise(size: Size, *, seed: int = 0, channels: int = 3) -> Pixels:
    """Random pixels: any misplacement shows."""
    return np.random.default_rng(seed).integers(0, 256, (size[1], size[0], channels), dtype=np.uint8)


def _covered(start: float, length: float, pixel: float, count: int) -> NDArray[np.float64]:
    edges = np.arange(count + 1) * pixel
    overlap = np.minimum(edges[1:], start + length) - np.maximum(edges[:-1], start)
    return np.asarray(np.clip(overlap, 0, None) / pixel)
