"""A scripted model, and schedulers whose books are checked after every test."""

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future

import pytest

from inference.batching import BatchScheduler
from tests.inference.batching.patience import PATIENCE_S

Rows = Sequence[str | Exception]
StartScheduler = Callable[..., BatchScheduler[int, str]]
WaitForLine = Callable[[BatchScheduler[int, str], int], None]


class FakeModel:
    """Answers sample 7 with "r7" unless `react` says otherwise; can be held inside a call."""

    def __init__(self) -> None:
        self.calls: list[list[int]] = []
        self.modes: list[list[str]] = []
        self.react: Callable[[list[int]], Rows] = lambda samples: [f"r{sample}" for sample in samples]
        self._entered = threading.Semaphore(0)
        self._gate = threading.Event()
        self._gate.set()

    def __call__(self, samples: Sequence[int], modes: Sequence[str]) -> Rows:
        self.calls.append(list(samples))
        self.modes.append(list(modes))
        self._entered.release()
        self.wait_until_released()
        return self.react(list(samples))

    @property
    def seen(self) -> list[int]:
        return [sample for call in self.calls for sample in call]

    def occupy(self, scheduler: BatchScheduler[int, str], sample: int = -1) -> Future[str]:
        """Holds the model inside a call of its own, so that what is submitted next stays queued."""
        self.hold()
        future = scheduler.submit(sample)
        self.wait_until_called()
        return future

    def hold(self) -> None:
        self._gate.clear()
        while self._entered.acquire(blocking=False):  # calls before this one
            pass

    def wait_until_released(self) -> None:
        assert self._gate.wait(PATIENCE_S), "held for ever"

    def release(self) -> None:
        self._gate.set()

    def wait_until_called(self) -> None:
        assert self._entered.acquire(timeout=PATIENCE_S), "not called"


def wait_for_line(scheduler: BatchScheduler[int, str], length: int) -> None:
    """Returns once so many submitters wait for room."""
    until = time.monotonic() + PATIENCE_S
    while scheduler.statistics().waiting != length:
        assert time.monotonic() < until, f"{scheduler.statistics().waiting} wait, not {length}"
        threading.Event().wait(0.001)


@pytest.fixture(name="wait_for_line")
def _wait_for_line() -> WaitForLine:
    return wait_for_line


@pytest.fixture
def model() -> FakeModel:
    return FakeModel()


@pytest.fixture
def start(model: FakeModel) -> Iterator[StartScheduler]:
    """Starts schedulers over `model`; afterwards each is closed, its thread gone and its counters in balance."""
    started: list[BatchScheduler[int, str]] = []

    def start_scheduler(**settings: object) -> BatchScheduler[int, str]:
        settings = {"max_wait_s": 0.0, "name": f"test-{len(started)}", **settings}
        started.append(BatchScheduler(model, **settings))  # type: ignore[arg-type]
        return started[-1]

    yield start_scheduler
    model.release()
    for scheduler in started:
        scheduler.close(drain_s=PATIENCE_S)
        books = scheduler.statistics()
        answered = books.completed + sum(books.failed.values()) + books.cancelled + books.expired
        assert books.accepted == answered
        assert (books.queued, books.queued_bytes, books.running, books.lanes) == (0, 0, 0, 0)


@pytest.fixture(autouse=True)
def _no_thread_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), f"{thread.name} is left"
