"""The service batches as the in-process client does: the very same scheduler, the very same sizes."""

import asyncio
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import httpx
import numpy as np
import pytest

from inference.batching import BatchScheduler
from inference.clients import HttpClient, InProcessClient
from inference.clients.pipeline import ModelPipeline
from inference.contract import Client
from tests.inference.clients.doubles import PATIENCE_S, make_body, make_tile

if TYPE_CHECKING:
    from tests.inference.clients.doubles import ScriptedRuntime, StartClient, StartService

SETTINGS = {"max_batch_size": 4, "max_wait_ms": 0}


def _sizes_under_load(
    client: Client, pipeline: ModelPipeline, runtime: "ScriptedRuntime", load: Callable[[Client], object]
) -> tuple[Mapping[int, int], list[int]]:
    """Batch sizes of eleven tiles, ten of which come while the model is busy with the first."""
    runtime.rows.clear()
    runtime.hold()
    threads = [threading.Thread(target=lambda: asyncio.run(_one(client)))]
    threads[0].start()
    runtime.wait_until_called()
    threads.append(threading.Thread(target=load, args=(client,)))
    threads[1].start()
    until = threading.Event()
    for _ in range(int(PATIENCE_S / 0.005)):
        if (books := pipeline.statistics()) is not None and books.queued == 10:
            break
        until.wait(0.005)
    runtime.release()
    for thread in threads:
        thread.join(PATIENCE_S)
    books = pipeline.statistics()
    assert books is not None
    return books.batch_sizes, runtime.rows


async def _one(client: Client) -> None:
    await client.embed_async(make_body(0))


def _ten(client: Client) -> None:
    async def together() -> None:
        calls = [client.embed_async, client.predict_async]
        await asyncio.gather(*(calls[number % 2](make_body(number)) for number in range(1, 11)))

    asyncio.run(together())


@pytest.fixture
def http(serve: "StartService") -> Callable[[], tuple[HttpClient, ModelPipeline]]:
    def make() -> tuple[HttpClient, ModelPipeline]:
        app = serve(**SETTINGS)
        client = HttpClient("http://service", "demo", transport=httpx.ASGITransport(app))
        return client, app.state.service.models["demo"]

    return make


def test_both_cut_the_same_batches_under_the_same_load(
    start: "StartClient", http: Callable[[], tuple[HttpClient, ModelPipeline]], runtime: "ScriptedRuntime"
) -> None:
    here: InProcessClient = start(**SETTINGS)
    expected = _sizes_under_load(here, here.pipeline, runtime, _ten)
    there, pipeline = http()
    with there:
        found = _sizes_under_load(there, pipeline, runtime, _ten)
    assert found == expected == ({1: 1, 4: 2, 2: 1}, [1, 4, 4, 2])
    assert type(pipeline.scheduler) is type(here.pipeline.scheduler) is BatchScheduler


def test_tiles_of_a_binary_batch_share_batches_with_all_others(
    http: Callable[[], tuple[HttpClient, ModelPipeline]], runtime: "ScriptedRuntime"
) -> None:
    client, pipeline = http()

    def load(asked: Client) -> None:
        threads = [
            threading.Thread(target=lambda: client.run_tiles(np.stack([make_tile(n) for n in range(5)]))),
            threading.Thread(target=lambda: asyncio.run(five())),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(PATIENCE_S)

    async def five() -> None:
        await asyncio.gather(*(client.predict_async(make_body(number)) for number in range(5)))

    with client:
        assert _sizes_under_load(client, pipeline, runtime, load) == ({1: 1, 4: 2, 2: 1}, [1, 4, 4, 2])
