"""Counts what is open."""

import threading
from pathlib import Path

import openslide
import pytest

from tests.inference.slides.synthetic import Size


class OpenHandles:
    """OpenSlide handles open now and at most; reads can be held."""

    def __init__(self) -> None:
        self.now = self.most = 0
        self.in_read, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        self._lock = threading.Lock()

    def add(self, count: int) -> None:
        with self._lock:
            self.now += count
            self.most = max(self.most, self.now)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> OpenHandles:
    """Counts the OpenSlide handles that a test opens."""
    handles = OpenHandles()

    class Counted(openslide.OpenSlide):  # type: ignore[misc]  # untyped base
        def __init__(self, path: Path) -> None:
            super().__init__(path)
            handles.add(1)

        def read_region(self, location: Size, level: int, size: Size) -> object:
            handles.in_read.set()
            assert handles.go_on.wait(10), "held for ever"
            return super().read_region(location, level, size)

        def close(self) -> None:
            super().close()
            handles.add(-1)

    monkeypatch.setattr(openslide, "OpenSlide", Counted)
    return handles
