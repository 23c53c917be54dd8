"""Tiles cut from slides whose pixels are known: the right place, the right values, at every kind of reading."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from inference.errors import TileReadError
from inference.slides.grid import TileGrid
from inference.slides.opening import open_slide
from inference.slides.pixels import reduce_area
from inference.slides.reader import BAND_PIXELS, SlideReader
from inference.slides.resolution import ReadPlan, plan_reading
from inference.slides.sampling import SampledTile, TileSampler, make_grid
from tests.inference.slides.synthetic import (
    ArrayReader,
    Rectangle,
    Size,
    coordinates,
    dark_rectangles,
    noise,
    write_pyramid,
)

TILE_PX = 64


@dataclass(frozen=True)
class Cut:
    """A slide cut for a target resolution."""

    sampler: TileSampler
    grid: TileGrid
    plan: ReadPlan

    def read(self, row: int, col: int) -> SampledTile:
        return self.sampler.read(row * self.grid.n_cols + col)

    def mosaic(self) -> NDArray[np.uint8]:
        """All tiles side by side."""
        rows = [
            np.concatenate([self.read(row, col).rgb for col in range(self.grid.n_cols)], axis=1)
            for row in range(self.grid.n_rows)
        ]
        return np.concatenate(rows)


def _cut(
    reader: SlideReader,
    target: float,
    *,
    mpp: tuple[float, float] | None = None,
    tile_px: int = TILE_PX,
    allow_upsampling: bool = False,
) -> Cut:
    stated = mpp or reader.mpp
    assert stated is not None
    plan = plan_reading("S1", reader.level_sizes, stated, target, allow_upsampling=allow_upsampling)
    grid = make_grid(reader.level_sizes[0], stated, plan, tile_px, tile_px)
    return Cut(TileSampler(reader, plan, grid, *grid.cells()), grid, plan)


# --- place --------------------------------------------------------------------------------------------------

PYRAMIDS: dict[str, list[Size]] = {
    "rounded-up": [(2403, 1797), (602, 450), (151, 113)],  # downsamples 3.9917 x 3.9933 and 15.9139 x 15.9027
    "rounded-down": [(2403, 1797), (1201, 898), (600, 449)],  # 2.0008 x 2.0011 and 4.005 x 4.0022
}
MARKS: list[Rectangle] = [
    (201.0, 157.5, 80.0, 60.0),
    (2031.3, 111.0, 70.0, 90.0),
    (211.0, 1400.7, 60.0, 70.0),
    (1990.5, 1431.0, 90.0, 80.0),
]


@pytest.fixture(scope="module")
def marked(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Slides with one dark landmark near each corner, at every level where it truly lies."""
    folder = tmp_path_factory.mktemp("marked")
    return {
        name: write_pyramid(
            folder / f"{name}.tif", sizes, lambda _, size: dark_rectangles((2403, 1797), size, MARKS), mpp=(0.25, 0.25)
        )
        for name, sizes in PYRAMIDS.items()
    }


def _found(cut: Cut, near: Rectangle, tile_px: int) -> tuple[float, float]:
    """Centre of darkness in the tiles on and around a landmark, in level-0 pixels."""
    spans, pixels = [], []
    for axis, count in ((0, cut.grid.n_cols), (1, cut.grid.n_rows)):
        footprint = cut.grid.footprint[axis]
        first = max(0, int((near[axis] - 50) // footprint))
        spans.append(range(first, min(count, int((near[axis] + near[axis + 2] + 50) // footprint) + 1)))
        pixels.append(footprint / tile_px)
    cols, rows = spans
    tiles = [np.concatenate([cut.read(row, col).rgb for col in cols], axis=1) for row in rows]
    ink = 255.0 - np.concatenate(tiles)[..., 0]
    x = (np.arange(ink.shape[1]) + cols.start * tile_px + 0.5) * pixels[0]
    y = (np.arange(ink.shape[0]) + rows.start * tile_px + 0.5) * pixels[1]
    assert ink.sum() > 0, f"no landmark near {near}"
    return float((ink.sum(0) * x).sum() / ink.sum()), float((ink.sum(1) * y).sum() / ink.sum())


@pytest.mark.parametrize(
    ("pyramid", "mpp", "target", "reading"),
    [
        ("rounded-up", (0.25, 0.25), 0.25, (0, 1, "none")),
        ("rounded-up", (0.25, 0.25), 0.5, (0, 2, "none")),
        ("rounded-up", (0.25, 0.25), 1.0, (1, 1, "none")),
        ("rounded-up", (0.25, 0.25), 4.0, (2, 1, "none")),
        ("rounded-up", (0.25, 0.25), 0.6, (0, 2, "area")),
        ("rounded-up", (0.25, 0.25), 0.4, (0, 1, "area")),
        ("rounded-up", (0.25, 0.25), 2.5, (0, 8, "area")),
        ("rounded-up", (0.25, 0.25), 1.3, (0, 4, "area")),
        ("rounded-up", (0.25, 0.25), 0.21, (0, 1, "bilinear")),
        ("rounded-up", (0.25, 0.5), 0.5, (0, 1, "area")),
        ("rounded-up", (0.25, 0.2525), 1.0, (1, 1, "none")),
        ("rounded-up", (0.22, 0.26), 0.24, (0, 1, "bilinear")),
        ("rounded-down", (0.25, 0.25), 0.5, (1, 1, "none")),
        ("rounded-down", (0.25, 0.25), 1.0, (2, 1, "none")),
        ("rounded-down", (0.25, 0.25), 2.0, (0, 8, "none")),
        ("rounded-down", (0.25, 0.25), 0.9, (1, 1, "area")),
        ("rounded-down", (0.25, 0.25), 3.0, (2, 2, "area")),
        ("rounded-down", (0.26, 0.25), 0.7, (1, 1, "area")),
    ],
)
def test_four_landmarks_are_found_within_a_pixel(
    marked: dict[str, Path], pyramid: str, mpp: tuple[float, float], target: float, reading: tuple[int, int, str]
) -> None:
    """On a slide that is not square, with downsamples that are not whole: no swap, no drift, no lost fractions."""
    tile_px = int(256 * min(mpp) / target)
    with open_slide(marked[pyramid], "S1") as reader:
        cut = _cut(reader, target, mpp=mpp, tile_px=tile_px)
        assert (cut.plan.level, cut.plan.reduction, cut.plan.resample) == reading
        for mark in MARKS:
            x, y, width, height = mark
            found = _found(cut, mark, tile_px)
            assert found[0] == pytest.approx(x + width / 2, abs=0.6 * cut.grid.footprint[0] / tile_px)
            assert found[1] == pytest.approx(y + height / 2, abs=0.6 * cut.grid.footprint[1] / tile_px)


def test_the_coordinates_of_a_tile_are_those_of_its_pixels() -> None:
    """x and y of the tile row, rounded, and where the tile was really read, agree to half a pixel."""
    sizes = PYRAMIDS["rounded-up"]
    reader = ArrayReader([coordinates(level, size) for level, size in enumerate(sizes)], mpp=(0.25, 0.25))
    for target, level in ((0.25, 0), (1.0, 1)):
        cut = _cut(reader, target)
        assert cut.plan.level == level
        for row, col in ((0, 0), (1, 2), (cut.grid.n_rows - 1, cut.grid.n_cols - 1)):
            x = cut.grid.origins(np.array([col]), 0)[0] / cut.plan.downsample[0]
            y = cut.grid.origins(np.array([row]), 1)[0] / cut.plan.downsample[1]
            corner = cut.read(row, col).rgb[0, 0]
            assert corner[0] == round(x) % 251
            assert corner[1] == round(y) % 241
            assert abs(x - round(x)) <= 0.5


# --- values -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Slides whose pixels tell their own coordinates."""
    folder = tmp_path_factory.mktemp("told")
    return {
        name: write_pyramid(folder / f"{name}.tif", sizes, coordinates, mpp=(0.25, 0.25))
        for name, sizes in PYRAMIDS.items()
    }


@pytest.mark.parametrize("pyramid", PYRAMIDS)
@pytest.mark.parametrize("level", [0, 1, 2])
def test_a_stored_level_is_used_pixel_for_pixel(told: dict[str, Path], pyramid: str, level: int) -> None:
    """OpenSlide itself interpolates between the pixels of such levels; the model must not see that."""
    sizes = PYRAMIDS[pyramid]
    with open_slide(told[pyramid], "S1") as reader:
        cut = _cut(reader, 0.25 * sizes[0][0] / sizes[level][0], tile_px=(200, 100, 50)[level])
        assert (cut.plan.level, cut.plan.reduction, cut.plan.resample) == (level, 1, "none")
        mosaic = cut.mosaic()
    truth = coordinates(level, sizes[level])
    assert mosaic.shape[0] > sizes[level][1] - cut.grid.tile_px, "the last row is there"
    assert mosaic.shape[1] > sizes[level][0] - cut.grid.tile_px, "the last column is there"
    assert np.array_equal(mosaic, truth[: mosaic.shape[0], : mosaic.shape[1]])


@pytest.mark.parametrize("reduction", [2, 4, 8])
def test_a_reduction_of_level_0_is_the_exact_block_mean(tmp_path: Path, reduction: int) -> None:
    size = (64 * 8 * 3 + 5, 64 * 8 * 2 + 3)
    path = write_pyramid(tmp_path / "s.tif", [size], lambda *_: noise(size), mpp=(0.25, 0.25))
    with open_slide(path, "S1") as reader:
        cut = _cut(reader, 0.25 * reduction)
        assert (cut.plan.level, cut.plan.reduction, cut.plan.resample) == (0, reduction, "none")
        mosaic = cut.mosaic()
    height, width = mosaic.shape[:2]
    assert (width, height) == (64 * 8 * 3 // reduction, 64 * 8 * 2 // reduction)
    blocks = noise(size)[: height * reduction, : width * reduction].astype(int)
    sums = blocks.reshape(height, reduction, width, reduction, 3).sum(axis=(1, 3))
    assert np.array_equal(mosaic, (sums + reduction**2 // 2) // reduction**2)


def _area_mean(image: NDArray[np.uint8], box: tuple[Fraction, Fraction, Fraction, Fraction]) -> NDArray[np.float64]:
    """Mean colour of a box (x0, y0, x1, y1) with fractional edges, by exact overlap."""
    weights = []
    for low, high, size in ((box[1], box[3], image.shape[0]), (box[0], box[2], image.shape[1])):
        parts = [max(Fraction(0), min(high, Fraction(k + 1)) - max(low, Fraction(k))) for k in range(size)]
        weights.append(np.array([float(part / sum(parts)) for part in parts]))
    return np.asarray(np.einsum("y,x,yxc->c", weights[0], weights[1], image.astype(np.float64)))


@pytest.mark.parametrize(
    ("target", "mpp", "reduction"), [(0.4, (0.25, 0.25), 1), (0.6, (0.25, 0.25), 2), (0.5, (0.25, 0.5), 1)]
)
def test_an_area_resampled_tile_is_the_exact_mean_under_each_pixel(
    target: float, mpp: tuple[float, float], reduction: int
) -> None:
    size = (131, 102)
    image = noise(size)
    cut = _cut(ArrayReader([image], mpp=mpp), target, tile_px=16)
    assert (cut.plan.resample, cut.plan.reduction) == ("area", reduction)
    padded = np.pad(image, ((0, -size[1] % reduction), (0, -size[0] % reduction), (0, 0)), mode="edge")
    reduced = reduce_area(padded, reduction)
    pixel = [Fraction(target) / Fraction(m) / reduction for m in mpp]
    for row, col in ((0, 0), (1, 2), (cut.grid.n_rows - 1, cut.grid.n_cols - 1)):
        tile = cut.read(row, col).rgb
        for i, j in ((0, 0), (3, 11), (15, 15)):
            x, y = (col * 16 + j) * pixel[0], (row * 16 + i) * pixel[1]
            exact = _area_mean(reduced, (x, y, x + pixel[0], y + pixel[1]))
            assert np.abs(tile[i, j] - exact).max() <= 0.51


def test_an_enlarged_tile_interpolates_across_the_borders_of_tiles() -> None:
    """A steep ramp stays a ramp: the pixels beyond a tile's own rectangle are taken into account."""
    ramp = np.repeat(15 * np.arange(18, dtype=np.uint8)[None, :, None], 18, axis=0).repeat(3, axis=2)
    cut = _cut(ArrayReader([ramp], mpp=(0.6, 0.6)), 0.5, tile_px=4)
    assert cut.plan.resample == "bilinear"
    mosaic = cut.mosaic()[..., 0].astype(float)
    centres = (np.arange(mosaic.shape[1]) + 0.5) * 0.5 / 0.6 - 0.5
    assert np.abs(mosaic - 15 * np.clip(centres, 0, 17)).max() <= 0.501


@pytest.mark.parametrize("target", [0.5, 0.55, 1.0, 1.2, 4.0, 4.6])
def test_a_white_slide_stays_white_to_its_last_pixel(target: float) -> None:
    """Nothing dark bleeds in at the edge, where reduced pixels reach beyond an odd-sized level."""
    white = ArrayReader([np.full((1031, 1237, 3), 200, np.uint8)], mpp=(0.5, 0.5), background=(0, 0, 0))
    for tile_px in (16, 31):
        cut = _cut(white, target, tile_px=tile_px)
        for row, col in ((0, 0), (cut.grid.n_rows - 1, cut.grid.n_cols - 1)):
            tile = cut.read(row, col)
            assert (tile.rgb == 200).all()
            assert tile.missing_fraction == 0


def test_a_slide_smaller_than_a_tile_has_no_tiles() -> None:
    assert _cut(ArrayReader([noise((63, 500))]), 0.5).grid.n_cols == 0
    cut = _cut(ArrayReader([noise((64, 64))]), 0.5)
    assert (cut.grid.n_rows, cut.grid.n_cols) == (1, 1)
    assert np.array_equal(cut.read(0, 0).rgb, noise((64, 64)))


def test_a_far_too_fine_level_is_read_in_bands_of_bounded_size() -> None:
    """A model at 32 µm/px on a slide of one level at 0.5: a tile covers 4,096 x 4,096 level-0 pixels."""
    image = np.repeat(np.repeat(noise((80, 64)), 64, axis=0), 64, axis=1)
    reader = ArrayReader([image], mpp=(0.5, 0.5))
    cut = _cut(reader, 32.0)
    assert (cut.plan.reduction, cut.plan.resample) == (8, "area")
    tile = cut.read(0, 0).rgb
    assert np.array_equal(tile, noise((80, 64))[:64, :64])
    assert len(reader.requests) > 1
    assert max(width * height for *_, width, height in reader.requests) <= BAND_PIXELS


# --- missing and damaged pixels -----------------------------------------------------------------------------


def test_transparent_pixels_take_the_background_once_and_are_counted() -> None:
    rgba = noise((256, 128), channels=4)
    rgba[..., 3] = 255
    rgba[:, :16, 3] = 0
    rgba[:, 16:32, 3] = 102
    cut = _cut(ArrayReader([rgba], background=(10, 20, 250)), 0.5)
    tile = cut.read(0, 0)
    assert tile.missing_fraction == 0.25
    assert (tile.rgb[:, :16] == (10, 20, 250)).all()
    half = rgba[:64, 16:32, :3].astype(float) * 0.4 + np.array([10, 20, 250]) * 0.6
    assert np.abs(tile.rgb[:, 16:32] - half).max() <= 0.501
    assert np.array_equal(tile.rgb[:, 32:], rgba[:64, 32:64, :3])
    assert cut.read(0, 1).missing_fraction == 0


def test_missing_pixels_are_composited_before_they_are_averaged() -> None:
    """Black under alpha 0 must not darken its neighbours in a reduction."""
    rgba = np.full((256, 256, 4), 255, np.uint8)
    rgba[::2, ::2] = 0
    tile = _cut(ArrayReader([rgba], mpp=(0.25, 0.25)), 0.5).read(0, 0)
    assert (tile.rgb == 255).all()
    assert tile.missing_fraction == 0.25


def test_a_tile_on_damage_raises_and_its_neighbours_do_not() -> None:
    reader = ArrayReader([noise((512, 256))], tile=64, damaged=[(0, 1, 2)])
    sampler = _cut(reader, 0.5)
    with pytest.raises(TileReadError) as raised:
        sampler.read(1, 2)
    assert raised.value.code == "read_error"
    for row, col in ((0, 2), (1, 1), (1, 3), (2, 2)):
        truth = noise((512, 256))[row * 64 : row * 64 + 64, col * 64 : col * 64 + 64]
        assert np.array_equal(sampler.read(row, col).rgb, truth)


GARBAGE = [(row, col) for row in (5, 6) for col in (7, 8)]
"""Tiles of 224 px that touch the damaged compressed tile of the broken slides."""


def _tiles(path: Path, threads: int) -> dict[tuple[int, int], NDArray[np.uint8] | TileReadError]:
    """Every tile of a slide at native 0.499 µm/px, read by several threads at once."""

    def read(cell: tuple[int, int]) -> NDArray[np.uint8] | TileReadError:
        try:
            return cut.read(*cell).rgb
        except TileReadError as error:
            return error

    with open_slide(path, "S1") as reader:
        cut = _cut(reader, 0.5, tile_px=224)
        rows, cols = cut.grid.cells()
        cells: Sequence[tuple[int, int]] = [*zip(rows.tolist(), cols.tolist(), strict=True)]
        with ThreadPoolExecutor(threads) as pool:
            return dict(zip(cells, pool.map(read, cells), strict=True))


def _pixels(tile: NDArray[np.uint8] | TileReadError) -> NDArray[np.uint8]:
    assert not isinstance(tile, TileReadError), tile
    return tile


@pytest.mark.parametrize("threads", [1, 4])
def test_exactly_four_tiles_of_the_damaged_slide_fail_and_all_others_are_untouched(
    shared_data: Path, threads: int
) -> None:
    """An OpenSlide handle that met damage fails for ever after; no other tile may notice."""
    whole = _tiles(shared_data / "slides" / "CMU-1-Small-Region.svs", 2)
    broken = _tiles(shared_data / "broken" / "tile-garbage.svs", threads)
    assert len(broken) == 9 * 13
    assert sorted(cell for cell, tile in broken.items() if isinstance(tile, TileReadError)) == GARBAGE
    for cell, tile in broken.items():
        if cell in GARBAGE:
            message = str(tile)
            assert "garbage" not in message
            assert "/" not in message
        else:
            assert np.array_equal(_pixels(tile), _pixels(whole[cell]))


def test_an_empty_compressed_tile_is_missing_and_not_black(shared_data: Path) -> None:
    with (
        open_slide(shared_data / "broken" / "tile-zero-length.svs", "S1") as reader,
        open_slide(shared_data / "slides" / "CMU-1-Small-Region.svs", "S1") as whole,
    ):
        cut, truth = _cut(reader, 0.5, tile_px=224), _cut(whole, 0.5, tile_px=224)
        shares = {}
        for row in range(cut.grid.n_rows):
            for col in range(cut.grid.n_cols):
                tile = cut.read(row, col)
                if tile.missing_fraction:
                    shares[row, col] = round(tile.missing_fraction, 4)
                else:
                    assert np.array_equal(tile.rgb, truth.read(row, col).rgb)
        # The compressed tile covers x 1680-1919 and y 1200-1439; the tiles begin at multiples of 224.
        assert shares == {(5, 7): 0.3214, (5, 8): 0.3673, (6, 7): 0.2143, (6, 8): 0.2449}
        corner = cut.read(5, 7).rgb
        assert (corner[80:, 112:] == 255).all()
        assert corner[:80].mean() < 250
