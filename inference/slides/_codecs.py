"""Decoders of compressed tiles, at full size or reduced while decoding."""

import struct
from collections.abc import Callable, Sequence
from functools import partial
from importlib.metadata import version
from typing import Protocol

import imagecodecs
import numpy as np
import simplejpeg
import tifffile
from numpy.typing import NDArray

from inference.slides.pixels import reduce_area

JPEG, JPEG2000 = 7, 33005
_NAMES = {JPEG2000: "jpeg2000", 8: "deflate", 1: "uncompressed"}  # where TIFF's own name says less
_RGB = 2
_START_OF_IMAGE = b"\xff\xd8"
_FRAME = struct.Struct(">BHHB")  # of a start-of-frame segment: bits, height, width, components
_NO_FRAMES = frozenset({0xC4, 0xC8, 0xCC})  # Huffman tables, an extension, arithmetic conditioning
_BARE = frozenset({0x01, *range(0xD0, 0xD9)})


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
        _require_frame(data, self._size)
        if reduction > 1 and not self.reduces:
            return reduce_area(self(data, 1), reduction)
        width, height = (side // reduction for side in self._size)
        rgb = np.empty((height, width, 3), np.uint8)
        # Into a buffer of the right size: nothing else is allocated for what a stream declares.
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
    """Every other codec: the whole tile, then its area mean.

    JPEG 2000 too. What its coarser wavelet levels hold is no area mean: their samples lie on the corners of the pixels
    they stand for, and are sharper, 3 to 25 grey levels off on the test slides.

    Args:
        name: see `TileDecoder`.
        decode: bytes to the samples of a tile; may raise anything.
        is_codestream: whether the bytes are JPEG 2000, whose header is tried before it is believed.
    """

    reduces = False

    def __init__(
        self,
        name: str,
        tile: tuple[int, int],
        decode: Callable[[bytes], NDArray[np.generic]],
        *,
        is_codestream: bool = False,
    ) -> None:
        self.name, self._size, self._decode, self._is_codestream = name, tile, decode, is_codestream

    def __call__(self, data: bytes, reduction: int) -> NDArray[np.uint8]:
        if self._is_codestream:
            _require_codestream(data, self._size)
        shape = (self._size[1], self._size[0], 3)
        try:
            tile = np.asarray(self._decode(data))
            if tile.ndim >= 3 and tile.shape[-3:] != shape:
                raise ValueError("another shape")
            tile = tile.reshape(shape)
        except Exception as error:  # a decoder on foreign bytes may raise anything
            raise ValueError("a tile does not decode") from error
        if tile.dtype != np.uint8:
            raise ValueError("a tile has no 8-bit samples")
        return reduce_area(tile, reduction)


def decoder_of(page: tifffile.TiffPage) -> TileDecoder:
    """The decoder of a page's tiles."""
    tile, tables = (page.tilewidth, page.tilelength), page.jpegtables or b""
    if page.compression == JPEG:
        return JpegDecoder(tile, is_rgb=page.photometric == _RGB, tables=tables)
    name = f"{_NAMES.get(page.compression, page.compression.name.lower())}, imagecodecs {version('imagecodecs')}"
    return WholeDecoder(name, tile, partial(_by_page, page.decode), is_codestream=page.compression == JPEG2000)


def jpeg2000_decoder(tile: tuple[int, int]) -> TileDecoder:
    """The decoder of JPEG 2000 codestreams, which say themselves whether their colours are transformed."""
    name = f"jpeg2000, imagecodecs {version('imagecodecs')}"
    return WholeDecoder(name, tile, imagecodecs.jpeg2k_decode, is_codestream=True)


def uncompressed_decoder(tile: tuple[int, int]) -> TileDecoder:
    """The decoder of RGB samples as they are."""
    return WholeDecoder("uncompressed", tile, partial(np.frombuffer, dtype=np.uint8))


def _by_page(decode: Callable[..., Sequence[NDArray[np.generic]]], data: bytes) -> NDArray[np.generic]:
    return decode(data, 0, _fullsize=True)[0]


def _require_frame(data: bytes, size: tuple[int, int]) -> None:
    """Refuse a JPEG that is not of a size and of three 8-bit components: decoders scale and convert what they get.

    Raises:
        ValueError: so it is, or no frame is found.
    """
    if data[:2] != _START_OF_IMAGE:
        raise ValueError("a tile is no JPEG")
    at, end = 2, len(data) - 10
    while at < end and data[at] == 0xFF:
        marker = data[at + 1]
        if 0xC0 <= marker <= 0xCF and marker not in _NO_FRAMES:
            if _FRAME.unpack_from(data, at + 4) != (8, size[1], size[0], 3):
                raise ValueError("a tile is not of the size and colours that its level declares")
            return
        # Fill bytes, and markers without a segment, are passed over.
        at += 1 if marker == 0xFF else 2 if marker in _BARE else 2 + (data[at + 2] << 8 | data[at + 3])
    raise ValueError("a tile is no whole JPEG")


def _require_codestream(data: bytes, size: tuple[int, int]) -> None:
    """Refuse a JPEG 2000 codestream that is not of a size and of three 8-bit components.

    Raises:
        ValueError: so it is; decoders allocate whatever it says.
    """
    if data[:4] != b"\xff\x4f\xff\x51" or len(data) < 49:
        raise ValueError("a tile is no JPEG 2000 codestream")
    right, bottom, left, top = struct.unpack_from(">4I", data, 8)
    depths = data[42], data[45], data[48]
    if (right - left, bottom - top) != size or data[40:42] != b"\0\3" or depths != (7, 7, 7):
        raise ValueError("a tile is not of the size and colours that its level declares")
