"""From the rows of a slide's tiles to one result per slide.

Rows arrive in planned order, cut into batches anywhere: the cuts never change a bit of the result.
Failed tiles are counted and otherwise left out.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from inference.errors import ConfigError, ModelContractError

Result = TypeVar("Result")


class SlideAggregator(ABC, Generic[Result]):
    """Collects one slide's rows: `start`, then `update` for each batch, then `finish`.

    A subclass implements `_begin`, `_add` and `_result`. One object serves one slide at a time and
    may be started again.

    Attributes:
        n_ok: tiles collected since `start`.
        n_failed: tiles left out since `start`.
    """

    n_ok = 0
    n_failed = 0
    _n_dims = 0

    def start(self, n_dims: int) -> None:
        """Begin a slide whose rows have `n_dims` values each."""
        self.n_ok = self.n_failed = 0
        self._n_dims = n_dims
        self._begin(n_dims)

    def update(self, rows: NDArray[np.floating], ok: NDArray[np.bool_]) -> None:
        """Take the next rows (n, n_dims); those that are not `ok` may hold anything.

        Raises `ModelContractError` where an ok row is not finite or of another width.
        """
        if rows.shape != (len(ok), self._n_dims):
            raise ModelContractError(
                f"expected ({len(ok)}, {self._n_dims}) values for a slide result, got {rows.shape}"
            )
        good = rows[ok]
        if not np.isfinite(good).all():
            raise ModelContractError("a tile is marked ok without finite values; its output was not checked")
        self.n_ok += len(good)
        self.n_failed += len(ok) - len(good)
        if len(good):
            self._add(good)

    def finish(self) -> Result | None:
        """The slide's result, or None where no tile is ok."""
        return self._result() if self.n_ok else None

    @abstractmethod
    def _begin(self, n_dims: int) -> None: ...

    @abstractmethod
    def _add(self, rows: NDArray[np.floating]) -> None:
        """Take at least one finite row."""

    @abstractmethod
    def _result(self) -> Result:
        """The result of at least one row."""


class MeanPool(SlideAggregator[NDArray[np.float32]]):
    """The mean embedding (n_dims,) of a slide."""

    def _begin(self, n_dims: int) -> None:
        self._sum = np.zeros(n_dims)

    def _add(self, rows: NDArray[np.floating]) -> None:
        _accumulate(self._sum, rows)

    def _result(self) -> NDArray[np.float32]:
        mean: NDArray[np.float32] = (self._sum / self.n_ok).astype(np.float32)
        return mean


class ScalarSummary(SlideAggregator[dict[str, dict[str, float]]]):
    """What each named tile output does over a slide.

    Per output: `mean`, `top_k_mean` (of the min(top_k, ok tiles) greatest), `std` (of the
    population), `min`, `max`, and, where `thresholds` has the output, `fraction_above` (strictly).
    """

    def __init__(self, names: Sequence[str], *, top_k: int = 10, thresholds: Mapping[str, float] | None = None) -> None:
        unknown = sorted(set(thresholds or ()) - set(names))
        if top_k < 1 or unknown or len(set(names)) != len(names):
            raise ConfigError(
                f"a slide summary needs top_k >= 1 (got {top_k}), distinct output names and thresholds "
                f"for those only (unknown: {', '.join(unknown) or 'none'})"
            )
        self._names = tuple(names)
        self._top_k = top_k
        self._thresholds = dict(thresholds or {})
        self._limits = np.array([self._thresholds.get(name, np.inf) for name in names])

    def _begin(self, n_dims: int) -> None:
        if n_dims != len(self._names):
            raise ModelContractError(f"{len(self._names)} outputs are named, the model returns {n_dims}")
        self._first: NDArray[np.float64] | None = None
        self._sum, self._square_sum = np.zeros(n_dims), np.zeros(n_dims)
        self._least, self._greatest = np.full(n_dims, np.inf), np.full(n_dims, -np.inf)
        self._top = np.empty((0, n_dims))
        self._n_above = np.zeros(n_dims, np.int64)

    def _add(self, rows: NDArray[np.floating]) -> None:
        rows = rows.astype(np.float64)
        if self._first is None:
            self._first = rows[0].copy()
        # Sums of differences from the first tile: squares of raw values would cancel in `std`.
        differences = rows - self._first
        _accumulate(self._sum, differences)
        _accumulate(self._square_sum, differences**2)
        self._least = np.minimum(self._least, rows.min(axis=0))
        self._greatest = np.maximum(self._greatest, rows.max(axis=0))
        self._n_above += (rows > self._limits).sum(axis=0)
        self._top = -np.sort(-np.concatenate([self._top, rows]), axis=0)[: self._top_k]

    def _result(self) -> dict[str, dict[str, float]]:
        assert self._first is not None
        shift = self._sum / self.n_ok
        columns = {
            "mean": self._first + shift,
            "top_k_mean": self._top.mean(axis=0),
            "std": np.sqrt(np.maximum(self._square_sum / self.n_ok - shift**2, 0)),
            "min": self._least,
            "max": self._greatest,
        }
        summary = {
            name: {key: float(column[i]) for key, column in columns.items()} for i, name in enumerate(self._names)
        }
        for i, name in enumerate(self._names):
            if name in self._thresholds:
                summary[name]["fraction_above"] = float(self._n_above[i] / self.n_ok)
        return summary


def _accumulate(total: NDArray[np.float64], rows: NDArray[np.floating]) -> None:
    """Add row after row: numpy's own sum pairs rows up, so its last bits depend on where batches are cut."""
    for row in rows:
        total += row
