"""The tile grid: where tiles lie on a slide, always in the same order."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inference.errors import ConfigError


@dataclass(frozen=True)
class TileGrid:
    """A regular grid with its origin at level-0 pixel (0, 0) of the full slide canvas.

    Attributes:
        slide_size: level-0 width and height in pixels.
        tile_px: tile side in pixels as the model sees it.
        stride_px: step between tiles, in the same pixels.
        mpp: µm per model pixel, x and y.
        footprint: level-0 pixels that one tile covers, x and y; a float, so nothing drifts.
    """

    slide_size: tuple[int, int]
    tile_px: int
    stride_px: int
    mpp: tuple[float, float]
    footprint: tuple[float, float]

    def __post_init__(self) -> None:
        if self.tile_px < 1 or not 1 <= self.stride_px <= self.tile_px:
            raise ConfigError(f"stride {self.stride_px} px must lie between 1 and the tile's {self.tile_px} px")
        if min(self.footprint) <= 0:
            raise ConfigError(f"a tile must cover a positive area, not {self.footprint} level-0 pixels")

    @property
    def step(self) -> tuple[float, float]:
        """Level-0 pixels between neighbouring tiles, x and y."""
        return (self.footprint[0] * self.stride_px / self.tile_px, self.footprint[1] * self.stride_px / self.tile_px)

    @property
    def n_cols(self) -> int:
        return _count(self.slide_size[0], self.footprint[0], self.step[0])

    @property
    def n_rows(self) -> int:
        return _count(self.slide_size[1], self.footprint[1], self.step[1])

    def origins(self, index: NDArray[np.integer], axis: int) -> NDArray[np.int64]:
        """Level-0 top-left coordinates of grid rows (axis 1) or columns (axis 0), rounded half up each time."""
        return np.floor(np.asarray(index) * self.step[axis] + 0.5).astype(np.int64)

    def cells(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Row and column of every grid tile, row-major."""
        rows, cols = np.divmod(np.arange(self.n_rows * self.n_cols, dtype=np.int32), max(self.n_cols, 1))
        return rows.astype(np.int32), cols.astype(np.int32)


def _count(extent: int, footprint: float, step: float) -> int:
    """Tiles that fit whole; half a level-0 pixel of overhang is rounding, not overhang."""
    return max(0, int(np.floor((extent - footprint + 0.5) / step)) + 1) if extent + 0.5 >= footprint else 0
