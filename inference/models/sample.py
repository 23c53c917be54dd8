"""What goes into a forward pass and what comes out of it, for one tile."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Self

import numpy as np
from numpy.typing import NDArray

Mode = Literal["embedding", "prediction", "prediction_with_embedding"]
MODES: tuple[Mode, ...] = ("embedding", "prediction", "prediction_with_embedding")

NO_EXTRAS: Mapping[str, NDArray[np.float32]] = MappingProxyType({})
"""Of a model that takes nothing but tiles."""


@dataclass(frozen=True, eq=False)
class PreparedSample:
    """A validated sample, ready for a batch.

    Attributes:
        tile: uint8 pixels, (C, H, W), RGB. Normalisation happens inside the graph.
        extra_tensors: further model inputs by name; empty for image models. Samples of one slide may share them.
        head: which of several heads predicts; None where there is no choice.
    """

    tile: NDArray[np.uint8]
    extra_tensors: Mapping[str, NDArray[np.float32]] = field(default_factory=dict)
    head: str | None = None

    @property
    def nbytes(self) -> int:
        return self.tile.nbytes + sum(a.nbytes for a in self.extra_tensors.values())


@dataclass(frozen=True, eq=False)
class PackedMask:
    """The class of each pixel, in little room.

    Attributes:
        shape: (H, W).
        n_classes: 1 for a yes or no per pixel.
        encoding: `bits` for one class: eight pixels a byte, first pixel highest. For several: `runs` of equal pixels,
            row after row, or `plain`, one byte a pixel, where runs would take more.
        values: uint8: the bits, each run's class, or each pixel's.
        lengths: uint32, of each run; empty without runs.
    """

    shape: tuple[int, int]
    n_classes: int
    encoding: Literal["bits", "runs", "plain"]
    values: NDArray[np.uint8]
    lengths: NDArray[np.uint32]

    @classmethod
    def pack(cls, classes: NDArray[Any], n_classes: int) -> Self:
        """Pack a class map (H, W): 0 or 1 where there is one class, else the index of each pixel's class.

        Raises:
            ValueError: not two-dimensional, or a pixel is of no such class.
        """
        top = max(n_classes - 1, 1)
        if (
            classes.ndim != 2
            or not 1 <= n_classes <= 256
            or (classes.size and not 0 <= classes.min() <= classes.max() <= top)
        ):
            raise ValueError(f"a mask of {n_classes} classes is (H, W) with values 0 to {top}, not {classes.shape}")
        height, width = classes.shape
        flat = classes.astype(np.uint8).ravel()
        none = np.zeros(0, np.uint32)
        if n_classes == 1:
            return cls((height, width), 1, "bits", np.packbits(flat), none)
        starts = np.flatnonzero(np.diff(flat, prepend=flat[:1] ^ 1))
        lengths = np.diff(starts, append=flat.size).astype(np.uint32)
        if lengths.nbytes + starts.size >= flat.size:
            return cls((height, width), n_classes, "plain", flat, none)
        return cls((height, width), n_classes, "runs", flat[starts], lengths)

    def unpack(self) -> NDArray[np.uint8]:
        """The class map (H, W) that was packed."""
        height, width = self.shape
        if self.encoding == "bits":
            flat = np.unpackbits(self.values, count=height * width)
        elif self.encoding == "runs":
            flat = np.repeat(self.values, self.lengths)
        else:
            flat = self.values.copy()
        return flat.reshape(self.shape)

    @property
    def nbytes(self) -> int:
        return self.values.nbytes + self.lengths.nbytes


@dataclass(frozen=True, eq=False)
class TileOutput:
    """What a model says of one tile; a head that was not asked for is None.

    Attributes:
        embedding: float32 (D,).
        prediction: float32 (K,); of a segmentation model, each class's share of the pixels.
        mask: of a segmentation model, what it predicts.
    """

    embedding: NDArray[np.float32] | None = None
    prediction: NDArray[np.float32] | None = None
    mask: PackedMask | None = None

    def predicted(self) -> NDArray[np.float32]:
        """The prediction as a response has it, float32 (N,): a mask pixel by pixel, row after row."""
        assert self.prediction is not None, "asked of a result that has a prediction"
        return self.prediction.ravel() if self.mask is None else self.mask.unpack().ravel().astype(np.float32)
