"""Listings of object stores as a local tree of stand-in files, so that one search serves folders and stores alike.

A stand-in has the object's name and is empty, but for what discovery reads: the first 256 KiB of DICOM objects, VMS and
VMU key files, cohort files. Nothing else of an object is read. Stand-ins lie in a private temporary folder,
`<protocol>/<bucket>/<key>`, and go when the tree is closed.

Objects that a folder yields: those with a slide's suffix, with their companions; and those of at least 132 bytes whose
suffix has no letter (a DICOM UID looks like that) or is `.dicom`, if bytes 128 to 131 say DICM. One that is named
outright is looked at whatever its suffix.
"""

import contextlib
import os
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath

from inference.errors import ConfigError
from inference.slides._companions import COMPANION_FORMATS, HAMAMATSU_PARTS, KEY_FILE_BYTES, MRXS_PARTS
from inference.slides._files import Skipped
from inference.slides._remote import (
    Location,
    RemoteFile,
    described,
    locate,
    open_filesystem,
    remote_errors,
)
from inference.slides.cohort import is_cohort_file
from inference.slides.dicom import HEADER_BYTES, MAGIC_BYTES, is_dicom, read_instance

_LOOK_UPS = 16  # requests at a time: each waits for the network, not for a core
_COHORT_BYTES = 64 << 20
_GLOB_CHARS = frozenset("*?[")

_Info = dict[str, object]


class RemoteTree:
    """Stand-ins for what sources in object stores hold. Close it when the search is over.

    Args:
        suffixes: of slides, lower case.
    """

    def __init__(self, suffixes: frozenset[str]) -> None:
        self._suffixes = suffixes
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._root: Path | None = None
        self._places: dict[Path, Location] = {}
        self._infos: dict[str, _Info | None] = {}
        self.skipped: list[Skipped] = []

    def close(self) -> None:
        """Delete the stand-ins."""
        if self._folder is not None:
            self._folder.cleanup()

    def holds(self, path: Path) -> bool:
        """Whether a path is of this tree."""
        return self._root is not None and path.is_relative_to(self._root)

    def path_of(self, url: str) -> Path:
        """Where the stand-in of a URL is or would be; its folder exists if it was placed."""
        return self._path(locate(url))

    def folder_of(self, url: str) -> Path:
        """The stand-in folder of a URL, made without looking whether the store has it."""
        path = self.path_of(url)
        path.mkdir(parents=True, exist_ok=True)
        return path

    def bucket_of(self, path: Path) -> Path:
        """The folder that stands for the bucket a path is in."""
        assert self._root is not None, "a path of this tree"
        return self._root.joinpath(*path.relative_to(self._root).parts[:2])

    def url_of(self, path: Path) -> str:
        """The URL that a path stands for."""
        assert self._root is not None, "a path of this tree"
        protocol, *parts = path.relative_to(self._root).parts
        return f"{protocol}://{'/'.join(parts)}"

    def look_up(self, urls: Iterable[str]) -> None:
        """Ask for many single objects at once, so that placing them need not wait for each."""

        def ask(url: str) -> None:
            with contextlib.suppress(ConfigError):  # said when it is placed
                if not _GLOB_CHARS & set(url) and not (place := locate(url)).folder:
                    self._info(place)

        with ThreadPoolExecutor(_LOOK_UPS) as pool:
            list(pool.map(ask, urls))

    def place(self, url: str) -> Path:
        """Stand-ins for all that a source means: an object with its companions, a folder, or what a pattern may match.

        Returns:
            The path to search at; nothing lies there if the store has nothing there.

        Raises:
            ConfigError: not a URL that can be used.
            SourceUnavailable: the store refuses, or cannot be reached.
        """
        place = locate(url)
        path = self._path(place)
        if place.folder or not place.path:
            self._list(place)
        elif (info := self._info(place)) is not None:
            if info.get("type") == "directory":
                self._list(place)
            else:
                self._add_named(place, info)
        elif (fixed := _before_wildcard(place)) is not None:
            self._list(fixed)
        return path

    def remote_files(self, paths: tuple[Path, ...]) -> tuple[RemoteFile, ...]:
        """The objects behind a slide's files, the main one first; none for local files."""
        if not self.holds(paths[0]):
            return ()
        found = []
        for path in paths:
            place = self._places.get(path) or locate(self.url_of(path))
            name = Path(os.path.relpath(path, paths[0].parent)).as_posix()
            found.append(described(self._infos.get(place.url) or {}, place.url, name))
        return tuple(found)

    def _path(self, place: Location) -> Path:
        if self._folder is None or self._root is None:
            self._folder = tempfile.TemporaryDirectory(prefix="slide-inference-")
            self._root = Path(os.path.realpath(self._folder.name))
        return self._root / place.protocol / place.path

    def _info(self, place: Location) -> _Info | None:
        """What the store says of an object or folder; None where there is neither."""
        if place.url not in self._infos:
            filesystem, path = open_filesystem(place)
            try:
                with remote_errors():
                    self._infos[place.url] = filesystem.info(path)
            except FileNotFoundError:
                self._infos[place.url] = None
        return self._infos[place.url]

    def _list(self, folder: Location) -> None:
        """Stand-ins for all objects below a folder."""
        filesystem, path = open_filesystem(folder)
        try:
            with remote_errors():
                listed = filesystem.find(path, detail=True)
                if not listed and filesystem.info(path).get("type") != "directory":
                    return
        except FileNotFoundError:
            return
        self._path(folder).mkdir(parents=True, exist_ok=True)
        self._add_listed(folder, path, list(listed.values()))

    def _siblings(self, folder: Location) -> None:
        """Stand-ins for the objects right below a folder."""
        filesystem, path = open_filesystem(folder)
        try:
            with remote_errors():
                listed = filesystem.ls(path, detail=True)
        except FileNotFoundError:
            return
        self._add_listed(folder, path, [info for info in listed if info.get("type") == "file"])

    def _add_listed(self, folder: Location, path: str, listed: list[_Info]) -> None:
        """Stand-ins for those of a listing that discovery can want."""
        found = {}
        for info in listed:
            name = str(info["name"]).removeprefix(path).removeprefix("/")
            parts = name.split("/")
            if not name.endswith("/") and not any(part.startswith(".") and part not in (".", "..") for part in parts):
                found[name] = info
        key_files = {str(PurePosixPath(name).parent) for name in found if name.lower().endswith((".vms", ".vmu"))}
        wanted = [name for name in sorted(found) if self._wanted(PurePosixPath(name), found, key_files)]
        places = [folder.child(name) for name in wanted]
        for place, name in zip(places, wanted, strict=True):
            self._infos[place.url] = found[name]
        read = [place for place in places if self._is_read(PurePosixPath(place.path).suffix.lower())]
        with ThreadPoolExecutor(_LOOK_UPS) as pool:
            problems = dict(zip(read, pool.map(self._add, read), strict=True))
        for place in places:
            problem = problems[place] if place in problems else self._add(place)
            if problem:
                self.skipped.append(Skipped(self._path(place), "bad_name", problem))

    def _is_read(self, suffix: str) -> bool:
        """Whether a stand-in needs bytes of its object."""
        return suffix == ".dcm" or suffix in COMPANION_FORMATS - {".mrxs"} or _may_be_dicom(suffix)

    def _wanted(self, name: PurePosixPath, names: dict[str, _Info], key_files: set[str]) -> bool:
        suffix = name.suffix.lower()
        if suffix in self._suffixes or _may_be_dicom(suffix):
            return True
        if suffix in MRXS_PARTS:
            return any(f"{name.parent}{mrxs}" in names for mrxs in (".mrxs", ".MRXS")) or len(name.parts) == 1
        return suffix in HAMAMATSU_PARTS and str(name.parent) in key_files

    def _add_named(self, place: Location, info: _Info) -> None:
        """A stand-in for one object, with what belongs to it."""
        suffix = PurePosixPath(place.path).suffix.lower()
        if (size := described(info, place.url, "").size) > _COHORT_BYTES and is_cohort_file(Path(place.path)):
            raise ConfigError(f"a cohort file of {size} bytes: split it, or list the slides in several")
        problem = self._add(place, named=True)
        if problem:
            raise ConfigError(f"the object cannot be used: {problem}")
        if suffix == ".mrxs":
            self._siblings(Location(place.protocol, place.path[: -len(suffix)]))
        elif suffix in COMPANION_FORMATS or is_dicom(self._path(place)):
            self._siblings(place.parent)

    def _add(self, place: Location, *, named: bool = False) -> str | None:
        """Make a stand-in; why there can be none where a name cannot be a local one."""
        path = self._path(place)
        if path in self._places:
            return None
        if any(part in ("", ".", "..") for part in place.path.split("/")):
            return "its name has an empty part, '.' or '..' between slashes; copy it to another name"
        size = described(self._infos[place.url] or {}, place.url, "").size
        data = self._content(place, size, named=named)
        if data is None:
            return None
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("xb") as file:
                file.write(data)
            if len(data) == HEADER_BYTES[0] < size and _needs_more(path):
                path.write_bytes(self._read(place, min(size, HEADER_BYTES[1])))
        except OSError as error:
            return f"its name cannot be a local one ({error.strerror}); copy it to another name"
        self._places[path] = place
        return None

    def _content(self, place: Location, size: int, *, named: bool) -> bytes | None:
        """What discovery will read of an object; None where it is no slide."""
        suffix = PurePosixPath(place.path).suffix.lower()
        if suffix in COMPANION_FORMATS - {".mrxs"}:
            return self._read(place, min(size, KEY_FILE_BYTES))
        if named and is_cohort_file(Path(place.path)):
            return self._read(place, size)
        if suffix == ".dcm":
            return self._read(place, min(size, HEADER_BYTES[0]))
        if suffix in self._suffixes or (not named and not _may_be_dicom(suffix)):
            return b""
        if size >= MAGIC_BYTES and self._read(place, MAGIC_BYTES).endswith(b"DICM"):
            return self._read(place, min(size, HEADER_BYTES[0]))
        return b"" if named else None

    def _read(self, place: Location, size: int) -> bytes:
        """The first bytes of an object; none where it has gone since it was listed."""
        if size == 0:
            return b""
        filesystem, path = open_filesystem(place)
        try:
            with remote_errors():
                return filesystem.cat_file(path, start=0, end=size)
        except FileNotFoundError:
            return b""


def _may_be_dicom(suffix: str) -> bool:
    return suffix == ".dicom" or not any(character.isalpha() for character in suffix)


def _needs_more(path: Path) -> bool:
    """Whether a DICOM header goes on beyond the first piece."""
    found = read_instance(path)
    return isinstance(found, Skipped) and found.code == "dicom_broken"


def _before_wildcard(place: Location) -> Location | None:
    """The folder before the first wildcard; None without one."""
    parts = place.path.split("/")
    for index, part in enumerate(parts):
        if _GLOB_CHARS & set(part):
            return Location(place.protocol, "/".join(parts[:index])) if index else None
    return None
