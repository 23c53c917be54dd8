"""Why a slide cannot be read: refused before a decoder sees it, or explained after one gave up."""

import codecs
import errno
import os
import re
from pathlib import Path

from inference.errors import SourceUnavailable, UnreadableSlide
from inference.slides._files import source_lost
from inference.slides._tiff_tables import TiffClaims, read_claims


def require_regular_file(path: Path, name: str) -> None:
    """Refuse what is gone, and what would hang a reader: pipes, sockets, devices.

    Raises:
        UnreadableSlide: the file cannot be read, and others may.
        SourceUnavailable: the folder or mount is lost.
    """
    try:
        if not path.exists():
            if not path.parent.is_dir():
                raise SourceUnavailable(f"{name}: its folder cannot be reached; is the source mounted?")
            raise UnreadableSlide(f"{name}: the file is gone; put it back or remove it from the cohort")
        if not path.is_file():
            raise UnreadableSlide(f"{name}: not a regular file")
    except OSError as error:
        raise _unreachable(name, error) from None
    if not os.access(path, os.R_OK):
        raise UnreadableSlide(f"{name}: no permission to read it")


def require_bearable(path: Path, name: str) -> None:
    """Refuse a TIFF whose tables ask for more memory than there is: OpenSlide would end the process, not fail.

    Raises:
        UnreadableSlide: a compressed tile is longer than the file.
        SourceUnavailable: the folder or mount is lost.
    """
    if path.suffix.lower() == ".ndpi":  # past 4 GiB its offsets are no plain TIFF's
        return
    try:
        claims = read_claims(path)
    except OSError as error:
        raise _unreachable(name, error) from None
    if claims and claims.piece > claims.size:
        raise UnreadableSlide(f"{name}: {_truncated(claims)}")


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
        with path.open("rb") as stream:
            head = stream.read(512)
        if head.removeprefix(codecs.BOM_UTF8).lstrip()[:1] == b"<":
            return "not a slide but a web page or XML (an error page saved as a slide?); fetch it again"
        if head[:2] not in (b"II", b"MM"):
            return f"no known slide format ({reason_of(error, path)})"
        claims = read_claims(path)
        if claims and claims.end > size:
            return _truncated(claims)
    except OSError as lost:
        raise _unreachable(name, lost) from None
    return f"a TIFF that is damaged or no slide ({reason_of(error, path)})"


def reason_of(error: BaseException, path: Path) -> str:
    """First line of a foreign error, without the path it may contain: names can be accession numbers."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    places = "|".join(re.escape(place) for place in (f"{path.parent}{os.sep}", path.name, path.stem))
    line = re.sub(rf"(?<!\w)({places}).*", "…", line)
    return line[:160]


def _unreachable(name: str, error: OSError) -> SourceUnavailable | UnreadableSlide:
    text = f"{name}: the file cannot be reached: {error.strerror}"
    return SourceUnavailable(text) if source_lost(error) else UnreadableSlide(text)


def _truncated(claims: TiffClaims) -> str:
    return f"truncated: its data reach byte {claims.end:,}, the file ends at {claims.size:,}; copy it again"
