"""Files on disk: opened only when regular, listed in one order, never through a link that leaves the root."""

import errno
import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO, Literal

from inference.errors import SourceUnavailable

# Errors of a mount, a disk or this process: no file is to blame, and the next try may succeed.
_LOST = frozenset(
    getattr(errno, name)
    for name in (
        *("EIO", "ESTALE", "ENOTCONN", "ENODEV", "EHOSTDOWN", "EHOSTUNREACH", "ETIMEDOUT", "EREMOTEIO"),
        *("EMFILE", "ENFILE", "ENOMEM"),
    )
    if hasattr(errno, name)  # EREMOTEIO is Linux's own
)

Kind = Literal["file", "folder", "other", "missing", "denied"]


@dataclass(frozen=True, repr=False)
class Skipped:
    """A file or folder left out, and why; `reason` never contains its name."""

    path: Path
    code: str
    reason: str

    def __repr__(self) -> str:
        # The path may be an accession number; a logged record must not tell it.
        return f"Skipped({self.code}: {self.reason})"


def source_lost(error: OSError) -> bool:
    """Whether the error speaks of a lost mount, a failing disk or an exhausted process rather than of one file."""
    return error.errno in _LOST


@contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Open a regular file for reading, unbuffered; a FIFO, device or folder is refused without waiting on it.

    Raises:
        OSError: EINVAL where it is no regular file, else whatever opening it raised.
    """
    target = os.path.realpath(path, strict=True)
    _require_regular(os.lstat(target))  # opening a device can already do something to it
    # O_NOFOLLOW: the resolved name must not become a link meanwhile. O_NONBLOCK: a FIFO put there meanwhile returns.
    descriptor = os.open(target, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        _require_regular(os.fstat(descriptor))
        yield file


def _require_regular(status: os.stat_result) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")


def read_start(path: Path, size: int) -> bytes:
    """The first `size` bytes of a regular file, fewer only where it is shorter."""
    with open_regular(path) as file:
        parts = bytearray()
        while len(parts) < size and (part := file.read(size - len(parts))):
            parts += part
        return bytes(parts)


def kind_of(path: Path) -> Kind:
    """What lies at a path, links followed.

    Raises:
        SourceUnavailable: the mount cannot be reached.
    """
    try:
        mode = path.stat().st_mode
    except PermissionError:
        return "denied"
    except OSError as error:
        if source_lost(error):
            raise SourceUnavailable(f"the slide source cannot be reached: {error.strerror}") from None
        return "missing"
    if stat.S_ISREG(mode):
        return "file"
    return "folder" if stat.S_ISDIR(mode) else "other"


def resolved(path: Path) -> str:
    """The path with its links resolved; as it is where the system does not tell (links in /proc)."""
    try:
        return os.path.realpath(path)
    except OSError:
        return os.path.abspath(path)  # noqa: PTH100 - of text, as the other


def is_inside(path: Path, folder: Path) -> bool:
    """Whether a path, all links resolved, lies under a folder; False where the system does not tell."""
    try:
        return Path(os.path.realpath(path)).is_relative_to(resolved(folder))
    except OSError:
        return False


class GlobPattern:
    """A relative glob matched segment by segment, so that folders that cannot match are never listed.

    `**` stands for any number of folders; a pattern that matches a folder selects everything below it.
    """

    def __init__(self, segments: Sequence[str]) -> None:
        self._segments = tuple(segments)

    @property
    def suffix(self) -> str:
        """Lower-case suffix that the last segment asks for, '' where it asks for none."""
        return Path(self._segments[-1]).suffix.lower()

    def start(self) -> frozenset[int]:
        """State at the folder that the pattern is relative to."""
        return self._closed({0})

    def step(self, state: frozenset[int], name: str) -> frozenset[int]:
        """State after entering `name`; empty where nothing below can match."""
        if self.accepts(state):
            return state
        after = set()
        for index in state:
            if self._segments[index] == "**":
                after.add(index)
            elif fnmatchcase(name, self._segments[index]):
                after.add(index + 1)
        return self._closed(after)

    def accepts(self, state: frozenset[int]) -> bool:
        """Whether the entry reached in this state is selected."""
        return len(self._segments) in state

    def _closed(self, state: set[int]) -> frozenset[int]:
        todo = list(state)
        while todo:
            index = todo.pop()
            if index < len(self._segments) and self._segments[index] == "**" and index + 1 not in state:
                state.add(index + 1)
                todo.append(index + 1)
        return frozenset(state)


EVERYTHING = GlobPattern(("**",))

OWN_HEATMAPS = {"heatmap.tif", "heatmap.ome.tif"}
"""A folder that holds both is a result of this library."""


def list_files(
    folder: Path, *, boundary: Path, pattern: GlobPattern = EVERYTHING, recursive: bool = True
) -> tuple[list[Path], list[Skipped]]:
    """Regular non-hidden files under `folder`, sorted by posix path; a file reached by two names is listed once.

    Links to files are followed only where they end under `boundary`; linked folders are not entered. A file itself
    wins over links to it, so adding a link never changes what a slide is called.

    Raises:
        SourceUnavailable: the folder cannot be listed, or the mount was lost on the way.
    """
    found: list[tuple[bool, str, Path]] = []
    skipped: list[Skipped] = []
    todo = [(folder, pattern.start())]
    while todo:
        current, state = todo.pop()
        entries = _entries(current, current == folder, skipped)
        if {entry.name for entry in entries} >= OWN_HEATMAPS:
            continue  # results that lie among the slides are none
        for entry in entries:
            after = pattern.step(state, entry.name)
            if entry.name.startswith(".") or not after:
                continue
            path = current / entry.name
            if entry.is_dir(follow_symlinks=False):
                if recursive:
                    todo.append((path, after))
            elif pattern.accepts(after):
                problem = _refusal(entry, path, boundary)
                if problem is None:
                    found.append((entry.is_symlink(), path.relative_to(folder).as_posix(), path))
                elif problem[0] != "vanished":
                    skipped.append(Skipped(path, *problem))
    return _without_aliases(found, folder), sorted(skipped, key=lambda item: item.path.as_posix())


def _entries(folder: Path, is_source: bool, skipped: list[Skipped]) -> list["os.DirEntry[str]"]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except FileNotFoundError:
        if is_source:
            raise SourceUnavailable("the source folder vanished while it was listed") from None
        return []  # a subfolder removed while we looked
    except OSError as error:
        # One forbidden subfolder (lost+found) must not hide the rest; a lost mount must not look like an empty one.
        if is_source or source_lost(error):
            raise SourceUnavailable(
                f"{'the source' if is_source else 'a'} folder cannot be read ({error.strerror}):"
                " check the mount and the permissions"
            ) from None
        skipped.append(Skipped(folder, "unreadable_folder", f"the folder cannot be read: {error.strerror}"))
        return []


def _refusal(entry: "os.DirEntry[str]", path: Path, boundary: Path) -> tuple[str, str] | None:
    """Code and reason why an entry that is no folder is left out."""
    if entry.is_file(follow_symlinks=False):
        return None
    kind = kind_of(path)
    if entry.is_symlink():
        if kind == "missing":
            return ("broken_link", "a link whose target does not exist")
        if kind == "folder":
            return ("linked_folder", "a link to a folder; name that folder as a source of its own")
        if not is_inside(path, boundary):
            return ("outside_root", "a link that leaves the root; name its target, or give a root that holds both")
    if kind == "missing":
        return ("vanished", "")
    return None if kind in ("file", "denied") else ("not_regular", "not a regular file (FIFO, socket or device)")


def _without_aliases(found: list[tuple[bool, str, Path]], folder: Path) -> list[Path]:
    """One path per file, sorted; linked folders are not entered, so only links can be aliases."""
    real_folder = resolved(folder)
    kept: dict[str, tuple[str, Path]] = {}
    for is_link, relpath, path in sorted(found):
        kept.setdefault(resolved(path) if is_link else f"{real_folder}/{relpath}", (relpath, path))
    return [path for _, path in sorted(kept.values())]
