"""Reading by processes: the same pixels and errors as without, and a hung or dead one costs only its region."""

import logging
import os
import resource
import select
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
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
from tests.inference.slides.worker_doubles import COMMAND, REPO, SIZE, opened_by, write_faulty

TRUTH = coordinates(0, SIZE)
HANGING_S = 0.5  # a read of the slides made here takes a millisecond


def _faulty(path: Path, timeout_s: float = 60.0, processes: int = 1) -> ProcessReader:
    return ProcessReader(path, "S1", timeout_s=timeout_s, processes=processes, command=COMMAND)


def _assert_read(slide: ProcessReader, x: int, y: int, side: int = 50) -> None:
    found = slide.read_region(0, x, y, side, side)
    assert np.array_equal(found[..., :3], TRUTH[y : y + side, x : x + side])
    assert found[..., 3].min() == 255


def _assert_gone(pids: list[int]) -> None:
    """Neither running nor a zombie."""
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


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
    with _faulty(write_faulty(tmp_path)) as slide:
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
    with _faulty(path) as slide:
        with pytest.raises(kind) as raised:
            slide.read_region(0, 0, 0, 50, 50)
        assert type(raised.value) is kind
        assert str(raised.value) == message
        _assert_read(slide, 100, 100)
    assert len(opened_by(path)) == 1


@pytest.mark.parametrize(
    "region", [(1, 0, 0, 5, 5), (0, 600, 0, 5, 5), (0, 0, 0, 0, 5), (0, 0, 0, MAX_REGION_PIXELS, 2), (-1, 0, 0, 5, 5)]
)
def test_what_no_reader_can_read_is_refused(tmp_path: Path, region: tuple[int, int, int, int, int]) -> None:
    with _faulty(write_faulty(tmp_path)) as slide, pytest.raises(ValueError, match=r"^S1: "):
        slide.read_region(*region)


def test_no_such_level_or_reduction_is_refused(tmp_path: Path) -> None:
    with _faulty(write_faulty(tmp_path)) as slide:
        for level, reduction in ((1, 1), (-1, 1), (0, 3)):
            with pytest.raises(ValueError, match=r"^S1: "):
                slide.read_reduced(level, reduction, 0, 0, 5, 5)


def test_what_a_decoder_prints_does_not_come_between_the_answers(tmp_path: Path) -> None:
    with _faulty(write_faulty(tmp_path, ("babble", (0, 0, 600, 400)))) as slide:
        _assert_read(slide, 10, 20)
        _assert_read(slide, 30, 40)


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
    with _faulty(path, HANGING_S) as slide:
        _assert_read(slide, 0, 0)
        first, second = opened_by(path)
        _assert_gone([first])
        assert first != second


def test_a_region_that_hangs_costs_itself_alone(tmp_path: Path) -> None:
    path = write_faulty(tmp_path, ("hang", (0, 0, 10, 10)))
    with _faulty(path, HANGING_S) as slide:
        with pytest.raises(TileReadError, match=r"^the reader hung on this region for 0\.5 s$"):
            slide.read_region(0, 0, 0, 50, 50)
        _assert_read(slide, 10, 10)
        assert len(opened_by(path)) == 3  # the first, one for the second try, one for what came after
    _assert_gone(opened_by(path))


def test_a_part_of_a_region_that_hung_twice_is_tried_once(tmp_path: Path) -> None:
    """A tile of a block: a whole block's deadlines for each of its tiles would take hours."""
    path = write_faulty(tmp_path, ("hang", (0, 0, 10, 10)))
    with _faulty(path, HANGING_S) as slide:
        for side, opened in ((200, 2), (50, 3), (40, 4)):
            with pytest.raises(TileReadError):
                slide.read_reduced(0, 2, 0, 0, side // 2, side // 2)
            assert len(opened_by(path)) == opened
        _assert_read(slide, 50, 50)


@pytest.mark.parametrize(
    ("does", "said"),
    [
        ("crash", r"process died \(signal 11\)"),
        pytest.param("exit", r"process ended \(exit code 3\)", marks=pytest.mark.slow),
    ],
)
def test_three_regions_in_a_row_end_the_slide(tmp_path: Path, does: str, said: str) -> None:
    path = write_faulty(tmp_path, (does, (0, 0, 300, 400)))
    with _faulty(path) as slide:
        for x in (0, 50):
            with pytest.raises(TileReadError, match=f"^the reader {said} on this region$"):
                slide.read_region(0, x, 0, 50, 50)
        _assert_read(slide, 400, 0)  # breaks the row
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
    with _faulty(write_faulty(tmp_path, ("exit", (0, 0, 600, 400)))) as slide:
        for n in range(3):
            with pytest.raises(TileReadError):
                slide.read_region(0, n, 0, 500 - n, 300)
        with pytest.raises(ReadStalled):
            slide.read_region(0, 20, 0, 100, 100)


def test_other_threads_read_on_while_one_hangs(tmp_path: Path) -> None:
    path = write_faulty(tmp_path, ("hang", (0, 0, 10, 10)))
    with _faulty(path, 2.0, processes=2) as slide, ThreadPoolExecutor(1) as pool:
        hanging = pool.submit(slide.read_region, 0, 0, 0, 50, 50)
        for x in range(50, 500):
            _assert_read(slide, x, 100)
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
        _faulty(path, HANGING_S)
    (process,) = opened_by(path)
    _assert_gone([process])


def test_a_slide_that_no_longer_opens_in_time_ends_with_the_first_read_that_hangs(tmp_path: Path) -> None:
    """A dead share: no need to try other regions."""
    path = write_faulty(tmp_path, ("hang", (0, 0, 10, 10)), opening="hang the second time")
    with _faulty(path, HANGING_S) as slide:
        _assert_read(slide, 100, 100)
        with pytest.raises(ReadStalled, match=r"^S1: the slide did not open within 0\.5 s: run again"):
            slide.read_region(0, 0, 0, 50, 50)
    _assert_gone(opened_by(path))


def test_a_process_that_does_not_start_is_no_slides_fault(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    command = (sys.executable, "-c", "raise SystemExit('no such module')")
    with pytest.raises(Broken, match="no reader process starts"):
        ProcessReader(write_faulty(tmp_path), "S1", command=command)
    assert "ended (exit code 1) at its start; it last wrote: no such module" in caplog.text


def test_a_slide_that_changed_is_not_read_on_by_a_new_process(tmp_path: Path) -> None:
    path = write_faulty(tmp_path, ("hang once", (0, 0, 10, 10)))
    with _faulty(path, HANGING_S) as slide:
        path.write_text(path.read_text() + " ")
        with pytest.raises(SlideChanged, match=r"^S1: "):
            slide.read_region(0, 0, 0, 50, 50)


def test_the_log_tells_what_a_dead_process_wrote_but_no_file_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with (
        caplog.at_level(logging.DEBUG),
        _faulty(write_faulty(tmp_path, ("crash", (0, 0, 10, 10)))) as slide,
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


# --- processes come and go ------------------------------------------------------------------------------------


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_the_list_of_processes_shows_neither_the_file_nor_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIDE_KEY_SECRET", "very secret")
    path = write_faulty(tmp_path)
    with _faulty(path):
        process = Path(f"/proc/{opened_by(path)[0]}")
        assert path.name.encode() not in (process / "cmdline").read_bytes()
        assert b"very secret" not in (process / "environ").read_bytes()
        assert b"Max core file size        0 " in (process / "limits").read_bytes()


def test_as_many_processes_as_reads_at_once_and_no_more(tmp_path: Path) -> None:
    path = write_faulty(tmp_path, ("meet", (0, 0, 10, 10)))
    os.mkfifo(path.with_suffix(".pipe"))
    with _faulty(path, processes=2) as slide:
        for x in range(100, 110):
            _assert_read(slide, x, 0)
        assert len(opened_by(path)) == 1
        with ThreadPoolExecutor(8) as pool:
            meeting = [pool.submit(_assert_read, slide, 0, 0) for _ in range(2)]
            for done in [*meeting, *(pool.submit(_assert_read, slide, x, 9 * x) for x in range(10, 38))]:
                done.result()
        assert len(opened_by(path)) == 2


def test_closing_ends_a_hung_read_at_once(tmp_path: Path) -> None:
    path = write_faulty(tmp_path, ("hang", (0, 0, 10, 10)))
    slide = _faulty(path)
    with ThreadPoolExecutor(2) as pool:
        hanging = [pool.submit(slide.read_region, 0, 0, 0, 50, 50) for _ in range(2)]  # one of them waits its turn
        while not slide._pool._used:
            threading.Event().wait(0.001)
        slide.close()
        for read in hanging:
            with pytest.raises(ValueError, match=r"^S1: the slide is closed$"):
                read.result(20)
    slide.close()
    with pytest.raises(ValueError, match=r"^S1: the slide is closed$"):
        slide.read_region(0, 100, 100, 5, 5)
    _assert_gone(opened_by(path))


def test_ctrl_c_is_left_to_the_parent(tmp_path: Path) -> None:
    path = write_faulty(tmp_path)
    with _faulty(path) as slide:
        (pid,) = opened_by(path)
        assert os.getpgid(pid) == pid  # a terminal does not reach it either
        os.kill(pid, signal.SIGINT)
        _assert_read(slide, 0, 0)
        assert opened_by(path) == [pid]


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs a way to wait for a process that is no child")
@pytest.mark.parametrize("fault", ["hang", "babble"])
def test_no_process_outlives_its_parent(tmp_path: Path, fault: str) -> None:
    """Neither one that hangs nor one that is idle."""
    path = write_faulty(tmp_path, (fault, (0, 0, 10, 10)))
    with subprocess.Popen([*COMMAND, str(path)], stdout=subprocess.PIPE) as parent:
        assert parent.stdout
        assert parent.stdout.readline() == b"open\n"
        (pid,) = opened_by(path)
        ended = os.pidfd_open(pid)
        try:
            poll = select.poll()
            poll.register(ended, select.POLLIN)
            assert not poll.poll(0)
            parent.kill()
            assert poll.poll(20_000)
        finally:
            os.close(ended)


def test_a_forked_process_neither_reads_nor_ends_its_parents_processes(tmp_path: Path) -> None:
    path = write_faulty(tmp_path)
    script = textwrap.dedent(
        """
        import os, sys
        from pathlib import Path
        from inference.slides.process_reader import ProcessReader
        from tests.inference.slides.worker_doubles import COMMAND
        slide = ProcessReader(Path(sys.argv[1]), "S1", command=COMMAND)
        before = os.listdir("/dev/fd")
        child = os.fork()
        if not child:
            try:
                slide.read_region(0, 0, 0, 5, 5)
            except ValueError as error:
                slide.close()
                kept = len(before) - len(os.listdir("/dev/fd"))
                print(error, kept, flush=True)
            os._exit(0)
        os.waitpid(child, 0)
        print(slide.read_region(0, 7, 5, 1, 1).tolist())
        slide.close()
        """
    )
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], cwd=REPO, capture_output=True, text=True, timeout=60
    )
    assert done.stderr == ""
    told, pixel = done.stdout.splitlines()
    assert told == "S1: the slide was opened before a fork: open it in this process 4"
    assert pixel == f"[[{[*TRUTH[5, 7].tolist(), 255]}]]"
    assert len(opened_by(path)) == 1


def _descriptors() -> list[str]:
    return sorted(path.name for path in Path("/dev/fd").iterdir())


@contextmanager
def _room_for_files(room: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest_free = os.dup(0)
    os.close(lowest_free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (lowest_free + room, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.parametrize("room", [0, 1, 5])
def test_too_many_open_files_are_no_slides_fault_and_pass(tmp_path: Path, room: int) -> None:
    path = write_faulty(tmp_path)
    with (
        _room_for_files(room),
        pytest.raises(SourceUnavailable, match=r"^S1: no reader process can be started") as said,
    ):
        _faulty(path)
    assert said.value.retryable
    with _faulty(path) as slide:
        _assert_read(slide, 0, 0)


def test_with_room_for_one_process_only_all_threads_share_it(tmp_path: Path) -> None:
    path = write_faulty(tmp_path)
    with _faulty(path, processes=4) as slide:
        _assert_read(slide, 0, 0)
        with _room_for_files(3), ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda x: _assert_read(slide, x, 2 * x), range(100)))
        _assert_read(slide, 0, 0)
    assert len(opened_by(path)) == 1


def test_descriptors_are_given_back_under_a_limit_of_few(tmp_path: Path) -> None:
    """Also those of processes that died."""
    path = write_faulty(tmp_path, ("exit", (0, 0, 10, 10)))
    before = _descriptors()
    with _room_for_files(16):
        for _ in range(3):
            with _faulty(path, processes=2) as slide, pytest.raises(TileReadError):
                slide.read_region(0, 0, 0, 50, 50)
    assert _descriptors() == before
    _assert_gone(opened_by(path))


@pytest.mark.slow
def test_nothing_is_lost_in_a_storm(tmp_path: Path) -> None:
    """Crashes, hangs and damage beside good regions, read by eight threads through four processes."""
    faults = [("crash", (100, 0, 10, 10)), ("hang", (300, 0, 10, 10)), ("damaged", (500, 0, 10, 10))]
    path = write_faulty(tmp_path, *faults)
    with _faulty(path, 2.0, processes=4) as slide, ThreadPoolExecutor(8) as pool:
        places = [(x, y) for y in range(0, 350, 50) for x in range(0, 600, 50)] * 3
        reads = [pool.submit(_assert_read, slide, x, y) for x, y in places]
        failed = {place for place, read in zip(places, reads, strict=True) if read.exception() is not None}
    assert failed == {(100, 0), (300, 0), (500, 0)}
    _assert_gone(opened_by(path))
