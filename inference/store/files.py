"""Files that are either whole or absent."""

import contextlib
import ctypes
import errno
import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from inference.errors import StoreError, StoreFull

_RENAME_EXCHANGE = 2
_AT_FDCWD = -100
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})


def write_atomic(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write beside, flush to disk, rename; readers see the old file or the new one."""
    with store_errors(path):
        descriptor, scratch = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name[:40]}.", suffix=".tmp")
        try:
            with os.fdopen(descriptor, "wb") as stream:
                stream.write(data)
                stream.flush()
                os.fsync(stream.fileno())
            Path(scratch).chmod(mode)
            Path(scratch).replace(path)
        except BaseException:
            Path(scratch).unlink(missing_ok=True)
            raise
        sync_folder(path.parent)


def canonical_json(value: object) -> str:
    """One text per value: sorted keys, no blanks, no NaN."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False, ensure_ascii=False)


def sync_file(path: Path) -> None:
    """Flush a closed file to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


sync_folder = sync_file
"""A folder's entries are flushed the same way as a file's bytes."""


def publish_folder(work: Path, final: Path) -> None:
    """Give a finished work folder its final name, replacing an older result in one step where the system can.

    Once it has its name, what is left of the older one may stay behind: `Store.work` removes it.
    """
    retired = retired_path(final)
    with store_errors(final):
        sync_folder(work)
        if not final.exists():
            work.rename(final)
        elif not _exchange(work, final):
            # Without an exchange there is a moment with no result, never one with half a result.
            remove_tree(retired)
            final.rename(retired)
            try:
                work.rename(final)
            except BaseException:
                retired.rename(final)
                raise
        sync_folder(final.parent)
    for old in (work, retired):
        shutil.rmtree(old, ignore_errors=True)


def retired_path(final: Path) -> Path:
    """Where a result waits for its successor if they cannot be exchanged; no slide key begins with a dot."""
    return final.with_name(f".{final.name}.old")


def _exchange(a: Path, b: Path) -> bool:
    """Swap two folders atomically; False where the system or file system cannot."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except AttributeError:
        return False
    return bool(renameat2(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0)


@contextmanager
def store_errors(path: Path) -> Iterator[None]:
    """Turn the operating system's complaints about the store into typed errors with the remedy.

    Raises:
        StoreFull: no space, no inodes or over quota.
        StoreError: read-only, not permitted, or gone.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise StoreFull(
                f"the store is full at {path}: free space and run again; what is finished is kept"
            ) from error
        remedy = ": name a folder that this user may write to" if error.errno in _FORBIDDEN else ""
        raise StoreError(f"cannot write {path}: {error.strerror or error}{remedy}") from error


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """As `store_errors`, around code that reads other files too: only what cannot be their fault is translated."""
    try:
        yield
    except OSError as error:
        if error.errno not in {*_FULL, errno.EROFS}:
            raise
        with store_errors(path):
            raise


def is_disk_full(error: BaseException) -> bool:
    """Whether no space, no inodes or a quota lies behind an error, also where a compiler says so in words."""
    seen: BaseException | None = error
    while seen is not None:
        said = any(os.strerror(number) in str(seen) for number in (errno.ENOSPC, errno.EDQUOT))
        if said or (isinstance(seen, OSError) and seen.errno in _FULL):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def remove_tree(path: Path) -> None:
    """Delete a folder that may not be there."""
    with contextlib.suppress(FileNotFoundError):
        shutil.rmtree(path)
