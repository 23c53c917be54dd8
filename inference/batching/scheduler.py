"""The batch scheduler: samples from many callers, one forward pass at a time.

All decisions are in `_queue.BatchQueue`; here are the lock around it, the thread that runs the model and the
waiting. Callbacks of futures run outside the lock, on the batch thread or on the thread that cancels.
"""

import atexit
import logging
import math
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Sequence
from concurrent.futures import Future
from functools import partial
from types import TracebackType
from typing import Generic, NoReturn, Self

from inference.batching._forward import Failure, FailureKind, ForwardPass, classify_failure, describe
from inference.batching._future import ItemFuture
from inference.batching._queue import Batch, BatchQueue, Item, R, SchedulerStatistics, T
from inference.errors import (
    BadRequest,
    CallerError,
    ConfigError,
    DeadlineExceeded,
    ForwardError,
    InferenceError,
    QueueFull,
    ServerClosed,
)

logger = logging.getLogger(__name__)

_EXIT_GRACE_S = 5.0  # a daemon thread that wakes in native code during interpreter shutdown may crash the process
_JOIN_GRACE_S = 1.0

Answer = tuple[Item[T, R], R | InferenceError]


class BatchScheduler(Generic[T, R]):
    """Gathers samples of any number of threads and event loops into batches for one model.

    Thread-safe. `submit` returns a `concurrent.futures.Future` (`asyncio.wrap_future` it on an event loop). Every
    accepted sample gets exactly one answer:

    - its row of what `forward` returned, or the exception `forward` put into that row;
    - cancelled: a queued item leaves at once and never reaches the model; a running one is computed and counted
      as wasted;
    - `DeadlineExceeded` if its deadline passes while it is queued (seen between forward passes) or while a failed
      batch is being halved;
    - its own error (`TileError` unless it is an `InferenceError` already) if `forward` fails on it alone;
      `ForwardError` if the retry budget ends before that is known or it alone does not fit in memory;
      `ModelContractError` if `forward` broke its contract;
    - `DeviceBroken` after a fatal error or the death of the batch thread, `ServerClosed` after `close`.

    Samples and results pass through uncopied: a sample must not be changed after `submit`. Not usable in a forked
    child. Waiting for a result inside `forward` or a callback raises, since nobody would compute it.
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
        lane: Callable[[T, str], Hashable] = lambda _sample, _mode: None,
        device_lock: "threading.Lock | None" = None,
        clock: Callable[[], float] = time.monotonic,
        name: str = "batch",
    ) -> None:
        """Starts the batch thread.

        Args:
            forward: called with samples and modes, one call at a time; returns a list or tuple of as many results.
            max_wait_s: from the arrival of a batch's first item; 0 takes what is there.
            classify: how to react to an exception of `forward`.
            retry_budget: further calls of `forward` one batch may cost; None halves to the end.
            lane: samples of different lanes never share a batch.
            device_lock: held during each batch, for models that share a device.

        Raises:
            ConfigError: a setting of the wrong type or out of range.
        """
        _check_whole_numbers(max_batch_size=max_batch_size, max_queued_items=max_queued_items)
        _check_whole_numbers(max_queued_bytes=max_queued_bytes)
        if retry_budget is not None:
            _check_whole_numbers(least=0, retry_budget=retry_budget)
        if not 0 <= max_wait_s <= threading.TIMEOUT_MAX:
            raise ConfigError(f"max_wait_s is {max_wait_s}: give seconds, 0 or more", max_wait_s=max_wait_s)
        if max_queued_items < max_batch_size:
            text = f"max_queued_items={max_queued_items} is below max_batch_size={max_batch_size}: no batch can fill"
            warnings.warn(text, RuntimeWarning, stacklevel=2)
        self._forward: ForwardPass[T, R] = ForwardPass(forward, classify, clock, name)
        self._nbytes = nbytes
        self._retry_budget = math.inf if retry_budget is None else retry_budget
        self._lane = lane
        self._device_lock = device_lock or threading.Lock()
        self._clock = clock
        self._name = name
        self._pid = os.getpid()
        self._queue: BatchQueue[T, R] = BatchQueue(
            max_batch_size=max_batch_size, max_wait_s=max_wait_s, max_items=max_queued_items, max_bytes=max_queued_bytes
        )
        self._lock = threading.Lock()
        self._due = threading.Condition(self._lock)  # only the batch thread waits here
        self._sleeps_until = -math.inf
        self._line: deque[threading.Condition] = deque()  # submitters waiting for room, first come first served
        self._make_refusal: Callable[[], InferenceError] | None = None  # None while open
        self._thread = threading.Thread(target=self._run_thread, name=name, daemon=True)
        self._thread.start()
        atexit.register(self._at_exit)

    def submit(
        self,
        sample: T,
        mode: str = "prediction_with_embedding",
        *,
        deadline_s: float | None = None,
        block: bool = True,
        timeout_s: float | None = None,
    ) -> Future[R]:
        """Queues one sample; waits for room, in order of arrival, unless `block` is False.

        Args:
            mode: which outputs `forward` is asked for; modes share batches.
            deadline_s: from now; bounds the wait for room too.
            timeout_s: longest wait for room; None waits as long as it takes.

        Raises:
            QueueFull: no room, at once or in time.
            ServerClosed: after `close`.
            DeviceBroken: after a fatal error.
            BadRequest: a sample larger than the whole queue.
            CallerError: in a forked child.
        """
        self._check_process()
        lane, nbytes = self._lane(sample, mode), self._nbytes(sample)
        deadline_at = math.inf if deadline_s is None else self._clock() + deadline_s
        waits = [s for s in (timeout_s, deadline_s, threading.TIMEOUT_MAX) if s is not None] if block else [0.0]
        future: ItemFuture[R] = ItemFuture(self._withdraw, self._on_batch_thread)
        with self._lock:
            try:
                self._admit(nbytes, min(waits))
            except InferenceError:
                self._queue.refused += 1
                raise
            finally:
                self._call_next()
            item = self._queue.push(
                sample, mode, future, lane=lane, nbytes=nbytes, now=self._clock(), deadline_at=deadline_at
            )
            future.order = item.order
            # Waking the thread for each item would cost more than the item.
            if min(self._queue.lane_due_at(lane), deadline_at) < self._sleeps_until:
                self._due.notify()
        return future

    def flush(self) -> None:
        """Compute what is queued now without waiting for more: nothing else will come soon."""
        with self._lock:
            self._queue.flush()
            self._due.notify()

    def statistics(self) -> SchedulerStatistics:
        """Returns the counters and gauges, all of one moment."""
        self._check_process()
        with self._lock:
            return self._queue.statistics(
                self._clock(),
                accepting=self._make_refusal is None,
                waiting=len(self._line),
                forward_calls=self._forward.calls,
                forward_s=self._forward.seconds,
            )

    def close(self, *, drain_s: float = 30.0) -> None:
        """Refuses new work, computes what is queued, and after `drain_s` fails the rest with `ServerClosed`.

        Idempotent, from any thread; of several calls the shortest drain counts. Returns at most a second after
        `drain_s` even if the model hangs; its thread is then abandoned. Called on the batch thread (from a callback)
        it returns at once and the thread ends when the queue is empty.
        """
        if os.getpid() != self._pid:
            return
        with self._lock:
            refusal = partial(ServerClosed, f"scheduler {self._name} is closed: make a new one")
            self._stop_admitting(self._make_refusal or refusal)
        if self._on_batch_thread():
            return
        self._thread.join(min(max(drain_s, 0.0), threading.TIMEOUT_MAX))
        if self._thread.is_alive():
            text = f"scheduler {self._name} was closed before this item was computed: submit it again elsewhere"
            self._fail_all(partial(ServerClosed, text))
            self._thread.join(_JOIN_GRACE_S)
        if not self._thread.is_alive():
            atexit.unregister(self._at_exit)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"scheduler {self._name} cannot be pickled: it owns a thread; make one in each process")

    # Callers' side; the lock is held in `_admit`, `_call_next` and `_stop_admitting`.

    def _admit(self, nbytes: int, wait_s: float) -> None:
        """Returns once there is room and nobody older waits for it, or raises."""
        if self._make_refusal is not None:
            raise self._make_refusal()
        if nbytes > self._queue.max_bytes:
            limit = self._queue.max_bytes
            raise BadRequest(f"a sample of {nbytes} bytes exceeds max_queued_bytes={limit}: raise it", nbytes=nbytes)
        if not self._line and self._queue.has_room(nbytes):
            return
        # The batch thread must not wait for room: only itself makes any.
        if wait_s <= 0 or self._on_batch_thread() or not self._wait_in_line(nbytes, wait_s):
            queued = self._queue.queued
            raise QueueFull(f"scheduler {self._name} has {queued} items queued: try again later", queued=queued)
        if self._make_refusal is not None:
            raise self._make_refusal()

    def _wait_in_line(self, nbytes: int, wait_s: float) -> bool:
        turn = threading.Condition(self._lock)
        self._line.append(turn)
        try:
            return turn.wait_for(
                lambda: self._make_refusal is not None or (self._line[0] is turn and self._queue.has_room(nbytes)),
                wait_s,
            )
        finally:
            self._line.remove(turn)

    def _call_next(self) -> None:
        if self._line and self._queue.has_room(0):
            self._line[0].notify()

    def _withdraw(self, order: int) -> None:
        with self._lock:
            self._queue.withdraw(order)
            self._call_next()

    def _stop_admitting(self, make_refusal: Callable[[], InferenceError]) -> None:
        self._make_refusal = make_refusal
        self._queue.draining = True
        self._due.notify()
        for turn in self._line:
            turn.notify()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise CallerError(f"scheduler {self._name} belongs to process {self._pid}: make a new one after a fork")

    def _on_batch_thread(self) -> bool:
        return threading.current_thread() is self._thread

    def _at_exit(self) -> None:
        self.close(drain_s=0)
        if os.getpid() == self._pid:
            self._thread.join(_EXIT_GRACE_S)

    # The batch thread's side.

    def _run_thread(self) -> None:
        try:
            while self._wait_until_due():
                self._serve()
        except BaseException as error:
            logger.critical("%s: the batch thread ends", self._name, exc_info=True)
            self._break(describe(error, FailureKind.FATAL).make_error)

    def _wait_until_due(self) -> bool:
        """Returns True when a batch or an expiry is due, False when the thread has nothing left to do."""
        with self._lock:
            while self._queue.queued or self._make_refusal is None:
                due_at = self._queue.due_at()
                wait_s = due_at - self._clock()
                if wait_s <= 0:
                    return True
                self._sleeps_until = due_at
                self._due.wait(min(wait_s, threading.TIMEOUT_MAX))
                self._sleeps_until = -math.inf
        return False

    def _serve(self) -> None:
        """Cuts what is due, computes it and answers it; what it held is gone when it returns."""
        with self._device_lock:
            # Cutting only now, with the device in hand, lets a batch fill while another model runs.
            with self._lock:
                batch = self._queue.cut(self._clock())
                self._call_next()
            if not isinstance(batch, Batch):
                return
            answers = [*map(_too_late, batch.expired), *self._compute(batch.items)]
        # Only now, with the device free: a callback may wait for another model on it.
        self._deliver(answers)

    def _compute(self, items: list[Item[T, R]]) -> list[Answer[T, R]]:
        """Runs the model on a batch, halving what fails, until each item has an answer; raises what is fatal."""
        answers: list[Answer[T, R]] = []
        todo, calls = deque([items]), 0
        while todo:
            # The larger halves first: should the budget end, they have decided more items than the smaller ones.
            items = self._drop_late(todo.popleft(), answers)
            if not items:
                continue
            if calls > self._retry_budget:
                text = f"undecided after {calls} forward passes of a batch that fails: submit it again"
                answers += [(item, ForwardError(text)) for item in items]
                continue
            half = (len(items) + 1) // 2
            halves = [items[:half], items[half:]]
            if len(items) > self._queue.limit(items[0].lane):
                todo += halves
                continue
            calls += 1
            outcome = self._forward([item.sample for item in items], [item.mode for item in items])
            if not isinstance(outcome, Failure):
                answers += zip(items, outcome, strict=True)
            elif outcome.kind is FailureKind.FATAL:
                raise outcome.make_error()
            elif outcome.kind is None or len(items) == 1:
                answers += [(item, outcome.make_error()) for item in items]
            else:
                if outcome.kind is FailureKind.OUT_OF_MEMORY:
                    self._queue.lower_limit(items[0].lane, half)
                todo += halves
        return answers

    def _drop_late(self, items: list[Item[T, R]], answers: list[Answer[T, R]]) -> list[Item[T, R]]:
        """Leaves out what `close` has answered and what has expired since it was cut."""
        with self._lock:
            now = self._clock()
            items = [item for item in items if self._queue.is_open(item)]
        answers += [_too_late(item) for item in items if item.deadline_at <= now]
        return [item for item in items if item.deadline_at > now]

    def _deliver(self, answers: Iterable[Answer[T, R]]) -> None:
        """Answers items that have no answer yet; never raises."""
        with self._lock:
            mine = [
                (item.future, answer)
                for item, answer in answers
                if self._queue.settle(item, answer if isinstance(answer, InferenceError) else None)
            ]
        for future, answer in mine:
            try:
                if isinstance(answer, InferenceError):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)
            except BaseException:
                # A callback left with SystemExit or the like: that is not the scheduler's end, nor its neighbours'.
                logger.exception("%s: a callback of a future failed", self._name)

    def _fail_all(self, make_error: Callable[[], InferenceError]) -> None:
        with self._lock:
            items = self._queue.claim_all()
        self._deliver((item, make_error()) for item in items)

    def _break(self, make_error: Callable[[], InferenceError]) -> None:
        with self._lock:
            self._stop_admitting(make_error)
        self._fail_all(make_error)


def _too_late(item: Item[T, R]) -> Answer[T, R]:
    return item, DeadlineExceeded("not computed before its deadline: allow more time or send less at once")


def _check_whole_numbers(least: int = 1, **settings: object) -> None:
    for name, value in settings.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(f"{name} is {value!r}: give a whole number, {least} or more", **{name: value})
