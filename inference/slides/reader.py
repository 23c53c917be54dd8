"""The boundary to foreign decoders: one small interface, every call checked."""

import contextlib
import logging
import os
import queue
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, Self

import numpy as np
import openslide
import tifffile
from numpy.typing import NDArray

from inference.errors import SourceUnavailable, TileReadError, UnreadableSlide

log = logging.getLogger(__name__)

MAX_REGION_PIXELS = 1 << 26
"""Largest region of one read; larger requests are a mistake of the caller."""


class SlideReader(Protocol):
    """Pixels and properties of one opened slide. Safe to use from several threads at once.

    Attributes:
        level_sizes: width and height of each stored level, level 0 first.
        mpp: µm per level-0 pixel as the slide states them, or None; not checked for sense.
        objective_power: magnification as the slide states it, or None.
        background: RGB behind transparent pixels.
        kind: the reader's name, for provenance.
    """

    level_sizes: tuple[tuple[int, int], ...]
    mpp: tuple[float, float] | None
    objective_power: float | None
    background: tuple[int, int, int]
    vendor: str
    kind: str
    quickhash: str | None

    def read_region(self, level: int, x: int, y: int, width: int, height: int) -> NDArray[np.uint8]:
        """RGBA pixels (height, width, 4); x and y in pixels of that level; alpha 0 where there are none.

        Raises:
            TileReadError: the pixels cannot be decoded; other regions still can.
        """
        ...

    def stored_tile(self, level: int) -> tuple[int, int]:
        """Width and height of the compressed tiles of a level."""
        ...

    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exc: object) -> None: ...


class OpenSlideReader:
    """Reads through OpenSlide, whose handles fail for good after one damaged tile: such a handle is replaced."""

    kind = f"openslide {openslide.__library_version__}"

    def __init__(self, path: Path, name: str) -> None:
        self._path, self._name = path, name
        self._free: queue.SimpleQueue[openslide.OpenSlide] = queue.SimpleQueue()
        handle = self._open()
        properties = handle.properties
        self.level_sizes: tuple[tuple[int, int], ...] = tuple((int(w), int(h)) for w, h in handle.level_dimensions)
        # OpenSlide addresses every level in level-0 pixels and divides by this one number for x and y.
        self._downsamples = tuple(float(d) for d in handle.level_downsamples)
        self.vendor = str(properties.get(openslide.PROPERTY_NAME_VENDOR, "unknown"))
        self.quickhash: str | None = properties.get(openslide.PROPERTY_NAME_QUICKHASH1)
        self.mpp = _pair_of_floats(properties, openslide.PROPERTY_NAME_MPP_X, openslide.PROPERTY_NAME_MPP_Y)
        self.objective_power = _float(properties.get(openslide.PROPERTY_NAME_OBJECTIVE_POWER))
        colour = str(properties.get(openslide.PROPERTY_NAME_BACKGROUND_COLOR, "ffffff"))
        self.background = (int(colour[:2], 16), int(colour[2:4], 16), int(colour[4:6], 16))
        levels = range(len(self.level_sizes))
        self._tiles = tuple(
            tuple(_int(properties.get(f"openslide.level[{k}].tile-{side}")) for side in ("width", "height"))
            for k in levels
        )
        self._free.put(handle)

    def read_region(self, level: int, x: int, y: int, width: int, height: int) -> NDArray[np.uint8]:
        """See `SlideReader.read_region`."""
        if not 0 <= level < len(self.level_sizes) or width < 1 or height < 1 or width * height > MAX_REGION_PIXELS:
            raise ValueError(f"{self._name}: cannot read {width} x {height} pixels of level {level}")
        down = self._downsamples[level]
        origin = (round(x * down), round(y * down))
        try:
            return self._read(origin, level, (width, height))
        except openslide.OpenSlideError:
            # A fresh handle tells damage elsewhere, seen by this handle before, from damage here.
            try:
                return self._read(origin, level, (width, height))
            except openslide.OpenSlideError as error:
                raise TileReadError(f"level {level} cannot be decoded here: {_reason(error)}") from None

    def stored_tile(self, level: int) -> tuple[int, int]:
        """See `SlideReader.stored_tile`; 256 where the format does not say."""
        width, height = self._tiles[level]
        return width or 256, height or 256

    def close(self) -> None:
        """Close every handle; idempotent."""
        with contextlib.suppress(queue.Empty):
            while True:
                self._free.get_nowait().close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _read(self, origin: tuple[int, int], level: int, size: tuple[int, int]) -> NDArray[np.uint8]:
        with self._handle() as handle:
            return np.asarray(handle.read_region(origin, level, size), dtype=np.uint8)

    @contextmanager
    def _handle(self) -> Iterator[openslide.OpenSlide]:
        """One handle for one read; given back only if the read went well."""
        try:
            handle = self._free.get_nowait()
        except queue.Empty:
            handle = self._open()
        try:
            yield handle
        except BaseException:
            handle.close()
            raise
        self._free.put(handle)

    def _open(self) -> openslide.OpenSlide:
        require_regular_file(self._path, self._name)
        try:
            return openslide.OpenSlide(self._path)
        except (openslide.OpenSlideError, OSError) as error:
            raise UnreadableSlide(f"{self._name}: {_why_unreadable(self._path, error)}") from None


def open_slide(path: Path, name: str) -> SlideReader:
    """Open a slide with the reader that fits it.

    Args:
        path: the slide's main file.
        name: what messages call it.

    Raises:
        UnreadableSlide: not a slide, or damaged beyond opening, with the likely reason.
        SourceUnavailable: its folder cannot be reached.
    """
    return OpenSlideReader(path, name)


def require_regular_file(path: Path, name: str) -> None:
    """Refuse what is gone, and what would hang a reader: pipes, sockets, devices."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        if not path.parent.is_dir():
            raise SourceUnavailable(f"{name}: its folder cannot be reached; is the source mounted?") from None
        raise UnreadableSlide(f"{name}: the file is gone; put it back or remove it from the cohort") from None
    except OSError as error:
        raise UnreadableSlide(f"{name}: the file cannot be reached: {error.strerror}") from None
    if not stat.S_ISREG(mode):
        raise UnreadableSlide(f"{name}: not a regular file")
    if not os.access(path, os.R_OK):
        raise UnreadableSlide(f"{name}: no permission to read it")


def _why_unreadable(path: Path, error: BaseException) -> str:
    """The likeliest reason that a file does not open as a slide, in one line."""
    size = path.stat().st_size
    if size == 0:
        return "the file is empty (0 bytes); copy it again"
    with path.open("rb") as stream:
        head = stream.read(512)
    if head.lstrip()[:1] == b"<":
        return "not a slide but a web page or XML (an error page saved as a slide?); fetch it again"
    if head[:2] not in (b"II", b"MM"):
        return f"no known slide format ({_reason(error)})"
    if end := _tiff_end(path):
        return f"truncated: its data reach byte {end:,}, the file ends at {size:,}; copy it again"
    return f"a TIFF that is damaged or no slide ({_reason(error)})"


def _tiff_end(path: Path) -> int | None:
    """Last byte a TIFF's own tables ask for, if the file is shorter; None if nothing is missing."""
    size, end = path.stat().st_size, _first_directory(path)
    logger = logging.getLogger("tifffile")
    quiet, logger.disabled = logger.disabled, True  # it reports to stderr what is reported here
    try:
        with tifffile.TiffFile(path) as tiff:
            for page in tiff.pages:
                end = max([end, *(o + n for o, n in zip(page.dataoffsets, page.databytecounts, strict=False))])
    except Exception as error:  # noqa: BLE001 - a damaged TIFF raises anything; what was found so far may tell
        log.debug("tables of %s end early: %s", path.name, error)
    finally:
        logger.disabled = quiet
    return end if end > size else None


def _first_directory(path: Path) -> int:
    """Where a TIFF header says the first directory lies."""
    with path.open("rb") as stream:
        head = stream.read(16)
    order = "little" if head[:2] == b"II" else "big"
    big = int.from_bytes(head[2:4], order) == 43  # type: ignore[arg-type]  # BigTIFF's magic number
    return int.from_bytes(head[8:16] if big else head[4:8], order)  # type: ignore[arg-type]


def _reason(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]


def _float(text: str | None) -> float | None:
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None


def _int(text: str | None) -> int:
    return int(text) if text is not None and text.isdigit() else 0


def _pair_of_floats(properties: openslide._PropertyMap, x: str, y: str) -> tuple[float, float] | None:
    pair = (_float(properties.get(x)), _float(properties.get(y)))
    return (pair[0], pair[1]) if pair[0] is not None and pair[1] is not None else None
