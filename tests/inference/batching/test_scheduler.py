"""Batching, cancellation, room, fairness between callers, and shutdown, with real threads and a scripted model."""

import asyncio
import contextlib
import os
import pickle
import random
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, as_completed
from typing import TYPE_CHECKING

import pytest

from inference.batching import BatchScheduler
from inference.errors import BadRequest, CallerError, ConfigError, DeadlineExceeded, QueueFull, ServerClosed

if TYPE_CHECKING:
    from tests.inference.batching.conftest import FakeModel, StartScheduler

PATIENCE_S = 10.0


def occupy(scheduler: BatchScheduler[int, str], model: "FakeModel") -> Future[str]:
    """Holds the model inside a call of its own, so that what is submitted next stays queued."""
    model.hold()
    future = scheduler.submit(-1)
    model.wait_until_called()
    return future


def test_a_full_batch_leaves_without_waiting(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start(max_batch_size=4, max_wait_s=1000)
    futures = [scheduler.submit(sample, mode) for sample, mode in enumerate(["embedding", "prediction"] * 2)]
    assert [future.result(PATIENCE_S) for future in futures] == ["r0", "r1", "r2", "r3"]
    assert model.calls == [[0, 1, 2, 3]]
    assert model.modes == [["embedding", "prediction"] * 2]


def test_a_lone_item_leaves_after_its_wait(start: "StartScheduler") -> None:
    scheduler = start(max_wait_s=0.05)
    assert scheduler.submit(7).result(PATIENCE_S) == "r7"


def test_without_wait_all_that_queued_behind_a_batch_leaves_together(
    start: "StartScheduler", model: "FakeModel"
) -> None:
    scheduler = start(max_wait_s=0)
    occupy(scheduler, model)
    futures = [scheduler.submit(sample) for sample in range(3)]
    model.release()
    assert [future.result(PATIENCE_S) for future in futures] == ["r0", "r1", "r2"]
    assert model.calls == [[-1], [0, 1, 2]]


def test_an_idle_scheduler_does_not_even_look_at_the_clock(start: "StartScheduler") -> None:
    looks = threading.Semaphore(0)

    def clock() -> float:
        looks.release()
        return 0.0

    scheduler = start(clock=clock)
    scheduler.submit(1).result(PATIENCE_S)
    while looks.acquire(timeout=0.2):  # until it has gone to sleep
        pass
    assert not looks.acquire(timeout=0.3)


def test_every_caller_gets_its_own_result_in_its_own_order(start: "StartScheduler", model: "FakeModel") -> None:
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


def test_a_cancelled_item_frees_its_place_and_never_reaches_the_model(
    start: "StartScheduler", model: "FakeModel"
) -> None:
    scheduler = start(max_queued_items=3, max_batch_size=3)
    occupy(scheduler, model)
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


def test_cancelling_at_any_moment_leaves_the_scheduler_serving(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start()
    running = occupy(scheduler, model)
    queued = scheduler.submit(1)
    assert queued.cancel()
    assert not running.cancel()
    running.add_done_callback(lambda future: future.cancel())  # while it completes
    model.release()
    assert running.result(PATIENCE_S) == "r-1"
    assert not running.cancel()
    assert scheduler.submit(2).result(PATIENCE_S) == "r2"
    assert scheduler.statistics().wasted == 1


def test_a_batch_whose_callers_have_all_cancelled_is_not_run(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start()
    occupy(scheduler, model)
    assert all(scheduler.submit(sample).cancel() for sample in range(3))
    model.release()
    scheduler.close()
    assert model.calls == [[-1]]
    assert scheduler.statistics().cancelled == 3


def test_random_cancels_from_many_threads_leave_the_books_in_balance(start: "StartScheduler") -> None:
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


def test_the_item_after_the_last_place_is_refused(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start(max_queued_items=3, max_batch_size=2)
    occupy(scheduler, model)
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


def test_bytes_are_bounded_too_and_what_can_never_fit_is_a_bad_request(
    start: "StartScheduler", model: "FakeModel"
) -> None:
    scheduler = start(max_queued_bytes=10, nbytes=abs)
    occupy(scheduler, model)
    scheduler.submit(6)
    with pytest.raises(QueueFull):
        scheduler.submit(5, block=False)
    scheduler.submit(4, block=False)
    with pytest.raises(BadRequest, match="max_queued_bytes=10"):
        scheduler.submit(11)


def test_blocked_submitters_enter_in_the_order_they_came(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start(max_queued_items=1, max_batch_size=1)
    occupy(scheduler, model)
    scheduler.submit(0)
    with ThreadPoolExecutor(5) as pool:
        waiting = []
        for sample in range(1, 6):
            waiting.append(pool.submit(scheduler.submit, sample))
            wait_for_line(scheduler, sample)
        model.release()
        assert [future.result(PATIENCE_S).result(PATIENCE_S) for future in waiting] == [f"r{n}" for n in range(1, 6)]
    assert model.calls == [[-1], [0], [1], [2], [3], [4], [5]]


def wait_for_line(scheduler: BatchScheduler[int, str], length: int) -> None:
    while scheduler.statistics().waiting < length:
        threading.Event().wait(0.001)


def test_an_item_whose_deadline_passes_in_the_queue_never_reaches_the_model(
    start: "StartScheduler", model: "FakeModel"
) -> None:
    now = [0.0]
    scheduler = start(clock=lambda: now[0])
    occupy(scheduler, model)
    late, patient = scheduler.submit(1, deadline_s=5), scheduler.submit(2, deadline_s=6)
    now[0] = 5.0
    model.release()
    assert patient.result(PATIENCE_S) == "r2"
    with pytest.raises(DeadlineExceeded):
        late.result(PATIENCE_S)
    assert model.calls == [[-1], [2]]
    assert scheduler.statistics().expired == 1


def test_an_idle_scheduler_wakes_for_a_deadline(start: "StartScheduler") -> None:
    scheduler = start(max_wait_s=1000)
    with pytest.raises(DeadlineExceeded):
        scheduler.submit(1, deadline_s=0.02).result(PATIENCE_S)


def test_lanes_never_share_a_batch(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start(lane=lambda sample, mode: (sample % 2, mode))
    occupy(scheduler, model)
    futures = [scheduler.submit(sample) for sample in range(6)]
    assert scheduler.statistics().lanes == 2
    model.release()
    assert [future.result(PATIENCE_S) for future in futures] == [f"r{n}" for n in range(6)]
    assert model.calls == [[-1], [0, 2, 4], [1, 3, 5]]


def test_models_that_share_a_device_never_run_together_and_batches_fill_meanwhile(
    start: "StartScheduler", model: "FakeModel"
) -> None:
    device = threading.Lock()
    scheduler = start(device_lock=device)
    with device:
        futures = [scheduler.submit(sample) for sample in range(3)]
        assert scheduler.statistics().running == 0
        assert futures[1].cancel()
    assert futures[2].result(PATIENCE_S) == "r2"
    assert model.calls == [[0, 2]]


def test_a_callback_may_wait_for_another_model_on_the_same_device(start: "StartScheduler") -> None:
    device = threading.Lock()
    first, second = start(device_lock=device), start(device_lock=device)
    answers: Future[str] = Future()
    first.submit(1).add_done_callback(lambda _: answers.set_result(second.submit(2).result(PATIENCE_S)))
    assert answers.result(PATIENCE_S) == "r2"


def test_a_callback_may_submit_a_thousand_deep(start: "StartScheduler") -> None:
    scheduler = start()
    bottom = threading.Event()

    def go_deeper(depth: int) -> None:
        if depth == 1000:
            bottom.set()
        else:
            scheduler.submit(depth).add_done_callback(lambda _: go_deeper(depth + 1))

    go_deeper(0)
    assert bottom.wait(PATIENCE_S)


def test_a_callback_finds_a_full_queue_full_instead_of_waiting_for_itself(
    start: "StartScheduler", model: "FakeModel"
) -> None:
    scheduler = start(max_queued_items=1, max_batch_size=1)
    outcome: Future[str] = Future()

    def submit_again(_: Future[str]) -> None:
        try:
            scheduler.submit(2)
        except QueueFull as error:
            outcome.set_result(error.code)

    first = occupy(scheduler, model)
    first.add_done_callback(submit_again)
    scheduler.submit(1)
    model.release()
    assert outcome.result(PATIENCE_S) == "queue_full"


def test_a_callback_that_fails_harms_nobody(
    start: "StartScheduler", model: "FakeModel", caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = start()
    occupy(scheduler, model)
    first, second = scheduler.submit(1), scheduler.submit(2)
    first.add_done_callback(lambda _: sys.exit("a callback"))
    model.release()
    assert second.result(PATIENCE_S) == "r2"
    assert scheduler.submit(3).result(PATIENCE_S) == "r3"
    assert "a callback of a future failed" in caplog.text


def test_close_computes_what_is_queued(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start(max_batch_size=8, max_wait_s=1000)
    occupied = [scheduler.submit(sample) for sample in range(100)]
    scheduler.close()
    scheduler.close()
    assert [future.result(0) for future in occupied] == [f"r{n}" for n in range(100)]
    with pytest.raises(ServerClosed):
        scheduler.submit(1)
    assert not scheduler.statistics().accepting


def test_close_fails_what_the_drain_time_does_not_cover_even_if_the_model_hangs(
    start: "StartScheduler", model: "FakeModel", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference.batching.scheduler._JOIN_GRACE_S", 0.01)
    scheduler = start()
    running = occupy(scheduler, model)
    queued = [scheduler.submit(sample) for sample in range(100)]
    scheduler.close(drain_s=0.01)
    for future in [running, *queued]:
        with pytest.raises(ServerClosed):
            future.result(0)
    model.release()
    scheduler.close()
    assert model.calls == [[-1]]
    assert scheduler.statistics().wasted == 1


def test_close_from_a_callback_returns_and_the_rest_is_computed(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start()
    occupy(scheduler, model).add_done_callback(lambda _: scheduler.close())
    queued = scheduler.submit(1)
    model.release()
    assert queued.result(PATIENCE_S) == "r1"


def test_close_sends_blocked_submitters_away(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start(max_queued_items=1, max_batch_size=1)
    occupy(scheduler, model)
    scheduler.submit(0)
    with ThreadPoolExecutor(3) as pool:
        blocked = [pool.submit(scheduler.submit, sample) for sample in (1, 2)]
        wait_for_line(scheduler, 2)
        closing = pool.submit(scheduler.close)
        assert [type(future.exception(PATIENCE_S)) for future in blocked] == [ServerClosed, ServerClosed]
        model.release()
        closing.result(PATIENCE_S)


def test_submitting_while_closing_is_answered_or_refused(start: "StartScheduler") -> None:
    for _ in range(100):
        scheduler = start(max_wait_s=0.0001)
        together = threading.Barrier(3)

        def submit(scheduler: BatchScheduler[int, str] = scheduler, together: threading.Barrier = together) -> None:
            together.wait(PATIENCE_S)
            with contextlib.suppress(ServerClosed):
                assert scheduler.submit(1).result(PATIENCE_S) == "r1"

        with ThreadPoolExecutor(2) as pool:
            answers = [pool.submit(submit) for _ in range(2)]
            together.wait(PATIENCE_S)
            scheduler.close()
            assert [answer.result(PATIENCE_S) for answer in answers] == [None, None]


def test_leaving_the_with_block_closes(model: "FakeModel") -> None:
    with BatchScheduler[int, str](model, max_wait_s=1000) as scheduler:
        future = scheduler.submit(1)
    assert future.result(0) == "r1"


def test_several_event_loops_share_one_scheduler_and_a_closed_one_harms_nobody(
    start: "StartScheduler", model: "FakeModel"
) -> None:
    scheduler = start(max_batch_size=4)

    async def ask(samples: Sequence[int]) -> list[str]:
        return await asyncio.gather(*(asyncio.wrap_future(scheduler.submit(sample)) for sample in samples))

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda samples: asyncio.run(ask(samples)), [(1, 2), (3, 4)])) == [
            ["r1", "r2"],
            ["r3", "r4"],
        ]
    occupy(scheduler, model)
    loop = asyncio.new_event_loop()
    asyncio.wrap_future(scheduler.submit(5), loop=loop)
    loop.close()
    model.release()
    assert asyncio.run(ask([6])) == ["r6"]


def test_cancelling_the_task_that_waits_frees_the_place(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start()
    occupy(scheduler, model)

    async def give_up() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.wrap_future(scheduler.submit(1)), 0.01)

    asyncio.run(give_up())
    assert (scheduler.statistics().queued, scheduler.statistics().cancelled) == (0, 1)


class Sample:
    """Something whose end can be observed."""


def test_a_kept_result_keeps_neither_its_sample_nor_its_neighbours() -> None:
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


def test_a_scheduler_cannot_be_pickled(start: "StartScheduler") -> None:
    with pytest.raises(TypeError, match="owns a thread"):
        pickle.dumps(start())


def test_a_forked_child_gets_an_error_and_not_a_hang(start: "StartScheduler") -> None:
    scheduler = start()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of what is tested here
        child = os.fork()
    if child == 0:
        try:
            scheduler.close()
            scheduler.submit(1)
        except CallerError:
            os._exit(42)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    assert scheduler.submit(1).result(PATIENCE_S) == "r1"


def test_the_interpreter_ends_though_nobody_closed_the_scheduler() -> None:
    script = (
        "from inference.batching import BatchScheduler\n"
        "scheduler = BatchScheduler(lambda samples, modes: list(samples), max_wait_s=1000)\n"
        "future = scheduler.submit(1)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=PATIENCE_S)


@pytest.mark.parametrize(
    "setting",
    [
        {"max_batch_size": 0},
        {"max_batch_size": 2.0},
        {"max_batch_size": True},
        {"max_wait_s": -1},
        {"max_wait_s": float("nan")},
        {"max_wait_s": float("inf")},
        {"max_queued_items": 0},
        {"max_queued_bytes": -1},
        {"retry_budget": -1},
    ],
    ids=str,
)
def test_a_setting_out_of_range_is_named(model: "FakeModel", setting: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        BatchScheduler(model, **setting)  # type: ignore[arg-type]


def test_a_queue_smaller_than_a_batch_is_warned_of(model: "FakeModel") -> None:
    with pytest.warns(RuntimeWarning, match="no batch can fill"):
        BatchScheduler(model, max_batch_size=4, max_queued_items=3).close()
