"""A TIFF is read right or refused with a remedy: orientation, sample formats, absurd sizes."""

import resource
from pathlib import Path

import numpy as np
import pytest
import tifffile

from inference.errors import UnreadableSlide
from inference.slides.opening import open_slide
from tests.inference.slides.synthetic import Pixels, coordinates, noise, write_pyramid
from tests.inference.slides.test_reader_refusals import tiff_header

APERIO = "Aperio Image Library v12.0.0 \n300x200 (128x128)|AppMag = 20|MPP = 0.5"


def _refusal(path: Path) -> str:
    with pytest.raises(UnreadableSlide) as raised:
        open_slide(path, "S1")
    message = str(raised.value)
    assert message.startswith("S1: ")
    assert "\n" not in message
    return message.removeprefix("S1: ")


# --- orientation --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("description", [None, APERIO])
@pytest.mark.parametrize("compression", [None, "lzw", "zlib", "jpeg"])
@pytest.mark.parametrize("orientation", range(10))
def test_a_slide_is_read_as_stored_or_refused_with_its_orientation(
    tmp_path: Path, orientation: int, compression: str | None, description: str | None
) -> None:
    """OpenSlide turns each tile that is no JPEG on its own: about 85 grey levels off. 0 and 9 stand for nothing."""
    path = tmp_path / ("s.svs" if description else "s.tif")
    truth = coordinates(0, (300, 200))
    options = {"level": 100} if compression == "jpeg" else None
    tifffile.imwrite(
        path, truth, tile=(128, 128), photometric="rgb", compression=compression, compressionargs=options,
        metadata=None, description=description, extratags=[(274, "H", 1, orientation, True)],
    )  # fmt: skip
    if 1 < orientation < 9:
        assert _refusal(path) == (
            f"its pixels are stored turned or mirrored (TIFF orientation {orientation}): rewrite it with `vips "
            "tiffload SLIDE x.v` and then `vips autorot x.v 'NEW.tif[tile,pyramid]'`"
        )
        return
    with open_slide(path, "S1") as slide:
        found = slide.read_region(0, 0, 0, 300, 200)[..., :3]
    if compression == "jpeg":
        assert np.abs(found.astype(int) - truth).mean() < 20, "chroma is subsampled"
    else:
        assert np.array_equal(found, truth)


@pytest.mark.parametrize("name", ["s.tif", "s.svs"])
def test_the_orientation_of_every_level_counts_and_that_of_a_label_does_not(tmp_path: Path, name: str) -> None:
    def write(level: int, label: int) -> Path:
        path = tmp_path / name
        with tifffile.TiffWriter(path) as tiff:
            for index, size in enumerate([(300, 200), (150, 100)]):
                tiff.write(
                    coordinates(index, size), tile=(128, 128), photometric="rgb", metadata=None,
                    subfiletype=index if name == "s.tif" else 0, description=None if name == "s.tif" else APERIO,
                    extratags=[(274, "H", 1, level if index else 1, True)],
                )  # fmt: skip
            tiff.write(noise((60, 50)), photometric="rgb", metadata=None, subfiletype=1,
                       extratags=[(274, "H", 1, label, True)])  # fmt: skip
        return path

    assert "TIFF orientation 3" in _refusal(write(3, 1))
    with open_slide(write(1, 3), "S1") as slide:
        assert slide.level_sizes == ((300, 200), (150, 100))


# --- sample formats -------------------------------------------------------------------------------------------------

RGB = coordinates(0, (300, 200))
GREY = RGB[..., 0]
ALPHA = np.full((200, 300, 1), 255, np.uint8)
MAP = (np.arange(256, dtype=np.uint16) * 257 * np.array([[1], [0], [1]], np.uint16)) ^ np.array(
    [[0], [32639], [65535]], np.uint16
)


@pytest.mark.parametrize(
    ("pixels", "options", "seen"),
    [
        (GREY, {"photometric": "minisblack"}, np.dstack([GREY] * 3)),
        (GREY, {"photometric": "miniswhite"}, 255 - np.dstack([GREY] * 3)),
        (GREY, {"photometric": "palette", "colormap": MAP}, (MAP // 257).astype(np.uint8).T[GREY]),
        (np.moveaxis(RGB, 2, 0), {"photometric": "rgb", "planarconfig": "separate"}, RGB),
        (np.dstack([RGB, ALPHA]), {"photometric": "rgb", "extrasamples": ["unassalpha"]}, RGB),
        (np.dstack([RGB, ALPHA]), {"photometric": "rgb", "extrasamples": ["assocalpha"]}, RGB),
        (RGB, {"photometric": "rgb", "compression": "lzw", "predictor": True}, RGB),
    ],
)
def test_8_bit_grey_palette_and_rgb_have_their_exact_pixels(
    tmp_path: Path, pixels: Pixels, options: dict[str, object], seen: Pixels
) -> None:
    path = tmp_path / "s.tif"
    tifffile.imwrite(path, pixels, tile=(128, 128), metadata=None, **options)
    with open_slide(path, "S1") as slide:
        assert np.array_equal(slide.read_region(0, 0, 0, 300, 200)[..., :3], seen)


@pytest.mark.parametrize(
    ("pixels", "options", "sort"),
    [
        (RGB.astype(np.uint16) * 16, {"photometric": "rgb"}, "16 bits per channel"),
        (GREY.astype(np.uint16), {"photometric": "minisblack"}, "16 bits per channel"),
        (RGB.astype(np.uint32), {"photometric": "rgb"}, "32 bits per channel"),
        ((RGB / 255).astype(np.float32), {"photometric": "rgb"}, "32 bits per channel"),
        (RGB.view(np.int8), {"photometric": "rgb"}, "signed or floating-point numbers"),
        (GREY > 100, {"photometric": "minisblack"}, "1 bit per channel"),
        (RGB[..., :2], {"photometric": "minisblack", "planarconfig": "contig"}, "2 channels"),
        (np.moveaxis(RGB[..., :2], 2, 0), {"photometric": "minisblack", "planarconfig": "separate"}, "2 channels"),
        (np.dstack([RGB, ALPHA]), {"photometric": "rgb", "extrasamples": ["unspecified"]}, "4 channels"),
        (np.dstack([RGB, ALPHA, ALPHA]), {"photometric": "rgb"}, "5 channels"),
        (RGB, {"photometric": "cielab"}, "an unusual colour model (TIFF photometric interpretation 8)"),
    ],
)
def test_pixels_that_would_be_read_as_something_else_are_refused(
    tmp_path: Path, pixels: Pixels, options: dict[str, object], sort: str
) -> None:
    path = tmp_path / "s.tif"
    tifffile.imwrite(path, pixels, tile=(128, 128), metadata=None, **options)
    assert _refusal(path) == (
        f"its pixels have {sort}, and only 8-bit RGB and grey are read: convert it to 8-bit RGB, scaled to its range, "
        "with square tiles"
    )


def test_channels_in_separate_images_are_refused(tmp_path: Path) -> None:
    """As OME-TIFF stores fluorescence: OpenSlide would read the first one alone."""
    path = tmp_path / "s.ome.tif"
    tifffile.imwrite(path, np.moveaxis(RGB, 2, 0), tile=(128, 128), photometric="minisblack", ome=True)
    assert _refusal(path).startswith("its 3 channels are separate images, of which only one would be read: ")


# --- absurd sizes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("width", "height", "tiles", "reason"),
    [
        (1 << 31, 256, 1 << 23, "claims to be 2,147,483,648 x 256 pixels, which no slide is"),
        (1 << 20, 1 << 20, 1, "claims to be 1,048,576 x 1,048,576 pixels, which no slide is"),
        (400_128, 400_128, 1563**2, "claims to be 400,128 x 400,128 pixels, but holds only 196,608 bytes of them"),
        (2560, 256, 9, "claims to be 2,560 x 256 pixels in 10 tiles, but lists 9"),
    ],
)
def test_a_size_that_the_file_cannot_hold_is_refused_before_anything_is_allocated(
    tmp_path: Path, width: int, height: int, tiles: int, reason: str
) -> None:
    path = tiff_header(tmp_path / "s.tif", width, height, tiles)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert _refusal(path) == f"{reason}: its header is damaged; copy it again"
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 512 << 10, "KiB"


def test_a_tile_too_large_to_read_is_refused_and_the_largest_is_decoded_once(tmp_path: Path) -> None:
    path = write_pyramid(tmp_path / "s.tif", [(300, 200)], coordinates, tile=4112)
    assert _refusal(path) == (
        "its compressed tiles have 4,112 x 4,112 pixels, too many to read: rewrite it with `vips tiffsave SLIDE "
        "'NEW.tif' --tile --pyramid --tile-width 256 --tile-height 256`"
    )
    with open_slide(write_pyramid(path, [(300, 200)], coordinates, tile=4096), "S1") as slide:
        assert np.array_equal(slide.read_region(0, 0, 0, 300, 200)[..., :3], RGB)


@pytest.mark.parametrize("size", [(300, 200), (30_000, 2000)])
def test_a_tiff_in_strips_is_told_how_to_become_a_slide(tmp_path: Path, size: tuple[int, int]) -> None:
    path = tmp_path / "s.tif"
    pixels = np.broadcast_to(np.uint8(200), (size[1], size[0], 3))
    tifffile.imwrite(path, pixels, photometric="rgb", compression="zlib", metadata=None)
    assert _refusal(path).startswith(f"a TIFF of {size[0]} x {size[1]} pixels in strips, not tiles, which is no slide")
