"""Prepared samples as the arrays of one batch."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from inference.errors import BadRequest
from inference.models.sample import PreparedSample
from inference.models.spec import ModelSpec


def stack_tiles(samples: Sequence[PreparedSample], spec: ModelSpec) -> NDArray[np.uint8]:
    """The tiles of a batch, uint8 (B, C, H, W).

    Raises:
        BadRequest: one is not of this model.
    """
    shape = spec.input_shape
    for sample in samples:
        if sample.tile.shape != shape or sample.tile.dtype != np.uint8:
            raise BadRequest(
                f"{spec.model_name} takes uint8 tiles of {shape}, not {sample.tile.dtype} {sample.tile.shape}"
            )
    return np.stack([sample.tile for sample in samples])


def stack_extras(samples: Sequence[PreparedSample], spec: ModelSpec) -> dict[str, NDArray[np.float32]]:
    """The further inputs of a batch by name, float32 (B, ...).

    Raises:
        BadRequest: one lacks them, or has others.
    """
    wanted = {extra.name: extra.shape for extra in spec.extra_inputs}
    for sample in samples:
        given = {name: extra.shape for name, extra in sample.extra_tensors.items()}
        if given != wanted or any(extra.dtype != np.float32 for extra in sample.extra_tensors.values()):
            raise BadRequest(f"{spec.model_name} takes the further inputs {wanted or 'none'}, not {given or 'none'}")
    return {name: np.stack([sample.extra_tensors[name] for sample in samples]) for name in wanted}
