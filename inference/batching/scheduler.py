"""The batch scheduler: samples from many callers, one forward pass at a time.

All decisions are in `_queue.BatchQueue`, which knows neither threads nor a clock; the lock around it is in `_core`, the
two threads in `_threads`. Callbacks of futures run outside the lock, on one of the two threads or on the one that
cancels.
"""

import atexit
import math
import os
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Any, Generic, NoReturn, Self, cast

import numpy as np

from inference.batching._core import SchedulerCore
from inference.batching._failure import FailureKind, classify_failure
from inference.batching._forward import ForwardPass
from inference.batching._future import ItemFuture
from inference.batching._queue import BatchQueue, R, T
from inference.batching._settings import check_seconds, check_share, check_whole_number, warn_if_no_batch_can_fill
from inference.batching._statistics import SchedulerState, SchedulerStatistics
from inference.batching._threads import BatchThread, WatchThread
from inference.errors import BadRequest, CallerError, InferenceError, ServerClosed

_EXIT_GRACE_S = 5.0  # a daemon thread that wakes in native code during interpreter shutdown may crash the process
_JOIN_GRACE_S = 1.0


class BatchScheduler(Generic[T, R]):
    """Gathers samples of any number of threads and event loops into batches for one model.

    Thread-safe. `submit` returns a `concurrent.futures.Future` (`asyncio.wrap_future` it on an event loop). Every
    accepted sample gets exactly one answer:

    - its row of what `forward` returned, or the exception `forward` put into that row; rows may depend on the rest of
      their batch within the model's tolerance (none at a fixed batch shape);
    - cancelled: a queued item leaves at once and never reaches the model; a running one is computed and counted
      as wasted;
    - `DeadlineExceeded` at its queue deadline if it is still queued then, at its call deadline wherever it is, and at
      its queue deadline instead of being repeated while a failed batch is halved;
    - its own error (`TileError` unless it is an `InferenceError` already) if `forward` fails on it alone;
      `ForwardError` if the retry budget ends before that is known or it alone does not fit in memory;
      `ModelContractError` if `forward` broke its contract;
    - `DeviceBroken` after a fatal error, a call of the model over `stuck_after_s` or the death of the batch thread;
      `ServerClosed` after `close`.

    A writable array is copied by `submit`; any other sample passes through and must not be changed afterwards. Rows
    that are arrays are copied for their callers. Not usable in a forked child. Callbacks of futures must be short:
    deadlines wait for them. Waiting for a result inside `forward` or a callback raises, since nobody would compute it.

    Where a batch does not fit in memory, later ones of its lane are at most half as large; after 64 successful batches
    of that size, twice as many are tried again. An item that does not fit even alone lowers no limit.
    """

    def __init__(
        self,
        forward: Callable[[Sequence[T], Sequence[str]], Sequence[R | Exception]],
        *,
        max_batch_size: int = 64,
        max_wait_s: float = 0.01,
        max_queued_items: int = 4096,
        max_queued_bytes: int = 1 << 30,
        nbytes: Callable[[T], int] = lambda sample: int(getattr(sample, "nbytes", 0)),
        classify: Callable[[BaseException], FailureKind] = classify_failure,
        retry_budget: int | None = None,
        lane: Callable[[T, str], Hashable] | None = None,
        lane_share: float | None = None,
        device_lock: "threading.Lock | None" = None,
        stuck_after_s: float | None = None,
        on_out_of_memory: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        name: str = "batch",
    ) -> None:
        """Starts the two threads.

        Args:
            forward: called with samples and modes, one call at a time; returns a list, tuple or array of as many rows.
            max_wait_s: from the arrival of a batch's first item; 0 takes what is there.
            classify: how to react to an exception of `forward`.
            retry_budget: further calls of `forward` a batch may cost after failing; None is 2 * log2 of its size for
                items with a deadline, and for others as many as it takes.
            lane: samples of different lanes never share a batch.
            lane_share: share of the queue's items and bytes one lane may hold; None is half, or all without `lane`.
            device_lock: held during each batch, for models that share a device.
            stuck_after_s: a call of `forward` that takes longer breaks the scheduler; waiting for `device_lock` does
                not count. None waits for ever.
            on_out_of_memory: drops caches; called on the batch thread before halves of a batch are tried.

        Raises:
            ConfigError: a setting of the wrong type or out of range.
        """
        check_whole_number("max_batch_size", max_batch_size)
        check_whole_number("max_queued_items", max_queued_items)
        check_whole_number("max_queued_bytes", max_queued_bytes)
        check_seconds("max_wait_s", max_wait_s)
        if retry_budget is not None:
            check_whole_number("retry_budget", retry_budget, least=0)
        if stuck_after_s is not None:
            check_seconds("stuck_after_s", stuck_after_s, above_zero=True)
        share = (0.5 if lane else 1.0) if lane_share is None else lane_share
        check_share("lane_share", share)
        queue: BatchQueue[T, R] = BatchQueue(
            max_batch_size=max_batch_size,
            max_wait_s=max_wait_s,
            max_items=max_queued_items,
            max_bytes=max_queued_bytes,
            lane_share=share,
        )
        warn_if_no_batch_can_fill(max_batch_size, queue.lane_items, stacklevel=2)
        self._pid = os.getpid()
        self._nbytes, self._lane = nbytes, lane
        self._forward: ForwardPass[T, R] = ForwardPass(forward, classify, clock, name)
        self._core: SchedulerCore[T, R] = SchedulerCore(queue, clock, name)
        self._batch_thread: BatchThread[T, R] = BatchThread(
            self._core,
            self._forward,
            device_lock or threading.Lock(),
            retry_budget=retry_budget,
            stuck_after_s=math.inf if stuck_after_s is None else stuck_after_s,
            on_out_of_memory=on_out_of_memory,
        )
        self._watch_thread: WatchThread[T, R] = WatchThread(self._core, self._batch_thread)
        self._batch_thread.start()
        self._watch_thread.start()
        atexit.register(self._at_exit)

    def submit(
        self,
        sample: T,
        mode: str = "prediction_with_embedding",
        *,
        deadline_s: float | None = None,
        call_deadline_s: float | None = None,
        block: bool = True,
        timeout_s: float | None = None,
    ) -> Future[R]:
        """Queues one sample; waits for room, in order of arrival, unless `block` is False.

        Every sample is admitted for itself: of a list, some may be accepted and some refused.

        Args:
            mode: which outputs `forward` is asked for; modes share batches.
            deadline_s: queue deadline, from now: when the sample must have left the queue.
            call_deadline_s: call deadline, from now: when it must have its answer. Both bound the wait for room.
            timeout_s: longest wait for room; None waits as long as it takes.

        Raises:
            QueueFull: no room, at once or in time; its field `retry_after_s` estimates when there will be.
            ServerClosed: after `close`.
            DeviceBroken: after a fatal error.
            BadRequest: a sample larger than the whole queue, or a deadline that is no number.
            CallerError: in a forked child.
        """
        self._check_process()
        self._watch_thread.check_batch_thread()
        core = self._core
        lane = self._lane(sample, mode) if self._lane else None
        sample = _owned(sample)
        nbytes = self._nbytes(sample)
        start_in_s, answer_in_s = _seconds(deadline_s), _seconds(call_deadline_s)
        # Neither thread of the scheduler may wait for room: they make it.
        may_wait = block and not self._on_own_thread()
        wait_s = min(_seconds(timeout_s), start_in_s, answer_in_s, threading.TIMEOUT_MAX) if may_wait else 0.0
        came_at = core.clock()
        future: ItemFuture[R] = ItemFuture(self._withdraw, self._check_may_wait)
        with core.lock:
            try:
                core.admit(lane, nbytes, wait_s)
                now = core.clock()
                item = core.queue.push(
                    sample,
                    mode,
                    future,
                    lane=lane,
                    nbytes=nbytes,
                    now=now,
                    start_by=came_at + start_in_s,
                    answer_by=came_at + answer_in_s,
                )
                future.order = item.order
            except InferenceError:
                core.queue.refused += 1
                raise
            finally:
                core.line.call_next()
            core.batch_due.bring_forward(core.queue.lane_due_at(lane))
            self._watch_thread.note_new_item(item.start_by, now)
        return future

    def flush(self) -> None:
        """Compute what is queued now without waiting for more: nothing else will come soon."""
        with self._core.lock:
            self._core.queue.flush()
            self._core.batch_due.bring_forward()

    def configure(self, *, max_batch_size: int | None = None, max_wait_s: float | None = None) -> None:
        """Changes settings from the next batch on; what runs is not touched. Limits learnt from memory stay.

        Raises:
            ConfigError: a setting of the wrong type or out of range; nothing has changed then.
        """
        if max_batch_size is not None:
            check_whole_number("max_batch_size", max_batch_size)
            warn_if_no_batch_can_fill(max_batch_size, self._core.queue.lane_items, stacklevel=2)
        if max_wait_s is not None:
            check_seconds("max_wait_s", max_wait_s)
        with self._core.lock:
            queue = self._core.queue
            queue.max_batch_size = max_batch_size or queue.max_batch_size
            queue.max_wait_s = queue.max_wait_s if max_wait_s is None else max_wait_s
            self._core.batch_due.bring_forward()

    def statistics(self) -> SchedulerStatistics:
        """Returns the counters and gauges, all of one moment."""
        self._check_process()
        self._watch_thread.check_batch_thread()
        with self._core.lock:
            return self._core.queue.statistics(
                self._core.clock(),
                state=self._core.state,
                waiting=len(self._core.line),
                forward_calls=self._forward.calls,
                forward_s=self._forward.seconds,
            )

    def close(self, *, drain_s: float = 30.0) -> None:
        """Refuses new work, computes what is queued, and after `drain_s` fails the rest with `ServerClosed`.

        Idempotent, from any thread; of several calls the shortest drain counts. Returns at most a second after
        `drain_s` even if the model hangs; its thread is then abandoned. Called from a callback it returns at once.
        """
        if os.getpid() != self._pid:
            return
        core = self._core
        drain_s = min(max(drain_s, 0.0), threading.TIMEOUT_MAX)
        refusal = partial(ServerClosed, f"scheduler {core.name} is closed: make a new one")
        with core.lock:
            core.drained_by = min(core.drained_by, core.clock() + drain_s)
            core.stop_admitting(refusal, SchedulerState.CLOSED)
        if self._on_own_thread():
            return
        self._watch_thread.check_batch_thread()
        if not core.over.wait(drain_s):
            core.end_drain()
        for thread in (self._batch_thread, self._watch_thread):
            thread.join(0 if core.abandoned else _JOIN_GRACE_S)
        if core.abandoned or not self._batch_thread.is_alive():
            atexit.unregister(self._at_exit)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"scheduler {self._core.name} cannot be pickled: it owns a thread; make one in each process")

    def _withdraw(self, order: int) -> None:
        with self._core.lock:
            self._core.queue.withdraw(order)
            self._core.line.call_next()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise CallerError(
                f"scheduler {self._core.name} belongs to process {self._pid}: make a new one after a fork"
            )

    def _check_may_wait(self) -> None:
        self._check_process()
        if self._on_own_thread():
            raise CallerError("a thread of the scheduler would wait for itself: use a callback, or another thread")
        self._watch_thread.check_batch_thread()

    def _on_own_thread(self) -> bool:
        return threading.current_thread() in (self._batch_thread, self._watch_thread)

    def _at_exit(self) -> None:
        self.close(drain_s=0)
        if os.getpid() == self._pid and not self._core.abandoned:
            self._batch_thread.join(_EXIT_GRACE_S)


def _seconds(deadline_s: float | None) -> float:
    """A deadline as seconds from now; none is infinity."""
    if deadline_s is None:
        return math.inf
    if math.isnan(deadline_s):
        raise BadRequest("a deadline or timeout is NaN: give seconds")
    return deadline_s


def _owned(sample: T) -> T:
    """A read-only copy of a writable array, which its caller may go on writing to."""
    if not isinstance(sample, np.ndarray) or not sample.flags.writeable:
        return sample
    copy: np.ndarray[Any, Any] = sample.copy()
    copy.flags.writeable = False
    return cast("T", copy)
