"""Reading by processes: the same pixels and errors as without, and a hung or dead one costs only its region."""

import logging
import os
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from inference.errors import (
    Broken,
    ReadStalled,
    SlideChanged,
    SourceUnavailable,
    TileReadError,
    UnreadableSlide,
)
from inference.slides.opening import open_slide
from inference.slides.process_reader import ProcessReader
from inference.slides.reader import MAX_REGION_PIXELS
from inference.slides.resolution import REDUCTIONS
from tests.inference.slides.synthetic import coordinates, write_pyramid
from tests.inference.slides.worker_doubles import (
    SIZE,
    TRUTH,
    assert_gone,
    assert_read,
    open_by_process,
    opened_by,
    write_faulty,
)

HANGING_S = 0.5  # a read of the slides made here takes a millisecond


# --- as without processes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "file",
    [
        "slides/CMU-1-Small-Region.svs",
        "slides/tcga-cr-7395-01a-01-ts1.svs",
        "slides/test3-DAPI-2-(387).ndpi",
        "derived/philips-sparse.tiff",
        "derived/leica.scn",
        "derived/dicom-jpeg/volume-1.dcm",
    ],
)
def test_a_process_tells_and_reads_what_the_reader_in_this_process_does(shared_data: Path, file: str) -> None:
    path = shared_data / file
    with open_slide(path, "S1") as inner, ProcessReader(path, "S1") as slide:
        for fact in ("level_sizes", "mpp", "vendor", "objective_power", "background", "icc_profile", "quickhash",
                     "reason"):  # fmt: skip
            assert getattr(slide, fact) == getattr(inner, fact), fact
        assert slide.kind == f"{inner.kind}, in a process of its own"
        for level, (width, height) in enumerate(inner.level_sizes):
            assert slide.stored_tile(level) == inner.stored_tile(level)
            region = (level, -3, height - 200, 301, 211)
            assert np.array_equal(slide.read_region(*region), inner.read_region(*region))
            for r in REDUCTIONS:
                sizes = zip(slide.block_size(level, r), inner.block_size(level, r), strict=True)
                assert all(ours % theirs == 0 for ours, theirs in sizes)
                block = (level, r, 0, 0, min(200, width // r), min(150, height // r))
                found, expected = slide.read_reduced(*block), inner.read_reduced(*block)
                assert np.array_equal(found.rgb, expected.rgb)
                assert (found.missing is None) == (expected.missing is None)
                if found.missing is not None and expected.missing is not None:
                    assert np.array_equal(found.missing, expected.missing)


def test_blocks_are_so_large_that_asking_for_them_costs_little(shared_data: Path) -> None:
    with ProcessReader(shared_data / "slides" / "CMU-1-Small-Region.svs", "S1") as slide:
        assert slide.block_size(0, 1) == (9 * 240, 3 * 240)
        assert slide.block_size(0, 2) == (9 * 120, 3 * 120)


def test_a_region_larger_than_the_shared_memory_so_far_is_read_whole(tmp_path: Path) -> None:
    size = (1800, 1300)
    truth = coordinates(0, size)
    path = write_pyramid(tmp_path / "s.tif", [size], lambda *_: truth)
    with ProcessReader(path, "S1") as slide:
        for _ in range(2):
            assert np.array_equal(slide.read_region(0, 1, 2, 20, 10)[..., :3], truth[2:12, 1:21])
            assert np.array_equal(slide.read_region(0, 0, 0, *size)[..., :3], truth)


def test_a_reduced_level_too_large_for_one_answer_comes_in_bands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference.slides.process_reader._MAX_REDUCED", 7000)
    with open_by_process(write_faulty(tmp_path)) as slide:
        assert np.array_equal(slide.read_reduced(0, 1, 0, 0, *SIZE).rgb, TRUTH)


@pytest.mark.parametrize("file", ["empty.svs", "html-error-page.svs", "cut-half.svs", "nothing-there.svs"])
def test_a_slide_that_does_not_open_is_refused_in_the_same_words(shared_data: Path, file: str) -> None:
    path = shared_data / "broken" / file
    with pytest.raises(UnreadableSlide) as ours:
        ProcessReader(path, "S1")
    with pytest.raises(UnreadableSlide) as theirs:
        open_slide(path, "S1")
    assert str(ours.value) == str(theirs.value)


def test_a_damaged_tile_fails_in_the_same_words_and_its_neighbours_are_read(shared_data: Path) -> None:
    path = shared_data / "broken" / "tile-garbage.svs"
    with open_slide(path, "S1") as inner, ProcessReader(path, "S1") as slide:
        for _ in range(2):
            messages = []
            for reader in (inner, slide):
                with pytest.raises(TileReadError) as raised:
                    reader.read_region(0, 1700, 1210, 100, 100)
                messages.append(str(raised.value))
            assert messages[0] == messages[1]
            assert np.array_equal(slide.read_region(0, 0, 0, 240, 240), inner.read_region(0, 0, 0, 240, 240))


@pytest.mark.parametrize(
    ("does", "kind", "message"),
    [
        ("damaged", TileReadError, "level 0 cannot be decoded here: µ"),
        ("lost", SourceUnavailable, "S1: the share is gone"),
        ("refused", ValueError, "S1: no such thing"),
        ("odd", RuntimeError, "the reader process met an unexpected error: KeyError"),
        ("too much", TileReadError, "its pixels need more memory than a reader process may take"),
    ],
)
def test_an_error_crosses_as_what_it_is_and_the_process_serves_on(
    tmp_path: Path, does: str, kind: type[Exception], message: str
) -> None:
    path = write_faulty(tmp_path, (does, (0, 0, 10, 10)))
    with open_by_process(path) as slide:
        with pytest.raises(kind) as raised:
            slide.read_region(0, 0, 0, 50, 50)
        assert type(raised.value) is kind
        assert str(raised.value) == message
        assert_read(slide, 100, 100)
    assert len(opened_by(path)) == 1


@pytest.mark.parametrize(
    "region", [(1, 0, 0, 5, 5), (0, 600, 0, 5, 5), (0, 0, 0, 0, 5), (0, 0, 0, MAX_REGION_PIXELS, 2), (-1, 0, 0, 5, 5)]
)
def test_what_no_reader_can_read_is_refused(tmp_path: Path, region: tuple[int, int, int, int, int]) -> None:
    with open_by_process(write_faulty(tmp_path)) as slide, pytest.raises(ValueError, match=r"^S1: "):
        slide.read_region(*region)


def test_no_such_level_or_reduction_is_refused(tmp_path: Path) -> None:
    with open_by_process(write_faulty(tmp_path)) as slide:
        for level, reduction in ((1, 1), (-1, 1), (0, 3)):
            with pytest.raises(ValueError, match="there is no level"):
                slide.read_reduced(level, reduction, 0, 0, 5, 5)


def test_what_a_decoder_prints_does_not_come_between_the_answers(tmp_path: Path) -> None:
    with open_by_process(write_faulty(tmp_path, ("babble", (0, 0, 600, 400)))) as slide:
        assert_read(slide, 10, 20)
        assert_read(slide, 30, 40)


def test_a_file_name_that_is_no_text_opens(tmp_path: Path) -> None:
    path = tmp_path / os.fsdecode(b"\xff \xfe.tif")
    try:
        write_pyramid(path, [(300, 200)], coordinates)
    except OSError:
        pytest.skip("this file system takes text only")
    with ProcessReader(path, "S1") as slide:
        assert np.array_equal(slide.read_region(0, 0, 0, 300, 200)[..., :3], coordinates(0, (300, 200)))


# --- hung and dead --------------------------------------------------------------------------------------------


def test_a_read_that_hangs_once_is_read_by_a_new_process(tmp_path: Path) -> None:
    path = write_faulty(tmp_path, ("hang once", (0, 0, 10, 10)))
    with open_by_process(path, HANGING_S) as slide:
        assert_read(slide, 0, 0)
        first, second = opened_by(path)
        assert_gone([first])
        assert first != second


def test_a_region_that_hangs_costs_itself_alone(tmp_path: Path) -> None:
    path = write_faulty(tmp_path, ("hang", (0, 0, 10, 10)))
    with open_by_process(path, HANGING_S) as slide:
        with pytest.raises(TileReadError, match=r"^the reader hung on this region for 0\.5 s$"):
            slide.read_region(0, 0, 0, 50, 50)
        assert_read(slide, 10, 10)
        assert len(opened_by(path)) == 3  # the first, one for the second try, one for what came after
    assert_gone(opened_by(path))


def test_a_part_of_a_region_that_hung_twice_is_tried_once(tmp_path: Path) -> None:
    """A tile of a block: a whole block's deadlines for each of its tiles would take hours."""
    path = write_faulty(tmp_path, ("hang", (0, 0, 10, 10)))
    with open_by_process(path, HANGING_S) as slide:
        for side, opened in ((200, 2), (50, 3), (40, 4)):
            with pytest.raises(TileReadError):
                slide.read_reduced(0, 2, 0, 0, side // 2, side // 2)
            assert len(opened_by(path)) == opened
        assert_read(slide, 50, 50)


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("crash", r"process died \(signal 11\)"),
        pytest.param("exit", r"process ended \(exit code 3\)", marks=pytest.mark.slow),
    ],
)
def test_three_regions_in_a_row_end_the_slide(tmp_path: Path, does: str, said: str) -> None:
    path = write_faulty(tmp_path, (does, (0, 0, 300, 400)))
    with open_by_process(path) as slide:
        with pytest.raises(TileReadError, match=f"^the reader {said} on this region$"):
            slide.read_region(0, 0, 0, 50, 50)
        assert_read(slide, 400, 0)  # breaks the row
        for x in (100, 150):
            with pytest.raises(TileReadError):
                slide.read_region(0, x, 0, 50, 50)
        with pytest.raises(ReadStalled, match=f"^S1: the reader {said}.*run again") as raised:
            slide.read_region(0, 200, 0, 50, 50)
        assert raised.value.retryable


def test_parts_of_a_lost_region_end_the_slide_too_if_nothing_else_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference.slides.process_reader.LOST_READS", 4)
    with open_by_process(write_faulty(tmp_path, ("exit", (0, 0, 600, 400)))) as slide:
        for n in range(3):
            with pytest.raises(TileReadError):
                slide.read_region(0, n, 0, 500 - n, 300)
        with pytest.raises(ReadStalled):
            slide.read_region(0, 20, 0, 100, 100)


def test_other_threads_read_on_while_one_hangs(tmp_path: Path) -> None:
    path = write_faulty(tmp_path, ("hang", (0, 0, 10, 10)))
    with open_by_process(path, 2.0, processes=2) as slide, ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(slide.read_region, 0, 0, 0, 50, 50)
        for x in range(50, 500):
            assert_read(slide, x, 100)
        assert not hanging.done()
        with pytest.raises(TileReadError):
            hanging.result()


@pytest.mark.parametrize(
    ("opening", "said"),
    [("hang", r"the slide did not open within 0\.5 s"), ("crash", r"its reader died \(signal 11\)")],
)
def test_a_slide_that_hangs_or_crashes_at_its_opening_is_given_up(tmp_path: Path, opening: str, said: str) -> None:
    path = write_faulty(tmp_path, opening=opening)
    with pytest.raises(ReadStalled, match=f"^S1: {said}: run again"):
        open_by_process(path, HANGING_S)
    (process,) = opened_by(path)
    assert_gone([process])


def test_a_slide_that_no_longer_opens_in_time_ends_with_the_first_read_that_hangs(tmp_path: Path) -> None:
    """A dead share: no need to try other regions."""
    path = write_faulty(tmp_path, ("hang", (0, 0, 10, 10)), opening="hang the second time")
    with open_by_process(path, HANGING_S) as slide:
        assert_read(slide, 100, 100)
        with pytest.raises(ReadStalled, match=r"^S1: the slide did not open within 0\.5 s: run again"):
            slide.read_region(0, 0, 0, 50, 50)
    assert_gone(opened_by(path))


def test_a_process_that_does_not_start_is_no_slides_fault(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    command = (sys.executable, "-c", "raise SystemExit('no such module')")
    with pytest.raises(Broken, match="no reader process starts"):
        ProcessReader(write_faulty(tmp_path), "S1", command=command)
    assert "ended (exit code 1) at its start; it last wrote: no such module" in caplog.text


def test_a_slide_that_changed_is_not_read_on_by_a_new_process(tmp_path: Path) -> None:
    path = write_faulty(tmp_path, ("hang once", (0, 0, 10, 10)))
    with open_by_process(path, HANGING_S) as slide:
        path.write_text(path.read_text() + " ")
        with pytest.raises(SlideChanged, match=r"^S1: "):
            slide.read_region(0, 0, 0, 50, 50)


def test_the_log_tells_what_a_dead_process_wrote_but_no_file_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with (
        caplog.at_level(logging.DEBUG),
        open_by_process(write_faulty(tmp_path, ("crash", (0, 0, 10, 10)))) as slide,
        pytest.raises(TileReadError),
    ):
        slide.read_region(0, 0, 0, 50, 50)
    lines = {record.message for record in caplog.records if record.levelno >= logging.WARNING}
    said = (
        "S1: a reader process died (signal 11) and is replaced; it last wrote: TIFFReadDirectory: …: bad directory in …"
    )
    assert lines == {said}
    assert "4711" not in caplog.text
    assert capfd.readouterr() == ("", "")
