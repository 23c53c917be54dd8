"""Slides whose every pixel is known, with a tile missing and a tile damaged."""

import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import tifffile
from numpy.typing import NDArray

from tests.inference.slides.synthetic import Pixels, Size, coordinates

TILE = 128
HALVES: tuple[Size, ...] = ((804, 596), (402, 298), (201, 149))
"""Downsamples of exactly 2 and 4, and no level that is whole tiles: OpenSlide never interpolates."""
ODD: tuple[Size, ...] = ((803, 597), (401, 298), (101, 75))
"""Downsamples 2.0025 x 2.0034 and 7.95 x 7.96: between most pixels OpenSlide would interpolate."""

MISSING = (0, 1, 2)
"""Level, row and column of the compressed tile that the slide has no bytes for."""
DAMAGED = (0, 3, 1)
"""Level, row and column of the compressed tile that does not decode."""
BACKGROUND = (255, 255, 255)

APERIO = "Aperio Image Library v12.0.0 \n803x597 (128x128)|AppMag = 20|MPP = 0.5"
OME = {"axes": "YXS", "PhysicalSizeX": 0.5, "PhysicalSizeXUnit": "µm", "PhysicalSizeY": 0.5, "PhysicalSizeYUnit": "µm"}
APERIO_JP2000_RGB = 33005


@dataclass(frozen=True, eq=False)
class Known:
    """A slide whose every pixel is known; its `DAMAGED` tile is to be damaged in the file.

    Attributes:
        levels: RGBA of each level.
        path: its file, where it has one.
    """

    levels: Sequence[Pixels]
    path: Path = field(default_factory=Path)

    def region(self, level: int, x: int, y: int, width: int, height: int) -> Pixels:
        """What `read_region` must give."""
        whole = self.levels[level]
        found = np.zeros((height, width, 4), np.uint8)
        x0, y0, x1, y1 = max(x, 0), max(y, 0), min(x + width, whole.shape[1]), min(y + height, whole.shape[0])
        found[y0 - y : y1 - y, x0 - x : x1 - x] = whole[y0:y1, x0:x1]
        return found

    def reduced(self, level: int, reduction: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The area mean of a whole level over the background, not rounded, and the share of each pixel it misses.

        Pixels that reach beyond the level are filled up with its last row and column.
        """
        rgba = self.levels[level].astype(np.float64)
        absent = (rgba[..., 3:] == 0).astype(np.float64)
        planes = np.concatenate([rgba[..., :3] * (1 - absent) + np.array(BACKGROUND) * absent, absent], axis=2)
        for axis in (0, 1):
            count = planes.shape[axis]
            filled = np.minimum(np.arange(-(-count // reduction) * reduction), count - 1)
            starts = np.arange(0, len(filled), reduction)
            planes = np.add.reduceat(np.take(planes, filled, axis), starts, axis=axis) / reduction
        return planes[..., :3], planes[..., 3]


def smooth(level: int, size: Size) -> Pixels:
    """Waves long enough to survive JPEG, no two places alike: what a decoder reduces stays near the area mean."""
    y, x = np.mgrid[: size[1], : size[0]]
    waves = (np.sin(x / 23 + level), np.cos(y / 19), np.sin((x + y) / 31))
    return np.stack([128 + 90 * wave for wave in waves], axis=2).astype(np.uint8)


def write_known(path: Path, sizes: Sequence[Size], compression: str | int | None) -> Known:
    """A tiled TIFF pyramid with a missing and a damaged tile in level 0, and what tifffile reads from it whole.

    Lossless codecs store `coordinates`; of JPEG the truth is the decode of what was stored. A file named as OME-TIFF
    has its lower levels as SubIFDs, others follow the first image.
    """
    lossy, is_aperio, is_ome = compression == "jpeg", compression == APERIO_JP2000_RGB, path.name.endswith(".ome.tif")
    arguments: dict[str | int | None, dict[str, object]] = {
        "jpeg": {"level": 90},
        "zlib": {"level": 1},
        "webp": {"lossless": True},
        APERIO_JP2000_RGB: {"reversible": True, "level": 0},
    }
    with tifffile.TiffWriter(path, ome=is_ome) as tiff:
        for level, size in enumerate(sizes):
            tiff.write(
                (smooth if lossy else coordinates)(level, size), tile=(TILE, TILE), photometric="rgb",
                compression=compression, compressionargs=arguments.get(compression), software=False,
                metadata=OME if is_ome and not level else None, subifds=(len(sizes) - 1) * (is_ome and not level),
                subfiletype=int(level > 0 and not is_aperio), description=APERIO if is_aperio else None,
                resolution=(2e4, 2e4), resolutionunit="CENTIMETER",
            )  # fmt: skip
    with tifffile.TiffFile(path) as tiff:
        first = tiff.pages[0]
        stored = [page.asarray() for page in [first, *(first.pages if is_ome else tiff.pages[1:])]]
    levels = [stored[k] if lossy else coordinates(k, size) for k, size in enumerate(sizes)]
    for level, size in enumerate(sizes):
        assert np.array_equal(levels[level], stored[level]), f"level {level} of {size} was not stored as it is"
    known = Known([np.dstack([rgb, np.full(rgb.shape[:2], 255, np.uint8)]) for rgb in levels], path)
    known.levels[MISSING[0]][tile_of(*MISSING)] = 0
    empty_tile(path, *MISSING)
    damage_tile(path, *DAMAGED)
    return known


def tile_of(level: int, row: int, column: int) -> tuple[slice, slice]:
    """Rows and columns of a compressed tile in its level."""
    return slice(row * TILE, (row + 1) * TILE), slice(column * TILE, (column + 1) * TILE)


def tile_bytes(path: Path, level: int, row: int, column: int) -> tuple[int, int]:
    """Where a compressed tile begins in the file, and its length."""
    with tifffile.TiffFile(path) as tiff:
        page = tiff.pages[level]
        index = row * -(-page.imagewidth // page.tilewidth) + column
        return page.dataoffsets[index], page.databytecounts[index]


def damage_tile(path: Path, level: int, row: int, column: int, *, share: float = 1.0) -> None:
    """Overwrite the last share of a tile's bytes with what no decoder takes; the file's time stays."""
    offset, count = tile_bytes(path, level, row, column)
    before = path.stat()
    start = count - round(count * share)
    with path.open("r+b") as file:
        file.seek(offset + start)
        file.write(b"\xaa" * (count - start))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


def empty_tile(path: Path, level: int, row: int, column: int) -> None:
    """Say in the tables that a tile has no bytes, as sparse files do."""
    with tifffile.TiffFile(path) as tiff:
        page = tiff.pages[level]
        index = row * -(-page.imagewidth // page.tilewidth) + column
        tag = page.tags["TileByteCounts"]
        size = tag.valuebytecount // tag.count
        at = tag.valueoffset + index * size
    with path.open("r+b") as file:
        file.seek(at)
        file.write(struct.pack("<Q", 0)[:size])
