"""Identity of a slide's content: what decides whether a stored result still belongs to the slide."""

import errno
import hashlib
import os
import re
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from inference.errors import SlideChanged, SourceUnavailable, StoreError, UnreadableSlide
from inference.slides._files import kind_of, open_regular, source_lost
from inference.slides._remote import RemoteFile
from inference.slides.discovery import SlideRef

Method = Literal["sampled", "full"]

# The sampled hash of one file: both ends, where headers and TIFF directories lie, and blocks spread evenly between.
# A file no larger than all samples together is read whole.
EDGE_BYTES = 64 << 10
SPREAD_BLOCKS = 64
BLOCK_BYTES = 4 << 10
WHOLE_BYTES = 2 * EDGE_BYTES + SPREAD_BLOCKS * BLOCK_BYTES
_CHUNK_BYTES = 1 << 20
_SHA256 = re.compile(r"[0-9a-f]{64}")
_DAMAGED = "a stored slide identity is damaged; delete that result to compute it again"


@dataclass(frozen=True)
class FileStamp:
    """Size and modification time of one file of a slide.

    Attributes:
        name: posix path relative to the main file's folder; '' in a record that hides names.
        version: what an object store calls the content, such as its ETag; None for local files.
    """

    name: str
    size: int
    mtime_ns: int
    version: str | None = None


@dataclass(frozen=True)
class SlideIdentity:
    """Content of a slide at one moment.

    Attributes:
        files: in the order of `SlideRef.files`.
        quickhash: OpenSlide's; it does not see level 0, so it never stands alone.
        sampled_sha256: over every file's size and bytes, sampled or, with method `full`, all of them; no names.
    """

    files: tuple[FileStamp, ...]
    quickhash: str | None
    sampled_sha256: str
    method: Method = "sampled"

    def to_json(self, *, hidden: bool = False) -> dict[str, object]:
        """Plain JSON values; with `hidden`, files are known by their position alone."""
        files: list[dict[str, object]] = []
        for file in self.files:
            named: dict[str, object] = {} if hidden or not file.name else {"name": file.name}
            told: dict[str, object] = {} if file.version is None else {"version": file.version}
            files.append(named | {"size": file.size, "mtime_ns": file.mtime_ns} | told)
        return {
            "files": files,
            "quickhash": self.quickhash,
            "sampled_sha256": self.sampled_sha256,
            "method": self.method,
        }

    @classmethod
    def from_json(cls, data: object) -> "SlideIdentity":
        """The identity that `to_json` wrote.

        Raises:
            StoreError: a field is missing, unknown or of another type.
        """
        match data:
            case {
                "files": [_, *_] as files,
                "quickhash": None | str() as quickhash,
                "sampled_sha256": str() as digest,
                "method": "sampled" | "full" as method,
                **rest,
            } if not rest and _SHA256.fullmatch(digest):
                stamps = tuple(_stamp_from_json(file) for file in files)
                if len({file.name == "" for file in stamps}) == 1:
                    return cls(stamps, quickhash, digest, method)
        raise StoreError(_DAMAGED)


def stamp(ref: SlideRef) -> tuple[FileStamp, ...]:
    """Size and mtime of every file of a slide, without opening one; of objects not fetched, as their store told them.

    Raises:
        UnreadableSlide: a file is gone or is not a regular file.
        SourceUnavailable: the mount is lost.
    """
    stamps = []
    for index, path in enumerate(ref.files):
        with _blaming(ref, index):
            if ref.remote and not path.exists():
                stamps.append(_remote_stamp(ref.remote[index]))
            else:
                stamps.append(_stamp(ref, index, path.stat()))
    return tuple(stamps)


def slide_identity(ref: SlideRef, quickhash: str | None, *, method: Method = "sampled") -> SlideIdentity:
    """Identity of a slide as it is now: reads up to 384 KiB of each file, or all of it with method `full`.

    Raises:
        UnreadableSlide: a file is gone, forbidden or not a regular file.
        SlideChanged: a file changed while it was read.
        SourceUnavailable: the mount is lost.
    """
    stamps = []
    total = hashlib.sha256(b"slide-identity-1 " + method.encode())
    for index, path in enumerate(ref.files):
        with _blaming(ref, index), open_regular(path) as file:
            before = os.fstat(file.fileno())
            digest = _digest(file, before.st_size, method)
            after = os.fstat(file.fileno())
        if digest is None or (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
            raise SlideChanged(f"{ref.name}: changed while it was read; try again when it is complete", slide=ref.key)
        stamps.append(_stamp(ref, index, before))
        total.update(before.st_size.to_bytes(8, "little") + digest)
    return SlideIdentity(tuple(stamps), quickhash, total.hexdigest(), method)


def same_content(recorded: SlideIdentity, ref: SlideRef, quickhash: str | None) -> bool:
    """Whether a slide is still what `recorded` describes; reads pixels only where nothing but an mtime differs.

    `quickhash` may be None while the slide is not open: stamps then decide, and a touched file counts as changed if a
    quickhash was recorded, because the samples miss a small edit (a resolution tag) that the quickhash sees.

    Raises:
        UnreadableSlide, SlideChanged, SourceUnavailable: as `stamp` and `slide_identity`.
    """
    if None not in (recorded.quickhash, quickhash) and recorded.quickhash != quickhash:
        return False
    now = stamp(ref)
    if not _same_shape(recorded, now):
        return False
    if unchanged(recorded, now):
        return True
    if recorded.quickhash is not None and quickhash is None and recorded.method == "sampled":
        return False
    return slide_identity(ref, quickhash, method=recorded.method).sampled_sha256 == recorded.sampled_sha256


def unchanged(recorded: SlideIdentity, now: Sequence[FileStamp]) -> bool:
    """Whether stamps alone say that these are the files recorded."""
    return _same_shape(recorded, now) and all(map(_untouched, recorded.files, now))


def _same_shape(recorded: SlideIdentity, now: Sequence[FileStamp]) -> bool:
    """Whether there are as many files of the same sizes and, where both are known, names."""
    return [file.size for file in recorded.files] == [file.size for file in now] and not any(
        old.name and old.name != new.name for old, new in zip(recorded.files, now, strict=True)
    )


def _untouched(old: FileStamp, new: FileStamp) -> bool:
    """Of two stamps of the same size: a store's own version decides where both have one, else the time."""
    if old.version is not None and new.version is not None:
        return old.version == new.version
    return old.mtime_ns == new.mtime_ns


def _remote_stamp(file: RemoteFile) -> FileStamp:
    return FileStamp(file.name, file.size, file.mtime_ns, file.version)


def _stamp(ref: SlideRef, index: int, status: os.stat_result) -> FileStamp:
    if not stat.S_ISREG(status.st_mode):
        raise OSError(errno.EINVAL, "not a regular file")
    if ref.remote:
        return FileStamp(ref.remote[index].name, status.st_size, status.st_mtime_ns, ref.remote[index].version)
    name = Path(os.path.relpath(ref.files[index], ref.path.parent)).as_posix()
    return FileStamp(name, status.st_size, status.st_mtime_ns)


def _stamp_from_json(data: object) -> FileStamp:
    match data:
        case {"size": int(size), "mtime_ns": int(mtime_ns), **rest} if size >= 0 and rest.keys() <= {"name", "version"}:
            name, version = rest.get("name", ""), rest.get("version")
            booleans = isinstance(size, bool) or isinstance(mtime_ns, bool)
            if booleans or not isinstance(name, str) or not isinstance(version, str | None):
                raise StoreError(_DAMAGED)
            if (name or "name" not in rest) and (version is not None or "version" not in rest):
                return FileStamp(name, size, mtime_ns, version)
    raise StoreError(_DAMAGED)


def _digest(file: BinaryIO, size: int, method: Method) -> bytes | None:
    """SHA-256 of one file's samples or of all of it; None where it is shorter than it was."""
    if method == "full" or size <= WHOLE_BYTES:
        pieces = [(offset, min(_CHUNK_BYTES, size - offset)) for offset in range(0, size, _CHUNK_BYTES)]
    else:
        span = size - 2 * EDGE_BYTES - BLOCK_BYTES
        pieces = [(0, EDGE_BYTES), (size - EDGE_BYTES, EDGE_BYTES)]
        pieces += [(EDGE_BYTES + span * k // (SPREAD_BLOCKS - 1), BLOCK_BYTES) for k in range(SPREAD_BLOCKS)]
    digest = hashlib.sha256()
    for offset, length in pieces:
        while length > 0:
            data = os.pread(file.fileno(), length, offset)
            if not data:
                return None
            digest.update(data)
            offset, length = offset + len(data), length - len(data)
    return digest.digest()


@contextmanager
def _blaming(ref: SlideRef, index: int) -> Iterator[None]:
    """Turn an error of one file into the slide's error, or the source's; no companion's name is told."""
    try:
        yield
    except OSError as error:
        which = ref.name if index == 0 else f"{ref.name}, file {index + 1} of {len(ref.files)}"
        if source_lost(error) or kind_of(ref.root) != "folder":
            raise SourceUnavailable(
                f"{which}: the slide source cannot be reached ({error.strerror}): check that it is "
                "mounted, then run again"
            ) from None
        missing = isinstance(error, FileNotFoundError | NotADirectoryError)
        reason = "the file does not exist: deleted, moved or misspelt" if missing else error.strerror
        raise UnreadableSlide(f"{which}: {reason}", slide=ref.key) from None
