"""A demo model behind a runtime that can be scripted, clients whose threads are gone afterwards, and a service.

Import the fixtures into a conftest that needs them.
"""

import asyncio
import base64
import io
import json
import socket
import threading
from collections.abc import Callable, Iterator, Mapping

import httpx
import numpy as np
import pytest
import uvicorn
from fastapi import FastAPI
from numpy.typing import NDArray
from PIL import Image

from inference.batching import SchedulerStatistics
from inference.clients import InProcessClient
from inference.models.registry import Checkpoint
from inference.models.runtime import Runtime
from inference.models.sample import NO_EXTRAS
from inference.models.server_model import BaseServerModel, load_server_model
from inference.serving import ServiceSettings, create_app
from inference.serving.app import Service
from inference.serving.models import Models
from inference.serving.protocol import BoundedHead

PATIENCE_S = 20.0  # far above what any step takes: a longer wait is a deadlock

Arrays = tuple[NDArray[np.float32], ...]
StartClient = Callable[..., InProcessClient]
StartService = Callable[..., FastAPI]


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

    def run(self, batch: NDArray[np.uint8], extras: Mapping[str, NDArray[np.float32]] = NO_EXTRAS) -> Arrays:
        self.rows.append(len(batch))
        self._entered.set()
        assert self._gate.wait(PATIENCE_S), "held for ever"
        return self.react(batch, self._real.run(batch, extras))

    def hold(self) -> None:
        self._entered.clear()
        self._gate.clear()

    def release(self) -> None:
        self._gate.set()

    def wait_until_called(self) -> None:
        assert self._entered.wait(PATIENCE_S), "not called"


def check_balance(books: SchedulerStatistics | None) -> None:
    """Every tile that was accepted has had its one answer."""
    if books is not None:
        assert books.accepted == books.completed + sum(books.failed.values()) + books.cancelled + books.expired
        assert (books.queued, books.running) == (0, 0)


@pytest.fixture(scope="session", name="_loaded")
def loaded(demo_checkpoint: Checkpoint) -> BaseServerModel:
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
        check_balance(client.statistics())
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), f"{thread.name} is left"


def make_tile(number: int, size: int = 224) -> NDArray[np.uint8]:
    """The pixels of tile number n, which only it has; the first is n."""
    pixels = np.random.default_rng(number).integers(0, 256, (size, size, 3), dtype=np.uint8)
    pixels[0, 0] = number
    return pixels


def make_body(number: int = 0, size: int = 224, **changes: object) -> str:
    """The JSON request of tile number n."""
    buffer = io.BytesIO()
    Image.fromarray(make_tile(number, size)).save(buffer, format="PNG", compress_level=1)
    fields: dict[str, object] = {
        "image_data": base64.b64encode(buffer.getvalue()).decode(), "slide_name": "slide", "x": number * 224,
        "y": -number, "width": size, "height": size, "patch_idx": number, "tissue_ratio": 0.5, "resolution": 0.5,
    }  # fmt: skip
    return json.dumps(fields | changes)


@pytest.fixture
def body() -> Callable[..., str]:
    """Makes the JSON request of tile number n."""
    return make_body


class Loopback:
    """The application on a real port of this machine, served from a thread."""

    def __init__(self, app: FastAPI) -> None:
        self.app = app
        config = uvicorn.Config(app, lifespan="on", log_config=None, access_log=False, http=BoundedHead)
        self._server = uvicorn.Server(config)
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._socket.getsockname()[1]}"
        self._thread = threading.Thread(target=self._server.run, args=([self._socket],), name="loopback")
        self._thread.start()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the server does not stop"


def ask(
    app: FastAPI, verb: str, path: str, content: str | bytes | None = None, headers: dict[str, str] | None = None
) -> httpx.Response:
    """One request to an application in this process."""

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://service", timeout=PATIENCE_S) as client:
            return await client.request(verb, path, content=content, headers=headers)

    return asyncio.run(send())


@pytest.fixture
def serve(server: BaseServerModel, runtime: ScriptedRuntime, start: StartClient) -> Iterator[StartService]:
    """Makes services; afterwards each is closed and its queue's counters balance.

    `start` is asked for so that it is left last: it sees to it that no thread is left.
    """
    made: list[FastAPI] = []

    def make(models: Models | None = None, **settings: object) -> FastAPI:
        made.append(create_app([server] if models is None else models, ServiceSettings(**settings)))  # type: ignore[arg-type]
        return made[-1]

    yield make
    runtime.release()
    for app in made:
        service: Service = app.state.service
        service.models.close()
        for _, pipeline in service.models.loaded():
            check_balance(pipeline.statistics())
