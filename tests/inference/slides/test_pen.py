"""Ink of pens on an overview: made up strokes, and pictures of slides that were drawn on."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image
from scipy import ndimage

from inference.slides.overview import Overview
from inference.slides.pen import BLOCK_PX, REACH, find_ink
from inference.slides.pixels import reduce_area
from inference.slides.tissue import appearance, tissue_mask
from tests.inference.slides.synthetic import Pixels

GLASS = (243, 243, 243)
INKS = {"green": (40, 165, 135), "blue": (39, 82, 197), "red": (215, 40, 70), "black": (30, 30, 35)}
STAINS = {
    "eosin": (230, 150, 190), "dense eosin": (200, 40, 110), "haematoxylin": (110, 70, 150), "DAB": (130, 85, 45),
    "pale haematoxylin": (160, 175, 210), "nuclei": (70, 40, 110), "grey": (90, 90, 90),
}  # fmt: skip


def _glass(height: int = 80, width: int = 100) -> Pixels:
    return np.broadcast_to(np.array(GLASS, np.uint8), (height, width, 3)).copy()


def _textured(colour: tuple[int, int, int], height: int = 80, width: int = 100) -> Pixels:
    """A colour as tissue has it: from pixel to pixel another."""
    swing = np.random.default_rng(4).integers(-25, 26, (height, width, 1))
    return np.clip(np.array(colour) + swing, 0, 255).astype(np.uint8)


def _ink(rgb: Pixels) -> NDArray[np.bool_]:
    return find_ink(rgb, GLASS[0], np.ones(rgb.shape[:2], np.bool_))


def _overview(rgb: Pixels, unreadable: NDArray[np.bool_] | None = None) -> Overview:
    none = np.zeros(rgb.shape[:2], np.bool_)
    return Overview(rgb, none.astype(np.float32), none if unreadable is None else unreadable, (16.0, 16.0), rgb)


def _picture(shared_data: Path, name: str, factor: int = 1) -> Pixels:
    """A picture, reduced to about the scale of an overview."""
    rgb = np.asarray(Image.open(shared_data / "images" / name).convert("RGB"))
    height, width = (side // factor * factor for side in rgb.shape[:2])
    return reduce_area(np.ascontiguousarray(rgb[:height, :width]), factor)


@pytest.mark.parametrize("colour", INKS.values(), ids=INKS)
def test_a_stroke_of_any_colour_on_glass_is_ink_and_no_tissue(colour: tuple[int, int, int]) -> None:
    rgb = _glass()
    rgb[30:50, 10:90] = colour
    seen = appearance(_overview(rgb))
    assert np.count_nonzero(seen.pen) == pytest.approx(20 * 80, abs=4)
    assert not seen.tissue.any()
    assert not seen.blank[31:49, 11:89].any()


@pytest.mark.parametrize("colour", INKS.values(), ids=INKS)
def test_the_blurred_rim_of_a_stroke_is_ink_too(colour: tuple[int, int, int]) -> None:
    rgb = _glass()
    rgb[30:50, 10:90] = colour
    rgb = ndimage.gaussian_filter(rgb, (1.5, 1.5, 0))
    assert appearance(_overview(rgb)).tissue.mean() < 0.01


@pytest.mark.parametrize("colour", STAINS.values(), ids=STAINS)
def test_no_stain_is_ink_not_even_without_any_texture(colour: tuple[int, int, int]) -> None:
    rgb = _glass()
    rgb[20:60, 20:80] = colour
    assert not _ink(rgb).any()
    assert tissue_mask(_overview(rgb))[21:59, 21:79].all()


@pytest.mark.parametrize("colour", INKS.values(), ids=INKS)
def test_what_has_the_colour_of_ink_and_the_texture_of_tissue_is_tissue(colour: tuple[int, int, int]) -> None:
    """Blood, trichrome and alcian blue; and tissue that shows through ink."""
    rgb = _textured(colour)
    assert not _ink(rgb).any()


def test_tissue_beside_ink_stays_tissue_and_ink_beside_tissue_stays_ink() -> None:
    rgb = _glass()
    rgb[:, :50] = _textured((210, 120, 170))[:, :50]
    rgb[:, 50:70] = INKS["green"]
    seen = appearance(_overview(rgb))
    assert seen.tissue[:, :49].all()
    assert seen.pen[:, 52:70].all()
    assert not seen.tissue[:, 52:].any()


def test_a_speck_in_the_colour_of_ink_is_none() -> None:
    rgb = _glass()
    rgb[40, 50:52] = INKS["green"]
    assert not _ink(rgb).any()


def test_strokes_across_the_blocks_are_found_as_in_one_piece() -> None:
    side = BLOCK_PX + 40
    rgb = _glass(side, side)
    diagonal = np.abs(np.subtract.outer(np.arange(side), np.arange(side))) < 12
    rgb[diagonal] = INKS["blue"]
    rgb = ndimage.gaussian_filter(rgb, (1.2, 1.2, 0))
    part = _ink(rgb[BLOCK_PX - 60 :, BLOCK_PX - 60 :])
    assert part[20:, 20:].any()
    assert np.array_equal(_ink(rgb)[BLOCK_PX - 40 :, BLOCK_PX - 40 :], part[20:, 20:])


def test_damage_is_no_ink_and_moves_nothing_beyond_a_few_pixels() -> None:
    rgb = _glass()
    rgb[30:50, 10:90] = INKS["green"]
    whole = appearance(_overview(rgb))
    unreadable = np.zeros(rgb.shape[:2], np.bool_)
    unreadable[:, 60:] = True
    for colour in (*INKS.values(), (0, 0, 0), GLASS):
        damaged = rgb.copy()
        damaged[:, 60:] = colour
        seen = appearance(_overview(damaged, unreadable))
        assert not (seen.pen & unreadable).any()
        assert seen.tissue[unreadable].all()
        far = 60 - REACH - 4
        assert np.array_equal(seen.pen[:, :far], whole.pen[:, :far])
        assert np.array_equal(seen.tissue[:, :far], whole.tissue[:, :far])


def test_on_a_dark_background_nothing_is_ink() -> None:
    rgb = np.zeros((80, 100, 3), np.uint8)
    rgb[30:40] = INKS["green"]
    seen = appearance(_overview(rgb))
    assert not seen.pen.any()
    assert seen.tissue[31:39].all()
    assert not seen.dark.any()


# --- pictures of slides ---------------------------------------------------------------------------------------


def test_green_pen_is_found_as_histoqc_has_it(shared_data: Path) -> None:
    """96 % of the reference is found; what is found beyond it is its blurred rim, blue ink and 0.5 % of the tissue."""
    rgb = _picture(shared_data, "histoqc-pen-1k_version-pen_green.png")
    truth = np.asarray(Image.open(shared_data / "images" / "histoqc-pen-1k_version-pen_green_mask.png").convert("1"))
    seen = appearance(_overview(rgb))
    assert (seen.pen & truth).sum() / truth.sum() > 0.94, "recall"
    assert (seen.tissue & truth).sum() / truth.sum() < 0.06, "of the pen, taken for tissue"
    near = ndimage.binary_dilation(truth, iterations=3)
    near[440:480, 170:210] = True  # a blue dot, which the reference leaves out
    assert (seen.pen & near).sum() / seen.pen.sum() > 0.9, "precision"
    inside = np.s_[180:400, 300:700]  # the large piece, without pen
    assert seen.pen[inside].mean() < 0.01


def test_green_ink_alone_is_no_tissue(shared_data: Path) -> None:
    for factor in (4, 8, 16):
        seen = appearance(_overview(_picture(shared_data, "histolab-no-tissue-green-pen.png", factor)))
        assert seen.tissue.mean() < 0.005
        assert 0.7 < seen.pen.mean() < 0.85


def test_glass_with_specks_is_neither_ink_nor_tissue(shared_data: Path) -> None:
    seen = appearance(_overview(_picture(shared_data, "histolab-no-tissue.png")))
    assert seen.tissue.mean() < 0.001
    assert not seen.pen.any()
    assert seen.blank.mean() > 0.999


@pytest.mark.parametrize(
    ("name", "factor", "least"),
    [
        ("histolab-high-nuclei-score-level0.png", 8, 0.98),
        ("histolab-high-nuclei-score-red-pen-level1.png", 8, 0.98),
        ("skimage-ihc.png", 8, 0.6),
        ("skimage-ihc.png", 16, 0.6),
        ("histolab-low-nuclei-score-level0.png", 8, 0.1),
    ],
    ids=["tumour", "tissue under red and black ink", "IHC", "IHC, coarser", "fat"],
)
def test_tissue_of_any_stain_and_under_ink_stays_tissue(
    shared_data: Path, name: str, factor: int, least: float
) -> None:
    seen = appearance(_overview(_picture(shared_data, name, factor)))
    assert seen.tissue.mean() > least
    assert not seen.pen.any()


def test_inks_around_a_section_are_ink_and_the_section_inside_is_tissue(shared_data: Path) -> None:
    """A thumbnail ringed in green and red; the black rings lie on the tissue."""
    seen = appearance(_overview(_picture(shared_data, "histolab-diagnostic-slide-thumb-rgb.png")))
    inside, green, red = np.s_[210:400, 150:380], np.s_[480:490, 175:240], np.s_[240:320, 450:462]
    assert seen.tissue[inside].mean() > 0.93
    assert seen.pen[inside].mean() < 0.06
    assert seen.tissue[red].mean() < 0.1
    assert seen.pen[red].mean() > 0.6
    assert seen.pen[green].mean() > 0.7
