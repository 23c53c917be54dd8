"""The tiled levels of a TIFF, as tifffile finds them."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice

import numpy as np
import tifffile

from inference.slides._codecs import JPEG, JPEG2000, decoder_of
from inference.slides._compressed import CompressedLevel

MAX_DIRECTORIES = 1000  # far above what a slide has
_MAX_TILE_PIXELS = 1 << 24

# Without, LZW, JPEG, deflate (two numbers), PackBits, JPEG 2000, Zstandard, WebP. Not JPEG 2000 as 33003, whose YCbCr
# tifffile leaves unconverted.
_COMPRESSIONS = (1, 5, JPEG, 8, 32946, 32773, JPEG2000, 50000, 50001)
_RGB, _YCBCR = 2, 6


def level_of(descriptor: int, page: tifffile.TiffPage, size: tuple[int, int] | None = None) -> CompressedLevel:
    """The tiles of a plain page; `size` where the level is smaller than the stored image."""
    tile = (page.tilewidth, page.tilelength)
    return CompressedLevel(
        descriptor,
        size or (page.imagewidth, page.imagelength),
        tile,
        -(-page.imagewidth // tile[0]),
        decoder_of(page),
        page.dataoffsets,
        page.databytecounts,
    )


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
