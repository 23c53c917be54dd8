"""The binary batch: what goes in comes out, byte for byte, and nothing else is read."""

import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from inference.contract.faults import ErrorBody
from inference.contract.frames import (
    MAGIC,
    MAX_TILES,
    OutputRows,
    TileAnswers,
    decode_answers,
    decode_tiles,
    encode_answers,
    encode_tiles,
    read_tile_header,
)
from inference.errors import BadRequest, TooLarge

TILES: NDArray[np.uint8] = np.random.default_rng(0).integers(0, 256, (3, 5, 7, 3), dtype=np.uint8)
ERROR = ErrorBody(code="tile_error", message="m", retryable=False, request_id="r")


@pytest.mark.parametrize("compress", [False, True], ids=["raw", "lz4"])
@pytest.mark.parametrize("tiles", [TILES, TILES[:, ::2, ::-1]], ids=["in order", "a view"])
def test_tiles_come_out_as_they_went_in_and_cannot_be_changed(tiles: NDArray[np.uint8], compress: bool) -> None:
    body = encode_tiles(tiles, "embedding", "slide", bulk_rna_sha256="0" * 64, compress=compress)
    header, payload = read_tile_header(body, 1 << 20)
    found = decode_tiles(header, payload)
    assert np.array_equal(found, tiles)
    assert not found.flags.writeable
    assert (header.mode, header.slide_name, header.shape) == ("embedding", "slide", list(tiles.shape))
    assert header.bulk_rna_sha256 == "0" * 64


def test_the_layout_is_the_one_that_is_written_down() -> None:
    body = encode_tiles(TILES, "embedding", "slide")
    length = struct.unpack("<I", body[4:8])[0]
    assert body[:4] == MAGIC == b"STF1"
    assert body[8 : 8 + length] == (
        b'{"mode":"embedding","slide_name":"slide","shape":[3,5,7,3],"encoding":"raw","bulk_rna_sha256":null}'
    )
    assert body[8 + length :] == TILES.tobytes()


def test_more_than_the_limit_is_refused_by_the_header_alone() -> None:
    body = encode_tiles(TILES, "embedding", "slide")
    assert read_tile_header(body, TILES.nbytes)[0].nbytes == TILES.nbytes
    with pytest.raises(TooLarge, match=f"are {TILES.nbytes} bytes, the limit is {TILES.nbytes - 1}"):
        read_tile_header(body, TILES.nbytes - 1)
    many = np.zeros((MAX_TILES + 1, 1, 1, 1), np.uint8)
    with pytest.raises(TooLarge, match=f"{MAX_TILES + 1} tiles in one body, the limit is {MAX_TILES}"):
        read_tile_header(encode_tiles(many, "embedding", "s"), 1 << 20)
    read_tile_header(encode_tiles(many[1:], "embedding", "s"), 1 << 20)


def _answers() -> tuple[TileAnswers, list[NDArray[np.generic]]]:
    rng = np.random.default_rng(1)
    arrays: list[NDArray[np.generic]] = [
        rng.standard_normal((2, 4)).astype(np.float32),
        rng.standard_normal((2, 3)).astype(np.float32),
        rng.integers(0, 2, (2, 5, 7)).astype(np.uint8),
        rng.integers(0, 5, (2, 5, 7)).astype(np.uint8),
    ]
    header = TileAnswers(
        request_id="r", mode="prediction", errors=[None, ERROR, None],
        outputs=[
            OutputRows(name="embedding", shape=[2, 4]), OutputRows(name="prediction", shape=[2, 3]),
            OutputRows(name="mask", shape=[2, 5, 7], encoding="bits", n_classes=1),
            OutputRows(name="mask", shape=[2, 5, 7], encoding="uint8", n_classes=5),
        ],
    )  # fmt: skip
    return header, arrays


def test_answers_come_out_as_they_went_in_a_yes_or_no_in_one_bit() -> None:
    header, arrays = _answers()
    body = encode_answers(header, arrays)
    found, values = decode_answers(body)
    assert found == header
    for one, other in zip(values, arrays, strict=True):
        assert one.dtype == other.dtype
        assert np.array_equal(one, other)
    assert [output.nbytes for output in header.outputs] == [32, 24, 9, 70]


def test_no_answers_at_all_are_answers_too() -> None:
    header = TileAnswers(request_id="r", mode="embedding", errors=[ERROR], outputs=[])
    assert decode_answers(encode_answers(header, [])) == (header, [])


@settings(deadline=None)  # a busy machine is no fault
@given(st.data())
def test_whatever_is_cut_or_changed_it_is_a_typed_refusal_or_whole(data: st.DataObject) -> None:
    body = bytearray(encode_tiles(TILES, "embedding", "s", compress=data.draw(st.booleans())))
    if data.draw(st.booleans()):
        body = body[: data.draw(st.integers(0, len(body) - 1))]
    else:
        body[data.draw(st.integers(0, len(body) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        header, payload = read_tile_header(bytes(body), 1 << 20)
        found = decode_tiles(header, payload)
    except BadRequest:
        return
    assert found.nbytes == header.nbytes


@settings(deadline=None)
@given(st.data())
def test_answers_that_are_cut_or_changed_are_refused_or_whole(data: st.DataObject) -> None:
    body = bytearray(encode_answers(*_answers()))
    if data.draw(st.booleans()):
        body = body[: data.draw(st.integers(0, len(body) - 1))]
    else:
        body[data.draw(st.integers(0, len(body) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    try:
        header, arrays = decode_answers(bytes(body))
    except BadRequest:
        return
    assert [list(array.shape) for array in arrays] == [output.shape for output in header.outputs]
