"""Why a slide cannot be read: refused before a decoder sees it, or explained after one gave up."""

import codecs
import errno
import os
import re
import stat
from pathlib import Path

import openslide

from inference.errors import SourceUnavailable, UnreadableSlide
from inference.slides._dicom_length import truncated_dicom
from inference.slides._files import read_start, source_lost
from inference.slides._mirax_length import truncated_mirax
from inference.slides._mounts import has_lasting_inodes
from inference.slides._tiff_refusal import in_strips, refused_pixels, refused_tables
from inference.slides._tiff_tables import TiffClaims, read_claims

FileState = tuple[int, int, int, int]
"""Size, modification time (ns), inode and device: what a file must still be while it is read.

Inode and device are 0 where the file system may number one file anew, as those of user space do.
"""


def file_state(status: os.stat_result) -> FileState:
    """What a file is, by its status."""
    inode = (status.st_ino, status.st_dev) if has_lasting_inodes(status.st_dev) else (0, 0)
    return (status.st_size, status.st_mtime_ns, *inode)


def require_regular_file(path: Path, name: str) -> FileState:
    """Refuse what is gone, and what would hang a reader: pipes, sockets, devices.

    Raises:
        UnreadableSlide: the file cannot be read, and others may.
        SourceUnavailable: the folder or mount is lost.
    """
    try:
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            if not path.parent.is_dir():
                raise SourceUnavailable(f"{name}: its folder cannot be reached; is the source mounted?") from None
            raise UnreadableSlide(f"{name}: the file is gone; put it back or remove it from the cohort") from None
    except OSError as error:
        raise _unreachable(name, error) from None
    if not stat.S_ISREG(status.st_mode):
        raise UnreadableSlide(f"{name}: not a regular file")
    if not os.access(path, os.R_OK):
        raise UnreadableSlide(f"{name}: no permission to read it")
    return file_state(status)


def require_whole(path: Path, name: str) -> TiffClaims | None:
    """Refuse a file that is cut short by its own account, or asks for more than there is; a TIFF's claims.

    OpenSlide opens many a truncated slide, and ends the process where it gets no memory.

    Raises:
        UnreadableSlide: the file is truncated, or its sizes are impossible.
        SourceUnavailable: the folder or mount is lost.
    """
    try:
        claims = read_claims(path)
        problem = refused_tables(claims) if claims else truncated_dicom(path) or truncated_mirax(path)
    except OSError as error:
        raise _unreachable(name, error) from None
    if problem:
        raise UnreadableSlide(f"{name}: {problem}")
    return claims


def raise_if_lost(error: BaseException, name: str) -> None:
    """OpenSlide hands on the system's words alone: "Too many open files" is no damage.

    Raises:
        SourceUnavailable: the words are those of a lost mount, a failing disk or an exhausted process.
    """
    text = str(error)
    for code in errno.errorcode:
        if text.endswith(os.strerror(code)) and source_lost(OSError(code, "")):
            raise SourceUnavailable(f"{name}: the file cannot be read: {os.strerror(code)}") from None


def why_unreadable(path: Path, name: str, error: BaseException) -> str:
    """The likeliest reason that a file does not open as a slide, in one line."""
    try:
        size = path.stat().st_size
        if size == 0:
            return "the file is empty (0 bytes); copy it again"
        head = read_start(path, 512)
        if head.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"<":
            return "not a slide but a web page or XML (an error page saved as a slide?); fetch it again"
        if head[128:132] == b"DICM":
            return f"a DICOM file that is damaged or no slide ({reason_of(error, path)})"
        if head.startswith((b"\x89PNG", b"\xff\xd8\xff")):
            return "a PNG or JPEG picture, whatever its name says; save it as a tiled TIFF that states its µm/px"
        if head[:2] not in (b"II", b"MM"):
            return f"no known slide format ({reason_of(error, path)}); export it as SVS, DICOM or a pyramidal TIFF"
        claims = read_claims(path)
        if claims and (problem := refused_tables(claims)):
            return problem
        unknown = isinstance(error, openslide.OpenSlideUnsupportedFormatError)
        if claims and (problem := (unknown and in_strips(claims)) or refused_pixels(claims, "generic-tiff")):
            return problem
    except OSError as lost:
        raise _unreachable(name, lost) from None
    return f"a TIFF that is damaged or no slide ({reason_of(error, path)})"


def reason_of(error: BaseException, path: Path) -> str:
    """First line of a foreign error, without the path it may contain: names can be accession numbers."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    for place in (os.fspath(path), path.name):
        line = line.replace(place, "…")
    line = line.removeprefix("Reading …: ")
    places = "|".join(re.escape(place) for place in (f"{path.parent}{os.sep}", path.name, path.stem))
    line = re.sub(rf"(?<!\w)({places}).*", "…", line)
    return line[:160]


def _unreachable(name: str, error: OSError) -> SourceUnavailable | UnreadableSlide:
    text = f"{name}: the file cannot be reached: {error.strerror}"
    return SourceUnavailable(text) if source_lost(error) else UnreadableSlide(text)
