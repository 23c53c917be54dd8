"""Regions of interest (ROI): the part of a slide that is to be run, from GeoJSON or from a mask image.

GeoJSON is read as QuPath writes it. Coordinates are level-0 pixels from the corner (0, 0) of the full canvas, as
OpenSlide has it. QuPath itself counts from `openslide.bounds-x` and `-y` where a slide states bounds (MIRAX, some
SCN): there its coordinates must be moved by that much before they are used here.
"""

import hashlib
import io
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
import tifffile
from numpy.typing import NDArray
from PIL import Image

from inference.errors import ConfigError, SourceUnavailable
from inference.slides._files import kind_of, read_start, resolved, source_lost
from inference.slides.discovery import SlideRef
from inference.slides.polygons import Ring, fill_polygon, filling_work

MAX_BYTES = 256 << 20
"""Size of a ROI file at most; a million corners take some 30 MB as GeoJSON."""

MAX_MASK_PIXELS = 1 << 26
"""Pixels of a mask image at most, as many as a tissue mask has; below what Pillow takes for a bomb."""

MAX_WORK = 1 << 33
"""Pixels that filling the polygons may touch; about a minute."""

_WHITE_IS_ZERO = 0
_PLAIN_PHOTOMETRIC = (_WHITE_IS_ZERO, 1, 2)  # the others are black is zero and RGB

MAX_COORDINATE = 1e9
"""Level-0 pixels; the longest slide side that any reader accepts is far below."""

ASPECT_TOLERANCE = 0.02
"""Relative difference allowed between a mask image's and the slide's ratio of width to height."""

SUFFIXES = (".geojson", ".json", ".png", ".tif", ".tiff")
"""Of the files that are looked for in a folder of ROIs."""

_PNG, _TIFF = b"\x89PNG\r\n\x1a\n", (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_NO_AREA = frozenset({"Point", "MultiPoint", "LineString", "MultiLineString"})


class _Shape(Protocol):
    """What a ROI file describes."""

    def plane(
        self, slide_size: tuple[int, int], shape: tuple[int, int], scale: tuple[float, float]
    ) -> NDArray[np.bool_]: ...


@dataclass(frozen=True, eq=False)
class Roi:
    """A region of interest.

    Attributes:
        sha256: of the file it was read from.
        ignored: points, lines and features without any area in the file.
    """

    sha256: str
    ignored: int
    _shape: _Shape

    def plane(
        self, slide_size: tuple[int, int], shape: tuple[int, int], scale: tuple[float, float]
    ) -> NDArray[np.bool_]:
        """Which pixels of a plane (height, width) of the whole slide have their centre inside.

        Args:
            slide_size: level-0 width and height.
            scale: level-0 pixels per pixel of the plane, x and y.

        Raises:
            ConfigError: the ROI is of another slide, as far as its coordinates or proportions tell.
        """
        return self._shape.plane(slide_size, shape, scale)


def load_roi(path: Path) -> Roi:
    """Read a ROI: GeoJSON with Polygons or MultiPolygons, or a mask image (PNG, TIFF) of the whole slide.

    Polygons are joined; within one, the even-odd rule holds, so its inner rings are holes. A mask's pixel is inside
    where a colour channel is not 0 and its alpha is not 0. Messages name no file.

    Raises:
        ConfigError: neither of the two, without any area, or too large.
        SourceUnavailable: it cannot be read at the moment.
    """
    data = _read(path)
    sha256 = hashlib.sha256(data).hexdigest()
    if data.startswith((_PNG, *_TIFF)):
        return Roi(sha256, 0, _read_mask(data))
    polygons, ignored = _read_geojson(data)
    return Roi(sha256, ignored, _Polygons(polygons))


def roi_sha256(path: Path) -> str:
    """What `load_roi` would say of the file, without making sense of its content; see there for errors."""
    return hashlib.sha256(_read(path)).hexdigest()


def find_roi(ref: SlideRef, given: Path | None) -> Path | None:
    """The ROI file of a slide: the cohort file's, else the file given, else the one for it in the folder given.

    Raises:
        ConfigError: the folder has none or several for it, or the file is the slide itself.
        SourceUnavailable: the folder cannot be reached.
    """
    path = ref.roi or given
    if path is not None and path is given and kind_of(path) == "folder":
        path = _for_slide(ref, path)
    if path is not None and resolved(path) in map(resolved, ref.files):
        raise ConfigError(f"{ref.name}: its ROI is the slide itself: name a GeoJSON file or a mask image")
    return path


def check_rois(slides: Sequence[SlideRef], given: Path | None) -> None:
    """Refuse a ROI that is not there, and one that would be laid over several slides.

    Raises:
        ConfigError: so it is.
        SourceUnavailable: the folder cannot be reached.
    """
    if given is None:
        return
    kind = kind_of(given)
    if kind not in ("file", "folder"):
        raise ConfigError("--roi names no file and no folder that can be read: check the spelling")
    without = sum(ref.roi is None for ref in slides)
    if kind == "file" and without > 1:
        raise ConfigError(
            f"one --roi file for {without} slides: name a folder with a file for each slide, or give each its own in a "
            "cohort file's roi column"
        )
    if kind == "folder":
        open_slides = [ref for ref in slides if ref.roi is None and not _named(given, ref.key)]
        for stem, count in Counter(_stem(ref) for ref in open_slides).items():
            if count > 1 and _named(given, stem):
                names = ", ".join(ref.name for ref in open_slides if _stem(ref) == stem)
                raise ConfigError(f"one ROI would be that of {count} slides ({names}): name it after a slide_key")


def _for_slide(ref: SlideRef, folder: Path) -> Path:
    found = _named(folder, ref.key) or _named(folder, _stem(ref))
    if len(found) == 1:
        return found[0]
    what = "several files" if found else "no file"
    raise ConfigError(
        f"{ref.name}: the folder of ROIs has {what} for it: give it one, named after the slide or its key ({ref.key}) "
        "and ending in .geojson or .png; to run all of it, leave --roi out"
    )


def _named(folder: Path, stem: str) -> list[Path]:
    return [path for suffix in SUFFIXES if kind_of(path := folder / f"{stem}{suffix}") != "missing"]


def _stem(ref: SlideRef) -> str:
    return Path(ref.relpath).stem


def _read(path: Path) -> bytes:
    try:
        data = read_start(path, MAX_BYTES + 1)
    except OSError as error:
        raise _unreadable(error) from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"the ROI file has more than {MAX_BYTES >> 20} MB: simplify its outlines, or use a mask")
    return data


def _unreadable(error: OSError) -> ConfigError | SourceUnavailable:
    if source_lost(error) or isinstance(error, PermissionError):
        return SourceUnavailable(f"the ROI file cannot be read ({error.strerror}): check the mount and its permissions")
    return ConfigError(f"the ROI file cannot be read ({error.strerror}): check its name")


# --- GeoJSON --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Polygons:
    """Each a group of rings in level-0 pixels."""

    polygons: list[list[Ring]]

    def plane(
        self, slide_size: tuple[int, int], shape: tuple[int, int], scale: tuple[float, float]
    ) -> NDArray[np.bool_]:
        low = np.min([ring.min(axis=0) for polygon in self.polygons for ring in polygon], axis=0)
        high = np.max([ring.max(axis=0) for polygon in self.polygons for ring in polygon], axis=0)
        if (high <= 0).any() or (low >= slide_size).any():
            raise ConfigError(
                f"the ROI (x {low[0]:g} to {high[0]:g}, y {low[1]:g} to {high[1]:g}) lies outside the slide "
                f"({slide_size[0]} x {slide_size[1]}): give that of this slide, in level-0 pixels"
            )
        plane = np.zeros(shape, np.bool_)
        if sum(filling_work(plane.shape, [ring / scale for ring in p]) for p in self.polygons) > MAX_WORK:
            raise ConfigError(
                "the ROI's polygons are too many, too large or too jagged to be laid on the slide: merge or simplify "
                "them, or give a mask image"
            )
        for polygon in self.polygons:
            fill_polygon(plane, [ring / scale for ring in polygon])
        return plane


def _read_geojson(data: bytes) -> tuple[list[list[Ring]], int]:
    """Polygons and how much else there is."""
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):  # UnicodeDecodeError is a ValueError
        raise ConfigError(
            "the ROI is neither GeoJSON nor a PNG or TIFF image: export it as uncompressed GeoJSON"
        ) from None
    polygons: list[list[Ring]] = []
    ignored = 0
    for geometry in _geometries(document):
        found = _rings(geometry)
        polygons += found
        ignored += not found
    if not polygons:
        rest = f", but {ignored} without an area" if ignored else ""
        raise ConfigError(f"the ROI has no polygon{rest}: draw an area, or run the slide without a ROI")
    return polygons, ignored


def _geometries(document: object) -> Iterator[object]:
    """Every geometry in a document that is no collection; None for a feature without one."""
    todo = document[::-1] if isinstance(document, list) else [document]
    while todo:
        match todo.pop():
            case {"type": "FeatureCollection", "features": [*items]} | {
                "type": "GeometryCollection",
                "geometries": [*items],
            }:
                todo += items[::-1]
            case {"type": "Feature", "geometry": geometry}:
                todo.append(geometry)
            case geometry:
                yield geometry


def _rings(geometry: object) -> list[list[Ring]]:
    """The polygons of a geometry; none of one without an area."""
    polygons: list[object]
    match geometry:
        case {"type": "Polygon", "coordinates": [*one]}:
            polygons = [one]
        case {"type": "MultiPolygon", "coordinates": [*several]}:
            polygons = several
        case None:
            return []
        case {"type": str(kind)} if kind in _NO_AREA:
            return []
        case _:
            raise ConfigError("the ROI is JSON but not GeoJSON: export annotations as GeoJSON, as QuPath does")
    found = []
    for polygon in polygons:
        if not isinstance(polygon, list):
            raise _bad_coordinates()
        rings = [ring for ring in map(_ring, polygon) if len(ring) > 2]
        if rings:
            found.append(rings)
    return found


def _ring(points: object) -> Ring:
    if points == []:
        return np.empty((0, 2))
    try:
        found = np.asarray(points)
    except ValueError:
        raise _bad_coordinates() from None
    if found.ndim != 2 or found.shape[1] < 2 or found.dtype.kind not in "iuf":
        raise _bad_coordinates()
    corners = found[:, :2].astype(np.float64)
    if not (np.abs(corners) <= MAX_COORDINATE).all():  # NaN too
        raise _bad_coordinates()
    return corners


def _bad_coordinates() -> ConfigError:
    return ConfigError("the ROI has coordinates that are no pixels of a slide: export it again as GeoJSON")


# --- mask images ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class _Mask:
    """A picture of the whole slide, at any size."""

    inside: NDArray[np.bool_]

    def plane(
        self, slide_size: tuple[int, int], shape: tuple[int, int], scale: tuple[float, float]
    ) -> NDArray[np.bool_]:
        (height, width), (full_width, full_height) = self.inside.shape, slide_size
        if abs(width / height * full_height / full_width - 1) > ASPECT_TOLERANCE:
            raise ConfigError(
                f"the ROI mask ({width} x {height}) has not the slide's proportions ({full_width} x {full_height}): "
                "make it of the whole slide, and of this one"
            )
        rows, cols = (
            np.minimum((np.arange(count) + 0.5) * (step * size / full), size - 1).astype(np.intp)
            for count, step, size, full in zip(
                shape, scale[::-1], (height, width), (full_height, full_width), strict=True
            )
        )
        return np.asarray(self.inside[np.ix_(rows, cols)])


def _read_mask(data: bytes) -> _Mask:
    try:
        inside = _png_inside(data) if data.startswith(_PNG) else _tiff_inside(data)
    except ConfigError:
        raise
    # What either library raises on damaged data is no short list.
    except Exception as error:  # noqa: BLE001
        raise ConfigError(f"the ROI mask does not decode ({type(error).__name__}): save it again as PNG") from None
    if not inside.any():
        raise ConfigError("the ROI mask is empty: no pixel of it is set; what is not 0 is inside")
    return _Mask(inside)


def _png_inside(data: bytes) -> NDArray[np.bool_]:
    # Pillow warns of large images, which this decides by itself; width and height stand first in every PNG.
    _require_size(*(int.from_bytes(data[at : at + 4]) for at in (20, 16)))
    with Image.open(io.BytesIO(data), formats=("PNG",)) as image:
        if image.mode == "P":
            return _inside(np.asarray(image.convert("RGBA")), alpha=True)
        return _inside(np.asarray(image), alpha=image.mode in ("LA", "RGBA"))


def _tiff_inside(data: bytes) -> NDArray[np.bool_]:
    with tifffile.TiffFile(io.BytesIO(data)) as tif:
        page = tif.pages.first
        if page.axes not in ("YX", "YXS"):
            raise ConfigError("the ROI mask is a TIFF of several planes: save it as PNG")
        _require_size(page.imagelength, page.imagewidth)
        if page.samplesperpixel > 4:
            raise ConfigError("the ROI mask has more channels than colours: save it as PNG")
        if page.photometric not in _PLAIN_PHOTOMETRIC:
            raise ConfigError("the ROI mask is a TIFF with a palette or of unusual colours: save it as PNG")
        inside = _inside(page.asarray(), alpha=page.samplesperpixel in (2, 4))
        return ~inside if page.photometric == _WHITE_IS_ZERO else inside


def _require_size(height: int, width: int) -> None:
    if height * width > MAX_MASK_PIXELS:
        raise ConfigError(
            f"the ROI mask has {width} x {height} pixels: {MAX_MASK_PIXELS >> 20} million do, make it smaller"
        )


def _inside(pixels: NDArray[np.generic], *, alpha: bool) -> NDArray[np.bool_]:
    if pixels.ndim == 2:
        return np.asarray(pixels != 0)
    if alpha:
        return np.asarray((pixels[..., :-1] != 0).any(axis=-1) & (pixels[..., -1] != 0))
    return np.asarray((pixels != 0).any(axis=-1))
