"""What a TIFF's own tables claim: where its data end, how large its images are, what their pixels mean."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from inference.slides._files import open_regular

# Enough for any slide, few enough for a damaged header.
_MAX_DIRECTORIES, _MAX_ENTRIES, _MAX_PIECES, _MAX_NUMBERS = 1000, 1000, 1 << 23, 16

_MAX_SUB_DIRECTORIES, _HEADER_BYTES = 64, 8
_CLASSIC_BYTES, _MAX_NDPI_BYTES = 1 << 32, 1 << 38  # what plain offsets reach; what those of an NDPI may be believed

# NumPy's types for those of TIFF that matter; a rational is eight bytes.
_TYPES = {1: "u1", 2: "u1", 3: "u2", 4: "u4", 5: "u8", 7: "u1", 12: "f8", 13: "u4", 16: "u8", 18: "u8"}

_WIDTH, _LENGTH, _TILE_WIDTH, _TILE_LENGTH, _SUB_DIRECTORIES = 256, 257, 322, 323, 330
_SUBFILE, _BITS, _PHOTOMETRIC, _ORIENTATION, _SAMPLES, _EXTRA, _FORMATS = 254, 258, 262, 274, 277, 338, 339
_NDPI = 65420  # in every directory of an NDPI slide
_PIECES = ((273, 279), (324, 325))  # tags with the offsets and lengths of strips and of tiles
_TABLES = {tag for pair in _PIECES for tag in pair} | {_SUB_DIRECTORIES}
_NUMBERS = {_WIDTH, _LENGTH, _TILE_WIDTH, _TILE_LENGTH, _SUBFILE, _BITS, _PHOTOMETRIC, _ORIENTATION, _SAMPLES}
_NUMBERS |= {_EXTRA, _FORMATS, _NDPI}

_Values = dict[int, NDArray[np.integer]]


@dataclass(frozen=True)
class TiffDirectory:
    """What a directory says of its image, with the defaults of TIFF and libtiff.

    Attributes:
        size: width and height.
        tile: width and height of its tiles; None where it is stored in strips.
        pieces: strips or tiles in its table of offsets.
        data: bytes of its strips or tiles; bytes that several share count once.
        in_header: strips or tiles that claim to begin where the file's own header is.
        reduced: it calls itself a smaller version of another image.
        bits, formats: bits and sample format per channel; 1 is unsigned.
        extra: the meaning of the channels beyond those of the colour.
    """

    size: tuple[int, int]
    tile: tuple[int, int] | None
    pieces: int
    data: int
    in_header: int
    reduced: bool
    orientation: int
    photometric: int
    samples: int
    bits: tuple[int, ...]
    formats: tuple[int, ...]
    extra: tuple[int, ...]


@dataclass(frozen=True)
class TiffClaims:
    """What the directories of a TIFF say, as far as they can be read.

    Attributes:
        size: bytes of the file.
        end: the last byte that the tables ask for.
        directories: those of the main chain; `end` heeds the others too.
        circular: a directory follows that was there before.
    """

    size: int
    end: int = 0
    directories: tuple[TiffDirectory, ...] = ()
    circular: bool = False


def read_claims(path: Path) -> TiffClaims | None:
    """The claims of a classic or big TIFF, in bounded time and memory; None for what is none.

    Of a classic TIFF past 4 GiB (NDPI, whose offsets are longer there) only where its first directory begins.

    Raises:
        OSError: the file cannot be read.
    """
    with open_regular(path) as file:
        head, size = file.read(16), os.fstat(file.fileno()).st_size
        if head[:4] not in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
            return None
        walk = _Walk(file, size, "<" if head[:2] == b"II" else ">", big=b"+" in head[2:4])
        if not walk.big and (path.suffix.lower() == ".ndpi" or size >= _CLASSIC_BYTES):
            first = walk.number(head[4:12])
            if max(first, size) >= _CLASSIC_BYTES and first < _MAX_NDPI_BYTES:
                return TiffClaims(size, first)
        return walk.claims(walk.number(head[8:16] if walk.big else head[4:8]))


@dataclass(frozen=True)
class _Walk:
    """Goes from directory to directory; each is visited once."""

    file: BinaryIO
    size: int
    order: Literal["<", ">"]
    big: bool

    def number(self, data: bytes) -> int:
        return int.from_bytes(data, "little" if self.order == "<" else "big")

    def claims(self, first: int) -> TiffClaims:
        """The claims of the directory at an offset, of those after it, and of those that they hold."""
        end, seen, todo = first, set[int](), [(first, True)]
        directories, circular = [], False
        while todo and len(seen) < _MAX_DIRECTORIES:
            at, in_chain = todo.pop()
            end, circular = max(end, at), circular or (in_chain and at in seen)
            if at in seen or not 0 < at < self.size:
                continue
            seen.add(at)
            values, reach, following = self._directory(at)
            end = max(end, reach, *(_reach(values.get(offsets), values.get(lengths)) for offsets, lengths in _PIECES))
            if in_chain:
                directories.append(_described(values))
            todo += [(int(inner), False) for inner in values.get(_SUB_DIRECTORIES, ())[:_MAX_SUB_DIRECTORIES]]
            todo.append((following, in_chain))
        return TiffClaims(self.size, end, tuple(directories), circular)

    def _directory(self, at: int) -> tuple[_Values, int, int]:
        """The values that matter, the last byte that the entries ask for, and where the next directory is."""
        word, entry, count = (8, 20, 8) if self.big else (4, 12, 2)
        self.file.seek(at)
        entries = min(self.number(self.file.read(count)), _MAX_ENTRIES)
        data = self.file.read(entries * entry + word)
        found, end = _Values(), at + count + entries * entry + word
        for start in range(0, min(entries * entry, len(data) - entry + 1), entry):
            tag, values, reach = self._entry(data[start : start + entry])
            end = max(end, reach)
            if values is not None:
                found[tag] = values
        if _NDPI in found:  # the upper halves of all offsets follow
            end = max(end, at + count + entries * entry + 2 * word + entries * word)
        return found, end, self.number(data[entries * entry :]) if len(data) == entries * entry + word else 0

    def _entry(self, data: bytes) -> tuple[int, NDArray[np.integer] | None, int]:
        """Tag of an entry, its values if they matter, and the last byte that it asks for."""
        tag, dtype = self.number(data[:2]), _TYPES.get(self.number(data[2:4]))
        if dtype is None:
            return tag, None, 0
        half = (len(data) - 4) // 2
        number, value = self.number(data[4 : 4 + half]), data[4 + half :]
        width = np.dtype(dtype).itemsize
        at = self.number(value) if number * width > half else 0
        reach = at + number * width if at else 0
        if tag not in _TABLES | _NUMBERS:
            return tag, None, reach
        number = min(number, _MAX_PIECES if tag in _TABLES else _MAX_NUMBERS)
        if at:
            self.file.seek(min(at, self.size))
            value = self.file.read(number * width)
        values = np.frombuffer(value, self.order + dtype, min(number, len(value) // width))
        return tag, values, reach


def _described(values: _Values) -> TiffDirectory:
    def several(tag: int) -> tuple[int, ...]:
        return tuple(int(value) for value in values.get(tag, ()))

    def one(tag: int, default: int = 0) -> int:
        return next(iter(several(tag)), default)

    return TiffDirectory(
        size=(one(_WIDTH), one(_LENGTH)),
        tile=(one(_TILE_WIDTH), one(_TILE_LENGTH)) if _TILE_WIDTH in values else None,
        pieces=max(len(values.get(offsets, ())) for offsets, _ in _PIECES),
        data=max(_distinct(values.get(offsets), values.get(lengths)) for offsets, lengths in _PIECES),
        in_header=sum(_count_in_header(values.get(offsets), values.get(lengths)) for offsets, lengths in _PIECES),
        reduced=bool(one(_SUBFILE) & 1),
        orientation=one(_ORIENTATION, 1),
        photometric=one(_PHOTOMETRIC, 2 if one(_SAMPLES, 1) >= 3 else 1),
        samples=one(_SAMPLES, 1),
        bits=several(_BITS) or (1,),
        formats=several(_FORMATS) or (1,),
        extra=several(_EXTRA),
    )


def _reach(offsets: NDArray[np.integer] | None, lengths: NDArray[np.integer] | None) -> int:
    """The last byte of the pieces that are not empty."""
    if offsets is None or lengths is None:
        return 0
    count = min(len(offsets), len(lengths))
    ends = np.where(lengths[:count] > 0, offsets[:count].astype(np.float64) + lengths[:count], 0)
    last = int(ends.argmax()) if count else -1
    return int(offsets[last]) + int(lengths[last]) if count and ends[last] else 0


def _count_in_header(offsets: NDArray[np.integer] | None, lengths: NDArray[np.integer] | None) -> int:
    """Pieces with bytes, unlike those of a sparse file, that lie in the first eight of the file."""
    if offsets is None or lengths is None:
        return 0
    count = min(len(offsets), len(lengths))
    return int(((offsets[:count] < _HEADER_BYTES) & (lengths[:count] > 0)).sum())


def _distinct(offsets: NDArray[np.integer] | None, lengths: NDArray[np.integer] | None) -> int:
    """Bytes of the pieces, those that begin at the same place counted once."""
    if offsets is None or lengths is None:
        return 0
    count = min(len(offsets), len(lengths))
    _, first = np.unique(offsets[:count], return_index=True)
    return int(lengths[first].sum(dtype=np.float64))
