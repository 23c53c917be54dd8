"""What a DICOM file lacks by its own account: OpenSlide opens one that was cut, and dies of one without positions."""

import io
import os
from pathlib import Path
from typing import BinaryIO

from inference.slides._files import open_regular

_MAGIC_AT = 128
_PIXEL_DATA = 0x7FE00010
_UNDEFINED = 0xFFFFFFFF
_ITEM, _SEQUENCE_END = b"\xfe\xff\x00\xe0", b"\xfe\xff\xdd\xe0"  # little-endian, as all encapsulated pixels are
_HEADER_BYTES = 16 << 20  # beyond any header: most are some kilobytes, a few have an ICC profile of megabytes
_SPARSE, _PER_FRAME = b"TILED_SPARSE", (b"\x00\x52\x30\x92SQ", b"\x00\x52\x30\x92\xff\xff\xff\xff")
_LARGE_VALUE = 1 << 10  # longer values of the header are passed over


def truncated_dicom(path: Path) -> str | None:
    """What is missing of a DICOM whole-slide image; None where nothing is, or where it is no DICOM.

    Reads the start of the file and its last eight bytes; of some the length of each fragment too.

    Raises:
        OSError: the file cannot be read.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if os.pread(file.fileno(), 4, _MAGIC_AT) != b"DICM":
            return None
        head = os.pread(file.fileno(), _HEADER_BYTES, 0)
        if _SPARSE in head and not any(tag in head for tag in _PER_FRAME):
            return "a sparse DICOM image that does not say where its frames lie: export it again"
        if os.pread(file.fileno(), 8, max(0, size - 8)) == _SEQUENCE_END + bytes(4):
            return None
        pixels = _pixel_data(file)
        if pixels is None:
            return None
        start, length = pixels
        if not start:
            return f"truncated: the file ends at byte {size:,}, before its pixels begin; copy it again"
        end = _fragments_end(file, start, size) if length == _UNDEFINED else start + length
    if end <= size:
        return None
    return (
        f"truncated: its pixels reach byte {end:,}, the file ends at {size:,}, so at least {end - size:,} bytes are "
        "missing; copy it again"
    )


def _pixel_data(file: BinaryIO) -> tuple[int, int] | None:
    """Where the pixels begin and how many bytes they claim: zeros where there are none, None past a broken header."""
    from pydicom.filereader import read_partial  # a third of a second, and most slides are no DICOM

    found: list[tuple[int, int]] = []
    buffered = io.BufferedReader(file)  # type: ignore[type-var]  # a raw file, typed as any binary one

    def at_pixels(tag: int, _vr: str | None, length: int) -> bool:
        if tag == _PIXEL_DATA:
            found.append((buffered.tell(), length))
        return bool(found)

    try:
        read_partial(buffered, stop_when=at_pixels, defer_size=_LARGE_VALUE, specific_tags=[])
    except OSError as error:
        if error.errno is not None:
            raise
        return None
    except Exception:  # noqa: BLE001 - a parser on foreign bytes may raise anything; OpenSlide decides what is damage
        return None
    finally:
        buffered.detach()
    return found[0] if found else (0, 0)


def _fragments_end(file: BinaryIO, at: int, size: int) -> int:
    """The byte after the fragments that begin at an offset, as far as they can be followed."""
    while at + 8 <= size:
        head = os.pread(file.fileno(), 8, at)
        at += 8
        if head[:4] != _ITEM:
            return at if head[:4] == _SEQUENCE_END else 0
        at += int.from_bytes(head[4:], "little")
    return at + 8
