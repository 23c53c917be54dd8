"""The tile grid: where tiles lie on a slide, always in the same order."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inference.errors import ConfigError

MAX_TILES = 1 << 25
"""Tiles of one grid, planned or not; the largest slides have some 100,000 of 224 px side by side."""


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
        if not all(0 < side < math.inf for side in self.footprint):
            raise ConfigError(f"a tile must cover a positive area, not {self.footprint} level-0 pixels")
        if self.n_rows * self.n_cols > MAX_TILES:
            raise ConfigError(
                f"{self.n_cols} x {self.n_rows} tiles, {self.stride_px} px apart, are more than {MAX_TILES}: "
                "choose a larger stride"
            )

    @property
    def step(self) -> tuple[float, float]:
        """Level-0 pixels between neighbouring tiles, x and y."""
        return (self.footprint[0] * self.stride_px / self.tile_px, self.footprint[1] * self.stride_px / self.tile_px)

    @property
    def n_cols(self) -> int:
        return self._count(0)

    @property
    def n_rows(self) -> int:
        return self._count(1)

    def origins(self, index: NDArray[np.integer], axis: int) -> NDArray[np.int64]:
        """Level-0 top-left coordinates of grid rows (axis 1) or columns (axis 0), rounded half up each time."""
        return np.floor(np.asarray(index) * self.step[axis] + 0.5).astype(np.int64)

    def cells(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Row and column of every grid tile, row-major."""
        rows, cols = np.divmod(np.arange(self.n_rows * self.n_cols, dtype=np.int32), np.int32(max(self.n_cols, 1)))
        return rows, cols

    def _count(self, axis: int) -> int:
        """Tiles that fit whole; half a pixel of overhang, of the slide's or the model's, is rounding."""
        slack = 0.5 * min(1.0, self.footprint[axis] / self.tile_px)
        room = self.slide_size[axis] - self.footprint[axis] + slack
        return 1 + math.floor(room / self.step[axis]) if room >= 0 else 0
