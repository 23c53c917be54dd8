"""The service as a process: ready when warm, stopping without losing an answer, and ending when it cannot go on."""

import json
import signal
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from inference.clients import HttpClient
from inference.models.registry import Checkpoint
from tests.conftest import REPO
from tests.inference.clients.doubles import make_body

PATIENCE_S = 90.0  # importing torch on a busy machine

COMMAND = "import sys, typer; from inference.serving.command import serve; typer.run(serve)"


class Process:
    """A running service; what it prints is read as it comes."""

    def __init__(self, *arguments: str) -> None:
        self.popen = subprocess.Popen(
            [sys.executable, *arguments], cwd=REPO, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        self.lines: list[str] = []
        self._readers = [
            threading.Thread(target=self._read, args=(stream,)) for stream in (self.popen.stdout, self.popen.stderr)
        ]
        for reader in self._readers:
            reader.start()

    def _read(self, stream: Iterator[str]) -> None:
        self.lines.extend(line.rstrip() for line in stream)

    def wait_for(self, what: Callable[[str], bool]) -> str:
        """The first line that is so."""
        late = time.monotonic() + PATIENCE_S
        while True:
            over = self.popen.poll() is not None
            if found := next((line for line in list(self.lines) if what(line)), None):
                return found
            assert not over, self.lines
            assert time.monotonic() < late, self.lines
            time.sleep(0.01)

    def wait_until_ready(self, url: str, **options: object) -> None:
        late = time.monotonic() + PATIENCE_S
        while httpx.get(f"{url}/ping", **options).status_code != 200:  # type: ignore[arg-type]
            assert time.monotonic() < late, self.lines
            time.sleep(0.05)

    def wait(self) -> int:
        code = self.popen.wait(PATIENCE_S)
        self._finish()
        return code

    def stop(self) -> None:
        if self.popen.poll() is None:
            self.popen.kill()
            self.popen.wait()
        self._finish()

    def _finish(self) -> None:
        for reader, stream in zip(self._readers, (self.popen.stdout, self.popen.stderr), strict=True):
            reader.join()
            assert stream is not None
            stream.close()


Launch = Callable[..., Process]


@pytest.fixture
def launch() -> Iterator[Launch]:
    started: list[Process] = []

    def start(*arguments: str) -> Process:
        started.append(Process(*arguments))
        return started[-1]

    yield start
    for process in started:
        process.stop()


def gated(launch: Launch, checkpoint: Checkpoint, gate: Path, unready_s: float = 0.0) -> tuple[Process, str]:
    module = "tests.inference.serving.service_process"
    process = launch("-m", module, str(checkpoint.path), str(gate), str(unready_s))
    return process, process.wait_for(lambda line: line.startswith("http"))


class Asking(threading.Thread):
    """A tile under way."""

    def __init__(self, url: str) -> None:
        super().__init__()
        self.answer: httpx.Response | None = None
        self._url = url
        self.start()

    def run(self) -> None:
        self.answer = httpx.post(f"{self._url}/api/embed/demo", content=make_body(1), timeout=PATIENCE_S)


@pytest.mark.slow
def test_told_to_stop_it_is_unready_first_takes_requests_a_while_and_answers_what_is_under_way(
    launch: Launch, demo_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    process, url = gated(launch, demo_checkpoint, gate, unready_s=2.0)
    process.wait_until_ready(url)
    tile = Asking(url)
    process.wait_for(lambda line: line == "entered")
    process.popen.send_signal(signal.SIGTERM)
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as client:
        while (answer := client.get("/ping")).status_code == 200:
            time.sleep(0.01)
        assert (answer.status_code, answer.json()["code"], answer.json()["retryable"]) == (503, "server_closed", True)
        assert client.get("/api/metadata/demo").status_code == 200
    while True:
        try:
            httpx.get(f"{url}/ping")
        except httpx.ConnectError:
            break
        time.sleep(0.05)
    assert process.popen.poll() is None, "gone before the answer"
    gate.write_text("")
    tile.join(PATIENCE_S)
    assert tile.answer is not None
    assert (tile.answer.status_code, len(tile.answer.json()["output"])) == (200, 64)
    assert process.wait() == 0


@pytest.mark.slow
def test_interrupted_it_stops_without_waiting_for_a_balancer(
    launch: Launch, demo_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    process, url = gated(launch, demo_checkpoint, tmp_path / "gate", unready_s=3600)
    process.wait_until_ready(url)
    process.popen.send_signal(signal.SIGINT)
    assert process.wait() == 0


@pytest.mark.slow
def test_a_broken_device_ends_the_process_after_its_callers_are_told(
    launch: Launch, demo_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    process, url = gated(launch, demo_checkpoint, gate)
    process.wait_until_ready(url)
    tile = Asking(url)
    process.wait_for(lambda line: line == "entered")
    gate.write_text("break")
    tile.join(PATIENCE_S)
    assert tile.answer is not None
    assert (tile.answer.status_code, tile.answer.json()["code"]) == (503, "device_broken")
    assert process.wait() == 1
    assert "a model can no longer run: start a new process" in process.lines


@pytest.mark.slow
def test_a_model_that_does_not_load_ends_the_process_with_its_reason(
    launch: Launch, demo_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    gate.write_text("unloadable")
    process = launch("-m", "tests.inference.serving.service_process", str(demo_checkpoint.path), str(gate))
    assert process.wait() == 1
    assert "the checkpoint is torn" in process.lines


@pytest.mark.slow
def test_the_command_serves_with_tls_and_tokens_beyond_this_machine_and_logs_in_lines(
    launch: Launch, demo_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    cert, key, tokens = (str(tmp_path / name) for name in ("cert.pem", "key.pem", "tokens"))
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", cert, "-days", "2",
         "-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    Path(tokens).write_text("viewer 0123456789abcdef\n")
    process = launch(
        "-c", COMMAND, "--model", str(demo_checkpoint.path), "--host", "0.0.0.0", "--port", "0", "--unready", "0",  # noqa: S104
        "--token-file", tokens, "--tls-cert", cert, "--tls-key", key, "--max-wait-ms", "0",
    )  # fmt: skip
    address = process.wait_for(lambda line: line.startswith("listening on https://"))
    url = f"https://127.0.0.1:{address.rsplit(':', 1)[1]}"
    trusted = ssl.create_default_context(cafile=cert)
    process.wait_until_ready(url, verify=trusted)
    with HttpClient(url, "demo", token="0123456789abcdef", verify=trusted) as client:  # noqa: S106 - made up
        assert len(json.loads(client.embed(make_body(1)))["output"]) == 64
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/ping")
    process.popen.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    logged = [json.loads(line) for line in process.lines if line.startswith("{")]
    (tile,) = [line for line in logged if line["route"] == "/api/embed/{model}"]
    assert (tile["caller"], tile["model"], tile["slide"], tile["status"]) == ("viewer", "demo", "slide", 200)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--host", "0.0.0.0"], "give --token-file FILE, or --insecure"),  # noqa: S104 - that it is refused
        (["--model", "nothing"], "no model 'nothing'"),
        (["--model", "DEMO"], "names demo twice"),
        (["--deadline", "0"], "deadline_s is 0"),
    ],
)
def test_bad_usage_is_told_before_anything_is_loaded(
    launch: Launch, demo_checkpoint: Checkpoint, arguments: list[str], says: str
) -> None:
    path = str(demo_checkpoint.path)
    process = launch(
        "-c", COMMAND, "--model", path, "--port", "0", *[path if each == "DEMO" else each for each in arguments]
    )
    assert process.wait() == 1
    assert says in " ".join(process.lines)
