"""Levels of tiled TIFFs, pixel for pixel.

OpenSlide takes level-0 coordinates only. On a level whose downsample is no whole number nearly every read therefore
begins between two pixels, and OpenSlide interpolates: up to 52 grey levels off on the test slides.
"""

import functools
import logging
import os
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import numpy as np
import tifffile
from numpy.typing import NDArray

from inference.slides._files import open_regular, source_lost

_MAX_DIRECTORIES = 1000  # far above what a slide has
_MAX_TILE_PIXELS = 1 << 24
_MAX_EXPANSION = 4  # compressed bytes per raw byte: noise grows a little, nothing grows more
_CACHE_BYTES = 16 << 20  # decoded tiles kept per level: neighbouring reads share them

# What tifffile decodes to the same pixels as OpenSlide. Not 33003, whose YCbCr it leaves unconverted.
_JPEG, _JPEG2000, _COMPRESSIONS = 7, 33005, (1, 5, 7, 8, 32946, 33005)
_RGB, _YCBCR = 2, 6


class TiffLevel:
    """One level of a tiled RGB TIFF. Safe to read from several threads."""

    def __init__(self, path: Path, page: tifffile.TiffPage) -> None:
        self._path, self._decode = path, page.decode
        self.size: tuple[int, int] = (page.imagewidth, page.imagelength)
        self._tile = (page.tilewidth, page.tilelength)
        self._tables = page.jpegtables
        self._sized = page.compression in (_JPEG, _JPEG2000)
        self._offsets, self._counts = page.dataoffsets, page.databytecounts
        tiles = max(4, _CACHE_BYTES // (3 * self._tile[0] * self._tile[1]))
        self._decoded = functools.lru_cache(maxsize=tiles)(self._decode_tile)

    def read(self, x: int, y: int, width: int, height: int) -> NDArray[np.uint8]:
        """RGBA pixels (height, width, 4); alpha 0 beyond the level.

        Raises:
            ValueError: a tile is missing or does not decode.
            OSError: the file cannot be read.
        """
        rgba = np.zeros((height, width, 4), np.uint8)
        right, bottom = min(x + width, self.size[0]), min(y + height, self.size[1])
        tile_w, tile_h = self._tile
        for row in range(max(y, 0) // tile_h, -(-bottom // tile_h)):
            for col in range(max(x, 0) // tile_w, -(-right // tile_w)):
                left, top = col * tile_w, row * tile_h
                x0, x1, y0, y1 = max(x, left), min(right, left + tile_w), max(y, top), min(bottom, top + tile_h)
                part = self._decoded(row, col)[y0 - top : y1 - top, x0 - left : x1 - left]
                rgba[y0 - y : y1 - y, x0 - x : x1 - x, :3] = part
                rgba[y0 - y : y1 - y, x0 - x : x1 - x, 3] = 255
        return rgba

    def _decode_tile(self, row: int, col: int) -> NDArray[np.uint8]:
        index = row * -(-self.size[0] // self._tile[0]) + col
        count = self._counts[index]
        if not 0 < count <= _MAX_EXPANSION * 3 * self._tile[0] * self._tile[1]:
            raise ValueError("a tile is missing or impossibly large")
        with open_regular(self._path) as file:
            data = os.pread(file.fileno(), count, self._offsets[index])
        if self._sized and _declared_size(data) != self._tile:
            raise ValueError("a tile is not of the size that its level declares")
        try:
            pixels = self._decode(data, index, jpegtables=self._tables, _fullsize=True)[0]
        except Exception as error:
            raise ValueError("a tile does not decode") from error
        return np.asarray(pixels, np.uint8).reshape(self._tile[1], self._tile[0], 3)


def tiff_level(path: Path, size: tuple[int, int]) -> TiffLevel | None:
    """The tiled level of that width and height, if tifffile is sure to decode it as OpenSlide does.

    Raises:
        OSError: the mount is lost or this process exhausted; that says nothing of the file.
    """
    try:
        with _quiet(), open_regular(path) as file, tifffile.TiffFile(file, name="slide") as tiff:
            first = islice(tiff.pages, _MAX_DIRECTORIES)
            pages = [page for page in first if page.is_tiled and (page.imagewidth, page.imagelength) == size]
            return TiffLevel(path, pages[0]) if len(pages) == 1 and _decodable(pages[0]) else None
    except Exception as error:  # a parser on foreign bytes may raise anything; OpenSlide decides what is damage
        if isinstance(error, OSError) and source_lost(error):
            raise
        return None


def _decodable(page: tifffile.TiffPage) -> bool:
    plain = page.bitspersample == 8 and page.samplesperpixel == 3 and page.planarconfig == 1 and page.tiledepth == 1
    if not plain or page.dtype != np.uint8 or page.compression not in _COMPRESSIONS or page.fillorder != 1:
        return False
    if page.tilewidth * page.tilelength > _MAX_TILE_PIXELS:
        return False
    tiles = -(-page.imagewidth // page.tilewidth) * -(-page.imagelength // page.tilelength)
    if not len(page.dataoffsets) == len(page.databytecounts) == tiles:
        return False
    return bool(page.photometric == _RGB or (page.photometric == _YCBCR and page.compression == _JPEG))


def _declared_size(data: bytes) -> tuple[int, int] | None:
    """Width and height in the header of a JPEG or JPEG 2000 stream; decoders allocate whatever it says."""
    if data[:4] == b"\xff\x4f\xff\x51":
        right, bottom, left, top = struct.unpack_from(">4I", data.ljust(24, b"\0"), 8)
        return (right - left, bottom - top)
    at = 2
    while data[at : at + 1] == b"\xff" and at + 9 <= len(data):
        marker, length, height, width = struct.unpack_from(">xBHxHH", data, at)
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            return (width, height)
        at += 2 + length
    return None


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep tifffile from logging in this thread what is reported here; other threads keep their log."""
    thread, logger = threading.get_ident(), logging.getLogger("tifffile")

    def elsewhere(record: logging.LogRecord) -> bool:
        return record.thread != thread

    logger.addFilter(elsewhere)
    try:
        yield
    finally:
        logger.removeFilter(elsewhere)
