"""The serving contract, row by row: names, fields, literals, defaults, lengths and errors that others rely on."""

import inspect
import json
from typing import TYPE_CHECKING, get_args

import numpy as np
import pytest

import inference
from inference.batching import BatchScheduler
from inference.clients import HttpClient, InProcessClient
from inference.contract import Client, ModelMetadata, ModelRequest, ModelResponse, parse_request
from inference.contract.faults import ErrorBody
from inference.contract.messages import parse_invocation
from inference.errors import BadRequest, InvalidRequest
from inference.models.sample import Mode, PreparedSample
from inference.models.server_model import BaseServerModel
from inference.models.spec import ModelSpec, TileSpec, load_model_spec
from inference.serving import ServiceSettings
from inference.serving.command import serve as serve_command
from inference.serving.server import Listener
from tests.inference.clients.doubles import ask, make_body

if TYPE_CHECKING:
    from tests.inference.clients.doubles import StartService

FIELDS = json.loads(make_body(1))


def _without(*names: str) -> str:
    return json.dumps({name: value for name, value in FIELDS.items() if name not in names})


def _defaults(function: object) -> dict[str, object]:
    parameters = inspect.signature(function).parameters.values()  # type: ignore[arg-type]
    return {p.name: p.default for p in parameters if p.default is not p.empty}


# Section 1: the request.

ROWS: list[tuple[str, bool, object, object]] = [
    ("image_data", True, FIELDS["image_data"], 1),
    ("slide_name", True, "slide", 7),
    ("x", True, -3, 0.5),
    ("y", True, 12, "12"),
    ("width", True, 224, -224),
    ("height", True, 224, None),
    ("patch_idx", True, 0, -1),
    ("bulk_rna", False, [0.0, 1.5], ["1.5"]),
    ("tissue_ratio", False, 0.25, "0.25"),
    ("resolution", False, 8.0, [8.0]),
    ("model_name", False, "m-optimus", 5),
    ("mode", False, "prediction", ["prediction"]),
]


@pytest.mark.parametrize(("name", "required", "good", "bad"), ROWS, ids=[row[0] for row in ROWS])
def test_each_field_of_a_request_is_required_or_not_and_of_its_kind(
    name: str, required: bool, good: object, bad: object
) -> None:
    assert getattr(parse_request(json.dumps({**FIELDS, name: good})), name) == good
    with pytest.raises(InvalidRequest, match=f"request field {name}"):
        parse_request(json.dumps({**FIELDS, name: bad}))
    if required:
        with pytest.raises(InvalidRequest, match=f"request field {name}: Field required"):
            parse_request(_without(name))
    else:
        assert getattr(parse_request(_without(name)), name) is None
        assert getattr(parse_request(json.dumps({**FIELDS, name: None})), name) is None


def test_a_request_has_these_fields_and_the_digest_of_registered_rna_and_no_others() -> None:
    assert set(ModelRequest.model_fields) == {row[0] for row in ROWS} | {"bulk_rna_sha256"}


@pytest.mark.parametrize("change", [{"width": 223}, {"height": 225}])
def test_a_size_that_contradicts_the_image_is_refused(change: dict[str, int]) -> None:
    with pytest.raises(BadRequest, match="the request says"):
        _ = parse_request(json.dumps({**FIELDS, **change})).image


@pytest.mark.parametrize(("name", "value"), [("model_name", "h1"), ("mode", "embedding")])
def test_model_name_and_mode_are_required_where_they_dispatch(name: str, value: str) -> None:
    both = {"model_name": "h1", "mode": "embedding"}
    assert getattr(parse_invocation(json.dumps({**FIELDS, **both})), name) == value
    with pytest.raises(InvalidRequest, match=f"{name}: Field required"):
        parse_invocation(json.dumps({**FIELDS, **both, name: None}))


# Section 2: the response.


def test_a_response_has_its_output_the_echoed_fields_and_what_made_it() -> None:
    assert list(ModelResponse.model_fields) == [
        "output", "slide_name", "x", "y", "width", "height", "tissue_ratio", "patch_idx", "resolution", "embedding",
        "lineage",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "output", "shape"),
    [
        ("h0", "embedding", (1536,)), ("h1", "embedding", (1536,)), ("h0-mini", "embedding", (1536,)),
        ("m-optimus", "embedding", (1536,)), ("m-optimus", "prediction", (6002,)),
        ("tissue-seg", "prediction", (512, 512)),
    ],
)  # fmt: skip
def test_outputs_have_the_lengths_of_the_contract(name: str, output: str, shape: tuple[int, ...]) -> None:
    found = {spec.name: spec.shape for spec in load_model_spec(name).outputs}[output]
    assert found[-len(shape) :] == shape
    assert np.prod(found) == np.prod(shape)


def test_m_optimus_takes_19374_genes() -> None:
    omics = load_model_spec("m-optimus").omics
    assert omics is not None
    assert omics.n_genes == 19_374


# Section 3: modes, routes, limits.


def test_the_modes_are_these_and_metadata() -> None:
    assert get_args(Mode) == ("embedding", "prediction", "prediction_with_embedding")
    assert parse_invocation('{"model_name": "h1", "mode": "metadata"}').mode == "metadata"


def test_metadata_names_the_model_its_inputs_outputs_config_and_components(serve: "StartService") -> None:
    found = ModelMetadata.model_validate_json(ask(serve(), "GET", "/api/metadata/demo").text)
    assert (found.model_name, found.input_shape, found.input_dtype) == ("demo", (3, 224, 224), "uint8")
    assert [(output.name, output.shape) for output in found.outputs] == [("embedding", (64,)), ("prediction", (3,))]
    assert len(found.outputs[1].components) == 3
    assert found.config["tile_spec"]


@pytest.mark.parametrize(
    ("verb", "path"),
    [
        ("POST", "/api/embed/demo"), ("POST", "/api/predict/demo"), ("POST", "/api/predict_with_embedding/demo"),
        ("POST", "/invocations"), ("GET", "/ping"), ("GET", "/docs"),
    ],
)  # fmt: skip
def test_each_route_is_there(serve: "StartService", verb: str, path: str) -> None:
    body = make_body(1, model_name="demo", mode="embedding" if "embed/" in path else None)
    if path == "/invocations":
        body = make_body(1, model_name="demo", mode="prediction_with_embedding")
    assert ask(serve(max_wait_ms=0), verb, path, body if verb == "POST" else None).status_code == 200


def test_the_port_the_body_limit_and_the_deadline_are_those_of_the_contract() -> None:
    assert (Listener().port, _defaults(serve_command)["port"]) == (8080, 8080)
    settings = ServiceSettings()
    assert (settings.max_body_bytes, settings.deadline_s) == (6_291_456, 60.0)
    assert _defaults(serve_command)["max_body_bytes"] == 6_291_456
    assert _defaults(serve_command)["deadline"] == 60.0


def test_a_remote_client_waits_120_seconds_and_has_256_requests_under_way() -> None:
    defaults = _defaults(HttpClient.__init__)
    assert (defaults["timeout_s"], defaults["max_concurrent"]) == (120.0, 256)


# Section 4: objects.

METHODS = [
    f"{call}{form}" for call in ("predict", "embed", "predict_with_embedding") for form in ("", "_async", "_batch")
]


@pytest.mark.parametrize("client", [Client, InProcessClient, HttpClient])
@pytest.mark.parametrize("name", METHODS)
def test_every_client_has_every_method_and_async_ones_one_ignored_argument(client: type, name: str) -> None:
    method = getattr(client, name)
    names = list(inspect.signature(method).parameters)
    if name.endswith("_async"):
        assert inspect.iscoroutinefunction(method)
        assert names == ["self", "body", "session"]
        assert _defaults(method) == {"session": None}
    else:
        assert names == ["self", "bodies" if name.endswith("_batch") else "body"]


def test_the_in_process_client_and_its_factory_have_the_defaults_of_the_contract() -> None:
    settings = {"max_batch_size": 64, "max_wait_ms": 10, "dynamic_batching": True}
    assert _defaults(InProcessClient.__init__) == settings
    assert list(inspect.signature(InProcessClient.__init__).parameters) == ["self", "model", *settings]
    factory = inspect.signature(InProcessClient.from_checkpoint).parameters
    assert list(factory) == ["model", "path", "device", "assets", *settings]
    assert _defaults(InProcessClient.from_checkpoint) == {"path": None, "device": "cpu", "assets": None, **settings}


def test_a_prepared_sample_holds_a_tile_and_further_inputs_by_name() -> None:
    sample = PreparedSample(np.zeros((3, 4, 4), np.uint8))
    assert (sample.tile.shape, dict(sample.extra_tensors)) == ((3, 4, 4), {})


def test_a_requests_image_is_a_picture() -> None:
    image = parse_request(make_body(1)).image
    assert (image.mode, image.size) == ("RGB", (224, 224))


def test_the_server_model_is_made_from_spec_checkpoint_device_and_directory() -> None:
    assert list(inspect.signature(BaseServerModel.__init__).parameters)[1:5] == [
        "spec",
        "checkpoint",
        "device",
        "directory",
    ]
    assert str(_defaults(BaseServerModel.__init__)["directory"]) == "/opt/ml/model"
    for name in ("prepare_sample", "forward_batch", "preprocess_bulk_rna", "get_metadata", "forward"):
        assert callable(getattr(BaseServerModel, name))
    for name in ("model_spec", "model_name"):
        assert isinstance(getattr(BaseServerModel, name), property)
    assert list(inspect.signature(BaseServerModel.forward_batch).parameters) == ["self", "samples", "requests", "mode"]


def test_rna_goes_through_unchanged_where_there_is_no_transform(server: BaseServerModel) -> None:
    counts = [1.0, 2.0]
    assert server.preprocess_bulk_rna(counts) is counts


def test_a_model_spec_is_frozen_and_has_the_fields_of_the_contract() -> None:
    wanted = {
        "model_name", "version", "weights_source", "license", "tile_spec", "num_channels", "mean", "std",
        "interpolation", "antialias", "color_space", "stain_normalization", "architecture", "patch_size",
        "num_prefix_tokens", "embedding_dim", "output_type",
    }  # fmt: skip
    assert wanted <= set(ModelSpec.model_fields)
    assert {"size", "stride", "resolution", "unit"} <= set(TileSpec.model_fields)
    fields = ModelSpec.model_fields
    assert fields["num_channels"].default == 3
    assert set(get_args(fields["color_space"].annotation)) == {"RGB", "BGR", "HED"}
    assert set(get_args(fields["stain_normalization"].annotation)) == {"macenko", "reinhard", "vahadane", "none"}
    with pytest.raises(ValueError, match="frozen"):
        load_model_spec("demo").version = "2"  # type: ignore[misc]


# Section 5: errors.


def test_an_error_body_has_these_fields() -> None:
    assert set(ErrorBody.model_fields) == {"code", "message", "retryable", "request_id"}


def test_the_error_of_the_forward_pass_has_the_contracts_name_too() -> None:
    from inference.errors import _ForwardError

    assert issubclass(_ForwardError, RuntimeError)
    assert _ForwardError is inference.ForwardError


# Section 6: batching.


def test_the_scheduler_has_the_defaults_of_the_clients() -> None:
    defaults = _defaults(BatchScheduler.__init__)
    assert (defaults["max_batch_size"], defaults["max_wait_s"]) == (64, 0.01)
