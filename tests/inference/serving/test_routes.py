"""Each route: what it answers, and with which status and body it refuses."""

import json
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from fastapi import FastAPI
from numpy.typing import NDArray

from inference.contract import ModelMetadata
from inference.errors import DeviceBroken
from inference.models.rna import bulk_rna_sha256
from inference.models.server_model import BaseServerModel, load_server_model
from tests.inference.clients.doubles import PATIENCE_S, ask, make_body
from tests.inference.models.kinds import OTHER_TPM, TPM, RnaNet, export_portable, flat, make_request, rna_spec

if TYPE_CHECKING:
    from tests.inference.clients.doubles import ScriptedRuntime, StartClient, StartService

TILE_ROUTES = {"embed": "embedding", "predict": "prediction", "predict_with_embedding": "prediction_with_embedding"}


def refusal(app: FastAPI, verb: str, path: str, content: str | bytes | None = None) -> tuple[int, dict[str, Any]]:
    answer = ask(app, verb, path, content)
    body: dict[str, Any] = answer.json()
    assert set(body) == {"code", "message", "retryable", "request_id"}
    assert body["request_id"] == answer.headers["X-Request-Id"]
    return answer.status_code, body


# Tiles.


@pytest.mark.parametrize(("route", "mode"), TILE_ROUTES.items())
def test_a_tile_gets_the_answer_of_the_in_process_client_by_its_route_and_by_invocations(
    serve: "StartService", start: "StartClient", route: str, mode: str
) -> None:
    app, client = serve(max_wait_ms=0), start()
    expected = json.loads(getattr(client, route)(make_body(1)))
    for path, body in (
        (f"/api/{route}/demo", make_body(1)),
        ("/invocations", make_body(1, model_name="demo", mode=mode)),
    ):
        answer = ask(app, "POST", path, body)
        assert (answer.status_code, answer.headers["Content-Type"]) == (200, "application/json")
        found = answer.json()
        assert found.pop("lineage") | {"request_id": ""} == expected["lineage"] | {"request_id": ""}
        assert {k: v for k, v in found.items() if k not in ("output", "embedding")} == {
            k: v for k, v in expected.items() if k not in ("output", "embedding", "lineage")
        }
        for values in ("output", "embedding"):
            assert (values in found) == (values in expected)
            np.testing.assert_allclose(found.get(values, []), expected.get(values, []), atol=1e-6)


@pytest.mark.parametrize("path", ["/api/metadata/demo", "/invocations"])
def test_the_metadata_is_the_models(serve: "StartService", server: BaseServerModel, path: str) -> None:
    body = json.dumps({"model_name": "demo", "mode": "metadata"}) if path == "/invocations" else None
    answer = ask(serve(), "POST" if body else "GET", path, body)
    assert answer.text == server.get_metadata().model_dump_json()
    found = ModelMetadata.model_validate_json(answer.text)
    assert (found.model_name, found.input_shape, found.outputs[1].components) == (
        "demo", (3, 224, 224), server.model_spec.prediction_names,
    )  # fmt: skip
    assert found.config["architecture"]


@pytest.mark.parametrize(
    ("body", "status", "code", "says"),
    [
        (make_body(1, mode="embedding"), 422, "invalid_request", "request field model_name: Field required"),
        (make_body(1, model_name="demo"), 422, "invalid_request", "request field mode: Field required"),
        (make_body(1, model_name="h1", mode="embedding"), 404, "unknown_model", "no model 'h1' here"),
        (make_body(1, model_name="demo", mode="segment"), 400, "bad_request", "demo has no mode 'segment'"),
        (make_body(1, model_name="demo", mode="metadata"), 422, "invalid_request", "Extra inputs"),
        ('{"mode": "metadata"}', 422, "invalid_request", "model_name: Field required"),
        ('{"model_name": "h1", "mode": "metadata"}', 404, "unknown_model", "no model 'h1' here"),
    ],
)
def test_invocations_need_a_model_and_a_mode_of_it(
    serve: "StartService", body: str, status: int, code: str, says: str
) -> None:
    found, told = refusal(serve(), "POST", "/invocations", body)
    assert (found, told["code"]) == (status, code)
    assert says in told["message"]


def test_the_older_name_of_a_model_is_understood(serve: "StartService", server: BaseServerModel) -> None:
    status, told = refusal(serve(), "POST", "/api/predict/m-optimus-stx", make_body(1))
    assert (status, told["message"]) == (404, "no model 'm-optimus' here: this service runs demo")


@pytest.mark.parametrize(
    ("verb", "path", "status", "code"),
    [
        ("POST", "/api/embed/h1", 404, "unknown_model"),
        ("POST", "/api/batch/h1", 404, "unknown_model"),
        ("GET", "/api/metadata/h1", 404, "unknown_model"),
        ("GET", "/api/embed/demo", 405, "method_not_allowed"),
        ("GET", "/nothing", 404, "not_found"),
        ("GET", "/api/embed/..%2f..%2fetc/passwd", 404, "not_found"),
        ("PUT", f"/api/bulk-rna/{'0' * 64}", 422, "invalid_request"),
    ],
)
def test_what_is_not_there_is_told_in_the_same_form(
    serve: "StartService", verb: str, path: str, status: int, code: str
) -> None:
    found, told = refusal(serve(), verb, path, "{}")
    assert (found, told["code"], told["retryable"]) == (status, code, False)


# Health.


def _with_fault(runtime: "ScriptedRuntime", error: BaseException) -> None:
    def react(_batch: NDArray[np.uint8], _outputs: object) -> Any:
        raise error

    runtime.react = react


def test_ping_says_ready_until_a_device_breaks(serve: "StartService", runtime: "ScriptedRuntime") -> None:
    app = serve(max_wait_ms=0)
    assert ask(app, "GET", "/ping").json() == {"status": "ok", "models": ["demo"]}
    told: list[str] = []
    app.state.service.on_broken = lambda: told.append("broken")
    _with_fault(runtime, DeviceBroken("the device failed: an illegal memory access was encountered"))
    status, found = refusal(app, "POST", "/api/embed/demo", make_body(1))
    assert (status, found["code"], found["retryable"]) == (503, "device_broken", True)
    assert told == ["broken"]
    status, found = refusal(app, "GET", "/ping")
    assert (status, found["code"]) == (503, "device_broken")


def test_a_model_that_fails_on_a_tile_leaves_the_service_ready(
    serve: "StartService", runtime: "ScriptedRuntime"
) -> None:
    app = serve(max_wait_ms=0)
    _with_fault(runtime, RuntimeError("unwell"))
    status, found = refusal(app, "POST", "/api/embed/demo", make_body(1))
    assert (status, found["code"], found["retryable"]) == (503, "tile_error", False)
    assert ask(app, "GET", "/ping").status_code == 200


def test_while_a_model_loads_the_service_is_not_ready_and_its_tiles_are_asked_to_wait(
    serve: "StartService", server: BaseServerModel
) -> None:
    go, failed = threading.Event(), threading.Event()

    def load() -> BaseServerModel:
        assert go.wait(PATIENCE_S)
        return server

    app = serve({"demo": load}, max_wait_ms=0)
    models = app.state.service.models
    models.load(on_failure=failed.set)
    for verb, path, body in (("GET", "/ping", None), ("POST", "/api/embed/demo", make_body(1))):
        answer = ask(app, verb, path, body)
        assert (answer.status_code, answer.json()["code"], answer.json()["retryable"]) == (503, "overloaded", True)
        assert answer.headers["Retry-After"] == "5"
    go.set()
    models._loader.join(PATIENCE_S)
    assert ask(app, "GET", "/ping").status_code == 200
    assert ask(app, "POST", "/api/embed/demo", make_body(1)).status_code == 200
    assert not failed.is_set()


def test_a_model_that_does_not_load_is_reported_and_the_service_never_ready(serve: "StartService") -> None:
    failed = threading.Event()

    def load() -> BaseServerModel:
        raise RuntimeError("torn")

    app = serve({"demo": load})
    app.state.service.models.load(on_failure=failed.set)
    assert failed.wait(PATIENCE_S)
    assert str(app.state.service.models.failure) == "torn"
    for verb, path, body in (("GET", "/ping", None), ("POST", "/api/embed/demo", make_body(1))):
        status, found = refusal(app, verb, path, body)
        assert (status, found["code"]) == (503, "device_broken")
        assert found["message"] == "demo was not loaded: the log has the reason; start the service again"


# Bulk RNA.


@pytest.fixture(scope="module")
def rna_model(tmp_path_factory: pytest.TempPathFactory) -> BaseServerModel:
    return load_server_model(export_portable(RnaNet(), rna_spec(), tmp_path_factory.mktemp("rna")))


def _tile(**changes: object) -> str:
    return make_request(flat(51), **changes).model_dump_json()


def test_rna_is_registered_once_and_tiles_refer_to_it(
    serve: "StartService", start: "StartClient", rna_model: BaseServerModel
) -> None:
    app = serve([rna_model], max_wait_ms=0)
    digest = bulk_rna_sha256(TPM)
    status, told = refusal(app, "POST", "/api/predict/rna", _tile(bulk_rna_sha256=digest))
    assert (status, told["code"]) == (400, "bad_request")
    assert "register it" in told["message"]
    answer = ask(app, "PUT", f"/api/bulk-rna/{digest}", json.dumps(TPM))
    assert (answer.status_code, answer.json()) == (200, {"models": ["rna"]})
    named = ask(app, "POST", "/api/predict/rna", _tile(bulk_rna_sha256=digest)).json()
    given = ask(app, "POST", "/api/predict/rna", _tile(bulk_rna=list(TPM))).json()
    alone = ask(app, "POST", "/api/predict/rna", _tile()).json()
    assert named["output"] == given["output"] != alone["output"]
    assert (named["lineage"]["bulk_rna_sha256"], alone["lineage"]["bulk_rna_sha256"]) == (digest, None)


@pytest.mark.parametrize(
    ("digest", "body", "status", "says"),
    [
        (bulk_rna_sha256(OTHER_TPM), json.dumps(TPM), 400, f"the values have the digest {bulk_rna_sha256(TPM)}"),
        ("not-a-digest", json.dumps(TPM), 400, "the values have the digest"),
        (bulk_rna_sha256([1.0]), "[1.0]", 400, "bulk RNA has 1 values, this model takes 4"),
        (bulk_rna_sha256(TPM), "[NaN]", 400, "NaN is no JSON number"),
        (bulk_rna_sha256(TPM), '{"values": []}', 422, "the body is a list of numbers"),
        (bulk_rna_sha256(TPM), '["1"]', 422, "the body is a list of numbers"),
        (bulk_rna_sha256(TPM), "[1e999]", 422, "finite"),
    ],
)
def test_rna_that_is_not_what_it_says_is_refused(
    serve: "StartService", rna_model: BaseServerModel, digest: str, body: str, status: int, says: str
) -> None:
    found, told = refusal(serve([rna_model]), "PUT", f"/api/bulk-rna/{digest}", body)
    assert found == status
    assert says in told["message"]


def test_rna_for_a_service_whose_models_take_none_is_refused(serve: "StartService") -> None:
    status, told = refusal(serve(), "PUT", f"/api/bulk-rna/{bulk_rna_sha256(TPM)}", json.dumps(TPM))
    assert (status, told["code"], told["message"]) == (404, "unknown_model", "no model here takes bulk RNA")


# Description and numbers.


def test_the_page_of_the_routes_names_them_all_and_loads_nothing_from_elsewhere(serve: "StartService") -> None:
    app = serve()
    page, document = ask(app, "GET", "/docs"), ask(app, "GET", "/openapi.json").json()
    assert page.headers["Content-Type"].startswith("text/html")
    for path in document["paths"]:
        assert path in page.text
    assert "src=" not in page.text
    assert "//" not in page.text.replace("<!--", "")
    assert set(document["paths"]) == {
        "/api/embed/{model}", "/api/predict/{model}", "/api/predict_with_embedding/{model}", "/invocations",
        "/api/batch/{model}", "/api/metadata/{model}", "/api/bulk-rna/{sha256}", "/ping", "/metrics",
    }  # fmt: skip


def test_metrics_count_requests_and_tell_of_each_queue(serve: "StartService") -> None:
    app = serve(max_wait_ms=0)
    for _ in range(3):
        ask(app, "POST", "/api/embed/demo", make_body(1))
    ask(app, "POST", "/api/embed/demo", "{")
    ask(app, "POST", "/api/embed/nothing-we-have", "{")
    answer = ask(app, "GET", "/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain; version=0.0.4")
    lines = answer.text.splitlines()
    for expected in (
        'slide_inference_requests_total{model="demo",route="/api/embed/{model}",status="200"} 3.0',
        'slide_inference_requests_total{model="demo",route="/api/embed/{model}",status="400"} 1.0',
        'slide_inference_requests_total{model="",route="/api/embed/{model}",status="404"} 1.0',
        'slide_inference_request_seconds_count{route="/api/embed/{model}"} 5.0',
        'slide_inference_completed_total{model="demo"} 3.0',
        'slide_inference_queued{model="demo"} 0.0',
        'slide_inference_accepting{model="demo"} 1.0',
        'slide_inference_batches_by_size_total{model="demo",size="1"} 3.0',
    ):
        assert expected in lines
    assert "nothing-we-have" not in answer.text
