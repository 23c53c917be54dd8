"""What waits for the model, what runs and what came of it: the scheduler's state, without threads or a clock.

Each accepted item is in `_open` until the one moment it gets its answer. Callers hold the scheduler's lock.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Hashable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice
from typing import Generic, TypeVar

from inference.errors import DeadlineExceeded, InferenceError

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class SchedulerStatistics:
    """A scheduler's counters and gauges at one moment.

    `accepted = completed + sum(failed) + cancelled + expired + queued + running`, always.

    Attributes:
        accepting: False once closed or broken.
        waiting: submitters blocked for want of room.
        refused: submissions that raised; never part of `accepted`.
        failed: items answered with an error, by its code.
        wasted: results computed that no caller received.
        oldest_age_s: how long the oldest queued item has waited.
        batches: batches cut, with at least one item; `batch_sizes` counts them by size.
        forward_calls: calls of the model, repetitions after a failure included.
        forward_s: seconds spent inside those calls.
        batch_limits: lower limits learnt from running out of memory, by lane.
    """

    accepting: bool
    waiting: int
    accepted: int
    refused: int
    completed: int
    failed: Mapping[str, int]
    cancelled: int
    expired: int
    wasted: int
    queued: int
    queued_bytes: int
    running: int
    lanes: int
    oldest_age_s: float
    batches: int
    batch_sizes: Mapping[int, int]
    forward_calls: int
    forward_s: float
    batch_limits: Mapping[Hashable, int]


@dataclass(eq=False, slots=True)
class Item(Generic[T, R]):
    """One accepted sample; `order` is its place in the order of arrival."""

    order: int
    sample: T
    mode: str
    lane: Hashable
    nbytes: int
    enqueued_at: float
    deadline_at: float
    future: Future[R]
    claimed: bool = False
    unwanted: bool = False


@dataclass(frozen=True, eq=False)
class Batch(Generic[T, R]):
    """Claimed items: of one lane, to compute, or of any lane, whose deadline has passed."""

    items: list[Item[T, R]]
    expired: list[Item[T, R]]


class BatchQueue(Generic[T, R]):
    """Items in lanes; a batch is cut from one lane, first in first out.

    A lane is due when it is full or its head has waited `max_wait_s`. Lanes take turns: of those due, the one
    served longest ago goes first, so neither a flood nor a backlog in one lane delays another by more than a batch.
    """

    def __init__(self, *, max_batch_size: int, max_wait_s: float, max_items: int, max_bytes: int) -> None:
        self.max_batch_size = max_batch_size
        self.max_wait_s = max_wait_s
        self.max_items = max_items
        self.max_bytes = max_bytes
        self.draining = False  # nothing more will come: every lane is due at once
        self._flushed = -1  # the last item that need not wait for company
        self.queued = 0
        self.queued_bytes = 0
        self.accepted = 0
        self.refused = 0
        self._completed = 0
        self._failed: Counter[str] = Counter()
        self._cancelled = 0
        self._expired = 0
        self._wasted = 0
        self._batch_sizes: Counter[int] = Counter()
        self._open: dict[int, Item[T, R]] = {}
        self._lanes: OrderedDict[Hashable, OrderedDict[int, Item[T, R]]] = OrderedDict()  # in turn; none is empty
        self._limits: dict[Hashable, int] = {}
        self._next_deadline = math.inf  # may be too early, when the item it came from has left; never too late

    def has_room(self, nbytes: int) -> bool:
        return self.queued < self.max_items and self.queued_bytes + nbytes <= self.max_bytes

    def push(
        self, sample: T, mode: str, future: Future[R], *, lane: Hashable, nbytes: int, now: float, deadline_at: float
    ) -> Item[T, R]:
        """Accepts a sample for which there is room."""
        item = Item(self.accepted, sample, mode, lane, nbytes, now, deadline_at, future)
        self.accepted += 1
        self._open[item.order] = item
        self._lanes.setdefault(lane, OrderedDict())[item.order] = item
        self.queued += 1
        self.queued_bytes += nbytes
        self._next_deadline = min(self._next_deadline, deadline_at)
        return item

    def lane_due_at(self, lane: Hashable) -> float:
        """When a batch of this (non-empty) lane is due; minus infinity when it need not wait for anything."""
        items = self._lanes[lane]
        if self.draining or len(items) >= self.limit(lane):
            return -math.inf
        first = next(iter(items.values()))
        return -math.inf if first.order <= self._flushed else first.enqueued_at + self.max_wait_s

    def flush(self) -> None:
        """Makes all that is queued now due at once."""
        self._flushed = self.accepted - 1

    def due_at(self) -> float:
        """When the next batch or expiry is due; infinity while nothing is queued."""
        if not self._lanes:
            return math.inf
        return min(self._next_deadline, min(map(self.lane_due_at, self._lanes)))

    def cut(self, now: float) -> Batch[T, R] | float | None:
        """Claims what is due, expired items before a batch; else the seconds until then; None while nothing is queued.

        Items cancelled meanwhile leave here, so a batch may turn out to hold nothing to compute.
        """
        if expired := self._take_expired(now):
            return Batch([], expired)
        for lane, queued in self._lanes.items():
            if self.lane_due_at(lane) <= now:
                first = list(islice(queued.values(), self.limit(lane)))
                self._lanes.move_to_end(lane)
                items = [item for item in first if self._claim(item)]
                if items:
                    self._batch_sizes[len(items)] += 1
                return Batch(items, [])
        return self.due_at() - now if self.queued else None

    def claim_all(self) -> list[Item[T, R]]:
        """Claims everything queued and returns all that still wants an answer, running items included."""
        for item in [item for lane in self._lanes.values() for item in lane.values()]:
            self._claim(item)
        return list(self._open.values())

    def withdraw(self, order: int) -> None:
        """Notes that the caller cancelled: a queued item leaves at once, a running one is computed for nobody."""
        item = self._open.get(order)
        if item is None:
            return
        if item.claimed:
            item.unwanted = True
        else:
            self._claim(item)

    def is_open(self, item: Item[T, R]) -> bool:
        return item.order in self._open

    def settle(self, item: Item[T, R], error: InferenceError | None) -> bool:
        """Counts the one answer of a claimed item; False if it has had its answer already."""
        if self._open.pop(item.order, None) is None:
            self._wasted += error is None
            return False
        if error is None:
            self._completed += 1
            self._wasted += item.unwanted
        elif isinstance(error, DeadlineExceeded):
            self._expired += 1
        else:
            self._failed[error.code] += 1
        return True

    def limit(self, lane: Hashable) -> int:
        """How many items a batch of this lane may hold."""
        return self._limits.get(lane, self.max_batch_size)

    def lower_limit(self, lane: Hashable, limit: int) -> None:
        """Remembers that larger batches of this lane do not fit in memory."""
        self._limits[lane] = min(limit, self.limit(lane))

    def statistics(
        self, now: float, *, accepting: bool, waiting: int, forward_calls: int, forward_s: float
    ) -> SchedulerStatistics:
        heads = [next(iter(lane.values())).enqueued_at for lane in self._lanes.values()]
        return SchedulerStatistics(
            accepting=accepting,
            waiting=waiting,
            accepted=self.accepted,
            refused=self.refused,
            completed=self._completed,
            failed=dict(self._failed),
            cancelled=self._cancelled,
            expired=self._expired,
            wasted=self._wasted,
            queued=self.queued,
            queued_bytes=self.queued_bytes,
            running=len(self._open) - self.queued,
            lanes=len(self._lanes),
            oldest_age_s=max(0.0, now - min(heads, default=now)),
            batches=self._batch_sizes.total(),
            batch_sizes=dict(self._batch_sizes),
            forward_calls=forward_calls,
            forward_s=forward_s,
            batch_limits=dict(self._limits),
        )

    def _claim(self, item: Item[T, R]) -> bool:
        """Takes a queued item out of its lane; False if its caller has cancelled it, which is its answer."""
        lane = self._lanes[item.lane]
        del lane[item.order]
        if not lane:
            del self._lanes[item.lane]
        self.queued -= 1
        self.queued_bytes -= item.nbytes
        # From here on `cancel()` returns False, or it came first: the future itself decides, atomically.
        item.claimed = item.future.set_running_or_notify_cancel()
        if not item.claimed:
            del self._open[item.order]
            self._cancelled += 1
        return item.claimed

    def _take_expired(self, now: float) -> list[Item[T, R]]:
        if now < self._next_deadline:
            return []
        queued = [item for lane in self._lanes.values() for item in lane.values()]
        expired = [item for item in queued if item.deadline_at <= now and self._claim(item)]
        self._next_deadline = min((item.deadline_at for item in queued if item.deadline_at > now), default=math.inf)
        return expired
