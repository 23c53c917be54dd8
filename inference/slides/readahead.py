"""Reads many things ahead in threads and hands them back in order; a reader that hangs is noticed and left behind."""

import threading
import time
from collections.abc import Callable, Generator
from typing import Generic, TypeVar

from inference.errors import ReadStalled

CHUNK = 32
"""Things a thread takes at a time: neighbours, which share what is decoded for them."""

STALLED_AFTER_S = 120.0
"""Seconds without a single read finished after which a slide is given up; a tile takes milliseconds."""

_JOIN_S = 10.0

T = TypeVar("T")


class ReadAhead(Generic[T]):
    """Calls `read(0)` … `read(count - 1)` in threads and yields the results in order.

    At most `ahead` results, and what the threads hold, wait to be taken. What `read` raises is raised in its turn, and
    ends the reading. Closing the iterator ends it early. Threads are daemons: one that hangs in a native call keeps
    neither the slide nor the process.
    """

    def __init__(
        self,
        read: Callable[[int], T],
        count: int,
        *,
        threads: int,
        ahead: int,
        stalled_after_s: float = STALLED_AFTER_S,
        name: str = "read",
    ) -> None:
        self._read, self._count = read, count
        self._chunks = -(-count // CHUNK)
        self._window = max(threads, -(-ahead // CHUNK))
        self._patience, self._name = stalled_after_s, name
        self._changed = threading.Condition()
        self._next = self._taken = 0  # chunks given to threads, and to the caller
        self._done: dict[int, list[T] | BaseException] = {}
        self._stopped = False
        self._last_read = time.monotonic()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{n}", daemon=True)
            for n in range(min(threads, self._chunks))
        ]

    def __iter__(self) -> Generator[T, None, None]:
        """Start reading; see the class.

        Raises:
            ReadStalled: no read has ended for too long.
        """
        self._last_read = time.monotonic()
        try:
            for thread in self._threads:
                thread.start()
            for chunk in range(self._chunks):
                yield from self._take(chunk)
        finally:
            self._stop()

    def _take(self, chunk: int) -> list[T]:
        with self._changed:
            while chunk not in self._done:
                left = self._last_read + self._patience - time.monotonic()
                if left <= 0:
                    raise ReadStalled(
                        f"nothing was read for {self._patience:g} s: the disk, the share or a decoder hangs; run again "
                        "when it answers"
                    )
                self._changed.wait(left)
            found = self._done.pop(chunk)
            self._taken = chunk + 1
            self._changed.notify_all()
        if isinstance(found, BaseException):
            raise found
        return found

    def _work(self) -> None:
        while (chunk := self._claim()) is not None:
            found: list[T] | BaseException
            try:
                found = self._read_chunk(chunk)
            except BaseException as error:  # noqa: BLE001 - raised where the result is taken
                found = error
            with self._changed:
                self._done[chunk] = found
                self._changed.notify_all()

    def _claim(self) -> int | None:
        """The next chunk, once there is room for it; None when there is no more to do."""
        with self._changed:
            while not self._stopped and self._next < self._chunks and self._next >= self._taken + self._window:
                self._changed.wait()
            if self._stopped or self._next >= self._chunks:
                return None
            self._next += 1
            return self._next - 1

    def _read_chunk(self, chunk: int) -> list[T]:
        found = []
        for index in range(chunk * CHUNK, min((chunk + 1) * CHUNK, self._count)):
            if self._stopped:
                break
            found.append(self._read(index))
            self._last_read = time.monotonic()
        return found

    def _stop(self) -> None:
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
        end = time.monotonic() + _JOIN_S
        stalled = time.monotonic() >= self._last_read + self._patience
        for thread in filter(threading.Thread.is_alive, self._threads):
            thread.join(0 if stalled else max(0.0, end - time.monotonic()))
