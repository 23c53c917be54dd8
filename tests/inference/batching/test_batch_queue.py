"""The pure core of the scheduler, under an invented clock."""

import math
from collections.abc import Hashable

import pytest

from inference.batching._queue import Batch
from inference.errors import TileError
from tests.inference.batching.queues import books, cut, make_queue, push


def test_s1_a_lone_item_leaves_exactly_max_wait_after_it_came() -> None:
    queue = make_queue(max_wait_s=10)
    push(queue, 1, now=100)
    push(queue, 2, now=109)
    assert queue.cut(now=109.5) == 0.5
    assert cut(queue, now=110) == [1, 2]


def test_s1_time_spent_behind_a_busy_model_counts_so_a_backlog_leaves_at_once() -> None:
    queue = make_queue(max_batch_size=2, max_wait_s=1e4)
    for sample in range(10):
        push(queue, sample, now=0)
    assert [cut(queue, now=0) for _ in range(5)] == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]
    push(queue, 10, now=0)
    assert cut(queue, now=1e4) == [10]


def test_s2_no_wait_means_whatever_is_here_now() -> None:
    queue = make_queue(max_wait_s=0)
    for sample in range(3):
        push(queue, sample, now=5)
    assert cut(queue, now=5) == [0, 1, 2]


def test_s3_an_empty_queue_asks_for_no_wake_up() -> None:
    queue = make_queue()
    assert queue.cut(now=0) is None
    assert queue.batch_due_at() == math.inf


@pytest.mark.parametrize("lane", [None, 0, "", (3, 224, 224)])
def test_s17_any_hashable_names_a_lane(lane: Hashable) -> None:
    queue = make_queue(max_wait_s=0)
    push(queue, 1, now=0, lane=lane)
    assert cut(queue, now=0) == [1]
    assert queue.cut(now=0) is None


def test_s17_one_item_beside_a_flooded_lane_waits_for_max_wait_and_one_batch() -> None:
    queue = make_queue(max_batch_size=4, max_wait_s=10)
    for sample in range(100):
        push(queue, sample, now=0, lane="A")
    push(queue, 1000, now=1, lane="B")
    assert cut(queue, now=2) == [0, 1, 2, 3]
    assert cut(queue, now=10.9) == [4, 5, 6, 7]
    assert cut(queue, now=11) == [1000]  # though 92 older items wait in A


def test_s17_a_full_lane_does_not_flush_the_half_filled_batch_of_another() -> None:
    queue = make_queue(max_batch_size=2)
    push(queue, 1, now=0, lane="A")
    push(queue, 2, now=0, lane="B")
    push(queue, 3, now=0, lane="B")
    assert cut(queue, now=0) == [2, 3]
    assert queue.cut(now=0) == 10
    push(queue, 4, now=1, lane="A")
    assert cut(queue, now=1) == [1, 4]


def test_s6_a_cancelled_item_frees_its_place_and_its_bytes_at_once() -> None:
    queue = make_queue(max_items=2, max_bytes=10)
    first, second = push(queue, 1, now=0, nbytes=6), push(queue, 2, now=0, nbytes=4)
    assert not queue.has_room("A", 0)
    first.future.cancel()
    queue.withdraw(first.order)
    assert queue.has_room("A", 6)
    assert not queue.has_room("A", 7)
    assert cut(queue, now=10) == [second.sample]
    assert books(queue).cancelled == 1


def test_s7_an_item_cancelled_while_the_batch_is_cut_is_left_out_and_counted_once() -> None:
    queue = make_queue(max_wait_s=0)
    first = push(queue, 1, now=0)
    push(queue, 2, now=0)
    first.future.cancel()  # and the queue has not heard of it yet
    assert cut(queue, now=0) == [2]
    queue.withdraw(first.order)
    assert books(queue).cancelled == 1


def test_s9_an_item_expires_at_its_deadline_and_not_before() -> None:
    queue = make_queue(max_wait_s=1000)
    push(queue, 1, now=0, deadline_at=7)
    push(queue, 2, now=0)
    assert queue.cut(now=6) == 1
    batch = queue.cut(now=7)
    assert isinstance(batch, Batch)
    assert ([item.sample for item, _ in batch.expired], batch.items) == ([1], [])
    assert queue.cut(now=7) == 993


def test_s9_what_has_expired_is_answered_before_a_batch_is_cut() -> None:
    queue = make_queue(max_wait_s=0)
    push(queue, 1, now=0, deadline_at=5)
    push(queue, 2, now=0)
    assert cut(queue, now=5) == []
    assert cut(queue, now=5) == [2]


def test_s9_the_deadline_of_an_item_long_gone_is_forgotten() -> None:
    queue = make_queue(max_wait_s=0)
    push(queue, 1, now=0, deadline_at=5)
    assert cut(queue, now=0) == [1]
    push(queue, 2, now=1, deadline_at=50)
    queue.max_wait_s = 1000
    assert queue.cut(now=5) == 45


def test_s12_a_lower_limit_holds_for_its_lane_from_the_next_batch_on() -> None:
    queue = make_queue(max_batch_size=4)
    for sample in range(4):
        push(queue, sample, now=0, lane="A")
        push(queue, 10 + sample, now=0, lane="B")
    queue.lower_limit("A", 2)
    queue.lower_limit("A", 3)
    assert [cut(queue, now=0) for _ in range(3)] == [[0, 1], [10, 11, 12, 13], [2, 3]]
    assert books(queue).batch_limits == {"A": 2}


def test_s18_draining_waits_for_nothing() -> None:
    queue = make_queue(max_wait_s=1000)
    push(queue, 1, now=0)
    queue.draining = True
    assert cut(queue, now=0) == [1]


def test_s24_an_item_is_answered_once_and_a_second_result_is_wasted() -> None:
    queue = make_queue(max_wait_s=0)
    item = push(queue, 1, now=0)
    cut(queue, now=0)
    assert queue.settle(item, TileError("bad"))
    assert not queue.settle(item, None)
    assert (books(queue).failed, books(queue).completed, books(queue).wasted) == ({"tile_error": 1}, 0, 1)


def test_s17_the_lane_that_has_waited_longest_goes_first_and_never_the_fullest() -> None:
    queue = make_queue(max_batch_size=4, max_wait_s=10)
    push(queue, 1, now=0, lane="A")
    push(queue, 2, now=1, lane="B")
    for sample in range(10, 50):
        push(queue, sample, now=2, lane="C")
    assert cut(queue, now=20) == [1]
    assert cut(queue, now=20) == [2]
    assert cut(queue, now=20) == [10, 11, 12, 13]


def test_s17_of_lanes_still_within_their_wait_the_earliest_deadline_goes_first() -> None:
    queue = make_queue(max_batch_size=2, max_wait_s=10)
    for sample in range(2):
        push(queue, sample, now=0, lane="A")
        push(queue, 10 + sample, now=1, lane="B", deadline_at=5)
    assert cut(queue, now=2) == [10, 11]
    assert cut(queue, now=2) == [0, 1]


def test_s17_deadlines_do_not_starve_a_lane_without_any() -> None:
    queue = make_queue(max_batch_size=2, max_wait_s=10)
    for sample in range(2):
        push(queue, sample, now=0, lane="A")
    served = []
    for now in range(12):
        for sample in (10, 11):
            push(queue, sample, now=now, lane="B", deadline_at=now + 2)
        served.append(cut(queue, now=now))
    assert served.index([0, 1]) <= 10


def test_s17_a_lane_may_hold_its_share_of_items_and_bytes_and_no_more() -> None:
    queue = make_queue(max_items=8, max_bytes=80, lane_share=0.5)
    for sample in range(4):
        assert queue.has_room("A", 10)
        push(queue, sample, now=0, lane="A", nbytes=10)
    assert not queue.has_room("A", 0)
    push(queue, 4, now=0, lane="B", nbytes=35)
    assert queue.has_room("B", 5)
    assert not queue.has_room("B", 6)
    assert cut(queue, now=10) == [0, 1, 2, 3]
    assert queue.has_room("A", 45)  # alone in its lane, for else it could never be


def test_s9_a_running_item_expires_at_its_call_deadline_and_not_at_its_queue_deadline() -> None:
    queue = make_queue(max_wait_s=0)
    item = push(queue, 1, now=0, deadline_at=5, answer_by=8)
    assert cut(queue, now=0) == [1]
    assert queue.take_expired(now=7.9) == []
    ((late, error),) = queue.take_expired(now=8)
    assert late is item
    assert error.fields == {"stage": "running"}
    assert (books(queue).expired, books(queue).expired_running, books(queue).running) == (1, 1, 0)
    assert not queue.settle(item, None)
    assert books(queue).wasted == 1


def test_s9_deadlines_of_items_that_left_in_time_take_no_room() -> None:
    queue = make_queue(max_wait_s=0)
    for sample in range(10_000):
        item = push(queue, sample, now=sample, deadline_at=1e9 + sample, answer_by=2e9)
        cut(queue, now=sample)
        queue.settle(item, None)
    assert len(queue._deadlines) < 100
    assert queue.deadline_at() == math.inf


def test_s23_a_changed_setting_holds_from_the_next_batch_on() -> None:
    queue = make_queue(max_batch_size=2, max_wait_s=10)
    for sample in range(6):
        push(queue, sample, now=0)
    assert cut(queue, now=0) == [0, 1]
    queue.max_batch_size = 3
    assert cut(queue, now=0) == [2, 3, 4]
    queue.lower_limit("A", 2)
    queue.max_batch_size, queue.max_wait_s = 1, 20
    assert cut(queue, now=0) == [5]
    push(queue, 6, now=0)
    queue.max_batch_size = 10
    assert queue.cut(now=15) == 5
    push(queue, 7, now=15)
    assert cut(queue, now=15) == [6, 7]  # the limit memory has taught still holds
