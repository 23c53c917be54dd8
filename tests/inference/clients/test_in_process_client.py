"""The in-process client: one answer whichever way it is asked, shared batches, and faults kept apart."""

import asyncio
import json
import os
import threading
import warnings
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from inference.clients import InProcessClient
from inference.clients.pipeline import ModelPipeline
from inference.contract import ModelRequest, ModelResponse, parse_request
from inference.errors import (
    BadRequest,
    BatchError,
    CallerError,
    ConfigError,
    DeadlineExceeded,
    DeviceBroken,
    ForwardError,
    ModelContractError,
    NonFiniteOutput,
    ServerClosed,
)
from inference.models.registry import Checkpoint
from inference.models.sample import Mode, PreparedSample
from inference.models.server_model import BaseServerModel, load_server_model
from tests.inference.clients.doubles import PATIENCE_S, make_tile

if TYPE_CHECKING:
    from tests.inference.clients.doubles import ScriptedRuntime, StartClient

Body = Callable[..., str]
Values = list[float]
METHODS: dict[Mode, str] = {
    "embedding": "embed",
    "prediction": "predict",
    "prediction_with_embedding": "predict_with_embedding",
}
LONG_MS = 60_000  # a batch that is not full waits for ever, as far as a test is concerned


def _values(answer: str) -> tuple[Values, Values]:
    found = json.loads(answer)
    return found["output"], found.get("embedding", [])


def _poisoned(*numbers: int) -> Callable[[NDArray[np.uint8], tuple[NDArray[np.float32], ...]], Any]:
    """Outputs with NaN in the rows of these tiles."""

    def react(batch: NDArray[np.uint8], outputs: tuple[NDArray[np.float32], ...]) -> Any:
        for output in outputs:
            output[np.isin(batch[:, 0, 0, 0], numbers)] = np.nan
        return outputs

    return react


def _gather(*calls: Coroutine[object, object, str]) -> list[str | BaseException]:
    async def together() -> list[str | BaseException]:
        return await asyncio.gather(*calls, return_exceptions=True)

    return asyncio.run(together())


def _count_queued(client: InProcessClient) -> threading.Semaphore:
    """A semaphore that counts up with every tile that enters the queue."""
    scheduler, queued = client.pipeline.scheduler, threading.Semaphore(0)
    assert scheduler is not None
    submit = scheduler.submit

    def counted(*args: Any, **kwargs: Any) -> Any:
        future = submit(*args, **kwargs)
        queued.release()
        return future

    scheduler.submit = counted  # type: ignore[method-assign]
    return queued


# One answer.


@pytest.mark.parametrize("mode", METHODS)
@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "explicit"])
def test_sync_async_and_batch_calls_give_what_the_model_gives(
    start: "StartClient", server: BaseServerModel, body: Body, mode: Mode, dynamic: bool
) -> None:
    client = start(max_batch_size=3, max_wait_ms=1, dynamic_batching=dynamic)
    bodies = [body(number) for number in range(5)]
    name = METHODS[mode]
    one_by_one = [getattr(client, name)(b) for b in bodies]
    at_once = getattr(client, f"{name}_batch")(bodies)
    together = _gather(*[getattr(client, f"{name}_async")(b, "ignored") for b in bodies])
    samples = [server.prepare_sample(parse_request(b)) for b in bodies]
    for i, row in enumerate(server.forward_tiles(samples, [mode] * len(samples))):
        assert not isinstance(row, NonFiniteOutput)
        main = row.embedding if mode == "embedding" else row.prediction
        assert main is not None
        for answer in (one_by_one[i], at_once[i], together[i]):
            output, embedding = _values(str(answer))
            np.testing.assert_allclose(output, main, atol=1e-6)
            if mode == "prediction_with_embedding":
                assert row.embedding is not None
                np.testing.assert_allclose(embedding, row.embedding, atol=1e-6)
            else:
                assert embedding == []


def test_an_explicit_batch_beyond_the_limit_runs_in_parts_in_order(
    start: "StartClient", runtime: "ScriptedRuntime", body: Body
) -> None:
    answers = start(max_batch_size=2).predict_batch([body(number) for number in range(5)])
    assert runtime.rows == [2, 2, 1]
    assert [json.loads(answer)["patch_idx"] for answer in answers] == [0, 1, 2, 3, 4]


# Batches.


def test_calls_that_come_while_the_model_is_busy_go_together_when_it_is_free(
    start: "StartClient", runtime: "ScriptedRuntime", body: Body
) -> None:
    client = start(max_batch_size=8, max_wait_ms=0)
    queued = _count_queued(client)
    runtime.hold()

    async def crowd() -> None:
        first = asyncio.create_task(client.embed_async(body(0)))
        await asyncio.to_thread(runtime.wait_until_called)
        await asyncio.to_thread(queued.acquire)
        others = [asyncio.create_task(client.embed_async(body(number))) for number in range(1, 6)]
        for _ in others:
            await asyncio.to_thread(queued.acquire)
        runtime.release()
        await asyncio.gather(first, *others)

    asyncio.run(crowd())
    assert runtime.rows == [1, 5]


def test_without_dynamic_batching_every_async_call_runs_alone(
    start: "StartClient", runtime: "ScriptedRuntime", body: Body
) -> None:
    client = start(dynamic_batching=False)
    answers = _gather(*[client.predict_async(body(number)) for number in range(4)])
    assert [json.loads(str(answer))["patch_idx"] for answer in answers] == [0, 1, 2, 3]
    assert runtime.rows == [1, 1, 1, 1]
    assert client.statistics() is None


def test_without_dynamic_batching_a_deadline_is_kept_too(start: "StartClient", runtime: "ScriptedRuntime") -> None:
    client = start(dynamic_batching=False)
    sample = client.pipeline.model.prepare_tile(make_tile(1))
    with pytest.raises(DeadlineExceeded):
        client.submit(sample, "embedding", deadline_s=0).result(PATIENCE_S)
    assert runtime.rows == []
    assert client.submit(sample, "embedding", deadline_s=PATIENCE_S).result(PATIENCE_S).embedding is not None


def test_what_is_no_body_and_no_sample_is_told_as_such(start: "StartClient") -> None:
    client = start()
    with pytest.raises(BadRequest, match="the body is a dict: give JSON as text"):
        client.embed({"x": 1})  # type: ignore[arg-type]
    with pytest.raises(BadRequest, match="a batch is a list of bodies, this is one"):
        client.embed_batch("{}")
    with pytest.raises(BadRequest, match="submit takes what prepare_tile or prepare_sample gives, not a ndarray"):
        client.submit(make_tile(1))  # type: ignore[arg-type]


def test_s18_what_is_queued_at_close_gets_its_answer_also_where_that_is_long_to_write(
    start: "StartClient", runtime: "ScriptedRuntime", body: Body, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference.clients.pipeline.LONG_OUTPUT", 1)
    client = start(max_batch_size=8, max_wait_ms=LONG_MS)
    queued = _count_queued(client)

    async def crowd() -> list[str]:
        calls = [asyncio.create_task(client.embed_async(body(number))) for number in range(3)]
        for _ in calls:
            await asyncio.to_thread(queued.acquire)
        client.pipeline.scheduler.flush()  # type: ignore[union-attr]
        await asyncio.sleep(0)
        closing = asyncio.create_task(asyncio.to_thread(client.close))
        answers = await asyncio.gather(*calls)
        await closing
        return list(answers)

    assert [json.loads(answer)["patch_idx"] for answer in asyncio.run(crowd())] == [0, 1, 2]


def test_s15_a_call_that_waits_for_the_device_behind_a_stuck_forward_is_told(
    start: "StartClient", runtime: "ScriptedRuntime", body: Body
) -> None:
    client = InProcessClient.__new__(InProcessClient)
    client.pipeline = ModelPipeline(start().pipeline.model, 8, 0, stuck_after_s=0.2)
    runtime.hold()
    with ThreadPoolExecutor(2) as callers:
        stuck = callers.submit(lambda: asyncio.run(client.embed_async(body(0))))
        runtime.wait_until_called()
        waiting = callers.submit(client.embed, body(1))
        with pytest.raises(DeviceBroken):
            stuck.result(PATIENCE_S)
        with pytest.raises(DeviceBroken):
            waiting.result(PATIENCE_S)
    runtime.release()
    client.close()


def test_s21_a_forked_child_gets_an_error_and_not_a_hang(start: "StartClient", body: Body) -> None:
    client = start()
    client.embed(body(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of what is tested here
        child = os.fork()
    if child == 0:
        try:
            client.close()
            client.embed(body(1))
        except CallerError:
            os._exit(42)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 42
    assert client.embed(body(2))


def test_a_cancelled_call_leaves_its_neighbours_their_answers(
    start: "StartClient", runtime: "ScriptedRuntime", body: Body
) -> None:
    client = start(max_batch_size=2, max_wait_ms=LONG_MS)
    queued = _count_queued(client)

    async def crowd() -> list[str]:
        lost = asyncio.create_task(client.embed_async(body(0)))
        await asyncio.to_thread(queued.acquire)
        lost.cancel()
        with pytest.raises(asyncio.CancelledError):
            await lost
        return list(await asyncio.gather(client.embed_async(body(1)), client.embed_async(body(2))))

    assert [json.loads(answer)["patch_idx"] for answer in asyncio.run(crowd())] == [1, 2]
    assert runtime.rows == [2]


# Faults.


def test_an_explicit_batch_with_bad_items_loses_nothing(
    start: "StartClient", runtime: "ScriptedRuntime", body: Body
) -> None:
    client = start(max_batch_size=4)
    runtime.react = lambda batch, outputs: (
        _fail(batch, outputs) if 2 in batch[:, 0, 0, 0] else _poisoned(5)(batch, outputs)
    )
    bodies = [body(0), body(1, colour=1), body(2), body(3), body(4, image_data="AAAA"), body(5), body(6)]
    with pytest.raises(
        BatchError, match=r"4 of 7 items failed; the first: invalid_request: request field colour"
    ) as caught:
        client.embed_batch(bodies)
    results = caught.value.results
    assert [getattr(result, "code", "answered") for result in results] == [
        "answered", "invalid_request", "tile_error", "answered", "bad_request", "non_finite_output", "answered",
    ]  # fmt: skip
    assert [json.loads(r)["patch_idx"] for r in results if isinstance(r, str)] == [0, 3, 6]


class Sour(BaseServerModel):
    """Its stage 1 raises whatever it is told to."""

    error: BaseException = RuntimeError("no reason")

    def prepare_sample(self, request: ModelRequest) -> PreparedSample:
        raise self.error


@pytest.mark.parametrize(
    "error", [RuntimeError("torn"), KeyError("x"), MemoryError(), SystemExit(3), AssertionError(), OSError(5, "io")]
)
def test_whatever_stage_1_raises_is_that_requests_value_error_and_nothing_is_queued(
    start: "StartClient", demo_checkpoint: Checkpoint, body: Body, error: BaseException
) -> None:
    path = demo_checkpoint.path
    model = Sour(demo_checkpoint.manifest.spec, path.name, "cpu", path.parent)
    model.error = error
    client = start(model, max_wait_ms=0)
    with pytest.raises(ValueError, match=f"demo cannot prepare this request: {type(error).__name__}"):
        client.predict(body(1))
    (refused,) = _gather(client.embed_async(body(1)))
    assert isinstance(refused, BadRequest)
    statistics = client.statistics()
    assert statistics is not None
    assert statistics.accepted == 0


class Legacy(BaseServerModel):
    """Only the older way: requests in, (N, D) out."""

    def forward(self, requests: Sequence[ModelRequest]) -> NDArray[np.float32]:
        return np.array([[q.patch_idx, q.x, len(requests) > 0] for q in requests], np.float32)


def test_a_subclass_with_nothing_but_the_legacy_forward_works_through_every_call(
    start: "StartClient", demo_checkpoint: Checkpoint, body: Body
) -> None:
    path = demo_checkpoint.path
    client = start(Legacy(demo_checkpoint.manifest.spec, path.name, "cpu", path.parent), max_wait_ms=1)
    bodies = [body(number) for number in range(3)]
    for name in ("predict", "embed"):
        answers = [getattr(client, name)(b) for b in bodies]
        answers += getattr(client, f"{name}_batch")(bodies)
        answers += [str(a) for a in _gather(*[getattr(client, f"{name}_async")(b) for b in bodies])]
        assert [_values(a)[0] for a in answers] == [[n, n * 224, 1] for n in range(3)] * 3


def _fail(_batch: NDArray[np.uint8], _outputs: object) -> Any:
    raise RuntimeError("the graph is unwell")


@pytest.mark.parametrize(
    "break_it",
    [lambda outputs: tuple(o[:-1] for o in outputs), lambda outputs: tuple(o[:, :-1] for o in outputs), lambda _: ()],
    ids=["a row short", "a column short", "nothing"],
)
def test_a_model_that_breaks_its_contract_delivers_nothing_to_anyone(
    start: "StartClient", runtime: "ScriptedRuntime", body: Body, break_it: Callable[[Any], Any]
) -> None:
    client = start(max_batch_size=2, max_wait_ms=LONG_MS)
    runtime.react = lambda _batch, outputs: break_it(outputs)
    with pytest.raises(ModelContractError):
        client.predict_batch([body(0), body(1)])
    answers = _gather(*[client.predict_async(body(number)) for number in range(2)])
    assert all(isinstance(answer, ModelContractError) for answer in answers)


def test_an_explicit_batch_that_does_not_fit_in_memory_is_halved_and_the_limit_remembered(
    start: "StartClient", runtime: "ScriptedRuntime", body: Body
) -> None:
    client = start(max_batch_size=8)

    def react(batch: NDArray[np.uint8], outputs: Any) -> Any:
        if len(batch) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return outputs

    runtime.react = react
    bodies = [body(number) for number in range(6)]
    assert [json.loads(answer)["patch_idx"] for answer in client.embed_batch(bodies)] == list(range(6))
    assert runtime.rows == [6, 3, 2, 1, 3, 2, 1]
    runtime.rows.clear()
    client.embed_batch(bodies)
    assert runtime.rows == [2, 2, 2]
    runtime.react = lambda batch, _outputs: (_ for _ in ()).throw(torch.OutOfMemoryError("out of memory"))
    with pytest.raises(ForwardError, match="no memory for this tile even alone") as caught:
        client.embed(body(0))
    assert caught.value.retryable


def test_a_device_that_breaks_within_an_explicit_batch_leaves_the_answers_before_it(
    start: "StartClient", runtime: "ScriptedRuntime", body: Body
) -> None:
    client = start(max_batch_size=2)

    def react(_batch: NDArray[np.uint8], outputs: Any) -> Any:
        if len(runtime.rows) > 1:
            raise torch.AcceleratorError("CUDA error: device-side assert triggered")
        return outputs

    runtime.react = react
    with pytest.raises(BatchError, match="3 of 5 items failed") as caught:
        client.embed_batch([body(number) for number in range(5)])
    assert [type(result) for result in caught.value.results] == [str, str, DeviceBroken, DeviceBroken, DeviceBroken]
    assert runtime.rows == [2, 2]
    with pytest.raises(DeviceBroken):
        client.embed_batch([body(0), body(1)])


# The tensor path.


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "explicit"])
def test_a_prepared_sample_comes_back_as_arrays(
    start: "StartClient", server: BaseServerModel, runtime: "ScriptedRuntime", dynamic: bool
) -> None:
    client = start(max_batch_size=3, max_wait_ms=LONG_MS, dynamic_batching=dynamic)
    samples = [server.prepare_tile(make_tile(number)) for number in range(3)]
    futures = [client.submit(sample, mode) for sample, mode in zip(samples, METHODS, strict=True)]
    found = [future.result(20) for future in futures]
    expected = server.forward_tiles(samples, ["prediction_with_embedding"] * 3)
    assert runtime.rows == ([3, 3] if dynamic else [1, 1, 1, 3])
    for number, (mode, row) in enumerate(zip(METHODS, expected, strict=True)):
        assert not isinstance(row, NonFiniteOutput)
        for head in ("embedding", "prediction"):
            values = getattr(found[number], head)
            assert (values is None) == (head not in mode)
            if values is not None:
                np.testing.assert_allclose(values, getattr(row, head), atol=1e-6)


def test_a_sample_whose_deadline_passes_in_the_queue_never_runs(
    start: "StartClient", server: BaseServerModel, runtime: "ScriptedRuntime"
) -> None:
    client = start(max_wait_ms=0)
    runtime.hold()
    first = client.submit(server.prepare_tile(make_tile(0)))
    runtime.wait_until_called()
    late = client.submit(server.prepare_tile(make_tile(1)), "embedding", 0.05)
    with pytest.raises(DeadlineExceeded):
        late.result(20)
    runtime.release()
    assert first.result(20).embedding is not None
    assert runtime.rows == [1]


def test_the_tensor_path_refuses_a_mode_without_a_head_and_a_model_that_needs_requests(
    start: "StartClient", server: BaseServerModel, demo_checkpoint: Checkpoint
) -> None:
    sample, path = server.prepare_tile(make_tile(0)), demo_checkpoint.path
    with pytest.raises(BadRequest, match="demo has no mode 'metadata'"):
        start().submit(sample, "metadata")  # type: ignore[arg-type]
    own = start(OwnForward(demo_checkpoint.manifest.spec, path.name, "cpu", path.parent))
    with pytest.raises(BadRequest, match="takes requests, not samples"):
        own.submit(sample, "embedding")


class OwnForward(BaseServerModel):
    """A model with its own stage 2, as the contract lets subclasses have."""

    def forward_batch(
        self, samples: Sequence[PreparedSample], requests: Sequence[ModelRequest], mode: Mode
    ) -> list[ModelResponse]:
        answers = super().forward_batch(samples, requests, mode)
        return [answer.model_copy(update={"output": [*answer.output, float(len(mode))]}) for answer in answers]


def test_a_subclass_with_its_own_forward_is_asked_the_same_way_by_every_call(
    start: "StartClient", demo_checkpoint: Checkpoint, body: Body
) -> None:
    path = demo_checkpoint.path
    client = start(OwnForward(demo_checkpoint.manifest.spec, path.name, "cpu", path.parent), max_wait_ms=1)
    bodies = [body(number) for number in range(3)]
    for mode, name in METHODS.items():
        (answer,) = _gather(getattr(client, f"{name}_async")(bodies[0]))
        assert _values(str(answer))[0][-1] == len(mode)
    mixed = _gather(client.embed_async(bodies[0]), client.predict_async(bodies[1]), client.embed_async(bodies[2]))
    alone = [client.embed(bodies[0]), client.predict(bodies[1]), client.embed(bodies[2])]
    for found, expected in zip(mixed, alone, strict=True):
        np.testing.assert_allclose(_values(str(found))[0], _values(expected)[0], atol=1e-6)


# Settings and life.


@pytest.mark.parametrize(
    "settings", [{"max_batch_size": 0}, {"max_wait_ms": -1}, {"max_wait_ms": float("nan")}, {"max_batch_size": 5000}]
)
def test_settings_out_of_range_are_a_config_error_and_leave_no_thread(
    start: "StartClient", settings: dict[str, float]
) -> None:
    with pytest.raises(ConfigError, match="max_"):
        start(**settings)


def test_batches_larger_than_the_model_was_loaded_for_are_refused_at_the_start(demo_checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="max_batch_size 3 is more than demo takes: 2"):
        InProcessClient(load_server_model(demo_checkpoint, fixed_batch=2), max_batch_size=3)


def test_a_client_from_a_checkpoint_answers(demo_checkpoint: Checkpoint, body: Body) -> None:
    with InProcessClient.from_checkpoint("demo", demo_checkpoint.path, max_wait_ms=0) as client:
        assert len(json.loads(client.embed(body(1)))["output"]) == 64


def test_a_client_from_a_checkpoint_of_another_model_is_refused(demo_checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="holds demo, not h1"):
        InProcessClient.from_checkpoint("h1", demo_checkpoint.path)
    with pytest.raises(ConfigError, match="demo takes no assets folder"):
        InProcessClient.from_checkpoint("demo", demo_checkpoint.path, assets=demo_checkpoint.path.parent)


@pytest.mark.parametrize("dynamic", [True, False], ids=["dynamic", "explicit"])
def test_closing_twice_is_closing_once_and_later_calls_are_told(
    start: "StartClient", body: Body, dynamic: bool
) -> None:
    client = start(dynamic_batching=dynamic, max_wait_ms=0)
    client.predict(body(0))
    client.close()
    client.close()
    with pytest.raises(ServerClosed, match="the client of demo is closed: make a new one"):
        client.predict(body(0))
    (refused,) = _gather(client.predict_async(body(0)))
    assert isinstance(refused, ServerClosed)
    assert "demo" in client.metadata()


def test_closing_answers_what_is_queued(start: "StartClient", body: Body) -> None:
    client = start(max_batch_size=8, max_wait_ms=LONG_MS)
    queued = _count_queued(client)

    async def crowd() -> list[str]:
        tasks = [asyncio.create_task(client.embed_async(body(number))) for number in range(3)]
        for _ in tasks:
            await asyncio.to_thread(queued.acquire)
        await asyncio.to_thread(client.close)
        return list(await asyncio.gather(*tasks))

    assert [json.loads(answer)["patch_idx"] for answer in asyncio.run(crowd())] == [0, 1, 2]
