"""One tile in, one answer out, as strict JSON."""

from typing import Annotated, Literal, TypeVar
from uuid import uuid4

from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, JsonValue, PrivateAttr, ValidationError

from inference.contract.image import decode_image
from inference.contract.validation import explain, parse_json
from inference.errors import InvalidRequest

Coordinate = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Pixels = Annotated[int, Field(gt=0, lt=2**31)]
Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]

ALIASES = {"m-optimus-stx": "m-optimus"}
"""Older names of models, which requests may still use."""


MAX_SLIDE_NAME = 1024
"""Characters of a slide's name, which each line of a service's log has; file systems take 255 bytes."""

M = TypeVar("M", bound="Message")


class Message(BaseModel):
    """Base of all messages: strict, frozen, without unknown fields and without NaN or infinity."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class ModelRequest(Message):
    """One tile to run: pixels as base64 PNG or JPEG, and where they came from.

    `model_name` and `mode` are for services that dispatch on them; elsewhere they must not contradict the call.

    Attributes:
        bulk_rna: one value per gene of the model's list.
        bulk_rna_sha256: instead of the values: the digest under which they were registered once for the slide.
    """

    image_data: str
    slide_name: Annotated[str, Field(max_length=MAX_SLIDE_NAME)]
    x: Coordinate
    y: Coordinate
    width: Pixels
    height: Pixels
    patch_idx: Annotated[int, Field(ge=0, lt=2**63)]
    bulk_rna: list[FiniteFloat] | None = None
    bulk_rna_sha256: Digest | None = None
    tissue_ratio: FiniteFloat | None = None
    resolution: FiniteFloat | None = None
    model_name: str | None = None
    mode: str | None = None
    _request_id: str = PrivateAttr(default_factory=lambda: uuid4().hex)

    @property
    def request_id(self) -> str:
        """Names this request in responses and logs; no field of the wire."""
        return self._request_id

    @property
    def image(self) -> Image.Image:
        """The tile, decoded to RGB on every access.

        Raises:
            BadRequest: not base64, not an 8-bit PNG or JPEG, too large, truncated, or of another size than declared.
        """
        return decode_image(self.image_data, (self.width, self.height))


class Lineage(Message):
    """What made an answer: enough to say later whether two answers can be compared.

    Attributes:
        preprocessing_sha256: digest of all that is done to the pixels before the network.
        code_version: version of this library.
        backbone_weights_sha256: of a downstream head, the weights that its embedding comes from.
        bulk_rna_sha256: digest of the bulk RNA that went in with the tile; None without: the two are not comparable.
    """

    request_id: str
    model_name: str
    model_version: str
    weights_sha256: str
    artifact_sha256: str
    preprocessing_sha256: str
    precision: str
    runtime: str
    device: str
    code_version: str
    backbone_weights_sha256: str | None = None
    bulk_rna_sha256: str | None = None


class ModelResponse(Message):
    """What the model says of one tile, with the request's place echoed.

    `embedding` is filled only in the combined mode; otherwise the vector asked for is `output`.
    """

    output: list[FiniteFloat]
    slide_name: str
    x: int
    y: int
    width: int
    height: int
    tissue_ratio: FiniteFloat | None = None
    patch_idx: int
    resolution: FiniteFloat | None = None
    embedding: list[FiniteFloat] | None = None
    lineage: Lineage | None = None

    def to_json(self) -> str:
        """The response on the wire: echoed fields always, `embedding` only in the combined mode."""
        absent = {name for name in ("embedding", "lineage") if getattr(self, name) is None}
        return self.model_dump_json(exclude=absent or None)


class OutputSpec(Message):
    """One output of a model: its name, per-tile shape, dtype, and names of its components if they have any."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    components: tuple[str, ...] = ()


class ModelMetadata(Message):
    """What a client may know of a loaded model.

    Attributes:
        input_shape: (C, H, W) of one tile.
        mpp: µm per pixel of the tiles.
        outputs: in the order of the graph; the components of a gene prediction are the genes.
        extra_inputs: what goes in beside the tile; the components of bulk RNA are the genes in the order of the values.
        config: the fields of the model's spec that are not at their default.
    """

    model_name: str
    version: str
    license: str
    input_shape: tuple[int, ...]
    input_dtype: str
    mpp: float
    outputs: tuple[OutputSpec, ...]
    device: str
    runtime: str
    artifact_sha256: str
    weights_sha256: str
    extra_inputs: tuple[OutputSpec, ...] = ()
    config: dict[str, JsonValue] = Field(default_factory=dict)


class Invocation(Message):
    """A request for a model's metadata by way of a route that dispatches on `model_name` and `mode`."""

    model_name: str
    mode: Literal["metadata"]


def model_name_of(name: str) -> str:
    """The present name of a model that may be called by an older one."""
    return ALIASES.get(name, name)


def parse_request(body: str | bytes, request_id: str | None = None) -> ModelRequest:
    """A request from its JSON.

    Args:
        request_id: under which it is already known; a new one where not given.

    Raises:
        BadRequest: not JSON, or a key is given twice.
        InvalidRequest: a field is missing, unknown or of the wrong kind.
    """
    return _identified(validated(ModelRequest, parse_json(body)), request_id)


def parse_invocation(body: str | bytes, request_id: str | None = None) -> ModelRequest | Invocation:
    """A request that names its model and mode: one tile, or the model's metadata.

    Raises:
        BadRequest: not JSON, or a key is given twice.
        InvalidRequest: a field is missing (`model_name` and `mode` too), unknown or of the wrong kind.
    """
    value = parse_json(body)
    if isinstance(value, dict) and value.get("mode") == "metadata":
        return validated(Invocation, value)
    request = _identified(validated(ModelRequest, value), request_id)
    for name in ("model_name", "mode"):
        if getattr(request, name) is None:
            raise InvalidRequest(f"request field {name}: Field required")
    return request


def validated(kind: type[M], value: object) -> M:
    """A message of that kind from decoded JSON.

    Raises:
        InvalidRequest: a field is missing, unknown or of the wrong kind.
    """
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise InvalidRequest(f"request field {explain(error)}") from None


def _identified(request: ModelRequest, request_id: str | None) -> ModelRequest:
    if request_id is not None:
        request._request_id = request_id
    return request
