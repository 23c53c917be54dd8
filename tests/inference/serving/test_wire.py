"""Hostile bytes on the wire: each is refused in the one form, and the next tile is answered."""

import base64
import io
import json
import os
import socket
import struct
import threading
import zlib
from typing import TYPE_CHECKING, Any

import httpx
import lz4.frame
import numpy as np
import pytest
from fastapi import FastAPI
from numpy.typing import NDArray
from PIL import Image

from inference.contract.faults import public_text
from inference.contract.frames import MAGIC, encode_tiles
from inference.contract.image import MAX_IMAGE_BYTES
from tests.inference.clients.doubles import PATIENCE_S, Loopback, ask, make_body, make_tile

if TYPE_CHECKING:
    from tests.inference.clients.doubles import ScriptedRuntime, StartService

FIELDS = json.loads(make_body(1))


def refused(app: FastAPI, content: str | bytes, path: str = "/api/embed/demo") -> tuple[int, str]:
    """Status and message of a refusal, which has the one form; afterwards a tile is still answered."""
    answer = ask(app, "POST", path, content)
    body = answer.json()
    assert set(body) == {"code", "message", "retryable", "request_id"}
    assert body["retryable"] is False
    assert ask(app, "POST", "/api/embed/demo", make_body(2)).status_code == 200
    return answer.status_code, body["message"]


def field(**changes: object) -> str:
    return json.dumps({**FIELDS, **changes})


def image(text: bytes) -> str:
    return field(image_data=base64.b64encode(text).decode())


def png(picture: Image.Image, **options: Any) -> bytes:
    buffer = io.BytesIO()
    picture.save(buffer, **{"format": "PNG", **options})
    return buffer.getvalue()


def bomb(side: int) -> bytes:
    """A PNG of one bit per pixel that is a thousand times smaller than what it decodes to."""

    def chunk(name: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    head = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes((side // 8 + 1) * side), 9)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


TILE = Image.fromarray(make_tile(1))


@pytest.mark.parametrize("path", ["/api/embed/demo", "/invocations"])
@pytest.mark.parametrize(
    ("body", "status"),
    [
        pytest.param(field(tissue_ratio=float("nan")), 400, id="NaN"),
        pytest.param(field(bulk_rna=[float("inf")]), 400, id="Infinity"),
        pytest.param(field().replace("0.5", "1e999", 1), 422, id="overflow"),
        pytest.param(field(tissue_ratio=10**400), 422, id="huge"),
        pytest.param(field()[:-1] + ', "x": 1}', 400, id="duplicate key"),
        pytest.param("[" * 100_000, 400, id="deep list"),
        pytest.param('{"a":' * 100_000, 400, id="deep object"),
        pytest.param(field().replace('"x": 224', '"x": ' + "9" * 5000), 400, id="5,000 digits"),
        pytest.param(field(slide_name="\ud800"), 400, id="half a surrogate pair"),
        pytest.param("\ufeff" + field(), 400, id="byte-order mark"),
        pytest.param(field().encode("utf-16"), 400, id="UTF-16"),
        pytest.param(b"\xff\xfe\x00", 400, id="no UTF-8"),
        pytest.param(field(colour="red"), 422, id="unknown field"),
        pytest.param(b"", 400, id="empty"),
        pytest.param(b"null", 422, id="null"),
    ],
)
def test_wr1_json_that_is_none_is_refused(serve: "StartService", path: str, body: str | bytes, status: int) -> None:
    assert refused(serve(max_wait_ms=0), body, path)[0] == status


@pytest.mark.parametrize("text", ["!", "AAA", "AA AA", "AAAA\n", "A-_A", "AA==AA==", "é"])
def test_wr2_base64_is_strict(serve: "StartService", text: str) -> None:
    status, message = refused(serve(max_wait_ms=0), field(image_data=text))
    assert (status, message.startswith("image_data is not base64")) == (400, True)


def test_wr2_base64_is_bounded_before_it_is_decoded(serve: "StartService") -> None:
    app = serve(max_wait_ms=0, max_body_bytes=64 << 20)
    status, message = refused(app, field(image_data="A" * (MAX_IMAGE_BYTES * 4 // 3 + 8)))
    assert (status, "longer than the base64 of" in message) == (400, True)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        pytest.param(bomb(12_000), "12000 x 12000 pixels, the limit is", id="bomb"),
        pytest.param(png(TILE)[:20_000], "does not decode", id="truncated"),
        pytest.param(png(Image.fromarray(np.zeros((224, 224), np.uint16))),
                     "16 bits per channel", id="16 bits"),
        pytest.param(png(TILE.convert("CMYK"), format="JPEG"), "CMYK", id="CMYK"),
        pytest.param(png(TILE, save_all=True, append_images=[TILE.rotate(90)]), "animated", id="animated"),
        pytest.param(png(TILE, format="GIF"), "neither a PNG nor a JPEG", id="GIF"),
        pytest.param(png(TILE.resize((100, 100))), "the image is 100 x 100", id="another size"),
    ],
)  # fmt: skip
def test_wr3_images_are_of_the_listed_kinds_and_the_declared_size(
    serve: "StartService", runtime: "ScriptedRuntime", raw: bytes, says: str
) -> None:
    status, message = refused(serve(max_wait_ms=0), image(raw))
    assert (status, says in message) == (400, True)


def test_wr3_an_orientation_tag_does_not_turn_the_tile(serve: "StartService") -> None:
    app = serve(max_wait_ms=0)
    exif = Image.Exif()
    exif[0x0112] = 6
    plain, turned = (
        ask(app, "POST", "/api/embed/demo", image(png(TILE, **options))).json()["output"]
        for options in ({}, {"exif": exif})
    )
    assert plain == turned


def batch(payload: bytes, encoding: str = "lz4", tiles: int = 2) -> bytes:
    header = json.dumps(
        {"mode": "embedding", "slide_name": "s", "shape": [tiles, 224, 224, 3], "encoding": encoding}
    ).encode()
    return MAGIC + struct.pack("<I", len(header)) + header + payload


RAW = np.stack([make_tile(1), make_tile(2)]).tobytes()
LZ4 = lz4.frame.compress(RAW)


@pytest.mark.parametrize(
    ("payload", "says"),
    [
        pytest.param(lz4.frame.compress(bytes(256 << 20)), "holds more than the 301056 bytes", id="bomb"),
        pytest.param(LZ4[:-1000], "the LZ4 frame is cut", id="truncated"),
        pytest.param(LZ4 + b"x", "1 bytes follow the LZ4 frame", id="trailing"),
        pytest.param(LZ4 + LZ4, "bytes follow the LZ4 frame", id="concatenated"),
        pytest.param(lz4.frame.compress(RAW[:-1]), "the tiles are 301055 bytes", id="short"),
        pytest.param(b"", "the LZ4 frame is cut", id="nothing"),
        pytest.param(RAW, "no LZ4 frame", id="not compressed"),
    ],
)
def test_wr4_lz4_is_one_whole_frame_of_the_exact_length(serve: "StartService", payload: bytes, says: str) -> None:
    status, message = refused(serve(max_wait_ms=0), batch(payload), "/api/batch/demo")
    assert status == 400
    assert says in message


@pytest.mark.parametrize("payload", [RAW[:-1], RAW + b"x", b""], ids=["short", "long", "nothing"])
def test_wr5_raw_tiles_are_as_many_bytes_as_their_shape_means(serve: "StartService", payload: bytes) -> None:
    status, message = refused(serve(max_wait_ms=0), batch(payload, "raw"), "/api/batch/demo")
    assert status == 400
    assert f"the tiles are {len(payload)} bytes" in message
    assert "means 301056" in message


@pytest.mark.parametrize(
    ("body", "status", "says"),
    [
        pytest.param(b"", 400, "does not start with", id="empty"),
        pytest.param(b"PK\x03\x04" + bytes(100), 400, "does not start with", id="another format"),
        pytest.param(MAGIC + b"\xff\xff\xff\xff{}", 400, "said to be 4294967295 bytes", id="header beyond the body"),
        pytest.param(MAGIC + struct.pack("<I", 2) + b"{}", 422, "mode: Field required", id="no fields"),
        pytest.param(MAGIC + struct.pack("<I", 3) + b"NaN", 400, "NaN", id="no JSON"),
        pytest.param(batch(RAW, "zip"), 422, "encoding", id="unknown encoding"),
        pytest.param(batch(RAW, "raw", tiles=5000), 413, "5000 tiles in one body", id="too many tiles"),
        pytest.param(batch(RAW, "raw", tiles=4000), 413, "the limit is 268435456", id="too many bytes"),
        pytest.param(batch(RAW, "raw", tiles=-1), 422, "shape", id="negative"),
        pytest.param(encode_tiles(np.zeros((1, 8, 8, 3), np.uint8), "embedding", ""), 400, "demo takes", id="size"),
        pytest.param(encode_tiles(make_tile(1)[None], "segment", ""), 400, "no mode 'segment'", id="mode"),
        pytest.param(
            encode_tiles(make_tile(1)[None], "embedding", "", bulk_rna_sha256="0" * 64), 400, "no bulk RNA", id="RNA"
        ),
    ],
)
def test_a_binary_batch_that_is_none_is_refused(serve: "StartService", body: bytes, status: int, says: str) -> None:
    found, message = refused(serve(max_wait_ms=0), body, "/api/batch/demo")
    assert found == status
    assert says in message


def test_wr4_tiles_of_another_size_or_beyond_the_memory_set_aside_are_never_unpacked(serve: "StartService") -> None:
    bomb = lz4.frame.compress(bytes(64 << 20))
    header = json.dumps(
        {"mode": "embedding", "slide_name": "s", "shape": [1, 4096, 4096, 3], "encoding": "lz4"}
    ).encode()
    body = MAGIC + struct.pack("<I", len(header)) + header + bomb
    status, message = refused(serve(max_wait_ms=0), body, "/api/batch/demo")
    assert (status, "not (4096, 4096, 3)" in message) == (400, True)
    answer = ask(serve(max_wait_ms=0, max_pending_bytes=200_000), "POST", "/api/batch/demo", batch(LZ4))
    assert (answer.status_code, answer.json()["code"]) == (429, "queue_full")


def test_wr3_a_tile_of_another_size_is_never_decoded(serve: "StartService") -> None:
    status, message = refused(serve(max_wait_ms=0), field(width=4096, height=4096, image_data="!"))
    assert (status, message) == (400, "demo takes 224 x 224 tiles, not 4096 x 4096")


def test_wr3_a_jpeg_of_a_thousand_scans_is_refused(serve: "StartService") -> None:
    buffer = io.BytesIO()
    TILE.save(buffer, format="JPEG", progressive=True)
    ordinary = buffer.getvalue()
    assert ask(serve(max_wait_ms=0), "POST", "/api/embed/demo", image(ordinary)).status_code == 200
    at = ordinary.rindex(b"\xff\xda")
    status, message = refused(serve(max_wait_ms=0), image(ordinary[:at] + b"\xff\xda" * 150 + ordinary[at:]))
    assert (status, "more than 100 scans" in message) == (400, True)


@pytest.mark.timeout(30)
def test_wr1_a_key_given_twice_among_half_a_million_is_found_at_once(serve: "StartService") -> None:
    keys = ",".join(f'"{n}":0' for n in range(450_000))
    status, message = refused(serve(max_wait_ms=0), "{" + keys + ',"449999":0}')
    assert (status, message) == (400, "the body has the key '449999' twice")


def test_a_path_with_a_slash_too_many_is_not_redirected_to_a_host_that_the_caller_names(serve: "StartService") -> None:
    answer = ask(serve(), "POST", "/invocations/", field(), headers={"Host": "evil.example"})
    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")


@pytest.mark.parametrize("first", [b"GET /ping HTTP/1.1\r\nX-Long: ", b"GET /"])
def test_headers_without_an_end_end_their_connection_and_nobody_elses(serve: "StartService", first: bytes) -> None:
    service = Loopback(serve(max_wait_ms=0))
    try:
        with socket.create_connection(
            ("127.0.0.1", int(service.url.rpartition(":")[2])), timeout=PATIENCE_S
        ) as connection:
            connection.sendall(first)
            said = b""
            try:
                for _ in range(200):
                    connection.sendall(b"a" * 65_536)
                said = connection.recv(65_536)
            except ConnectionError:
                pass  # it was closed while more was sent
            else:
                assert said.startswith(b"HTTP/1.1 4") or not said
        assert httpx.get(f"{service.url}/ping", timeout=PATIENCE_S).status_code == 200
    finally:
        service.stop()


def test_wr7_an_address_in_place_of_an_image_is_never_looked_up(serve: "StartService") -> None:
    hits = 0
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0.3)
        port = listener.getsockname()[1]

        def count() -> None:
            nonlocal hits
            try:
                listener.accept()[0].close()
                hits += 1
            except TimeoutError:
                pass

        thread = threading.Thread(target=count)
        thread.start()
        app = serve(max_wait_ms=0)
        for text in (
            f"http://127.0.0.1:{port}/tile.png",
            "file:///etc/passwd",
            "/etc/passwd",
            "data:image/png;base64,",
        ):
            status, message = refused(app, field(image_data=text))
            assert (status, message.startswith("image_data is not base64")) == (400, True)
            assert refused(app, field(image_url=text))[0] == 422
        thread.join()
    assert hits == 0


@pytest.mark.parametrize("name", ["../demo", "/proc/self/environ", "demo\x00", "..%2f..%2fetc%2fpasswd", "x" * 3000])
def test_wr8_a_name_is_looked_up_and_never_a_path(serve: "StartService", name: str) -> None:
    app = serve(max_wait_ms=0)
    status, message = refused(app, json.dumps({**FIELDS, "model_name": name, "mode": "embedding"}), "/invocations")
    assert (status, len(message) < 200) == (404, True)
    assert refused(app, json.dumps({**FIELDS, "slide_name": "s", "model_name": name}))[0] == 400


# WR9: what a caller is told.


@pytest.mark.parametrize(
    "error",
    [
        OSError(13, "Permission denied", "/root/.secret/weights.pt2"),
        RuntimeError("cannot open /opt/ml/model/h1.pt2: No such file or directory"),
        ValueError(f"token {'a1' * 40} in {os.environ.get('HOME', '/root')}/x"),
        KeyError("~/keys/id_rsa"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_wr9_what_went_wrong_inside_is_told_without_paths_tokens_or_texts_of_others(
    serve: "StartService", runtime: "ScriptedRuntime", error: Exception
) -> None:
    def react(_batch: NDArray[Any], _outputs: object) -> Any:
        raise error

    app = serve(max_wait_ms=0)
    runtime.react = react
    answer = ask(app, "POST", "/api/embed/demo", make_body(1))
    message = answer.json()["message"]
    assert answer.status_code == 503
    assert message == f"the forward pass of demo failed: {type(error).__name__}"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("demo cannot prepare this request: OSError: [Errno 2] /root/x", "demo cannot prepare this request: OSError"),
        ("no RNA file at /data/patients/0815.tsv", "no RNA file at …"),
        (r"it lies at C:\Users\x\y.pt2; move it", "it lies at …; move it"),
        ("see file:///etc/passwd", "see …"),
        (f"key {'A' * 80}", "key …"),
        ("no RNA is registered as 0123456789ab: send it", "no RNA is registered as 0123456789ab: send it"),
        ("12 of 224 x 224, 3/4 of them", "12 of 224 x 224, 3/4 of them"),
        ("two\nlines", "two lines"),
        ("x " * 1000, ("x " * 250)),
    ],
)  # fmt: skip
def test_wr9_messages_keep_what_helps_and_lose_what_is_private(text: str, told: str) -> None:
    assert public_text(text) == told
