"""One call of the model: timed, checked, and its failure reduced to what the waiters need."""

import cmath
import logging
import math
from collections.abc import Callable, Sequence
from typing import Generic, cast

import numpy as np

from inference.batching._failure import Failure, FailureKind, describe
from inference.batching._queue import R, T
from inference.errors import InferenceError, ModelContractError, NonFiniteOutput

logger = logging.getLogger(__name__)

_DEEPEST_LIST = 3  # of lists within a row; what is nested deeper is not looked at


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
        count = len(samples)
        try:
            # The model may empty the lists it is given.
            return _checked(self._forward(list(samples), list(modes)), count)
        except Exception as error:
            # With its traceback once per type: a slide full of bad tiles must not fill the log.
            level = logging.DEBUG if type(error) in self._logged else logging.WARNING
            self._logged.add(type(error))
            logger.log(level, "%s: the forward pass of %d items failed", self._name, count, exc_info=True)
            return describe(error, None if isinstance(error, ModelContractError) else self._classify(error))
        finally:
            self.running_since = math.inf
            self.calls += 1
            self.seconds += self._clock() - started_at


def _checked(rows: object, count: int) -> list[R | InferenceError]:
    """One answer per sample; rows of numbers are finite, and if one row is an array, all are, of one shape."""
    if not isinstance(rows, list | tuple | np.ndarray) or not np.iterable(rows):
        kind = type(rows).__name__
        raise ModelContractError(f"forward returned a {kind}: return a list or an array with a result per sample")
    found = list(rows)
    if len(found) != count:
        raise ModelContractError(f"forward returned {len(found)} results for {count} samples: return one per sample")
    if any(row is None for row in found):
        raise ModelContractError("forward returned None for a sample: return a result or an exception")
    results = [row for row in found if not isinstance(row, Exception)]
    shapes = {row.shape for row in results if isinstance(row, np.ndarray)}
    if len(shapes) > 1:
        raise ModelContractError(f"forward returned rows of shapes {sorted(shapes)}: return one shape")
    others = {type(row).__name__ for row in results if not isinstance(row, np.ndarray)}
    if shapes and others:
        raise ModelContractError(f"forward returned arrays beside {', '.join(sorted(others))}: return one kind of row")
    return [_answer(cast("R | Exception", row)) for row in found]


def _answer(row: R | Exception) -> R | InferenceError:
    if isinstance(row, Exception):
        return describe(row, FailureKind.ITEM).make_error()
    if not _is_finite(row, _DEEPEST_LIST):
        return NonFiniteOutput("the model returned NaN or infinity for this tile")
    # A row may be a view that keeps the whole batch alive, a buffer the model writes to again, the same array for two
    # callers, or the caller's own sample; and a copy costs nothing beside the forward pass.
    return cast("R", row.copy()) if isinstance(row, np.ndarray) else row


def _is_finite(row: object, depth: int) -> bool:
    """False for a float, an array, or a list or tuple of such, with NaN or infinity in it."""
    if isinstance(row, np.ndarray | np.inexact):
        return row.dtype.kind not in "fc" or bool(np.isfinite(row).all())
    if isinstance(row, float | complex):
        return cmath.isfinite(row)
    if isinstance(row, list | tuple) and depth > 0:
        return all(_is_finite(part, depth - 1) for part in row)
    return True
