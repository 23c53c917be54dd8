"""Damage inside a slide that opens: it costs the tiles it lies in, on every level and for every thread."""

import resource
import shutil
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import tifffile

from inference.errors import SourceUnavailable, TileReadError, UnreadableSlide
from inference.slides.opening import open_slide
from inference.slides.reader import SlideReader
from tests.inference.slides.conftest import OpenHandles
from tests.inference.slides.synthetic import Size, noise, write_pyramid

SIZES: list[Size] = [(1603, 1197), (801, 598)]
"""Downsample 2.0012 x 2.0017: OpenSlide interpolates on the second level."""


def _open(path: Path) -> SlideReader:
    return open_slide(path, "S1")


def _stored_tile_bytes(path: Path, level: int, row: int, col: int) -> tuple[int, int, int]:
    """Offset and length of a compressed tile, and where its length is written."""
    with tifffile.TiffFile(path) as tiff:
        page = tiff.pages[level]
        index = row * -(-page.imagewidth // page.tilewidth) + col
        counts = page.tags["TileByteCounts"]
        return (
            page.dataoffsets[index],
            page.databytecounts[index],
            counts.valueoffset + index * counts.valuebytecount // counts.count,
        )


@pytest.fixture
def jpeg_pyramid(tmp_path: Path) -> Path:
    """Two levels of 128-pixel JPEG tiles; OpenSlide interpolates on the second."""
    return write_pyramid(
        tmp_path / "s.tif", SIZES, lambda _, size: noise(size), compression="jpeg", tile=128, mpp=(0.25, 0.25)
    )


@pytest.mark.parametrize("level", [0, 1])
def test_a_damaged_tile_fails_alone_on_every_level(jpeg_pyramid: Path, level: int, opened: OpenHandles) -> None:
    with _open(jpeg_pyramid) as slide:
        before = [slide.read_region(level, x, 0, 128, 128) for x in (0, 128, 256)]
    offset, count, _ = _stored_tile_bytes(jpeg_pyramid, level, 0, 1)
    with jpeg_pyramid.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xaa" * count)
    with _open(jpeg_pyramid) as slide:
        for _ in range(2):
            with pytest.raises(TileReadError, match=f"^level {level} cannot be decoded here: ") as raised:
                slide.read_region(level, 130, 5, 100, 100)
            assert raised.value.code == "read_error"
            assert str(jpeg_pyramid.parent) not in str(raised.value)
            assert np.array_equal(slide.read_region(level, 0, 0, 128, 128), before[0])
            assert np.array_equal(slide.read_region(level, 256, 0, 128, 128), before[2])
        assert opened.now <= 1, "a handle that met damage is closed, not kept"
    assert opened.now == 0


def test_a_damaged_first_tile_does_not_change_how_the_rest_of_a_level_is_read(jpeg_pyramid: Path) -> None:
    """Only the corner can be compared between the readers; damage there is no reason to interpolate elsewhere."""
    with _open(jpeg_pyramid) as slide:
        before = slide.read_region(1, 300, 200, 100, 100)
    offset, count, _ = _stored_tile_bytes(jpeg_pyramid, 1, 0, 0)
    with jpeg_pyramid.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xaa" * count)
    with _open(jpeg_pyramid) as slide:
        assert np.array_equal(slide.read_region(1, 300, 200, 100, 100), before)
        with pytest.raises(TileReadError):
            slide.read_region(1, 0, 0, 10, 10)


@pytest.mark.parametrize("level", [0, 1])
def test_a_tile_that_claims_to_be_enormous_fails_and_nothing_is_allocated(jpeg_pyramid: Path, level: int) -> None:
    offset, count, _ = _stored_tile_bytes(jpeg_pyramid, level, 0, 1)
    data = jpeg_pyramid.read_bytes()
    frame = data.index(b"\xff\xc0", offset, offset + count)
    with jpeg_pyramid.open("r+b") as file:
        file.seek(frame + 5)
        file.write(struct.pack(">HH", 65000, 65000))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with _open(jpeg_pyramid) as slide:
        with pytest.raises(TileReadError):
            slide.read_region(level, 130, 5, 100, 100)
        assert (slide.read_region(level, 0, 0, 128, 128)[..., 3] == 255).all()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10, "KiB"


@pytest.mark.parametrize("level", [0, 1])
def test_an_empty_tile_is_transparent_on_every_level(jpeg_pyramid: Path, level: int) -> None:
    *_, length_at = _stored_tile_bytes(jpeg_pyramid, level, 0, 1)
    with jpeg_pyramid.open("r+b") as file:
        file.seek(length_at)
        file.write(bytes(2))
    with _open(jpeg_pyramid) as slide:
        assert (slide.read_region(level, 140, 10, 80, 80) == 0).all()
        assert (slide.read_region(level, 10, 10, 80, 80)[..., 3] == 255).all()


def test_four_threads_that_meet_damage_at_once_disturb_nobody(shared_data: Path, opened: OpenHandles) -> None:
    barrier = threading.Barrier(4)

    def read(number: int) -> list[str]:
        barrier.wait()
        found = []
        for _ in range(5):
            for x, y in ((1700, 1250), (100 + number, 2000)):
                try:
                    slide.read_region(0, x, y, 64, 64)
                    found.append("ok")
                except TileReadError as error:
                    found.append(error.code)
        return found

    with _open(shared_data / "broken" / "tile-garbage.svs") as slide:
        with ThreadPoolExecutor(4) as pool:
            assert [*pool.map(read, range(4))] == [["read_error", "ok"] * 5] * 4
        assert opened.most <= 4
    assert opened.now == 0


def test_a_slide_that_vanishes_is_told_apart_from_damage_and_reads_on_when_it_is_back(
    shared_data: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    path = Path(shutil.copy(shared_data / "broken" / "tile-garbage.svs", folder / "s.svs"))
    with _open(path) as slide:
        with pytest.raises(TileReadError):
            slide.read_region(0, 1700, 1250, 64, 64)
        path.rename(tmp_path / "away.svs")
        with pytest.raises(UnreadableSlide, match="gone"):
            slide.read_region(0, 0, 0, 64, 64)
        folder.rmdir()
        with pytest.raises(SourceUnavailable):
            slide.read_region(0, 0, 0, 64, 64)
        folder.mkdir()
        (tmp_path / "away.svs").rename(path)
        assert (slide.read_region(0, 0, 0, 64, 64)[..., 3] == 255).all()
