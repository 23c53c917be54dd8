"""Where tissue is, and which tiles are planned: known slides, known rectangles, and damage that hides nothing."""

from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray
from PIL import Image

from inference.slides.grid import TileGrid
from inference.slides.opening import open_slide
from inference.slides.overview import Overview, read_overview
from inference.slides.reader import SlideReader
from inference.slides.resolution import plan_reading
from inference.slides.sampling import TileSampler, make_grid
from inference.slides.tissue import STRIP_ROWS, Coverage, appearance, coverage, tissue_mask
from tests.inference.slides.synthetic import ArrayReader, Pixels

GLASS = (243, 243, 243)
STAINED = (180, 120, 170)


def _overview(
    rgb: Pixels, *, missing: NDArray[np.float32] | None = None, unreadable: NDArray[np.bool_] | None = None
) -> Overview:
    shape = rgb.shape[:2]
    return Overview(
        rgb,
        np.zeros(shape, np.float32) if missing is None else missing,
        np.zeros(shape, np.bool_) if unreadable is None else unreadable,
        (16.0, 16.0),
        rgb,
    )


def _glass(height: int = 40, width: int = 60, colour: tuple[int, int, int] = GLASS) -> Pixels:
    return np.broadcast_to(np.array(colour, np.uint8), (height, width, 3)).copy()


def _survey(
    reader: SlideReader, mpp: tuple[float, float] | None = None, *, target: float = 0.5
) -> tuple[NDArray[np.bool_], Coverage, TileGrid, TileSampler]:
    """Mask, coverage, grid and sampler of all tiles, of 224 px."""
    stated = mpp or reader.mpp
    assert stated is not None
    overview = read_overview(reader, stated)
    plan = plan_reading("S1", reader.level_sizes, stated, target)
    grid = make_grid(reader.level_sizes[0], stated, plan, 224, 224)
    mask = tissue_mask(overview)
    return mask, coverage(overview, mask, grid), grid, TileSampler(reader, plan, grid, *grid.cells())


# --- the mask -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("glass", [GLASS, (255, 255, 255), (225, 228, 226), (250, 245, 240)])
@pytest.mark.parametrize("tissue", [STAINED, (230, 200, 225), (150, 120, 100), (90, 90, 90)])
def test_stained_and_dark_rectangles_on_any_glass_are_found(
    glass: tuple[int, int, int], tissue: tuple[int, int, int]
) -> None:
    rgb = _glass(colour=glass)
    rgb[10:20, 15:40] = tissue
    expected = np.zeros((40, 60), np.bool_)
    expected[10:20, 15:40] = True
    mask = tissue_mask(_overview(rgb))
    # The 3 x 3 majority takes the corners.
    assert np.count_nonzero(mask != expected) == 4
    assert not (mask & ~expected).any()


def test_glass_alone_is_no_tissue() -> None:
    rng = np.random.default_rng(0)
    for colour in (GLASS, (255, 255, 255), (215, 215, 220)):
        noisy = np.clip(_glass(colour=colour).astype(int) + rng.integers(-3, 4, (40, 60, 1)), 0, 255)
        assert not tissue_mask(_overview(noisy.astype(np.uint8))).any()


def test_a_picture_taken_in_many_strips_is_decided_as_in_one_piece() -> None:
    rng = np.random.default_rng(3)
    rgb = _glass(2 * STRIP_ROWS + 50, 40)
    rgb[100:, 5:35] = np.clip(np.array(STAINED) + rng.integers(-60, 61, (len(rgb) - 100, 30, 1)), 0, 255)
    rgb[400:450, 10:30] = (60, 40, 70)
    seen = appearance(_overview(rgb))
    part = appearance(_overview(rgb[STRIP_ROWS - 60 :]))
    for name in ("tissue", "pen", "dark", "blank", "saturation"):
        assert np.array_equal(getattr(seen, name)[STRIP_ROWS - 50 :], getattr(part, name)[10:]), name
    assert np.flatnonzero(seen.dark[:, 10:30].all(axis=1)).tolist() == list(range(400, 450))
    assert seen.tissue[110:, 10:30].mean() > 0.99


def test_a_slide_full_of_tissue_is_all_tissue() -> None:
    assert tissue_mask(_overview(_glass(colour=STAINED))).all()


def test_white_scanner_stripes_beside_pale_glass_are_no_tissue() -> None:
    rgb = _glass(colour=(226, 224, 228))
    rgb[:, 20:30] = 255
    rgb[5:15, 35:50] = STAINED
    mask = tissue_mask(_overview(rgb))
    assert mask[6:14, 36:49].all()
    assert not mask[:, :33].any()


def test_on_a_dark_background_tissue_is_what_glows() -> None:
    rgb = _glass(colour=(2, 2, 4))
    rgb[10:20, 15:40] = (3, 4, 60)
    rgb[25:27, 5:55] = (0, 30, 0)
    mask = tissue_mask(_overview(rgb))
    assert mask[11:19, 16:39].all()
    assert mask[25:27, 6:54].all()
    assert not mask[:9].any()
    assert not mask[30:].any()


def test_specks_of_one_pixel_are_dust_and_gaps_of_one_pixel_are_filled() -> None:
    rgb = _glass()
    rgb[5, 5] = (20, 20, 20)
    rgb[20:30, 20:40] = STAINED
    rgb[25, 30] = GLASS
    mask = tissue_mask(_overview(rgb))
    assert not mask[5, 5]
    assert mask[25, 30]


def test_missing_pixels_are_background_whatever_is_under_them() -> None:
    rgb = _glass(colour=STAINED)
    missing = np.zeros((40, 60), np.float32)
    missing[:, :30] = 1
    mask = tissue_mask(_overview(rgb, missing=missing))
    assert not mask[:, :30].any()
    assert mask[:, 31:].all()
    assert not tissue_mask(_overview(np.zeros((8, 8, 3), np.uint8), missing=np.ones((8, 8), np.float32))).any()


@given(hnp.arrays(np.uint8, (30, 40, 3)), st.integers(0, 20), st.integers(0, 28))
def test_unreadable_pixels_are_tissue_and_move_nothing_elsewhere(colours: Pixels, row: int, col: int) -> None:
    """The decision for every pixel away from the damage is the same as without it, whatever the damage looks like."""
    rgb = _glass(60, 80)
    rgb[35:55, 45:75] = STAINED
    unreadable = np.zeros((60, 80), np.bool_)
    unreadable[row : row + 30, col : col + 40] = True
    whole = tissue_mask(_overview(rgb))
    damaged = rgb.copy()
    damaged[row : row + 30, col : col + 40] = colours
    mask = tissue_mask(_overview(damaged, unreadable=unreadable))
    assert mask[unreadable].all()
    near = np.zeros_like(unreadable)
    near[max(row - 1, 0) : row + 31, max(col - 1, 0) : col + 41] = True
    assert np.array_equal(mask[~near], whole[~near])


@pytest.mark.parametrize("damage", [(0, 0, 0), (205, 205, 205), (255, 255, 255)])
def test_damage_over_most_of_a_slide_moves_neither_glass_nor_background(damage: tuple[int, int, int]) -> None:
    """Seen as pixels it would turn the slide into fluorescence, or its glass into something darker."""
    rgb = _glass(60, 80)
    rgb[5:15, 5:15] = (175, 175, 175)
    whole = tissue_mask(_overview(rgb))
    assert whole[6:14, 6:14].all()
    unreadable = np.zeros((60, 80), np.bool_)
    unreadable[:, 20:] = True
    rgb[:, 20:] = damage
    mask = tissue_mask(_overview(rgb, unreadable=unreadable))
    assert np.array_equal(mask[:, :19], whole[:, :19])


# --- coverage -------------------------------------------------------------------------------------------------


def _brute_force(plane: NDArray[np.float64], scale: tuple[float, float], grid: TileGrid) -> NDArray[np.float64]:
    """Mean over each tile's footprint, by exact overlap with every mask pixel; 0 beyond the mask."""
    shares = []
    for axis, count in ((1, grid.n_rows), (0, grid.n_cols)):
        length, step = Fraction(grid.footprint[axis]), Fraction(grid.step[axis])
        pixel, size = Fraction(scale[axis]), plane.shape[1 - axis]
        table = np.zeros((count, size))
        for i in range(count):
            for k in range(size):
                overlap = min(i * step + length, (k + 1) * pixel) - max(i * step, k * pixel)
                table[i, k] = float(max(overlap, Fraction(0)) / length)
        shares.append(table)
    return np.asarray(np.einsum("ry,cx,yx->rc", shares[0], shares[1], plane))


@settings(deadline=None, max_examples=60)
@given(st.data())
def test_coverage_is_the_exact_area_share_of_each_tile(data: st.DataObject) -> None:
    height, width = data.draw(st.integers(1, 9)), data.draw(st.integers(1, 9))
    scale = (data.draw(st.floats(1, 20)), data.draw(st.floats(1, 20)))
    size = (max(1, int(width * scale[0])), max(1, int(height * scale[1])))
    footprint = (data.draw(st.floats(0.3 * scale[0], size[0])), data.draw(st.floats(0.3 * scale[1], size[1])))
    grid = TileGrid(size, 8, data.draw(st.sampled_from([8, 5, 4])), (0.5, 0.5), footprint)
    mask = data.draw(hnp.arrays(np.bool_, (height, width)))
    missing = data.draw(hnp.arrays(np.float32, (height, width), elements=st.floats(0, 1, width=32)))
    unreadable = data.draw(hnp.arrays(np.bool_, (height, width)))
    rgb = np.zeros((height, width, 3), np.uint8)
    found = coverage(Overview(rgb, missing, unreadable, scale, rgb), mask, grid)
    cells = grid.n_rows * grid.n_cols
    assert found.tissue.dtype == found.missing.dtype == np.float32
    assert found.tissue.shape == found.missing.shape == found.damaged.shape == (cells,)
    tissue = _brute_force(mask.astype(float), scale, grid).ravel()
    assert np.abs(found.tissue - tissue).max(initial=0) < 2e-6
    assert np.abs(found.missing - _brute_force(missing.astype(float), scale, grid).ravel()).max(initial=0) < 2e-6
    damage = _brute_force(unreadable.astype(float), scale, grid).ravel()
    assert found.damaged[damage > 2e-6].all()
    assert not found.damaged[damage == 0].any()


def test_a_tile_without_tissue_has_exactly_none_and_a_full_one_exactly_all() -> None:
    """A share of 1e-16 would be planned when every tile with any tissue is asked for."""
    mask = np.zeros((101, 97), np.bool_)
    mask[:, 43:] = True
    rgb = np.zeros((*mask.shape, 3), np.uint8)
    grid = TileGrid((1552, 1616), 224, 224, (0.5, 0.5), (16.3 * 7, 15.9 * 3))
    found = coverage(_overview(rgb), mask, grid)
    _, cols = grid.cells()
    left = cols * grid.footprint[0]
    assert (found.tissue[left + grid.footprint[0] <= 43 * 16] == 0).all()
    assert (found.tissue[left >= 43 * 16] == 1).all()
    assert not found.planned(0.0)[found.tissue == 0].any()


def test_a_tile_that_reaches_tissue_by_rounding_alone_has_none() -> None:
    """20 x 0.3 ends 9e-16 beyond 6, where tissue begins."""
    mask = np.zeros((9, 12), np.bool_)
    mask[:, 6:] = True
    rgb = np.zeros((9, 12, 3), np.uint8)
    overview = Overview(rgb, mask.astype(np.float32), mask, (1.0, 1.0), rgb)
    grid = TileGrid((12, 9), 1, 1, (0.5, 0.5), (3 * 0.1, 3.0))
    assert 19 * grid.footprint[0] + grid.footprint[0] > 6
    found = coverage(overview, mask, grid)
    assert found.tissue.reshape(3, -1)[:, 19].tolist() == [0, 0, 0]
    assert not found.damaged.reshape(3, -1)[:, 19].any()
    assert found.tissue.reshape(3, -1)[:, 20].tolist() == [1, 1, 1]


def test_tiles_are_planned_by_their_tissue_or_for_their_damage() -> None:
    tissue = np.array([0, 0.005, 0.01, 0.5, 1, 0], np.float32)
    damaged = np.array([False, False, False, False, False, True])
    found = Coverage(tissue, np.zeros(6, np.float32), damaged)
    assert found.planned(0.01).tolist() == [False, False, True, True, True, True]
    assert found.planned(0.0).tolist() == [False, True, True, True, True, True]
    assert found.planned(1.0).tolist() == [False, False, False, False, True, True]


def test_a_slide_without_any_whole_tile_has_an_empty_coverage() -> None:
    mask, found, grid, _ = _survey(ArrayReader([_glass(50, 50, STAINED)]))
    assert mask.all()
    assert grid.n_rows * grid.n_cols == len(found.tissue) == len(found.planned(0.01)) == 0


# --- real slides ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "mpp", "share"),
    [
        ("slides/CMU-1-Small-Region.svs", None, 0.38),
        ("slides/tcga-cr-7395-01a-01-ts1.svs", (0.25, 0.25), 0.64),
        ("derived/generic-pyramid-jpeg.tiff", None, 0.38),
        ("derived/aperio-3level-jpeg.svs", None, 0.38),
        ("derived/dicom-jpeg/volume-0.dcm", None, 0.38),
    ],
)
def test_the_tissue_share_of_real_slides_is_what_a_trained_network_finds(
    shared_data: Path, file: str, mpp: tuple[float, float] | None, share: float
) -> None:
    with open_slide(shared_data / file, "S1") as slide:
        stated = mpp or slide.mpp
        assert stated is not None
        assert tissue_mask(read_overview(slide, stated)).mean() == pytest.approx(share, abs=0.02)


def test_known_places_of_the_skin_slide_are_told_apart(shared_data: Path) -> None:
    with open_slide(shared_data / "slides" / "CMU-1-Small-Region.svs", "S1") as slide:
        mask, found, grid, _ = _survey(slide)
        tissue = found.tissue.reshape(grid.n_rows, grid.n_cols)
        for x, y in ((1150, 1300), (1250, 1450), (1000, 2300), (1300, 2500)):
            assert mask[y // 16 : (y + 224) // 16, x // 16 : (x + 224) // 16].mean() > 0.5
            assert tissue[y // 224, x // 224] > 0.5
        for x, y in ((200, 2000), (300, 700)):
            assert not mask[y // 16 : (y + 224) // 16, x // 16 : (x + 224) // 16].any()


def test_stripes_and_glass_of_the_cancer_slide_are_no_tissue(shared_data: Path) -> None:
    with open_slide(shared_data / "slides" / "tcga-cr-7395-01a-01-ts1.svs", "S1") as slide:
        mask = tissue_mask(read_overview(slide, (0.25, 0.25)))
    height, width = mask.shape
    assert not mask[: height // 8, : width // 2].any()
    assert not mask[-height // 8 :, : width // 4].any()
    assert mask[height // 2, width // 4 : width // 2].mean() > 0.9


def test_the_dark_background_of_the_fluorescence_slide_is_no_tissue(shared_data: Path) -> None:
    with open_slide(shared_data / "slides" / "test3-DAPI-2-(387).ndpi", "S1") as slide:
        assert slide.mpp is not None
        mask = tissue_mask(read_overview(slide, slide.mpp))
    assert 0.25 < mask.mean() < 0.6
    assert not mask[-6:].any(), "below the section"
    assert not mask[:20, :20].any(), "left of it"


@pytest.mark.parametrize(
    ("file", "planned"), [("histolab-no-tissue.png", 0), ("histolab-high-nuclei-score-level0.png", 12)]
)
def test_glass_with_specks_plans_nothing_and_a_tumour_everything(shared_data: Path, file: str, planned: int) -> None:
    rgb = np.asarray(Image.open(shared_data / "images" / file).convert("RGB"))
    _, found, grid, _ = _survey(ArrayReader([rgb]))
    assert grid.n_rows * grid.n_cols >= 4
    assert int(found.planned(0.01).sum()) == planned


def test_what_lies_outside_the_scanned_area_is_never_planned(shared_data: Path) -> None:
    with open_slide(shared_data / "derived" / "leica.scn", "S1") as slide:
        mask, found, grid, _ = _survey(slide)
    assert not mask[: 300 // 16].any()
    assert not mask[:, : 300 // 16].any()
    rows, cols = grid.cells()
    planned = found.planned(0.01)
    assert planned.any()
    assert rows[planned].min() >= 1
    assert cols[planned].min() >= 1
    assert found.missing[0] == 1


# --- damage ---------------------------------------------------------------------------------------------------

GARBAGE = [(5, 7), (5, 8), (6, 7), (6, 8)]


@pytest.mark.parametrize("name", ["tile-garbage.svs", "tile-zero-length.svs"])
def test_the_four_tiles_on_the_bad_one_are_planned_and_all_others_as_if_it_were_whole(
    shared_data: Path, name: str
) -> None:
    with (
        open_slide(shared_data / "broken" / name, "S1") as broken,
        open_slide(shared_data / "slides" / "CMU-1-Small-Region.svs", "S2") as whole,
    ):
        _, found, grid, sampler = _survey(broken)
        truth = _survey(whole)[1]
        rows, cols = grid.cells()
        touched = np.array([cell in GARBAGE for cell in zip(rows.tolist(), cols.tolist(), strict=True)])
        planned = found.planned(0.01)
        assert planned[touched].all()
        assert np.array_equal(planned[~touched], truth.planned(0.01)[~touched])
        # The 3 x 3 majority sees one mask pixel into the bad tile.
        assert np.abs(found.tissue - truth.tissue)[~touched].max() < 0.01
        assert np.array_equal(found.damaged, touched if name == "tile-garbage.svs" else np.zeros_like(touched))
        assert found.missing[touched] == pytest.approx([0.3214, 0.3673, 0.2143, 0.2449], abs=1e-4)
        assert (found.missing[~touched] == 0).all()
        if name == "tile-zero-length.svs":
            read = [sampler.read(row * grid.n_cols + col).missing_fraction for row, col in GARBAGE]
            assert found.missing[touched] == pytest.approx(read, abs=1e-6), "planned and read agree"
