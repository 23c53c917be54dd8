"""Many rectangles of one level, each block of it read once: what makes reading cost what decoding costs."""

import functools
import threading
from collections import OrderedDict
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from inference.errors import TileReadError
from inference.slides.reader import Pixels, SlideReader

BUFFER_BYTES = 256 << 20
"""Decoded blocks held at most, beside those in use; enough for a row of blocks of all but the largest slides."""


@dataclass(eq=False, slots=True)
class _Block:
    """A block that one thread reads while others may wait for it."""

    ready: threading.Lock = field(default_factory=threading.Lock)
    pixels: Pixels | None = None
    """None once `ready` is free: it does not decode as a whole."""


class BlockPass:
    """One pass over rectangles of a reduced level. Safe to use from several threads at once.

    A block is read when the first rectangle needs it, by whoever comes first, and let go after the last. So rectangles
    are best read in the order given. Where blocks beyond `buffer_bytes` are waited for, the oldest are read again.

    Args:
        rectangles: int64 (n, 4) of x, y, width, height in reduced pixels, within the reduced level.
    """

    def __init__(
        self,
        reader: SlideReader,
        level: int,
        reduction: int,
        rectangles: NDArray[np.int64],
        buffer_bytes: int = BUFFER_BYTES,
    ) -> None:
        self._reader, self._level, self._reduction = reader, level, reduction
        width, height = reader.level_sizes[level]
        self._size = (-(-width // reduction), -(-height // reduction))
        self._side = reader.block_size(level, reduction)
        self._rectangles = rectangles
        self._columns = -(-self._size[0] // self._side[0])
        self._uses = self._count_uses()
        self._room = max(1, buffer_bytes // (3 * self._side[0] * self._side[1]))
        self._lock = threading.Lock()
        # By number: row by row, from the top left.
        self._blocks: OrderedDict[int, _Block] = OrderedDict()
        self.blocks_read = 0

    @property
    def blocks_held(self) -> int:
        """Blocks that wait for a rectangle still to come."""
        return len(self._blocks)

    def read(self, index: int) -> Pixels:
        """The pixels of one rectangle.

        Raises:
            TileReadError: they cannot be decoded.
            UnreadableSlide, SlideChanged, SourceUnavailable: see `SlideReader.read_region`.
        """
        x, y, width, height = self._rectangles[index].tolist()
        rows, columns = _parts(y, height, self._side[1]), _parts(x, width, self._side[0])
        try:
            rgb = np.empty((height, width, 3), np.uint8)
            missing: NDArray[np.float32] | None = None
            for row, to_y, from_y in rows:
                for column, to_x, from_x in columns:
                    pixels = self._block(row * self._columns + column)
                    if pixels is None:  # damage somewhere in it, perhaps not here
                        return self._reader.read_reduced(self._level, self._reduction, x, y, width, height)
                    _copy(rgb, (to_y, to_x), pixels.rgb, (from_y, from_x))
                    if pixels.missing is not None:
                        missing = np.zeros((height, width), np.float32) if missing is None else missing
                        missing[to_y, to_x] = pixels.missing[from_y, from_x]
            return Pixels(rgb, missing)
        finally:
            self._used([row * self._columns + column for row, _, _ in rows for column, _, _ in columns])

    def touched(self) -> list[tuple[int, int]]:
        """Column and row of each block that rectangles not yet read touch, row by row."""
        return [(i % self._columns, i // self._columns) for i, uses in enumerate(self._uses) if uses]

    def _block(self, number: int) -> Pixels | None:
        """A block as a whole, None where it does not decode so; read here, or waited for."""
        block = self._blocks.get(number)
        if block is not None and block.pixels is not None:
            return block.pixels
        with self._lock:
            block = self._blocks.get(number)
            mine = block is None
            if block is None:
                block = self._blocks[number] = _Block()
                block.ready.acquire()
                while len(self._blocks) > self._room:  # whoever is at the oldest keeps it
                    self._blocks.popitem(last=False)
        if not mine:
            with block.ready:
                return block.pixels
        try:
            block.pixels = self._read(number)
        except TileReadError:
            pass
        except BaseException:
            with self._lock:  # nobody may take it for damaged
                self._blocks.pop(number, None)
            raise
        finally:
            block.ready.release()
        return block.pixels

    def _read(self, number: int) -> Pixels:
        row, column = divmod(number, self._columns)
        (side_w, side_h), (whole_w, whole_h) = self._side, self._size
        x, y = column * side_w, row * side_h
        self.blocks_read += 1
        return self._reader.read_block(
            self._level, self._reduction, x, y, min(side_w, whole_w - x), min(side_h, whole_h - y)
        )

    def _used(self, numbers: list[int]) -> None:
        """One use less of these blocks; the last lets them go."""
        with self._lock:
            for number in numbers:
                self._uses[number] = left = self._uses[number] - 1
                if left <= 0:
                    self._blocks.pop(number, None)

    def _count_uses(self) -> list[int]:
        """How many rectangles touch each block, row by row: a list, since single numbers are changed."""
        x, y, width, height = self._rectangles.T
        (side_w, side_h), (whole_w, whole_h) = self._side, self._size
        uses = np.zeros((-(-whole_h // side_h) + 1, -(-whole_w // side_w) + 1), np.int32)
        first, last = (y // side_h, x // side_w), ((y + height - 1) // side_h + 1, (x + width - 1) // side_w + 1)
        for rows, columns, sign in ((0, 0, 1), (1, 0, -1), (0, 1, -1), (1, 1, 1)):
            np.add.at(uses, ((first, last)[rows][0], (first, last)[columns][1]), sign)
        counts: list[int] = uses.cumsum(0).cumsum(1)[:-1, :-1].ravel().tolist()
        return counts


@functools.lru_cache(maxsize=4096)
def _row_type(width: int) -> np.dtype[np.void]:
    """A run of RGB pixels as one item."""
    return np.dtype((np.void, 3 * width))


def _copy(
    target: NDArray[np.uint8], to: tuple[slice, slice], source: NDArray[np.uint8], at: tuple[slice, slice]
) -> None:
    """`target[to] = source[at]` of RGB pixels, row by row as single items.

    NumPy lets other threads run during a copy of more than 500 items and then waits for its turn again, which costs
    more than the copy.
    """
    if not source.flags.c_contiguous:
        target[to] = source[at]
        return
    (rows, columns), (from_rows, from_columns) = to, at
    height, kind = (rows.stop - rows.start,), _row_type(columns.stop - columns.start)
    wide, narrow = target.strides[0], source.strides[0]
    into = np.ndarray(height, kind, target.data, rows.start * wide + 3 * columns.start, (wide,))
    into[...] = np.ndarray(height, kind, source.data, from_rows.start * narrow + 3 * from_columns.start, (narrow,))


def _parts(start: int, length: int, side: int) -> list[tuple[int, slice, slice]]:
    """Along one axis, each block under an interval: its number, where it goes in the interval, and what of it."""
    end, parts = start + length, []
    for block in range(start // side, (end - 1) // side + 1):
        here = block * side
        first, last = max(start, here), min(end, here + side)
        parts.append((block, slice(first - start, last - start), slice(first - here, last - here)))
    return parts
