"""A process that does nothing but read one slide: `python -m inference.slides.worker`, started by `ProcessReader`.

What may hang for ever (a dead share, a tape) or crash (a decoder) does so here, where it can be killed. Requests come
on the standard input, so no path shows in the list of processes; see `_reader_wire`.
"""

import json
import mmap
import os
import resource
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import BinaryIO

import numpy as np
from numpy.typing import NDArray

from inference.errors import SlideChanged, TileReadError, UnreadableSlide
from inference.slides._reader_wire import (
    RGBA,
    UNEXPECTED,
    Answer,
    Facts,
    OpenRequest,
    ReadRequest,
    error_to_json,
    put,
)
from inference.slides._refusal import FileState, require_regular_file
from inference.slides.opening import open_slide
from inference.slides.reader import SlideReader

Opener = Callable[[Path, str, Sequence[Path]], SlideReader]


def serve(opener: Opener = open_slide) -> None:
    """Answer requests until the other side is gone; the first one opens the slide."""
    requests, answers = _pipes()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever started this decides
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core would hold pixels and names of patients
    threading.Thread(target=_end_with_parent, args=(requests.fileno(),), daemon=True).start()
    worker = _Worker(opener)
    try:
        _say(answers, {"ready": True})
        for line in requests:
            _say(answers, worker.answer(line))
    except BrokenPipeError:
        return


class _Worker:
    """One slide, opened by the first request, and the memory that its pixels go to."""

    def __init__(self, opener: Opener) -> None:
        self._opener = opener
        self._reader: SlideReader | None = None
        self._file = -1
        self._memory: mmap.mmap | None = None

    def answer(self, line: bytes) -> Answer:
        """What a request asks for, or the error that it meets."""
        try:
            return self._open(json.loads(line)) if self._reader is None else self._read(self._reader, json.loads(line))
        except MemoryError:
            kind = UnreadableSlide if self._reader is None else TileReadError
            return {"error": error_to_json(kind("its pixels need more memory than a reader process may take"))}
        except Exception as error:  # noqa: BLE001 - told to the other side, which raises it
            told = error_to_json(error)
            if told["code"] == UNEXPECTED:
                traceback.print_exc()
            return {"error": told}

    def _open(self, request: OpenRequest) -> Answer:
        self._file, name = request["pixels"], request["name"]
        files = tuple(Path(file) for file in request["files"])
        _limit_memory(request["memory"])
        before = _state(files, name)
        reader = self._opener(Path(request["path"]), name, files)
        if _state(files, name) != before:
            raise SlideChanged(f"{name}: the file changed while it was opened; run again when it is complete")
        self._reader = reader
        return {"facts": Facts.of(reader, before).to_text()}

    def _read(self, reader: SlideReader, request: ReadRequest) -> Answer:
        level, reduction, x, y, width, height = request["region"]
        missing: NDArray[np.float32] | None = None
        if request["channels"] == RGBA:
            pixels = reader.read_region(level, x, y, width, height)
        else:
            reduced = reader.read_reduced(level, reduction, x, y, width, height)
            pixels, missing = reduced.rgb, reduced.missing
        if self._memory is None or len(self._memory) != request["room"]:
            self._memory = mmap.mmap(self._file, request["room"])
        put(self._memory, pixels, missing)
        rows, columns, channels = pixels.shape
        return {"shape": (rows, columns, channels), "missing": missing is not None}


def _pipes() -> tuple[BinaryIO, BinaryIO]:
    """Requests and answers; what a decoder prints must not come between the answers, so it goes where errors go."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb", buffering=0)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    return sys.stdin.buffer, answers


def _say(answers: BinaryIO, message: Answer) -> None:
    left = memoryview(json.dumps(message).encode() + b"\n")
    while left:
        left = left[answers.write(left) :]


def _end_with_parent(requests: int) -> None:
    """End this process when nobody holds the other end of the pipe, also while a read hangs."""
    poll = select.poll()
    poll.register(requests, 0)  # a hang-up is always told
    poll.poll()
    os._exit(0)


def _state(files: Sequence[Path], name: str) -> tuple[FileState, ...]:
    return tuple(require_regular_file(file, name) for file in files)


def _limit_memory(more: int) -> None:
    """Bound the address space to what it is now and some more, where the system tells (Linux)."""
    statm = Path("/proc/self/statm")
    if not (more and statm.is_file()):
        return
    now = int(statm.read_text().split()[0]) * resource.getpagesize()
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = now + more if hard == resource.RLIM_INFINITY else min(now + more, hard)
    resource.setrlimit(resource.RLIMIT_AS, (wanted, hard))


if __name__ == "__main__":
    serve()
