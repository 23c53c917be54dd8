"""The HTTP client: when it asks again, what it makes of answers, and what it leaves behind."""

import asyncio
import gzip
import json
import multiprocessing
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from inference.clients import HttpClient, http
from inference.contract.faults import ErrorBody
from inference.contract.frames import OutputRows, TileAnswers, encode_answers
from inference.errors import (
    BadRequest,
    CallerError,
    ConfigError,
    DeadlineExceeded,
    ForwardError,
    InferenceError,
    ModelContractError,
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


PLACE = {"slide_name": "s", "x": 1, "y": -2, "width": 4, "height": 4, "patch_idx": 7}
BODY = json.dumps({"image_data": "", **PLACE})
RESULT = {"output": [1.0, 2], "embedding": [0.5], **PLACE}
ANSWER = json.dumps(RESULT)
OK: Answer = (200, ANSWER, {})
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
    assert connect(service).predict(BODY) == ANSWER
    assert len(service.requests) == 3
    assert len({request.headers["X-Request-Id"] for request in service.requests}) == 1
    assert {request.content for request in service.requests} == {BODY.encode()}


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
        connect(service).predict(BODY)
    assert type(caught.value) is kind
    assert len(service.requests) == 1


def test_it_gives_up_after_so_many_tries_with_the_error_it_was_told(connect: Connect) -> None:
    service = Scripted(told(503, "forward_error", retryable=True))
    with pytest.raises(ForwardError, match="why; what to do") as caught:
        connect(service, max_retries=2).predict(BODY)
    assert len(service.requests) == 3
    assert caught.value.fields == {"request_id": "r", "status": 503}


def test_it_waits_at_least_as_long_as_it_is_asked_to(connect: Connect) -> None:
    service = Scripted(told(429, "queue_full", retryable=True, Retry_After="1"), OK)
    started = time.monotonic()
    connect(service).predict(BODY)
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
        call(BODY)
    client.metadata()
    assert [(request.method, request.url.path) for request in service.requests] == [
        ("POST", "/api/predict/demo"), ("POST", "/api/embed/demo"), ("POST", "/api/predict_with_embedding/demo"),
        ("GET", "/api/metadata/demo"),
    ]  # fmt: skip
    assert {request.headers["Authorization"] for request in service.requests} == {"Bearer open sesame, please"}


def test_a_models_name_cannot_lead_to_another_route(connect: Connect) -> None:
    service = Scripted(OK)
    client = HttpClient("http://service", "../ping?x=", transport=httpx.MockTransport(service))
    client.predict(BODY)
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
        return httpx.Response(200, text=ANSWER)

    assert connect(service, max_concurrent=7).embed_batch([BODY] * 100) == [ANSWER] * 100
    assert most == 7


def test_a_service_that_does_not_answer_in_time_is_a_deadline_and_one_that_is_not_there_overload(
    connect: Connect,
) -> None:
    async def silent(_request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(PATIENCE_S)
        raise AssertionError

    with pytest.raises(DeadlineExceeded, match=r"gave no answer within 0\.05 s"):
        connect(silent, timeout_s=0.05).predict(BODY)
    with (
        HttpClient("http://127.0.0.1:9", "demo") as nobody,
        pytest.raises(Overloaded, match=r"cannot be reached \(ConnectError\)"),
    ):
        nobody.predict(BODY)


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
            client.predict(BODY)
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


# Answers that are no results.


def changed(**fields: object) -> str:
    return json.dumps({**RESULT, **fields})


NO_RESULTS: dict[str, str | bytes] = {
    "a login page": "<html>login</html>",
    "nothing": "",
    "a list": "[1.0]",
    "no output": json.dumps(PLACE),
    "NaN": ANSWER.replace("1.0", "NaN"),
    "more than a float holds": ANSWER.replace("1.0", "1e999"),
    "more than a float holds, as an integer": ANSWER.replace("1.0", "1" * 400),
    "a text among the numbers": changed(output=[1.0, "2"]),
    "true among the numbers": changed(output=[True]),
    "lists of numbers": changed(output=[[1.0]]),
    "no numbers": changed(output=[]),
    "no embedding": changed(embedding=None),
    "nesting": "[" * 100_000,
    "a key twice": ANSWER.replace("{", '{"output": [1.0], ', 1),
    "bytes that are no text": b"\xff\xfe{}",
    **{f"another {name}": changed(**{name: "other" if name == "slide_name" else 9}) for name in PLACE},
}


@pytest.mark.parametrize("content", NO_RESULTS.values(), ids=NO_RESULTS.keys())
def test_what_is_no_result_of_the_tile_that_was_sent_is_the_services_fault(
    connect: Connect, content: str | bytes
) -> None:
    client = connect(lambda _request: httpx.Response(200, content=content))
    with pytest.raises(ModelContractError, match=r"the service's answer .*: does the address lead to this model's"):
        client.predict_with_embedding(BODY)


def test_an_answer_is_text_in_utf_8_whatever_its_content_type_says(connect: Connect) -> None:
    named = {**RESULT, "slide_name": "Gewebe-Ü"}
    headers = {"Content-Type": "text/plain; charset=rot13"}
    answer = json.dumps(named, ensure_ascii=False)
    client = connect(lambda _request: httpx.Response(200, content=answer.encode(), headers=headers))
    assert client.predict(json.dumps({**PLACE, "slide_name": "Gewebe-Ü"})) == answer


def test_metadata_and_the_receipt_of_rna_are_json_objects(connect: Connect) -> None:
    client = connect(Scripted((200, "<html>login</html>", {})))
    with pytest.raises(ModelContractError, match="is not JSON"):
        client.metadata()
    with pytest.raises(ModelContractError, match="is not JSON"):
        client.register_bulk_rna([1.0])
    with pytest.raises(ModelContractError, match="is no JSON object"):
        connect(Scripted((200, "[]", {}))).metadata()


def frame(
    good: int, bad: int = 0, outputs: dict[str, NDArray[Any]] | None = None, mode: str = "embedding", classes: int = 1
) -> bytes:
    error = ErrorBody(code="tile_error", message="m", retryable=False, request_id="r")
    arrays = {"embedding": np.ones((good, 4), np.float32)} if outputs is None else outputs
    rows = [
        OutputRows.model_validate(
            {"name": name, "shape": list(array.shape)}
            | ({"encoding": "uint8", "n_classes": classes} if name == "mask" else {})
        )
        for name, array in arrays.items()
    ]
    header = TileAnswers(request_id="r", mode=mode, errors=[None] * good + [error] * bad, outputs=rows)
    return encode_answers(header, list(arrays.values()))


ONES = np.ones((3, 4), np.float32)
NO_ROWS: dict[str, bytes] = {
    "no frame": b"<html>login</html>",
    "no header": b"STF1\xff\xff\xff\xff",
    "fewer tiles": frame(1),
    "more tiles": frame(5),
    "fewer rows": frame(3, outputs={"embedding": ONES[:1]}),
    "more rows": frame(2, 1, outputs={"embedding": ONES}),
    "no outputs": frame(3, outputs={}),
    "another output": frame(3, outputs={"prediction": ONES}),
    "another mode": frame(3, mode="prediction"),
    "NaN": frame(3, outputs={"embedding": ONES * np.float32("nan")}),
    "planes for vectors": frame(3, outputs={"embedding": np.ones((3, 2, 2), np.float32)}),
    "empty vectors": frame(3, outputs={"embedding": ONES[:, :0]}),
    "a mask of no classes": frame(3, outputs={"embedding": ONES, "mask": np.zeros((3, 2, 2), np.uint8)}, classes=0),
    "a mask of one class with others": frame(
        3, outputs={"embedding": ONES, "mask": np.full((3, 2, 2), 9, np.uint8)}, classes=2
    ),
    "a shape beyond numbers": frame(0, 3, outputs={"embedding": np.ones((0, 4), np.float32)}).replace(
        b"[0,4]", b"[0,%d]" % 2**70
    ),
}


@pytest.mark.parametrize("content", NO_ROWS.values(), ids=NO_ROWS.keys())
def test_what_is_no_answer_to_the_tiles_that_were_sent_is_the_services_fault(connect: Connect, content: bytes) -> None:
    client = connect(lambda _request: httpx.Response(200, content=content))
    with pytest.raises(ModelContractError, match="the service's answer"):
        client.run_tiles(np.zeros((3, 4, 4, 3), np.uint8))


def test_tiles_that_all_failed_have_no_rows(connect: Connect) -> None:
    client = connect(lambda _request: httpx.Response(200, content=frame(0, 3, outputs={})))
    assert [type(row) for row in client.run_tiles(np.zeros((3, 4, 4, 3), np.uint8))] == [TileError] * 3


def test_a_batch_that_cannot_be_put_into_a_request_is_the_callers_fault(connect: Connect) -> None:
    client, tiles = connect(Scripted(OK)), np.zeros((3, 4, 4, 3), np.uint8)
    for wrong in ({"slide_name": "s" * 5000}, {"slide_name": "\ud800"}, {"rna_sha256": "0"}, {"mode": "both"}):
        with pytest.raises(BadRequest):
            client.run_tiles(tiles, **wrong)  # type: ignore[arg-type]


# Answers that are too much.


def test_it_asks_for_plain_answers_and_unpacks_none(connect: Connect) -> None:
    asked: list[str] = []

    def service(request: httpx.Request) -> httpx.Response:
        asked.append(request.headers["Accept-Encoding"])
        stream = httpx.ByteStream(gzip.compress(bytes(1 << 20)))
        return httpx.Response(200, stream=stream, headers={"Content-Encoding": "gzip"})

    with pytest.raises(ModelContractError, match="is compressed, which was not asked for"):
        connect(service).predict(BODY)
    assert asked == ["identity"]


class Endless(httpx.AsyncByteStream):
    def __init__(self, pause_s: float = 0) -> None:
        self.pause_s, self.sent, self.closed = pause_s, 0, False

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while True:
            await asyncio.sleep(self.pause_s)
            self.sent += 1000
            yield b" " * 1000

    async def aclose(self) -> None:
        self.closed = True


@pytest.mark.parametrize(("status", "kind"), [(200, ModelContractError), (500, Overloaded), (400, CallerError)])
def test_an_endless_answer_is_left_at_the_limit(connect: Connect, status: int, kind: type[InferenceError]) -> None:
    stream = Endless()
    client = connect(lambda _request: httpx.Response(status, stream=stream), max_response_bytes=10_000)
    with pytest.raises(kind) as caught:
        client.predict(BODY)
    assert type(caught.value) is kind
    assert stream.sent <= 11_000
    assert stream.closed


def test_an_answer_that_trickles_in_has_no_more_time_than_any_other(connect: Connect) -> None:
    client = connect(lambda _request: httpx.Response(200, stream=Endless(0.01)), timeout_s=0.1)
    with pytest.raises(DeadlineExceeded):
        client.predict(BODY)


# Settings and connections that do not fit the service.


@pytest.mark.parametrize(
    "url",
    ["http://[", "http://a b", "http://h:99999", "http://h:0", "http://h:-1", "http://", "http://a..b", "ftp://h",
     "http://h\n", "http://h?x=1"],
)  # fmt: skip
def test_an_address_that_cannot_be_one_is_a_config_error_at_once(url: str) -> None:
    with pytest.raises(ConfigError, match="is no address of a service"):
        HttpClient(url, "demo")


@pytest.mark.parametrize("token", ["tökén", "secret\nb", "secret\n", " secret", "secret\x00"])
def test_a_token_that_no_header_can_carry_is_a_config_error_that_does_not_tell_it(token: str) -> None:
    with pytest.raises(ConfigError, match="the token cannot be sent") as caught:
        HttpClient("http://service", "demo", token=token)
    assert token.strip() not in str(caught.value)


def test_a_ca_file_that_is_none_is_a_config_error(tmp_path: Path) -> None:
    (tmp_path / "ca.pem").write_text("no certificate")
    for verify in (tmp_path / "absent.pem", str(tmp_path / "ca.pem"), tmp_path):
        with pytest.raises(ConfigError, match="is no readable CA file"):
            HttpClient("https://service", "demo", verify=verify)


@pytest.mark.parametrize(
    "error",
    [httpx.DecodingError("x"), httpx.TooManyRedirects("x"), UnicodeError("x"), OSError("x"),
     ExceptionGroup("x", [OverflowError("x")])],
)  # fmt: skip
def test_no_foreign_error_of_the_network_comes_through(connect: Connect, error: Exception) -> None:
    def service(_request: httpx.Request) -> httpx.Response:
        raise error

    with pytest.raises(Overloaded, match=r"cannot be reached \("):
        connect(service).predict(BODY)


def test_a_certificate_that_is_not_trusted_names_the_setting_for_it(connect: Connect) -> None:
    refused = ssl.SSLCertVerificationError(1, "x")
    refused.verify_message = "self-signed certificate"

    def service(_request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("x") from refused

    with pytest.raises(ConfigError, match=r"is not trusted \(self-signed certificate\): give its CA file as verify="):
        connect(service).predict(BODY)


@pytest.mark.parametrize(
    ("scheme", "says"), [("http", "does it speak https, not http"), ("https", "does it speak http instead of https")]
)
def test_the_wrong_protocol_is_told_from_a_service_that_is_not_there(scheme: str, says: str) -> None:
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            if scheme == "https":
                connection.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    thread = threading.Thread(target=answer)
    thread.start()
    with (
        listener,
        HttpClient(f"{scheme}://127.0.0.1:{listener.getsockname()[1]}", "demo", timeout_s=PATIENCE_S) as client,
        pytest.raises(Overloaded, match=says),
    ):
        client.predict(BODY)
    thread.join(PATIENCE_S)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_in_a_forked_child_it_refuses_calls_and_closes_without_waiting(connect: Connect) -> None:
    client = connect(Scripted(OK))
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def child() -> None:
        try:
            client.predict(BODY)
        except CallerError as error:
            sender.send(str(error))
        client.close()
        sender.send("closed")

    process = context.Process(target=child)
    process.start()
    try:
        assert receiver.poll(PATIENCE_S)
        assert receiver.recv() == "the http client of demo belongs to another process: make a new one here"
        assert receiver.poll(PATIENCE_S)
        assert receiver.recv() == "closed"
    finally:
        process.kill()
        process.join()
    assert client.predict(BODY) == ANSWER


def test_importing_the_package_loads_no_web_library_and_the_client_no_torch() -> None:
    found = subprocess.run([sys.executable, "-c", WITHOUT_TORCH], capture_output=True, text=True, timeout=60)
    assert found.returncode == 0, found.stderr
