"""The HTTP client: when it asks again, what it makes of answers, and what it leaves behind."""

import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from inference.clients import HttpClient, http
from inference.errors import (
    BadRequest,
    CallerError,
    ConfigError,
    DeadlineExceeded,
    ForwardError,
    InferenceError,
    NonFiniteOutput,
    Overloaded,
    QueueFull,
    ServerClosed,
    TileError,
    TooLarge,
    Unauthorized,
    UnknownModel,
)
from inference.models.rna import bulk_rna_sha256
from inference.models.sample import TileOutput
from tests.inference.clients.doubles import PATIENCE_S, make_body, make_tile

if TYPE_CHECKING:
    from tests.inference.clients.doubles import ScriptedRuntime, StartService

Answer = tuple[int, str, dict[str, str]]

WITHOUT_TORCH = """
import sys, inference
inference.ModelRequest, inference.ModelSpec
import inference.serving.command
assert not {"fastapi", "httpx", "torch", "uvicorn"} & set(sys.modules), "import inference"
inference.HttpClient
assert "httpx" in sys.modules
assert not {"fastapi", "torch", "uvicorn"} & set(sys.modules), "HttpClient"
"""


class Scripted:
    """A service that answers what a test wrote down, in turn; the last answer stays."""

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)
        self.requests: list[httpx.Request] = []

    async def __call__(self, request: httpx.Request) -> httpx.Response:
        self.requests.append(request)
        status, text, headers = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
        return httpx.Response(status, text=text, headers=headers)


def told(status: int, code: str, *, retryable: bool, **headers: str) -> Answer:
    body = {"code": code, "message": "why; what to do", "retryable": retryable, "request_id": "r"}
    return status, json.dumps(body), {name.replace("_", "-"): value for name, value in headers.items()}


OK: Answer = (200, "the answer", {})
Connect = Callable[..., HttpClient]


@pytest.fixture
def connect(monkeypatch: pytest.MonkeyPatch) -> Iterator[Connect]:
    """Makes clients of a scripted service that pause for next to nothing; afterwards their threads are gone."""
    monkeypatch.setattr(http, "FIRST_PAUSE_S", 0.001)
    before = set(threading.enumerate())
    made: list[HttpClient] = []

    def make(service: Callable[[httpx.Request], object], **settings: object) -> HttpClient:
        transport = httpx.MockTransport(service)  # type: ignore[arg-type]
        made.append(HttpClient("http://service", "demo", transport=transport, **settings))  # type: ignore[arg-type]
        return made[-1]

    yield make
    for client in made:
        client.close()
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(
    "refusal",
    [told(429, "queue_full", retryable=True), told(503, "overloaded", retryable=True, Retry_After="0")],
    ids=["429", "503"],
)
def test_a_refusal_that_may_pass_is_asked_again_under_the_same_name(
    connect: Connect, refusal: tuple[int, str, dict[str, str]]
) -> None:
    service = Scripted(refusal, refusal, OK)
    assert connect(service).predict("{}") == "the answer"
    assert len(service.requests) == 3
    assert len({request.headers["X-Request-Id"] for request in service.requests}) == 1
    assert {request.content for request in service.requests} == {b"{}"}


@pytest.mark.parametrize(
    ("refusal", "kind"),
    [
        (told(400, "bad_request", retryable=True), BadRequest),
        (told(401, "unauthorized", retryable=False), Unauthorized),
        (told(404, "unknown_model", retryable=False), UnknownModel),
        (told(413, "too_large", retryable=True), TooLarge),
        (told(429, "queue_full", retryable=False), QueueFull),
        (told(503, "tile_error", retryable=False), TileError),
        (told(503, "non_finite_output", retryable=False), NonFiniteOutput),
        (told(504, "deadline_exceeded", retryable=True), DeadlineExceeded),
        (told(500, "error", retryable=True), InferenceError),
        ((503, "<html>a balancer's</html>", {}), Overloaded),
        ((404, "<html>someone else's</html>", {}), CallerError),
        (told(503, "a_code_of_later", retryable=False), Overloaded),
    ],
)
def test_any_other_answer_is_its_error_at_once(connect: Connect, refusal: Answer, kind: type[InferenceError]) -> None:
    service = Scripted(refusal, OK)
    with pytest.raises(kind) as caught:
        connect(service).predict("{}")
    assert type(caught.value) is kind
    assert len(service.requests) == 1


def test_it_gives_up_after_so_many_tries_with_the_error_it_was_told(connect: Connect) -> None:
    service = Scripted(told(503, "forward_error", retryable=True))
    with pytest.raises(ForwardError, match="why; what to do") as caught:
        connect(service, max_retries=2).predict("{}")
    assert len(service.requests) == 3
    assert caught.value.fields == {"request_id": "r", "status": 503}


def test_it_waits_at_least_as_long_as_it_is_asked_to(connect: Connect) -> None:
    service = Scripted(told(429, "queue_full", retryable=True, Retry_After="1"), OK)
    started = time.monotonic()
    connect(service).predict("{}")
    assert time.monotonic() - started >= 1


def test_pauses_grow_are_random_and_come_on_top_of_what_is_asked_for() -> None:
    pauses = [[http._pause(attempt, "") for _ in range(50)] for attempt in range(8)]
    assert all(len(set(found)) > 40 for found in pauses)
    assert all(0.125 * 2**n <= min(found) <= max(found) <= 0.25 * 2**n for n, found in enumerate(pauses[:5]))
    assert max(max(found) for found in pauses) <= http.LONGEST_PAUSE_S
    assert all(5.125 <= http._pause(0, "5") <= 5.25 for _ in range(50))
    assert http._pause(0, "99999") < http.MAX_RETRY_AFTER_S + 1
    assert http._pause(0, "Wed, 21 Oct 2026 07:28:00 GMT") < 1


def test_each_method_has_its_route_and_the_token_goes_along(connect: Connect) -> None:
    service = Scripted(OK)
    client = connect(service, token="open sesame, please")  # noqa: S106 - made up
    for call in (client.predict, client.embed, client.predict_with_embedding):
        call("{}")
    client.metadata()
    assert [(request.method, request.url.path) for request in service.requests] == [
        ("POST", "/api/predict/demo"), ("POST", "/api/embed/demo"), ("POST", "/api/predict_with_embedding/demo"),
        ("GET", "/api/metadata/demo"),
    ]  # fmt: skip
    assert {request.headers["Authorization"] for request in service.requests} == {"Bearer open sesame, please"}


def test_a_models_name_cannot_lead_to_another_route(connect: Connect) -> None:
    service = Scripted(OK)
    client = HttpClient("http://service", "../ping?x=", transport=httpx.MockTransport(service))
    client.predict("{}")
    client.close()
    assert service.requests[0].url.raw_path == b"/api/predict/..%2Fping%3Fx%3D"


def test_no_more_requests_are_under_way_than_allowed(connect: Connect) -> None:
    under_way, most = 0, 0

    async def service(_request: httpx.Request) -> httpx.Response:
        nonlocal under_way, most
        under_way += 1
        most = max(most, under_way)
        await asyncio.sleep(0.001)
        under_way -= 1
        return httpx.Response(200, text="x")

    assert connect(service, max_concurrent=7).embed_batch(["{}"] * 100) == ["x"] * 100
    assert most == 7


def test_a_service_that_does_not_answer_in_time_is_a_deadline_and_one_that_is_not_there_overload(
    connect: Connect,
) -> None:
    async def silent(_request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(PATIENCE_S)
        raise AssertionError

    with pytest.raises(DeadlineExceeded, match=r"gave no answer within 0\.05 s"):
        connect(silent, timeout_s=0.05).predict("{}")
    with (
        HttpClient("http://127.0.0.1:9", "demo") as nobody,
        pytest.raises(Overloaded, match=r"cannot be reached \(ConnectError\)"),
    ):
        nobody.predict("{}")


def test_closing_ends_what_is_under_way(connect: Connect) -> None:
    entered = threading.Event()

    async def silent(_request: httpx.Request) -> httpx.Response:
        entered.set()
        await asyncio.sleep(PATIENCE_S)
        raise AssertionError

    client = connect(silent)
    raised: list[BaseException] = []

    def call() -> None:
        try:
            client.predict("{}")
        except InferenceError as error:
            raised.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    assert entered.wait(PATIENCE_S)
    client.close()
    thread.join(PATIENCE_S)
    assert [type(error) for error in raised] == [ServerClosed]
    with pytest.raises(ServerClosed):
        client.metadata()


@pytest.mark.parametrize(
    "settings", [{"timeout_s": 0}, {"timeout_s": float("nan")}, {"max_concurrent": 0}, {"max_retries": -1}]
)
def test_settings_out_of_range_are_a_config_error(settings: dict[str, float]) -> None:
    with pytest.raises(ConfigError):
        HttpClient("http://service", "demo", **settings)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="is no address of a service"):
        HttpClient("service:8080", "demo")


@pytest.mark.parametrize("compress", [False, True], ids=["raw", "lz4"])
def test_many_tiles_go_in_one_request_and_each_has_its_result_or_error(
    serve: "StartService", runtime: "ScriptedRuntime", compress: bool
) -> None:
    app = serve(max_batch_size=4, max_wait_ms=0)
    with HttpClient("http://service", "demo", transport=httpx.ASGITransport(app)) as client:
        tiles = np.stack([make_tile(number) for number in range(4)])
        good = client.run_tiles(tiles, "prediction_with_embedding", slide_name="s", compress=compress)
        for number, row in enumerate(good):
            assert isinstance(row, TileOutput)
            assert row.prediction is not None
            assert row.embedding is not None
            alone = json.loads(client.predict_with_embedding(make_body(number)))
            np.testing.assert_allclose(row.prediction, alone["output"], atol=1e-6)
            np.testing.assert_allclose(row.embedding, alone["embedding"], atol=1e-6)

        def spoil(batch: object, outputs: object) -> object:
            for output in outputs:  # type: ignore[attr-defined]
                output[batch[:, 0, 0, 0] == 2] = np.nan  # type: ignore[index]
            return outputs

        runtime.react = spoil  # type: ignore[assignment]
        mixed = client.run_tiles(tiles, "embedding", compress=compress)
        assert [type(row) for row in mixed] == [TileOutput, TileOutput, NonFiniteOutput, TileOutput]
        last, before = mixed[3], good[3]
        assert isinstance(last, TileOutput)
        assert isinstance(before, TileOutput)
        assert last.embedding is not None
        assert before.embedding is not None
        np.testing.assert_allclose(last.embedding, before.embedding, atol=1e-6)
        assert last.prediction is None


def test_tiles_of_another_shape_or_kind_are_refused_before_they_are_sent(connect: Connect) -> None:
    service = Scripted(OK)
    client = connect(service)
    wrong: list[NDArray[Any]] = [
        np.zeros((4, 4, 3), np.uint8),
        np.zeros((1, 4, 4, 3), np.float32),
        np.zeros((0, 4, 4, 3), np.uint8),
    ]
    for tiles in wrong:
        with pytest.raises(BadRequest, match="tiles are uint8"):
            client.run_tiles(tiles)
    assert service.requests == []


def test_registering_rna_sends_its_values_under_their_digest(connect: Connect) -> None:
    service = Scripted(OK)
    values = [0.1, 2.0, 1e-7]
    assert connect(service).register_bulk_rna(values) == bulk_rna_sha256(values)
    (request,) = service.requests
    assert (request.method, request.url.path) == ("PUT", f"/api/bulk-rna/{bulk_rna_sha256(values)}")
    assert json.loads(request.content) == values


def test_importing_the_package_loads_no_web_library_and_the_client_no_torch() -> None:
    found = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
