"""The levels of a DICOM series by the frames of its files: one file a level, one frame a tile."""

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from inference.slides._codecs import JpegDecoder, TileDecoder, jpeg2000_decoder, uncompressed_decoder
from inference.slides._compressed import CompressedLevel
from inference.slides._files import open_regular
from inference.slides._tiff_refusal import MAX_TILE_PX
from inference.slides.dicom import HEADER_BYTES

if TYPE_CHECKING:
    from pydicom.dataset import FileDataset

_DEFLATED = b"1.2.840.10008.1.2.1.99"
_UNCOMPRESSED, _JPEG = "1.2.840.10008.1.2.1", "1.2.840.10008.1.2.4.50"
_JPEG2000 = ("1.2.840.10008.1.2.4.90", "1.2.840.10008.1.2.4.91")

_IMAGE_TYPE, _ORGANIZATION, _FRAMES, _PHOTOMETRIC = 0x00080008, 0x00209311, 0x00280008, 0x00280004
_ROWS, _COLUMNS, _MATRIX_COLUMNS, _MATRIX_ROWS = 0x00280010, 0x00280011, 0x00480006, 0x00480007
_CONCATENATION, _EXTENDED_TABLE, _PIXEL_DATA = 0x00209162, 0x7FE00001, 0x7FE00010
# Samples per pixel, planar configuration, bits allocated, bits stored, high bit, signedness.
_EIGHT_BIT_RGB = {0x00280002: 3, 0x00280006: 0, 0x00280100: 8, 0x00280101: 8, 0x00280102: 7, 0x00280103: 0}
_PLANES = (0x00480302, 0x00480303)  # number of optical paths, of focal planes: one where they are not said
_TAGS = [
    *(_IMAGE_TYPE, _ORGANIZATION, _FRAMES, _PHOTOMETRIC, _ROWS, _COLUMNS, _MATRIX_COLUMNS, _MATRIX_ROWS),
    *(_CONCATENATION, _EXTENDED_TABLE, *_EIGHT_BIT_RGB, *_PLANES),
]

_UNDEFINED = 0xFFFFFFFF
_ITEM, _SEQUENCE_END = b"\xfe\xff\x00\xe0", b"\xfe\xff\xdd\xe0"  # little-endian, as all encapsulated pixels are
_ITEM_HEAD = 8
_ITEMS_TRIED = 16
_MAX_FRAMES = 1 << 24  # a million by a million pixels in tiles of 256


class _EncapsulatedLevel(CompressedLevel):
    """A level whose tiles are DICOM items: places and lengths are those of whole items, whose head proves each."""

    def compressed(self, column: int, row: int) -> bytes:
        """See `CompressedLevel.compressed`; also a ValueError where no single item fills the place."""
        item = super().compressed(column, row)
        if item[:4] != _ITEM or int.from_bytes(item[4:_ITEM_HEAD], "little") != len(item) - _ITEM_HEAD:
            raise ValueError("no frame lies where the offset table says")
        return item[_ITEM_HEAD:]


@dataclass(frozen=True)
class _Volume:
    """One file of the series that holds pixels of the slide; its file is open.

    Attributes:
        start, length: where the value of its pixel data begins, and the bytes that it claims.
    """

    descriptor: int
    header: "FileDataset"
    start: int
    length: int

    @property
    def file_bytes(self) -> int:
        return os.fstat(self.descriptor).st_size

    @property
    def size(self) -> tuple[int, int]:
        return self.number(_MATRIX_COLUMNS), self.number(_MATRIX_ROWS)

    @property
    def tile(self) -> tuple[int, int]:
        return self.number(_COLUMNS), self.number(_ROWS)

    @property
    def syntax(self) -> str:
        return str(self.header.file_meta.get("TransferSyntaxUID", ""))

    def number(self, tag: int, default: int = -1) -> int:
        """A whole number, binary or in digits; the default where there is none."""
        value = _raw(self.header, tag)
        if tag == _FRAMES:
            text = value.decode("ascii", "replace").strip(" \0")
            return int(text) if text.isdecimal() else default
        return int.from_bytes(value, "little") if value else default

    def text(self, tag: int) -> str:
        return _raw(self.header, tag).decode("ascii", "replace").strip(" \0")


def dicom_levels(
    files: Sequence[Path], sizes: Sequence[tuple[int, int]], held: ExitStack
) -> Iterator[CompressedLevel | str]:
    """The tiles of each level, or why they cannot be read directly.

    Args:
        files: those of one series, in any order.
        sizes: width and height of each level.
        held: keeps open the files of the levels.

    Raises:
        OSError: a file cannot be read.
    """
    volumes = [volume for path in files if (volume := _volume_of(path, held))]
    for size in sizes:
        same = [volume for volume in volumes if volume.size == size]
        yield _level_of(same[0]) if len(same) == 1 else f"{len(same)} files of the series hold an image of its size"


def _volume_of(path: Path, held: ExitStack) -> _Volume | None:
    """A file of the series with its header, kept open; None where it is a label, an overview or broken."""
    with ExitStack() as opened:
        descriptor = opened.enter_context(open_regular(path)).fileno()
        volume = _read_header(descriptor)
        if volume is None or "VOLUME" not in volume.text(_IMAGE_TYPE).split("\\"):
            return None
        held.push(opened.pop_all())
        return volume


def _read_header(descriptor: int) -> _Volume | None:
    """What comes before the pixels; None where that is broken or longer than headers are."""
    for size in HEADER_BYTES:
        data = os.pread(descriptor, size, 0)
        if _DEFLATED in data[:4096]:
            return None  # unpacking has no bound
        found = _parsed(data)
        if found is not None:
            return _Volume(descriptor, *found)
        if len(data) < size:
            break
    return None


def _parsed(data: bytes) -> "tuple[FileDataset, int, int] | None":
    """The elements of `_TAGS`, and where the pixel data begin and what they claim; None unless they begin in `data`."""
    from pydicom.filereader import read_partial  # a third of a second, and most slides are no DICOM

    stream, place = io.BytesIO(data), (0, 0)

    def at_pixels(tag: int, _vr: str | None, length: int) -> bool:
        nonlocal place
        if tag == _PIXEL_DATA:
            place = (stream.tell(), length)
        return tag >= _PIXEL_DATA

    try:
        header = read_partial(stream, stop_when=at_pixels, specific_tags=list(_TAGS))
    except Exception:  # noqa: BLE001 - a parser on foreign bytes may raise anything
        return None
    return (header, *place) if place[0] else None


def _raw(header: "FileDataset", tag: int) -> bytes:
    """An element's bytes: pydicom's own conversion warns about values that are merely too long."""
    value = header.get_item(tag).value if tag in header else None
    return value if isinstance(value, bytes) else b""


def _level_of(volume: _Volume) -> CompressedLevel | str:
    problem = _unusual(volume)
    if problem:
        return problem
    decoder = _decoder_of(volume)
    if decoder is None:
        return f"its frames are in no known codec ({volume.syntax}, {volume.text(_PHOTOMETRIC)})"
    columns = -(-volume.size[0] // volume.tile[0])
    if volume.syntax == _UNCOMPRESSED:
        places = _plain_frames(volume)
        sort = CompressedLevel
    else:
        places = _encapsulated_frames(volume)
        sort = _EncapsulatedLevel
    if isinstance(places, str):
        return places
    return sort(volume.descriptor, volume.size, volume.tile, columns, decoder, *places)


def _unusual(volume: _Volume) -> str | None:
    """Why the frames of a file are not the tiles of one level, side by side, row by row and in 8-bit RGB."""
    (width, height), (tile_w, tile_h) = volume.size, volume.tile
    tiles = -(-width // max(1, tile_w)) * -(-height // max(1, tile_h))
    if min(width, height, tile_w, tile_h) < 1 or tile_w * tile_h > MAX_TILE_PX or tiles > _MAX_FRAMES:
        return "its header gives impossible sizes"
    if _raw(volume.header, _CONCATENATION):
        return "it is split into several files"
    if any(volume.number(tag, 1) != 1 for tag in _PLANES):
        return "it has several focal planes or optical paths"
    if volume.text(_ORGANIZATION) != "TILED_FULL":
        return "its frames are not stored as a full grid of tiles"
    if any(volume.number(tag) != value for tag, value in _EIGHT_BIT_RGB.items()):
        return "its frames are not 8-bit RGB"
    frames = volume.number(_FRAMES)
    return None if frames == tiles else f"it has {tiles:,} tiles, but its header counts {frames:,} frames"


def _decoder_of(volume: _Volume) -> TileDecoder | None:
    photometric = volume.text(_PHOTOMETRIC)
    if volume.syntax == _JPEG and photometric in ("RGB", "YBR_FULL", "YBR_FULL_422"):
        return JpegDecoder(volume.tile, is_rgb=photometric == "RGB")
    if volume.syntax in _JPEG2000 and photometric in ("RGB", "YBR_ICT", "YBR_RCT"):
        return jpeg2000_decoder(volume.tile)
    if volume.syntax == _UNCOMPRESSED and photometric == "RGB":
        return uncompressed_decoder(volume.tile)
    return None


_Places = tuple[NDArray[np.uint64], NDArray[np.uint64]]
"""Where each frame begins, and its length in bytes; items with their head."""


def _plain_frames(volume: _Volume) -> _Places | str:
    """Frames that follow each other without a word between them."""
    frame, frames = 3 * volume.tile[0] * volume.tile[1], volume.number(_FRAMES)
    whole = frame * frames
    if volume.length not in (whole, whole + 1) or volume.start + whole > volume.file_bytes:
        return "its pixel data are not as long as its frames"
    at = np.uint64(volume.start) + np.uint64(frame) * np.arange(frames, dtype=np.uint64)
    return at, np.full(frames, frame, np.uint64)


def _encapsulated_frames(volume: _Volume) -> _Places | str:
    """Frames that are an item each, by the offset table, or else item after item.

    The table is believed where its offsets rise from the first item to the last, the items tried begin and end there,
    and nothing follows the last. Every other item is tried when it is read.
    """
    frames, items = volume.number(_FRAMES), _Items(volume.descriptor, volume.file_bytes)
    length = items.length(volume.start) if volume.length == _UNDEFINED else None
    if length is None:
        return "its pixel data do not begin with an offset table"
    first = volume.start + _ITEM_HEAD + length
    extended = _raw(volume.header, _EXTENDED_TABLE)
    if not (length or extended):
        return items.in_turn(first, frames)
    table, entry = extended, 8
    if length:
        entry = 4
        table = os.pread(volume.descriptor, min(length, entry * frames + 1), volume.start + _ITEM_HEAD)
    found = None
    if len(table) == entry * frames:
        found = items.by_table(first, np.frombuffer(table, f"<u{entry}").astype(np.uint64))
    return found or "its offset table does not lead to its frames"


class _Items:
    """The items of encapsulated pixel data in an open file of so many bytes."""

    def __init__(self, descriptor: int, file_bytes: int) -> None:
        self._descriptor, self._end = descriptor, file_bytes

    def length(self, at: int) -> int | None:
        """Bytes of the item at an offset, without its head; None where none begins there, or it leaves the file."""
        head = os.pread(self._descriptor, _ITEM_HEAD, at)
        length = int.from_bytes(head[4:], "little")
        whole = len(head) == _ITEM_HEAD and at + _ITEM_HEAD + length <= self._end
        return length if whole and head[:4] == _ITEM else None

    def by_table(self, first: int, table: NDArray[np.uint64]) -> _Places | None:
        """The frames at these offsets from the first item; None where the items tried do not lie so."""
        if table[0] or (table[1:] <= table[:-1]).any() or int(table[-1]) >= self._end:
            return None
        last = first + int(table[-1])
        length = self.length(last)
        if length is None or not self._end_at(last + _ITEM_HEAD + length):
            return None
        offsets = np.uint64(first) + table
        counts = np.diff(offsets, append=np.uint64(last + _ITEM_HEAD + length))
        tried = {int(counts.argmax()), *np.linspace(0, len(table) - 1, _ITEMS_TRIED).astype(int).tolist()}
        if any(self.length(int(offsets[index])) != int(counts[index]) - _ITEM_HEAD for index in tried):
            return None
        return offsets, counts

    def in_turn(self, at: int, frames: int) -> _Places | str:
        """So many frames, one item after the other; OpenSlide too reads every head where there is no table."""
        offsets, counts = np.empty(frames, np.uint64), np.empty(frames, np.uint64)
        for index in range(frames):
            length = self.length(at)
            if length is None:
                return f"it holds {index:,} of its {frames:,} frames"
            offsets[index], counts[index] = at, _ITEM_HEAD + length
            at += _ITEM_HEAD + length
        return (offsets, counts) if self._end_at(at) else "it holds more items than frames"

    def _end_at(self, at: int) -> bool:
        """Whether the items end at an offset."""
        return os.pread(self._descriptor, 4, at) == _SEQUENCE_END
