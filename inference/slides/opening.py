"""Which reader a slide gets."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import tifffile

from inference.errors import InferenceError, SourceUnavailable, UnreadableSlide
from inference.slides._compressed import CompressedLevel
from inference.slides._dicom_levels import dicom_levels
from inference.slides._files import open_regular, source_lost
from inference.slides._proof import DIFFERENT, disproof
from inference.slides._tiff_levels import is_plain, level_of, quiet, tiled_pages
from inference.slides.compressed_reader import CompressedReader, SlideFacts
from inference.slides.openslide_reader import OpenSlideReader
from inference.slides.reader import SlideReader
from inference.slides.tifffile_slides import open_tiff

log = logging.getLogger(__name__)

_VENDORS = frozenset({"aperio", "dicom", "generic-tiff", "philips"})
"""Formats whose tiles lie side by side on the canvas; in others they overlap, are shifted or are strips."""


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
    try:
        slow = OpenSlideReader(path, name, files)
    except UnreadableSlide as error:
        # Only what OpenSlide has no word for: what it or our own checks refuse for a reason stays refused.
        if error.fields.get("unknown_format") and len(files) <= 1 and (found := open_tiff(path, name, None)):
            return found
        raise
    try:
        return _best(path, name, slow, tuple(files) or (path,))
    except InferenceError:
        slow.close()
        raise


def _best(path: Path, name: str, slow: OpenSlideReader, files: Sequence[Path]) -> SlideReader:
    """The fastest reader that gives OpenSlide's pixels."""
    if slow.vendor == "generic-tiff" and (found := open_tiff(path, name, slow)):
        return found
    if slow.vendor not in _VENDORS:
        slow.reason = f"its format ({slow.vendor}) is left to OpenSlide, which reads it in supertiles"
        return slow
    with ExitStack() as held:
        levels, problems = _proven_levels(files, name, slow, held)
        if problems:
            slow.reason = f"compressed tiles are not read directly: {problems[0]}"
            # What is merely another format is no news; pixels that differ are.
            log.log(
                logging.WARNING if any(DIFFERENT in p for p in problems) else logging.INFO, "%s: %s", name, slow.reason
            )
        return _fast(files, name, slow, levels, problems, held.pop_all()) if levels else slow


def _fast(
    files: Sequence[Path],
    name: str,
    slow: OpenSlideReader,
    levels: dict[int, CompressedLevel],
    problems: Sequence[str],
    held: ExitStack,
) -> CompressedReader:
    codecs = ", ".join(sorted({level.decoder.name for level in levels.values()}))
    left = f"; {len(slow.level_sizes) - len(levels)} of its levels through OpenSlide: {problems[0]}" if problems else ""
    return CompressedReader(
        files[0],
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
        files=files,
    )  # fmt: skip


def _proven_levels(
    files: Sequence[Path], name: str, slow: OpenSlideReader, held: ExitStack
) -> tuple[dict[int, CompressedLevel], list[str]]:
    """Levels that can be read by their compressed tiles, by index, and what is wrong with the others."""
    found: dict[int, CompressedLevel] = {}
    problems = []
    try:
        with quiet():
            is_dicom = slow.vendor == "dicom"
            stored = dicom_levels(files, slow.level_sizes, held) if is_dicom else _tiff_levels(files[0], slow, held)
            for index, level in enumerate(stored):
                problem = level if isinstance(level, str) else disproof(slow, index, level)
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


def _tiff_levels(path: Path, slow: OpenSlideReader, held: ExitStack) -> Iterator[CompressedLevel | str]:
    """The tiles of each level, or why they cannot be read directly."""
    file = held.enter_context(open_regular(path))
    tiff = tifffile.TiffFile(file, name="slide")  # the descriptor is ours, and stays open
    pages = tiled_pages(tiff)
    for index, size in enumerate(slow.level_sizes):
        yield _level_of(pages, index, size, slow.vendor, file.fileno())


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
    return level_of(descriptor, same[0], size)
