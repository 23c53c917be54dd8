"""The in-process client: one answer whichever way it is asked, shared batches, and faults kept apart."""

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray

from inference.clients import InProcessClient
from inference.contract import Client, ModelMetadata, ModelRequest, ModelResponse, parse_request
from inference.errors import BadRequest, ConfigError, ForwardError, ModelContractError, NonFiniteOutput, ServerClosed
from inference.models.registry import Checkpoint
from inference.models.sample import Mode, PreparedSample
from inference.models.server_model import BaseServerModel, load_server_model

if TYPE_CHECKING:
    from tests.inference.clients.conftest import ScriptedRuntime, StartClient

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
    scheduler, queued = client._scheduler, threading.Semaphore(0)
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


def test_an_answer_echoes_where_its_tile_came_from(start: "StartClient", body: Body) -> None:
    client = start(max_wait_ms=0)
    request = body(3, tissue_ratio=None)
    echoed = {k: v for k, v in json.loads(request).items() if k != "image_data"}
    for answer in [client.predict(request), *_gather(client.predict_async(request))]:
        assert isinstance(answer, str)
        found = json.loads(answer)
        assert {k: v for k, v in found.items() if k != "output"} == echoed
        assert ModelResponse.model_validate_json(answer).patch_idx == 3


def test_the_metadata_is_the_models_as_json(start: "StartClient", server: BaseServerModel) -> None:
    assert ModelMetadata.model_validate_json(start().metadata()) == server.get_metadata()


def test_it_can_stand_wherever_a_client_is_asked_for(start: "StartClient") -> None:
    client: Client = start()
    assert all(callable(getattr(client, name)) for name in dir(Client) if not name.startswith("_"))


def test_no_bodies_give_no_answers(start: "StartClient", runtime: "ScriptedRuntime") -> None:
    assert start().predict_batch([]) == []
    assert runtime.rows == []


def test_an_explicit_batch_beyond_the_limit_runs_in_parts_in_order(
    start: "StartClient", runtime: "ScriptedRuntime", body: Body
) -> None:
    answers = start(max_batch_size=2).predict_batch([body(number) for number in range(5)])
    assert runtime.rows == [2, 2, 1]
    assert [json.loads(answer)["patch_idx"] for answer in answers] == [0, 1, 2, 3, 4]


# Batches.


def test_concurrent_calls_of_all_modes_fill_one_batch(
    start: "StartClient", runtime: "ScriptedRuntime", body: Body
) -> None:
    client = start(max_batch_size=6, max_wait_ms=LONG_MS)
    calls = [getattr(client, f"{name}_async")(body(i)) for i, name in enumerate([*METHODS.values()] * 2)]
    answers = [answer for answer in _gather(*calls) if isinstance(answer, str)]
    assert [len(json.loads(answer)["output"]) for answer in answers] == [64, 3, 3] * 2
    assert runtime.rows == [6]
    statistics = client.statistics()
    assert statistics is not None
    assert statistics.batch_sizes == {6: 1}


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


def test_two_event_loops_in_two_threads_share_one_batch(
    start: "StartClient", runtime: "ScriptedRuntime", body: Body
) -> None:
    client = start(max_batch_size=6, max_wait_ms=LONG_MS)
    answers: dict[int, list[str | BaseException]] = {}

    def loop(first: int) -> None:
        answers[first] = _gather(*[client.embed_async(body(number)) for number in range(first, first + 3)])

    threads = [threading.Thread(target=loop, args=(first,)) for first in (0, 10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert runtime.rows == [6]
    for first, found in answers.items():
        assert [json.loads(str(answer))["patch_idx"] for answer in found] == [first, first + 1, first + 2]


def test_the_client_outlives_the_event_loops_that_use_it(start: "StartClient", body: Body) -> None:
    client = start(max_wait_ms=0)
    first, second = (_gather(client.embed_async(body(1)))[0] for _ in range(2))
    assert first == second


def test_without_dynamic_batching_every_async_call_runs_alone(
    start: "StartClient", runtime: "ScriptedRuntime", body: Body
) -> None:
    client = start(dynamic_batching=False)
    answers = _gather(*[client.predict_async(body(number)) for number in range(4)])
    assert [json.loads(str(answer))["patch_idx"] for answer in answers] == [0, 1, 2, 3]
    assert runtime.rows == [1, 1, 1, 1]
    assert client.statistics() is None


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


@pytest.mark.parametrize(
    "change",
    [
        {"colour": 1}, {"width": 223}, {"image_data": "!"}, {"image_data": "AAAA"}, {"size": 100}, {"x": 0.5},
        {"model_name": "h1"}, {"mode": "embedding"}, {"mode": "metadata"},
    ],
    ids=str,
)  # fmt: skip
def test_a_bad_request_is_that_callers_value_error_and_never_queued(
    start: "StartClient", runtime: "ScriptedRuntime", body: Body, change: dict[str, object]
) -> None:
    client = start(max_wait_ms=0)
    bad = body(1, **change)
    with pytest.raises(ValueError, match=r".") as caught:
        client.predict(bad)
    assert isinstance(caught.value, BadRequest)
    with pytest.raises(BadRequest):
        client.predict_batch([body(0), bad])
    assert runtime.rows == []
    refused, answer = _gather(client.predict_async(bad), client.predict_async(body(2)))
    assert isinstance(refused, BadRequest)
    assert json.loads(str(answer))["patch_idx"] == 2
    statistics = client.statistics()
    assert statistics is not None
    assert (statistics.accepted, runtime.rows) == (1, [1])


def test_a_request_may_name_the_model_and_mode_it_is_sent_to(start: "StartClient", body: Body) -> None:
    assert "output" in json.loads(start().predict(body(1, model_name="demo", mode="prediction")))


def test_a_head_that_the_model_lacks_is_a_value_error_before_the_queue(
    start: "StartClient", body: Body, demo_checkpoint: Checkpoint
) -> None:
    model = load_server_model(demo_checkpoint)
    model._spec = model._spec.model_copy(update={"output_type": "embedding", "prediction_names": ()})
    client = start(model)
    for call in (client.predict, client.predict_with_embedding):
        with pytest.raises(ValueError, match=r"demo has no mode '.*'; it offers embedding"):
            call(body())
    (refused,) = _gather(client.predict_async(body()))
    assert isinstance(refused, BadRequest)
    statistics = client.statistics()
    assert statistics is not None
    assert statistics.accepted == 0


def test_a_tile_without_a_finite_answer_fails_alone(
    start: "StartClient", runtime: "ScriptedRuntime", body: Body
) -> None:
    client = start(max_batch_size=4, max_wait_ms=LONG_MS)
    runtime.react = _poisoned(2)
    answers = _gather(*[client.embed_async(body(number)) for number in range(1, 5)])
    assert [type(answer) for answer in answers] == [str, NonFiniteOutput, str, str]
    assert runtime.rows == [4]
    with pytest.raises(NonFiniteOutput):
        client.embed(body(2))
    assert "NaN" not in client.embed(body(1))


def _fail(_batch: NDArray[np.uint8], _outputs: object) -> Any:
    raise RuntimeError("the graph is unwell")


def test_a_model_that_raises_gives_every_caller_a_forward_error_and_works_again_afterwards(
    start: "StartClient", runtime: "ScriptedRuntime", body: Body
) -> None:
    client = start(max_batch_size=3, max_wait_ms=LONG_MS)
    healthy, runtime.react = runtime.react, _fail
    with pytest.raises(ForwardError, match="the forward pass of demo failed: RuntimeError: the graph is unwell"):
        client.predict_batch([body(0), body(1)])
    answers = _gather(*[client.predict_async(body(number)) for number in range(3)])
    assert all(isinstance(answer, ForwardError) for answer in answers)
    assert len({id(answer) for answer in answers}) == 3
    runtime.react = healthy
    assert json.loads(client.predict(body(5)))["patch_idx"] == 5


def test_a_tile_that_makes_the_model_raise_fails_alone(
    start: "StartClient", runtime: "ScriptedRuntime", body: Body
) -> None:
    client = start(max_batch_size=4, max_wait_ms=LONG_MS)
    runtime.react = lambda batch, outputs: _fail(batch, outputs) if 2 in batch[:, 0, 0, 0] else outputs
    answers = _gather(*[client.embed_async(body(number)) for number in range(1, 5)])
    assert [isinstance(answer, ForwardError) for answer in answers] == [False, True, False, False]


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
