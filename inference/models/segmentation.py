"""Models that give every pixel a class."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference.errors import ConfigError
from inference.models.sample import PackedMask, TileOutput
from inference.models.server_model import BaseServerModel
from inference.models.spec import MaskSpec, ModelSpec


class SegmentationServerModel(BaseServerModel):
    """A model whose prediction is a mask.

    On the tensor path a result has the packed mask, and each class's share of the pixels as its prediction. In a
    response the mask is flat, row after row: 0.0 or 1.0 for one class, the index of the class for several.

    Raises:
        ConfigError: as `BaseServerModel`, or the spec has no mask.
    """

    def require_parts(self, spec: ModelSpec) -> None:
        """See `BaseServerModel.require_parts`."""
        if spec.mask is None:
            raise ConfigError(f"{spec.model_name} gives no mask: its spec has no mask part")
        self._mask: MaskSpec = spec.mask

    def tile_output(self, heads: Mapping[str, NDArray[np.float32]]) -> TileOutput:
        """The packed mask of one tile, and the embedding where it was asked for."""
        others = super().tile_output({name: values for name, values in heads.items() if name != "prediction"})
        if "prediction" not in heads:
            return others
        planes = heads["prediction"]
        classes = self.classify(planes)
        counts = np.bincount(classes.ravel(), minlength=max(len(planes), 2))
        shares = (counts[1:2] if len(planes) == 1 else counts) / classes.size
        return TileOutput(others.embedding, shares.astype(np.float32), PackedMask.pack(classes, len(planes)))

    def classify(self, planes: NDArray[np.float32]) -> NDArray[np.uint8]:
        """The class map (H, W) of one tile's planes (K, H, W): above the threshold, or the largest of several."""
        found: NDArray[Any] = planes.argmax(axis=0) if len(planes) > 1 else planes[0] >= self._cut
        return found.astype(np.uint8)

    @property
    def _cut(self) -> float:
        """The threshold among the graph's own values."""
        threshold = self._mask.threshold
        if self._mask.values == "probability":
            return threshold
        return math.log(threshold / (1 - threshold)) if 0 < threshold < 1 else math.copysign(math.inf, threshold - 0.5)
