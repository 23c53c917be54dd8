"""Decoders of compressed tiles, at full size or reduced while decoding."""

import struct
from importlib.metadata import version
from typing import Protocol

import numpy as np
import simplejpeg
import tifffile
from numpy.typing import NDArray

from inference.slides.pixels import reduce_area

JPEG, JPEG2000 = 7, 33005
_RGB = 2
_START_OF_IMAGE = b"\xff\xd8"


class TileDecoder(Protocol):
    """Decodes tiles of one size; safe to use from several threads.

    Attributes:
        name: the codec and the library that decodes it, for provenance.
        reduces: whether the decoder itself reduces; else whole tiles are reduced by the area mean.
    """

    name: str
    reduces: bool

    def __call__(self, data: bytes, reduction: int) -> NDArray[np.uint8]:
        """A tile as RGB (tile height / reduction, tile width / reduction, 3).

        Raises:
            ValueError: it does not decode, or not to the size that its level declares.
        """
        ...


class JpegDecoder:
    """Baseline and progressive JPEG through libjpeg-turbo, which decodes at 1/2, 1/4 and 1/8 by a smaller inverse DCT.

    What the slide says of the colours is put before the stream as Adobe's marker, since many streams say nothing or
    rely on what a decoder assumes: without it, Aperio's RGB is taken for YCbCr.
    """

    name = f"jpeg, simplejpeg {version('simplejpeg')}"

    def __init__(self, tile: tuple[int, int], *, is_rgb: bool, tables: bytes = b"") -> None:
        self._size, self.reduces = tile, True
        marker = b"\xff\xee\x00\x0eAdobe" + struct.pack(">HHHB", 100, 0, 0, 0 if is_rgb else 1)
        self._head = _START_OF_IMAGE + marker + tables[2:-2]

    def __call__(self, data: bytes, reduction: int) -> NDArray[np.uint8]:
        if data[:2] != _START_OF_IMAGE:
            raise ValueError("a tile is no JPEG")
        if reduction > 1 and not self.reduces:
            return reduce_area(self(data, 1), reduction)
        width, height = (side // reduction for side in self._size)
        rgb = np.empty((height, width, 3), np.uint8)
        # Into a buffer of the right size: a stream that declares more is refused before anything is allocated for it.
        decoded = simplejpeg.decode_jpeg(
            self._head + memoryview(data)[2:],
            "RGB",
            min_width=width,
            min_height=height,
            min_factor=reduction,
            buffer=rgb,
        )
        if decoded.shape != rgb.shape:
            raise ValueError("a tile is not of the size that its level declares")
        return rgb


class WholeDecoder:
    """Every other codec through tifffile: the whole tile, then its area mean.

    JPEG 2000 too. What its coarser wavelet levels hold is no area mean: their samples lie on the corners of the pixels
    they stand for, and are sharper, 3 to 25 grey levels off on the test slides.
    """

    reduces = False

    def __init__(self, page: tifffile.TiffPage) -> None:
        self._decode, self._shape = page.decode, (page.tilelength, page.tilewidth, 3)
        self._is_jpeg2000 = page.compression == JPEG2000
        self.name = f"{page.compression.name.lower()}, imagecodecs {version('imagecodecs')}"

    def __call__(self, data: bytes, reduction: int) -> NDArray[np.uint8]:
        if self._is_jpeg2000 and _size_of_codestream(data) != self._shape[1::-1]:
            raise ValueError("a tile is not of the size that its level declares")
        try:
            tile = self._decode(data, 0, _fullsize=True)[0]
        except Exception as error:  # a decoder on foreign bytes may raise anything
            raise ValueError("a tile does not decode") from error
        return reduce_area(np.asarray(tile, np.uint8).reshape(self._shape), reduction)


def decoder_of(page: tifffile.TiffPage) -> TileDecoder:
    """The decoder of a page's tiles."""
    if page.compression != JPEG:
        return WholeDecoder(page)
    tile, tables = (page.tilewidth, page.tilelength), page.jpegtables or b""
    return JpegDecoder(tile, is_rgb=page.photometric == _RGB, tables=tables)


def _size_of_codestream(data: bytes) -> tuple[int, int] | None:
    """Width and height in the header of a JPEG 2000 codestream; decoders allocate whatever it says."""
    if data[:4] != b"\xff\x4f\xff\x51" or len(data) < 24:
        return None
    right, bottom, left, top = struct.unpack_from(">4I", data, 8)
    return (right - left, bottom - top)
