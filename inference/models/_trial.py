"""Tries a graph before anyone waits for it: does a row depend on its batch?"""

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference.models.spec import ModelSpec

Arrays = Mapping[str, NDArray[np.float32]]


def trial_batch(spec: ModelSpec, size: int) -> NDArray[Any]:
    """Inputs of the right shape and no meaning, the same ones at each call."""
    rng, shape = np.random.default_rng(0), (size, *spec.input_shape)
    if spec.input_dtype == "uint8":
        return rng.integers(0, 256, shape, dtype=np.uint8)
    return rng.standard_normal(shape, np.float32)


def rows_are_independent(
    run: Callable[[NDArray[Any], Arrays], Arrays], batch: NDArray[Any], extras: Arrays, alone_too: bool
) -> bool | None:
    """Whether rows keep their bits in other places, and `alone_too`; None if a row alone is another result."""
    places = np.random.default_rng(1).permutation(len(batch))
    first, moved, alone = (
        run(batch[rows], {name: extra[rows] for name, extra in extras.items()})
        for rows in (np.arange(len(batch)), places, np.arange(1))
    )
    if not all(close(first[n][:1], alone[n], 0.05) for n in first):
        return None
    same = all(np.array_equal(first[n][places], moved[n], equal_nan=True) for n in first)
    if alone_too:
        same = same and all(np.array_equal(first[n][:1], alone[n], equal_nan=True) for n in first)
    return same


def close(one: NDArray[np.float32], other: NDArray[np.float32], part: float) -> bool:
    """Equal to this part of the largest value.

    A twentieth is what half precision and another order of summation leave; a wrong shape in compiled code is far off.
    """
    scale = float(np.nanmax(np.abs(one), initial=0.0))
    return np.allclose(one, other, rtol=0, atol=part * scale + 1e-6, equal_nan=True)
