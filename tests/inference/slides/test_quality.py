"""What tiles and slides look like, in figures with a known truth."""

import itertools
from collections.abc import Callable
from pathlib import Path

import numpy as np
import openslide
import pytest
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

from inference.slides.grid import TileGrid
from inference.slides.overview import Overview
from inference.slides.pixels import reduce_area
from inference.slides.quality import BLURRED, FocusTally, SlideQuality, focus, percent, slide_quality, tile_quality
from inference.slides.tissue import appearance
from tests.inference.slides.synthetic import Pixels

GLASS = (243, 243, 243)
STAINED = (180, 120, 170)
SIDE = 224


def _overview(rgb: Pixels, missing: NDArray[np.float32] | None = None) -> Overview:
    none = np.zeros(rgb.shape[:2], np.bool_)
    return Overview(rgb, none.astype(np.float32) if missing is None else missing, none, (16.0, 16.0), rgb)


def _glass(height: int = 28, width: int = 56) -> Pixels:
    return np.broadcast_to(np.array(GLASS, np.uint8), (height, width, 3)).copy()


# --- from the overview ----------------------------------------------------------------------------------------


def test_tiles_have_the_shares_that_were_painted_and_sum_up_to_the_whole() -> None:
    """Four columns of tiles of 14 x 14 mask pixels: ink, folds, half glass, plain tissue."""
    rgb = _glass()
    rgb[:, :14] = (40, 165, 135)
    rgb[:, 14:28] = (70, 40, 80)
    rgb[:, 35:] = STAINED
    seen = appearance(overview := _overview(rgb))
    grid = TileGrid((56 * 16, 28 * 16), SIDE, SIDE, (0.5, 0.5), (224.0, 224.0))
    found = tile_quality(seen, overview.scale, grid)
    for values in (found.pen, found.dark, found.saturation, found.blank):
        assert values.dtype == np.float32
        assert values.shape == (8,)
        assert np.array_equal(values[:4], values[4:])
    assert found.pen[:4] == pytest.approx([1, 0, 0, 0])
    assert found.dark[:4] == pytest.approx([0, 1, 0, 0])
    assert found.blank[:4] == pytest.approx([0, 0, 0.5, 0])
    saturation = [125 / 165, 40 / 80, 0.5 * 60 / 180, 60 / 180]
    assert found.saturation[:4] == pytest.approx(saturation, abs=1 / 255)
    whole = slide_quality(overview, seen, seen.tissue)
    assert (whole.pen, whole.dark, whole.blank) == pytest.approx((0.25, 0.25, 0.125))
    assert whole.saturation == pytest.approx(np.mean(saturation), abs=1 / 255)


def test_what_is_missing_is_neither_blank_nor_dark_nor_ink() -> None:
    missing = np.ones((28, 56), np.float32)
    missing[:, 28:] = 0
    overview = _overview(np.where(missing[..., None] == 1, 0, _glass()).astype(np.uint8), missing)
    whole = slide_quality(overview, seen := appearance(overview), seen.tissue)
    assert (whole.missing, whole.blank, whole.dark, whole.pen, whole.tissue) == (0.5, 0.5, 0, 0, 0)
    assert whole.seen() == "50 % bare glass, 50 % without pixels"


def _quality(**shares: float | bool) -> SlideQuality:
    usual: dict[str, float | bool] = {
        "tissue": 0.4, "pen": 0.0, "dark": 0.01, "blank": 0.6, "missing": 0.0, "unreadable": 0.0, "saturation": 0.15,
        "tissue_saturation": 0.3, "bright_field": True,
    }  # fmt: skip
    return SlideQuality(**usual | shares)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("shares", "words"),
    [
        ({}, []),
        ({"pen": 0.02}, ["2 % of the slide is ink"]),
        ({"pen": 0.3}, ["30 % of the slide is ink", "--tissue-model"]),
        ({"dark": 0.2}, ["50 % of the tissue is very dark"]),
        ({"tissue_saturation": 0.03}, ["hardly stained"]),
        ({"bright_field": False, "tissue_saturation": 0.03}, ["fluorescence"]),
        ({"unreadable": 0.0012}, ["0.12 % of the slide cannot be read"]),
        ({"tissue": 0.0, "dark": 0.0, "tissue_saturation": 0.0}, []),
    ],
)
def test_a_slide_warns_in_words_of_what_a_person_should_look_at(
    shares: dict[str, float | bool], words: list[str]
) -> None:
    found = _quality(**shares).warnings()
    assert len(found) == len(words)
    assert all(word in text for word, text in zip(words, found, strict=True))


def test_shares_are_told_with_the_digits_that_matter() -> None:
    assert [percent(share) for share in (0, 0.00034, 0.0042, 0.01, 0.984, 1)] == [
        "0 %", "0.034 %", "0.42 %", "1 %", "98 %", "100 %",
    ]  # fmt: skip


# --- focus ----------------------------------------------------------------------------------------------------


def _slide(path: Path) -> Pixels:
    with openslide.OpenSlide(path) as slide:
        return np.asarray(slide.read_region((0, 0), 0, slide.dimensions).convert("RGB"))


def _pictures(shared_data: Path) -> list[Pixels]:
    """Glands, tissue under ink, fat and brown IHC."""
    images = ["high-nuclei-score-level0", "high-nuclei-score-red-pen-level1", "low-nuclei-score-level0"]
    names = [f"histolab-{name}.png" for name in images] + ["skimage-ihc.png"]
    return [np.asarray(Image.open(shared_data / "images" / name).convert("RGB")) for name in names]


def _slides(shared_data: Path) -> list[Pixels]:
    """Skin, and a tumour at 40x and 20x."""
    cancer = _slide(shared_data / "slides" / "tcga-cr-7395-01a-01-ts1.svs")
    height, width = (side // 2 * 2 for side in cancer.shape[:2])
    half = reduce_area(np.ascontiguousarray(cancer[:height, :width]), 2)
    return [_slide(shared_data / "slides" / "CMU-1-Small-Region.svs"), cancer, half]


def _tissue_tiles(pictures: list[Pixels]) -> list[Pixels]:
    """Tiles with at least 30 % stained pixels."""
    tiles = []
    for rgb in pictures:
        corners = itertools.product(*(range(0, side - SIDE + 1, SIDE) for side in rgb.shape[:2]))
        cut = [np.ascontiguousarray(rgb[y : y + SIDE, x : x + SIDE]) for y, x in corners]
        tiles += [tile for tile in cut if (tile.max(axis=2) - tile.min(axis=2) >= 16).mean() > 0.3]
    return tiles


@pytest.mark.parametrize(
    ("pictures", "count"),
    [(_pictures, 24), pytest.param(_slides, 298, marks=pytest.mark.slow)],
    ids=["images", "slides"],
)
def test_a_sharp_tile_is_sharper_than_the_same_one_blurred_and_one_limit_fits_all_stains(
    shared_data: Path, pictures: Callable[[Path], list[Pixels]], count: int
) -> None:
    tiles = _tissue_tiles(pictures(shared_data))
    assert len(tiles) == count
    sharp, slightly, blurred, lost = (
        np.array([focus(ndimage.gaussian_filter(tile, (sigma, sigma, 0)) if sigma else tile) for tile in tiles])
        for sigma in (0, 1, 2, 3)
    )
    assert (sharp > slightly).all()
    assert (slightly > blurred).all()
    assert (blurred > lost).all()
    assert sharp.min() > 1.5 * BLURRED
    assert blurred.max() < 0.9 * BLURRED


def test_focus_does_not_depend_on_the_strength_of_the_stain() -> None:
    rng = np.random.default_rng(5)
    signal = ndimage.gaussian_filter(rng.normal(size=(SIDE, SIDE, 1)), (1, 1, 0))
    signal /= np.abs(signal).max()
    strong, weak = (np.round(150 + swing * signal).astype(np.uint8).repeat(3, axis=2) for swing in (100, 30))
    assert focus(weak) == pytest.approx(focus(strong), rel=0.2)


def test_focus_is_the_ratio_of_the_energies_of_laplacian_and_gradient() -> None:
    """Stripes of a black and a white column: |Laplacian| = 510 and |gradient| = 255 everywhere."""
    stripes = np.zeros((33, 40, 3), np.uint8)
    stripes[:, ::2] = 255
    assert focus(stripes) == pytest.approx(510**2 / (255**2 + 10))


@pytest.mark.parametrize("shape", [(3, 3), (4, 50), (224, 225), (225, 224), (12, 3)])
def test_plain_glass_has_no_focus_whatever_its_shape(shape: tuple[int, int]) -> None:
    assert focus(np.full((*shape, 3), 243, np.uint8)) == 0
    noisy = 243 + np.random.default_rng(1).integers(-1, 2, (*shape, 3))
    assert focus(noisy.astype(np.uint8)) < 2 * BLURRED


@pytest.mark.parametrize("shape", [(2, 50), (50, 2), (0, 0)])
def test_a_tile_too_small_for_a_laplacian_has_no_focus(shape: tuple[int, int]) -> None:
    assert focus(np.zeros((*shape, 3), np.uint8)) == 0


def test_glass_is_less_sharp_than_any_tissue(shared_data: Path) -> None:
    glass = np.asarray(Image.open(shared_data / "images" / "histolab-no-tissue.png").convert("RGB"))
    assert focus(np.ascontiguousarray(glass[:SIDE, :SIDE])) < BLURRED


def test_a_slides_focus_is_that_of_its_tiles_with_tissue() -> None:
    tally = FocusTally()
    assert tally.summary() == {
        "focus_tiles": 0, "focus_median": None, "focus_p5": None, "out_of_focus_share": None,
    }  # fmt: skip
    for value in range(101):
        tally.add(value / 50, tissue_fraction=0.5)
    tally.add(0.0, tissue_fraction=0.49)
    assert tally.summary() == {
        "focus_tiles": 101, "focus_median": 1.0, "focus_p5": 0.1, "out_of_focus_share": round(20 / 101, 6),
    }  # fmt: skip
