"""Batches that fail, and what became of their items."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

from inference.batching import BatchScheduler
from inference.errors import InferenceError
from tests.inference.batching.patience import PATIENCE_S

if TYPE_CHECKING:
    from tests.inference.batching.conftest import FakeModel, Rows


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
