"""Landmarks of JPEG slides at known places, through resolution, plan, grid and sampler: found where they lie.

Slides in lossless codecs, other downsamples and more targets are in `test_sampling`.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from inference.slides.compressed_reader import CompressedReader
from inference.slides.opening import open_slide
from inference.slides.reader import SlideReader
from inference.slides.resolution import plan_reading, resolve_mpp
from inference.slides.sampling import TileSampler, make_grid
from tests.inference.slides.synthetic import Rectangle, Size, dark_rectangles, write_pyramid

Place = tuple[float, float]
Reading = tuple[int, int, str]
"""Level, reduction and resampling."""

PYRAMIDS: dict[str, list[Size]] = {
    "3.9952": [(4994, 1598), (1250, 400), (312, 100)],  # 3.9952 x 3.995, 16.006 x 15.98: sides rounded up
    "2.0005": [(4443, 1783), (2221, 891)],  # 2.00045 x 2.00112: sides rounded down
}
MARKS: list[Rectangle] = [(203.0, 131.5, 80.0, 64.0), (3904.4, 122.0, 96.0, 90.0), (3871.0, 851.3, 70.0, 100.0)]
"""Near the left, where nothing has drifted, and far right and down, where 4 for 3.9952 would be 5 pixels off."""

TILE_PX = 48
WITHIN_PX = 0.75
"""Half a pixel is what rounding a tile's place to whole pixels costs; the rest is the decoder's."""

Slides = Callable[[str, Place], Path]


@pytest.fixture(scope="module")
def slides(tmp_path_factory: pytest.TempPathFactory) -> Slides:
    """The slide of a pyramid that states a µm/px, written once."""
    folder, made = tmp_path_factory.mktemp("landmarks"), dict[tuple[str, Place], Path]()

    def slide(pyramid: str, mpp: Place) -> Path:
        if (pyramid, mpp) not in made:
            sizes = PYRAMIDS[pyramid]
            made[pyramid, mpp] = write_pyramid(
                folder / f"{len(made)}.tif", sizes, lambda _, size: dark_rectangles(sizes[0], size, MARKS),
                mpp=mpp, compression="jpeg",
            )  # fmt: skip
        return made[pyramid, mpp]

    return slide


@pytest.mark.parametrize(
    ("pyramid", "stated", "target", "reading"),
    [
        # Pixel for pixel, at every size that the decoder gives.
        ("3.9952", (0.25, 0.25), 0.25, (0, 1, "none")),
        ("3.9952", (0.25, 0.25), 0.5, (0, 2, "none")),
        ("3.9952", (0.25, 0.25), 1.0, (1, 1, "none")),
        ("3.9952", (0.25, 0.25), 2.0, (0, 8, "none")),
        ("3.9952", (0.25, 0.25), 4.0, (2, 1, "none")),
        ("2.0005", (0.25, 0.25), 0.5, (1, 1, "none")),
        ("2.0005", (0.25, 0.25), 1.0, (0, 4, "none")),
        ("2.0005", (0.251, 0.251), 2.0, (0, 8, "none")),
        # Resampled after a reduction by the decoder.
        ("3.9952", (0.25, 0.25), 0.6, (0, 2, "area")),
        ("3.9952", (0.25, 0.25), 1.3, (0, 4, "area")),
        ("3.9952", (0.25, 0.25), 2.9, (0, 8, "area")),
        ("2.0005", (0.25, 0.25), 0.9, (1, 1, "area")),
        ("2.0005", (0.25, 0.25), 1.7, (1, 2, "area")),
        # x and y apart: by a factor of two, and by a hair.
        ("3.9952", (0.25, 0.5), 0.5, (0, 1, "area")),
        ("3.9952", (0.25, 0.5), 1.0, (0, 2, "area")),
        ("2.0005", (0.5, 0.25), 2.0, (0, 4, "area")),
        ("3.9952", (0.25, 0.2503), 0.5, (0, 2, "none")),
        ("2.0005", (0.2503, 0.25), 0.5, (1, 1, "none")),
        ("2.0005", (0.2503, 0.25), 0.6, (1, 1, "area")),
        # Enlarged: just above 2 %, and by a quarter.
        ("2.0005", (0.256, 0.256), 0.25, (0, 1, "bilinear")),
        ("2.0005", (0.3125, 0.3125), 0.25, (0, 1, "bilinear")),
        ("3.9952", (0.25, 0.3125), 0.25, (0, 1, "bilinear")),
    ],
)
def test_landmarks_of_a_jpeg_slide_are_found_within_a_pixel(
    slides: Slides, pyramid: str, stated: Place, target: float, reading: Reading
) -> None:
    with open_slide(slides(pyramid, stated), "S1") as reader:
        assert isinstance(reader, CompressedReader), "else the compressed tiles are not read directly"
        _require_found(reader, target, reading, cohort_mpp=None)


@pytest.mark.parametrize(
    ("cohort_mpp", "target", "reading"),
    [
        (0.5, 0.5, (0, 1, "none")),
        (0.5, 1.0, (0, 2, "none")),
        (0.3, 0.5, (0, 1, "area")),
        (0.6, 0.5, (0, 1, "bilinear")),
    ],
)
def test_where_a_cohort_file_overrules_the_slide_landmarks_are_found_on_its_raster(
    slides: Slides, cohort_mpp: float, target: float, reading: Reading
) -> None:
    with open_slide(slides("3.9952", (0.25, 0.25)), "S1") as reader:
        _require_found(reader, target, reading, cohort_mpp=cohort_mpp)


def test_a_landmark_that_is_a_pixel_off_would_be_noticed(slides: Slides) -> None:
    """The measure itself: the same tiles against a raster that drifts as 4 for 3.9952 does."""
    with open_slide(slides("3.9952", (0.25, 0.25)), "S1") as reader:
        plan = plan_reading("S1", reader.level_sizes, (0.25, 0.25), 1.0)
        grid = make_grid(reader.level_sizes[0], (0.25, 0.25), plan, TILE_PX, TILE_PX)
        sampler = TileSampler(reader, plan, grid, *grid.cells())
        x, y, width, height = MARKS[1]
        true, drifted = ((x + width / 2) / 3.9952, (x + width / 2) / 4)
        found, _ = _found(sampler, grid.n_cols, (x / 3.9952, y / 3.995, width / 4, height / 4))
        assert abs(found - true) < WITHIN_PX
        assert abs(found - drifted) > WITHIN_PX


def _require_found(reader: SlideReader, target: float, reading: Reading, *, cohort_mpp: float | None) -> None:
    """Each landmark lies where its level-0 place in µm lies on the raster of the tiles."""
    mpp = resolve_mpp("S1", reader.mpp, reader.objective_power, cohort_mpp=cohort_mpp).mpp
    plan = plan_reading("S1", reader.level_sizes, mpp, target)
    assert (plan.level, plan.reduction, plan.resample) == reading
    grid = make_grid(reader.level_sizes[0], mpp, plan, TILE_PX, TILE_PX)
    sampler = TileSampler(reader, plan, grid, *grid.cells())
    scale = (mpp[0] / plan.mpp[0], mpp[1] / plan.mpp[1])
    for x, y, width, height in MARKS:
        box = (x * scale[0], y * scale[1], width * scale[0], height * scale[1])
        expected = (box[0] + box[2] / 2, box[1] + box[3] / 2)
        assert _found(sampler, grid.n_cols, box) == pytest.approx(expected, abs=WITHIN_PX)


def _found(sampler: TileSampler, n_cols: int, near: Rectangle) -> Place:
    """Centre of the darkness at most 8 pixels around a rectangle, all in pixels of the tiles' raster."""
    low = [max(0, int(near[axis] - 8)) for axis in (0, 1)]
    high = [int(near[axis] + near[axis + 2] + 8) for axis in (0, 1)]
    cols, rows = (range(a // TILE_PX, b // TILE_PX + 1) for a, b in zip(low, high, strict=True))
    assert cols.stop <= n_cols, "the landmark lies under the grid"
    tiles = [np.concatenate([sampler.read(r * n_cols + c).rgb for c in cols], axis=1) for r in rows]
    x, y = (side.start * TILE_PX for side in (cols, rows))
    part = np.concatenate(tiles)[low[1] - y : high[1] - y, low[0] - x : high[0] - x, 0]
    ink = np.where(part < 215, 255.0 - part, 0.0)  # what JPEG leaves on the white is no ink
    assert ink.sum() > 0, f"no landmark near {near}"
    centres = (np.arange(ink.shape[1]) + 0.5 + low[0], np.arange(ink.shape[0]) + 0.5 + low[1])
    return float((ink.sum(0) * centres[0]).sum() / ink.sum()), float((ink.sum(1) * centres[1]).sum() / ink.sum())
