"""What every slide reader offers, and what those that only know regions inherit."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from inference.slides.pixels import flatten
from inference.slides.resolution import REDUCTIONS

MAX_REGION_PIXELS = 1 << 26
"""Largest region of one read; larger requests are a mistake of the caller."""

BAND_PIXELS = 1 << 22
"""Level pixels that a reduction holds at a time; 16 MiB as RGBA."""

_BLOCK_PX = (2048, 512)  # level pixels of a supertile, at least: wide, since tiles are read row by row
_MAX_BLOCK_PX = 1 << 22


@dataclass(frozen=True, eq=False, slots=True)
class Pixels:
    """A rectangle of a level as models see it.

    Attributes:
        rgb: uint8 (H, W, 3), composited on the slide's background.
        missing: float32 (H, W), share of each pixel that the slide has no pixels for; None where it misses nothing.
    """

    rgb: NDArray[np.uint8]
    missing: NDArray[np.float32] | None = None

    def cut(self, x: int, y: int, width: int, height: int) -> "Pixels":
        """A view of a part."""
        here = slice(y, y + height), slice(x, x + width)
        return Pixels(self.rgb[here], None if self.missing is None else self.missing[here])


class SlideReader(Protocol):
    """Pixels and properties of one opened slide. Safe to use from several threads at once.

    Attributes:
        level_sizes: width and height of each stored level, level 0 first.
        mpp: µm per level-0 pixel as the slide states them, or None; not checked for sense.
        objective_power: magnification as the slide states it, or None.
        background: RGB behind transparent pixels.
        icc_profile: the ICC profile of level 0, or None.
        kind: the reader's name and versions, for provenance.
        reason: why this reader was chosen, in plain words.
    """

    level_sizes: tuple[tuple[int, int], ...]
    mpp: tuple[float, float] | None
    objective_power: float | None
    background: tuple[int, int, int]
    icc_profile: bytes | None
    vendor: str
    kind: str
    reason: str
    quickhash: str | None

    def read_region(self, level: int, x: int, y: int, width: int, height: int) -> NDArray[np.uint8]:
        """RGBA pixels (height, width, 4); x and y in pixels of that level; alpha 0 where there are none.

        Raises:
            TileReadError: the pixels cannot be decoded; other regions still can.
            UnreadableSlide: the file is gone or no longer opens.
            SlideChanged: the slide's files are no longer those that were opened.
            SourceUnavailable: the folder or mount is lost.
            ValueError: no such level, a region wholly outside it or larger than `MAX_REGION_PIXELS`, or closed.
        """
        ...

    def read_reduced(self, level: int, reduction: int, x: int, y: int, width: int, height: int) -> Pixels:
        """A rectangle of a level reduced by 1, 2, 4 or 8, in pixels of the reduced level, which it must not leave.

        The reduction is the area mean, or the decoder's own of that size. Where a last row or column reaches beyond the
        level, the level's own last is repeated for it.

        Raises:
            As `read_region`; ValueError also for another reduction, or a region that leaves the level.
        """
        ...

    def read_block(self, level: int, reduction: int, x: int, y: int, width: int, height: int) -> Pixels:
        """As `read_reduced`, for the many blocks of a pass: whether the files changed may be looked at less often."""
        ...

    def block_size(self, level: int, reduction: int) -> tuple[int, int]:
        """Width and height, in reduced pixels, of the blocks from (0, 0) that are best read whole and once."""
        ...

    def stored_tile(self, level: int) -> tuple[int, int]:
        """Width and height of the compressed tiles of a level."""
        ...

    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exc: object) -> None: ...


class RegionReader(ABC):
    """What a reader that only knows `read_region` and `stored_tile` needs to be a `SlideReader`."""

    level_sizes: tuple[tuple[int, int], ...]
    background: tuple[int, int, int]

    @abstractmethod
    def read_region(self, level: int, x: int, y: int, width: int, height: int) -> NDArray[np.uint8]:
        """See `SlideReader.read_region`."""

    @abstractmethod
    def stored_tile(self, level: int) -> tuple[int, int]:
        """See `SlideReader.stored_tile`."""

    @abstractmethod
    def close(self) -> None:
        """Let go of what the reader holds; idempotent."""

    def read_reduced(self, level: int, reduction: int, x: int, y: int, width: int, height: int) -> Pixels:
        """See `SlideReader.read_reduced`. Read in bands, so that a far too fine level costs time and not memory."""
        require_reduced(self.level_sizes, level, reduction, (x, y, width, height))
        r = reduction
        right, bottom = self.level_sizes[level]
        band = max(1, BAND_PIXELS // (width * r * r))
        rgb = np.empty((height, width, 3), np.uint8)
        missing: NDArray[np.float32] | None = None
        for top in range(0, height, band):
            rows = min(band, height - top)
            w, h = min(width * r, right - x * r), min(rows * r, bottom - (y + top) * r)
            rgba = self.read_region(level, x * r, (y + top) * r, w, h)
            part = pixels_of(rgba, self.background, r)
            rgb[top : top + rows] = part.rgb
            if part.missing is not None:
                missing = np.zeros((height, width), np.float32) if missing is None else missing
                missing[top : top + rows] = part.missing
        return Pixels(rgb, missing)

    def read_block(self, level: int, reduction: int, x: int, y: int, width: int, height: int) -> Pixels:
        """See `SlideReader.read_block`."""
        return self.read_reduced(level, reduction, x, y, width, height)

    def block_size(self, level: int, reduction: int) -> tuple[int, int]:
        """See `SlideReader.block_size`: supertiles of many stored tiles, since every read has a cost of its own."""
        width, height = (
            _supertile(stored, least, reduction, whole)
            for stored, least, whole in zip(self.stored_tile(level), _BLOCK_PX, self.level_sizes[level], strict=True)
        )
        while width * height > _MAX_BLOCK_PX and width > reduction:  # the stored tiles are very large
            width = -(-width // (2 * reduction)) * reduction
        return width // reduction, max(1, height // reduction)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def pixels_of(rgba: NDArray[np.uint8], background: tuple[int, int, int], reduction: int) -> Pixels:
    """RGBA of a level as `Pixels` of the reduced level, by the area mean."""
    return Pixels(*flatten(rgba, background, reduction))


def _supertile(stored: int, least: int, reduction: int, whole: int) -> int:
    """Level pixels of a block along one axis: whole stored tiles, a multiple of the reduction, at least some."""
    wanted = min(least, -(-whole // stored) * stored)
    side = -(-wanted // stored) * stored
    return -(-side // reduction) * reduction


def require_region(reader: RegionReader, name: str, level: int, x: int, y: int, width: int, height: int) -> None:
    """Refuse what no reader can read.

    Raises:
        ValueError: no such level, no pixels, too many, or none of them in the level.
    """
    sizes = reader.level_sizes
    if not 0 <= level < len(sizes) or width < 1 or height < 1 or width * height > MAX_REGION_PIXELS:
        raise ValueError(f"{name}: cannot read {width} x {height} pixels of level {level}")
    if not (-width < x < sizes[level][0] and -height < y < sizes[level][1]):
        raise ValueError(f"{name}: ({x}, {y}) lies outside level {level}")


def require_reduced(
    sizes: tuple[tuple[int, int], ...], level: int, reduction: int, region: tuple[int, int, int, int]
) -> None:
    """Refuse a region (x, y, width, height) of a reduced level that is not wholly within it.

    Raises:
        ValueError: no such level or reduction, no pixels, or some of them outside.
    """
    if not 0 <= level < len(sizes) or reduction not in REDUCTIONS:
        raise ValueError(f"there is no level {level} by 1/{reduction}")
    (x, y, width, height), (right, bottom) = region, sizes[level]
    if width < 1 or height < 1 or x < 0 or y < 0:
        raise ValueError(f"cannot read {width} x {height} pixels at ({x}, {y})")
    if (x + width - 1) * reduction >= right or (y + height - 1) * reduction >= bottom:
        raise ValueError(f"{width} x {height} pixels at ({x}, {y}) leave level {level} by 1/{reduction}")
