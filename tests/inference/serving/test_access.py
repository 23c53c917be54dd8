"""Who may ask, what is written down of it, and where the service listens at all."""

import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from numpy.typing import NDArray

from inference.errors import ConfigError
from inference.models.server_model import BaseServerModel
from inference.serving import ServiceSettings, read_tokens
from inference.serving.server import Listener, run_service
from tests.inference.clients.doubles import ask, make_body

if TYPE_CHECKING:
    from tests.inference.clients.doubles import ScriptedRuntime, StartService

TOKENS = {"viewer": "0123456789abcdef0123456789abcdef", "night batch": "fedcba9876543210"}
REQUESTS = "inference.serving.requests"


def bearer(token: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {token}"}


def lines_of(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(record.getMessage()) for record in caplog.records if record.name == REQUESTS]


# Tokens.


@pytest.mark.parametrize(
    "headers",
    [
        {}, bearer(""), bearer(TOKENS["viewer"][:-1]), bearer(TOKENS["viewer"] + "0"), bearer(TOKENS["viewer"].upper()),
        {"Authorization": TOKENS["viewer"]}, {"Authorization": f"Basic {TOKENS['viewer']}"},
    ],
    ids=str,
)  # fmt: skip
def test_without_a_known_token_nothing_but_health_and_description_is_told(
    serve: "StartService", runtime: "ScriptedRuntime", headers: dict[str, str]
) -> None:
    app = serve(tokens=TOKENS)
    for verb, path in (
        ("POST", "/api/embed/demo"), ("POST", "/invocations"), ("POST", "/api/batch/demo"), ("GET", "/metrics"),
        ("GET", "/api/metadata/demo"), ("PUT", "/api/bulk-rna/0"), ("GET", "/nothing"),
    ):  # fmt: skip
        answer = ask(app, verb, path, make_body(), headers)
        assert (answer.status_code, answer.json()["code"], answer.json()["retryable"]) == (401, "unauthorized", False)
        assert answer.headers["WWW-Authenticate"] == "Bearer"
    for path in ("/ping", "/docs", "/openapi.json"):
        assert ask(app, "GET", path, headers=headers).status_code == 200
    assert runtime.rows == []


def test_each_token_opens_the_service_and_names_its_bearer_in_the_log(
    serve: "StartService", caplog: pytest.LogCaptureFixture
) -> None:
    app = serve(tokens=TOKENS, max_wait_ms=0)
    with caplog.at_level(logging.INFO, REQUESTS):
        for token in TOKENS.values():
            assert ask(app, "POST", "/api/embed/demo", make_body(), bearer(token)).status_code == 200
        assert ask(app, "GET", "/metrics", headers={"Authorization": f"bearer  {TOKENS['viewer']}"}).status_code == 200
    assert [line["caller"] for line in lines_of(caplog)] == ["viewer", "night batch", "viewer"]


def test_settings_do_not_show_their_tokens() -> None:
    assert TOKENS["viewer"] not in repr(ServiceSettings(tokens=TOKENS))


def test_a_token_file_has_a_name_and_a_token_per_line(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text("# who may ask\n\nviewer 0123456789abcdef\nnight-batch\tfedcba9876543210\n")
    assert read_tokens(path) == {"viewer": "0123456789abcdef", "night-batch": "fedcba9876543210"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds no token"), ("# none\n", "holds no token"), ("viewer\n", "line 1"), ("viewer short\n", "line 1"),
        ("a 0123456789abcdef\na fedcba9876543210\n", "line 2"), ("a b 0123456789abcdef\n", "line 1"),
    ],
)  # fmt: skip
def test_a_token_file_that_is_none_is_refused_without_showing_what_is_in_it(
    tmp_path: Path, text: str, says: str
) -> None:
    path = tmp_path / "tokens"
    path.write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        read_tokens(path)
    assert "0123456789" not in str(caught.value)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_tokens(tmp_path / "nothing")


# Where it listens.


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.1.2.3", "example.org"])  # noqa: S104 - that it is refused
def test_beyond_this_machine_it_does_not_start_without_a_token(serve: "StartService", host: str) -> None:
    with pytest.raises(ConfigError, match=r"can be reached from other machines: give --token-file FILE, or --insecure"):
        run_service(serve(), Listener(host, 0))


def test_half_of_tls_or_files_that_are_no_certificate_are_refused(serve: "StartService", tmp_path: Path) -> None:
    path = tmp_path / "cert.pem"
    path.write_text("none")
    with pytest.raises(ConfigError, match="both a certificate and its key"):
        run_service(serve(), Listener(port=0, tls_cert=path))
    with pytest.raises(ConfigError, match="TLS cannot start"):
        run_service(serve(), Listener(port=0, tls_cert=path, tls_key=path))
    with pytest.raises(ConfigError, match="TLS cannot start"):
        run_service(serve(), Listener(port=0, tls_cert=tmp_path / "nothing", tls_key=path))


# The log.


def test_every_request_is_one_line_with_caller_slide_digest_and_name(
    serve: "StartService", server: BaseServerModel, caplog: pytest.LogCaptureFixture
) -> None:
    app = serve(max_wait_ms=0)
    with caplog.at_level(logging.INFO, REQUESTS):
        ask(app, "POST", "/api/embed/demo", make_body(1), {"X-Request-Id": "run-7.tile_9"})
        ask(app, "POST", "/invocations", make_body(1, model_name="demo", mode="prediction"))
        ask(app, "POST", "/api/embed/h1", make_body(1))
        ask(app, "POST", "/api/embed/demo", "{")
        ask(app, "GET", "/nothing")
    good, invoked, unknown, broken, lost = lines_of(caplog)
    assert good.pop("ms") > 0
    assert good.pop("time").endswith("+00:00")
    assert good == {
        "request_id": "run-7.tile_9", "caller": "127.0.0.1", "method": "POST", "route": "/api/embed/{model}",
        "model": "demo", "model_digest": server.manifest.sha256, "slide": "slide", "tiles": 1, "status": 200,
    }  # fmt: skip
    assert (invoked["route"], invoked["model"], invoked["slide"]) == ("/invocations", "demo", "slide")
    assert (unknown["status"], unknown["code"], "model" in unknown) == (404, "unknown_model", False)
    assert (broken["status"], broken["code"], "slide" in broken) == (400, "bad_request", False)
    assert (lost["status"], lost["route"]) == (404, "none")


def test_the_log_and_the_answers_hold_nothing_of_the_tile(
    serve: "StartService", runtime: "ScriptedRuntime", caplog: pytest.LogCaptureFixture
) -> None:
    app = serve(max_wait_ms=0)
    body = make_body(1)
    pixels = json.loads(body)["image_data"]

    def react(batch: NDArray[Any], _outputs: object) -> Any:
        raise RuntimeError(f"torn at {pixels[:200]}")

    with caplog.at_level(logging.INFO):
        answers = [ask(app, "POST", "/api/embed/demo", body)]
        runtime.react = react
        answers.append(ask(app, "POST", "/api/embed/demo", body))
        answers.append(ask(app, "POST", "/api/embed/demo", make_body(1, image_data=pixels[:5000])))
        answers.append(ask(app, "POST", "/api/embed/demo", body.replace('"x"', f'"{pixels[:300]}"')))
    assert [answer.status_code for answer in answers] == [200, 503, 400, 422]
    for text in [*(answer.text for answer in answers), *(json.dumps(line) for line in lines_of(caplog))]:
        assert pixels[40:100] not in text


@pytest.mark.parametrize("name", ["run-7.tile_9", "a" * 64])
def test_a_well_formed_name_of_a_request_is_kept_in_answer_and_lineage(serve: "StartService", name: str) -> None:
    answer = ask(serve(max_wait_ms=0), "POST", "/api/embed/demo", make_body(), {"X-Request-Id": name})
    assert (answer.headers["X-Request-Id"], answer.json()["lineage"]["request_id"]) == (name, name)


@pytest.mark.parametrize("name", ["", "a" * 65, "a b", '{"', "../x", "a\tb"])
def test_any_other_is_replaced(serve: "StartService", name: str) -> None:
    answer = ask(serve(), "POST", "/api/embed/demo", "{", {"X-Request-Id": name})
    assert answer.headers["X-Request-Id"] == answer.json()["request_id"] != name
    assert len(answer.headers["X-Request-Id"]) == 32


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"port": 70_000}, "port 70000 is none: give 1 to 65535, or 0"),
        ({"port": -1}, "port -1 is none"),
        ({"unready_s": float("nan")}, "unready_s is nan: give seconds from 0 up"),
        ({"drain_s": float("inf")}, "drain_s is inf: give seconds from 0 up"),
    ],
)
def test_a_listener_that_cannot_be_meant_is_refused(options: dict[str, float], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Listener(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"max_batch_size": 0}, "max_batch_size is 0: give 1 or more"),
        ({"max_wait_ms": -1}, "max_wait_ms is -1: give milliseconds from 0 up"),
        ({"max_wait_ms": float("nan")}, "max_wait_ms is nan"),
    ],
)
def test_settings_that_cannot_be_meant_are_refused_one_by_one(options: dict[str, float], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ServiceSettings(**options)  # type: ignore[arg-type]


def test_a_token_file_that_is_a_pipe_is_refused_and_one_that_others_can_read_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="cannot be read: it is no regular file"):
        read_tokens(tmp_path / "pipe")
    path = tmp_path / "tokens"
    path.write_text("alice 0123456789abcdef\n")
    path.chmod(0o644)
    assert read_tokens(path) == {"alice": "0123456789abcdef"}
    assert "can be read by others: chmod 600" in caplog.text
    caplog.clear()
    path.chmod(0o600)
    read_tokens(path)
    assert not caplog.records


def test_each_rule_of_a_token_file_is_told_apart(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    for text, says in (
        ("alice\n", "line 1 of .* is not a name and a token"),
        ("alice s3cret\n", "line 1 of .* has a token of 6 characters: 16 or more are needed"),
        ("a 0123456789abcdef\na 0123456789abcdeg\n", "line 2 of .* has a name that an earlier line has"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=says):
            read_tokens(path)
