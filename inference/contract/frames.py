"""Many tiles in one body, without base64 or PNG: a small JSON header, then raw bytes.

    bytes 0-3     b"STF1"
    bytes 4-7     length of the header, unsigned, little-endian
    then          the header: JSON, UTF-8
    then          the payload, to the end of the body

A request's payload is the tiles, uint8, row-major in the header's shape (tiles, height, width, channels), as they are
or as one LZ4 frame. A response's payload holds one array after another as its header lists them, each with a row for
every tile that succeeded, in order. Numbers are little-endian.
"""

import math
import struct
from collections.abc import Sequence
from types import ModuleType
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from inference.contract.faults import ErrorBody
from inference.contract.messages import MAX_SLIDE_NAME, Digest, Lineage, Message, validated
from inference.contract.validation import parse_json
from inference.errors import BadRequest, ConfigError, TooLarge

MEDIA_TYPE = "application/x-slide-tiles"
MAGIC = b"STF1"
MAX_HEADER_BYTES = 4 << 20
"""A response has an error body of some 300 bytes per failed tile."""

MAX_TILES = 4096
"""Tiles of one body."""

_PREFIX = struct.Struct("<4sI")

M = TypeVar("M", bound=Message)

Dimension = Annotated[int, Field(gt=0, le=1 << 20)]


class TileBatch(Message):
    """Header of a request.

    Attributes:
        slide_name: stem of the slide's file, for the service's log.
        shape: (tiles, height, width, channels).
        bulk_rna_sha256: digest under which the slide's RNA was registered; None runs without.
    """

    mode: str
    slide_name: Annotated[str, Field(max_length=MAX_SLIDE_NAME)]
    shape: Annotated[list[Dimension], Field(min_length=4, max_length=4)]
    encoding: Literal["raw", "lz4"] = "raw"
    bulk_rna_sha256: Digest | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of all tiles."""
        return math.prod(self.shape)


class OutputRows(Message):
    """One array of a response.

    Attributes:
        name: for a segmentation model, `prediction` is each class's share of the pixels, `mask` their classes.
        shape: (tiles that succeeded, ...).
        encoding: of a mask: `bits` for one class, packed over the whole array, first pixel highest; else `uint8`.
        n_classes: of a mask.
    """

    name: Literal["embedding", "prediction", "mask"]
    shape: Annotated[list[Annotated[int, Field(ge=0)]], Field(min_length=1, max_length=8)]
    encoding: Literal["float32", "uint8", "bits"] = "float32"
    n_classes: Annotated[int, Field(ge=0, le=256)] = 0

    @property
    def nbytes(self) -> int:
        """Bytes in the payload."""
        values = math.prod(self.shape)
        return {"float32": values * 4, "uint8": values, "bits": (values + 7) // 8}[self.encoding]


class TileAnswers(Message):
    """Header of a response.

    Attributes:
        errors: per tile of the request, null where it succeeded.
    """

    request_id: str
    mode: str
    errors: list[ErrorBody | None]
    outputs: list[OutputRows]
    lineage: Lineage | None = None


def encode_tiles(
    tiles: NDArray[np.uint8], mode: str, slide_name: str, *, bulk_rna_sha256: str | None = None, compress: bool = False
) -> bytes:
    """A request's body from (N, H, W, C) uint8 tiles.

    Raises:
        BadRequest: another shape or dtype.
        ConfigError: `compress` without the lz4 package.
    """
    if tiles.ndim != 4 or tiles.dtype != np.uint8 or tiles.size == 0:
        raise BadRequest(f"tiles are uint8 (tiles, height, width, channels), not {tiles.dtype} {tiles.shape}")
    header = TileBatch(
        mode=mode,
        slide_name=slide_name,
        shape=list(tiles.shape),
        encoding="lz4" if compress else "raw",
        bulk_rna_sha256=bulk_rna_sha256,
    )
    payload = np.ascontiguousarray(tiles).tobytes()
    return _frame(header, _lz4().compress(payload) if compress else payload)


def read_tile_header(body: bytes, max_bytes: int) -> tuple[TileBatch, memoryview]:
    """A request's header and payload; nothing is decompressed.

    Raises:
        BadRequest: no such frame.
        InvalidRequest: a field of the header is missing, unknown or of the wrong kind.
        TooLarge: more tiles or bytes of tiles than taken.
    """
    header, payload = _unframe(body, TileBatch)
    if header.shape[0] > MAX_TILES:
        raise TooLarge(f"{header.shape[0]} tiles in one body, the limit is {MAX_TILES}")
    if header.nbytes > max_bytes:
        raise TooLarge(f"tiles of {header.shape} are {header.nbytes} bytes, the limit is {max_bytes}")
    return header, payload


def decode_tiles(header: TileBatch, payload: memoryview) -> NDArray[np.uint8]:
    """The tiles of a request, read-only, (N, H, W, C).

    Raises:
        BadRequest: the payload holds more or fewer bytes than the header says, or is no whole LZ4 frame.
    """
    raw: bytes | memoryview = payload if header.encoding == "raw" else _inflate(payload, header.nbytes)
    if len(raw) != header.nbytes:
        raise BadRequest(f"the tiles are {len(raw)} bytes, their shape {header.shape} means {header.nbytes}")
    found = np.frombuffer(raw, np.uint8).reshape(header.shape)
    found.setflags(write=False)
    return found


def encode_answers(header: TileAnswers, arrays: Sequence[NDArray[Any]]) -> bytes:
    """A response's body: the header and the array of each of its outputs."""
    parts = []
    for output, array in zip(header.outputs, arrays, strict=True):
        if output.encoding == "bits":
            parts.append(np.packbits(array.astype(bool)).tobytes())
        else:
            parts.append(array.astype("<f4" if output.encoding == "float32" else np.uint8).tobytes())
    return _frame(header, b"".join(parts))


def decode_answers(body: bytes) -> tuple[TileAnswers, list[NDArray[Any]]]:
    """A response's header and the array of each of its outputs, float32, or uint8 for a mask.

    Raises:
        BadRequest: no such frame, or its payload is not what the header says.
    """
    header, payload = _unframe(body, TileAnswers)
    wanted = sum(output.nbytes for output in header.outputs)
    if len(payload) != wanted:
        raise BadRequest(f"the answers are {len(payload)} bytes, their header means {wanted}")
    arrays, start = [], 0
    for output in header.outputs:
        part = payload[start : start + output.nbytes]
        start += output.nbytes
        flat: NDArray[Any]
        if output.encoding == "bits":
            flat = np.unpackbits(np.frombuffer(part, np.uint8), count=math.prod(output.shape))
        elif output.encoding == "uint8":
            flat = np.frombuffer(part, np.uint8)
        else:
            flat = np.frombuffer(part, "<f4").astype(np.float32)
        arrays.append(flat.reshape(output.shape))
    return header, arrays


def _frame(header: Message, payload: bytes) -> bytes:
    text = header.model_dump_json().encode()
    return b"".join([_PREFIX.pack(MAGIC, len(text)), text, payload])


def _unframe(body: bytes, kind: type[M]) -> tuple[M, memoryview]:
    if len(body) < _PREFIX.size or not body.startswith(MAGIC):
        raise BadRequest(f"the body is no {MEDIA_TYPE}: it does not start with {MAGIC.decode()} and a length")
    _, length = _PREFIX.unpack_from(body)
    if length > min(MAX_HEADER_BYTES, len(body) - _PREFIX.size):
        raise BadRequest(f"the header is said to be {length} bytes, the body has {len(body) - _PREFIX.size} after it")
    payload = memoryview(body)[_PREFIX.size :]
    return validated(kind, parse_json(bytes(payload[:length]))), payload[length:]


def _inflate(payload: memoryview, expected: int) -> bytes:
    """Exactly the expected bytes from exactly one LZ4 frame, or a refusal before more is written."""
    decompressor = _lz4().LZ4FrameDecompressor()
    try:
        # One byte more than expected tells a frame that goes on from one that ends.
        found: bytes = decompressor.decompress(payload, max_length=expected + 1)
    except RuntimeError as error:
        raise BadRequest(f"the tiles are no LZ4 frame: {type(error).__name__}") from None
    if len(found) > expected:
        raise BadRequest(f"the LZ4 frame holds more than the {expected} bytes that the shape means")
    if not decompressor.eof:
        raise BadRequest(f"the LZ4 frame is cut: {len(found)} of {expected} bytes are there")
    if decompressor.unused_data:
        raise BadRequest(f"{len(decompressor.unused_data)} bytes follow the LZ4 frame")
    return found


def _lz4() -> ModuleType:
    try:
        import lz4.frame
    except ImportError as error:
        raise ConfigError("compressed tiles need the lz4 package: install slide-inference[serve]") from error
    found: ModuleType = lz4.frame
    return found
