"""What an exception of the forward pass does to the item at fault, its neighbours and the scheduler."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import pytest

from inference.batching import BatchScheduler, FailureKind
from inference.errors import (
    BadRequest,
    CallerError,
    DeadlineExceeded,
    DeviceBroken,
    ForwardError,
    InferenceError,
    ModelContractError,
    NonFiniteOutput,
    QueueFull,
    TileError,
)

if TYPE_CHECKING:
    from tests.inference.batching.conftest import FakeModel, Rows, StartScheduler

PATIENCE_S = 10.0


class OutOfMemoryError(RuntimeError):
    """Stands for torch's."""


def submit_together(
    scheduler: BatchScheduler[int, str], model: "FakeModel", samples: Sequence[int]
) -> list[Future[str]]:
    """Queues all samples behind a held call, so that they are cut as one batch."""
    model.occupy(scheduler)
    futures = [scheduler.submit(sample) for sample in samples]
    model.release()
    return futures


def fail_on(*bad: int, error: type[BaseException] = ValueError) -> "Callable[[list[int]], Rows]":
    def react(samples: list[int]) -> "Rows":
        guilty = sorted(set(samples) & set(bad))
        if guilty:
            raise error(f"cannot compute {guilty}")
        return [f"r{sample}" for sample in samples]

    return react


def outcomes(futures: Sequence[Future[str]]) -> list[str]:
    """The result of each, or the code of its error."""
    found = []
    for future in futures:
        error = future.exception(PATIENCE_S)
        assert error is None or isinstance(error, InferenceError)
        found.append(future.result(0) if error is None else error.code)
    return found


def test_one_bad_item_of_32_fails_alone_within_11_calls(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start()
    model.react = fail_on(19)
    futures = submit_together(scheduler, model, range(32))
    assert outcomes(futures) == ["tile_error" if n == 19 else f"r{n}" for n in range(32)]
    assert len(model.calls) - 1 <= 11
    error = futures[19].exception(0)
    assert isinstance(error, TileError)
    assert error.fields == {"error_type": "ValueError", "error_text": "cannot compute [19]"}
    assert (error.retryable, error.__cause__, error.__context__) == (False, None, None)


def test_the_pipeline_halves_to_the_end_so_that_no_innocent_item_fails(
    start: "StartScheduler", model: "FakeModel"
) -> None:
    scheduler = start()
    bad = [0, 1, 17, 40, 41, 63]
    model.react = fail_on(*bad)
    futures = submit_together(scheduler, model, range(64))
    assert outcomes(futures) == ["tile_error" if n in bad else f"r{n}" for n in range(64)]
    assert scheduler.statistics().failed == {"tile_error": 6}


def test_what_a_spent_budget_leaves_undecided_may_be_tried_again(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start(retry_budget=3)
    model.react = fail_on(0)
    futures = submit_together(scheduler, model, range(8))
    assert outcomes(futures) == ["forward_error"] * 4 + ["r4", "r5", "r6", "r7"]
    assert model.calls[1:] == [[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3], [4, 5, 6, 7], [0, 1]]
    error = futures[0].exception(0)
    assert isinstance(error, ForwardError)
    assert error.retryable


def test_no_budget_means_one_call(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start(retry_budget=0)
    model.react = fail_on(0)
    assert outcomes(submit_together(scheduler, model, range(8))) == ["forward_error"] * 8
    assert len(model.calls) == 2


def test_without_failures_every_item_is_computed_once(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start(max_batch_size=7)
    outcomes(submit_together(scheduler, model, range(100)))
    assert sorted(model.seen) == [-1, *range(100)]


def test_an_error_of_ours_keeps_its_class_and_fields(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start()

    def react(samples: list[int]) -> "Rows":
        if 1 in samples:
            raise BadRequest("not an image", field="tile")
        return [f"r{sample}" for sample in samples]

    model.react = react
    futures = submit_together(scheduler, model, range(3))
    error = futures[1].exception(PATIENCE_S)
    assert isinstance(error, BadRequest)
    assert error.fields == {"field": "tile"}
    assert [futures[0].result(PATIENCE_S), futures[2].result(PATIENCE_S)] == ["r0", "r2"]


def test_an_exception_in_a_row_fails_that_row_alone(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start()
    model.react = lambda samples: [
        {2: NonFiniteOutput("NaN"), 3: ValueError("odd")}.get(sample, f"r{sample}") for sample in samples
    ]
    assert outcomes(submit_together(scheduler, model, range(5))) == [
        "r0",
        "r1",
        "non_finite_output",
        "tile_error",
        "r4",
    ]
    assert len(model.calls) == 2


BAD_RETURNS: dict[str, Callable[[list[int]], Any]] = {
    "one too few": lambda samples: ["r"] * (len(samples) - 1),
    "one too many": lambda samples: ["r"] * (len(samples) + 1),
    "a dict of the right length": lambda samples: dict.fromkeys(samples, "r"),
    "a string of the right length": lambda samples: "r" * len(samples),
    "a generator": lambda samples: (f"r{sample}" for sample in samples),
    "nothing": lambda samples: None,
    "nothing for one": lambda samples: [None, *samples[1:]],
}


@pytest.mark.parametrize("returned", BAD_RETURNS)
def test_a_model_that_returns_the_wrong_thing_fails_that_batch_and_no_other(
    start: "StartScheduler", model: "FakeModel", returned: str
) -> None:
    scheduler = start()
    model.occupy(scheduler)
    futures = [scheduler.submit(sample) for sample in range(4)]
    good = model.react
    model.react = lambda samples: good(samples) if samples == [-1] else BAD_RETURNS[returned](samples)
    model.release()
    assert outcomes(futures) == ["model_contract"] * 4
    assert len(model.calls) == 2
    model.react = good
    assert scheduler.submit(9).result(PATIENCE_S) == "r9"


@pytest.mark.parametrize("error", [ModelContractError("wrong shape"), DeviceBroken("device-side assert")], ids=repr)
def test_every_waiter_gets_an_exception_of_its_own(
    start: "StartScheduler", model: "FakeModel", error: InferenceError
) -> None:
    scheduler = start()

    def react(samples: list[int]) -> "Rows":
        if samples != [-1]:
            raise error
        return ["r-1"]

    model.react = react
    errors = [future.exception(PATIENCE_S) for future in submit_together(scheduler, model, range(64))]
    assert len({id(found) for found in errors}) == 64
    assert {(type(found), str(found)) for found in errors} == {(type(error), str(error))}
    first = errors[0]
    assert first is not None
    first.add_note("mine")
    assert not any(getattr(found, "__notes__", None) for found in errors[1:])
    assert not any(found is None or found.__traceback__ for found in errors[1:])


@pytest.mark.parametrize("error", [MemoryError, OutOfMemoryError])
def test_out_of_memory_halves_and_later_batches_stay_below_the_limit(
    start: "StartScheduler", model: "FakeModel", error: type[Exception]
) -> None:
    scheduler = start(
        classify=lambda e: (
            FailureKind.OUT_OF_MEMORY if isinstance(e, MemoryError | OutOfMemoryError) else FailureKind.ITEM
        )
    )

    def react(samples: list[int]) -> "Rows":
        if len(samples) > 8:
            raise error("no memory")
        return [f"r{sample}" for sample in samples]

    model.react = react
    assert outcomes(submit_together(scheduler, model, range(64))) == [f"r{n}" for n in range(64)]
    assert [len(call) for call in model.calls[1:]] == [64, 32, 16] + [8] * 8
    assert scheduler.statistics().batch_limits == {None: 8}
    outcomes(submit_together(scheduler, model, range(20)))
    assert [len(call) for call in model.calls[13:]] == [8, 8, 4]


def test_an_item_that_does_not_fit_even_alone_may_be_tried_again(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start()
    model.react = fail_on(1, error=MemoryError)
    futures = submit_together(scheduler, model, range(2))
    assert outcomes(futures) == ["r0", "forward_error"]
    assert scheduler.submit(5).result(PATIENCE_S) == "r5"


def test_a_fatal_error_answers_everybody_and_refuses_new_work(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start(max_batch_size=2, max_queued_items=3, classify=lambda _: FailureKind.FATAL)
    model.react = fail_on(0, error=RuntimeError)
    futures = submit_together(scheduler, model, range(3))
    assert outcomes(futures) == ["device_broken"] * 3
    with pytest.raises(DeviceBroken, match="start a new process") as refused:
        scheduler.submit(4)
    assert refused.value.fields["error_type"] == "RuntimeError"
    scheduler.close()
    with pytest.raises(DeviceBroken):  # and not ServerClosed, which would send the caller elsewhere
        scheduler.submit(4)
    assert not scheduler.statistics().accepting
    assert len(model.calls) == 2


@pytest.mark.parametrize("death", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_the_batch_thread_does_not_die_in_silence(
    start: "StartScheduler", model: "FakeModel", death: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = start(max_batch_size=2)

    def react(samples: list[int]) -> "Rows":
        if samples != [-1]:
            raise death
        return ["r-1"]

    model.react = react
    assert outcomes(submit_together(scheduler, model, range(10))) == ["device_broken"] * 10
    with pytest.raises(DeviceBroken):
        scheduler.submit(1)
    assert "the batch thread ends" in caplog.text


def test_a_broken_scheduler_sends_blocked_submitters_away(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start(max_queued_items=1, max_batch_size=1)
    model.react = fail_on(-1, error=SystemExit)
    model.occupy(scheduler)
    scheduler.submit(0)
    refused: Future[str] = Future()

    def submit() -> None:
        try:
            scheduler.submit(1)
        except InferenceError as error:
            refused.set_result(error.code)

    thread = threading.Thread(target=submit)
    thread.start()
    while scheduler.statistics().waiting == 0:
        threading.Event().wait(0.001)
    model.release()
    assert refused.result(PATIENCE_S) == "device_broken"
    thread.join(PATIENCE_S)


def test_a_model_that_waits_for_its_own_scheduler_gets_an_error(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start(max_queued_items=1, max_batch_size=1)

    def react(samples: list[int]) -> "Rows":
        if samples == [1]:
            try:
                scheduler.submit(2)
                scheduler.submit(3)  # no room
            except QueueFull:
                scheduler.submit(4, block=False)
        return [f"r{sample}" for sample in samples]

    model.react = react
    error = scheduler.submit(1).exception(PATIENCE_S)
    assert isinstance(error, QueueFull)

    def wait(samples: list[int]) -> "Rows":
        return [scheduler.submit(6).result()] if samples == [5] else [f"r{sample}" for sample in samples]

    model.react = wait
    assert isinstance(scheduler.submit(5).exception(PATIENCE_S), CallerError)


def test_a_batch_is_not_repeated_for_items_past_their_deadline(start: "StartScheduler", model: "FakeModel") -> None:
    now = [0.0]
    scheduler = start(clock=lambda: now[0])
    model.occupy(scheduler)
    futures = [scheduler.submit(1, deadline_s=5), scheduler.submit(2)]

    def react(samples: list[int]) -> "Rows":
        if len(samples) > 1:
            now[0] = 6.0
            raise ValueError
        return [f"r{sample}" for sample in samples]

    model.react = react
    model.release()
    assert isinstance(futures[0].exception(PATIENCE_S), DeadlineExceeded)
    assert futures[1].result(PATIENCE_S) == "r2"
    assert model.calls == [[-1], [1, 2], [2]]


def test_a_batch_is_not_repeated_for_items_that_close_has_answered(
    start: "StartScheduler", model: "FakeModel", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference.batching.scheduler._JOIN_GRACE_S", 0.01)
    scheduler = start()
    model.occupy(scheduler)
    futures = [scheduler.submit(sample) for sample in range(8)]
    closed = threading.Event()

    def react(samples: list[int]) -> "Rows":
        if len(samples) == 8:
            closing.start()
            assert closed.wait(PATIENCE_S)
        raise ValueError

    def close() -> None:
        scheduler.close(drain_s=0)
        closed.set()

    closing = threading.Thread(target=close)
    model.react = react
    model.release()
    assert outcomes(futures) == ["server_closed"] * 8
    closing.join(PATIENCE_S)
    scheduler.close()
    assert len(model.calls) == 2


def test_the_traceback_of_a_failing_model_is_logged_once(
    start: "StartScheduler", model: "FakeModel", caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = start()
    model.react = fail_on(*range(32))
    outcomes(submit_together(scheduler, model, range(32)))
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
    assert "cannot compute" in caplog.text
