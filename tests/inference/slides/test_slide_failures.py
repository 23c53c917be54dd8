"""Damage, and what happens to a slide while it is open: rows SL3 to SL6 of the failure catalogue."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import tifffile

from inference.errors import SlideChanged, TileReadError, UnreadableSlide
from inference.slides.opening import open_slide
from inference.slides.openslide_reader import OpenSlideReader
from inference.slides.reader import SlideReader
from tests.inference.slides.conftest import OpenHandles
from tests.inference.slides.known_slides import APERIO, APERIO_JP2000_RGB, smooth, tile_bytes
from tests.inference.slides.synthetic import Pixels, Size

SIZES: list[Size] = [(768, 512), (384, 256)]
TILE = 128

Opener = Callable[[Path, str], SlideReader]
OPENERS: list[Opener] = [open_slide, OpenSlideReader]
"""Compressed tiles, and OpenSlide alone: what becomes of a file while it is open must not depend on the reader."""


def _slide(path: Path, compression: str | None, *, other: bool = False) -> Path:
    """A slide; the other one has the same geometry and differs in every pixel."""
    shift = 60 if other else 0
    options = {"jpeg": {"level": 90}, "zlib": {"level": 1}}
    with tifffile.TiffWriter(path) as tiff:
        for level, size in enumerate(SIZES):
            tiff.write(
                np.roll(smooth(level, size), shift, axis=(0, 1)), tile=(TILE, TILE), photometric="rgb",
                compression=compression, compressionargs=options.get(compression or ""), subfiletype=int(level > 0),
                metadata=None, software=False, resolution=(2e4, 2e4), resolutionunit="CENTIMETER",
            )  # fmt: skip
    return path


REGIONS = [(0, 5, 7, 200, 150), (0, 430, 260, 100, 100), (1, 9, 3, 150, 120)]


def _reads(slide: SlideReader) -> list[Callable[[], Pixels]]:
    """Regions and reductions of both levels."""
    return [
        *(partial(_region, slide, region) for region in REGIONS),
        *(partial(_reduced, slide, level) for level in (0, 1)),
    ]


def _region(slide: SlideReader, region: tuple[int, int, int, int, int]) -> Pixels:
    return slide.read_region(*region)[..., :3]


def _reduced(slide: SlideReader, level: int) -> Pixels:
    return slide.read_reduced(level, 2, 10, 20, 80, 60).rgb


def _pixels(path: Path, opener: Opener) -> list[Pixels]:
    """What these reads give of a file, by a reader of its own: what is in its cache no change of the file can show."""
    with opener(path, "S1") as slide:
        return [read() for read in _reads(slide)]


def _old_or_changed(slide: SlideReader, old: list[Pixels]) -> int:
    """How many reads refuse since the slide changed; the others must give the old pixels."""
    changed = 0
    for read, truth in zip(_reads(slide), old, strict=True):
        try:
            found = read()
        except SlideChanged:
            changed += 1
        else:
            assert np.array_equal(found, truth), "pixels of another file"
    return changed


# --- SL3: garbage inside a tile ---------------------------------------------------------------------------------


@pytest.mark.parametrize("garbage", [b"\xaa", b"\x00", b"\xff", b"\xff\xd9", b"\x12\x9c\xe3\x58\x07"], ids=bytes.hex)
@pytest.mark.parametrize("compression", ["jpeg", "lzw"])
@pytest.mark.parametrize("opener", OPENERS)
def test_sl3_a_tile_whose_second_half_is_garbage_fails_alone_under_four_threads(
    tmp_path: Path, opener: Opener, compression: str, garbage: bytes
) -> None:
    path = _slide(tmp_path / "s.tif", compression)
    with opener(path, "S1") as slide:
        whole = slide.read_region(0, 0, 0, *SIZES[0])
    offset, count = tile_bytes(path, 0, 1, 2)
    with path.open("r+b") as file:
        file.seek(offset + count // 2)
        file.write((garbage * count)[: count - count // 2])
    barrier = threading.Barrier(4)

    def read(number: int) -> list[str]:
        barrier.wait(10)
        found = []
        for k in range(24):
            column, row = (k + number) % 6, (k + number) // 6 % 4
            try:
                tile = slide.read_region(0, column * TILE, row * TILE, TILE, TILE)
            except TileReadError:
                found.append(f"{column},{row}")
            else:
                assert np.array_equal(tile, whole[row * TILE : (row + 1) * TILE, column * TILE : (column + 1) * TILE])
        return found

    with opener(path, "S1") as slide, ThreadPoolExecutor(4) as pool:
        assert [*pool.map(read, range(4))] == [["2,1"]] * 4


@pytest.mark.parametrize(
    ("compression", "suffix"),
    [
        ("jpeg", ".tif"),
        ("lzw", ".tif"),
        (APERIO_JP2000_RGB, ".svs"),
        ("zlib", ".ome.tif"),
        ("webp", ".tif"),
    ],
)
def test_sl3_damage_in_the_tile_of_most_bytes_costs_that_tile_alone(
    tmp_path: Path, compression: str | int, suffix: str
) -> None:
    """It is the one that a reader looks at when it opens the slide; the reader and the levels stay the same."""
    path = tmp_path / f"s{suffix}"
    is_ome, is_aperio = suffix == ".ome.tif", suffix == ".svs"
    busy = smooth(0, SIZES[0])
    busy[TILE : 2 * TILE, 2 * TILE : 3 * TILE] = np.random.default_rng(0).integers(0, 256, (TILE, TILE, 3))
    options: dict[str | int, dict[str, object]] = {APERIO_JP2000_RGB: {"reversible": True, "level": 0}}
    with tifffile.TiffWriter(path, ome=is_ome) as tiff:
        for level, image in enumerate((busy, smooth(1, SIZES[1]))):
            tiff.write(
                image, tile=(TILE, TILE), photometric="rgb", compression=compression,
                compressionargs=options.get(compression), subfiletype=int(level > 0 and not is_aperio),
                subifds=int(is_ome and level == 0), metadata={"axes": "YXS"} if is_ome and level == 0 else None,
                description=APERIO if is_aperio else None, software=False,
            )  # fmt: skip
    with open_slide(path, "S1") as slide:
        sizes, kind = slide.level_sizes, slide.kind
        before = slide.read_region(0, 0, 0, TILE, TILE)
    assert sizes == tuple(SIZES)
    offset, count = tile_bytes(path, 0, 1, 2)
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xaa" * count)
    with open_slide(path, "S1") as slide:
        assert (slide.level_sizes, slide.kind) == (sizes, kind)
        with pytest.raises(TileReadError):
            slide.read_region(0, 2 * TILE + 5, TILE + 5, 10, 10)
        assert np.array_equal(slide.read_region(0, 0, 0, TILE, TILE), before)


# --- SL4: replaced by rename ------------------------------------------------------------------------------------


@pytest.mark.parametrize("compression", [None, "lzw", "zlib", "jpeg"])
@pytest.mark.parametrize("opener", OPENERS)
def test_sl4_a_slide_replaced_between_two_reads_is_never_mixed_with_the_other(
    tmp_path: Path, opener: Opener, compression: str | None
) -> None:
    """OpenSlide alone opens by name with every read, and gives the new file's pixels without a word."""
    path, other = _slide(tmp_path / "s.tif", compression), _slide(tmp_path / "o.tif", compression, other=True)
    old, new = _pixels(path, opener), _pixels(other, opener)
    assert not any(np.array_equal(a, b) for a, b in zip(old, new, strict=True)), "they do differ"
    with opener(path, "S1") as slide:
        other.replace(path)
        changed = _old_or_changed(slide, old)
        assert _old_or_changed(slide, old) == changed, "and it stays so"


@pytest.mark.parametrize(
    "opener",
    [
        open_slide,
        OpenSlideReader,
    ],
)
def test_sl4_a_twin_of_the_same_size_and_time_is_no_less_another_file(tmp_path: Path, opener: Opener) -> None:
    """As a copy that keeps times leaves it, of a slide whose tiles are not compressed."""
    path, other = _slide(tmp_path / "s.tif", None), _slide(tmp_path / "o.tif", None, other=True)
    status = path.stat()
    assert other.stat().st_size == status.st_size
    os.utime(other, ns=(status.st_atime_ns, status.st_mtime_ns))
    old = _pixels(path, opener)
    with opener(path, "S1") as slide:
        other.replace(path)
        _old_or_changed(slide, old)


@pytest.mark.parametrize(
    "compression",
    [
        "lzw",
        "jpeg",
        None,
    ],
)
def test_sl4_a_slide_replaced_while_openslide_reads_it_gives_old_pixels_or_is_refused(
    tmp_path: Path, compression: str | None, opened: OpenHandles
) -> None:
    path, other = _slide(tmp_path / "s.tif", compression), _slide(tmp_path / "o.tif", compression, other=True)
    old = _pixels(path, OpenSlideReader)
    with OpenSlideReader(path, "S1") as slide, ThreadPoolExecutor(1) as pool:
        opened.in_read.clear()
        opened.go_on.clear()
        reading = pool.submit(_reads(slide)[0])
        assert opened.in_read.wait(10)
        other.replace(path)
        opened.go_on.set()
        with suppress(SlideChanged):
            assert np.array_equal(reading.result(10), old[0]), "pixels of another file"
        assert _old_or_changed(slide, old) == len(old)


@pytest.mark.parametrize("compression", ["lzw", "jpeg"])
def test_sl4_threads_that_read_while_a_slide_is_replaced_see_the_old_one_and_then_are_told(
    tmp_path: Path, compression: str
) -> None:
    path, other = _slide(tmp_path / "s.tif", compression), _slide(tmp_path / "o.tif", compression, other=True)
    started, replaced = threading.Barrier(4), threading.Event()
    with open_slide(path, "S1") as slide:
        truth = slide.read_region(*REGIONS[0])

        def read() -> str:
            started.wait(10)
            done = False
            while not done:
                done = replaced.is_set()
                try:
                    found = slide.read_region(*REGIONS[0])
                except SlideChanged as error:
                    return str(error)
                assert np.array_equal(found, truth)
            return "never told"

        with ThreadPoolExecutor(3) as pool:
            reading = [pool.submit(read) for _ in range(3)]
            started.wait(10)
            slide.read_region(*REGIONS[1])
            other.replace(path)
            replaced.set()
            told = {done.result(60) for done in reading}
    assert told == {"S1: the file changed while it was being read; run again when it is complete"}


# --- SL5, SL6: written in place, deleted ------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["rewritten", "appended"])
@pytest.mark.parametrize("compression", ["lzw", "jpeg"])
@pytest.mark.parametrize("opener", OPENERS)
def test_sl5_a_slide_that_is_still_written_is_read_no_further(
    tmp_path: Path, opener: Opener, compression: str, how: str
) -> None:
    path, other = _slide(tmp_path / "s.tif", compression), _slide(tmp_path / "o.tif", compression, other=True)
    with opener(path, "S1") as slide:
        slide.read_region(0, 0, 0, 8, 8)
        status = path.stat()
        with path.open("ab" if how == "appended" else "r+b") as file:
            file.write(other.read_bytes() if how == "rewritten" else b"more of it")
        if path.stat().st_mtime_ns == status.st_mtime_ns:  # a clock coarser than the test is quick
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))
        for read in _reads(slide):
            with pytest.raises(SlideChanged) as raised:
                read()
            assert raised.value.retryable


@pytest.mark.parametrize("opener", OPENERS)
def test_sl6_a_slide_deleted_while_it_is_open_gives_old_pixels_or_says_that_it_is_gone(
    tmp_path: Path, opener: Opener
) -> None:
    path = _slide(tmp_path / "s.tif", "jpeg")
    old = _pixels(path, opener)
    with opener(path, "S1") as slide:
        path.unlink()
        for read, truth in zip(_reads(slide), old, strict=True):
            try:
                assert np.array_equal(read(), truth)
            except UnreadableSlide as error:
                assert str(error) == "S1: the file is gone; put it back or remove it from the cohort"  # noqa: PT017
