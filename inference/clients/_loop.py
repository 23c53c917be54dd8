"""One event loop in a thread of its own, so that callers from any thread or loop share what lives on it."""

import asyncio
import os
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from inference.errors import CallerError

V = TypeVar("V")


class LoopThread:
    """Runs coroutines of any caller; cancelling a future cancels its coroutine. Not usable in a forked child."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._lock = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def start(self, work: Coroutine[Any, Any, V]) -> "Future[V] | None":
        """A future of the coroutine's result; None once closed, and the coroutine never runs.

        Raises:
            CallerError: in a process that was forked from the one which made this.
        """
        if os.getpid() != self._pid:  # the thread is not there, and its lock may be held for ever
            work.close()
            raise CallerError(f"the {self._name} belongs to another process: make a new one here")
        with self._lock:
            if self._closed:
                work.close()
                return None
            return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self, last: Coroutine[Any, Any, None]) -> None:
        """Cancel what runs, run a last coroutine, and end the thread; idempotent. Nothing in a forked child."""
        if os.getpid() != self._pid:
            last.close()
            return
        with self._lock:
            if self._closed:
                last.close()
                return
            self._closed = True
            finished = asyncio.run_coroutine_threadsafe(self._finish(last), self._loop)
        finished.result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()

    def _run(self) -> None:
        try:
            self._loop.run_forever()
        finally:
            self._loop.close()

    @staticmethod
    async def _finish(last: Coroutine[Any, Any, None]) -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await last
