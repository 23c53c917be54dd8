"""What the callers and the two threads of a scheduler share: one lock, one queue, and how items get their answers."""

import logging
import math
import threading
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Generic

from inference.batching._queue import BatchQueue, Item, R, T
from inference.batching._statistics import SchedulerState
from inference.batching._waiting import Alarm, Line
from inference.errors import BadRequest, DeviceBroken, InferenceError, QueueFull, ServerClosed

logger = logging.getLogger(__name__)

_PACE_WEIGHT = 0.2  # of the latest batch in the running mean of seconds per item
_UNMEASURED_RETRY_S = 1.0
_RETRY_RANGE_S = 0.05, 60.0

Answer = tuple[Item[T, R], R | InferenceError]


class SchedulerCore(Generic[T, R]):
    """The scheduler without its threads.

    Attributes:
        lock: guards the queue, the line, the alarms and all that is below.
        make_refusal: what a submitter gets; None while open.
        drained_by: when what is still unanswered after closing is failed.
        over: set when the batch thread has ended or was given up, all its items answered.
        abandoned: the batch thread was given up: nobody waits for its end.
    """

    def __init__(self, queue: BatchQueue[T, R], clock: Callable[[], float], name: str) -> None:
        self.queue = queue
        self.clock = clock
        self.name = name
        self.lock = threading.Lock()
        self.line = Line(self.lock, queue)
        self.batch_due = Alarm(self.lock, clock)
        self.watch_due = Alarm(self.lock, clock)
        self.state = SchedulerState.OPEN
        self.make_refusal: Callable[[], InferenceError] | None = None
        self.drained_by = math.inf
        self.over = threading.Event()
        self.abandoned = False
        self._seconds_per_item: float | None = None

    # With the lock held.

    def admit(self, lane: Hashable, nbytes: int, wait_s: float) -> None:
        """Returns once there is room and nobody who came before waits for it, or raises."""
        if self.make_refusal is not None:
            raise self.make_refusal()
        if nbytes > self.queue.max_bytes:
            limit = self.queue.max_bytes
            raise BadRequest(f"a sample of {nbytes} bytes exceeds max_queued_bytes={limit}: raise it", nbytes=nbytes)
        if self.line.may_pass(lane, nbytes):
            return
        if wait_s <= 0 or not self.line.wait(lane, nbytes, wait_s, lambda: self.make_refusal is not None):
            queued, retry_after_s = self.queue.queued, self._retry_after_s()
            text = f"scheduler {self.name} has {queued} items queued: try again in {retry_after_s:.2g} s"
            raise QueueFull(text, queued=queued, retry_after_s=retry_after_s)
        if self.make_refusal is not None:
            raise self.make_refusal()

    def stop_admitting(self, make_refusal: Callable[[], InferenceError], state: SchedulerState) -> None:
        if self.state is not SchedulerState.BROKEN:  # a broken one that is closed stays broken
            self.make_refusal, self.state = make_refusal, state
        self.queue.draining = True
        self.batch_due.bring_forward()
        self.watch_due.bring_forward()
        self.line.send_away()

    # Without the lock.

    def deliver(self, answers: Iterable[Answer[T, R]]) -> None:
        """Answers items that have no answer yet; never raises."""
        with self.lock:
            mine = [
                (item.future, answer)
                for item, answer in answers
                if self.queue.settle(item, answer if isinstance(answer, InferenceError) else None)
            ]
        self.answer_all(mine)

    def answer_all(self, answers: Iterable[tuple[Future[R], R | InferenceError]]) -> None:
        """Hands out answers that are already counted; never raises."""
        for future, answer in answers:
            try:
                if isinstance(answer, InferenceError):
                    future.set_exception(answer)
                else:
                    future.set_result(answer)
            except BaseException:
                # A callback left with SystemExit or the like: that is not the scheduler's end, nor its neighbours'.
                logger.exception("%s: a callback of a future failed", self.name)

    def end_drain(self) -> None:
        """Fails what `close` gave no more time."""
        text = f"scheduler {self.name} was closed before this item was computed: submit it again elsewhere"
        self._fail_all(partial(ServerClosed, text))

    def break_down(self, make_error: Callable[[], InferenceError]) -> None:
        """Fails everything queued and running, and refuses what comes."""
        with self.lock:
            self.stop_admitting(make_error, SchedulerState.BROKEN)
        self._fail_all(make_error)

    def give_up(self, text: str) -> None:
        """Goes on without the batch thread, which is dead or will never return."""
        self.abandoned = True
        logger.critical("%s", text)
        self.break_down(partial(DeviceBroken, text))
        self.over.set()

    def note_pace(self, items: int, seconds: float) -> None:
        """Notes how long a batch took, from its turn to its answers."""
        pace = seconds / items
        before = pace if self._seconds_per_item is None else self._seconds_per_item
        self._seconds_per_item = before + _PACE_WEIGHT * (pace - before)

    def _retry_after_s(self) -> float:
        """How long what is queued will take at the pace of late."""
        if self._seconds_per_item is None:
            return _UNMEASURED_RETRY_S
        least, most = _RETRY_RANGE_S
        return min(max(self.queue.queued * self._seconds_per_item, least), most)

    def _fail_all(self, make_error: Callable[[], InferenceError]) -> None:
        with self.lock:
            items = self.queue.claim_all()
        self.deliver((item, make_error()) for item in items)
        with self.lock:
            self.watch_due.bring_forward()
