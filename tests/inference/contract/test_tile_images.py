"""The image of a request: which pixels come out, and which images never get decoded."""

import base64
import io
import struct
import time
import zlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from inference.contract import ModelRequest
from inference.contract.image import MAX_IMAGE_BYTES, MAX_IMAGE_PIXELS, decode_image
from inference.errors import BadRequest

RGB = np.random.default_rng(0).integers(0, 256, (16, 24, 3), dtype=np.uint8)
SIZE = (24, 16)


def _file(image: Image.Image, **options: object) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, **{"format": "PNG", **options})  # type: ignore[arg-type]
    return buffer.getvalue()


def _decode(raw: bytes, size: tuple[int, int] = SIZE) -> NDArray[np.uint8]:
    return np.asarray(decode_image(base64.b64encode(raw).decode(), size))


def _png(width: int, height: int, depth: int, colour: int, rows: bytes) -> bytes:
    """A PNG written by hand, for what Pillow does not write."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows, 9)) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


def test_an_rgb_png_comes_back_pixel_for_pixel() -> None:
    assert np.array_equal(_decode(_file(Image.fromarray(RGB))), RGB)


def test_a_jpeg_comes_back_as_its_decoder_gives_it() -> None:
    raw = _file(Image.fromarray(RGB), format="JPEG", quality=95)
    assert np.array_equal(_decode(raw), np.asarray(Image.open(io.BytesIO(raw))))


def test_grey_becomes_three_equal_channels_and_black_and_white_becomes_0_and_255() -> None:
    grey = RGB[..., 0]
    assert np.array_equal(_decode(_file(Image.fromarray(grey))), np.stack([grey] * 3, axis=2))
    bits = Image.fromarray(grey > 127)
    assert np.array_equal(_decode(_file(bits))[..., 1], np.where(grey > 127, 255, 0))


def test_a_palette_png_comes_back_in_its_palettes_colours() -> None:
    colours = np.array([[10, 20, 30], [200, 100, 50]], np.uint8)
    index = (RGB[..., 0] > 127).astype(np.uint8)
    image = Image.fromarray(index)
    image.putpalette(colours.tobytes())
    assert np.array_equal(_decode(_file(image)), colours[index])


def test_transparent_pixels_lie_on_white_and_opaque_ones_are_untouched() -> None:
    alpha = np.full((16, 24, 1), 255, np.uint8)
    alpha[:4] = 0
    found = _decode(_file(Image.fromarray(np.concatenate([RGB, alpha], axis=2))))
    assert (found[:4] == 255).all()
    assert np.array_equal(found[4:], RGB[4:])


def test_a_transparent_palette_entry_lies_on_white_too() -> None:
    image = Image.fromarray((RGB[..., 0] > 127).astype(np.uint8))
    image.putpalette(bytes([0, 0, 0, 200, 100, 50]))
    found = _decode(_file(image, transparency=bytes([0, 255])))
    assert np.array_equal(found, np.where(RGB[..., :1] > 127, [200, 100, 50], 255))


@pytest.mark.parametrize("colour", [0, 2], ids=["grey", "rgb"])
def test_a_16_bit_png_is_refused_rather_than_cut_to_8(colour: int) -> None:
    row = b"\0" + bytes(24 * 2 * (3 if colour else 1))
    with pytest.raises(BadRequest, match="16 bits per channel"):
        _decode(_png(24, 16, 16, colour, row * 16))


def test_a_cmyk_jpeg_is_refused() -> None:
    with pytest.raises(BadRequest, match="CMYK"):
        _decode(_file(Image.fromarray(RGB).convert("CMYK"), format="JPEG"))


def test_an_animated_png_is_refused() -> None:
    frames = [Image.fromarray(RGB), Image.fromarray(255 - RGB)]
    with pytest.raises(BadRequest, match="animated"):
        _decode(_file(frames[0], save_all=True, append_images=frames[1:]))


@pytest.mark.parametrize("name", ["GIF", "BMP", "TIFF", "WEBP"])
def test_other_formats_are_refused_whatever_they_hold(name: str) -> None:
    with pytest.raises(BadRequest, match="neither a PNG nor a JPEG"):
        _decode(_file(Image.fromarray(RGB), format=name))


def test_an_image_of_another_size_than_declared_is_refused_with_both_sizes() -> None:
    with pytest.raises(BadRequest, match="24 x 16, the request says 16 x 24"):
        _decode(_file(Image.fromarray(RGB)), (16, 24))


def test_a_bomb_is_refused_by_its_header_before_it_is_decoded() -> None:
    raw = _png(12_000, 12_000, 1, 0, bytes(1501 * 12_000))
    assert len(raw) < 20_000
    started = time.monotonic()
    with pytest.raises(BadRequest, match=f"12000 x 12000 pixels, the limit is {MAX_IMAGE_PIXELS}"):
        _decode(raw, (12_000, 12_000))
    assert time.monotonic() - started < 1
    with pytest.raises(BadRequest, match="limit"):
        _decode(_png(2**31 - 1, 2**31 - 1, 8, 2, b""), (2**31 - 1, 2**31 - 1))


def test_base64_is_bounded_before_it_is_decoded() -> None:
    with pytest.raises(BadRequest, match=f"longer than the base64 of {MAX_IMAGE_BYTES} bytes"):
        decode_image("A" * (MAX_IMAGE_BYTES * 4 // 3 + 5), SIZE)


@pytest.mark.parametrize(
    "text", ["AAA", "AA AA", "AAAA\n", "A-_A", "AA==AA==", "é", "\ud800", "file:///etc/passwd", "!"]
)
def test_what_is_not_strict_base64_is_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="image_data is not base64"):
        decode_image(text, SIZE)


@pytest.mark.parametrize("text", ["", "AAAA", base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()])
def test_base64_of_no_image_is_refused(text: str) -> None:
    with pytest.raises(BadRequest):
        decode_image(text, SIZE)


@settings(deadline=None)  # a busy machine is no fault
@given(st.data())
def test_a_cut_or_damaged_png_is_refused_or_gives_a_whole_tile(data: st.DataObject) -> None:
    raw = bytearray(_file(Image.fromarray(RGB)))
    if data.draw(st.booleans()):
        raw = raw[: data.draw(st.integers(0, len(raw) - 1))]
    else:
        raw[data.draw(st.integers(8, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        found = _decode(bytes(raw))
    except BadRequest:
        return
    assert found.shape == RGB.shape


def test_half_a_png_is_refused() -> None:
    raw = _file(Image.fromarray(RGB))
    with pytest.raises(BadRequest, match="does not decode as PNG or JPEG"):
        _decode(raw[: len(raw) // 2])


def test_a_request_decodes_its_image_with_its_own_declared_size() -> None:
    text = base64.b64encode(_file(Image.fromarray(RGB))).decode()
    request = ModelRequest(image_data=text, slide_name="s", x=0, y=0, width=24, height=16, patch_idx=0)
    assert np.array_equal(np.asarray(request.image), RGB)
    with pytest.raises(BadRequest, match="the request says 24 x 17"):
        _ = request.model_copy(update={"height": 17}).image
