"""Deadlines are met whatever the model does, and wall time plays no part."""

import ast
import threading
import time
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import inference.batching
from inference.errors import BadRequest, CallerError, DeadlineExceeded, QueueFull
from tests.inference.batching.patience import PATIENCE_S

if TYPE_CHECKING:
    from tests.inference.batching.conftest import FakeModel, StartScheduler


def test_s9_a_queue_deadline_expires_at_the_deadline_though_the_model_is_busy(
    start: "StartScheduler", model: "FakeModel"
) -> None:
    scheduler = start()
    running = model.occupy(scheduler)
    late, patient = scheduler.submit(1, deadline_s=0.05), scheduler.submit(2)
    error = late.exception(PATIENCE_S)
    assert isinstance(error, DeadlineExceeded)
    assert error.fields["stage"] == "queued"
    assert not running.done()
    books = scheduler.statistics()
    assert (books.expired, books.expired_running, books.queued, books.running) == (1, 0, 1, 1)
    model.release()
    assert patient.result(PATIENCE_S) == "r2"
    assert model.calls == [[-1], [2]]


def test_s9_a_later_item_with_an_earlier_deadline_expires_first(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start()
    model.occupy(scheduler)
    patient, hurried = scheduler.submit(1, deadline_s=1000), scheduler.submit(2, deadline_s=0.05)
    assert isinstance(hurried.exception(PATIENCE_S), DeadlineExceeded)
    assert not patient.done()


def test_s9_a_call_deadline_answers_a_caller_whose_item_runs_and_a_queue_deadline_does_not(
    start: "StartScheduler", model: "FakeModel"
) -> None:
    now = [0.0]
    scheduler = start(max_batch_size=2, max_wait_s=1000, clock=lambda: now[0])
    model.hold()
    patient, hurried = scheduler.submit(1, deadline_s=5), scheduler.submit(2, call_deadline_s=5)
    model.wait_until_called()
    now[0] = 6.0
    scheduler.submit(3, deadline_s=-5)  # wakes the watch thread, which sleeps by the true clock
    error = hurried.exception(PATIENCE_S)
    assert isinstance(error, DeadlineExceeded)
    assert error.fields["stage"] == "running"
    model.release()
    assert patient.result(PATIENCE_S) == "r1"
    scheduler.close()
    books = scheduler.statistics()
    assert (books.expired, books.expired_running, books.wasted, books.completed) == (2, 1, 1, 1)


def test_s9_a_call_deadline_counts_in_the_queue_too(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start()
    model.occupy(scheduler)
    error = scheduler.submit(1, deadline_s=1000, call_deadline_s=0.05).exception(PATIENCE_S)
    assert isinstance(error, DeadlineExceeded)
    assert error.fields["stage"] == "queued"


def test_s9_a_deadline_expires_while_another_model_has_the_device(start: "StartScheduler") -> None:
    device = threading.Lock()
    scheduler = start(device_lock=device)
    with device:
        assert isinstance(scheduler.submit(1, deadline_s=0.05).exception(PATIENCE_S), DeadlineExceeded)
    assert scheduler.submit(2).result(PATIENCE_S) == "r2"


def test_s9_an_expired_item_gives_its_place_to_the_one_who_waits(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start(max_queued_items=1, max_batch_size=1)
    model.occupy(scheduler)
    late = scheduler.submit(1, deadline_s=0.3)  # long enough, most times, for the other to stand in line
    entered: Future[Future[str]] = Future()
    submitter = threading.Thread(target=lambda: entered.set_result(scheduler.submit(2)))
    submitter.start()
    assert isinstance(late.exception(PATIENCE_S), DeadlineExceeded)
    waiting = entered.result(PATIENCE_S)
    submitter.join()
    model.release()
    assert waiting.result(PATIENCE_S) == "r2"


def test_s9_a_deadline_already_past_is_never_computed(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start(max_wait_s=1000)
    assert isinstance(scheduler.submit(1, deadline_s=-1).exception(PATIENCE_S), DeadlineExceeded)
    assert model.calls == []


def test_s9_deadlines_still_fire_while_the_scheduler_drains(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start()
    model.occupy(scheduler)
    late = scheduler.submit(1, deadline_s=0.1)
    closing = threading.Thread(target=scheduler.close)
    closing.start()
    assert isinstance(late.exception(PATIENCE_S), DeadlineExceeded)
    model.release()
    closing.join(PATIENCE_S)
    assert not closing.is_alive()


def test_s9_throughput_survives_a_stream_of_expired_items(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start(max_queued_items=100, max_batch_size=10)
    for _ in range(20):
        running = model.occupy(scheduler)
        late = [scheduler.submit(n, deadline_s=0.001) for n in range(100)]
        assert {type(future.exception(PATIENCE_S)) for future in late} == {DeadlineExceeded}
        model.release()
        assert running.result(PATIENCE_S) == "r-1"
    assert model.seen == [-1] * 20
    assert scheduler.statistics().expired == 2000


def test_s9_a_callback_of_an_expired_item_may_submit_but_not_wait(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start(max_queued_items=1, max_batch_size=1)
    model.occupy(scheduler)
    outcome: Future[list[str]] = Future()

    def react(_: Future[str]) -> None:
        found = []
        try:
            scheduler.submit(2).result()
        except CallerError as error:
            found.append(error.code)
        try:
            scheduler.submit(3)  # no room, and this thread must not wait for any
        except QueueFull as error:
            found.append(error.code)
        outcome.set_result(found)

    scheduler.submit(1, deadline_s=0.05).add_done_callback(react)
    assert outcome.result(PATIENCE_S) == ["caller_error", "queue_full"]


def test_s9_a_deadline_that_is_no_number_is_refused(start: "StartScheduler") -> None:
    scheduler = start()
    with pytest.raises(BadRequest, match="NaN"):
        scheduler.submit(1, deadline_s=float("nan"))
    with pytest.raises(BadRequest, match="NaN"):
        scheduler.submit(1, call_deadline_s=float("nan"))


def test_s27_a_jump_of_the_wall_clock_moves_no_deadline(
    start: "StartScheduler", model: "FakeModel", monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler = start()
    model.occupy(scheduler)
    patient, late = scheduler.submit(1, deadline_s=1000), scheduler.submit(2, deadline_s=0.2)
    wall = time.time()
    for jump_s in (1e6, -1e6):
        monkeypatch.setattr(time, "time", lambda jump_s=jump_s: wall + jump_s)
        monkeypatch.setattr(time, "time_ns", lambda jump_s=jump_s: int((wall + jump_s) * 1e9))
        assert not patient.done()
    assert isinstance(late.exception(PATIENCE_S), DeadlineExceeded)
    assert not patient.done()
    model.release()
    assert patient.result(PATIENCE_S) == "r1"


def _names_used_in_the_package() -> set[str]:
    names: set[str] = set()
    for path in Path(inference.batching.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                names |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Attribute):
                names.add(ast.unparse(node))
    return names


def test_s27_only_the_monotonic_clock_is_read() -> None:
    clocks = {name for name in _names_used_in_the_package() if name.startswith(("time.", "datetime"))}
    assert clocks == {"time.monotonic"}


def test_s20_there_is_no_event_loop_in_the_core_so_no_queue_of_one_can_lose_an_item() -> None:
    assert not [name for name in _names_used_in_the_package() if name.startswith("asyncio")]
