"""The pure core of the scheduler, under an invented clock."""

import math
from collections.abc import Hashable
from concurrent.futures import Future

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

from inference.batching._queue import Batch, BatchQueue, Item, SchedulerStatistics
from inference.errors import DeadlineExceeded, TileError

Queue = BatchQueue[int, str]


def make_queue(
    *, max_batch_size: int = 4, max_wait_s: float = 10.0, max_items: int = 1000, max_bytes: int = 1000
) -> Queue:
    return BatchQueue(max_batch_size=max_batch_size, max_wait_s=max_wait_s, max_items=max_items, max_bytes=max_bytes)


def push(
    queue: Queue, sample: int, now: float, *, lane: Hashable = "A", nbytes: int = 1, deadline_at: float = math.inf
) -> Item[int, str]:
    return queue.push(sample, "embedding", Future(), lane=lane, nbytes=nbytes, now=now, deadline_at=deadline_at)


def cut(queue: Queue, now: float) -> list[int]:
    batch = queue.cut(now)
    assert isinstance(batch, Batch)
    return [item.sample for item in batch.items]


def books(queue: Queue, now: float = 0.0) -> SchedulerStatistics:
    return queue.statistics(now, accepting=True, waiting=0, forward_calls=0, forward_s=0.0)


def test_a_lone_item_leaves_exactly_max_wait_after_it_came() -> None:
    queue = make_queue(max_wait_s=10)
    push(queue, 1, now=100)
    push(queue, 2, now=109)
    assert queue.cut(now=109.5) == 0.5
    assert cut(queue, now=110) == [1, 2]


def test_time_spent_behind_a_busy_model_counts_so_a_backlog_leaves_at_once() -> None:
    queue = make_queue(max_batch_size=2, max_wait_s=1e4)
    for sample in range(10):
        push(queue, sample, now=0)
    assert [cut(queue, now=0) for _ in range(5)] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    push(queue, 10, now=0)
    assert cut(queue, now=1e4) == [10]


def test_no_wait_means_whatever_is_here_now() -> None:
    queue = make_queue(max_wait_s=0)
    for sample in range(3):
        push(queue, sample, now=5)
    assert cut(queue, now=5) == [0, 1, 2]


def test_an_empty_queue_asks_for_no_wake_up() -> None:
    queue = make_queue()
    assert queue.cut(now=0) is None
    assert queue.due_at() == math.inf


@pytest.mark.parametrize("lane", [None, 0, "", (3, 224, 224)])
def test_any_hashable_names_a_lane(lane: Hashable) -> None:
    queue = make_queue(max_wait_s=0)
    push(queue, 1, now=0, lane=lane)
    assert cut(queue, now=0) == [1]
    assert queue.cut(now=0) is None


def test_one_item_beside_a_flooded_lane_waits_for_max_wait_and_one_batch() -> None:
    queue = make_queue(max_batch_size=4, max_wait_s=10)
    for sample in range(100):
        push(queue, sample, now=0, lane="A")
    push(queue, 1000, now=1, lane="B")
    assert cut(queue, now=2) == [0, 1, 2, 3]
    assert cut(queue, now=10.9) == [4, 5, 6, 7]
    assert cut(queue, now=11) == [1000]  # though 92 older items wait in A


def test_a_full_lane_does_not_flush_the_half_filled_batch_of_another() -> None:
    queue = make_queue(max_batch_size=2)
    push(queue, 1, now=0, lane="A")
    push(queue, 2, now=0, lane="B")
    push(queue, 3, now=0, lane="B")
    assert cut(queue, now=0) == [2, 3]
    assert queue.cut(now=0) == 10
    push(queue, 4, now=1, lane="A")
    assert cut(queue, now=1) == [1, 4]


def test_a_cancelled_item_frees_its_place_and_its_bytes_at_once() -> None:
    queue = make_queue(max_items=2, max_bytes=10)
    first, second = push(queue, 1, now=0, nbytes=6), push(queue, 2, now=0, nbytes=4)
    assert not queue.has_room(0)
    first.future.cancel()
    queue.withdraw(first.order)
    assert queue.has_room(6)
    assert not queue.has_room(7)
    assert cut(queue, now=10) == [second.sample]
    assert books(queue).cancelled == 1


def test_an_item_cancelled_while_the_batch_is_cut_is_left_out_and_counted_once() -> None:
    queue = make_queue(max_wait_s=0)
    first = push(queue, 1, now=0)
    push(queue, 2, now=0)
    first.future.cancel()  # and the queue has not heard of it yet
    assert cut(queue, now=0) == [2]
    queue.withdraw(first.order)
    assert books(queue).cancelled == 1


def test_an_item_expires_at_its_deadline_and_not_before() -> None:
    queue = make_queue(max_wait_s=1000)
    push(queue, 1, now=0, deadline_at=7)
    push(queue, 2, now=0)
    assert queue.cut(now=6) == 1
    batch = queue.cut(now=7)
    assert isinstance(batch, Batch)
    assert ([item.sample for item in batch.expired], batch.items) == ([1], [])
    assert queue.cut(now=7) == 993


def test_what_has_expired_is_answered_before_a_batch_is_cut() -> None:
    queue = make_queue(max_wait_s=0)
    push(queue, 1, now=0, deadline_at=5)
    push(queue, 2, now=0)
    assert cut(queue, now=5) == []
    assert cut(queue, now=5) == [2]


def test_the_deadline_of_an_item_long_gone_is_forgotten() -> None:
    queue = make_queue(max_wait_s=0)
    push(queue, 1, now=0, deadline_at=5)
    assert cut(queue, now=0) == [1]
    push(queue, 2, now=1, deadline_at=50)
    queue.max_wait_s = 1000
    assert queue.cut(now=5) == 45


def test_a_lower_limit_holds_for_its_lane_from_the_next_batch_on() -> None:
    queue = make_queue(max_batch_size=4)
    for sample in range(4):
        push(queue, sample, now=0, lane="A")
        push(queue, 10 + sample, now=0, lane="B")
    queue.lower_limit("A", 2)
    queue.lower_limit("A", 3)
    assert [cut(queue, now=0) for _ in range(3)] == [[0, 1], [10, 11, 12, 13], [2, 3]]
    assert books(queue).batch_limits == {"A": 2}


def test_draining_waits_for_nothing() -> None:
    queue = make_queue(max_wait_s=1000)
    push(queue, 1, now=0)
    queue.draining = True
    assert cut(queue, now=0) == [1]


def test_an_item_is_answered_once_and_a_second_result_is_wasted() -> None:
    queue = make_queue(max_wait_s=0)
    item = push(queue, 1, now=0)
    cut(queue, now=0)
    assert queue.settle(item, TileError("bad"))
    assert not queue.settle(item, None)
    assert (books(queue).failed, books(queue).completed, books(queue).wasted) == ({"tile_error": 1}, 0, 1)


class QueueAgainstReference(RuleBasedStateMachine):
    """Compares the queue with a list of all items ever pushed, searched afresh each time."""

    LIMIT, WAIT, ITEMS, BYTES = 3, 10, 8, 20

    @initialize()
    def begin(self) -> None:
        self.queue = make_queue(
            max_batch_size=self.LIMIT, max_wait_s=self.WAIT, max_items=self.ITEMS, max_bytes=self.BYTES
        )
        self.now = 0
        self.all: list[Item[int, str]] = []
        self.state: dict[Item[int, str], str] = {}
        self.turns: list[Hashable] = []  # lanes that hold items, the one served longest ago first
        self.limits: dict[Hashable, int] = {}

    def having(self, *states: str) -> list[Item[int, str]]:
        return [item for item in self.all if self.state[item] in states]

    def queued(self, lane: Hashable) -> list[Item[int, str]]:
        return [item for item in self.having("queued", "cancelled unheard") if item.lane == lane]

    def leave(self, items: list[Item[int, str]], into: str) -> None:
        for item in items:
            self.state[item] = into if self.state[item] == "queued" else "cancelled"
        self.turns = [lane for lane in self.turns if self.queued(lane)]

    def due(self, lane: Hashable) -> float:
        full = self.queue.draining or len(self.queued(lane)) >= self.limits.get(lane, self.LIMIT)
        return -math.inf if full else self.queued(lane)[0].enqueued_at + self.WAIT

    @rule(lane=st.sampled_from("ABC"), nbytes=st.integers(0, 7), patience=st.none() | st.integers(0, 25))
    def push(self, lane: str, nbytes: int, patience: int | None) -> None:
        waiting = self.having("queued", "cancelled unheard")
        room = len(waiting) < self.ITEMS and sum(item.nbytes for item in waiting) + nbytes <= self.BYTES
        assert self.queue.has_room(nbytes) == room
        if room:
            deadline_at = math.inf if patience is None else self.now + patience
            item = push(self.queue, len(self.all), self.now, lane=lane, nbytes=nbytes, deadline_at=deadline_at)
            self.all.append(item)
            self.state[item] = "queued"
            if lane not in self.turns:
                self.turns.append(lane)

    @rule(seconds=st.integers(0, 12))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @precondition(lambda self: self.having("queued", "running", "done"))
    @rule(data=st.data(), heard=st.booleans())
    def cancel(self, data: st.DataObject, heard: bool) -> None:
        item = data.draw(st.sampled_from(self.having("queued", "running", "done")))
        assert item.future.cancel() == (self.state[item] == "queued")
        if self.state[item] == "queued":
            self.state[item] = "cancelled unheard"
        if heard:
            self.hear_of(item)

    @precondition(lambda self: self.having("cancelled unheard"))
    @rule(data=st.data())
    def hear_late(self, data: st.DataObject) -> None:
        self.hear_of(data.draw(st.sampled_from(self.having("cancelled unheard"))))

    def hear_of(self, item: Item[int, str]) -> None:
        self.queue.withdraw(item.order)
        if self.state[item] == "cancelled unheard":
            self.leave([item], "cancelled")

    @rule()
    def cut(self) -> None:
        answer = self.queue.cut(self.now)
        late = [item for item in self.having("queued", "cancelled unheard") if item.deadline_at <= self.now]
        due = [lane for lane in self.turns if self.due(lane) <= self.now]
        if any(self.state[item] == "queued" for item in late):
            assert isinstance(answer, Batch)
            assert set(answer.expired) == {item for item in late if self.state[item] == "queued"}
            assert answer.items == []
            self.leave(late, "running")
            return
        self.leave(late, "cancelled")
        due = [lane for lane in self.turns if self.due(lane) <= self.now]
        if due:
            assert isinstance(answer, Batch)
            first = self.queued(due[0])[: self.limits.get(due[0], self.LIMIT)]
            assert answer.items == [item for item in first if self.state[item] == "queued"]
            self.turns.append(self.turns.pop(self.turns.index(due[0])))
            self.leave(first, "running")
        elif self.turns:
            alive = self.having("queued", "cancelled unheard")
            assert isinstance(answer, float | int)
            assert 0 < answer <= min(min(map(self.due, self.turns)), *(i.deadline_at for i in alive)) - self.now
        else:
            assert answer is None

    @precondition(lambda self: self.having("running", "done"))
    @rule(data=st.data(), error=st.sampled_from([None, TileError("bad"), DeadlineExceeded("late")]))
    def settle(self, data: st.DataObject, error: TileError | DeadlineExceeded | None) -> None:
        item = data.draw(st.sampled_from(self.having("running", "done")))
        assert self.queue.settle(item, error) == (self.state[item] == "running")
        self.state[item] = "done"

    @rule(lane=st.sampled_from("ABC"), limit=st.integers(1, 3))
    def run_out_of_memory(self, lane: str, limit: int) -> None:
        self.queue.lower_limit(lane, limit)
        self.limits[lane] = min(limit, self.limits.get(lane, self.LIMIT))

    @rule()
    def fail_everything(self) -> None:
        assert set(self.queue.claim_all()) == set(self.having("queued", "running"))
        self.leave(self.having("queued", "cancelled unheard"), "running")

    @invariant()
    def the_books_agree(self) -> None:
        found = books(self.queue, self.now)
        waiting = self.having("queued", "cancelled unheard")
        assert found.queued == len(waiting)
        assert found.queued_bytes == sum(item.nbytes for item in waiting)
        assert found.running == len(self.having("running"))
        assert found.cancelled == len(self.having("cancelled"))
        assert found.completed + found.expired + sum(found.failed.values()) == len(self.having("done"))
        assert found.lanes == len(self.turns)
        assert found.oldest_age_s == max((self.now - item.enqueued_at for item in waiting), default=0)


def test_the_queue_agrees_with_the_reference_in_any_order_of_events() -> None:
    run_state_machine_as_test(
        QueueAgainstReference, settings=settings(max_examples=150, stateful_step_count=40, deadline=None, database=None)
    )
