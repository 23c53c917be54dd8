"""One call of the model, and what its failure says about the batch."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Generic

from inference.batching._queue import R, T
from inference.errors import DeviceBroken, ForwardError, InferenceError, ModelContractError, TileError

logger = logging.getLogger(__name__)


class FailureKind(Enum):
    """What an exception of the forward pass says about the batch."""

    ITEM = "item"
    """Some item may be to blame: halve until it stands alone."""
    OUT_OF_MEMORY = "out_of_memory"
    """The batch was too large: halve and remember."""
    FATAL = "fatal"
    """The device is unusable from here on."""


def classify_failure(error: BaseException) -> FailureKind:
    """Classifies without knowing a framework: `DeviceBroken` is fatal, `MemoryError` is memory, all else an item's."""
    if isinstance(error, DeviceBroken):
        return FailureKind.FATAL
    return FailureKind.OUT_OF_MEMORY if isinstance(error, MemoryError) else FailureKind.ITEM


@dataclass(frozen=True)
class Failure:
    """A failed forward pass, reduced to what each waiter's own exception is made from.

    Keeping the exception itself would keep its traceback, and with that the tensors of the failed batch.
    """

    kind: FailureKind | None  # None: the model broke its contract, whichever the items
    make_error: Callable[[], InferenceError]


def describe(error: BaseException, kind: FailureKind | None) -> Failure:
    """Keeps the class and fields of our own errors; wraps others, with their type and text as fields.

    A `ForwardError` blames a batch; where one item is to blame, it becomes that item's `TileError`.
    """
    if kind is FailureKind.ITEM and type(error) is ForwardError:
        return Failure(kind, partial(TileError, error.message, **error.fields))
    kept: type[InferenceError] = InferenceError
    wrapper: type[InferenceError] = TileError
    text = "the forward pass fails on this tile alone"
    if kind is FailureKind.FATAL:
        kept, wrapper, text = DeviceBroken, DeviceBroken, "the model can no longer run, start a new process"
    elif kind is FailureKind.OUT_OF_MEMORY:
        wrapper, text = ForwardError, "no memory for this tile even alone"
    if isinstance(error, kept):
        return Failure(kind, partial(type(error), error.message, **error.fields))
    name, cause = type(error).__name__, str(error)[:2000]
    return Failure(kind, partial(wrapper, f"{text}: {name}: {cause}", error_type=name, error_text=cause))


class ForwardPass(Generic[T, R]):
    """The model's forward function, checked; counts its calls and the seconds spent in them."""

    def __init__(
        self,
        forward: Callable[[Sequence[T], Sequence[str]], Sequence[R | Exception]],
        classify: Callable[[BaseException], FailureKind],
        clock: Callable[[], float],
        name: str,
    ) -> None:
        self._forward = forward
        self._classify = classify
        self._clock = clock
        self._name = name
        self._logged: set[type[BaseException]] = set()
        self.calls = 0
        self.seconds = 0.0

    def __call__(self, samples: Sequence[T], modes: Sequence[str]) -> list[R | InferenceError] | Failure:
        """Returns one answer per sample, or why there are none; passes on SystemExit and its like."""
        started_at = self._clock()
        try:
            return _check(self._forward(samples, modes), len(samples))
        except Exception as error:
            # With its traceback once per type: a slide full of bad tiles must not fill the log.
            level = logging.DEBUG if type(error) in self._logged else logging.WARNING
            self._logged.add(type(error))
            logger.log(level, "%s: the forward pass of %d items failed", self._name, len(samples), exc_info=True)
            return describe(error, None if isinstance(error, ModelContractError) else self._classify(error))
        finally:
            self.calls += 1
            self.seconds += self._clock() - started_at


def _check(rows: Sequence[R | Exception], count: int) -> list[R | InferenceError]:
    if not isinstance(rows, list | tuple):
        raise ModelContractError(f"forward returned a {type(rows).__name__}: return a list with a result per sample")
    if len(rows) != count:
        raise ModelContractError(f"forward returned {len(rows)} results for {count} samples: return one per sample")
    if any(row is None for row in rows):
        raise ModelContractError("forward returned None for a sample: return a result or an exception")
    return [describe(row, FailureKind.ITEM).make_error() if isinstance(row, Exception) else row for row in rows]
