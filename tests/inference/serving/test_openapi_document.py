"""Whatever fits the service's own description, or just fails to, is answered as the description says: never by 500."""

import asyncio
import json
import struct
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode

from inference.contract.faults import ErrorBody
from inference.contract.frames import MAGIC, MEDIA_TYPE, encode_tiles
from inference.models.registry import Checkpoint
from inference.models.server_model import load_server_model
from inference.serving import ServiceSettings, create_app
from tests.inference.clients.doubles import PATIENCE_S, make_body, make_tile

OPERATIONS = [
    "POST /api/embed/{model}", "POST /api/predict/{model}", "POST /api/predict_with_embedding/{model}",
    "POST /invocations", "GET /api/metadata/{model}", "PUT /api/bulk-rna/{sha256}", "GET /ping", "GET /metrics",
]  # fmt: skip

# A busy machine is no fault; the service is made once for all examples.
EXAMPLES = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck), database=None)

FIELDS = json.loads(make_body(1))
FRAME = encode_tiles(make_tile(1)[None], "embedding", "s")


class Asked:
    """One application, one loop and one connection for all examples of a test."""

    def __init__(self, app: FastAPI) -> None:
        self.document: dict[str, Any] = app.openapi()
        self._runner = asyncio.Runner()
        self._client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app), base_url="http://service", timeout=PATIENCE_S
        )

    def __call__(self, verb: str, path: str, **arguments: Any) -> httpx.Response:
        return self._runner.run(self._client.request(verb, path, **arguments))

    def close(self) -> None:
        self._runner.run(self._client.aclose())
        self._runner.close()

    def check(self, answer: httpx.Response, label: str) -> None:
        """The answer's status is one that is documented, and its body the documented form."""
        verb, path = label.split()
        assert answer.status_code != 500, answer.text
        assert str(answer.status_code) in self.document["paths"][path][verb.lower()]["responses"]
        assert answer.headers["X-Request-Id"]
        if answer.status_code != 200:
            ErrorBody.model_validate_json(answer.text)


@pytest.fixture(scope="module")
def asked(demo_checkpoint: Checkpoint) -> Iterator[Asked]:
    app = create_app([load_server_model(demo_checkpoint)], ServiceSettings(max_wait_ms=0))
    found = Asked(app)
    yield found
    found.close()
    app.state.service.models.close()


@pytest.mark.slow
@pytest.mark.parametrize("mode", GenerationMode, ids=lambda mode: mode.value)
@pytest.mark.parametrize("label", OPERATIONS)
def test_no_request_from_the_description_or_beside_it_finds_a_500(
    asked: Asked, label: str, mode: GenerationMode
) -> None:
    verb, path = label.split()
    operation = schemathesis.openapi.from_dict(asked.document)[path][verb]

    @EXAMPLES
    @given(case=operation.as_strategy(generation_mode=mode), here=st.booleans())
    def run(case: Any, here: bool) -> None:
        if here and "model" in (case.path_parameters or {}):
            case.path_parameters = {"model": "demo"}
        request = case.as_transport_kwargs(base_url="http://service")
        content = request.get("data")
        if "json" in request:
            content = json.dumps(request["json"]).encode()
        headers = {
            name: value
            for name, value in request["headers"].items()
            if str(value).isprintable() and str(value).isascii()
        }
        answer = asked(
            request["method"], request["url"], content=content, headers=headers, params=request.get("params")
        )
        # A path that is not one of ours may come out of a strange name.
        if answer.status_code not in (404, 405):
            asked.check(answer, label)

    run()


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*FIELDS, "q"]), inner, max_size=4),
    max_leaves=8,
)


@pytest.mark.parametrize("label", ["POST /api/embed/{model}", "POST /invocations"])
def test_a_good_request_with_some_fields_changed_finds_no_500(asked: Asked, label: str) -> None:
    names = [*FIELDS, "bulk_rna", "bulk_rna_sha256", "model_name", "mode", "q"]

    @settings(EXAMPLES, max_examples=100)
    @given(
        st.dictionaries(st.sampled_from(names), json_values, max_size=3), st.sets(st.sampled_from(names), max_size=2),
        st.binary(max_size=3), st.integers(0, 999),
    )  # fmt: skip
    def run(changes: dict[str, object], left_out: set[str], noise: bytes, place: int) -> None:
        named = {"model_name": "demo", "mode": "embedding"} if "invocations" in label else {}
        fields = {name: value for name, value in {**FIELDS, **named, **changes}.items() if name not in left_out}
        text = json.dumps(fields).encode("utf-8", "surrogatepass")
        for body in (text, text[:place] + noise + text[place:]):
            asked.check(asked("POST", label.split()[1].replace("{model}", "demo"), content=body), label)

    run()
    assert asked("POST", "/api/embed/demo", content=make_body(1)).status_code == 200


def test_a_binary_batch_with_some_bytes_or_fields_changed_finds_no_500(asked: Asked) -> None:
    label = "POST /api/batch/{model}"
    fields = {"mode": "embedding", "slide_name": "s", "shape": [1, 224, 224, 3], "encoding": "raw"}
    payload = FRAME[-224 * 224 * 3 :]

    @EXAMPLES
    @given(
        st.dictionaries(st.sampled_from([*fields, "bulk_rna_sha256", "q"]), json_values, max_size=2),
        st.integers(0, len(FRAME) - 1), st.integers(0, 255), st.integers(0, 300),
    )  # fmt: skip
    def run(changes: dict[str, object], place: int, value: int, cut: int) -> None:
        header = json.dumps({**fields, **changes}).encode("utf-8", "surrogatepass")
        damaged = bytearray(FRAME)
        damaged[place % 200] = value
        for body in (
            MAGIC + struct.pack("<I", len(header)) + header + payload, bytes(damaged), FRAME[: len(FRAME) - cut]
        ):  # fmt: skip
            headers = {"Content-Type": MEDIA_TYPE}
            asked.check(asked("POST", "/api/batch/demo", content=body, headers=headers), label)

    run()
    assert asked("POST", "/api/batch/demo", content=FRAME).status_code == 200
