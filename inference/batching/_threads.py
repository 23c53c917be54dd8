"""The two threads of a scheduler: one runs the model, the other sees to it that nothing is late."""

import logging
import math
import threading
from collections.abc import Callable
from functools import partial
from typing import Generic

from inference.batching._core import SchedulerCore
from inference.batching._failure import FailureKind, describe
from inference.batching._forward import ForwardPass
from inference.batching._halving import Halving
from inference.batching._queue import Batch, R, T

logger = logging.getLogger(__name__)

_PULSE_S = 5.0  # how often the watch thread looks whether the batch thread lives, while anyone waits for it


class BatchThread(threading.Thread, Generic[T, R]):
    """Cuts batches, runs the model on them and answers; ends when admission has stopped and the queue is empty."""

    def __init__(
        self,
        core: SchedulerCore[T, R],
        forward: ForwardPass[T, R],
        device_lock: threading.Lock,
        *,
        retry_budget: int | None,
        stuck_after_s: float,
        on_out_of_memory: Callable[[], None] | None,
    ) -> None:
        super().__init__(name=core.name, daemon=True)
        self._core = core
        self._device_lock = device_lock
        self._forward_pass = forward
        self.stuck_after_s = stuck_after_s
        self._halving: Halving[T, R] = Halving(
            forward,
            core.queue,
            core.lock,
            core.clock,
            begin=self._begin_call,
            retry_budget=retry_budget,
            on_out_of_memory=on_out_of_memory,
        )

    @property
    def stuck_at(self) -> float:
        """When the call of the model that runs now will have taken too long; infinity while none does."""
        return self._forward_pass.running_since + self.stuck_after_s

    def run(self) -> None:
        core = self._core
        try:
            while self._wait_until_due():
                self._serve()
        except BaseException as error:
            logger.critical("%s: the batch thread ends", core.name, exc_info=True)
            core.break_down(describe(error, FailureKind.FATAL).make_error)
        core.over.set()
        with core.lock:
            core.watch_due.bring_forward()

    def _wait_until_due(self) -> bool:
        """Returns True when a batch is due, False when the thread has nothing left to do."""
        core = self._core
        with core.lock:
            while core.queue.queued or core.make_refusal is None:
                due_at = core.queue.batch_due_at()
                if due_at <= core.clock():
                    return True
                core.batch_due.sleep_until(due_at)
        return False

    def _serve(self) -> None:
        """Cuts what is due, computes it and answers it; what it held is gone when it returns."""
        core = self._core
        started_at = core.clock()
        with self._device_lock:
            # Cutting only now, with the device in hand, lets a batch fill while another model runs.
            with core.lock:
                batch = core.queue.cut(core.clock())
                core.line.call_next()
            if not isinstance(batch, Batch):
                return
            answers = self._halving.compute(batch.items)
        # Only now, with the device free: a callback may wait for another model on it.
        core.answer_all((item.future, error) for item, error in batch.expired)
        core.deliver(answers)
        if batch.items:
            core.note_pace(len(batch.items), core.clock() - started_at)

    def _begin_call(self) -> None:
        core = self._core
        with core.lock:
            self._forward_pass.running_since = core.clock()
            core.watch_due.bring_forward(self.stuck_at)


class WatchThread(threading.Thread, Generic[T, R]):
    """Sleeps until something is late: a deadline, a call of the model, the end of the drain, a dead batch thread."""

    def __init__(self, core: SchedulerCore[T, R], batch_thread: BatchThread[T, R]) -> None:
        super().__init__(name=f"{core.name}-watch", daemon=True)
        self._core = core
        self._batch_thread = batch_thread

    def note_new_item(self, start_by: float, now: float) -> None:
        """With the lock held: an item was queued."""
        self._core.watch_due.bring_forward(min(start_by, now + _PULSE_S))

    def check_batch_thread(self) -> None:
        """Answers everybody if the batch thread died without a word."""
        if not self._batch_thread.is_alive() and not self._core.over.is_set():
            self._core.give_up(f"the batch thread of scheduler {self._core.name} died: start a new process")

    def run(self) -> None:
        try:
            while self._look():
                pass
        except BaseException as error:
            logger.critical("%s: the watch thread ends", self._core.name, exc_info=True)
            self._core.break_down(describe(error, FailureKind.FATAL).make_error)

    def _look(self) -> bool:
        """Answers what is late, or sleeps until something may be; False when nothing is left to watch."""
        core = self._core
        with core.lock:
            now = core.clock()
            expired = core.queue.take_expired(now)
            core.line.call_next()
            act = self._trouble(now)
            if not expired and act is None:
                if core.make_refusal is not None and core.queue.idle:
                    return False
                core.watch_due.sleep_until(self._look_again_at(now))
                return True
        core.answer_all((item.future, error) for item, error in expired)
        if act is not None:
            act()
        return True

    def _trouble(self, now: float) -> Callable[[], None] | None:
        """What to do about the batch thread or the drain, if anything."""
        core, batch_thread = self._core, self._batch_thread
        if not core.over.is_set():
            if not batch_thread.is_alive():
                return self.check_batch_thread
            if batch_thread.stuck_at <= now:
                budget = batch_thread.stuck_after_s
                text = f"{core.name}: the model did not return within {budget} s: start a new process"
                return partial(core.give_up, text)
        return core.end_drain if core.drained_by <= now and not core.queue.idle else None

    def _look_again_at(self, now: float) -> float:
        core = self._core
        stuck_at = math.inf if core.over.is_set() else self._batch_thread.stuck_at
        if core.queue.idle:
            return stuck_at
        return min(core.queue.deadline_at(), stuck_at, core.drained_by, now + _PULSE_S)
