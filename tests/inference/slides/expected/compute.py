"""What tiles of the shared slides must look like, told without the package: OpenSlide, tifffile and numpy alone.

`python -m tests.inference.slides.expected.compute SHARED_DATA [SLIDE ...]` writes `<slide>.json` beside this file. Each
holds, for some target resolutions, the grid of 224-pixel tiles without a tissue mask (x of each column and y of each
row, level-0 pixels) and of each tile, row by row, its mean red, green and blue and the share of it that is missing.

Written from the rules in words: which level is read and how, where tiles lie, what stands behind missing pixels. A
level is read whole from its origin, since OpenSlide interpolates where a read begins between two pixels.
"""

import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import openslide
import tifffile
from numpy.typing import NDArray

FOLDER = Path(__file__).resolve().parent
TILE = 224
WHITE = 255.0  # no shared slide names another background

TARGETS = (0.5, 1.0, 2.0)


@dataclass(frozen=True)
class Slide:
    """A shared slide; `mpp` is what a user states where the slide itself says nothing."""

    file: str
    mpp: float | None = None
    targets: tuple[float, ...] = TARGETS

    @property
    def name(self) -> str:
        path = Path(self.file)
        return path.parent.name if path.suffix == ".dcm" else path.stem.removesuffix(".ome")


SLIDES = (
    Slide("slides/CMU-1-Small-Region.svs"),
    Slide("slides/tcga-cr-7395-01a-01-ts1.svs", 0.25),
    Slide("slides/test3-DAPI-2-(387).ndpi"),
    # Far coarser than any model wants.
    Slide("slides/dicom-camelyon/multiframe_camelyon_challenge_image.dcm", targets=(29.0, 58.0, 40.0)),
    Slide("slides/dicom-highdicom/sm_image.dcm"),
    Slide("derived/aperio-3level-jpeg.svs"),
    Slide("derived/aperio-3level-jp2k-nompp.svs", 0.5),
    Slide("derived/generic-pyramid-jpeg.tiff", targets=(0.5, 1.0, 2.0, 1.3)),
    Slide("derived/leica.scn"),
    Slide("derived/ome-pyramid.ome.tif"),
    Slide("derived/philips-sparse.tiff"),
    Slide("derived/ventana.bif"),
    Slide("derived/dicom-jpeg/volume-0.dcm", targets=(0.5, 1.0, 2.0, 0.7)),
)


class Levels:
    """A slide's µm/px and its levels, whole: OpenSlide's, or tifffile's of an OME-TIFF, whose lower levels are SubIFDs
    that OpenSlide does not see."""

    def __init__(self, path: Path, mpp: float | None) -> None:
        self._slide = openslide.OpenSlide(path)
        properties = self._slide.properties
        stated = [properties.get(f"openslide.mpp-{axis}") for axis in "xy"]
        if all(stated):
            self.mpp, self.source = (float(stated[0]), float(stated[1])), "slide"
        else:
            assert mpp is not None, f"{path.name} states no µm/px"
            self.mpp, self.source = (mpp, mpp), "--mpp"
        self.sizes: list[tuple[int, int]] = list(self._slide.level_dimensions)
        self._ome = path if path.name.endswith(".ome.tif") else None
        if self._ome:
            with tifffile.TiffFile(path) as tiff:
                self.sizes = [level.shape[1::-1] for level in tiff.series[0].levels]

    def read(self, level: int) -> NDArray[np.float64]:
        """RGB of a level over white, and as a fourth channel 1 where it has no pixels."""
        if self._ome:
            rgb = tifffile.imread(self._ome, series=0, level=level).astype(np.float64)
            return np.dstack([rgb, np.zeros(rgb.shape[:2])])
        rgba = np.asarray(self._slide.read_region((0, 0), level, self.sizes[level])).astype(np.float64)
        alpha = rgba[..., 3:] / 255
        return np.dstack([rgba[..., :3] * alpha + WHITE * (1 - alpha), rgba[..., 3] == 0])


@dataclass(frozen=True)
class Choice:
    """The pixels that a model sees: of a level, reduced, as they are or resampled; `mpp` is what they have then."""

    level: int
    reduction: int
    resample: str
    mpp: tuple[float, float]
    down: tuple[float, float]
    """Level-0 pixels per pixel of the reduced level."""


def choose(sizes: Sequence[tuple[int, int]], mpp: tuple[float, float], target: float) -> Choice | None:
    """Within 2 % of the target as it is (stored levels before reductions, then nearest); else the coarsest that is not
    coarser, resampled; none where level 0 is too coarse, which is refused."""
    found = []
    for level, size in enumerate(sizes):
        for reduction in (1, 2, 4, 8):
            down = (sizes[0][0] / size[0] * reduction, sizes[0][1] / size[1] * reduction)
            found.append(Choice(level, reduction, "none", (mpp[0] * down[0], mpp[1] * down[1]), down))
    near = [c for c in found if off(c, target) <= 0.02]
    if near:
        stored = [c for c in near if c.reduction == 1] or near
        best = min(off(c, target) for c in stored)
        return [c for c in stored if off(c, target) <= best + 1e-9][-1]
    finer = [c for c in found if max(c.mpp) <= target]
    if not finer:
        return None
    best = max(max(c.mpp) for c in finer)
    chosen = [c for c in finer if max(c.mpp) >= best - 1e-9][-1]
    return Choice(chosen.level, chosen.reduction, "area", (target, target), chosen.down)


def off(choice: Choice, target: float) -> float:
    """How far it is from the target, relative, along the worse axis."""
    return max(abs(value / target - 1) for value in choice.mpp)


@dataclass(frozen=True)
class Grid:
    """Whole tiles side by side from level-0 pixel (0, 0); `footprint` in level-0 pixels, not rounded."""

    rows: int
    cols: int
    footprint: tuple[float, float]


def grid(levels: Levels, choice: Choice) -> Grid:
    footprint = (TILE * choice.mpp[0] / levels.mpp[0], TILE * choice.mpp[1] / levels.mpp[1])
    width, height = levels.sizes[0]
    return Grid(count(height, footprint[1]), count(width, footprint[0]), footprint)


def count(size: int, footprint: float) -> int:
    """Whole tiles of a side of the slide, edge to edge; half a pixel of overhang is rounding."""
    return max(0, math.floor((size + 0.5 * min(1.0, footprint / TILE)) / footprint))


def weights(first: float, last: float, size: int, reduction: int) -> tuple[slice, NDArray[np.float64]]:
    """Pixels of a level under an interval of its reduced raster, and how much of each lies in it."""
    edges = (first * reduction, min(last * reduction, size))
    low, high = math.floor(edges[0] + 1e-6), math.ceil(edges[1] - 1e-6)
    cells = np.arange(low, high)
    return slice(low, high), np.clip(np.minimum(edges[1], cells + 1) - np.maximum(edges[0], cells), 0, 1)


def means(planes: NDArray[np.float64], choice: Choice, tiles: Grid) -> Iterator[list[float]]:
    """Of each tile, row by row: mean red, green, blue, and the share that is missing.

    The mean of an area-resampled tile is that of what lies under it; so is that of an exact reduction.
    """
    height, width = planes.shape[:2]
    for row in range(tiles.rows):
        ys, y_weights = weights(*span(row, tiles.footprint[1], choice.down[1], choice), height, choice.reduction)
        for col in range(tiles.cols):
            xs, x_weights = weights(*span(col, tiles.footprint[0], choice.down[0], choice), width, choice.reduction)
            columns = np.tensordot(y_weights, planes[ys, xs], 1) / y_weights.sum()
            mean = x_weights @ columns / x_weights.sum()
            yield [*np.round(mean[:3], 2).tolist(), round(float(mean[3]), 4)]


def span(index: int, footprint: float, down: float, choice: Choice) -> tuple[float, float]:
    """Where a tile begins and ends on the reduced raster: at whole pixels unless it is resampled."""
    start = index * footprint / down
    return (start, start + footprint / down) if choice.resample == "area" else (round(start), round(start) + TILE)


def expected(data: Path, slide: Slide) -> dict[str, object]:
    """What `<slide>.json` holds."""
    levels = Levels(data / slide.file, slide.mpp)
    targets = {}
    for target in slide.targets:
        choice = choose(levels.sizes, levels.mpp, target)
        if choice is None:
            continue
        tiles = grid(levels, choice)
        targets[f"{target:g}"] = {
            "level": choice.level,
            "reduction": choice.reduction,
            "resample": choice.resample,
            "mpp": [round(value, 6) for value in choice.mpp],
            "x": [math.floor(col * tiles.footprint[0] + 0.5) for col in range(tiles.cols)],
            "y": [math.floor(row * tiles.footprint[1] + 0.5) for row in range(tiles.rows)],
            "tiles": [*means(levels.read(choice.level), choice, tiles)] if tiles.rows * tiles.cols else [],
        }
    return {"file": slide.file, "mpp": levels.mpp, "mpp_source": levels.source, "targets": targets}


def write(slide: Slide, found: dict[str, object]) -> None:
    text = json.dumps(found, separators=(",", ":"))
    for key in ('"targets"', '"tiles"'):
        text = text.replace(key, f"\n{key}")
    (FOLDER / f"{slide.name}.json").write_text(text + "\n")


def main(arguments: Sequence[str]) -> None:
    data, names = Path(arguments[0]), arguments[1:]
    for slide in SLIDES:
        if not names or slide.name in names:
            write(slide, expected(data, slide))


if __name__ == "__main__":
    main(sys.argv[1:])
