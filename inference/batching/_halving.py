"""Runs the model on a batch, halving what fails, until every item has an answer."""

import logging
import math
import threading
from collections import deque
from collections.abc import Callable
from typing import Generic

from inference.batching._core import Answer
from inference.batching._failure import Failure, FailureKind
from inference.batching._forward import ForwardPass
from inference.batching._queue import BatchQueue, Item, LearntLimit, R, T, too_late
from inference.errors import ForwardError

logger = logging.getLogger(__name__)


class Halving(Generic[T, R]):
    """Isolates the items a batch fails for.

    Args:
        begin: called before each call of the model.
        retry_budget: calls that may follow the first failure blamed on an item; None is 2 * log2 of the batch, which
            finds one bad item, for items with a deadline, and no bound for the others.
        on_out_of_memory: called before a batch that did not fit is tried in halves.
    """

    def __init__(
        self,
        forward: ForwardPass[T, R],
        queue: BatchQueue[T, R],
        lock: threading.Lock,
        clock: Callable[[], float],
        *,
        begin: Callable[[], None],
        retry_budget: int | None,
        on_out_of_memory: Callable[[], None] | None,
    ) -> None:
        self._forward = forward
        self._queue = queue
        self._lock = lock
        self._clock = clock
        self._begin = begin
        self._retry_budget = retry_budget
        self._on_out_of_memory = on_out_of_memory

    def compute(self, batch: list[Item[T, R]]) -> list[Answer[T, R]]:
        """Returns an answer for every item that still wants one; raises what is fatal."""
        answers: list[Answer[T, R]] = []
        without_room: list[list[Item[T, R]]] = []
        limit_before = self._queue.learnt_limit(batch[0].lane) if batch else None
        todo, spent, blamed = deque([batch]), 0, False
        while todo:
            # The larger halves first: should the budget end, they have decided more items than the smaller ones.
            items = todo.popleft()
            if blamed:
                items = self._drop_undecided(items, len(batch), spent, answers)
            items = self._drop_late(items, answers)
            if not items:
                continue
            half = (len(items) + 1) // 2
            halves = [items[:half], items[half:]]
            if len(items) > self._queue.limit(items[0].lane):
                todo += halves
                continue
            spent += blamed
            self._begin()
            outcome = self._forward([item.sample for item in items], [item.mode for item in items])
            if not isinstance(outcome, Failure):
                answers += zip(items, outcome, strict=True)
                self._note_fit(items)
            elif outcome.kind is FailureKind.FATAL:
                raise outcome.make_error()
            elif outcome.kind is None:
                answers += [(item, outcome.make_error()) for item in items]
            else:
                if outcome.kind is FailureKind.OUT_OF_MEMORY:
                    without_room.append(items)
                    self._make_room(items)
                else:
                    blamed = True
                if len(items) == 1:
                    answers.append((items[0], outcome.make_error()))
                else:
                    todo += halves
        self._absolve_neighbours(without_room, limit_before)
        return answers

    def _drop_undecided(
        self, items: list[Item[T, R]], batch_size: int, spent: int, answers: list[Answer[T, R]]
    ) -> list[Item[T, R]]:
        """Leaves out the items whose retry budget is spent."""
        budget = 2 * math.ceil(math.log2(batch_size)) if self._retry_budget is None else self._retry_budget
        if spent < budget:
            return items
        free = [item for item in items if self._retry_budget is None and item.start_by == math.inf]
        text = f"undecided after {spent} more forward passes of a batch that fails: submit it again"
        answers += [(item, ForwardError(text)) for item in items if item not in free]
        return free

    def _drop_late(self, items: list[Item[T, R]], answers: list[Answer[T, R]]) -> list[Item[T, R]]:
        """Leaves out what has been answered, and what should have begun by now."""
        with self._lock:
            now = self._clock()
            items = [item for item in items if self._queue.is_open(item)]
        answers += [(item, too_late("running")) for item in items if item.start_by <= now]
        return [item for item in items if item.start_by > now]

    def _note_fit(self, items: list[Item[T, R]]) -> None:
        with self._lock:
            self._queue.note_fit(items[0].lane, len(items))

    def _absolve_neighbours(self, without_room: list[list[Item[T, R]]], limit_before: LearntLimit | None) -> None:
        """Takes back limits learnt from calls with an item that does not fit even alone: they say nothing of others."""
        misfits = {items[0].order for items in without_room if len(items) == 1}
        if not misfits:
            return
        lane = without_room[0][0].lane
        with self._lock:
            self._queue.restore_limit(lane, limit_before)
            for items in without_room:
                if misfits.isdisjoint(item.order for item in items):
                    self._queue.lower_limit(lane, (len(items) + 1) // 2)

    def _make_room(self, items: list[Item[T, R]]) -> None:
        # The failed call's exception is gone by now, and with it the tensors its traceback held.
        if len(items) > 1:
            with self._lock:
                self._queue.lower_limit(items[0].lane, (len(items) + 1) // 2)
        if self._on_out_of_memory is not None:
            try:
                self._on_out_of_memory()
            except Exception:
                logger.exception("dropping caches after running out of memory failed")
