"""Reads tiled slides by their compressed tiles: each is found by its offset and decoded once, reduced if wanted.

OpenSlide's compositing costs several times the JPEG decoding it wraps. It also takes level-0 coordinates only: on a
level whose downsample is no whole number nearly every read begins between two pixels, and OpenSlide interpolates (up
to 52 grey levels off on the test slides). Compressed tiles have neither trouble.
"""

import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from inference.errors import SlideChanged, SourceUnavailable, TileReadError
from inference.slides._compressed import CompressedLevel
from inference.slides._files import source_lost
from inference.slides._refusal import FileState, file_state, require_regular_file
from inference.slides.pixels import edge_padded, reduce_area
from inference.slides.reader import Pixels, RegionReader, SlideReader, pixels_of, require_reduced, require_region


@dataclass(frozen=True)
class SlideFacts:
    """Properties of a slide, as `SlideReader` has them."""

    level_sizes: tuple[tuple[int, int], ...]
    mpp: tuple[float, float] | None
    vendor: str
    objective_power: float | None = None
    background: tuple[int, int, int] = (255, 255, 255)
    icc_profile: bytes | None = None
    quickhash: str | None = None


_LOOK_EVERY_S = 0.02
"""Seconds between looks, in a pass over many blocks, at whether the files are still those that are held open.

A look lets other threads run and then waits for them, which costs more than itself. What is read meanwhile is the old
file, or part of one that is being rewritten: then the run that reads it ends with `SlideChanged` too.
"""


class CompressedReader(RegionReader):
    """A slide whose levels, or some of them, are read by compressed tiles; the others by another reader.

    The files of its levels are held open, so that they stay the same inodes; before every read, and now and then in a
    pass over many blocks, the files of those names must still be they.

    Args:
        kind, reason: see `SlideReader`.
        levels: by level index. Every other level, and a tile that is missing or does not decode, is left to `other`:
            it may fill it in, or knows that it is damaged.
        held: what keeps the files open; closed with the reader.
        other: knows the first levels, or is None where no other reader opens the slide. On a level that it does not
            know a missing tile is transparent, and one that does not decode a `TileReadError`.
        files: all files of the slide, where there are several.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        facts: SlideFacts,
        levels: Mapping[int, CompressedLevel],
        held: ExitStack,
        *,
        kind: str,
        reason: str,
        other: SlideReader | None = None,
        files: Sequence[Path] = (),
    ) -> None:
        self._name, self._other = name, other
        self._levels, self._held = dict(levels), held
        self.level_sizes, self.mpp, self.vendor = facts.level_sizes, facts.mpp, facts.vendor
        self.objective_power, self.background = facts.objective_power, facts.background
        self.icc_profile, self.quickhash = facts.icc_profile, facts.quickhash
        self.kind, self.reason = kind, reason
        self._files = tuple(files) or (path,)
        self._names = [os.fspath(file) for file in self._files]
        self._states: list[FileState] = [require_regular_file(file, name) for file in self._files]
        self._lock = threading.Lock()
        self._reading, self._closed = 0, False
        self._look_again = 0.0  # a time; whichever thread passes it looks

    def read_region(self, level: int, x: int, y: int, width: int, height: int) -> NDArray[np.uint8]:
        """See `SlideReader.read_region`."""
        require_region(self, self._name, level, x, y, width, height)
        self._look_again = 0.0
        with self._open():
            if (source := self._levels.get(level)) is None:
                return self._by_other(level, x, y, width, height)
            rgba = np.zeros((height, width, 4), np.uint8)
            for column, row, here in _tiles_in(source, (x, y, width, height), 1):
                tile = self._rgba(level, source, column, row)
                rgba[here.target] = tile[here.source]
            return rgba

    def read_reduced(self, level: int, reduction: int, x: int, y: int, width: int, height: int) -> Pixels:
        """See `SlideReader.read_reduced`; JPEG tiles are reduced by their decoder."""
        self._look_again = 0.0
        return self.read_block(level, reduction, x, y, width, height)

    def read_block(self, level: int, reduction: int, x: int, y: int, width: int, height: int) -> Pixels:
        """See `SlideReader.read_block` and `_LOOK_EVERY_S`."""
        require_reduced(self.level_sizes, level, reduction, (x, y, width, height))
        source = self._levels.get(level)
        if source is None and self._other is not None:
            with self._open():
                return self._other.read_reduced(level, reduction, x, y, width, height)
        if source is None or not source.reduces(reduction):
            return RegionReader.read_reduced(self, level, reduction, x, y, width, height)
        with self._open():
            tile_w, tile_h = source.tile[0] // reduction, source.tile[1] // reduction
            if not (x % tile_w or y % tile_h) and width <= tile_w and height <= tile_h:
                # A block: nothing to put together.
                tile = self._reduced(level, source, x // tile_w, y // tile_h, reduction)
                return tile if tile.rgb.shape[:2] == (height, width) else tile.cut(0, 0, width, height)
            return self._put_together(level, source, reduction, (x, y, width, height))

    def _put_together(
        self, level: int, source: CompressedLevel, reduction: int, region: tuple[int, int, int, int]
    ) -> Pixels:
        width, height = region[2:]
        rgb = np.empty((height, width, 3), np.uint8)
        missing: NDArray[np.float32] | None = None
        for column, row, here in _tiles_in(source, region, reduction):
            tile = self._reduced(level, source, column, row, reduction)
            rgb[here.target] = tile.rgb[here.source]
            if tile.missing is not None:
                missing = np.zeros((height, width), np.float32) if missing is None else missing
                missing[here.target] = tile.missing[here.source]
        return Pixels(rgb, missing)

    def block_size(self, level: int, reduction: int) -> tuple[int, int]:
        """See `SlideReader.block_size`: the compressed tile."""
        source = self._levels.get(level)
        if source is None and self._other is not None:
            return self._other.block_size(level, reduction)
        if source is None or not source.reduces(reduction):
            return super().block_size(level, reduction)
        return source.tile[0] // reduction, source.tile[1] // reduction

    def stored_tile(self, level: int) -> tuple[int, int]:
        """See `SlideReader.stored_tile`."""
        if source := self._levels.get(level):
            return source.tile
        assert self._other is not None, "every level has a reader"
        return self._other.stored_tile(level)

    def close(self) -> None:
        """Let the files go, once the reads that are under way have ended; idempotent."""
        with self._lock:
            self._closed = True
            idle = not self._reading
        if self._other is not None:
            self._other.close()
        if idle:
            self._held.close()

    def _open(self) -> "_Reading":
        """The descriptor stays open within: its number may be another file's once it is closed."""
        return _Reading(self._begin, self._end)

    def _begin(self) -> None:
        with self._lock:
            if self._closed:
                raise ValueError(f"{self._name}: the slide is closed")
            self._reading += 1
        clock = time.monotonic()
        if clock < self._look_again:
            return
        try:
            unchanged = [file_state(os.stat(name)) for name in self._names] == self._states  # noqa: PTH116 - every tile
        except OSError:
            unchanged = False
        if unchanged:
            self._look_again = clock + _LOOK_EVERY_S
        else:
            self._end()
            self._refuse_changed()

    def _end(self) -> None:
        with self._lock:
            self._reading -= 1
            last = self._closed and not self._reading
        if last:
            self._held.close()

    def _refuse_changed(self) -> None:
        if [require_regular_file(file, self._name) for file in self._files] != self._states:
            raise SlideChanged(f"{self._name}: the file changed while it was being read; run again when it is complete")

    def _reduced(self, level: int, source: CompressedLevel, column: int, row: int, reduction: int) -> Pixels:
        """A tile: whole where it decodes, else as filled in and cut at the level's edge."""
        try:
            if reduction == 1 or source.ends_evenly(column, row, reduction):
                return Pixels(source.decode(column, row, reduction))
            # The last pixels would hold some of the encoder's filling.
            width, height = source.extent(column, row)
            rgb = source.decode(column, row, 1)[:height, :width]
            return Pixels(reduce_area(edge_padded(rgb, reduction), reduction))
        except (OSError, ValueError) as error:
            rgba = self._filled_in(level, source, (column, row), error)
        return pixels_of(rgba, self.background, reduction)

    def _rgba(self, level: int, source: CompressedLevel, column: int, row: int) -> NDArray[np.uint8]:
        try:
            rgb = source.decode(column, row, 1)
        except (OSError, ValueError) as error:
            return self._filled_in(level, source, (column, row), error)
        return np.dstack([rgb, np.full(rgb.shape[:2], 255, np.uint8)])

    def _filled_in(
        self, level: int, source: CompressedLevel, place: tuple[int, int], error: OSError | ValueError
    ) -> NDArray[np.uint8]:
        """What the other reader makes of a tile that is missing or does not decode: RGBA, within the level."""
        problem = str(error)
        if isinstance(error, OSError):
            problem = error.strerror or type(error).__name__
            if source_lost(error):
                raise SourceUnavailable(f"{self._name}: the file cannot be read: {problem}") from None
        (x, y), (width, height) = (place[0] * source.tile[0], place[1] * source.tile[1]), source.extent(*place)
        if self._other is not None and level < len(self._other.level_sizes):
            return self._by_other(level, x, y, width, height)
        if source.is_missing(*place):
            return np.zeros((height, width, 4), np.uint8)
        raise TileReadError(f"level {level} cannot be decoded here: {problem}")

    def _by_other(self, level: int, x: int, y: int, width: int, height: int) -> NDArray[np.uint8]:
        assert self._other is not None, "every level has a reader"
        return self._other.read_region(level, x, y, width, height)


class _Reading:
    """A read that is under way; a context manager of few words, since there is one for every tile."""

    __slots__ = ("_begin", "_end")

    def __init__(self, begin: Callable[[], None], end: Callable[[], None]) -> None:
        self._begin, self._end = begin, end

    def __enter__(self) -> None:
        self._begin()

    def __exit__(self, *exc: object) -> None:
        self._end()


@dataclass(frozen=True, slots=True)
class _Overlap:
    """Where a tile and a region meet: rows and columns of the tile, and of the region."""

    source: tuple[slice, slice]
    target: tuple[slice, slice]


def _tiles_in(
    source: CompressedLevel, region: tuple[int, int, int, int], reduction: int
) -> Iterator[tuple[int, int, _Overlap]]:
    """Column and row of each tile that a region (x, y, width, height) of a reduced level touches, row by row."""
    x, y, width, height = region
    tile_w, tile_h = source.tile[0] // reduction, source.tile[1] // reduction
    right, bottom = (
        min(a + n, -(-s // reduction)) for a, n, s in zip((x, y), (width, height), source.size, strict=True)
    )
    for row in range(max(y, 0) // tile_h, -(-bottom // tile_h)):
        top = row * tile_h
        y0, y1 = max(y, top), min(bottom, top + tile_h)
        for column in range(max(x, 0) // tile_w, -(-right // tile_w)):
            left = column * tile_w
            x0, x1 = max(x, left), min(right, left + tile_w)
            yield (
                column,
                row,
                _Overlap(
                    (slice(y0 - top, y1 - top), slice(x0 - left, x1 - left)),
                    (slice(y0 - y, y1 - y), slice(x0 - x, x1 - x)),
                ),
            )
