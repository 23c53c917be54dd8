"""What bounds a request: bytes, room, time, and a caller who is still there."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import httpx
import pytest
from fastapi import FastAPI

from inference.batching import SchedulerStatistics
from inference.clients.pipeline import ModelPipeline
from tests.inference.clients.doubles import PATIENCE_S, Loopback, ask, make_body

if TYPE_CHECKING:
    from tests.inference.clients.doubles import ScriptedRuntime, StartService


@pytest.fixture
def listen(serve: "StartService", runtime: "ScriptedRuntime") -> Iterator[Callable[..., Loopback]]:
    """Makes services on a port of this machine."""
    made: list[Loopback] = []

    def make(**settings: object) -> Loopback:
        made.append(Loopback(serve(**settings)))
        return made[-1]

    yield make
    runtime.release()
    for service in made:
        service.stop()


class Asking:
    """A request under way in a thread."""

    def __init__(
        self, service: Loopback, path: str = "/api/embed/demo", number: int = 0, headers: dict[str, str] | None = None
    ) -> None:
        self.answer: httpx.Response | None = None
        self._thread = threading.Thread(target=self._ask, args=(service.url + path, make_body(number), headers))
        self._thread.start()

    def _ask(self, url: str, body: str, headers: dict[str, str] | None) -> None:
        self.answer = httpx.post(url, content=body, headers=headers, timeout=PATIENCE_S)

    def wait(self) -> httpx.Response:
        self._thread.join(PATIENCE_S)
        assert self.answer is not None, "no answer"
        return self.answer


def until(what: Callable[[], bool]) -> None:
    late = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < late, "never came true"
        threading.Event().wait(0.005)


def statistics_of(app: FastAPI) -> SchedulerStatistics:
    pipeline: ModelPipeline = app.state.service.models["demo"]
    found = pipeline.statistics()
    assert found is not None
    return found


# Bytes.


@pytest.mark.parametrize("path", ["/api/embed/demo", "/invocations", "/api/bulk-rna/0", "/ping", "/api/batch/demo"])
def test_a_body_at_the_limit_is_read_and_one_byte_more_is_refused(serve: "StartService", path: str) -> None:
    app = serve(max_body_bytes=1000, max_batch_body_bytes=1000)
    verb = {"/ping": "GET", "/api/bulk-rna/0": "PUT"}.get(path, "POST")
    assert ask(app, verb, path, b"{" * 1000).status_code != 413
    refused = ask(app, verb, path, b"{" * 1001)
    assert (refused.status_code, refused.json()["code"], refused.json()["retryable"]) == (413, "too_large", False)
    assert refused.headers["Connection"] == "close"


def test_the_limit_of_a_body_is_that_of_sagemaker_unless_set(serve: "StartService") -> None:
    app = serve()
    assert ask(app, "POST", "/api/embed/demo", b" " * 6_291_456).status_code == 400
    assert ask(app, "POST", "/api/embed/demo", b" " * 6_291_457).status_code == 413


def test_a_body_without_a_length_is_read_no_further_than_the_limit(listen: Callable[..., Loopback]) -> None:
    service = listen(max_body_bytes=1000)
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        for _ in range(100_000):
            sent += 1000
            yield b"x" * 1000

    answer = httpx.post(f"{service.url}/api/embed/demo", content=endless(), timeout=PATIENCE_S)
    assert answer.status_code == 413
    assert sent < 50_000_000
    assert httpx.get(f"{service.url}/ping").status_code == 200


def test_a_length_that_is_a_lie_or_beyond_all_bounds_is_refused_unread(serve: "StartService") -> None:
    app = serve()
    for length in ("9" * 30, "1000000000"):
        assert ask(app, "POST", "/api/embed/demo", b"", {"Content-Length": length}).status_code == 413


def test_a_compressed_body_is_refused_rather_than_inflated(serve: "StartService") -> None:
    answer = ask(serve(), "POST", "/api/embed/demo", b"x", {"Content-Encoding": "gzip"})
    assert (answer.status_code, answer.json()["code"]) == (400, "bad_request")


# Room.


def test_a_full_queue_says_when_to_come_back(listen: Callable[..., Loopback], runtime: "ScriptedRuntime") -> None:
    service = listen(max_batch_size=1, max_wait_ms=0, max_queued_items=1)
    runtime.hold()
    first = Asking(service, number=1)
    runtime.wait_until_called()
    second = Asking(service, number=2)
    until(lambda: statistics_of(service.app).queued == 1)
    refused = Asking(service, number=3).wait()
    assert (refused.status_code, refused.json()["code"], refused.json()["retryable"]) == (429, "queue_full", True)
    assert int(refused.headers["Retry-After"]) >= 1
    runtime.release()
    assert [asking.wait().status_code for asking in (first, second)] == [200, 200]
    assert Asking(service, number=3).wait().status_code == 200


def test_no_more_requests_are_taken_than_set_but_health_is_always_told(
    listen: Callable[..., Loopback], runtime: "ScriptedRuntime"
) -> None:
    service = listen(max_wait_ms=0, max_requests=1)
    runtime.hold()
    first = Asking(service)
    runtime.wait_until_called()
    refused = Asking(service).wait()
    assert (refused.status_code, refused.json()["code"]) == (429, "queue_full")
    assert httpx.get(f"{service.url}/ping").status_code == 200
    runtime.release()
    assert first.wait().status_code == 200
    assert Asking(service).wait().status_code == 200


def test_bodies_together_take_no_more_memory_than_set_aside(
    listen: Callable[..., Loopback], runtime: "ScriptedRuntime"
) -> None:
    service = listen(max_wait_ms=0, max_pending_bytes=len(make_body(0)) + 1000)
    runtime.hold()
    first = Asking(service)
    runtime.wait_until_called()
    refused = Asking(service).wait()
    assert (refused.status_code, refused.json()["code"]) == (429, "queue_full")
    runtime.release()
    assert first.wait().status_code == 200
    assert Asking(service).wait().status_code == 200


# Time.


def test_the_forward_pass_does_not_hold_up_other_requests(
    listen: Callable[..., Loopback], runtime: "ScriptedRuntime"
) -> None:
    service = listen(max_wait_ms=0)
    runtime.hold()
    tile = Asking(service)
    runtime.wait_until_called()
    for path in ("/ping", "/metrics", "/api/metadata/demo", "/docs"):
        assert httpx.get(service.url + path, timeout=PATIENCE_S).status_code == 200
    runtime.release()
    assert tile.wait().status_code == 200


def test_a_deadline_is_kept_while_the_model_is_busy_and_its_tile_never_runs(
    listen: Callable[..., Loopback], runtime: "ScriptedRuntime"
) -> None:
    service = listen(max_batch_size=1, max_wait_ms=0)
    runtime.hold()
    first = Asking(service, number=1)
    runtime.wait_until_called()
    late = Asking(service, number=2, headers={"X-Deadline-Seconds": "0.2"}).wait()
    assert (late.status_code, late.json()["code"], late.json()["retryable"]) == (504, "deadline_exceeded", True)
    runtime.release()
    assert first.wait().status_code == 200
    assert runtime.rows == [1]


def test_the_services_own_deadline_bounds_what_a_caller_may_ask_for(
    listen: Callable[..., Loopback], runtime: "ScriptedRuntime"
) -> None:
    service = listen(max_wait_ms=0, deadline_s=0.2)
    runtime.hold()
    assert Asking(service, headers={"X-Deadline-Seconds": "3600"}).wait().status_code == 504
    runtime.release()


@pytest.mark.parametrize("value", ["0", "-1", "nan", "inf", "soon"])
def test_a_deadline_that_is_no_time_is_refused(serve: "StartService", value: str) -> None:
    answer = ask(serve(), "POST", "/api/embed/demo", make_body(), {"X-Deadline-Seconds": value})
    assert (answer.status_code, answer.json()["code"]) == (400, "bad_request")


def test_a_body_that_does_not_arrive_is_not_waited_for_beyond_the_deadline(listen: Callable[..., Loopback]) -> None:
    service = listen(deadline_s=0.3)
    host, port = service.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as peer:
        peer.sendall(b"POST /api/embed/demo HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nhalf")
        assert peer.recv(4096).startswith(b"HTTP/1.1 504 ")


# The caller.


def test_a_caller_who_leaves_takes_his_tile_out_of_the_queue(
    listen: Callable[..., Loopback], runtime: "ScriptedRuntime"
) -> None:
    service = listen(max_batch_size=1, max_wait_ms=0)
    runtime.hold()
    first = Asking(service, number=1)
    runtime.wait_until_called()
    host, port = service.url.removeprefix("http://").split(":")
    body = make_body(2).encode()
    with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as peer:
        head = f"POST /api/embed/demo HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        peer.sendall(head.encode() + body)
        until(lambda: statistics_of(service.app).queued == 1)
    until(lambda: statistics_of(service.app).cancelled == 1)
    assert statistics_of(service.app).queued == 0
    runtime.release()
    assert first.wait().status_code == 200
    assert runtime.rows == [1]


def test_a_caller_who_leaves_in_the_middle_of_his_body_harms_nobody(listen: Callable[..., Loopback]) -> None:
    service = listen(max_wait_ms=0)
    host, port = service.url.removeprefix("http://").split(":")
    for _ in range(5):
        with socket.create_connection((host, int(port)), timeout=PATIENCE_S) as peer:
            peer.sendall(b"POST /api/embed/demo HTTP/1.1\r\nHost: x\r\nContent-Length: 1000\r\n\r\nhalf")
    gate = service.app.state.service
    assert Asking(service).wait().status_code == 200
    until(lambda: b'status="499"} 5.0' in gate.metrics.text())
