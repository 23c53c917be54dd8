"""The tile of a request: base64 in, RGB pixels out, and nothing decoded before its size is known."""

import base64
import binascii
import io

from PIL import Image, ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile

from inference.errors import BadRequest

MAX_IMAGE_BYTES = 16 << 20
"""Encoded bytes of one tile; a 2048 px RGB PNG of noise is 12.6 MB."""

MAX_JPEG_SCANS = 100
"""A progressive JPEG has about ten; each makes the decoder go over the whole picture, however short it is."""

MAX_IMAGE_PIXELS = 4096 * 4096
"""Pixels of one tile, read from the image's header before it is decoded."""

EIGHT_BIT_MODES = frozenset({"1", "L", "LA", "P", "PA", "RGB", "RGBA"})
"""Pillow's modes that become RGB without loss. CMYK has no one conversion, 16 bits do not fit."""

_PNG, _JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
_JPEG_SCAN = b"\xff\xda"
"""Start of a scan; within the data of one, 0xff is followed by other bytes."""
_PNG_BIT_DEPTH = 24
"""Offset in the file: signature, chunk length and name, width, height."""


def decode_image(text: str, size: tuple[int, int]) -> Image.Image:
    """The image in a base64 text, as RGB; transparent pixels lie on white.

    Args:
        text: base64 of a PNG or JPEG file of 8 bits per channel.
        size: (width, height) that it must have.

    Raises:
        BadRequest: not base64, not such an image, too large, truncated, or of another size.
    """
    raw = _decode_base64(text)
    try:
        image = _open(raw)
        if image.width * image.height > MAX_IMAGE_PIXELS:
            raise BadRequest(f"the image has {image.width} x {image.height} pixels, the limit is {MAX_IMAGE_PIXELS}")
        if image.size != size:
            raise BadRequest(f"the image is {image.width} x {image.height}, the request says {size[0]} x {size[1]}")
        _check_kind(image, raw)
        return _to_rgb(image)
    except BadRequest:
        raise
    except Exception as error:  # noqa: BLE001 - decoders raise anything on hostile bytes
        raise BadRequest(f"image_data does not decode as PNG or JPEG: {type(error).__name__}") from None


def _decode_base64(text: str) -> bytes:
    if len(text) > MAX_IMAGE_BYTES * 4 // 3 + 4:
        raise BadRequest(f"image_data is longer than the base64 of {MAX_IMAGE_BYTES} bytes")
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise BadRequest(f"image_data is not base64: {error}") from None


def _open(raw: bytes) -> ImageFile.ImageFile:
    # Not `Image.open`: that warns of large images instead of leaving the limit to the lines above.
    if raw.startswith(_PNG):
        return PngImageFile(io.BytesIO(raw))
    if raw.startswith(_JPEG):
        if raw.count(_JPEG_SCAN) > MAX_JPEG_SCANS:
            raise BadRequest(f"the image has more than {MAX_JPEG_SCANS} scans: send an ordinary JPEG")
        return JpegImageFile(io.BytesIO(raw))
    raise BadRequest("image_data is neither a PNG nor a JPEG file")


def _check_kind(image: ImageFile.ImageFile, raw: bytes) -> None:
    # Pillow reads 16-bit RGB as its upper bytes without a word.
    if image.mode not in EIGHT_BIT_MODES or (raw.startswith(_PNG) and raw[_PNG_BIT_DEPTH] == 16):
        raise BadRequest(f"the image is {image.mode} or has 16 bits per channel: send 8-bit RGB")
    if getattr(image, "n_frames", 1) > 1:
        raise BadRequest("the image is animated: send one picture")


def _to_rgb(image: Image.Image) -> Image.Image:
    if not image.has_transparency_data:
        return image.convert("RGB")
    # Dropping alpha would turn pixels that a scanner left out into black tissue.
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
