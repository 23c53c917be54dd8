"""Files that belong to a slide besides its main file: MRXS folders, VMS and VMU sets."""

import os
from pathlib import Path

from inference.errors import SourceUnavailable
from inference.slides._files import kind_of, read_start, source_lost

COMPANION_FORMATS = frozenset({".mrxs", ".vms", ".vmu"})
_KEY_FILE_SECTIONS = frozenset({"virtual microscope specimen", "uncompressed virtual microscope specimen"})
_KEY_FILE_ENTRIES = ("imagefile", "mapfile", "optimisationfile", "macroimage")
KEY_FILE_BYTES = 1 << 20
MRXS_PARTS = frozenset({".dat", ".ini"})
HAMAMATSU_PARTS = frozenset({".jpg", ".jpeg", ".ngr", ".opt"})


def companions(main: Path) -> tuple[Path, ...]:
    """The other regular files of the slide at `main`, sorted; none where they are missing or the format has none.

    MRXS: the `.dat` and `.ini` files in the folder of the same stem. VMS and VMU: the files of the same folder that
    the key file refers to, whatever it calls them, as long as they have a suffix that such parts have.

    Raises:
        SourceUnavailable: the mount was lost.
    """
    suffix = main.suffix.lower()
    if suffix not in COMPANION_FORMATS:
        return ()
    try:
        names = _mrxs_parts(main) if suffix == ".mrxs" else _key_file_parts(main)
    except OSError as error:
        if source_lost(error):
            raise SourceUnavailable(f"a slide's companion files cannot be read: {error.strerror}") from None
        return ()  # a slide without its parts stays a slide: it fails visibly when opened
    return tuple(sorted((path for path in names if kind_of(path) == "file"), key=Path.as_posix))


def _mrxs_parts(main: Path) -> list[Path]:
    folder = main.with_suffix("")
    with os.scandir(folder) as entries:
        return [
            folder / entry.name
            for entry in entries
            if not entry.name.startswith(".") and Path(entry.name).suffix.lower() in MRXS_PARTS
        ]


def _key_file_parts(main: Path) -> list[Path]:
    text = read_start(main, KEY_FILE_BYTES).decode("utf-8", "surrogateescape")
    names = set()
    in_section = False
    for line in text.splitlines():
        if line.startswith("["):
            in_section = line.strip().strip("[]").strip().lower() in _KEY_FILE_SECTIONS
        key, equals, value = line.partition("=")
        if in_section and equals and key.strip().lower().startswith(_KEY_FILE_ENTRIES):
            names.add(value.strip())
    return [main.with_name(name) for name in names if _is_part(name)]


def _is_part(name: str) -> bool:
    """A plain file name: the key file must not claim a file elsewhere, nor hide another slide."""
    return not set("/\\\0") & set(name) and Path(name).suffix.lower() in HAMAMATSU_PARTS
