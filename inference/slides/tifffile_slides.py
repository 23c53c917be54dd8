"""Tiled TIFFs that OpenSlide does not open, or of which it sees one level only: OME-TIFF, and codecs it lacks."""

import contextlib
import math
import re
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import tifffile

from inference.errors import InferenceError, SourceUnavailable
from inference.slides._compressed import CompressedLevel
from inference.slides._files import open_regular, source_lost
from inference.slides._proof import disproof
from inference.slides._refusal import require_whole
from inference.slides._tiff_levels import MAX_DIRECTORIES, is_plain, level_of, quiet, tiled_pages
from inference.slides._tiff_refusal import refused_pixels
from inference.slides.compressed_reader import CompressedReader, SlideFacts
from inference.slides.openslide_reader import OpenSlideReader

_CENTIMETRE, _INCH = 3, 2
_MICRONS = {_CENTIMETRE: 1e4, _INCH: 25400.0}
_OME_UNITS = {"": 1.0, "µm": 1.0, "um": 1.0, "nm": 1e-3, "mm": 1e3, "cm": 1e4, "m": 1e6}
_RESOLUTION_UNIT, _X_RESOLUTION, _Y_RESOLUTION, _ICC_PROFILE = 296, 282, 283, 34675
_SAME_ASPECT = 0.02


def open_tiff(path: Path, name: str, other: OpenSlideReader | None) -> CompressedReader | None:
    """A slide read by tifffile's account of it; None where that is no better than OpenSlide's.

    Args:
        other: OpenSlide's view of the same file, whose first level is then taken for granted; None where it refuses it.

    Raises:
        UnreadableSlide: cut short, or of impossible sizes.
        SourceUnavailable: the mount is lost.
    """
    claims = require_whole(path, name)
    if claims is None or claims.circular or refused_pixels(claims, "generic-tiff"):
        return None
    with ExitStack() as held:
        try:
            with quiet():
                file = held.enter_context(open_regular(path))
                tiff = tifffile.TiffFile(file, name="slide")
                pages = _pyramid(tiff)
                known = 0 if other is None else len(other.level_sizes)
                ome = tiff.ome_metadata or ""
                tells = other is not None and other.mpp is None and _ome_mpp(ome) is not None
                if (len(pages) <= known and not tells) or not all(is_plain(page) for page in pages):
                    return None
                levels = [level_of(file.fileno(), p) for p in pages]
                facts = _facts(tiff, levels, other)
                for index, level in enumerate(levels):
                    if other is not None and index < known and disproof(other, index, level):
                        return None
                if not any(map(_decodes, levels)):  # the codec is not there, which must not fail tile after tile
                    return None
        except InferenceError:
            raise
        except Exception as error:  # noqa: BLE001 - a parser on foreign bytes may raise anything
            if isinstance(error, OSError) and source_lost(error):
                raise SourceUnavailable(f"{name}: the file cannot be read: {error.strerror}") from None
            return None
        codecs = ", ".join(sorted({level.decoder.name for level in levels}))
        why = "OpenSlide does not open it" if other is None else f"OpenSlide sees {known} of its {len(levels)} levels"
        if other is not None and len(levels) == known:
            why = "OpenSlide does not see its resolution"
        return CompressedReader(
            path,
            name,
            facts,
            dict(enumerate(levels)),
            held.pop_all(),
            kind=f"compressed tiles ({codecs}), tifffile {tifffile.__version__}" + (f", {other.kind}" if other else ""),
            reason=f"{why}: its compressed tiles are read as tifffile finds them",
            other=other,
        )


def _decodes(level: CompressedLevel) -> bool:
    """Whether one of some tiles decodes: any may be damaged or missing."""
    rows = -(-level.size[1] // level.tile[1])
    places = [level.heaviest(), *((level.columns * k // 4, rows * k // 4) for k in range(4))]
    for place in places:
        with contextlib.suppress(ValueError):
            level.decode(*place, 1)
            return True
    return False


def _pyramid(tiff: tifffile.TiffFile) -> list[tifffile.TiffPage]:
    """The levels of the first image, the largest first: SubIFDs as OME-TIFF has them, or smaller images that follow."""
    whole = tiff.pages[0]
    if not whole.is_tiled or min(whole.imagewidth, whole.imagelength) < 1:
        return []
    others = [*(whole.pages or ())[:MAX_DIRECTORIES], *tiled_pages(tiff)[1:]]
    smaller = sorted((page for page in others if _is_smaller(page, whole)), key=lambda page: -page.imagewidth)
    pages = [whole]
    for page in smaller:  # of two of one size, the first
        if page.imagewidth < pages[-1].imagewidth and page.imagelength < pages[-1].imagelength:
            pages.append(page)
    return pages


def _is_smaller(page: tifffile.TiffPage, whole: tifffile.TiffPage) -> bool:
    """Whether an image says that it is a smaller version of another, and has its shape."""
    if not page.is_tiled or page.imagelength < 1:
        return False
    aspect = page.imagewidth / page.imagelength * whole.imagelength / whole.imagewidth
    return bool(page.is_reduced and page.imagewidth < whole.imagewidth and abs(aspect - 1) < _SAME_ASPECT)


def _facts(tiff: tifffile.TiffFile, levels: Sequence[CompressedLevel], other: OpenSlideReader | None) -> SlideFacts:
    ome = tiff.ome_metadata or ""
    profile = tiff.pages[0].tags.valueof(_ICC_PROFILE)
    mpp = other.mpp if other and other.mpp else _ome_mpp(ome) or _tag_mpp(tiff.pages[0])
    return SlideFacts(
        level_sizes=tuple(level.size for level in levels),
        mpp=mpp,
        vendor="ome-tiff" if ome else "tiff",
        objective_power=_number(re.search(r'NominalMagnification="([^"]*)"', ome)),
        icc_profile=bytes(profile) if profile else None,
        quickhash=other.quickhash if other else None,
    )


def _ome_mpp(xml: str) -> tuple[float, float] | None:
    """µm/px of the first image of an OME header, whose lengths are µm where it names no unit."""
    pixels = re.search(r"<(?:\w+:)?Pixels\b[^>]*>", xml)
    sides = []
    for axis in "XY":
        size = _number(re.search(rf'PhysicalSize{axis}="([^"]*)"', pixels[0])) if pixels else None
        unit = re.search(rf'PhysicalSize{axis}Unit="([^"]*)"', pixels[0]) if pixels else None
        factor = _OME_UNITS.get(unit[1] if unit else "")
        if size is None or factor is None:
            return None
        sides.append(size * factor)
    return (sides[0], sides[1])


def _tag_mpp(page: tifffile.TiffPage) -> tuple[float, float] | None:
    """µm/px of the resolution tags; None without a unit of length."""
    microns = _MICRONS.get(int(page.tags.valueof(_RESOLUTION_UNIT, default=_INCH)))
    sides = []
    for tag in (_X_RESOLUTION, _Y_RESOLUTION):
        over, under = page.tags.valueof(tag, default=(0, 1))
        if microns is None or not over:
            return None
        sides.append(microns * under / over)
    return (sides[0], sides[1])


def _number(found: re.Match[str] | None) -> float | None:
    try:
        value = float(found[1]) if found else math.nan
    except ValueError:
        return None
    return value if math.isfinite(value) else None
