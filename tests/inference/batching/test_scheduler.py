"""How batches are cut and answered, with real threads and a scripted model."""

import asyncio
import random
import sys
import threading
import time
import weakref
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING

import pytest

from inference.batching import BatchScheduler
from inference.errors import DeadlineExceeded
from tests.inference.batching.patience import PATIENCE_S

if TYPE_CHECKING:
    from tests.inference.batching.conftest import FakeModel, StartScheduler


def test_s1_a_full_batch_leaves_without_waiting(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start(max_batch_size=4, max_wait_s=1000)
    futures = [scheduler.submit(sample, mode) for sample, mode in enumerate(["embedding", "prediction"] * 2)]
    assert [future.result(PATIENCE_S) for future in futures] == ["r0", "r1", "r2", "r3"]
    assert model.calls == [[0, 1, 2, 3]]
    assert model.modes == [["embedding", "prediction"] * 2]


def test_s1_a_lone_item_leaves_after_its_wait(start: "StartScheduler") -> None:
    scheduler = start(max_wait_s=0.05)
    assert scheduler.submit(7).result(PATIENCE_S) == "r7"


def test_s2_without_wait_all_that_queued_behind_a_batch_leaves_together(
    start: "StartScheduler", model: "FakeModel"
) -> None:
    scheduler = start(max_wait_s=0)
    model.occupy(scheduler)
    futures = [scheduler.submit(sample) for sample in range(3)]
    model.release()
    assert [future.result(PATIENCE_S) for future in futures] == ["r0", "r1", "r2"]
    assert model.calls == [[-1], [0, 1, 2]]


def test_s3_an_idle_scheduler_does_not_even_look_at_the_clock(start: "StartScheduler") -> None:
    looks = threading.Semaphore(0)

    def clock() -> float:
        looks.release()
        return 0.0

    scheduler = start(clock=clock)
    scheduler.submit(1).result(PATIENCE_S)
    while looks.acquire(timeout=0.2):  # until it has gone to sleep
        pass
    assert not looks.acquire(timeout=0.3)


def test_s4_every_caller_gets_its_own_result_in_its_own_order(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start(max_batch_size=7, max_wait_s=0.001, max_queued_items=50)
    together = threading.Barrier(64)

    def call(caller: int) -> None:
        together.wait(PATIENCE_S)
        futures = [scheduler.submit(caller * 100 + n) for n in range(20)]
        assert [future.result(PATIENCE_S) for future in futures] == [f"r{caller * 100 + n}" for n in range(20)]

    with ThreadPoolExecutor(64) as pool:
        list(pool.map(call, range(64)))
    for caller in range(64):
        assert [sample for sample in model.seen if sample // 100 == caller] == [caller * 100 + n for n in range(20)]
    assert len(model.seen) == 64 * 20  # each computed once


def test_s6_a_cancelled_item_frees_its_place_and_never_reaches_the_model(
    start: "StartScheduler", model: "FakeModel"
) -> None:
    scheduler = start(max_queued_items=3, max_batch_size=3)
    model.occupy(scheduler)
    futures = [scheduler.submit(sample) for sample in range(3)]
    assert futures[1].cancel()
    assert scheduler.statistics().queued == 2
    futures.append(scheduler.submit(3, block=False))
    model.release()
    assert [futures[n].result(PATIENCE_S) for n in (0, 2, 3)] == ["r0", "r2", "r3"]
    assert model.calls == [[-1], [0, 2, 3]]
    with pytest.raises(CancelledError):
        futures[1].result(PATIENCE_S)
    assert {future.done() for future in as_completed(futures, PATIENCE_S)} == {True}


def test_s7_cancelling_at_any_moment_leaves_the_scheduler_serving(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start()
    running = model.occupy(scheduler)
    queued = scheduler.submit(1)
    assert queued.cancel()
    assert not running.cancel()
    running.add_done_callback(lambda future: future.cancel())  # while it completes
    model.release()
    assert running.result(PATIENCE_S) == "r-1"
    assert not running.cancel()
    assert scheduler.submit(2).result(PATIENCE_S) == "r2"
    assert scheduler.statistics().wasted == 1


def test_s8_a_batch_whose_callers_have_all_cancelled_is_not_run(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start()
    model.occupy(scheduler)
    assert all(scheduler.submit(sample).cancel() for sample in range(3))
    model.release()
    scheduler.close()
    assert model.calls == [[-1]]
    assert scheduler.statistics().cancelled == 3


def test_s28_random_cancels_from_many_threads_leave_the_books_in_balance(start: "StartScheduler") -> None:
    scheduler = start(max_batch_size=5, max_queued_items=40)

    def call(seed: int) -> int:
        dice = random.Random(seed)  # noqa: S311 - not a secret
        futures = [(n, scheduler.submit(n)) for n in range(100)]
        kept = [(n, future) for n, future in futures if dice.random() > 0.3 or not future.cancel()]
        assert all(future.result(PATIENCE_S) == f"r{n}" for n, future in kept)
        return len(kept)

    with ThreadPoolExecutor(8) as pool:
        kept = sum(pool.map(call, range(8)))
    books = scheduler.statistics()
    assert (books.completed, books.cancelled) == (kept, 800 - kept)


def test_s9_an_item_whose_deadline_passes_in_the_queue_never_reaches_the_model(
    start: "StartScheduler", model: "FakeModel"
) -> None:
    now = [0.0]
    scheduler = start(clock=lambda: now[0])
    model.occupy(scheduler)
    late, patient = scheduler.submit(1, deadline_s=5), scheduler.submit(2, deadline_s=6)
    now[0] = 5.0
    model.release()
    assert patient.result(PATIENCE_S) == "r2"
    with pytest.raises(DeadlineExceeded):
        late.result(PATIENCE_S)
    assert model.calls == [[-1], [2]]
    assert scheduler.statistics().expired == 1


def test_s9_a_sleeping_scheduler_wakes_for_a_deadline(start: "StartScheduler") -> None:
    looks = threading.Semaphore(0)

    def clock() -> float:
        looks.release()
        return time.monotonic()

    scheduler = start(max_wait_s=1000, clock=clock)
    patient = scheduler.submit(1)
    while looks.acquire(timeout=0.1):  # until it sleeps
        pass
    with pytest.raises(DeadlineExceeded):
        scheduler.submit(2, deadline_s=0.02).result(PATIENCE_S)
    assert not patient.done()


def test_s17_lanes_never_share_a_batch(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start(lane=lambda sample, mode: (sample % 2, mode))
    model.occupy(scheduler)
    futures = [scheduler.submit(sample) for sample in range(6)]
    assert scheduler.statistics().lanes == 2
    model.release()
    assert [future.result(PATIENCE_S) for future in futures] == [f"r{n}" for n in range(6)]
    assert model.calls == [[-1], [0, 2, 4], [1, 3, 5]]


class Device:
    """A lock that tells when somebody asks for it."""

    def __init__(self) -> None:
        self.asked = threading.Semaphore(0)
        self.lock = threading.Lock()

    def __enter__(self) -> None:
        self.asked.release()
        self.lock.acquire()

    def __exit__(self, *_: object) -> None:
        self.lock.release()


def test_a_batch_is_cut_only_when_the_device_is_free_so_it_fills_meanwhile(
    start: "StartScheduler", model: "FakeModel"
) -> None:
    device = Device()
    scheduler = start(device_lock=device)
    with device.lock:
        futures = [scheduler.submit(sample) for sample in range(3)]
        assert device.asked.acquire(timeout=PATIENCE_S)
        assert scheduler.statistics().running == 0
        assert futures[1].cancel()
    assert futures[2].result(PATIENCE_S) == "r2"
    assert model.calls == [[0, 2]]


def test_s8_nothing_runs_when_all_was_cancelled_while_the_device_was_taken(
    start: "StartScheduler", model: "FakeModel"
) -> None:
    device = Device()
    scheduler = start(device_lock=device)
    with device.lock:
        future = scheduler.submit(1)
        assert device.asked.acquire(timeout=PATIENCE_S)
        assert future.cancel()
    assert scheduler.submit(2).result(PATIENCE_S) == "r2"
    assert model.calls == [[2]]


def test_s22_a_callback_may_wait_for_another_model_on_the_same_device(start: "StartScheduler") -> None:
    device = threading.Lock()
    first, second = start(device_lock=device), start(device_lock=device)
    answers: Future[str] = Future()
    first.submit(1).add_done_callback(lambda _: answers.set_result(second.submit(2).result(PATIENCE_S)))
    assert answers.result(PATIENCE_S) == "r2"


def test_s22_a_callback_may_submit_a_thousand_deep(start: "StartScheduler") -> None:
    scheduler = start()
    bottom = threading.Event()

    def go_deeper(depth: int) -> None:
        if depth == 1000:
            bottom.set()
        else:
            scheduler.submit(depth).add_done_callback(lambda _: go_deeper(depth + 1))

    go_deeper(0)
    assert bottom.wait(PATIENCE_S)


def test_s7_a_callback_that_fails_harms_nobody(
    start: "StartScheduler", model: "FakeModel", caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = start()
    model.occupy(scheduler)
    first, second = scheduler.submit(1), scheduler.submit(2)
    first.add_done_callback(lambda _: sys.exit("a callback"))
    model.release()
    assert second.result(PATIENCE_S) == "r2"
    assert scheduler.submit(3).result(PATIENCE_S) == "r3"
    assert "a callback of a future failed" in caplog.text


def test_s19_cancelling_the_task_that_waits_frees_the_place(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start()
    model.occupy(scheduler)

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(scheduler.submit(1)), 0.01)

    asyncio.run(give_up())
    assert (scheduler.statistics().queued, scheduler.statistics().cancelled) == (0, 1)


class Sample:
    """Something whose end can be observed."""


def test_s25_a_kept_result_keeps_neither_its_sample_nor_its_neighbours() -> None:
    gone = threading.Semaphore(0)
    with BatchScheduler[Sample, Sample](lambda samples, _: [Sample() for _ in samples], max_batch_size=2) as scheduler:
        samples = [Sample(), Sample()]
        for sample in samples:
            weakref.finalize(sample, gone.release)
        futures = [scheduler.submit(sample) for sample in samples]
        del sample, samples
        kept = futures[0].result(PATIENCE_S)
        weakref.finalize(futures.pop().result(PATIENCE_S), gone.release)
        for _ in range(3):  # both samples, one neighbour; the scheduler is idle but open
            assert gone.acquire(timeout=PATIENCE_S)
        assert kept is futures[0].result(0)
