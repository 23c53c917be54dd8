"""An MRXS slide of which a data file or the index was cut is refused; a whole one opens."""

import io
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from inference.errors import UnreadableSlide
from inference.slides.discovery import discover
from inference.slides.opening import open_slide

SIDE, ACROSS, DOWN = 64, 4, 3
ID = "0123456789ABCDEF0123456789ABCDEF"

INI = f"""\ufeff[GENERAL]
SLIDE_ID = {ID}
IMAGENUMBER_X = {ACROSS}
IMAGENUMBER_Y = {DOWN}
OBJECTIVE_MAGNIFICATION = 20
CameraImageDivisionsPerSide = 1
[HIERARCHICAL]
HIER_COUNT = 1
NONHIER_COUNT = 0
INDEXFILE = Index.dat
HIER_0_NAME = Slide zoom level
HIER_0_COUNT = 1
HIER_0_SECTION = ZOOM
HIER_0_VAL_0 = ZoomLevel_0
HIER_0_VAL_0_SECTION = LEVEL_0
[DATAFILE]
FILE_COUNT = 2
FILE_0 = Data0000.dat
FILE_1 = Data0001.dat
[LEVEL_0]
OVERLAP_X = 0
OVERLAP_Y = 0
MICROMETER_PER_PIXEL_X = 0.5
MICROMETER_PER_PIXEL_Y = 0.5
IMAGE_FORMAT = PNG
IMAGE_FILL_COLOR_BGR = 16777215
DIGITIZER_WIDTH = {SIDE}
DIGITIZER_HEIGHT = {SIDE}
IMAGE_CONCAT_FACTOR = 0
"""


def _write(folder: Path) -> Path:
    """A slide of one level whose images fill two data files; image n is grey 10 * n."""
    parts = folder / "s"
    parts.mkdir(parents=True)
    data, images = [b"", b""], []
    for number in range(ACROSS * DOWN):
        stream = io.BytesIO()
        Image.fromarray(np.full((SIDE, SIDE, 3), 10 * number, np.uint8)).save(stream, "PNG")
        file = number % 2
        images.append((number, len(data[file]), len(stream.getvalue()), file))
        data[file] += stream.getvalue()
    root = 5 + len(ID)
    pages = [images[:7], images[7:]]
    levels_at = root + 8
    page_at = [levels_at + 12, levels_at + 12 + 8 + 16 * 7]
    index = b"01.02" + ID.encode() + struct.pack("<ii", levels_at, 0)
    index += struct.pack("<iii", levels_at + 4, 0, page_at[0])
    for page, following in zip(pages, (page_at[1], 0), strict=True):
        index += struct.pack("<ii", len(page), following) + b"".join(struct.pack("<4i", *image) for image in page)
    (parts / "Slidedat.ini").write_text(INI, "utf-8")
    (parts / "Index.dat").write_bytes(index)
    for number in (0, 1):
        (parts / f"Data000{number}.dat").write_bytes(data[number])
    (folder / "s.mrxs").write_bytes(b"\0")
    return folder / "s.mrxs"


def test_a_whole_slide_opens(tmp_path: Path) -> None:
    path = _write(tmp_path)
    (ref,) = discover([path]).slides
    with open_slide(path, "S1", ref.files) as slide:
        assert slide.vendor == "mirax"
        found = slide.read_region(0, 0, 0, ACROSS * SIDE, DOWN * SIDE)[SIDE // 2 :: SIDE, SIDE // 2 :: SIDE, 0]
        assert (found.ravel() == 10 * np.arange(ACROSS * DOWN)).all()


@pytest.mark.parametrize("part", ["Data0000.dat", "Data0001.dat"])
@pytest.mark.parametrize("missing", [1, 100, 600])
def test_a_data_file_that_was_cut_is_told(tmp_path: Path, part: str, missing: int) -> None:
    path = _write(tmp_path)
    file = tmp_path / "s" / part
    size = file.stat().st_size
    file.write_bytes(file.read_bytes()[:-missing])
    with pytest.raises(UnreadableSlide) as raised:
        open_slide(path, "S1")
    assert str(raised.value) == (
        f"S1: truncated: a data file reaches byte {size:,} by the slide's index, and ends at {size - missing:,}, so "
        f"at least {missing:,} bytes are missing; copy it again"
    )


@pytest.mark.parametrize("missing", [1, 100, 200, 240])
def test_an_index_that_was_cut_is_told(tmp_path: Path, missing: int) -> None:
    path = _write(tmp_path)
    file = tmp_path / "s" / "Index.dat"
    file.write_bytes(file.read_bytes()[:-missing])
    with pytest.raises(UnreadableSlide, match=r"^S1: truncated: its index ends early; copy it again$"):
        open_slide(path, "S1")


def test_a_data_file_that_is_gone_is_the_slides_fault(tmp_path: Path) -> None:
    path = _write(tmp_path)
    (tmp_path / "s" / "Data0001.dat").unlink()
    with pytest.raises(UnreadableSlide, match=r"^S1: "):
        open_slide(path, "S1")


@pytest.mark.parametrize(
    "text", ["", "no sections", "[GENERAL]\nSLIDE_ID = x", INI.replace("FILE_COUNT = 2", "FILE_COUNT = two")]
)
def test_an_odd_key_file_is_left_to_openslide(tmp_path: Path, text: str) -> None:
    path = _write(tmp_path)
    (tmp_path / "s" / "Slidedat.ini").write_text(text, "utf-8")
    with pytest.raises(UnreadableSlide, match=r"^S1: no known slide format"):
        open_slide(path, "S1")
