"""The boundary to foreign decoders: one small interface, every call checked."""

import contextlib
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol, Self

import numpy as np
import openslide
import tifffile
from numpy.typing import NDArray

from inference.errors import SlideChanged, SourceUnavailable, TileReadError, UnreadableSlide
from inference.slides._refusal import (
    FileState,
    raise_if_lost,
    reason_of,
    require_regular_file,
    require_whole,
    why_unreadable,
)
from inference.slides._tiff_levels import TiffLevel, tiff_level
from inference.slides._tiff_refusal import MAX_PX, MAX_SIDE_PX, MAX_TILE_PX, refused_pixels

MAX_REGION_PIXELS = 1 << 26
"""Largest region of one read; larger requests are a mistake of the caller."""

_OPENSLIDE_CACHE, _MAX_CACHE = 32 << 20, 256 << 20  # decoded bytes


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
            UnreadableSlide: the file is gone or no longer opens.
            SlideChanged: the slide's files are no longer those that were opened.
            SourceUnavailable: the folder or mount is lost.
            ValueError: no such level, a region wholly outside it or larger than `MAX_REGION_PIXELS`, or closed.
        """
        ...

    def stored_tile(self, level: int) -> tuple[int, int]:
        """Width and height of the compressed tiles of a level."""
        ...

    def close(self) -> None: ...
    def __enter__(self) -> Self: ...
    def __exit__(self, *exc: object) -> None: ...


class OpenSlideReader:
    """Reads through OpenSlide, whose handles fail for good after one damaged tile: such a handle is dropped.

    A handle serves one read at a time, so there are as many as reads that ran at once. Levels of plain tiled TIFFs
    that OpenSlide would interpolate (see `_tiff_levels`) are decoded tile by tile instead.

    OpenSlide opens a slide's files by name with every read, and would wait for ever on a pipe. So before every read,
    and after one that failed, they must be the regular files that they were. A pipe that takes the place of a file in
    the microseconds between that look and OpenSlide's own still hangs the thread that reads.
    """

    def __init__(self, path: Path, name: str, files: Sequence[Path] = ()) -> None:
        self._path, self._name, self._files = path, name, tuple(files) or (path,)
        self._lock = threading.Lock()
        self._free: list[openslide.OpenSlide] = []
        self._closed = False
        self._cache: openslide.OpenSlideCache | None = None
        self._tiff_levels: dict[int, TiffLevel | None] = {}
        self._state = self._state_now()
        claims = [require_whole(file, name) for file in self._files]
        with self._handle() as handle:
            self.level_sizes: tuple[tuple[int, int], ...] = tuple((int(w), int(h)) for w, h in handle.level_dimensions)
            # OpenSlide addresses every level in level-0 pixels and divides by this one number for x and y.
            self._downsamples = tuple(float(d) for d in handle.level_downsamples)
            properties = handle.properties
            self.vendor = str(properties.get(openslide.PROPERTY_NAME_VENDOR, "unknown"))
            self.quickhash: str | None = properties.get(openslide.PROPERTY_NAME_QUICKHASH1)
            self.mpp = _pair_of_floats(properties, openslide.PROPERTY_NAME_MPP_X, openslide.PROPERTY_NAME_MPP_Y)
            self.objective_power = _float(properties.get(openslide.PROPERTY_NAME_OBJECTIVE_POWER))
            self.background = _colour(properties.get(openslide.PROPERTY_NAME_BACKGROUND_COLOR))
            self._tiles = tuple(
                (
                    _int(properties.get(f"openslide.level[{k}].tile-width")),
                    _int(properties.get(f"openslide.level[{k}].tile-height")),
                )
                for k in range(len(self.level_sizes))
            )
            self._require_possible_sizes()
            self._cache = _cache_for(self._tiles)
            if self._cache:
                handle.set_cache(self._cache)
            if claims[0] and (problem := refused_pixels(claims[0], self.vendor)):
                raise UnreadableSlide(f"{name}: {problem}")
        exact = any(self._interpolated(level) for level in range(len(self.level_sizes)))
        self.kind = f"openslide {openslide.__library_version__}" + f", tifffile {tifffile.__version__}" * exact

    def read_region(self, level: int, x: int, y: int, width: int, height: int) -> NDArray[np.uint8]:
        """See `SlideReader.read_region`."""
        if self._closed:
            raise ValueError(f"{self._name}: the slide is closed")
        if not 0 <= level < len(self.level_sizes) or width < 1 or height < 1 or width * height > MAX_REGION_PIXELS:
            raise ValueError(f"{self._name}: cannot read {width} x {height} pixels of level {level}")
        if not (-width < x < self.level_sizes[level][0] and -height < y < self.level_sizes[level][1]):
            raise ValueError(f"{self._name}: ({x}, {y}) lies outside level {level}")
        if tiff := self._tiff_level(level):
            self._require_unchanged()
            # What is missing or damaged there is OpenSlide's to judge: it may fill it in from another level.
            with contextlib.suppress(ValueError, OSError):
                return tiff.read(x, y, width, height)
        return self._read(level, x, y, width, height)

    def stored_tile(self, level: int) -> tuple[int, int]:
        """See `SlideReader.stored_tile`; 256 where the format does not say."""
        width, height = self._tiles[level]
        return width or 256, height or 256

    def close(self) -> None:
        """Close every handle, those in use when their read ends; idempotent."""
        with self._lock:
            self._closed, handles, self._free = True, self._free, []
        for handle in handles:
            handle.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _read(self, level: int, x: int, y: int, width: int, height: int) -> NDArray[np.uint8]:
        down = self._downsamples[level]
        origin, size = (round(x * down), round(y * down)), (width, height)
        try:
            return self._read_once(origin, level, size)
        except openslide.OpenSlideError:  # a passing fault of the disk is no damage: once more, with another handle
            try:
                return self._read_once(origin, level, size)
            except openslide.OpenSlideError as error:
                raise_if_lost(error, self._name)
                self._require_unchanged()
                raise TileReadError(f"level {level} cannot be decoded here: {reason_of(error, self._path)}") from None

    def _read_once(self, origin: tuple[int, int], level: int, size: tuple[int, int]) -> NDArray[np.uint8]:
        with self._handle() as handle:
            self._require_unchanged()
            return np.asarray(handle.read_region(origin, level, size), dtype=np.uint8)

    @contextmanager
    def _handle(self) -> Iterator[openslide.OpenSlide]:
        """One handle for one read; dropped unless the read goes well."""
        with self._lock:
            if self._closed:
                raise ValueError(f"{self._name}: the slide is closed")
            handle = self._free.pop() if self._free else None
        handle = handle or self._open()
        try:
            yield handle
        except BaseException:
            handle.close()
            raise
        self._give_back(handle)

    def _give_back(self, handle: openslide.OpenSlide) -> None:
        with self._lock:
            if not self._closed:
                self._free.append(handle)
                return
        handle.close()

    def _open(self) -> openslide.OpenSlide:
        self._require_unchanged()
        try:
            handle = openslide.OpenSlide(self._path)
            if self._cache:
                handle.set_cache(self._cache)
            return handle
        except (openslide.OpenSlideError, OSError, ValueError) as error:
            raise_if_lost(error, self._name)
            self._require_unchanged()
            raise UnreadableSlide(f"{self._name}: {why_unreadable(self._path, self._name, error)}") from None

    def _state_now(self) -> tuple[FileState, ...]:
        return tuple(require_regular_file(file, self._name) for file in self._files)

    def _require_unchanged(self) -> None:
        if self._state_now() != self._state:
            raise SlideChanged(f"{self._name}: the file changed while it was being read; run again when it is complete")

    def _require_possible_sizes(self) -> None:
        """Before anything is read: GLib ends the process where it gets no memory for a tile."""
        what = "its header is damaged; copy it again"
        # A small level of a Hamamatsu slide may be a single JPEG.
        tile_limit = MAX_REGION_PIXELS if self.vendor == "hamamatsu" else MAX_TILE_PX
        for (width, height), (tile_w, tile_h) in zip(self.level_sizes, self._tiles, strict=True):
            if not (0 < width <= MAX_SIDE_PX and 0 < height <= MAX_SIDE_PX) or width * height > MAX_PX:
                raise UnreadableSlide(
                    f"{self._name}: claims to be {width} x {height} pixels, which no slide is: {what}"
                )
            if tile_w * tile_h > tile_limit:
                raise UnreadableSlide(
                    f"{self._name}: claims compressed tiles of {tile_w} x {tile_h} pixels, too many to read: convert "
                    "it with smaller tiles"
                )

    def _interpolated(self, level: int) -> bool:
        """Whether OpenSlide would interpolate a level that can be read another way."""
        return self.vendor in ("aperio", "generic-tiff") and not self._downsamples[level].is_integer()

    def _tiff_level(self, level: int) -> TiffLevel | None:
        if not self._interpolated(level):
            return None
        with self._lock:
            if level in self._tiff_levels:
                return self._tiff_levels[level]
        try:
            found = tiff_level(self._path, self.level_sizes[level])
        except OSError as error:
            raise SourceUnavailable(f"{self._name}: the file cannot be read: {error.strerror}") from None
        if found is not None and not self._agrees(found, level):
            found = None
        with self._lock:
            return self._tiff_levels.setdefault(level, found)

    def _agrees(self, found: TiffLevel, level: int) -> bool:
        """Whether both readers see the same in the corner, where OpenSlide does not interpolate."""
        width, height = (min(512, side) for side in self.level_sizes[level])
        try:
            return np.array_equal(found.read(0, 0, width, height), self._read(level, 0, 0, width, height))
        except (ValueError, OSError, TileReadError):
            return True  # damaged there: nothing to compare, and no reason to read the rest less exactly


def open_slide(path: Path, name: str, files: Sequence[Path] = ()) -> SlideReader:
    """Open a slide with the reader that fits it.

    Args:
        path: the slide's main file.
        name: what messages call it.
        files: all its files, the main one first, where there are several; each is watched for changes.

    Raises:
        UnreadableSlide: not a slide, or damaged beyond opening, truncated, or its pixels would be read wrong.
        SlideChanged: it was replaced meanwhile.
        SourceUnavailable: its folder cannot be reached.
    """
    return OpenSlideReader(path, name, files)


def _cache_for(tiles: Sequence[tuple[int, int]]) -> openslide.OpenSlideCache | None:
    """Room for two tiles, where OpenSlide's own cache would decode one anew for every read."""
    tile_bytes = 4 * max(width * height for width, height in tiles)
    return openslide.OpenSlideCache(2 * tile_bytes) if _OPENSLIDE_CACHE < 2 * tile_bytes <= _MAX_CACHE else None


def _colour(text: str | None) -> tuple[int, int, int]:
    """RGB of a hexadecimal colour; white where there is none."""
    try:
        value = bytes.fromhex(text or "ffffff")
    except ValueError:
        value = b""
    return (value[0], value[1], value[2]) if len(value) == 3 else (255, 255, 255)


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
