"""The outside of one reader process: started, asked with a deadline, killed."""

import contextlib
import json
import logging
import mmap
import os
import re
import select
import signal
import subprocess
import tempfile
import threading
import time
import weakref
from collections.abc import Sequence

from inference.slides._reader_wire import Answer, OpenRequest, ReadRequest

log = logging.getLogger(__name__)

_KEPT_ERRORS = 4096  # bytes of what a process printed last
_REAP_S = 2.0
_CHUNK = 1 << 16
_FIRST_ROOM = 1 << 23

_alive: "weakref.WeakSet[ReaderProcess]" = weakref.WeakSet()


class ProcessLost(Exception):
    """A reader process did not answer in time, or is no more.

    Attributes:
        hung: it was still running.
        how: "hung", "died (signal 11)" or "ended (exit code 1)".
    """

    def __init__(self, how: str) -> None:
        super().__init__(how)
        self.hung, self.how = how == "hung", how


class ReaderProcess:
    """One process in a group and session of its own, so that no Ctrl-C reaches it and a kill reaches all of it.

    Used by one thread at a time; only `kill` may come from another. Whoever used it last calls `dispose`.

    Args:
        command: arguments that start it.
        secrets: words that its messages must not bring into the log (paths and names of files).

    Raises:
        OSError: it cannot be started.
    """

    def __init__(self, command: Sequence[str], secrets: Sequence[str] = ()) -> None:
        self._secrets = secrets
        self._lock = threading.Lock()
        self._reaped = False
        self._inbox, self._errors = bytearray(), bytearray()
        self.file = _nameless_file()
        self.memory: mmap.mmap | None = None
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own module
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                bufsize=0,
                pass_fds=(self.file,),
                start_new_session=True,
                env=_environment(),
            )
        except BaseException:
            os.close(self.file)
            raise
        self.pid = self._process.pid
        pipes = self._process.stdin, self._process.stdout, self._process.stderr
        self._requests, self._answers, self._printed = (pipe.fileno() for pipe in pipes if pipe)
        os.set_blocking(self._requests, False)
        self._told = select.poll()
        self._told.register(self._answers, select.POLLIN)
        self._told.register(self._printed, select.POLLIN)
        self._takes = select.poll()
        self._takes.register(self._requests, select.POLLOUT)
        _alive.add(self)

    def ask(self, request: OpenRequest | ReadRequest | None, timeout_s: float) -> Answer:
        """The answer to a request; None waits for what it says by itself.

        Raises:
            ProcessLost: it did not answer in time, or died.
        """
        end = time.monotonic() + timeout_s
        if request is not None:
            self._send(json.dumps(request).encode() + b"\n", end)
        answer: Answer = json.loads(self._receive(end))
        return answer

    def room(self, size: int) -> int:
        """Size of the shared memory, made at least so large; no view of it may be in use."""
        if self.memory is None or len(self.memory) < size:
            room = max(_FIRST_ROOM, 1 << (size - 1).bit_length())
            os.ftruncate(self.file, room)
            self.memory = mmap.mmap(self.file, room)
        return len(self.memory)

    def kill(self) -> None:
        """End it at once; whoever waits for its answer finds it lost."""
        with self._lock:
            if not self._reaped:  # its number may be another's afterwards
                with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS says the latter of a zombie
                    os.killpg(self.pid, signal.SIGKILL)

    def dispose(self) -> None:
        """Kill it, and let go of all that belongs to it."""
        self.kill()
        if not self._wait(_REAP_S):
            # In a system call that cannot be interrupted: it ends when the disk or share answers.
            threading.Thread(target=self._process.wait, name="reap-reader", daemon=True).start()
        self._let_go()

    def last_words(self) -> str:
        """The last line that it printed, as the end of a message, without paths and names of files; '' for none."""
        lines = self._errors.decode(errors="replace").split("\n")
        line = next((line.strip() for line in reversed(lines) if line.strip()), "")
        for secret in sorted(filter(None, self._secrets), key=len, reverse=True):
            line = re.sub(rf"(?<!\w){re.escape(secret)}(?!\w)", "…", line)
        line = re.sub(r"\S*[/\\]\S*", "…", line)[:200]
        return f"; it last wrote: {line}" if line else ""

    def forget(self) -> None:
        """In a forked child: close its ends of the pipes, for the process must see when the parent is gone."""
        self._reaped = True  # not ours to kill; the lock may be held by a thread that does not exist here
        self._let_go()

    def _let_go(self) -> None:
        _alive.discard(self)
        for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
            if pipe:
                pipe.close()
        self.memory = None  # unmapped with its last view
        if self.file >= 0:
            os.close(self.file)
            self.file = -1

    def _wait(self, timeout_s: float) -> bool:
        """Whether it has ended; its number is given back under the lock, so that nobody kills its next owner."""
        end, pause = time.monotonic() + timeout_s, 0.001
        while True:
            with self._lock:
                self._reaped = self._reaped or self._process.poll() is not None
            if self._reaped or time.monotonic() > end:
                return self._reaped
            time.sleep(pause)
            pause = min(2 * pause, 0.05)

    def _send(self, message: bytes, end: float) -> None:
        left = memoryview(message)
        while left:
            try:
                left = left[os.write(self._requests, left) :]
            except BlockingIOError:
                self._takes.poll(_milliseconds(end))
            except BrokenPipeError:
                raise self._lost() from None

    def _receive(self, end: float) -> bytes:
        while (stop := self._inbox.find(b"\n")) < 0:
            for descriptor, _ in self._told.poll(_milliseconds(end)):
                data = os.read(descriptor, _CHUNK)
                if descriptor == self._printed:
                    self._keep(data)
                elif not data:
                    raise self._lost()
                else:
                    self._inbox += data
        line = bytes(self._inbox[:stop])
        del self._inbox[: stop + 1]
        return line

    def _keep(self, printed: bytes) -> None:
        self._errors += printed
        del self._errors[:-_KEPT_ERRORS]
        if not printed:
            self._told.unregister(self._printed)

    def _lost(self) -> ProcessLost:
        """What became of a process that closed its pipe."""
        if not self._wait(_REAP_S):
            return ProcessLost("hung")
        os.set_blocking(self._printed, False)
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._printed, _CHUNK):
                self._keep(data)
        code = self._process.returncode
        return ProcessLost(f"died (signal {-code})" if code < 0 else f"ended (exit code {code})")


def _milliseconds(end: float) -> int:
    """Time left until a deadline.

    Raises:
        ProcessLost: none.
    """
    left = end - time.monotonic()
    if left <= 0:
        raise ProcessLost("hung")
    return int(left * 1000) + 1


def _nameless_file() -> int:
    """Descriptor of an empty file that nobody else can open."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("slide-pixels", os.MFD_CLOEXEC)
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _environment() -> dict[str, str]:
    """What a reader process inherits: no key, and one thread, since there are as many processes as reads at once."""
    kept = {name: value for name, value in os.environ.items() if name != "SLIDE_KEY_SECRET"}
    return kept | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}


def _forget_all() -> None:
    for process in list(_alive):
        process.forget()


os.register_at_fork(after_in_child=_forget_all)
