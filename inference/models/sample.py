"""What goes into a forward pass and what comes out of it, for one tile."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Mode = Literal["embedding", "prediction", "prediction_with_embedding"]
MODES: tuple[Mode, ...] = ("embedding", "prediction", "prediction_with_embedding")


@dataclass(frozen=True, eq=False)
class PreparedSample:
    """A validated sample, ready for a batch.

    Attributes:
        tile: uint8 pixels, (C, H, W), RGB. Normalisation happens inside the graph.
        extra_tensors: further model inputs by name; empty for image models.
    """

    tile: NDArray[np.uint8]
    extra_tensors: dict[str, NDArray[np.float32]] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return self.tile.nbytes + sum(a.nbytes for a in self.extra_tensors.values())


@dataclass(frozen=True, eq=False)
class TileOutput:
    """What a model says of one tile; a head that was not asked for is None.

    Attributes:
        embedding: float32 (D,).
        prediction: float32 (K,).
    """

    embedding: NDArray[np.float32] | None = None
    prediction: NDArray[np.float32] | None = None
