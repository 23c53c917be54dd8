"""How many items and bytes may wait, and who enters next."""

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from inference.errors import BadRequest, QueueFull
from tests.inference.batching.patience import PATIENCE_S

if TYPE_CHECKING:
    from tests.inference.batching.conftest import FakeModel, Rows, StartScheduler, WaitForLine


def test_s16_the_item_after_the_last_place_is_refused(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start(max_queued_items=3, max_batch_size=2)
    model.occupy(scheduler)
    for sample in range(3):
        scheduler.submit(sample, block=False)
    with pytest.raises(QueueFull):
        scheduler.submit(3, block=False)
    with pytest.raises(QueueFull):
        scheduler.submit(3, timeout_s=0.01)
    with pytest.raises(QueueFull):
        scheduler.submit(3, deadline_s=0.01)
    books = scheduler.statistics()
    assert (books.queued, books.accepted, books.refused) == (3, 4, 3)


def test_s16_bytes_are_bounded_too_and_what_can_never_fit_is_a_bad_request(
    start: "StartScheduler", model: "FakeModel"
) -> None:
    scheduler = start(max_queued_bytes=10, nbytes=abs)
    model.occupy(scheduler)
    scheduler.submit(6)
    with pytest.raises(QueueFull):
        scheduler.submit(5, block=False)
    scheduler.submit(4, block=False)
    with pytest.raises(BadRequest, match="max_queued_bytes=10"):
        scheduler.submit(11)


def test_s16_blocked_submitters_enter_in_the_order_they_came(
    start: "StartScheduler", model: "FakeModel", wait_for_line: "WaitForLine"
) -> None:
    scheduler = start(max_queued_items=1, max_batch_size=1)
    model.occupy(scheduler)
    scheduler.submit(0)
    with ThreadPoolExecutor(5) as pool:
        waiting = []
        for sample in range(1, 6):
            waiting.append(pool.submit(scheduler.submit, sample))
            wait_for_line(scheduler, sample)
        model.release()
        assert [future.result(PATIENCE_S).result(PATIENCE_S) for future in waiting] == [f"r{n}" for n in range(1, 6)]
    assert model.calls == [[-1], [0], [1], [2], [3], [4], [5]]


def test_s22_a_callback_finds_a_full_queue_full_instead_of_waiting_for_itself(
    start: "StartScheduler", model: "FakeModel"
) -> None:
    scheduler = start(max_queued_items=1, max_batch_size=1)
    outcome: Future[str] = Future()

    def submit_again(_: Future[str]) -> None:
        try:
            scheduler.submit(2)
        except QueueFull as error:
            outcome.set_result(error.code)

    first = model.occupy(scheduler)
    first.add_done_callback(submit_again)
    scheduler.submit(1)
    model.release()
    assert outcome.result(PATIENCE_S) == "queue_full"


def test_s16_a_small_sample_does_not_overtake_a_large_one_that_came_before(
    start: "StartScheduler", model: "FakeModel", wait_for_line: "WaitForLine"
) -> None:
    scheduler = start(max_queued_bytes=10, nbytes=abs)
    model.occupy(scheduler)
    scheduler.submit(6)
    with ThreadPoolExecutor(2) as pool:
        large = pool.submit(scheduler.submit, 8)
        wait_for_line(scheduler, 1)
        with pytest.raises(QueueFull):
            scheduler.submit(1, block=False)
        small = pool.submit(scheduler.submit, 2)
        wait_for_line(scheduler, 2)
        model.release()
        assert [future.result(PATIENCE_S).result(PATIENCE_S) for future in (large, small)] == ["r8", "r2"]
    assert model.seen == [-1, 6, 8, 2]


def test_s16_one_who_gives_up_waiting_lets_the_next_one_in(
    start: "StartScheduler", model: "FakeModel", wait_for_line: "WaitForLine"
) -> None:
    scheduler = start(max_queued_bytes=10, nbytes=abs)
    model.occupy(scheduler)
    scheduler.submit(6)
    with ThreadPoolExecutor(2) as pool:
        large = pool.submit(scheduler.submit, 8, timeout_s=0.2)
        wait_for_line(scheduler, 1)
        small = pool.submit(scheduler.submit, 2)
        assert isinstance(large.exception(PATIENCE_S), QueueFull)
        small.result(PATIENCE_S)
    assert scheduler.statistics().queued == 2


def test_s16_all_who_find_room_enter_at_once(
    start: "StartScheduler", model: "FakeModel", wait_for_line: "WaitForLine"
) -> None:
    scheduler = start(max_queued_items=3, max_batch_size=3)
    model.occupy(scheduler)
    everyone_in = threading.Event()

    def react(samples: list[int]) -> "Rows":
        assert samples != [0, 1, 2] or everyone_in.wait(PATIENCE_S)
        return [f"r{sample}" for sample in samples]

    model.react = react
    for sample in range(3):
        scheduler.submit(sample)
    with ThreadPoolExecutor(3) as pool:
        waiting = [pool.submit(scheduler.submit, sample) for sample in (3, 4, 5)]
        wait_for_line(scheduler, 3)
        model.release()
        futures = [entered.result(PATIENCE_S) for entered in waiting]
        everyone_in.set()
    assert sorted(future.result(PATIENCE_S) for future in futures) == ["r3", "r4", "r5"]


def test_s6_a_cancelled_item_gives_its_place_to_the_one_who_waits(
    start: "StartScheduler", model: "FakeModel", wait_for_line: "WaitForLine"
) -> None:
    scheduler = start(max_queued_items=1, max_batch_size=1)
    model.occupy(scheduler)
    queued = scheduler.submit(1)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(scheduler.submit, 2)
        wait_for_line(scheduler, 1)
        queued.cancel()
        waiting.result(PATIENCE_S)
    assert scheduler.statistics().queued == 1


def test_s16_a_refusal_says_when_to_come_back_by_the_pace_of_late(start: "StartScheduler", model: "FakeModel") -> None:
    now = [0.0]
    scheduler = start(max_queued_items=4, max_batch_size=2, clock=lambda: now[0])

    def retry_after_s() -> float:
        with pytest.raises(QueueFull) as refused:
            scheduler.submit(9, block=False)
        found = refused.value.fields["retry_after_s"]
        assert isinstance(found, float)
        assert refused.value.retryable
        return found

    def react(samples: list[int]) -> "Rows":
        now[0] += 3.0 * len(samples)
        return [f"r{sample}" for sample in samples]

    model.occupy(scheduler)
    for sample in range(4):
        scheduler.submit(sample)
    assert retry_after_s() == 1.0  # nothing measured yet
    model.react = react
    model.release()
    scheduler.submit(5).result(PATIENCE_S)
    model.occupy(scheduler)
    for sample in range(4):
        scheduler.submit(sample)
    assert retry_after_s() == pytest.approx(4 * 3.0)


def test_s16_a_producer_faster_than_the_model_is_held_to_the_queue(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start(max_queued_items=10, max_batch_size=4)
    most = 0

    def react(samples: list[int]) -> "Rows":
        nonlocal most
        books = scheduler.statistics()
        most = max(most, books.queued + books.running)
        return [f"r{sample}" for sample in samples]

    model.react = react
    futures = [scheduler.submit(sample) for sample in range(2000)]
    assert [future.result(PATIENCE_S) for future in futures] == [f"r{sample}" for sample in range(2000)]
    assert most <= 14


def test_s17_a_flooded_lane_leaves_room_for_the_others(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start(max_queued_items=8, max_batch_size=4, lane=lambda sample, _: sample >= 100)
    model.occupy(scheduler)
    for sample in range(4):
        scheduler.submit(sample, block=False)
    with pytest.raises(QueueFull):
        scheduler.submit(4, block=False)
    other = scheduler.submit(100, block=False)
    model.release()
    assert other.result(PATIENCE_S) == "r100"
    assert model.calls[1:] == [[0, 1, 2, 3], [100]]


def test_s17_submitters_blocked_for_one_lane_do_not_hold_back_another(
    start: "StartScheduler", model: "FakeModel", wait_for_line: "WaitForLine"
) -> None:
    scheduler = start(max_queued_items=8, max_batch_size=4, lane=lambda sample, _: sample >= 100)
    model.occupy(scheduler)
    for sample in range(4):
        scheduler.submit(sample)
    with ThreadPoolExecutor(20) as pool:
        blocked = [pool.submit(scheduler.submit, sample) for sample in range(4, 24)]
        wait_for_line(scheduler, 20)
        other = scheduler.submit(100, timeout_s=PATIENCE_S)
        assert scheduler.statistics().waiting == 20
        model.release()
        assert other.result(PATIENCE_S) == "r100"
        for future in blocked:
            future.result(PATIENCE_S).result(PATIENCE_S)
    assert model.calls.index([100]) <= 2


def test_s17_of_those_who_wait_the_lane_with_the_least_in_the_queue_comes_next(
    start: "StartScheduler", model: "FakeModel", wait_for_line: "WaitForLine"
) -> None:
    scheduler = start(max_queued_items=4, max_batch_size=1, lane=lambda sample, _: sample // 100, lane_share=1.0)
    model.occupy(scheduler)
    for sample in range(4):
        scheduler.submit(sample)
    lanes: list[int] = []

    def react(samples: list[int]) -> "Rows":
        if samples == [0]:
            wait_for_line(scheduler, 3)  # its cut made one place
            lanes.append(scheduler.statistics().lanes)
        return [f"r{sample}" for sample in samples]

    model.react = react
    with ThreadPoolExecutor(4) as pool:
        waiting = []
        for n, sample in enumerate([4, 5, 6, 100], 1):
            waiting.append(pool.submit(scheduler.submit, sample))
            wait_for_line(scheduler, n)
        model.release()
        for future in waiting:
            future.result(PATIENCE_S).result(PATIENCE_S)
    assert lanes == [2]  # 100 came last and entered first
