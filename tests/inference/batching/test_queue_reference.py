"""The pure core against a reference that searches a list afresh each time."""

import math
from dataclasses import dataclass

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from inference.batching._queue import Batch, Item
from inference.errors import DeadlineExceeded, TileError
from tests.inference.batching.queues import books, make_queue, push


@dataclass(eq=False)
class Entry:
    """What the reference knows of an item; `state` is queued, running, done or cancelled, `gone` not yet noticed."""

    order: int
    lane: str
    nbytes: int
    came: float
    start_by: float
    answer_by: float
    state: str = "queued"
    gone: bool = False


class Reference:
    """A scheduler's queue as a list of all items that ever came, searched afresh each time."""

    def __init__(self, batch: int, wait: float, items: int, nbytes: int, lane_items: int, lane_bytes: int) -> None:
        self.batch, self.wait = batch, wait
        self.room = (items, nbytes, lane_items, lane_bytes)
        self.all: list[Entry] = []
        self.turns: dict[str, float] = {}  # when each lane was last served, the one longest in its place first
        self.memory: dict[str, int] = {}
        self.flushed = -1
        self.draining = False

    def queued(self, lane: str | None = None) -> list[Entry]:
        return [e for e in self.all if e.state == "queued" and lane in (None, e.lane)]

    def lanes(self) -> list[str]:
        """Lanes with items; one that runs empty starts anew."""
        found = dict.fromkeys(e.lane for e in self.queued())
        self.turns = {lane: at for lane, at in self.turns.items() if lane in found}
        for lane in found:
            self.turns.setdefault(lane, -math.inf)
        return list(self.turns)

    def has_room(self, lane: str, nbytes: int) -> bool:
        (items, most, lane_items, lane_most), mine = self.room, self.queued(lane)
        if len(self.queued()) >= items or sum(e.nbytes for e in self.queued()) + nbytes > most:
            return False
        return not mine or (len(mine) < lane_items and sum(e.nbytes for e in mine) + nbytes <= lane_most)

    def limit(self, lane: str) -> int:
        return min(self.batch, self.memory.get(lane, self.batch))

    def due(self, lane: str) -> float:
        first, full = self.queued(lane)[0], len(self.queued(lane)) >= self.limit(lane)
        return -math.inf if self.draining or full or first.order <= self.flushed else first.came + self.wait

    def leave(self, entries: list[Entry], state: str) -> list[int]:
        for e in entries:
            e.state = "cancelled" if e.gone else state
        return [e.order for e in entries if not e.gone]

    def expire(self, now: float) -> list[int]:
        late = [e for e in self.queued() if e.start_by <= now]
        return self.leave(late + [e for e in self.all if e.state == "running" and e.answer_by <= now], "done")

    def cut(self, now: float) -> list[int] | None:
        """The batch that is due, if one is; nothing may be late."""
        due = [lane for lane in self.lanes() if self.due(lane) <= now]
        if not due:
            return None
        lane = min(due, key=self.leaves_by)
        batch = self.queued(lane)[: self.limit(lane)]
        del self.turns[lane]
        self.turns[lane] = now
        return self.leave(batch, "running")

    def leaves_by(self, lane: str) -> float:
        first = self.queued(lane)[0]
        return min(max(first.came, self.turns[lane]) + self.wait, first.start_by)


class QueueAgainstReference(RuleBasedStateMachine):
    """Any order of arrivals, cancels, waits, cuts and changes."""

    @initialize(share=st.sampled_from([1.0, 0.5]))
    def begin(self, share: float) -> None:
        self.queue = make_queue(max_batch_size=3, max_wait_s=10, max_items=8, max_bytes=20, lane_share=share)
        self.model = Reference(3, 10, 8, 20, int(8 * share), int(20 * share))
        self.items: list[Item[int, str]] = []
        self.now = 0

    def having(self, *states: str) -> list[Entry]:
        return [entry for entry in self.model.all if entry.state in states]

    @rule(
        lane=st.sampled_from("ABC"),
        nbytes=st.integers(0, 7),
        start=st.none() | st.integers(0, 25),
        answer=st.none() | st.integers(0, 40),
    )
    def push(self, lane: str, nbytes: int, start: int | None, answer: int | None) -> None:
        assert self.queue.has_room(lane, nbytes) == self.model.has_room(lane, nbytes)
        if self.model.has_room(lane, nbytes):
            answer_by = math.inf if answer is None else self.now + answer
            start_by = min(answer_by, math.inf if start is None else self.now + start)
            entry = Entry(len(self.items), lane, nbytes, self.now, start_by, answer_by)
            self.model.all.append(entry)
            self.items.append(
                push(
                    self.queue,
                    entry.order,
                    self.now,
                    lane=lane,
                    nbytes=nbytes,
                    deadline_at=start_by,
                    answer_by=answer_by,
                )
            )

    @rule(seconds=st.integers(0, 12))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @precondition(lambda self: self.having("queued", "running"))
    @rule(data=st.data(), heard=st.booleans())
    def cancel(self, data: st.DataObject, heard: bool) -> None:
        entry = data.draw(st.sampled_from(self.having("queued", "running")))
        assert self.items[entry.order].future.cancel() == (entry.state == "queued")
        entry.gone = entry.state == "queued"
        if heard:
            self.hear_of(entry)

    @precondition(lambda self: self.having("queued", "cancelled", "done"))
    @rule(data=st.data())
    def hear_late(self, data: st.DataObject) -> None:
        entry = data.draw(st.sampled_from(self.having("queued", "cancelled", "done")))
        if entry.gone or entry.state == "done":
            self.hear_of(entry)

    def hear_of(self, entry: Entry) -> None:
        self.queue.withdraw(entry.order)
        if entry.gone:
            self.model.leave([entry], "cancelled")

    @rule()
    def cut(self) -> None:
        answer = self.queue.cut(self.now)
        if late := self.model.expire(self.now):
            assert isinstance(answer, Batch)
            assert sorted(item.order for item, _ in answer.expired) == sorted(late)
            assert answer.items == []
        elif (batch := self.model.cut(self.now)) is not None:
            assert isinstance(answer, Batch)
            assert [item.order for item in answer.items] == batch
        elif waiting := self.model.queued():
            assert isinstance(answer, float | int)
            due = min(*map(self.model.due, self.model.lanes()), min(entry.start_by for entry in waiting))
            assert 0 < answer <= due - self.now
        else:
            assert answer is None

    @rule()
    def look_for_what_is_late(self) -> None:
        found = self.queue.take_expired(self.now)
        assert sorted(item.order for item, _ in found) == sorted(self.model.expire(self.now))
        waiting = [e.start_by for e in self.model.queued()] + [e.answer_by for e in self.having("running")]
        assert self.now < self.queue.deadline_at() <= min(waiting, default=math.inf)

    @precondition(lambda self: self.having("running", "done"))
    @rule(data=st.data(), error=st.sampled_from([None, TileError("bad"), DeadlineExceeded("late")]))
    def settle(self, data: st.DataObject, error: TileError | DeadlineExceeded | None) -> None:
        entry = data.draw(st.sampled_from(self.having("running", "done")))
        assert self.queue.settle(self.items[entry.order], error) == (entry.state == "running")
        entry.state = "done"

    @rule(lane=st.sampled_from("ABC"), limit=st.integers(1, 3))
    def run_out_of_memory(self, lane: str, limit: int) -> None:
        self.queue.lower_limit(lane, limit)
        self.model.memory[lane] = min(limit, self.model.memory.get(lane, limit))

    @rule(batch=st.integers(1, 4), wait=st.sampled_from([0, 10, 30]))
    def configure(self, batch: int, wait: int) -> None:
        self.queue.max_batch_size, self.queue.max_wait_s = batch, wait
        self.model.batch, self.model.wait = batch, wait

    @rule()
    def flush(self) -> None:
        self.queue.flush()
        self.model.flushed = len(self.items) - 1

    @rule(everything=st.booleans())
    def close(self, everything: bool) -> None:
        self.queue.draining = self.model.draining = True
        if everything:
            self.model.leave(self.model.queued(), "running")
            found = self.queue.claim_all()
            assert sorted(item.order for item in found) == [entry.order for entry in self.having("running")]

    @invariant()
    def the_books_agree(self) -> None:
        found, waiting = books(self.queue, self.now), self.model.queued()
        assert (found.accepted, found.queued) == (len(self.items), len(waiting))
        assert found.queued_bytes == sum(entry.nbytes for entry in waiting)
        assert found.running == len(self.having("running"))
        assert found.cancelled == len(self.having("cancelled"))
        assert found.completed + found.expired + sum(found.failed.values()) == len(self.having("done"))
        assert found.lanes == len(self.model.lanes())
        assert found.oldest_age_s == max((self.now - entry.came for entry in waiting), default=0)
        assert self.queue.idle == (not self.having("queued", "running"))


@pytest.mark.parametrize("examples", [40, pytest.param(400, marks=pytest.mark.slow)])
def test_the_queue_agrees_with_the_reference_in_any_order_of_events(examples: int) -> None:
    run_state_machine_as_test(
        QueueAgainstReference,
        settings=settings(max_examples=examples, stateful_step_count=40, deadline=None, database=None),
    )
