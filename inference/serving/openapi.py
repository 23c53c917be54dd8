"""What the service says of its own routes: OpenAPI, and a page of it that loads nothing from elsewhere."""

import json
from importlib.metadata import version
from typing import Any

from jinja2 import Environment

from inference.contract.faults import ErrorBody
from inference.contract.frames import MEDIA_TYPE
from inference.contract.messages import Invocation, ModelMetadata, ModelRequest, ModelResponse
from inference.models.sample import Mode
from inference.models.spec import MODEL_NAME

VERSION = version("slide-inference")

MODES: dict[str, Mode] = {
    "embed": "embedding",
    "predict": "prediction",
    "predict_with_embedding": "prediction_with_embedding",
}

_ERRORS = {
    400: "An image, value or frame that cannot be used.",
    401: "No token, or an unknown one.",
    404: "No such model.",
    413: "The body is too large.",
    422: "A field is missing, unknown or of the wrong kind.",
    429: "No room for the request now; see Retry-After.",
    503: "The forward pass failed, or the service is not ready or broken.",
    504: "Not answered before the deadline.",
}
_HEADERS = [
    {
        "name": "X-Request-Id", "in": "header", "schema": {"type": "string", "pattern": "^[A-Za-z0-9._-]{1,64}$"},
        "description": "Names the request in the answer and the log.",
    },
    {
        "name": "X-Deadline-Seconds", "in": "header", "schema": {"type": "number", "exclusiveMinimum": 0},
        "description": "When the caller stops waiting, from now; never more than the service allows.",
    },
]  # fmt: skip


_MODEL = {
    "name": "model", "in": "path", "required": True, "schema": {"type": "string", "pattern": MODEL_NAME},
    "description": "One of the models that /ping lists, or a head of it.",
}  # fmt: skip
_SHA256 = {
    "name": "sha256", "in": "path", "required": True, "schema": {"type": "string", "pattern": "^[0-9a-f]{64}$"},
}  # fmt: skip


def _responses(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The refusals of a route; only the first declares the model: each declaration costs the start a validator."""
    declared, *others = statuses
    reference = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorBody"}}}
    return {
        declared: {"model": ErrorBody, "description": _ERRORS[declared]},
        **{status: {"content": reference, "description": _ERRORS[status]} for status in others},
    }


_ALL = _responses(*_ERRORS)


def _json_body(*schemas: dict[str, Any]) -> dict[str, Any]:
    schema = schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": schema}}}}


def _documented(summary: str, text: str, **more: Any) -> dict[str, Any]:
    extra = more.pop("openapi_extra", {})
    parameters = [*more.pop("path", []), *_HEADERS]
    return {
        "summary": summary, "description": text, "openapi_extra": {"parameters": parameters, **extra}, **more,
    }  # fmt: skip


def tile(name: str, mode: Mode) -> dict[str, Any]:
    """Arguments of a per-tile route."""
    return _documented(
        f"{mode.replace('_', ' ').capitalize()} of one tile",
        "The tile is base64 of an 8-bit PNG or JPEG of the model's size.",
        name=name,
        path=[_MODEL],
        openapi_extra=_json_body(ModelRequest.model_json_schema()),
        responses={200: {"model": ModelResponse}, **_ALL},
    )


INVOCATIONS = _documented(
    "One tile, or metadata, by `model_name` and `mode`",
    "Both fields are required here. With the mode `metadata` there are no others, and the answer is the model's.",
    openapi_extra=_json_body(ModelRequest.model_json_schema(), Invocation.model_json_schema()),
    responses={200: {"model": ModelResponse | ModelMetadata}, **_ALL},
)
BATCH = _documented(
    "Many tiles in one binary body",
    "`STF1`, the length of a JSON header (uint32, little-endian), the header, then the tiles: uint8, row-major, as "
    "they are or as one LZ4 frame. The header has `mode`, `slide_name`, `shape` (tiles, height, width, channels), "
    "`encoding` (`raw`, `lz4`) and, optionally, `bulk_rna_sha256`. The answer has the same form: its header lists per "
    "tile null or an error (`errors`) and the arrays that follow (`outputs`), each with a row per tile that succeeded.",
    openapi_extra={
        "requestBody": {
            "required": True, "content": {MEDIA_TYPE: {"schema": {"type": "string", "format": "binary"}}},
        }
    },
    path=[_MODEL],
    responses={200: {"content": {MEDIA_TYPE: {}}, "description": "Results and errors."}, **_ALL},
)  # fmt: skip
METADATA = _documented(
    "A model's inputs, outputs and digests", "What a client may know of it.",
    path=[_MODEL],
    responses={200: {"model": ModelMetadata}, **_responses(400, 401, 404, 413, 429, 503, 504)},
)  # fmt: skip
BULK_RNA = _documented(
    "Register a slide's bulk RNA",
    "The body is the values, one per gene; the digest is SHA-256 of them as little-endian IEEE doubles. Tiles then "
    "refer to it as `bulk_rna_sha256`.",
    path=[_SHA256],
    openapi_extra=_json_body({"type": "array", "items": {"type": "number"}}),
    responses={200: {"description": "The models that know it now."}, **_ALL},
)
PING = _documented(
    "Whether the service should get requests",
    "503 while a model loads, once a device is broken, and while the service shuts down.",
    responses={200: {"description": "Ready."}, **_responses(400, 413, 503, 504)},
)
METRICS = _documented("Prometheus metrics", "In its text format.", responses=_responses(400, 401, 413, 429, 504))

_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<title>{{ info.title }} {{ info.version }}</title>
<style>
  body { font: 15px/1.5 system-ui, sans-serif; max-width: 60em; margin: 2em auto; padding: 0 1em; color: #222 }
  code, pre { font: 13px/1.45 ui-monospace, monospace; background: #f4f4f4; border-radius: 3px; padding: .1em .3em }
  pre { padding: .8em; overflow-x: auto } h2 { margin: 2em 0 .3em } summary { cursor: pointer; color: #555 }
  table { border-collapse: collapse } td { padding: .15em 1em .15em 0; vertical-align: top }
</style>
<h1>{{ info.title }} {{ info.version }}</h1>
<p>The description for programs is <a href="openapi.json"><code>openapi.json</code></a>. Every answer that is no result
has a body with <code>code</code>, <code>message</code>, <code>retryable</code> and <code>request_id</code>.</p>
{% for path, verbs in paths.items() %}{% for verb, route in verbs.items() %}
<h2><code>{{ verb | upper }} {{ path }}</code></h2>
<p><b>{{ route.summary }}.</b> {{ route.description }}</p>
<table>{% for status, response in route.responses.items() %}
<tr><td><code>{{ status }}</code><td>{{ response.description }}{% endfor %}
</table>
{% for media, body in (route.requestBody or {}).get("content", {}).items() %}
<details><summary>body: {{ media }}</summary><pre>{{ pretty(body.schema) }}</pre></details>
{% endfor %}{% endfor %}{% endfor %}
<h2>Answers</h2>
{% for name, schema in schemas.items() %}
<details><summary>{{ name }}</summary><pre>{{ pretty(schema) }}</pre></details>
{% endfor %}
"""


def page(document: dict[str, Any]) -> str:
    """An OpenAPI document for people."""
    template = Environment(autoescape=True).from_string(_PAGE)
    return template.render(
        info=document["info"],
        paths=document["paths"],
        schemas=document["components"]["schemas"],
        pretty=lambda value: json.dumps(value, indent=2, ensure_ascii=False),
    )
