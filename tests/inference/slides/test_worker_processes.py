"""Reader processes come and go: as many as reads at once, none left behind, whatever ends their parent."""

import os
import resource
import select
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from inference.errors import SourceUnavailable, TileReadError
from tests.inference.slides.worker_doubles import (
    COMMAND,
    REPO,
    TRUTH,
    assert_gone,
    assert_read,
    open_by_process,
    opened_by,
    write_faulty,
)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="needs /proc")
def test_the_list_of_processes_shows_neither_the_file_nor_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIDE_KEY_SECRET", "very secret")
    path = write_faulty(tmp_path)
    with open_by_process(path):
        process = Path(f"/proc/{opened_by(path)[0]}")
        assert path.name.encode() not in (process / "cmdline").read_bytes()
        assert b"very secret" not in (process / "environ").read_bytes()
        assert b"Max core file size        0 " in (process / "limits").read_bytes()


def test_as_many_processes_as_reads_at_once_and_no_more(tmp_path: Path) -> None:
    path = write_faulty(tmp_path, ("meet", (0, 0, 10, 10)))
    os.mkfifo(path.with_suffix(".pipe"))
    with open_by_process(path, processes=2) as slide:
        for x in range(100, 110):
            assert_read(slide, x, 0)
        assert len(opened_by(path)) == 1
        with ThreadPoolExecutor(8) as pool:
            meeting = [pool.submit(assert_read, slide, 0, 0) for _ in range(2)]
            for done in [*meeting, *(pool.submit(assert_read, slide, x, 9 * x) for x in range(10, 38))]:
                done.result()
        assert len(opened_by(path)) == 2


def test_closing_ends_a_hung_read_at_once(tmp_path: Path) -> None:
    path = write_faulty(tmp_path, ("say so and hang", (0, 0, 10, 10)))
    os.mkfifo(path.with_suffix(".pipe"))
    slide = open_by_process(path)
    with ThreadPoolExecutor(2) as pool:
        hanging = [pool.submit(slide.read_region, 0, 0, 0, 50, 50) for _ in range(2)]  # one of them waits its turn
        path.with_suffix(".pipe").read_bytes()
        slide.close()
        for read in hanging:
            with pytest.raises(ValueError, match=r"^S1: the slide is closed$"):
                read.result(20)
    slide.close()
    with pytest.raises(ValueError, match=r"^S1: the slide is closed$"):
        slide.read_region(0, 100, 100, 5, 5)
    assert_gone(opened_by(path))


def test_ctrl_c_is_left_to_the_parent(tmp_path: Path) -> None:
    path = write_faulty(tmp_path)
    with open_by_process(path) as slide:
        (pid,) = opened_by(path)
        assert os.getpgid(pid) == pid  # a terminal does not reach it either
        os.kill(pid, signal.SIGINT)
        assert_read(slide, 0, 0)
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
        open_by_process(path)
    assert said.value.retryable
    with open_by_process(path) as slide:
        assert_read(slide, 0, 0)


def test_with_room_for_one_process_only_all_threads_share_it(tmp_path: Path) -> None:
    path = write_faulty(tmp_path)
    with open_by_process(path, processes=4) as slide:
        assert_read(slide, 0, 0)
        with _room_for_files(3), ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda x: assert_read(slide, x, 2 * x), range(100)))
        assert_read(slide, 0, 0)
    assert len(opened_by(path)) == 1


def test_descriptors_are_given_back_under_a_limit_of_few(tmp_path: Path) -> None:
    """Also those of processes that died."""
    path = write_faulty(tmp_path, ("exit", (0, 0, 10, 10)))
    before = _descriptors()
    with _room_for_files(16):
        for _ in range(3):
            with open_by_process(path, processes=2) as slide, pytest.raises(TileReadError):
                slide.read_region(0, 0, 0, 50, 50)
    assert _descriptors() == before
    assert_gone(opened_by(path))


@pytest.mark.slow
def test_nothing_is_lost_in_a_storm(tmp_path: Path) -> None:
    """Crashes, hangs and damage beside good regions, read by eight threads through four processes."""
    faults = [("crash", (100, 0, 10, 10)), ("hang", (300, 0, 10, 10)), ("damaged", (500, 0, 10, 10))]
    path = write_faulty(tmp_path, *faults)
    with open_by_process(path, 2.0, processes=4) as slide, ThreadPoolExecutor(8) as pool:
        places = [(x, y) for y in range(0, 350, 50) for x in range(0, 600, 50)] * 3
        reads = [pool.submit(assert_read, slide, x, y) for x, y in places]
        failed = {place for place, read in zip(places, reads, strict=True) if read.exception() is not None}
    assert failed == {(100, 0), (300, 0), (500, 0)}
    assert_gone(opened_by(path))
