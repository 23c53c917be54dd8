"""Which reader a slide gets, and the proof that the fast one reads it as OpenSlide does."""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import tifffile
from numpy.typing import NDArray

from inference.errors import InferenceError, SourceUnavailable, TileReadError
from inference.slides._files import open_regular, source_lost
from inference.slides._tiff_levels import CompressedLevel, is_plain, quiet, tiled_pages
from inference.slides.openslide_reader import OpenSlideReader
from inference.slides.pixels import reduce_area
from inference.slides.reader import SlideReader
from inference.slides.resolution import REDUCTIONS
from inference.slides.tiff_reader import SlideFacts, TiffReader

log = logging.getLogger(__name__)

MAX_DIFFERENCE = 2.0
"""Grey levels by which the fast reader may differ from OpenSlide in the mean of a region: of the area mean where it
reduces, and on levels where OpenSlide interpolates. Elsewhere not one pixel may differ."""

_VENDORS = frozenset({"aperio", "generic-tiff", "philips"})
"""Formats whose tiles lie side by side on the canvas; others overlap, are shifted or are no TIFF."""

_PROOF_PX = 512  # side of the regions compared


def open_slide(path: Path, name: str, files: Sequence[Path] = ()) -> SlideReader:
    """Open a slide with the reader that fits it: `kind` and `reason` of what is returned say which.

    Args:
        path: the slide's main file.
        name: what messages call it.
        files: all its files, the main one first, where there are several; each is watched for changes.

    Raises:
        UnreadableSlide: not a slide, or damaged beyond opening, truncated, or its pixels would be read wrong.
        SlideChanged: it was replaced meanwhile.
        SourceUnavailable: its folder cannot be reached.
    """
    slow = OpenSlideReader(path, name, files)
    if slow.vendor not in _VENDORS:
        slow.reason = f"its format ({slow.vendor}) is left to OpenSlide, which reads it in supertiles"
        return slow
    with ExitStack() as held:
        try:
            levels, problems = _proven_levels(path, name, slow, held)
        except InferenceError:
            slow.close()
            raise
        if problems:
            slow.reason = f"compressed tiles are not read directly: {problems[0]}"
            log.info("%s: %s", name, slow.reason)
        if not levels:
            return slow
        return _fast(path, name, slow, levels, problems, held.pop_all())


def _fast(
    path: Path,
    name: str,
    slow: OpenSlideReader,
    levels: dict[int, CompressedLevel],
    problems: Sequence[str],
    held: ExitStack,
) -> TiffReader:
    codecs = ", ".join(sorted({level.decoder.name for level in levels.values()}))
    left = f"; {len(slow.level_sizes) - len(levels)} of its levels through OpenSlide: {problems[0]}" if problems else ""
    return TiffReader(
        path,
        name,
        SlideFacts(
            slow.level_sizes, slow.mpp, slow.vendor, slow.objective_power, slow.background, slow.icc_profile,
            slow.quickhash,
        ),
        levels,
        held,
        kind=f"compressed tiles ({codecs}), {slow.kind}",
        reason=f"its compressed tiles are read directly, and agree with OpenSlide's pixels{left}",
        other=slow,
    )  # fmt: skip


def _proven_levels(
    path: Path, name: str, slow: OpenSlideReader, held: ExitStack
) -> tuple[dict[int, CompressedLevel], list[str]]:
    """Levels that can be read by their compressed tiles, by index, and what is wrong with the others."""
    found: dict[int, CompressedLevel] = {}
    problems = []
    try:
        with quiet():
            file = held.enter_context(open_regular(path))
            tiff = tifffile.TiffFile(file, name="slide")  # the descriptor is ours, and stays open
            pages = tiled_pages(tiff)
            for index, size in enumerate(slow.level_sizes):
                level = _level_of(pages, index, size, slow.vendor, file.fileno())
                problem = level if isinstance(level, str) else _disproof(slow, index, level)
                if problem is not None:
                    problems.append(f"level {index}: {problem}")
                elif isinstance(level, CompressedLevel):
                    found[index] = level
    except InferenceError:
        raise
    except Exception as error:  # noqa: BLE001 - a parser on foreign bytes may raise anything; OpenSlide judges damage
        if isinstance(error, OSError) and source_lost(error):
            raise SourceUnavailable(f"{name}: the file cannot be read: {error.strerror}") from None
        problems.append(f"its tables are unusual ({type(error).__name__})")
    return found, problems


def _level_of(
    pages: Sequence[tifffile.TiffPage], index: int, size: tuple[int, int], vendor: str, descriptor: int
) -> CompressedLevel | str:
    """The tiles of a level, or why they cannot be read directly."""
    same = [page for page in pages if (page.imagewidth, page.imagelength) == size]
    if vendor == "philips":  # its levels are stored padded, in order
        same = [page for page in pages[index : index + 1] if page.imagewidth >= size[0] and page.imagelength >= size[1]]
    if len(same) != 1:
        return f"{len(same)} of the stored images have its size"
    if not is_plain(same[0]):
        return f"its tiles are no 8-bit RGB in a known codec ({same[0].compression.name}, {same[0].photometric.name})"
    return CompressedLevel(descriptor, same[0], size)


def _disproof(slow: OpenSlideReader, index: int, level: CompressedLevel) -> str | None:
    """How the compressed tiles of a level differ from what OpenSlide reads; None where they agree.

    Compared are the corner, where OpenSlide never interpolates, and the tile of most bytes, that one also reduced.
    What is damaged or missing there is skipped: it is left to OpenSlide anyway.
    """
    exact = slow.downsamples[index].is_integer()
    column, row = level.heaviest()
    for place, exactly in (((0, 0), True), ((column, row), exact)):
        problem = _difference(slow, index, level, place, exactly)
        if problem:
            return problem
    level.decoder.reduces = level.decoder.reduces and _reduces_well(level, column, row)
    return None


def _difference(
    slow: OpenSlideReader, index: int, level: CompressedLevel, place: tuple[int, int], exactly: bool
) -> str | None:
    x, y = (i * side for i, side in zip(place, level.tile, strict=True))
    width, height = (
        min(side, _PROOF_PX, whole - at) for side, whole, at in zip(level.tile, level.size, (x, y), strict=True)
    )
    try:
        fast = level.decode(*place, 1)[:height, :width]
        theirs = slow.read_region(index, x, y, width, height)
    except (ValueError, OSError, TileReadError):
        return None
    if theirs[..., 3].min() < 255:
        return None
    off = np.abs(fast.astype(np.int16) - theirs[..., :3])
    if (off.max() > 0) if exactly else (off.mean() > _interpolated_bound(theirs)):
        return f"its pixels differ from OpenSlide's by {off.mean():.1f} grey levels in the mean at ({x}, {y})"
    return None


def _interpolated_bound(rgba: NDArray[np.uint8]) -> float:
    """What interpolating between neighbours can do: half a step along each axis."""
    rgb = rgba[..., :3].astype(np.int16)
    steps = sum(float(np.abs(np.diff(rgb, axis=axis)).mean()) if rgb.shape[axis] > 1 else 0.0 for axis in (0, 1))
    return MAX_DIFFERENCE + steps / 2


def _reduces_well(level: CompressedLevel, column: int, row: int) -> bool:
    """Whether the decoder's reductions of a tile are near its area mean; of noise or fine lines they may not be."""
    try:
        whole = level.decode(column, row, 1)
        return all(
            np.abs(level.decode(column, row, r).astype(np.int16) - reduce_area(whole, r)).mean() <= MAX_DIFFERENCE
            for r in REDUCTIONS[1:]
            if level.reduces(r)
        )
    except (ValueError, OSError):
        return True  # damaged there: nothing to compare
