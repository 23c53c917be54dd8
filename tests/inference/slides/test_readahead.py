"""Reading ahead in threads: order, bounds, failures, and readers that hang."""

import itertools
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest

from inference.errors import ReadStalled
from inference.slides.readahead import CHUNK, ReadAhead


@pytest.fixture(autouse=True)
def no_thread_left() -> Iterator[None]:
    yield
    assert not [t for t in threading.enumerate() if t.name.startswith("read-") and not getattr(t, "stuck", False)]


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, CHUNK - 1, CHUNK, 3 * CHUNK + 5, 400])
def test_everything_comes_once_and_in_order(threads: int, count: int) -> None:
    assert list(ReadAhead(lambda i: i * i, count, threads=threads, ahead=30)) == [i * i for i in range(count)]


def test_no_more_is_read_ahead_than_asked_for() -> None:
    started = []
    lock = threading.Lock()
    settled = threading.Event()

    def read(index: int) -> int:
        with lock:
            started.append(index)
            if len(started) == 4 * CHUNK:
                settled.set()
        return index

    with closing(iter(ReadAhead(read, 100 * CHUNK, threads=2, ahead=3 * CHUNK))) as results:
        assert next(results) == 0
        assert settled.wait(10)
        assert [*itertools.islice(results, CHUNK)] == [*range(1, CHUNK + 1)]
        assert max(started) < (1 + 1 + 3 + 2) * CHUNK


def test_what_a_read_raises_comes_in_its_turn_and_ends_the_reading() -> None:
    def read(index: int) -> int:
        if index == 2 * CHUNK + 3:
            raise KeyError(index)
        return index

    got: list[int] = []
    with pytest.raises(KeyError, match=str(2 * CHUNK + 3)):
        got.extend(ReadAhead(read, 10 * CHUNK, threads=3, ahead=6 * CHUNK))
    assert got == [*range(2 * CHUNK)]


def test_closing_early_ends_the_threads() -> None:
    with closing(iter(ReadAhead(lambda i: i, 10_000, threads=3, ahead=64))) as results:
        assert next(results) == 0


def test_a_reader_that_hangs_is_given_up_with_the_remedy() -> None:
    hang = threading.Event()

    def read(index: int) -> int:
        if index == CHUNK:
            vars(threading.current_thread())["stuck"] = True
            hang.wait(30)
        return index

    got: list[int] = []
    with pytest.raises(ReadStalled, match=r"^nothing was read for 0\.3 s: .*; run again") as raised:
        got.extend(ReadAhead(read, 4 * CHUNK, threads=1, ahead=8, stalled_after_s=0.3))
    assert raised.value.retryable
    assert got == [*range(CHUNK)]
    hang.set()


def test_slow_reads_that_go_on_are_no_stall() -> None:
    """The clock starts anew with every read, whichever thread ends it."""
    pause = threading.Event()

    def read(index: int) -> int:
        pause.wait(0.02)
        return index

    assert len(list(ReadAhead(read, 4 * CHUNK, threads=2, ahead=8, stalled_after_s=0.5))) == 4 * CHUNK


def test_a_reader_that_hangs_for_ever_does_not_keep_the_process() -> None:
    code = """
import threading
from inference.errors import ReadStalled
from inference.slides.readahead import ReadAhead
try:
    list(ReadAhead(lambda i: threading.Event().wait(), 1, threads=1, ahead=1, stalled_after_s=0.2))
except ReadStalled:
    print("given up")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert run.stdout == "given up\n"
