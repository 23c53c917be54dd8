"""ICC profiles: known colours, the slides' own profiles, and profiles that are none."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import ImageCms

from inference.errors import UnreadableSlide
from inference.slides.colour import ToSrgb
from inference.slides.opening import open_slide
from tests.inference.slides.synthetic import noise

SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()


def test_srgb_to_srgb_changes_nothing_by_more_than_rounding() -> None:
    pixels = noise((64, 64))
    assert np.abs(ToSrgb(SRGB, "S1")(pixels).astype(int) - pixels).max() <= 1


@pytest.mark.parametrize(
    ("file", "has_profile"),
    [
        ("slides/tcga-cr-7395-01a-01-ts1.svs", True),
        ("derived/dicom-jpeg/volume-0.dcm", True),
        ("slides/dicom-highdicom/sm_image.dcm", True),
        ("slides/CMU-1-Small-Region.svs", False),
        ("slides/dicom-camelyon/multiframe_camelyon_challenge_image.dcm", False),
    ],
)
def test_a_slide_hands_on_its_profile(shared_data: Path, file: str, has_profile: bool) -> None:
    with open_slide(shared_data / file, "S1") as slide:
        assert (slide.icc_profile is not None) == has_profile


def _swapped() -> bytes:
    """sRGB, but what it calls red is blue."""
    return SRGB.replace(b"rXYZ", b"....").replace(b"bXYZ", b"rXYZ").replace(b"....", b"bXYZ")


def test_a_profile_whose_red_is_blue_swaps_the_channels() -> None:
    pixels = noise((64, 64))
    assert np.abs(ToSrgb(_swapped(), "S1")(pixels).astype(int) - pixels[..., ::-1]).max() <= 1


def test_white_stays_white_and_the_input_stays_as_it_is(shared_data: Path) -> None:
    with open_slide(shared_data / "slides" / "tcga-cr-7395-01a-01-ts1.svs", "S1") as slide:
        assert slide.icc_profile is not None
        convert = ToSrgb(slide.icc_profile, "S1")
    white = np.full((8, 8, 3), 255, np.uint8)
    assert convert(white).min() >= 254
    pixels = noise((32, 32))
    before = pixels.copy()
    convert(pixels)
    assert np.array_equal(pixels, before)


def test_threads_share_a_transform(shared_data: Path) -> None:
    with open_slide(shared_data / "slides" / "tcga-cr-7395-01a-01-ts1.svs", "S1") as slide:
        assert slide.icc_profile is not None
        convert = ToSrgb(slide.icc_profile, "S1")
    pictures = [noise((96, 96), seed=seed) for seed in range(40)]
    alone = [convert(picture) for picture in pictures]
    with ThreadPoolExecutor(8) as pool:
        assert all(np.array_equal(a, b) for a, b in zip(alone, pool.map(convert, pictures), strict=True))


@pytest.mark.parametrize("profile", [b"", b"no profile", SRGB[:200]])
def test_a_broken_profile_is_refused_with_the_remedy(profile: bytes) -> None:
    with pytest.raises(UnreadableSlide, match=r"^S1: its ICC profile cannot be used .*: run without --icc"):
        ToSrgb(profile, "S1")


def test_a_profile_of_another_colour_model_is_refused() -> None:
    lab = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    with pytest.raises(UnreadableSlide, match="ICC profile"):
        ToSrgb(lab, "S1")
