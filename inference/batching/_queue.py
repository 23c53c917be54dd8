"""What waits for the model, what runs and what came of it: the scheduler's state, without threads or a clock.

Each accepted item is in `_open` until the one moment it gets its answer. Callers hold the scheduler's lock.
"""

import math
from collections import Counter, OrderedDict
from collections.abc import Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import islice
from typing import Generic, NamedTuple, TypeVar

from inference.batching._statistics import SchedulerState, SchedulerStatistics
from inference.errors import DeadlineExceeded, InferenceError

T = TypeVar("T")
R = TypeVar("R")

RAISE_AFTER = 64  # successful batches as large as a learnt limit allows, until twice as much is tried


@dataclass(eq=False, slots=True)
class Item(Generic[T, R]):
    """One accepted sample.

    Attributes:
        order: its place in the order of arrival.
        start_by: when it expires if it is still queued; never later than `answer_by`.
        answer_by: when it expires wherever it is.
    """

    order: int
    sample: T
    mode: str
    lane: Hashable
    nbytes: int
    enqueued_at: float
    start_by: float
    answer_by: float
    future: Future[R]
    claimed: bool = False
    unwanted: bool = False


Expired = tuple[Item[T, R], DeadlineExceeded]


@dataclass(frozen=True, eq=False)
class Batch(Generic[T, R]):
    """Claimed items of one lane, to compute; or items whose deadline has passed, already counted, with their errors."""

    items: list[Item[T, R]]
    expired: list[Expired[T, R]]


@dataclass(eq=False, slots=True)
class _Lane(Generic[T, R]):
    """Items that may share a batch, in order of arrival; never empty."""

    items: OrderedDict[int, Item[T, R]] = field(default_factory=OrderedDict)
    nbytes: int = 0
    served_at: float = -math.inf

    @property
    def first(self) -> Item[T, R]:
        return next(iter(self.items.values()))


class LearntLimit(NamedTuple):
    """The largest batch of a lane that may fit in memory.

    Attributes:
        items: how many it may hold.
        fitted: how many batches of that size have succeeded since.
    """

    items: int
    fitted: int = 0


class BatchQueue(Generic[T, R]):
    """Items in lanes; a batch is cut from one lane, first in first out.

    A lane is due when it is full or its head has waited `max_wait_s`. Of the lanes that are due, the one whose head
    must leave first is served: at its queue deadline, or `max_wait_s` after it came or its lane was last served. So
    an early deadline goes first, but a lane that has waited `max_wait_s` for its turn gives way only to one that has
    waited longer, and how full a lane is plays no part.
    """

    def __init__(
        self, *, max_batch_size: int, max_wait_s: float, max_items: int, max_bytes: int, lane_share: float = 1.0
    ) -> None:
        self.max_batch_size = max_batch_size
        self.max_wait_s = max_wait_s
        self.max_items = max_items
        self.max_bytes = max_bytes
        self.lane_items = max(1, int(max_items * lane_share))
        self.lane_bytes = int(max_bytes * lane_share)
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
        self._expired_running = 0
        self._wasted = 0
        self._batch_sizes: Counter[int] = Counter()
        self._open: dict[int, Item[T, R]] = {}
        self._lanes: OrderedDict[Hashable, _Lane[T, R]] = OrderedDict()  # of equal claims, the first goes first
        self._limits: dict[Hashable, LearntLimit] = {}
        self._deadlines: list[tuple[float, int]] = []  # a heap of times and orders; may name items that have left

    def has_room(self, lane: Hashable, nbytes: int) -> bool:
        if self.queued >= self.max_items or self.queued_bytes + nbytes > self.max_bytes:
            return False
        return self.lane_has_room(lane, nbytes)

    def lane_has_room(self, lane: Hashable, nbytes: int) -> bool:
        """Whether a lane is below its share; an empty one may hold one item, however large."""
        found = self._lanes.get(lane)
        return found is None or (len(found.items) < self.lane_items and found.nbytes + nbytes <= self.lane_bytes)

    def lane_length(self, lane: Hashable) -> int:
        found = self._lanes.get(lane)
        return 0 if found is None else len(found.items)

    def push(
        self,
        sample: T,
        mode: str,
        future: Future[R],
        *,
        lane: Hashable,
        nbytes: int,
        now: float,
        start_by: float = math.inf,
        answer_by: float = math.inf,
    ) -> Item[T, R]:
        """Accepts a sample for which there is room."""
        start_by = min(start_by, answer_by)
        item = Item(self.accepted, sample, mode, lane, nbytes, now, start_by, answer_by, future)
        self.accepted += 1
        self._open[item.order] = item
        found = self._lanes.get(lane)
        if found is None:
            found = self._lanes[lane] = _Lane()
        found.items[item.order] = item
        found.nbytes += nbytes
        self.queued += 1
        self.queued_bytes += nbytes
        if start_by < math.inf:
            self._note_deadlines(item)
        return item

    def lane_due_at(self, lane: Hashable) -> float:
        """When a batch of this (non-empty) lane is due; minus infinity when it need not wait for anything."""
        found = self._lanes[lane]
        if self.draining or len(found.items) >= self.limit(lane):
            return -math.inf
        first = found.first
        return -math.inf if first.order <= self._flushed else first.enqueued_at + self.max_wait_s

    def flush(self) -> None:
        """Makes all that is queued now due at once."""
        self._flushed = self.accepted - 1

    def batch_due_at(self) -> float:
        """When the next batch is due; infinity while nothing is queued."""
        return min(map(self.lane_due_at, self._lanes), default=math.inf)

    def deadline_at(self) -> float:
        """When the next item expires; may be too early, when the item it came from is no longer queued."""
        while self._deadlines and self._deadlines[0][1] not in self._open:
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else math.inf

    def cut(self, now: float) -> Batch[T, R] | float | None:
        """Claims what is due, expired items before a batch; else the seconds until then; None while nothing is queued.

        Items cancelled meanwhile leave here, so a batch may turn out to hold nothing to compute.
        """
        if expired := self.take_expired(now):
            return Batch([], expired)
        due = [lane for lane in self._lanes if self.lane_due_at(lane) <= now]
        if not due:
            return min(self.batch_due_at(), self.deadline_at()) - now if self.queued else None
        key = min(due, key=self._leaves_by)
        lane = self._lanes[key]
        lane.served_at = now
        self._lanes.move_to_end(key)
        items = [item for item in list(islice(lane.items.values(), self.limit(key))) if self._claim(item)]
        if items:
            self._batch_sizes[len(items)] += 1
        return Batch(items, [])

    def take_expired(self, now: float) -> list[Expired[T, R]]:
        """Takes and counts every item whose deadline has passed; the caller passes each its error."""
        expired: list[Expired[T, R]] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            item = self._open.get(heappop(self._deadlines)[1])
            if item is None:
                continue
            stage = "running" if item.claimed else "queued"
            if item.answer_by <= now if item.claimed else self._claim(item):
                error = too_late(stage)
                self.settle(item, error)
                expired.append((item, error))
        return expired

    def claim_all(self) -> list[Item[T, R]]:
        """Claims everything queued and returns all that still wants an answer, running items included."""
        for item in [item for lane in self._lanes.values() for item in lane.items.values()]:
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

    @property
    def idle(self) -> bool:
        """True while no accepted item wants an answer."""
        return not self._open

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
            self._expired_running += error.fields.get("stage") == "running"
        else:
            self._failed[error.code] += 1
        return True

    def limit(self, lane: Hashable) -> int:
        """How many items a batch of this lane may hold."""
        found = self._limits.get(lane)
        return self.max_batch_size if found is None else min(found.items, self.max_batch_size)

    def lower_limit(self, lane: Hashable, limit: int) -> None:
        """Remembers that larger batches of this lane do not fit in memory."""
        found = self._limits.get(lane)
        if found is None or limit < found.items:
            self._limits[lane] = LearntLimit(limit)

    def learnt_limit(self, lane: Hashable) -> LearntLimit | None:
        return self._limits.get(lane)

    def restore_limit(self, lane: Hashable, limit: LearntLimit | None) -> None:
        """Takes back what was learnt since."""
        if limit is None:
            self._limits.pop(lane, None)
        else:
            self._limits[lane] = limit

    def note_fit(self, lane: Hashable, size: int) -> None:
        """Notes a batch that succeeded: after `RAISE_AFTER` at the limit, memory may be there again for twice that."""
        found = self._limits.get(lane)
        if found is None or size < found.items:
            return
        if found.fitted + 1 < RAISE_AFTER:
            self._limits[lane] = found._replace(fitted=found.fitted + 1)
        elif 2 * found.items < self.max_batch_size:
            self._limits[lane] = LearntLimit(2 * found.items)
        else:
            del self._limits[lane]

    def statistics(
        self, now: float, *, state: SchedulerState, waiting: int, forward_calls: int, forward_s: float
    ) -> SchedulerStatistics:
        heads = [lane.first.enqueued_at for lane in self._lanes.values()]
        return SchedulerStatistics(
            state=state,
            waiting=waiting,
            accepted=self.accepted,
            refused=self.refused,
            completed=self._completed,
            failed=dict(self._failed),
            cancelled=self._cancelled,
            expired=self._expired,
            expired_running=self._expired_running,
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
            batch_limits={lane: limit.items for lane, limit in self._limits.items()},
        )

    def _leaves_by(self, key: Hashable) -> float:
        lane = self._lanes[key]
        return min(max(lane.first.enqueued_at, lane.served_at) + self.max_wait_s, lane.first.start_by)

    def _claim(self, item: Item[T, R]) -> bool:
        """Takes a queued item out of its lane; False if its caller has cancelled it, which is its answer."""
        lane = self._lanes[item.lane]
        del lane.items[item.order]
        lane.nbytes -= item.nbytes
        if not lane.items:
            del self._lanes[item.lane]
        self.queued -= 1
        self.queued_bytes -= item.nbytes
        # From here on `cancel()` returns False, or it came first: the future itself decides, atomically.
        item.claimed = item.future.set_running_or_notify_cancel()
        if not item.claimed:
            del self._open[item.order]
            self._cancelled += 1
        return item.claimed

    def _note_deadlines(self, item: Item[T, R]) -> None:
        if len(self._deadlines) > 4 * len(self._open) + 64:  # mostly of items that left in time
            self._deadlines = [entry for entry in self._deadlines if entry[1] in self._open]
            heapify(self._deadlines)
        heappush(self._deadlines, (item.start_by, item.order))
        if item.start_by < item.answer_by < math.inf:
            heappush(self._deadlines, (item.answer_by, item.order))


def too_late(stage: str) -> DeadlineExceeded:
    """The error of an item that expired while "queued" or "running"."""
    return DeadlineExceeded("not computed before its deadline: allow more time or send less at once", stage=stage)
