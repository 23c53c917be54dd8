"""What a TIFF's own tables claim: tells a truncated slide from what is none, and lengths that no decoder survives."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

# Enough for any slide, few enough for a damaged header.
_MAX_DIRECTORIES, _MAX_ENTRIES, _MAX_TABLE_BYTES = 1000, 1000, 64 << 20

# NumPy's types for those of TIFF that matter; a rational is eight bytes.
_TYPES = {1: "u1", 2: "u1", 3: "u2", 4: "u4", 5: "u8", 7: "u1", 12: "f8", 13: "u4", 16: "u8", 18: "u8"}
_PIECES = ((273, 279), (324, 325))  # tags with the offsets and lengths of strips and of tiles
_WANTED = {tag for pair in _PIECES for tag in pair}

_Values = dict[int, NDArray[np.integer]]


@dataclass(frozen=True)
class TiffClaims:
    """What the directories of a TIFF say, as far as they can be read.

    Attributes:
        size: bytes of the file.
        end: the last byte that the tables ask for.
        piece: bytes of the longest strip or compressed tile.
    """

    size: int
    end: int = 0
    piece: int = 0


def read_claims(path: Path) -> TiffClaims | None:
    """The claims of a classic or big TIFF, in bounded time and memory; None for what is none.

    Raises:
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        head, size = file.read(16), os.fstat(file.fileno()).st_size
        if head[:4] not in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
            return None
        walk = _Walk(file, size, "<" if head[:2] == b"II" else ">", big=b"+" in head[2:4])
        return walk.directories(walk.number(head[8:16] if walk.big else head[4:8]))


@dataclass(frozen=True)
class _Walk:
    """Goes from directory to directory; each is visited once."""

    file: BinaryIO
    size: int
    order: Literal["<", ">"]
    big: bool

    def number(self, data: bytes) -> int:
        return int.from_bytes(data, "little" if self.order == "<" else "big")

    def directories(self, at: int) -> TiffClaims:
        """The claims of the directory at an offset and of those after it."""
        end, piece, seen = at, 0, set[int]()
        while 0 < at < self.size and at not in seen and len(seen) < _MAX_DIRECTORIES:
            seen.add(at)
            values, reach, at = self._directory(at)
            end = max(end, reach, at)
            for offsets, lengths in _PIECES:
                end = max(end, _reach(values.get(offsets), values.get(lengths)))
                piece = max(piece, _largest(values.get(lengths)))
        return TiffClaims(self.size, end, piece)

    def _directory(self, at: int) -> tuple[_Values, int, int]:
        """The values that matter, the last byte that the entries ask for, and where the next directory is."""
        word, entry, count = (8, 20, 8) if self.big else (4, 12, 2)
        self.file.seek(at)
        entries = min(self.number(self.file.read(count)), _MAX_ENTRIES)
        data = self.file.read(entries * entry + word)
        found, end = _Values(), 0
        for start in range(0, min(entries * entry, len(data) - entry + 1), entry):
            tag, values, reach = self._entry(data[start : start + entry])
            end = max(end, reach)
            if values is not None:
                found[tag] = values
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
        if tag not in _WANTED:
            return tag, None, at + number * width if at else 0
        if at:
            self.file.seek(min(at, self.size))
            value = self.file.read(min(number * width, _MAX_TABLE_BYTES))
        values = np.frombuffer(value, self.order + dtype, min(number, len(value) // width))
        return tag, values, at + number * width if at else 0


def _largest(values: NDArray[np.integer] | None) -> int:
    return int(values.max(initial=0)) if values is not None else 0


def _reach(offsets: NDArray[np.integer] | None, lengths: NDArray[np.integer] | None) -> int:
    """The last byte of the pieces that are not empty."""
    if offsets is None or lengths is None:
        return 0
    count = min(len(offsets), len(lengths))
    ends = np.where(lengths[:count] > 0, offsets[:count].astype(np.float64) + lengths[:count], 0)
    last = int(ends.argmax()) if count else -1
    return int(offsets[last]) + int(lengths[last]) if count and ends[last] else 0
