"""What the index of an MRXS slide says of its data files: OpenSlide opens the slide without looking at them."""

import configparser
import struct
from pathlib import Path

import numpy as np

from inference.slides._files import read_start

_INI_BYTES, _INDEX_BYTES = 4 << 20, 256 << 20  # far above what a slide has
_VERSION_BYTES = 5


def truncated_mirax(path: Path) -> str | None:
    """What is missing of an MRXS slide; None where nothing is, where its index is odd, or where it is none.

    Raises:
        OSError: a file of it cannot be read.
    """
    folder = path.with_suffix("")
    if path.suffix.lower() != ".mrxs" or not (folder / "Slidedat.ini").is_file():
        return None
    try:
        ini = configparser.ConfigParser(strict=False, interpolation=None)
        ini.read_string(read_start(folder / "Slidedat.ini", _INI_BYTES).decode("utf-8-sig", "replace"))
        files = [folder / ini["DATAFILE"][f"FILE_{k}"] for k in range(int(ini["DATAFILE"]["FILE_COUNT"]))]
        levels = int(ini["HIERARCHICAL"]["HIER_0_COUNT"])
        root = _VERSION_BYTES + len(ini["GENERAL"]["SLIDE_ID"])
        index = read_start(folder / ini["HIERARCHICAL"]["INDEXFILE"], _INDEX_BYTES)
    except (configparser.Error, KeyError, ValueError):
        return None
    if len(index) == _INDEX_BYTES:
        return None
    sizes = [file.stat().st_size for file in files]
    try:
        ends = _ends(index, root, levels)
    except (struct.error, ValueError):
        return "truncated: its index ends early; copy it again"
    for size, end in ((size, ends.get(number, 0)) for number, size in enumerate(sizes)):
        if end > size:
            return (
                f"truncated: a data file reaches byte {end:,} by the slide's index, and ends at {size:,}, so at least "
                f"{end - size:,} bytes are missing; copy it again"
            )
    return None


def _ends(index: bytes, root: int, levels: int) -> dict[int, int]:
    """Where the last image in each data file ends, by the file's number.

    Raises:
        struct.error, ValueError: the index ends before what it points to.
    """
    ends: dict[int, int] = {}
    seen = set()
    first = _number(index, root)
    for level in range(levels):
        page = _number(index, _number(index, first + 4 * level) + 4)
        while page and page not in seen:
            seen.add(page)
            count = _number(index, page)
            images = np.frombuffer(index, "<i4", 4 * count, page + 8).reshape(count, 4).astype(np.int64)
            for file in np.unique(images[:, 3]).tolist():
                mine = images[images[:, 3] == file]
                ends[file] = max(ends.get(file, 0), int((mine[:, 1] + mine[:, 2]).max()))
            page = _number(index, page + 4)
    return ends


def _number(index: bytes, at: int) -> int:
    return int(struct.unpack_from("<i", index, at)[0])
