"""Slides that a reader process hangs or dies of: their file says where. `python FILE` serves them.

What becomes of a process cannot be seen from inside, so every opening adds a line with its process id to a file.
"""

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

REPO = Path(__file__).resolve().parents[3]
if __name__ == "__main__":
    sys.path.insert(0, str(REPO))

from inference.errors import SourceUnavailable, TileReadError  # noqa: E402
from inference.slides.process_reader import ProcessReader  # noqa: E402
from inference.slides.worker import serve  # noqa: E402
from tests.inference.slides.synthetic import ArrayReader, Pixels, Rectangle, Size, coordinates  # noqa: E402

SIZE: Size = (600, 400)
TRUTH = coordinates(0, SIZE)
COMMAND = (sys.executable, str(Path(__file__).resolve()))


def write_faulty(folder: Path, *faults: tuple[str, Rectangle], opening: str = "") -> Path:
    """A slide of known pixels with faults where a region touches a rectangle, or at its opening."""
    path = folder / "ACC-4711.svs"
    path.write_text(json.dumps({"faults": faults, "opening": opening}))
    return path


def opened_by(path: Path) -> list[int]:
    """Process ids that have opened the slide, in order."""
    log = path.with_suffix(".opened")
    return [int(line) for line in log.read_text().split()] if log.exists() else []


def open_by_process(path: Path, timeout_s: float = 60.0, processes: int = 1) -> ProcessReader:
    """A reader whose processes serve such slides."""
    return ProcessReader(path, "S1", timeout_s=timeout_s, processes=processes, command=COMMAND)


def assert_read(slide: ProcessReader, x: int, y: int, side: int = 50) -> None:
    """A square has the pixels that it should."""
    found = slide.read_region(0, x, y, side, side)
    assert np.array_equal(found[..., :3], TRUTH[y : y + side, x : x + side])
    assert found[..., 3].min() == 255


def assert_gone(pids: list[int]) -> None:
    """They neither run nor are zombies."""
    for pid in pids:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            continue
        raise AssertionError(f"process {pid} is still there")


class FaultyReader(ArrayReader):
    def __init__(self, path: Path) -> None:
        super().__init__([coordinates(0, SIZE)], tile=100)
        self._path = path
        told = json.loads(path.read_text())
        self._faults: list[tuple[str, Rectangle]] = told["faults"]
        with path.with_suffix(".opened").open("a") as log:
            log.write(f"{os.getpid()}\n")
        if told["opening"]:
            DOES[told["opening"]](path)

    def read_region(self, level: int, x: int, y: int, width: int, height: int) -> Pixels:
        for does, (left, top, across, down) in self._faults:
            if x < left + across and left < x + width and y < top + down and top < y + height:
                DOES[does](self._path)
        return super().read_region(level, x, y, width, height)


def _hang(_path: Path) -> None:
    """In a system call, as on a dead share."""
    os.read(os.pipe()[0], 1)


def _hang_once(path: Path) -> None:
    marker = path.with_suffix(".hung")
    if not marker.exists():
        marker.touch()
        _hang(path)


def _hang_the_second_time(path: Path) -> None:
    """As a share that was lost since."""
    if len(opened_by(path)) > 1:
        _hang(path)


def _crash(path: Path) -> None:
    """As a decoder does, which says which file it was at."""
    os.write(2, f"TIFFReadDirectory: {path}: bad directory in ACC-4711\n".encode())
    os.kill(os.getpid(), signal.SIGSEGV)


def _meet(path: Path) -> None:
    """Wait until another process reads this region too."""
    pipe = path.with_suffix(".pipe")
    try:
        os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))  # someone waits
    except OSError:
        os.close(os.open(pipe, os.O_RDONLY))


def _say_so_and_hang(path: Path) -> None:
    os.close(os.open(path.with_suffix(".pipe"), os.O_WRONLY))
    _hang(path)


def _babble(_path: Path) -> None:
    """More than a pipe holds, where answers and errors go."""
    for stream in (1, 2):
        os.write(stream, b"warning: all is well\n" * 10_000)


def _too_much(_path: Path) -> None:
    np.zeros(1 << 40, np.uint8).fill(1)


def _raise(error: Exception) -> Callable[[Path], None]:
    def does(_path: Path) -> None:
        raise error

    return does


DOES: dict[str, Callable[[Path], None]] = {
    "hang": _hang,
    "say so and hang": _say_so_and_hang,
    "hang once": _hang_once,
    "hang the second time": _hang_the_second_time,
    "crash": _crash,
    "meet": _meet,
    "babble": _babble,
    "too much": _too_much,
    "exit": lambda _path: os._exit(3),
    "damaged": _raise(TileReadError("level 0 cannot be decoded here: µ")),
    "lost": _raise(SourceUnavailable("S1: the share is gone")),
    "odd": _raise(KeyError("ACC-4711")),
    "refused": _raise(ValueError("S1: no such thing")),
}


def open_faulty(path: Path, name: str, files: Sequence[Path]) -> FaultyReader:
    return FaultyReader(path)


def hold(path: Path) -> None:
    """Open a slide, say so, and read from it for ever."""
    slide = open_by_process(path)
    threading.Thread(target=slide.read_region, args=(0, 0, 0, 50, 50), daemon=True).start()
    os.write(1, b"open\n")
    threading.Event().wait()


if __name__ == "__main__":
    if len(sys.argv) > 1:
        hold(Path(sys.argv[1]))
    serve(open_faulty)
