"""Reads a slide through processes that can be killed, for sources that may hang and decoders that may crash."""

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from inference.errors import Broken, ReadStalled, SlideChanged, SourceUnavailable, TileReadError
from inference.slides._reader_process import ProcessLost, ReaderProcess
from inference.slides._reader_wire import (
    RGB,
    RGBA,
    Answer,
    Facts,
    OpenRequest,
    Region,
    error_from_json,
    room_for,
    take,
)
from inference.slides.reader import MAX_REGION_PIXELS, Pixels, RegionReader, require_reduced, require_region
from inference.slides.resolution import REDUCTIONS

log = logging.getLogger(__name__)

MAX_PROCESSES = 4
"""Reader processes of a slide at most: each opens it anew and keeps a cache of its own."""

WORKER = (sys.executable, "-m", "inference.slides.worker")

LOST_REGIONS = 3
"""Regions in a row on which the reader hung or died, none of them part of another, after which the slide ends."""

LOST_READS = 12
"""The same, parts of such regions included: what remains readable is not worth the deadlines any more."""

_START_S = 60.0  # an interpreter and its imports, perhaps themselves from a share
_MEMORY_BYTES = 4 << 30  # more than a slide that is not refused needs: a region, its copies and OpenSlide's cache
_BLOCK_PX = (2048, 512)  # level pixels of a block, at least: decoding it costs far more than a round trip
_MAX_REDUCED = (4 * MAX_REGION_PIXELS) // 8  # reduced pixels of one answer; each takes up to 7 bytes


class ProcessReader(RegionReader):
    """A `SlideReader` whose reads run in processes of their own, and cost at most a deadline.

    Each process serves one read at a time, so a kill costs no other read; they are started when that many threads read
    at once. A read that takes too long, or whose process dies, is tried once more by a new process; then it is a
    `TileReadError`. Descriptors: 4 and a mapping for each process.

    Args:
        path, name, files: as for `open_slide`.
        timeout_s: for opening the slide, and for each try of a read.
        processes: at most so many.
        memory_bytes: what a process may allocate beyond its start; 0 for no bound.
        command: what starts a process that serves as `inference.slides.worker` does.

    Attributes:
        patience_s: the longest that all reads may take without one that ends, short of ending the slide: a block
            that is lost twice, then a part of it, then opening.

    Raises:
        UnreadableSlide, SlideChanged, SourceUnavailable: as `open_slide`.
        ReadStalled: it did not open in time, or the process died of it.
        Broken: no process starts.
    """

    def __init__(
        self,
        path: Path,
        name: str,
        files: Sequence[Path] = (),
        *,
        timeout_s: float = 60.0,
        processes: int = MAX_PROCESSES,
        memory_bytes: int = _MEMORY_BYTES,
        command: Sequence[str] = WORKER,
    ) -> None:
        self._name, self._timeout_s, self._memory_bytes, self._command = name, timeout_s, memory_bytes, command
        self._path, self._files = path.absolute(), [file.absolute() for file in files or (path,)]
        self.patience_s = 4 * timeout_s + _START_S
        self._losses = _Losses()
        self._facts = ""
        self._pool = _Pool(self._start, name, max(1, min(processes, MAX_PROCESSES)))
        self._pool.give(self._pool.take())
        facts = Facts.from_text(self._facts)
        self.level_sizes, self.mpp, self.vendor = facts.level_sizes, facts.mpp, facts.vendor
        self.objective_power, self.background = facts.objective_power, facts.background
        self.icc_profile, self.quickhash = facts.icc_bytes, facts.quickhash
        self.kind, self.reason = f"{facts.kind}, in a process of its own", facts.reason
        self._stored = facts.stored
        self._blocks = [
            {r: _enlarged(block, r, size) for r, block in zip(REDUCTIONS, blocks, strict=True)}
            for blocks, size in zip(facts.blocks, facts.level_sizes, strict=True)
        ]

    def read_region(self, level: int, x: int, y: int, width: int, height: int) -> NDArray[np.uint8]:
        """See `SlideReader.read_region`.

        Raises:
            TileReadError: also where the reader hung or died twice.
            ReadStalled: that happened several times in a row, or the slide no longer opens in time.
        """
        require_region(self, self._name, level, x, y, width, height)
        return self._read((level, 1, x, y, width, height), RGBA).rgb

    def read_reduced(self, level: int, reduction: int, x: int, y: int, width: int, height: int) -> Pixels:
        """See `SlideReader.read_reduced`, and `read_region`."""
        require_reduced(self.level_sizes, level, reduction, (x, y, width, height))
        rows = _MAX_REDUCED // width
        if height <= rows:
            return self._read((level, reduction, x, y, width, height), RGB)
        parts = [
            self._read((level, reduction, x, top, width, min(rows, y + height - top)), RGB)
            for top in range(y, y + height, rows)
        ]
        missing = None
        if any(part.missing is not None for part in parts):
            nothing = np.float32(0)
            planes = (np.broadcast_to(nothing, p.rgb.shape[:2]) if p.missing is None else p.missing for p in parts)
            missing = np.concatenate(list(planes))
        return Pixels(np.concatenate([part.rgb for part in parts]), missing)

    def block_size(self, level: int, reduction: int) -> tuple[int, int]:
        """See `SlideReader.block_size`: many of the blocks that the reader would have in this process."""
        return self._blocks[level][reduction]

    def stored_tile(self, level: int) -> tuple[int, int]:
        """See `SlideReader.stored_tile`."""
        return self._stored[level]

    def close(self) -> None:
        """End the processes at once, also those that read, whose callers get a `ValueError`; idempotent."""
        self._pool.close()

    def _read(self, region: Region, channels: int) -> Pixels:
        lost = ProcessLost("hung")
        for _ in range(self._losses.tries(region)):
            process = self._pool.take()
            try:
                answer, pixels = self._ask(process, region, channels)
            except ProcessLost as error:
                self._bury(process, error)
                lost = error
                continue
            except BaseException:  # an interrupt: its next answer would be that to another question
                self._pool.drop(process)
                raise
            self._pool.give(process)
            self._losses.forget()
            if pixels is None:
                raise error_from_json(answer["error"])
            return pixels
        what = f"hung on this region for {self._timeout_s:g} s" if lost.hung else f"process {lost.how} on this region"
        if self._losses.too_many(region):
            raise ReadStalled(f"{self._name}: the reader {what}, and on those before: run again when it can be read")
        raise TileReadError(f"the reader {what}")

    def _ask(self, process: ReaderProcess, region: Region, channels: int) -> tuple[Answer, Pixels | None]:
        room = process.room(room_for(region[4] * region[5], channels))
        answer = process.ask({"region": region, "channels": channels, "room": room}, self._timeout_s)
        if "error" in answer:
            return answer, None
        assert process.memory is not None, "it has room"
        return answer, Pixels(*take(process.memory, answer["shape"], answer["missing"]))

    def _bury(self, process: ReaderProcess, lost: ProcessLost) -> None:
        if not self._pool.drop(process):
            log.warning("%s: a reader process %s and is replaced%s", self._name, lost.how, process.last_words())

    def _start(self) -> ReaderProcess:
        """A new process with the slide open, and the same as before."""
        paths = [os.fspath(path) for path in (self._path, *self._files)]
        names = [part for path in (self._path, *self._files) for part in (path.name, path.stem)]
        process = ReaderProcess(self._command, secrets=[*paths, os.fspath(self._path.parent), *names])
        try:
            answer = self._open_in(process, paths)
            if "error" in answer:
                raise error_from_json(answer["error"])
            if answer["facts"] != (self._facts or answer["facts"]):
                raise SlideChanged(f"{self._name}: it no longer opens as it did: run again when it is complete")
            self._facts = answer["facts"]
        except BaseException:
            process.dispose()
            raise
        return process

    def _open_in(self, process: ReaderProcess, paths: list[str]) -> Answer:
        try:
            process.ask(None, _START_S)
        except ProcessLost as lost:
            process.dispose()
            log.warning("a reader process %s at its start%s", lost.how, process.last_words())
            raise Broken("no reader process starts: see the log, or read in threads (--reader threads)") from None
        request: OpenRequest = {
            "path": paths[0], "files": paths[1:], "name": self._name, "pixels": process.file,
            "memory": self._memory_bytes,
        }  # fmt: skip
        try:
            return process.ask(request, self._timeout_s)
        except ProcessLost as lost:
            what = f"the slide did not open within {self._timeout_s:g} s" if lost.hung else f"its reader {lost.how}"
            raise ReadStalled(f"{self._name}: {what}: run again when the disk or the share answers") from None


class _Losses:
    """Which regions cost a process, and how many in a row. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lost: deque[tuple[int, ...]] = deque(maxlen=64)
        self._regions = self._reads = 0

    def tries(self, region: Region) -> int:
        """How often a region is worth trying: once where it lies in one that was lost twice."""
        with self._lock:
            return 1 if self._within_lost(region) else 2

    def too_many(self, region: Region) -> bool:
        """Count a region as lost; whether the slide ends with it."""
        with self._lock:
            self._reads += 1
            if not self._within_lost(region):
                self._regions += 1
                self._lost.append(_bounds(region))
            return self._regions >= LOST_REGIONS or self._reads >= LOST_READS

    def forget(self) -> None:
        """A region was read: the row is broken."""
        if self._reads:
            with self._lock:
                self._regions = self._reads = 0

    def _within_lost(self, region: Region) -> bool:
        level, left, top, right, bottom = _bounds(region)
        return any(
            level == k and x0 <= left and y0 <= top and right <= x1 and bottom <= y1 for k, x0, y0, x1, y1 in self._lost
        )


def _bounds(region: Region) -> tuple[int, int, int, int, int]:
    """Level, and left, top, right and bottom in its pixels."""
    level, r, x, y, width, height = region
    return level, x * r, y * r, (x + width) * r, (y + height) * r


class _Pool:
    """Processes that are not in use, started when there are none; a process belongs to one thread at a time."""

    def __init__(self, start: Callable[[], ReaderProcess], name: str, limit: int) -> None:
        self._start, self._name, self._limit = start, name, limit
        self._changed = threading.Condition()
        self._free: list[ReaderProcess] = []
        self._used = set[ReaderProcess]()
        self._starting = 0
        self._closed = False
        self._owner = os.getpid()

    def take(self) -> ReaderProcess:
        """A process with the slide open; waits while all are in use.

        Raises:
            ValueError: closed, or in a forked process.
            SourceUnavailable: the system has no room for even one.
        """
        while (process := self._claim()) is None:
            if process := self._started():
                break
        return process

    def give(self, process: ReaderProcess) -> None:
        """Put a process back that has answered."""
        with self._changed:
            self._used.discard(process)
            if not self._closed:
                self._free.append(process)
                self._changed.notify()
                return
        process.dispose()

    def drop(self, process: ReaderProcess) -> bool:
        """End a process that is in use; whether all are, since the reader was closed."""
        process.dispose()
        with self._changed:
            self._used.discard(process)
            self._changed.notify()
            return self._closed

    def close(self) -> None:
        if os.getpid() != self._owner:
            return
        with self._changed:
            self._closed, free, self._free = True, self._free, []
            for process in self._used:
                process.kill()  # disposed of by whoever waits for its answer
            self._changed.notify_all()
        for process in free:
            process.dispose()

    def _claim(self) -> ReaderProcess | None:
        """A free process; None for the right to start one."""
        if os.getpid() != self._owner:
            raise ValueError(f"{self._name}: the slide was opened before a fork: open it in this process")
        with self._changed:
            while not (self._closed or self._free or len(self._used) + self._starting < self._limit):
                self._changed.wait()
            if self._closed:
                raise ValueError(f"{self._name}: the slide is closed")
            if not self._free:
                self._starting += 1
                return None
            self._used.add(process := self._free.pop())
            return process

    def _started(self) -> ReaderProcess | None:
        """A new process; None where the system has room for those only that there are."""
        process = None
        try:
            process = self._start()
        except OSError as error:
            with self._changed:
                others = len(self._free) + len(self._used) + self._starting - 1
                self._limit = max(1, others)
            if not others:
                raise SourceUnavailable(f"{self._name}: no reader process can be started: {error.strerror}") from None
        finally:
            with self._changed:
                self._starting -= 1
                if process:
                    self._used.add(process)
                self._changed.notify()
        if process and self._closed:
            self.drop(process)
            raise ValueError(f"{self._name}: the slide is closed")
        return process


def _enlarged(block: tuple[int, int], reduction: int, level: tuple[int, int]) -> tuple[int, int]:
    """A block of whole blocks, so large that a round trip is little against decoding it, or as large as the level."""
    width, height = (
        side * max(1, -(-min(least, whole) // (side * reduction)))
        for side, least, whole in zip(block, _BLOCK_PX, level, strict=True)
    )
    return width, height
