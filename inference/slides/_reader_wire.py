"""What a reader process and whoever reads through it say to each other: JSON lines, and pixels in shared memory.

A request is one object on a line, and so is its answer. Pixels lie in one file that has no name and that both map:
RGB or RGBA rows without gaps, then, at the next multiple of 4, the float32 share of each pixel that is missing.
"""

import base64
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from mmap import mmap
from typing import Any, TypedDict

import numpy as np
from numpy.typing import NDArray

from inference.errors import InferenceError
from inference.slides.reader import SlideReader
from inference.slides.resolution import REDUCTIONS

Region = tuple[int, int, int, int, int, int]
"""Level, reduction, and x, y, width, height in reduced pixels."""


class OpenRequest(TypedDict):
    """The first request: which slide, the descriptor of the shared memory, and how many bytes may be allocated."""

    path: str
    name: str
    files: list[str]
    pixels: int
    memory: int


class ReadRequest(TypedDict):
    """Any later request: a rectangle, as RGBA (4 channels) or reduced RGB (3), and the size of the shared memory."""

    region: Region
    channels: int
    room: int


class Answer(TypedDict, total=False):
    """One of: what was found at opening, where pixels lie, or an error."""

    ready: bool
    facts: str
    shape: tuple[int, int, int]
    missing: bool
    error: dict[str, str]


UNEXPECTED = "unexpected"
"""Code of an error that was not raised on purpose."""

RGB, RGBA = 3, 4

_VALUE_ERROR = "value_error"


@dataclass(frozen=True)
class Facts:
    """What a reader process found when it opened a slide; see `SlideReader`.

    Attributes:
        state: size, modification time (ns), inode and device of each file.
        blocks: `block_size` by level and position in `REDUCTIONS`.
        stored: `stored_tile` by level.
    """

    level_sizes: tuple[tuple[int, int], ...]
    mpp: tuple[float, float] | None
    objective_power: float | None
    background: tuple[int, int, int]
    icc_profile: str | None
    """In base64."""
    vendor: str
    kind: str
    reason: str
    quickhash: str | None
    state: tuple[tuple[int, int, int, int], ...]
    blocks: tuple[tuple[tuple[int, int], ...], ...]
    stored: tuple[tuple[int, int], ...]

    @classmethod
    def of(cls, reader: SlideReader, state: tuple[tuple[int, int, int, int], ...]) -> "Facts":
        """Ask a reader everything but pixels."""
        levels = range(len(reader.level_sizes))
        return cls(
            reader.level_sizes, reader.mpp, reader.objective_power, reader.background,
            None if reader.icc_profile is None else base64.b64encode(reader.icc_profile).decode(),
            reader.vendor, reader.kind, reader.reason, reader.quickhash, state,
            tuple(tuple(reader.block_size(level, r) for r in REDUCTIONS) for level in levels),
            tuple(reader.stored_tile(level) for level in levels),
        )  # fmt: skip

    @property
    def icc_bytes(self) -> bytes | None:
        """The ICC profile itself."""
        return None if self.icc_profile is None else base64.b64decode(self.icc_profile)

    def to_text(self) -> str:
        """JSON; the same facts give the same text, also where a number is NaN."""
        return json.dumps(asdict(self))

    @classmethod
    def from_text(cls, text: str) -> "Facts":
        """The reverse of `to_text`."""
        return cls(**{name: _frozen(value) for name, value in json.loads(text).items()})


def _frozen(value: Any) -> Any:
    """JSON has no tuples."""
    return tuple(_frozen(item) for item in value) if isinstance(value, list) else value


def error_to_json(error: Exception) -> dict[str, str]:
    """An error as the other side can raise it again; of one not raised on purpose only the type is told."""
    if isinstance(error, InferenceError):
        return {"code": error.code, "message": error.message}
    if isinstance(error, ValueError):
        return {"code": _VALUE_ERROR, "message": str(error)}
    return {"code": UNEXPECTED, "message": type(error).__name__}


def error_from_json(told: dict[str, str]) -> Exception:
    """The error that the other side met."""
    code, message = told["code"], told["message"]
    if code == _VALUE_ERROR:
        return ValueError(message)
    for kind in _classes(InferenceError):
        if kind.code == code:
            return kind(message)
    return RuntimeError(f"the reader process met an unexpected error: {message}")


def _classes(base: type[InferenceError]) -> Iterator[type[InferenceError]]:
    yield base
    for kind in base.__subclasses__():
        yield from _classes(kind)


def room_for(pixels: int, channels: int) -> int:
    """Bytes that a rectangle takes at most: RGBA (4 channels), or RGB (3) with what is missing."""
    return 4 * pixels if channels == RGBA else _aligned(3 * pixels) + 4 * pixels


def put(memory: mmap, pixels: NDArray[np.uint8], missing: NDArray[np.float32] | None) -> None:
    """Write a rectangle to shared memory, which has room for it."""
    np.frombuffer(memory, np.uint8, pixels.size).reshape(pixels.shape)[:] = pixels
    if missing is not None:
        plane = np.frombuffer(memory, np.float32, missing.size, _aligned(pixels.size))
        plane.reshape(missing.shape)[:] = missing


def take(
    memory: mmap, shape: tuple[int, int, int], has_missing: bool
) -> tuple[NDArray[np.uint8], NDArray[np.float32] | None]:
    """Copy a rectangle of (height, width, channels) out of shared memory."""
    height, width, channels = shape
    pixels = np.frombuffer(memory, np.uint8, height * width * channels).reshape(shape).copy()
    if not has_missing:
        return pixels, None
    plane = np.frombuffer(memory, np.float32, height * width, _aligned(pixels.size))
    return pixels, plane.reshape(height, width).copy()


def _aligned(size: int) -> int:
    return -(-size // 4) * 4
