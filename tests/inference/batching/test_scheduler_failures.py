"""What an exception of the forward pass does to its batch, its waiters and the scheduler."""

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import pytest

from inference.batching import FailureKind, SchedulerState
from inference.errors import (
    CallerError,
    DeviceBroken,
    ForwardError,
    InferenceError,
    ModelContractError,
    NonFiniteOutput,
    QueueFull,
)
from tests.inference.batching.failing import fail_on, outcomes, submit_together
from tests.inference.batching.patience import PATIENCE_S

if TYPE_CHECKING:
    from tests.inference.batching.conftest import FakeModel, Rows, StartScheduler


class OutOfMemoryError(RuntimeError):
    """Stands for torch's."""


def test_s24_without_failures_every_item_is_computed_once(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start(max_batch_size=7)
    outcomes(submit_together(scheduler, model, range(100)))
    assert sorted(model.seen) == [-1, *range(100)]


def test_s5_an_exception_in_a_row_fails_that_row_alone(start: "StartScheduler", model: "FakeModel") -> None:
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
def test_s5_a_model_that_returns_the_wrong_thing_fails_that_batch_and_no_other(
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
def test_s11_every_waiter_gets_an_exception_of_its_own(
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
def test_s12_out_of_memory_halves_and_later_batches_stay_below_the_limit(
    start: "StartScheduler", model: "FakeModel", error: type[Exception]
) -> None:
    scheduler = start()

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


def test_s12_the_lower_limit_is_for_that_kind_of_input_alone(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start(lane=lambda sample, _: sample >= 100)

    def react(samples: list[int]) -> "Rows":
        if samples[0] >= 100 and len(samples) > 2:
            raise MemoryError
        return [f"r{sample}" for sample in samples]

    model.react = react
    outcomes(submit_together(scheduler, model, [*range(8), *range(100, 108)]))
    assert scheduler.statistics().batch_limits == {True: 2}
    outcomes(submit_together(scheduler, model, range(8)))
    assert model.calls[-1] == list(range(8))


def test_s12_an_item_that_does_not_fit_even_alone_may_be_tried_again(
    start: "StartScheduler", model: "FakeModel"
) -> None:
    scheduler = start()
    model.react = fail_on(1, error=MemoryError)
    futures = submit_together(scheduler, model, range(2))
    assert outcomes(futures) == ["r0", "forward_error"]
    assert scheduler.submit(5).result(PATIENCE_S) == "r5"


def test_s13_a_fatal_error_answers_everybody_and_refuses_new_work(start: "StartScheduler", model: "FakeModel") -> None:
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


@pytest.mark.parametrize("text", ["an illegal memory access was encountered", "device-side assert triggered"])
def test_s13_a_cuda_error_that_lasts_breaks_the_scheduler_though_the_model_wrapped_it(
    start: "StartScheduler", model: "FakeModel", text: str
) -> None:
    scheduler = start(max_batch_size=4)

    def react(samples: list[int]) -> "Rows":
        if samples == [-1]:
            return ["r-1"]
        try:
            raise RuntimeError(f"CUDA error: {text}")
        except RuntimeError as error:
            raise ForwardError("the forward pass failed") from error

    model.react = react
    assert outcomes(submit_together(scheduler, model, range(20))) == ["device_broken"] * 20
    assert len(model.calls) == 2  # not halved
    assert scheduler.statistics().state is SchedulerState.BROKEN


@pytest.mark.parametrize("death", [SystemExit, KeyboardInterrupt, GeneratorExit])
def test_s14_the_batch_thread_does_not_die_in_silence(
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


def test_s13_a_broken_scheduler_sends_blocked_submitters_away(start: "StartScheduler", model: "FakeModel") -> None:
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


def test_s22_a_model_that_waits_for_its_own_scheduler_gets_an_error(
    start: "StartScheduler", model: "FakeModel"
) -> None:
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


def test_s11_the_traceback_of_a_failing_model_is_logged_once(
    start: "StartScheduler", model: "FakeModel", caplog: pytest.LogCaptureFixture
) -> None:
    scheduler = start()
    model.react = fail_on(*range(32))
    outcomes(submit_together(scheduler, model, range(32)))
    assert len([record for record in caplog.records if record.levelname == "WARNING"]) == 1
    assert "cannot compute" in caplog.text
