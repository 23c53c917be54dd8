"""A slide cut anywhere is refused when it is opened, with what is missing; one that is whole is not."""

import os
import shutil
import struct
from collections.abc import Sequence
from pathlib import Path

import pytest
import tifffile

from inference.errors import SlideChanged, UnreadableSlide
from inference.slides._dicom_length import truncated_dicom
from inference.slides._tiff_tables import read_claims
from inference.slides.opening import open_slide
from tests.inference.slides.synthetic import coordinates, write_pyramid

WHOLE = [
    "slides/CMU-1-Small-Region.svs",
    "slides/tcga-cr-7395-01a-01-ts1.svs",
    "slides/test3-DAPI-2-(387).ndpi",
    "slides/dicom-camelyon/multiframe_camelyon_challenge_image.dcm",
    "slides/dicom-highdicom/sm_image.dcm",
    "derived/aperio-3level-jpeg.svs",
    "derived/aperio-3level-jp2k-nompp.svs",
    "derived/generic-pyramid-jpeg.tiff",
    "derived/leica.scn",
    "derived/ome-pyramid.ome.tif",
    "derived/philips-sparse.tiff",
    "derived/ventana.bif",
    "derived/dicom-jpeg/volume-0.dcm",
    "derived/dicom-jpeg/volume-1.dcm",
    "derived/dicom-jpeg/volume-2.dcm",
    "derived/dicom-jpeg/label.dcm",
    "broken/mpp-zero.svs",
    "broken/no-mpp.svs",
    "broken/tile-garbage.svs",
    "broken/tile-zero-length.svs",
]


def _refusal(path: Path, files: Sequence[Path] = ()) -> str:
    with pytest.raises(UnreadableSlide) as raised:
        open_slide(path, "S1", files)
    message = str(raised.value)
    assert message.startswith("S1: ")
    assert "\n" not in message
    return message.removeprefix("S1: ")


@pytest.mark.parametrize("file", WHOLE)
def test_a_slide_cut_by_any_amount_is_refused_and_the_whole_one_opens(
    shared_data: Path, tmp_path: Path, file: str
) -> None:
    with open_slide(shared_data / file, "S1"):
        pass
    data = (shared_data / file).read_bytes()
    path = tmp_path / Path(file).name
    for missing in (1, 8, 100, 20_000, len(data) // 10, len(data) // 2):
        if missing < len(data):
            path.write_bytes(data[:-missing])
            assert _refusal(path).startswith("truncated: "), missing


@pytest.mark.parametrize("percent", [90, 95, 99, 99.9])
def test_a_slide_that_lost_its_last_directories_is_told_what_is_missing(
    shared_data: Path, tmp_path: Path, percent: float
) -> None:
    data = (shared_data / "slides" / "CMU-1-Small-Region.svs").read_bytes()
    path = tmp_path / "cut.svs"
    end = int(len(data) * percent / 100)
    path.write_bytes(data[:end])
    message = _refusal(path)
    assert f"the file ends at {end:,}, so at least " in message
    assert message.endswith("bytes are missing; copy it again")


@pytest.mark.parametrize("big", [False, True])
def test_the_claims_of_a_tiff_end_exactly_at_its_end(tmp_path: Path, big: bool) -> None:
    path = tmp_path / "s.tif"
    with tifffile.TiffWriter(path, bigtiff=big) as tiff:
        for level, shape in enumerate([(700, 500), (350, 250)]):
            tiff.write(coordinates(level, shape), tile=(128, 128), photometric="rgb", subfiletype=level, metadata=None)
    size = path.stat().st_size
    claims = read_claims(path)
    assert claims is not None
    assert size - 2 < claims.end <= size, "a writer may pad to an even length"
    assert [directory.size for directory in claims.directories] == [(700, 500), (350, 250)]
    for missing in (size - claims.end + 1, 1000, size // 2, size - 40):
        path.write_bytes(path.read_bytes()[: size - missing])
        assert _refusal(path).startswith("truncated: ")


@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize("field", ["first directory", "next directory"])
def test_a_directory_past_the_end_is_a_truncated_slide(tmp_path: Path, big: bool, field: str) -> None:
    path = tmp_path / "s.tif"
    tifffile.imwrite(path, coordinates(0, (300, 200)), tile=(128, 128), photometric="rgb", metadata=None, bigtiff=big)
    with tifffile.TiffFile(path) as tiff:
        at = tiff.pages[0].offset + (8 + 20 * len(tiff.pages[0].tags) if big else 2 + 12 * len(tiff.pages[0].tags))
    if field == "first directory":
        at = 8 if big else 4
    with path.open("r+b") as file:
        file.seek(at)
        file.write(struct.pack("<Q" if big else "<I", 123_456_789))
    assert _refusal(path).startswith("truncated: its data reach byte 123,456,789, the file ends at ")


def test_levels_in_subdirectories_count(shared_data: Path, tmp_path: Path) -> None:
    """OpenSlide does not read them, but a copy without them is not the slide."""
    data = (shared_data / "derived" / "ome-pyramid.ome.tif").read_bytes()
    with tifffile.TiffFile(shared_data / "derived" / "ome-pyramid.ome.tif") as tiff:
        page = tiff.pages[0]
        end = max(a + b for a, b in zip(page.dataoffsets, page.databytecounts, strict=True))
    path = tmp_path / "s.ome.tif"
    path.write_bytes(data[: end + 10])
    assert end < len(data) - 100_000
    assert _refusal(path).startswith("truncated: ")


def test_an_ndpi_slide_past_4_gib_that_lost_its_directories_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "s.ndpi"
    path.write_bytes(b"II*\0" + struct.pack("<Q", 5 << 30) + bytes(1000))
    assert _refusal(path).startswith("truncated: its data reach byte 5,368,709,120, the file ends at 1,012")
    with path.open("r+b") as file:
        file.truncate((4 << 30) + 100)  # no bytes are written
    assert _refusal(path).startswith("truncated: its data reach byte 5,368,709,120, ")


def test_a_plain_tiff_called_ndpi_is_read_as_what_it_is(tmp_path: Path) -> None:
    with open_slide(write_pyramid(tmp_path / "s.ndpi", [(300, 200)], coordinates), "S1") as slide:
        assert slide.level_sizes == ((300, 200),)


def test_sparse_tiles_are_no_missing_bytes(tmp_path: Path) -> None:
    """A tile of no bytes has no offset, or one that means nothing."""
    path = write_pyramid(tmp_path / "s.tif", [(300, 200)], coordinates, tile=128)
    for offset in (0, 0xFFFFFFFF):
        with tifffile.TiffFile(path) as tiff:
            places = [tiff.pages[0].tags[name].valueoffset for name in ("TileOffsets", "TileByteCounts")]
            sizes = [tiff.pages[0].tags[name].valuebytecount // 6 for name in ("TileOffsets", "TileByteCounts")]
        with path.open("r+b") as file:
            for at, size, value in zip(places, sizes, (offset, 0), strict=True):
                file.seek(at)
                file.write(value.to_bytes(size, "little"))
        with open_slide(path, "S1") as slide:
            assert (slide.read_region(0, 0, 0, 128, 128) == 0).all()
            assert (slide.read_region(0, 128, 0, 100, 100)[..., 3] == 255).all()


# --- several files ------------------------------------------------------------------------------------------------


@pytest.fixture
def series(shared_data: Path, tmp_path: Path) -> list[Path]:
    folder = shutil.copytree(shared_data / "derived" / "dicom-jpeg", tmp_path / "series")
    others = sorted(path for path in folder.iterdir() if path.name != "volume-2.dcm")
    return [folder / "volume-2.dcm", *others]


@pytest.mark.parametrize("keep", [1500, 2784, 3000, -1, -2000])
def test_a_series_with_one_file_cut_is_refused(series: list[Path], keep: int) -> None:
    """OpenSlide leaves out what it cannot read: the slide would lose a level without a word."""
    path = series[0].with_name("volume-1.dcm")
    path.write_bytes(path.read_bytes()[:keep])
    assert _refusal(series[0], series).startswith("truncated: ")


def test_padding_after_the_pixels_of_a_dicom_file_is_no_harm(series: list[Path]) -> None:
    path = series[0]
    path.write_bytes(path.read_bytes() + b"\xfc\xff\xfc\xffOB\0\0" + struct.pack("<I", 64) + bytes(64))
    assert truncated_dicom(path) is None
    path.write_bytes(path.read_bytes()[:-200])
    assert "bytes are missing" in (truncated_dicom(path) or "")


@pytest.mark.timeout(20)
def test_a_pipe_in_place_of_any_file_of_a_slide_hangs_no_read(series: list[Path]) -> None:
    """OpenSlide opens files by name with every read, and waits for the other end of a pipe."""
    with open_slide(series[0], "S1", series) as slide:
        assert (slide.read_region(0, 0, 0, 10, 10)[..., 3] == 255).all()
        path = series[0].with_name("volume-1.dcm")
        path.unlink()
        os.mkfifo(path)
        with pytest.raises(UnreadableSlide, match=r"^S1: not a regular file$"):
            slide.read_region(0, 0, 0, 10, 10)


# --- changes ------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(20)
def test_a_pipe_in_place_of_a_slide_that_is_open_hangs_no_read(tmp_path: Path) -> None:
    path = write_pyramid(tmp_path / "s.tif", [(1603, 1197), (801, 598)], coordinates)
    with open_slide(path, "S1") as slide:
        for level in (0, 1):
            slide.read_region(level, 0, 0, 10, 10)
        path.unlink()
        os.mkfifo(path)
        for level in (0, 1):
            with pytest.raises(UnreadableSlide, match="not a regular file"):
                slide.read_region(level, 300, 300, 10, 10)


@pytest.mark.parametrize("level", [0, 1])
def test_a_slide_that_changed_is_read_no_further(tmp_path: Path, level: int) -> None:
    path = write_pyramid(tmp_path / "s.tif", [(1603, 1197), (801, 598)], coordinates)
    other = write_pyramid(tmp_path / "other.tif", [(1603, 1197), (801, 598)], lambda k, size: coordinates(k + 1, size))
    with open_slide(path, "S1") as slide:
        slide.read_region(level, 0, 0, 10, 10)
        other.replace(path)
        with pytest.raises(SlideChanged, match=r"^S1: the file changed") as raised:
            slide.read_region(level, 0, 0, 10, 10)
        assert raised.value.retryable
