"""One tile in, one answer out, as strict JSON."""

from typing import Annotated

from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from inference.contract.image import decode_image
from inference.contract.validation import explain, parse_json
from inference.errors import BadRequest

Coordinate = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Pixels = Annotated[int, Field(gt=0, lt=2**31)]


class _Message(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class ModelRequest(_Message):
    """One tile to run: pixels as base64 PNG or JPEG, and where they came from.

    `model_name` and `mode` are for services that dispatch on them; elsewhere they must not contradict the call.
    """

    image_data: str
    slide_name: str
    x: Coordinate
    y: Coordinate
    width: Pixels
    height: Pixels
    patch_idx: Annotated[int, Field(ge=0, lt=2**63)]
    bulk_rna: list[FiniteFloat] | None = None
    tissue_ratio: FiniteFloat | None = None
    resolution: FiniteFloat | None = None
    model_name: str | None = None
    mode: str | None = None

    @property
    def image(self) -> Image.Image:
        """The tile, decoded to RGB on every access.

        Raises:
            BadRequest: not base64, not an 8-bit PNG or JPEG, too large, truncated, or of another size than declared.
        """
        return decode_image(self.image_data, (self.width, self.height))


class ModelResponse(_Message):
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

    def to_json(self) -> str:
        """The response on the wire: echoed fields always, `embedding` only in the combined mode."""
        return self.model_dump_json(exclude={"embedding"} if self.embedding is None else None)


class OutputSpec(_Message):
    """One output of a model: its name, per-tile shape, dtype, and names of its components if they have any."""

    name: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    components: tuple[str, ...] = ()


class ModelMetadata(_Message):
    """What a client may know of a loaded model."""

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


def parse_request(body: str) -> ModelRequest:
    """A request from its JSON.

    Raises:
        BadRequest: not JSON, or a field is missing, unknown, given twice or of the wrong kind.
    """
    try:
        return ModelRequest.model_validate(parse_json(body))
    except ValidationError as error:
        raise BadRequest(f"request field {explain(error)}") from None
