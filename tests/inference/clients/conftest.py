"""A demo model behind a runtime that can be scripted, and clients whose threads are gone afterwards."""

import base64
import io
import json
import threading
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from inference.clients import InProcessClient
from inference.models.registry import Checkpoint
from inference.models.runtime import Runtime
from inference.models.server_model import BaseServerModel, load_server_model

PATIENCE_S = 20.0  # far above what any step takes: a longer wait is a deadlock

Arrays = tuple[NDArray[np.float32], ...]
StartClient = Callable[..., InProcessClient]


class ScriptedRuntime:
    """The real runtime, with what a test changes about its outputs; remembers the batch sizes."""

    def __init__(self, real: Runtime) -> None:
        self.kind, self.device = real.kind, real.device
        self._real = real
        self.rows: list[int] = []
        self.react: Callable[[NDArray[np.uint8], Arrays], Arrays] = lambda _batch, outputs: outputs
        self._gate = threading.Event()
        self._gate.set()
        self._entered = threading.Event()

    def run(self, batch: NDArray[np.uint8]) -> Arrays:
        self.rows.append(len(batch))
        self._entered.set()
        assert self._gate.wait(PATIENCE_S), "held for ever"
        return self.react(batch, self._real.run(batch))

    def hold(self) -> None:
        self._entered.clear()
        self._gate.clear()

    def release(self) -> None:
        self._gate.set()

    def wait_until_called(self) -> None:
        assert self._entered.wait(PATIENCE_S), "not called"


@pytest.fixture(scope="session")
def _loaded(demo_checkpoint: Checkpoint) -> BaseServerModel:
    return load_server_model(demo_checkpoint)


@pytest.fixture
def runtime(_loaded: BaseServerModel) -> Iterator[ScriptedRuntime]:
    real = _loaded.runtime
    _loaded.runtime = scripted = ScriptedRuntime(real)
    yield scripted
    scripted.release()
    _loaded.runtime = real


@pytest.fixture
def server(_loaded: BaseServerModel, runtime: ScriptedRuntime) -> BaseServerModel:
    return _loaded


@pytest.fixture
def start(server: BaseServerModel, runtime: ScriptedRuntime) -> Iterator[StartClient]:
    """Starts clients; afterwards each is closed, its threads are gone and its queue's counters balance."""
    before = set(threading.enumerate())
    started: list[InProcessClient] = []

    def start_client(model: BaseServerModel | None = None, **settings: object) -> InProcessClient:
        started.append(InProcessClient(model or server, **settings))  # type: ignore[arg-type]
        return started[-1]

    yield start_client
    runtime.release()
    for client in started:
        client.close()
        if books := client.statistics():
            answered = books.completed + sum(books.failed.values()) + books.cancelled + books.expired
            assert books.accepted == answered
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), f"{thread.name} is left"


@pytest.fixture
def body() -> Callable[..., str]:
    """The JSON request of tile number n: pixels that only it has."""

    def make(number: int = 0, size: int = 224, **changes: object) -> str:
        pixels = np.random.default_rng(number).integers(0, 256, (size, size, 3), dtype=np.uint8)
        pixels[0, 0] = number
        buffer = io.BytesIO()
        Image.fromarray(pixels).save(buffer, format="PNG", compress_level=1)
        fields: dict[str, object] = {
            "image_data": base64.b64encode(buffer.getvalue()).decode(), "slide_name": "slide", "x": number * 224,
            "y": -number, "width": size, "height": size, "patch_idx": number, "tissue_ratio": 0.5, "resolution": 0.5,
        }  # fmt: skip
        return json.dumps(fields | changes)

    return make
