"""The boundary to OpenSlide: every call checked, its handles' faults hidden from the caller."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import openslide
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
from inference.slides._tiff_refusal import MAX_PX, MAX_SIDE_PX, MAX_TILE_PX, refused_pixels
from inference.slides.reader import MAX_REGION_PIXELS, RegionReader, require_region

_OPENSLIDE_CACHE, _MAX_CACHE = 32 << 20, 256 << 20  # decoded bytes


class OpenSlideReader(RegionReader):
    """Reads through OpenSlide, whose handles fail for good after one damaged tile: such a handle is dropped.

    A handle serves one read at a time, so there are as many as reads that ran at once.

    OpenSlide opens a slide's files by name with every read, and would wait for ever on a pipe. So before every read,
    and after one that failed, they must be the regular files that they were. A pipe that takes the place of a file in
    the microseconds between that look and OpenSlide's own still hangs the thread that reads.
    """

    def __init__(self, path: Path, name: str, files: Sequence[Path] = ()) -> None:
        self._path, self._name, self._files = path, name, tuple(files) or (path,)
        self._lock = threading.Lock()
        self._free: list[openslide.OpenSlide] = []
        self._closed = self._opened = False
        self._cache: openslide.OpenSlideCache | None = None
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
        self._opened = True
        self.icc_profile = self._icc_profile()
        self.kind = f"openslide {openslide.__library_version__}"
        self.reason = f"OpenSlide opens it as {self.vendor}"

    def read_region(self, level: int, x: int, y: int, width: int, height: int) -> NDArray[np.uint8]:
        """See `SlideReader.read_region`."""
        if self._closed:
            raise ValueError(f"{self._name}: the slide is closed")
        require_region(self, self._name, level, x, y, width, height)
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

    @property
    def downsamples(self) -> tuple[float, ...]:
        """OpenSlide's own, one number for x and y; where one is no whole number, reads of that level interpolate."""
        return self._downsamples

    def _icc_profile(self) -> bytes | None:
        """The profile of level 0; a broken one is none."""
        try:
            with self._handle() as handle:
                profile = handle.color_profile
                return profile.tobytes() if profile else None
        except (openslide.OpenSlideError, OSError):
            return None

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
            pixels = np.asarray(handle.read_region(origin, level, size), dtype=np.uint8)
            self._require_unchanged()  # it opens the files by name: they may have been others meanwhile
            return pixels

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
            if self._opened:
                # It is still the slide that it was: there is no room for another handle (OpenSlide then finds no
                # format that fits), or the disk fails.
                raise SourceUnavailable(
                    f"{self._name}: cannot be opened once more ({reason_of(error, self._path)}): too many open files, "
                    "or a failing disk; run again"
                ) from None
            unknown = isinstance(error, openslide.OpenSlideUnsupportedFormatError) or "compression" in str(error)
            raise UnreadableSlide(
                f"{self._name}: {why_unreadable(self._path, self._name, error)}", unknown_format=unknown
            ) from None

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
