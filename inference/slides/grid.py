"""The tile grid: where tiles lie on a slide, always in the same order."""

import math
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from inference.errors import ConfigError

EdgePolicy = Literal["drop", "pad", "shift"]
"""What becomes of the rest of a slide where no whole tile fits:

- drop: no tile covers it.
- pad: one more row or column follows at the regular step; its tiles reach beyond the slide. A slide smaller than
  one tile has one.
- shift: one more row or column, moved back so that it ends on the slide's edge and overlaps its neighbour more than
  the others do. A slide smaller than one tile has none.

A rest of less than half a model pixel is rounding, and never gets a tile.
"""

EDGE_POLICIES: tuple[EdgePolicy, ...] = get_args(EdgePolicy)

MAX_TILES = 1 << 25
"""Tiles of one grid, planned or not; the largest slides have some 100,000 of 224 px side by side."""


@dataclass(frozen=True)
class TileGrid:
    """A grid of tiles at a regular step from level-0 pixel (0, 0) of the full slide canvas.

    Attributes:
        slide_size: level-0 width and height in pixels.
        tile_px: tile side in pixels as the model sees it.
        stride_px: step between tiles, in the same pixels.
        mpp: µm per model pixel, x and y.
        footprint: level-0 pixels that one tile covers, x and y; a float, so nothing drifts.
        edge: what becomes of the right and bottom rest where no whole tile fits.
    """

    slide_size: tuple[int, int]
    tile_px: int
    stride_px: int
    mpp: tuple[float, float]
    footprint: tuple[float, float]
    edge: EdgePolicy = "drop"

    def __post_init__(self) -> None:
        if self.tile_px < 1 or not 1 <= self.stride_px <= self.tile_px:
            raise ConfigError(f"stride {self.stride_px} px must lie between 1 and the tile's {self.tile_px} px")
        if self.edge not in EDGE_POLICIES:
            raise ConfigError(f"{self.edge!r} is no edge policy: give {', '.join(EDGE_POLICIES)}")
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

    def positions(self, index: NDArray[np.integer], axis: int) -> NDArray[np.float64]:
        """Exact level-0 left edges of grid columns (axis 0) or top edges of rows (axis 1), not rounded."""
        index = np.asarray(index)
        regular: NDArray[np.float64] = np.multiply(index, self.step[axis], dtype=np.float64)
        if not self.shifted(axis):
            return regular
        return np.where(index == self._count(axis) - 1, self.slide_size[axis] - self.footprint[axis], regular)

    def origins(self, index: NDArray[np.integer], axis: int) -> NDArray[np.int64]:
        """Level-0 top-left coordinates of grid columns (axis 0) or rows (axis 1), rounded half up each time."""
        return np.floor(self.positions(index, axis) + 0.5).astype(np.int64)

    def shifted(self, axis: int) -> bool:
        """Whether the last column (axis 0) or row (axis 1) is off the regular step, moved back to the slide's edge."""
        return self.edge == "shift" and self._rest(axis)

    def cells(self) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
        """Row and column of every grid tile, row-major."""
        rows, cols = np.divmod(np.arange(self.n_rows * self.n_cols, dtype=np.int32), np.int32(max(self.n_cols, 1)))
        return rows, cols

    def _count(self, axis: int) -> int:
        whole = self._whole(axis)
        if self.edge == "pad":
            return max(1, whole + self._rest(axis))
        return whole + self.shifted(axis)

    def _whole(self, axis: int) -> int:
        """Tiles that fit whole; half a pixel of overhang, of the slide's or the model's, is rounding."""
        slack = 0.5 * min(1.0, self.footprint[axis] / self.tile_px)
        room = self.slide_size[axis] - self.footprint[axis] + slack
        return 1 + math.floor(room / self.step[axis]) if room >= 0 else 0

    def _rest(self, axis: int) -> bool:
        """Whether whole tiles, of which there is one at least, leave half a model pixel or more uncovered."""
        whole = self._whole(axis)
        rest = self.slide_size[axis] - ((whole - 1) * self.step[axis] + self.footprint[axis])
        return whole > 0 and rest >= 0.5 * self.footprint[axis] / self.tile_px
