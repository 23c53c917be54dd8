"""The tiled levels of a TIFF, known by the place and length of each compressed tile."""

import logging
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

import numpy as np
import tifffile
from numpy.typing import NDArray

from inference.slides._codecs import JPEG, JPEG2000, TileDecoder, decoder_of

MAX_DIRECTORIES = 1000  # far above what a slide has
_MAX_TILE_PIXELS = 1 << 24
_MAX_EXPANSION = 4  # compressed bytes per raw byte: noise grows a little, nothing grows more

# Without, LZW, JPEG, deflate (two numbers), PackBits, JPEG 2000, Zstandard, WebP. Not JPEG 2000 as 33003, whose YCbCr
# tifffile leaves unconverted.
_COMPRESSIONS = (1, 5, JPEG, 8, 32946, 32773, JPEG2000, 50000, 50001)
_RGB, _YCBCR = 2, 6


class CompressedLevel:
    """One level of a tiled RGB TIFF; `descriptor` is the open file. Safe to read from several threads.

    Attributes:
        size: width and height of the level, which the stored image may exceed.
        tile: width and height of a compressed tile.
        decoder: how its tiles are decoded.
    """

    def __init__(self, descriptor: int, page: tifffile.TiffPage, size: tuple[int, int]) -> None:
        self._descriptor = descriptor
        self.size = size
        self.tile: tuple[int, int] = (page.tilewidth, page.tilelength)
        self.columns = -(-page.imagewidth // self.tile[0])
        self.decoder: TileDecoder = decoder_of(page)
        self._offsets = np.asarray(page.dataoffsets, np.uint64)
        self._counts: NDArray[np.uint64] = np.asarray(page.databytecounts, np.uint64)
        self._most = _MAX_EXPANSION * 3 * self.tile[0] * self.tile[1]

    def is_missing(self, column: int, row: int) -> bool:
        """Whether the file holds no bytes for a tile."""
        return not self._counts[row * self.columns + column]

    def compressed(self, column: int, row: int) -> bytes:
        """The bytes of a tile.

        Raises:
            ValueError: there are none, or far more than a tile can need.
            OSError: the file cannot be read.
        """
        index = row * self.columns + column
        count = int(self._counts[index])
        if not 0 < count <= self._most:
            raise ValueError("a tile is missing or impossibly large")
        return os.pread(self._descriptor, count, int(self._offsets[index]))

    def decode(self, column: int, row: int, reduction: int) -> NDArray[np.uint8]:
        """A whole tile as RGB, reduced; what lies beyond the level is the encoder's filling.

        Raises:
            ValueError: it is missing or does not decode.
            OSError: the file cannot be read.
        """
        return self.decoder(self.compressed(column, row), reduction)

    def heaviest(self) -> tuple[int, int]:
        """Column and row of the tile of most bytes: the one with most to see."""
        row, column = divmod(int(self._counts.argmax()), self.columns)
        return column, row

    def reduces(self, reduction: int) -> bool:
        """Whether its tiles are whole pixels at a reduction."""
        return not (self.tile[0] % reduction or self.tile[1] % reduction)


def tiled_pages(tiff: tifffile.TiffFile) -> list[tifffile.TiffPage]:
    """The tiled images of the main chain, in order."""
    return [page for page in islice(tiff.pages, MAX_DIRECTORIES) if page.is_tiled]


def is_plain(page: tifffile.TiffPage) -> bool:
    """Whether a page is tiled 8-bit RGB of a codec whose pixels are sure to be right."""
    plain = page.bitspersample == 8 and page.samplesperpixel == 3 and page.planarconfig == 1 and page.tiledepth == 1
    if not plain or page.dtype != np.uint8 or page.compression not in _COMPRESSIONS or page.fillorder != 1:
        return False
    if page.tilewidth * page.tilelength > _MAX_TILE_PIXELS:
        return False
    tiles = -(-page.imagewidth // page.tilewidth) * -(-page.imagelength // page.tilelength)
    if not len(page.dataoffsets) == len(page.databytecounts) == tiles:
        return False
    return bool(page.photometric == _RGB or (page.photometric == _YCBCR and page.compression == JPEG))


@contextmanager
def quiet() -> Iterator[None]:
    """Keep tifffile from logging in this thread what is reported here; other threads keep their log."""
    thread, logger = threading.get_ident(), logging.getLogger("tifffile")

    def elsewhere(record: logging.LogRecord) -> bool:
        return record.thread != thread

    logger.addFilter(elsewhere)
    try:
        yield
    finally:
        logger.removeFilter(elsewhere)
