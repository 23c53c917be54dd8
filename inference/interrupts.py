"""Being asked to stop, for commands: the library itself never touches a signal handler."""

import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from types import FrameType
from typing import Self

_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_AT_ONCE = 3


class Interrupted(KeyboardInterrupt):
    """The process was asked to stop. Raised in the main thread, so that everything is put away on the way out."""


class StopRequest:
    """While it is entered, the first SIGINT or SIGTERM raises `Interrupted` in the main thread.

    Make and `timeout` pass a signal on that the process got already, so the second is ignored, and cleaning up is not
    interrupted; the third ends the process at once. Once asked, it stays in force until the process ends.
    """

    def __init__(self) -> None:
        self._signal: int | None = None
        self._times = 0
        self._told: int | None = None
        self._undo = ExitStack()

    def __enter__(self) -> Self:
        # Python writes each signal's number there, whoever else has put a handler in our place meanwhile.
        self._told, tell = os.pipe()
        for end in (self._told, tell):
            os.set_blocking(end, False)
            self._undo.callback(os.close, end)
        self._undo.callback(signal.set_wakeup_fd, signal.set_wakeup_fd(tell, warn_on_full_buffer=False))
        self._undo.enter_context(self.handled())
        return self

    def __exit__(self, *exc: object) -> None:
        if not self.asked:
            self._told = None
            self._undo.close()

    @contextmanager
    def handled(self) -> Iterator[None]:
        """Inside, the signals come here although someone else has taken them; ignored ones stay ignored."""
        before = {number: signal.getsignal(number) for number in _SIGNALS}
        mine = [number for number, handler in before.items() if handler is not signal.SIG_IGN]
        for number in mine:
            signal.signal(number, self._on_signal)
        try:
            yield
        finally:
            for number in mine:
                signal.signal(number, before[number] or signal.SIG_DFL)

    @property
    def asked(self) -> bool:
        """Whether a signal came, raised or not."""
        return self.exit_code is not None

    @property
    def exit_code(self) -> int | None:
        """128 and the number of the first signal, as shells count; None while none came."""
        if self._signal is None and self._told is not None:
            with suppress(BlockingIOError):
                numbers = os.read(self._told, 1024)
                self._signal = next((number for number in numbers if number in _SIGNALS), None)
        return None if self._signal is None else 128 + self._signal

    def check(self) -> None:
        """Raise what an exception handler in the wrong place, or someone else's, has swallowed.

        Raises:
            Interrupted: a signal came.
        """
        if self.asked:
            raise Interrupted

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._times += 1
        if self._times == _AT_ONCE:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        if self._signal is None:
            self._signal = number
        if self._times == 1:
            raise Interrupted
