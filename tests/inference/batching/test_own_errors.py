"""Classes of errors that cannot be made anew from a message and fields: their items fail, and nothing else does."""

from typing import TYPE_CHECKING

import pytest

from inference.batching import FailureKind, SchedulerState
from inference.errors import (
    DeadlineExceeded,
    DeviceBroken,
    ForwardError,
    InferenceError,
    ModelContractError,
    TileError,
)
from tests.inference.batching.failing import outcomes, submit_together
from tests.inference.batching.patience import PATIENCE_S

if TYPE_CHECKING:
    from tests.inference.batching.conftest import FakeModel, Rows, StartScheduler


class TwoArguments(TileError):
    def __init__(self, tile: int, why: str) -> None:
        super().__init__(f"tile {tile}: {why}")


class WithoutFields(DeadlineExceeded):
    def __init__(self, *args: object) -> None:
        Exception.__init__(self, *args)


class OddFields(TileError):
    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.fields = 5  # type: ignore[assignment]


class BrokenContract(ModelContractError):
    def __init__(self, rows: int, samples: int) -> None:
        super().__init__(f"{rows} rows for {samples} samples")


class BrokenDevice(DeviceBroken):
    def __init__(self, device: str, *, driver: str) -> None:
        super().__init__(f"{device} with {driver}")


OWN = [TwoArguments(7, "odd"), WithoutFields(), OddFields("odd")]


@pytest.mark.parametrize("error", OWN, ids=lambda error: type(error).__name__)
@pytest.mark.parametrize("raised", [True, False], ids=["raised", "in a row"])
def test_s10_an_error_of_any_own_class_fails_its_item_alone(
    start: "StartScheduler", model: "FakeModel", error: InferenceError, raised: bool
) -> None:
    scheduler = start()

    def react(samples: list[int]) -> "Rows":
        if raised and 7 in samples:
            raise error
        return [error if sample == 7 else f"r{sample}" for sample in samples]

    model.react = react
    futures = submit_together(scheduler, model, [1, 7, 2, 3])
    assert outcomes(futures) == ["r1", "tile_error", "r2", "r3"]
    found = futures[1].exception(PATIENCE_S)
    assert isinstance(found, TileError)
    assert found is not error
    assert found.fields["error_type"] == type(error).__name__
    assert scheduler.statistics().state is SchedulerState.OPEN


def test_s12_such_an_error_for_want_of_memory_is_a_forward_error(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start(classify=lambda _: FailureKind.OUT_OF_MEMORY)

    def react(samples: list[int]) -> "Rows":
        if 7 in samples:
            raise TwoArguments(7, "no memory")
        return [f"r{sample}" for sample in samples]

    model.react = react
    futures = submit_together(scheduler, model, [1, 7])
    assert outcomes(futures) == ["r1", "forward_error"]
    assert type(futures[1].exception(0)) is ForwardError


def test_s5_a_broken_contract_of_an_own_class_fails_the_batch_and_no_other(
    start: "StartScheduler", model: "FakeModel"
) -> None:
    scheduler = start()

    def react(samples: list[int]) -> "Rows":
        if 7 in samples:
            raise BrokenContract(1, 2)
        return [f"r{sample}" for sample in samples]

    model.react = react
    assert outcomes(submit_together(scheduler, model, [7, 8])) == ["model_contract"] * 2
    assert scheduler.submit(9).result(PATIENCE_S) == "r9"


def test_s13_a_broken_device_of_an_own_class_answers_everybody(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start(max_batch_size=2)

    def react(samples: list[int]) -> "Rows":
        if samples != [-1]:
            raise BrokenDevice("cuda:0", driver="550")
        return ["r-1"]

    model.react = react
    futures = submit_together(scheduler, model, range(5))
    assert outcomes(futures) == ["device_broken"] * 5
    assert "cuda:0 with 550" in str(futures[0].exception(0))
