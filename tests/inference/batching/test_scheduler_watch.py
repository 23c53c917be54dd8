"""A batch thread that is stuck or dead: every caller is answered, and everything ends on time."""

import ctypes
import threading
import time
from concurrent.futures import Future, wait
from typing import TYPE_CHECKING

import pytest

from inference.batching import BatchScheduler, SchedulerState
from inference.batching.scheduler import _EXIT_GRACE_S
from inference.errors import DeviceBroken, QueueFull
from tests.inference.batching.patience import PATIENCE_S
from tests.inference.batching.scripts import run_script

if TYPE_CHECKING:
    from tests.inference.batching.conftest import FakeModel, StartScheduler, WaitForLine


def test_s15_a_stuck_model_answers_every_caller_and_refuses_new_work(
    start: "StartScheduler", model: "FakeModel"
) -> None:
    scheduler = start(max_batch_size=2, max_queued_items=100, stuck_after_s=0.1)
    model.hold()
    futures = [scheduler.submit(sample) for sample in range(20)]
    errors = [future.exception(PATIENCE_S) for future in futures]
    assert {type(error) for error in errors} == {DeviceBroken}
    assert len({id(error) for error in errors}) == 20
    with pytest.raises(DeviceBroken, match=r"did not return within 0.1 s: start a new process"):
        scheduler.submit(1)
    assert scheduler.statistics().state is SchedulerState.BROKEN
    began_at = time.monotonic()
    scheduler.close(drain_s=PATIENCE_S)
    assert time.monotonic() - began_at < PATIENCE_S / 2  # the thread is not waited for
    calls = len(model.calls)
    model.release()  # too late
    scheduler._batch_thread.join(PATIENCE_S)
    books = scheduler.statistics()
    assert (len(model.calls), books.failed, books.completed) == (calls, {"device_broken": 20}, 0)
    assert books.wasted == len(model.calls[-1])


def test_s15_a_close_that_waits_already_returns_when_the_model_is_given_up(
    start: "StartScheduler", model: "FakeModel"
) -> None:
    scheduler = start(stuck_after_s=0.3)
    running = model.occupy(scheduler)
    began_at = time.monotonic()
    scheduler.close(drain_s=100 * PATIENCE_S)
    assert time.monotonic() - began_at < PATIENCE_S
    assert isinstance(running.exception(0), DeviceBroken)


def test_s15_many_calls_within_the_budget_are_no_reason_to_give_up(start: "StartScheduler", model: "FakeModel") -> None:
    now = [0.0]
    scheduler = start(max_batch_size=1, stuck_after_s=1.0, clock=lambda: now[0])

    def react(samples: list[int]) -> list[str]:
        now[0] += 0.9
        with scheduler._core.lock:
            scheduler._core.watch_due.bring_forward()
        return [f"r{sample}" for sample in samples]

    model.react = react
    futures = [scheduler.submit(sample) for sample in range(100)]
    assert [future.result(PATIENCE_S) for future in futures] == [f"r{sample}" for sample in range(100)]


def test_s15_waiting_for_the_device_is_no_reason_to_give_up(start: "StartScheduler") -> None:
    device = threading.Lock()
    scheduler = start(device_lock=device, stuck_after_s=0.05)
    with device:
        future = scheduler.submit(1)
        with pytest.raises(TimeoutError):
            future.result(0.3)
    assert future.result(PATIENCE_S) == "r1"


def test_s15_the_interpreter_ends_on_time_with_a_stuck_model() -> None:
    printed = run_script("""
        import threading, time
        from inference.batching import BatchScheduler

        scheduler = BatchScheduler(lambda samples, modes: threading.Event().wait(), max_wait_s=0, stuck_after_s=0.1)
        print(type(scheduler.submit(1).exception(5)).__name__, time.monotonic())
    """)
    error, answered_at = printed.split()
    assert error == "DeviceBroken"
    assert time.monotonic() - float(answered_at) < _EXIT_GRACE_S  # a thread that was given up is not waited for


def test_s15_without_a_budget_the_interpreter_still_ends() -> None:
    run_script("""
        import threading
        from inference.batching import BatchScheduler

        scheduler = BatchScheduler(lambda samples, modes: threading.Event().wait(), max_wait_s=0)
        future = scheduler.submit(1)
    """)


def test_s14_a_batch_thread_that_died_without_a_word_is_noticed(
    model: "FakeModel", monkeypatch: pytest.MonkeyPatch, wait_for_line: "WaitForLine"
) -> None:
    monkeypatch.setattr("inference.batching._threads._PULSE_S", 0.05)
    die = threading.Event()
    monkeypatch.setattr("inference.batching._threads.BatchThread.run", lambda _: die.wait(PATIENCE_S))
    with BatchScheduler[int, str](model, max_queued_items=1, max_batch_size=1) as scheduler:
        waiting = scheduler.submit(1)
        refused: Future[str] = Future()

        def submit() -> None:
            try:
                scheduler.submit(2, timeout_s=PATIENCE_S)
            except (DeviceBroken, QueueFull) as error:
                refused.set_result(error.code)

        submitter = threading.Thread(target=submit)
        submitter.start()
        wait_for_line(scheduler, 1)
        die.set()
        assert wait([waiting], PATIENCE_S).done  # which looks at the future alone, so the watch thread noticed
        assert isinstance(waiting.exception(0), DeviceBroken)
        assert refused.result(PATIENCE_S) == "device_broken"
        submitter.join(PATIENCE_S)
        with pytest.raises(DeviceBroken, match="died: start a new process"):
            scheduler.submit(3)


def test_s14_a_submitter_notices_a_dead_batch_thread_at_once(
    model: "FakeModel", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference.batching._threads.BatchThread.run", lambda _: None)
    scheduler = BatchScheduler[int, str](model)
    scheduler._batch_thread.join(PATIENCE_S)
    with pytest.raises(DeviceBroken, match="died"):
        scheduler.submit(1)
    assert scheduler.statistics().state is SchedulerState.BROKEN
    scheduler.close()


def test_s14_a_thread_killed_from_outside_answers_everybody(
    start: "StartScheduler", model: "FakeModel", caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = start()
    running = model.occupy(scheduler)
    queued = scheduler.submit(1)
    thread_id = scheduler._batch_thread.ident
    assert thread_id is not None
    assert ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread_id), ctypes.py_object(SystemExit)) == 1
    model.release()
    assert isinstance(queued.exception(PATIENCE_S), DeviceBroken)
    assert isinstance(running.exception(PATIENCE_S), DeviceBroken)
    assert "the batch thread ends" in caplog.text


def test_s24_what_a_lost_thread_was_computing_is_not_computed_again(
    start: "StartScheduler", model: "FakeModel"
) -> None:
    scheduler = start()

    def react(samples: list[int]) -> list[str]:
        raise SystemExit

    model.react = react
    assert isinstance(scheduler.submit(1).exception(PATIENCE_S), DeviceBroken)
    assert model.calls == [[1]]
