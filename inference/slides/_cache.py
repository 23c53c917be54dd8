"""A bounded folder of fetched slides: each whole or absent, kept while in use; those unused longest go first."""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Self

from inference.errors import ConfigError, StoreError, StoreFull
from inference.store.files import remove_tree, store_errors, sync_folder

GB = 1_000_000_000
DEFAULT_GB = 50.0
WAIT_S = 600.0
"""How long to wait for slides in use to end before giving up on room for another."""
_POLL_S = 0.2
_MISPLACED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EEXIST})
_ENTRY = re.compile(r"([0-9a-f]{32})\.lock")


def cache_folder() -> Path:
    """Where fetched slides lie: `SLIDE_CACHE`, else `~/.cache/slide-inference/slides`."""
    told = os.environ.get("SLIDE_CACHE")
    return Path(told).absolute() if told else Path.home() / ".cache" / "slide-inference" / "slides"


def cache_bytes() -> int:
    """The most that fetched slides may take: `SLIDE_CACHE_GB`, else 50 GB (of 10^9 bytes).

    Raises:
        ConfigError: not a number above 0.
    """
    told = os.environ.get("SLIDE_CACHE_GB")
    try:
        limit = float(told) if told else DEFAULT_GB
    except ValueError:
        limit = 0.0
    if not 0 < limit < 1e9:  # NaN: neither
        raise ConfigError(f"SLIDE_CACHE_GB is {told!r}: give a number of gigabytes above 0")
    return int(limit * GB)


class Pin:
    """Keeps one entry from being evicted until it is closed; the kernel lets go when the process ends."""

    def __init__(self, folder: Path, lock: FileIO) -> None:
        self.folder, self._lock = folder, lock

    def close(self) -> None:
        """Let the entry go; idempotent."""
        if not self._lock.closed:
            with contextlib.suppress(OSError):
                os.utime(self._lock.fileno())  # used until now
            self._lock.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class SlideCache:
    """Entries are folders `<32 hex digits>`, each with a lock file that outlives neither it nor its fetching.

    The lock is shared by users of the entry and exclusive to whoever fetches or evicts it; it holds the entry's size,
    and its time is that of the last use. `lock` is held while sizes are added up. It is taken only by a holder of one
    entry's lock who never waits for another entry's, so nothing can wait in a circle.
    """

    def __init__(self, folder: Path | None = None, limit: int | None = None, *, wait_s: float = WAIT_S) -> None:
        self.folder = folder or cache_folder()
        self.limit = cache_bytes() if limit is None else limit
        self.wait_s = wait_s

    def pin(
        self, entry: str, size: int, whole: Callable[[Path], bool], fetch: Callable[[Path], None], name: str
    ) -> Pin:
        """The entry, fetched if it is not there, and kept until the pin is closed.

        Args:
            whole: whether a folder holds the entry as it should be.
            fetch: fills an empty folder.
            name: what messages call the slide.

        Raises:
            ConfigError: the slide is larger than the cache may be, or the cache cannot be written.
            StoreFull: no room, also after waiting.
        """
        final = self.folder / entry
        with _cache_errors():
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        while True:
            with _cache_errors():
                lock = self._path(entry).open("ab+", buffering=0)
            try:
                fcntl.flock(lock, fcntl.LOCK_SH)
                if not _is_still(self._path(entry), lock):
                    lock.close()
                    continue
                if final.is_dir() and whole(final):
                    os.utime(lock.fileno())
                    return Pin(final, lock)
                # Not atomic: others may come between, hence another look. Whoever fetched meanwhile did it for all.
                fcntl.flock(lock, fcntl.LOCK_EX)
                if _is_still(self._path(entry), lock) and not (final.is_dir() and whole(final)):
                    self._fetch(entry, lock, size, fetch, name)
            except OSError as error:
                lock.close()
                raise StoreError(f"the slide cache cannot be used ({error.strerror}): see SLIDE_CACHE") from error
            except BaseException:
                lock.close()
                raise
            lock.close()

    def _fetch(self, entry: str, lock: FileIO, size: int, fetch: Callable[[Path], None], name: str) -> None:
        """Fill the entry; the caller holds its lock alone."""
        final, part = self.folder / entry, self.folder / f"{entry}.part"
        try:
            self._discard(entry)  # what was left by a fetch that died, or damaged since
            self._reserve(entry, lock, size, name)
            with _cache_errors():
                part.mkdir(mode=0o700)
                fetch(part)
                for folder, _, _ in os.walk(part):
                    sync_folder(Path(folder))
                part.rename(final)
                sync_folder(self.folder)
        except BaseException:
            with contextlib.suppress(OSError):
                self._discard(entry)
                self._path(entry).unlink()
            raise

    def _reserve(self, entry: str, lock: FileIO, size: int, name: str) -> None:
        """Evict what was unused longest until there is room, and note the size, so that others leave it free."""
        if size > self.limit:
            raise ConfigError(
                f"{name}: the slide has {size / GB:.3g} GB, more than all fetched slides may take "
                f"({self.limit / GB:.3g} GB): raise SLIDE_CACHE_GB"
            )
        deadline = time.monotonic() + self.wait_s
        while True:
            with self._counting():
                if self._evict_until(entry, size):
                    lock.truncate(0)
                    lock.write(b"%d" % size)
                    return
            if time.monotonic() >= deadline:
                raise StoreFull(
                    f"{name}: no room to fetch the slide ({size / GB:.3g} GB): the slide cache is full of slides in "
                    "use, or its disk is; raise SLIDE_CACHE_GB, free space, or name another disk with SLIDE_CACHE"
                )
            time.sleep(_POLL_S)

    def _evict_until(self, entry: str, size: int) -> bool:
        others = sorted(self._used(entry))
        excess = sum(taken for _, taken, _ in others) + size - self.limit
        for _, taken, other in others:
            if excess <= 0 and size <= shutil.disk_usage(self.folder).free:
                break
            if self._evict(other):
                excess -= taken
        return excess <= 0 and size <= shutil.disk_usage(self.folder).free

    def _used(self, entry: str) -> Iterator[tuple[float, int, str]]:
        """Last use, bytes and name of every other entry, those being fetched included."""
        for path in self.folder.iterdir():
            if (found := _ENTRY.fullmatch(path.name)) and found[1] != entry:
                with contextlib.suppress(FileNotFoundError):
                    told = path.read_bytes()
                    yield path.stat().st_mtime, int(told) if told.isdigit() else 0, found[1]

    def _evict(self, entry: str) -> bool:
        """Delete an entry unless it is in use."""
        path = self._path(entry)
        try:
            with path.open("rb", buffering=0) as lock:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not _is_still(path, lock):
                    return False
                self._discard(entry)
                path.unlink()  # under its lock: whoever waits for it sees that it is gone
                return True
        except (FileNotFoundError, BlockingIOError):  # evicted by another process, or in use
            return False

    def _discard(self, entry: str) -> None:
        final, part = self.folder / entry, self.folder / f"{entry}.part"
        remove_tree(part)
        if final.exists():
            final.rename(part)  # half deleted, it must not look whole
            remove_tree(part)

    @contextmanager
    def _counting(self) -> Iterator[None]:
        with _cache_errors(), (self.folder / "lock").open("ab", buffering=0) as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _path(self, entry: str) -> Path:
        return self.folder / f"{entry}.lock"


def _is_still(path: Path, lock: FileIO) -> bool:
    """Whether the file that is locked still has its name: evicting an entry removes it."""
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(lock.fileno()))
    return False


@contextmanager
def _cache_errors() -> Iterator[None]:
    """The operating system's complaints about the cache, with the remedy.

    Raises:
        StoreFull: its disk is full.
        ConfigError: it cannot be written.
    """
    try:
        with store_errors(Path("the slide cache")):
            yield
    except StoreFull:
        raise StoreFull(
            "the disk of the slide cache is full: free space, or name another disk with SLIDE_CACHE"
        ) from None
    except StoreError as error:
        cause = error.__cause__
        if not isinstance(cause, OSError):
            raise
        text = f"the slide cache cannot be written ({cause.strerror}): name another folder with SLIDE_CACHE"
        raise (ConfigError if cause.errno in _MISPLACED else StoreError)(text) from None
