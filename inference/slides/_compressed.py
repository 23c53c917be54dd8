"""A level known by the place and length of each compressed tile in its file."""

import os
import threading
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from inference.slides._codecs import TileDecoder

_TILES_AHEAD, _ROWS_AHEAD = 8, 8  # read at once by a thread that reads tile after tile, of so many rows
_MAX_EXPANSION = 4  # compressed bytes per raw byte: noise grows a little, nothing grows more


class CompressedLevel:
    """One tiled RGB level. Safe to read from several threads.

    Args:
        descriptor: the open file.
        columns: tiles per row.
        offsets, counts: place and length in bytes of each tile, row by row; a length of 0 is a missing tile.

    Attributes:
        size: width and height of the level, which the tiles may exceed.
        tile: width and height of a compressed tile.
        decoder: how its tiles are decoded.
    """

    def __init__(
        self,
        descriptor: int,
        size: tuple[int, int],
        tile: tuple[int, int],
        columns: int,
        decoder: TileDecoder,
        offsets: Sequence[int] | NDArray[np.uint64],
        counts: Sequence[int] | NDArray[np.uint64],
    ) -> None:
        self._descriptor = descriptor
        self.size, self.tile, self.columns, self.decoder = size, tile, columns, decoder
        self._offsets = [int(offset) for offset in offsets]  # lists: one number is asked for at a time
        self._counts = [int(count) for count in counts]
        self._ahead = threading.local()
        self._most = _MAX_EXPANSION * 3 * tile[0] * tile[1]

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
        count, offset = self._counts[index], self._offsets[index]
        if not 0 < count <= self._most:
            raise ValueError("a tile is missing or impossibly large")
        try:
            runs: dict[int, tuple[int, int, bytes]] = self._ahead.runs
        except AttributeError:
            runs = self._ahead.runs = {}  # of this thread, by row
        last, start, data = runs.get(row, (-2, 0, b""))
        if not (start <= offset and offset + count <= start + len(data)):
            start = offset
            length = self._run(index) if last == column - 1 else count
            data = os.pread(self._descriptor, length, offset)
            if len(runs) >= _ROWS_AHEAD:
                runs.clear()
        runs[row] = (column, start, data)
        return data[offset - start : offset - start + count]

    def _run(self, index: int) -> int:
        """Bytes of a tile and of those that lie right behind it, where they are the next of the level."""
        end = self._offsets[index] + self._counts[index]
        for following in range(index + 1, min(index + _TILES_AHEAD, len(self._counts))):
            if self._offsets[following] != end or self._counts[following] > self._most:
                break
            end += self._counts[following]
        return end - self._offsets[index]

    def decode(self, column: int, row: int, reduction: int) -> NDArray[np.uint8]:
        """A whole tile as RGB, reduced; what lies beyond the level is the encoder's filling.

        Raises:
            ValueError: it is missing or does not decode.
            OSError: the file cannot be read.
        """
        return self.decoder(self.compressed(column, row), reduction)

    def extent(self, column: int, row: int) -> tuple[int, int]:
        """Width and height of the part of a tile that lies within the level."""
        return (
            min(self.tile[0], self.size[0] - column * self.tile[0]),
            min(self.tile[1], self.size[1] - row * self.tile[1]),
        )

    def ends_evenly(self, column: int, row: int, reduction: int) -> bool:
        """Whether a tile's reduced pixels all lie wholly within the level, or wholly beyond it."""
        (width, height), (right, bottom) = self.tile, self.size
        inside = (column + 1) * width <= right and (row + 1) * height <= bottom
        return inside or not any(side % reduction for side in self.extent(column, row))

    def heaviest(self) -> tuple[int, int]:
        """Column and row of the tile of most bytes: the one with most to see."""
        row, column = divmod(self._counts.index(max(self._counts)), self.columns)
        return column, row

    def reduces(self, reduction: int) -> bool:
        """Whether its tiles are whole pixels at a reduction."""
        return not (self.tile[0] % reduction or self.tile[1] % reduction)
