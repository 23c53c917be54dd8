"""What every client promises, whatever lies between it and the model; subclass it with a `connect` fixture."""

import asyncio
import json
import threading
from collections.abc import Callable, Coroutine
from importlib.metadata import version
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from inference.contract import Client, ModelMetadata, ModelResponse, parse_request
from inference.errors import (
    BadRequest,
    BatchError,
    DeviceBroken,
    ForwardError,
    InferenceError,
    InvalidRequest,
    ModelContractError,
    NonFiniteOutput,
    ServerClosed,
    TileError,
)
from inference.models.registry import Checkpoint
from inference.models.sample import Mode
from inference.models.server_model import BaseServerModel, load_server_model
from tests.inference.clients.doubles import PATIENCE_S, ScriptedRuntime, make_body

METHODS: dict[Mode, str] = {
    "embedding": "embed",
    "prediction": "predict",
    "prediction_with_embedding": "predict_with_embedding",
}
LONG_MS = 60_000  # a batch that is not full waits for ever, as far as a test is concerned

Connect = Callable[..., Client]
"""A client of the demo model, or of another; settings are `max_batch_size` and `max_wait_ms`."""

REFUSED: list[tuple[str, type[InferenceError], str]] = [
    ("", BadRequest, "the body is not JSON"),
    ("\ufeff{}", BadRequest, "the body is not JSON"),
    ("[" * 100_000, BadRequest, "nested too deeply"),
    ('{"x": NaN}', BadRequest, "NaN is no JSON number"),
    ('{"x": 1, "x": 2}', BadRequest, "the key 'x' twice"),
    ('{"x": "\ud800"}', BadRequest, "not Unicode"),
    ("[1]", InvalidRequest, "request field body: "),
    ("{}", InvalidRequest, "image_data: Field required"),
    (make_body(1, colour=1), InvalidRequest, "request field colour: Extra inputs"),
    (make_body(1, x=0.5), InvalidRequest, "request field x: "),
    (make_body(1, width=0), InvalidRequest, "request field width: "),
    (make_body(1, bulk_rna_sha256="0"), InvalidRequest, "request field bulk_rna_sha256: "),
    (make_body(1, width=223), BadRequest, "demo takes 224 x 224 tiles, not 223 x 224"),
    (make_body(1, size=100), BadRequest, "demo takes 224 x 224"),
    (make_body(1, image_data="!"), BadRequest, "image_data is not base64"),
    (make_body(1, image_data="AAAA"), BadRequest, "neither a PNG nor a JPEG"),
    (make_body(1, bulk_rna=[1.0]), BadRequest, "demo takes no bulk RNA"),
    (make_body(1, model_name="h1"), BadRequest, "this client runs demo, the request names 'h1'"),
    (make_body(1, mode="embedding"), BadRequest, "the call is for mode prediction, the request names 'embedding'"),
    (make_body(1, mode="metadata"), BadRequest, "the request names 'metadata'"),
]


def gather(*calls: Coroutine[object, object, str]) -> list[str | BaseException]:
    async def together() -> list[str | BaseException]:
        return await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), PATIENCE_S)

    return asyncio.run(together())


def fail(_batch: NDArray[np.uint8], _outputs: object) -> Any:
    raise RuntimeError("the graph is unwell: /root/secret/model.so")


def ask_every_way(client: Client, mode: Mode, body: str) -> list[str]:
    name = METHODS[mode]
    found = [getattr(client, name)(body), *getattr(client, f"{name}_batch")([body])]
    (answer,) = gather(getattr(client, f"{name}_async")(body, "ignored"))
    return [*found, str(answer)]


class ClientContract:
    """One answer whichever way it is asked, the error of the same class, and faults kept apart."""

    # Results.

    @pytest.mark.parametrize("mode", METHODS)
    def test_every_way_of_asking_gives_what_the_model_gives(
        self, connect: Connect, server: BaseServerModel, mode: Mode
    ) -> None:
        client = connect(max_wait_ms=0)
        (row,) = server.forward_tiles([server.prepare_sample(parse_request(make_body(3)))], [mode])
        assert not isinstance(row, NonFiniteOutput)
        for answer in ask_every_way(client, mode, make_body(3)):
            found = ModelResponse.model_validate_json(answer)
            main = row.embedding if mode == "embedding" else row.prediction
            assert main is not None
            np.testing.assert_allclose(found.output, main, atol=1e-6)
            if mode == "prediction_with_embedding":
                assert row.embedding is not None
                assert found.embedding is not None
                np.testing.assert_allclose(found.embedding, row.embedding, atol=1e-6)
            else:
                assert "embedding" not in json.loads(answer)

    def test_an_answer_echoes_the_place_of_its_tile_and_says_what_made_it(
        self, connect: Connect, server: BaseServerModel
    ) -> None:
        client, request = connect(max_wait_ms=0), make_body(3, tissue_ratio=None)
        echoed = {k: v for k, v in json.loads(request).items() if k != "image_data"}
        ids = set()
        for answer in ask_every_way(client, "prediction", request):
            found = json.loads(answer)
            assert {k: v for k, v in found.items() if k not in ("output", "lineage")} == echoed
            lineage = found["lineage"]
            ids.add(lineage["request_id"])
            assert (lineage["model_name"], lineage["model_version"], lineage["precision"]) == ("demo", "1", "fp32")
            assert lineage["weights_sha256"] == server.manifest.weights_sha256
            assert lineage["preprocessing_sha256"] == server.model_spec.preprocessing_sha256
            assert lineage["code_version"] == version("slide-inference")
        assert len(ids) == 3

    def test_the_metadata_is_the_models(self, connect: Connect, server: BaseServerModel) -> None:
        assert ModelMetadata.model_validate_json(connect().metadata()) == ModelMetadata.model_validate_json(
            server.get_metadata().model_dump_json()
        )

    def test_it_can_stand_wherever_a_client_is_asked_for(self, connect: Connect) -> None:
        client: Client = connect()
        assert all(callable(getattr(client, name)) for name in dir(Client) if not name.startswith("_"))

    def test_no_bodies_give_no_answers(self, connect: Connect, runtime: ScriptedRuntime) -> None:
        assert connect().predict_batch([]) == []
        assert runtime.rows == []

    def test_answers_of_a_batch_come_in_the_order_of_its_bodies(self, connect: Connect) -> None:
        answers = connect(max_batch_size=2, max_wait_ms=0).predict_batch([make_body(number) for number in range(5)])
        assert [json.loads(answer)["patch_idx"] for answer in answers] == [0, 1, 2, 3, 4]

    def test_a_request_may_name_the_model_and_mode_it_is_sent_to(self, connect: Connect) -> None:
        assert "output" in json.loads(
            connect(max_wait_ms=0).predict(make_body(1, model_name="demo", mode="prediction"))
        )

    # Batches.

    def test_concurrent_calls_of_all_modes_fill_one_batch(self, connect: Connect, runtime: ScriptedRuntime) -> None:
        client = connect(max_batch_size=6, max_wait_ms=LONG_MS)
        calls = [getattr(client, f"{name}_async")(make_body(i)) for i, name in enumerate([*METHODS.values()] * 2)]
        answers = [answer for answer in gather(*calls) if isinstance(answer, str)]
        assert [len(json.loads(answer)["output"]) for answer in answers] == [64, 3, 3] * 2
        assert runtime.rows == [6]

    def test_two_event_loops_in_two_threads_share_one_batch(self, connect: Connect, runtime: ScriptedRuntime) -> None:
        client = connect(max_batch_size=6, max_wait_ms=LONG_MS)
        answers: dict[int, list[str | BaseException]] = {}

        def loop(first: int) -> None:
            answers[first] = gather(*[client.embed_async(make_body(number)) for number in range(first, first + 3)])

        threads = [threading.Thread(target=loop, args=(first,)) for first in (0, 10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert runtime.rows == [6]
        for first, found in answers.items():
            assert [json.loads(str(answer))["patch_idx"] for answer in found] == [first, first + 1, first + 2]

    def test_a_cancelled_call_leaves_its_neighbours_their_answers(
        self, connect: Connect, runtime: ScriptedRuntime
    ) -> None:
        client = connect(max_batch_size=4, max_wait_ms=0)
        runtime.hold()

        async def crowd() -> list[str]:
            first = asyncio.create_task(client.embed_async(make_body(0)))
            await asyncio.to_thread(runtime.wait_until_called)
            lost, kept = (asyncio.create_task(client.embed_async(make_body(number))) for number in (1, 2))
            lost.cancel()
            with pytest.raises(asyncio.CancelledError):
                await lost
            runtime.release()
            return list(await asyncio.gather(first, kept))

        assert [json.loads(answer)["patch_idx"] for answer in asyncio.run(crowd())] == [0, 2]

    # Faults.

    @pytest.mark.parametrize(("body", "kind", "says"), REFUSED, ids=[says for _, _, says in REFUSED])
    def test_what_cannot_be_used_is_that_callers_value_error_and_never_runs(
        self, connect: Connect, runtime: ScriptedRuntime, body: str, kind: type[InferenceError], says: str
    ) -> None:
        client = connect(max_wait_ms=0)
        with pytest.raises(kind, match=says) as caught:
            client.predict(body)
        assert (type(caught.value), isinstance(caught.value, ValueError)) == (kind, True)
        refused, answer = gather(client.predict_async(body), client.predict_async(make_body(2)))
        assert type(refused) is kind
        assert json.loads(str(answer))["patch_idx"] == 2
        assert runtime.rows == [1]

    def test_a_batch_with_a_bad_item_loses_nothing(self, connect: Connect) -> None:
        client = connect(max_wait_ms=0)
        with pytest.raises(BatchError, match="2 of 4 items failed; the first: bad_request: image_data") as caught:
            client.embed_batch([make_body(1), make_body(2, image_data="!"), make_body(3), "{}"])
        kinds = [type(result) for result in caught.value.results]
        assert kinds == [str, BadRequest, str, InvalidRequest]
        places = [json.loads(result)["patch_idx"] for result in caught.value.results if isinstance(result, str)]
        assert places == [1, 3]

    def test_a_head_that_the_model_lacks_is_a_value_error_before_the_queue(
        self, connect: Connect, demo_checkpoint: Checkpoint
    ) -> None:
        model = load_server_model(demo_checkpoint)
        model._spec = model._spec.model_copy(update={"output_type": "embedding", "prediction_names": ()})
        client = connect(model)
        for call in (client.predict, client.predict_with_embedding):
            with pytest.raises(ValueError, match=r"demo has no mode '.*'; it offers embedding"):
                call(make_body())
        (refused,) = gather(client.predict_async(make_body()))
        assert isinstance(refused, BadRequest)

    def test_a_tile_without_a_finite_answer_fails_alone(self, connect: Connect, runtime: ScriptedRuntime) -> None:
        client = connect(max_batch_size=4, max_wait_ms=LONG_MS)

        def spoil(batch: NDArray[np.uint8], outputs: tuple[NDArray[np.float32], ...]) -> Any:
            for output in outputs:
                output[batch[:, 0, 0, 0] == 2] = np.nan
            return outputs

        runtime.react = spoil
        answers = gather(*[client.embed_async(make_body(number)) for number in range(1, 5)])
        assert [type(answer) for answer in answers] == [str, NonFiniteOutput, str, str]
        assert runtime.rows == [4]

    def test_a_tile_that_makes_the_model_raise_fails_alone(self, connect: Connect, runtime: ScriptedRuntime) -> None:
        client = connect(max_batch_size=4, max_wait_ms=LONG_MS)
        runtime.react = lambda batch, outputs: fail(batch, outputs) if 2 in batch[:, 0, 0, 0] else outputs
        answers = gather(*[client.embed_async(make_body(number)) for number in range(1, 5)])
        assert [type(answer) for answer in answers] == [str, TileError, str, str]

    def test_a_model_that_raises_gives_every_caller_a_forward_error_and_works_again_afterwards(
        self, connect: Connect, runtime: ScriptedRuntime
    ) -> None:
        client = connect(max_batch_size=3, max_wait_ms=0)
        healthy, runtime.react = runtime.react, fail
        with pytest.raises(ForwardError, match="the forward pass of demo failed: RuntimeError") as caught:
            client.predict(make_body(0))
        assert isinstance(caught.value, RuntimeError)
        with pytest.raises(BatchError, match="2 of 2 items failed"):
            client.predict_batch([make_body(0), make_body(1)])
        answers = gather(*[client.predict_async(make_body(number)) for number in range(3)])
        assert all(isinstance(answer, ForwardError) for answer in answers)
        assert len({id(answer) for answer in answers}) == 3
        runtime.react = healthy
        assert json.loads(client.predict(make_body(5)))["patch_idx"] == 5

    def test_a_model_that_breaks_its_contract_delivers_nothing_to_anyone(
        self, connect: Connect, runtime: ScriptedRuntime
    ) -> None:
        client = connect(max_batch_size=2, max_wait_ms=LONG_MS)
        runtime.react = lambda _batch, outputs: tuple(output[:-1] for output in outputs)
        with pytest.raises(ModelContractError):
            client.predict_batch([make_body(0), make_body(1)])
        answers = gather(*[client.predict_async(make_body(number)) for number in range(2)])
        assert all(isinstance(answer, ModelContractError) for answer in answers)

    def test_a_device_that_breaks_stays_broken_for_every_later_call(
        self, connect: Connect, runtime: ScriptedRuntime
    ) -> None:
        client = connect(max_wait_ms=0)

        def break_down(_batch: NDArray[np.uint8], _outputs: object) -> Any:
            raise DeviceBroken("the device failed: an illegal memory access was encountered")

        healthy, runtime.react = runtime.react, break_down
        (first,) = gather(client.predict_async(make_body(0)))
        assert isinstance(first, DeviceBroken)
        runtime.react = healthy
        for call in (client.predict, client.embed):
            with pytest.raises(DeviceBroken):
                call(make_body(1))
        (refused,) = gather(client.predict_async(make_body(1)))
        assert isinstance(refused, DeviceBroken)
        assert len(runtime.rows) == 1

    # Life.

    def test_closing_twice_is_closing_once_and_later_calls_are_told(self, connect: Connect) -> None:
        client = connect(max_wait_ms=0)
        client.predict(make_body(0))
        client.close()
        client.close()
        with pytest.raises(ServerClosed, match="the client of demo is closed: make a new one"):
            client.predict(make_body(0))
        (refused,) = gather(client.predict_async(make_body(0)))
        assert isinstance(refused, ServerClosed)

    def test_the_client_outlives_the_event_loops_that_use_it(self, connect: Connect) -> None:
        client = connect(max_wait_ms=0)
        first, second = (gather(client.embed_async(make_body(1)))[0] for _ in range(2))
        assert json.loads(str(first))["output"] == json.loads(str(second))["output"]
