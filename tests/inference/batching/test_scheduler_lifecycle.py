"""Start, settings, shutdown, fork and event loops."""

import asyncio
import contextlib
import os
import pickle
import threading
import warnings
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest

from inference.batching import BatchScheduler, SchedulerState
from inference.errors import CallerError, ConfigError, ServerClosed
from tests.inference.batching.patience import PATIENCE_S
from tests.inference.batching.scripts import run_script

if TYPE_CHECKING:
    from tests.inference.batching.conftest import FakeModel, StartScheduler, WaitForLine


def test_s18_close_computes_what_is_queued(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start(max_batch_size=8, max_wait_s=1000)
    occupied = [scheduler.submit(sample) for sample in range(100)]
    scheduler.close()
    scheduler.close()
    assert [future.result(0) for future in occupied] == [f"r{n}" for n in range(100)]
    with pytest.raises(ServerClosed):
        scheduler.submit(1)
    assert not scheduler.statistics().accepting


def test_s18_close_fails_what_the_drain_time_does_not_cover_even_if_the_model_hangs(
    start: "StartScheduler", model: "FakeModel", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference.batching.scheduler._JOIN_GRACE_S", 0.01)
    scheduler = start()
    running = model.occupy(scheduler)
    queued = [scheduler.submit(sample) for sample in range(100)]
    scheduler.close(drain_s=0.01)
    for future in [running, *queued]:
        with pytest.raises(ServerClosed):
            future.result(0)
    model.release()
    scheduler.close()
    assert model.calls == [[-1]]
    assert scheduler.statistics().wasted == 1


def test_s18_close_from_a_callback_returns_and_the_rest_is_computed(
    start: "StartScheduler", model: "FakeModel"
) -> None:
    scheduler = start()
    returned = threading.Event()

    def close(_: Future[str]) -> None:
        scheduler.close()
        returned.set()

    model.occupy(scheduler).add_done_callback(close)
    queued = scheduler.submit(1)
    model.release()
    assert queued.result(PATIENCE_S) == "r1"
    assert returned.wait(PATIENCE_S)


def test_s18_close_from_a_callback_ends_the_drain_too(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start()
    model.occupy(scheduler).add_done_callback(lambda _: scheduler.close(drain_s=0.05))

    def react(samples: list[int]) -> list[str]:
        if samples != [-1]:
            model.hold()
            model.wait_until_released()
        return [f"r{sample}" for sample in samples]

    model.react = react
    queued = scheduler.submit(1)
    model.release()
    assert isinstance(queued.exception(PATIENCE_S), ServerClosed)


def test_s18_of_several_closes_the_shortest_drain_counts(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start()
    queued = [model.occupy(scheduler), scheduler.submit(1)]
    patient = threading.Thread(target=scheduler.close, kwargs={"drain_s": 1000})
    patient.start()
    scheduler.close(drain_s=0.05)
    assert [type(future.exception(0)) for future in queued] == [ServerClosed, ServerClosed]
    model.release()
    patient.join(PATIENCE_S)
    assert not patient.is_alive()


def test_s18_close_inside_an_event_loop_answers_its_own_waiters(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start(max_wait_s=1000)

    async def ask() -> list[str]:
        waiting = [asyncio.wrap_future(scheduler.submit(sample)) for sample in range(3)]
        scheduler.close()
        return await asyncio.gather(*waiting)

    assert asyncio.run(ask()) == ["r0", "r1", "r2"]


def test_s18_close_before_anything_came_and_without_a_destructor(model: "FakeModel") -> None:
    BatchScheduler[int, str](model).close(drain_s=0)
    assert not hasattr(BatchScheduler, "__del__")


def test_s18_close_sends_blocked_submitters_away(
    start: "StartScheduler", model: "FakeModel", wait_for_line: "WaitForLine"
) -> None:
    scheduler = start(max_queued_items=1, max_batch_size=1)
    model.occupy(scheduler)
    scheduler.submit(0)
    with ThreadPoolExecutor(3) as pool:
        blocked = [pool.submit(scheduler.submit, sample) for sample in (1, 2)]
        wait_for_line(scheduler, 2)
        closing = pool.submit(scheduler.close)
        assert [type(future.exception(PATIENCE_S)) for future in blocked] == [ServerClosed, ServerClosed]
        model.release()
        closing.result(PATIENCE_S)


def test_s18_submitting_while_closing_is_answered_or_refused(start: "StartScheduler") -> None:
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


def test_s18_leaving_the_with_block_closes(model: "FakeModel") -> None:
    with BatchScheduler[int, str](model, max_wait_s=1000) as scheduler:
        future = scheduler.submit(1)
    assert future.result(0) == "r1"


def test_s19_several_event_loops_share_one_scheduler_and_a_closed_one_harms_nobody(
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
    model.occupy(scheduler)
    loop = asyncio.new_event_loop()
    asyncio.wrap_future(scheduler.submit(5), loop=loop)
    loop.close()
    beside = scheduler.submit(6)
    model.release()
    assert beside.result(PATIENCE_S) == "r6"
    assert asyncio.run(ask([7])) == ["r7"]
    assert asyncio.run(ask([8])) == ["r8"]


def test_s21_a_scheduler_cannot_be_pickled(start: "StartScheduler") -> None:
    with pytest.raises(TypeError, match="owns a thread"):
        pickle.dumps(start())


def test_s21_a_forked_child_gets_an_error_and_not_a_hang(start: "StartScheduler") -> None:
    scheduler = start()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of what is tested here
        child = os.fork()
    if child == 0:
        try:
            with scheduler._core.lock:  # as some other thread of the parent may have held it
                scheduler.close()
            scheduler.submit(1)
        except CallerError:
            os._exit(42)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    assert scheduler.submit(1).result(PATIENCE_S) == "r1"


def test_s18_the_interpreter_ends_though_nobody_closed_the_scheduler() -> None:
    run_script("""
        from inference.batching import BatchScheduler, SchedulerState
        scheduler = BatchScheduler(lambda samples, modes: list(samples), max_wait_s=1000)
        future = scheduler.submit(1)
    """)


def test_s18_the_interpreter_lets_a_running_batch_end_before_it_goes() -> None:
    printed = run_script("""
        import threading, time
        from inference.batching import BatchScheduler, SchedulerState

        def forward(samples, modes):
            running.set()
            time.sleep(0.2)
            print("computed", samples)
            return samples

        running = threading.Event()
        scheduler = BatchScheduler(forward, max_wait_s=0, max_batch_size=1)
        futures = [scheduler.submit(1), scheduler.submit(2)]
        running.wait()
    """)
    assert printed == "computed [1]\n"


def test_s21_a_forked_child_does_not_wait_for_a_future_of_its_parent(
    start: "StartScheduler", model: "FakeModel"
) -> None:
    scheduler = start()
    pending = model.occupy(scheduler)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            pending.result()
        except CallerError:
            os._exit(42)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42


def test_s23_a_changed_setting_applies_to_the_next_batch(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start(max_batch_size=4, max_wait_s=1000)
    model.hold()
    futures = [scheduler.submit(sample) for sample in range(4)]
    model.wait_until_called()
    scheduler.configure(max_batch_size=2)
    futures += [scheduler.submit(sample) for sample in range(4, 9)]
    model.release()
    assert [future.result(PATIENCE_S) for future in futures[:8]] == [f"r{n}" for n in range(8)]
    assert model.calls == [[0, 1, 2, 3], [4, 5], [6, 7]]
    assert not futures[8].done()
    scheduler.configure(max_wait_s=0)  # wakes what waits
    assert futures[8].result(PATIENCE_S) == "r8"


def test_s23_a_refused_change_changes_nothing(start: "StartScheduler") -> None:
    scheduler = start(max_batch_size=4, max_wait_s=1000, max_queued_items=8)
    with pytest.raises(ConfigError, match="max_wait_s"):
        scheduler.configure(max_batch_size=1, max_wait_s=-1)
    with pytest.raises(ConfigError, match="max_batch_size"):
        scheduler.configure(max_batch_size=0)
    first = scheduler.submit(1)
    with pytest.warns(RuntimeWarning, match="no batch can fill"):
        scheduler.configure(max_batch_size=9)
    assert not first.done()


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
        {"stuck_after_s": 0},
        {"stuck_after_s": "a while"},
        {"lane_share": 0},
        {"lane_share": 1.5},
    ],
    ids=str,
)
def test_s23_a_setting_out_of_range_is_named(model: "FakeModel", setting: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=next(iter(setting))):
        BatchScheduler(model, **setting)  # type: ignore[arg-type]


@pytest.mark.parametrize("settings", [{"max_queued_items": 3}, {"max_queued_items": 6, "lane": lambda *_: None}])
def test_s1_a_queue_in_which_no_batch_can_fill_is_warned_of(model: "FakeModel", settings: dict[str, object]) -> None:
    with pytest.warns(RuntimeWarning, match="no batch can fill"):
        BatchScheduler(model, max_batch_size=4, **settings).close()  # type: ignore[arg-type]


def test_s28_the_gauges_say_what_is_going_on(start: "StartScheduler", model: "FakeModel") -> None:
    now = [100.0]
    scheduler = start(lane=lambda sample, _: sample % 2, nbytes=abs, clock=lambda: now[0])
    model.occupy(scheduler)
    scheduler.submit(2)
    now[0] = 103.0
    futures = [scheduler.submit(3), scheduler.submit(4)]
    books = scheduler.statistics()
    assert (books.running, books.queued, books.queued_bytes, books.lanes) == (1, 3, 9, 2)
    assert (books.oldest_age_s, books.accepted, books.refused) == (3.0, 4, 0)
    assert (books.state, books.accepting) == (SchedulerState.OPEN, True)
    futures[0].cancel()
    model.release()
    futures[1].result(PATIENCE_S)
    scheduler.close()
    with pytest.raises(ServerClosed):
        scheduler.submit(5)
    books = scheduler.statistics()
    assert (books.completed, books.cancelled, books.refused, books.oldest_age_s) == (3, 1, 1, 0)
    assert (books.batches, books.batch_sizes, books.forward_calls) == (2, {1: 1, 2: 1}, 2)
    assert books.state is SchedulerState.CLOSED
