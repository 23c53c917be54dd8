"""One call of the model: timed, checked, and its failure reduced to what the waiters need."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Generic, cast

import numpy as np

from inference.batching._failure import Failure, FailureKind, describe
from inference.batching._queue import R, T
from inference.errors import InferenceError, ModelContractError, NonFiniteOutput

logger = logging.getLogger(__name__)


class ForwardPass(Generic[T, R]):
    """The model's forward function; counts its calls and the seconds spent in them.

    Attributes:
        running_since: when the call that runs now began, set by its caller; infinity while none does.
    """

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
        self.running_since = math.inf

    def __call__(self, samples: Sequence[T], modes: Sequence[str]) -> list[R | InferenceError] | Failure:
        """Returns one answer per sample, or why there are none; passes on SystemExit and its like."""
        started_at = self._clock()
        try:
            return _checked(self._forward(samples, modes), len(samples))
        except Exception as error:
            # With its traceback once per type: a slide full of bad tiles must not fill the log.
            level = logging.DEBUG if type(error) in self._logged else logging.WARNING
            self._logged.add(type(error))
            logger.log(level, "%s: the forward pass of %d items failed", self._name, len(samples), exc_info=True)
            return describe(error, None if isinstance(error, ModelContractError) else self._classify(error))
        finally:
            self.running_since = math.inf
            self.calls += 1
            self.seconds += self._clock() - started_at


def _checked(rows: object, count: int) -> list[R | InferenceError]:
    """One answer per sample; rows that are arrays are also finite, of one shape, and own their memory.

    A view would keep the whole batch alive for one caller, or change when the model reuses its buffer.
    """
    if not isinstance(rows, list | tuple | np.ndarray) or not np.iterable(rows):
        kind = type(rows).__name__
        raise ModelContractError(f"forward returned a {kind}: return a list or an array with a result per sample")
    if len(rows) != count:
        raise ModelContractError(f"forward returned {len(rows)} results for {count} samples: return one per sample")
    if any(row is None for row in rows):
        raise ModelContractError("forward returned None for a sample: return a result or an exception")
    if len(shapes := {row.shape for row in rows if isinstance(row, np.ndarray)}) > 1:
        raise ModelContractError(f"forward returned rows of shapes {sorted(shapes)}: return one shape")
    return [_answer(cast("R | Exception", row)) for row in rows]


def _answer(row: R | Exception) -> R | InferenceError:
    if isinstance(row, Exception):
        return describe(row, FailureKind.ITEM).make_error()
    if not isinstance(row, np.ndarray):
        return row
    if row.dtype.kind in "fc" and not np.isfinite(row).all():
        return NonFiniteOutput("the model returned NaN or infinity for this tile")
    return cast("R", row.copy()) if row.base is not None else row
