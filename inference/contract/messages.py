"""One tile in, one answer out, as strict JSON."""

import base64
import binascii
import io
from typing import Annotated

from PIL import Image
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat

from inference.errors import BadRequest

MAX_IMAGE_BYTES = 16 << 20
"""Encoded bytes of one tile; a 2048 px RGB PNG of noise is 12.6 MB."""

MAX_IMAGE_PIXELS = 4096 * 4096
"""Pixels of one tile, read from the image's header before it is decoded."""

IMAGE_FORMATS = ("PNG", "JPEG")


class _Message(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class ModelRequest(_Message):
    """One tile to run: pixels as base64 PNG, and where they came from."""

    image_data: str
    slide_name: str
    x: int
    y: int
    width: Annotated[int, Field(gt=0)]
    height: Annotated[int, Field(gt=0)]
    patch_idx: Annotated[int, Field(ge=0)]
    bulk_rna: list[FiniteFloat] | None = None
    tissue_ratio: FiniteFloat | None = None
    resolution: FiniteFloat | None = None
    model_name: str | None = None
    mode: str | None = None

    @property
    def image(self) -> Image.Image:
        """The tile, decoded to RGB.

        Raises:
            BadRequest: not base64, not a PNG or JPEG, too large, truncated, or of another size than declared.
        """
        if len(self.image_data) > MAX_IMAGE_BYTES * 4 // 3 + 4:
            raise BadRequest(f"image_data is larger than {MAX_IMAGE_BYTES} bytes")
        try:
            raw = base64.b64decode(self.image_data, validate=True)
        except (binascii.Error, ValueError) as error:
            raise BadRequest(f"image_data is not base64: {error}") from None
        try:
            image = Image.open(io.BytesIO(raw), formats=IMAGE_FORMATS)
            if image.width * image.height > MAX_IMAGE_PIXELS:
                raise BadRequest(f"the image has {image.width} x {image.height} pixels, over the limit")
            if image.size != (self.width, self.height):
                raise BadRequest(
                    f"the image is {image.width} x {image.height}, the request says {self.width} x {self.height}"
                )
            return image.convert("RGB")
        except BadRequest:
            raise
        except Exception as error:  # noqa: BLE001 - decoders raise anything on hostile bytes
            raise BadRequest(f"image_data does not decode as PNG or JPEG: {type(error).__name__}") from None


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
    patch_idx: int
    tissue_ratio: FiniteFloat | None = None
    resolution: FiniteFloat | None = None
    embedding: list[FiniteFloat] | None = None


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
