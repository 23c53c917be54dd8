"""A folder of results: `<stage>/<name>@<digest>/<slide key>/`, each with one manifest, whose presence means done."""

import contextlib
import errno
import fcntl
import json
import os
import shutil
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from pydantic import BaseModel, ConfigDict, JsonValue

from inference.errors import PartitionBusy, StoreError
from inference.store.files import (
    publish_folder,
    remove_tree,
    retired_path,
    store_errors,
    sync_file,
    sync_folder,
    write_atomic,
)
from inference.store.manifest import DAMAGED, MANIFEST, Manifest, read_manifest, recipe_digest, record_files

STAGES = ("info", "tiles", "predict", "slide", "heatmap")
WORK_SUFFIX = ".work"
"""No slide key ends with it."""
LOCKS, FAILURES, PROBE = ".locks", ".failures", ".probe-"
SWEEP_AFTER_S = 86_400.0
"""Age from which a scratch file has no living writer."""


@dataclass(frozen=True)
class Address:
    """Where a result lies: its stage, its name within the stage, its recipe, its slide."""

    stage: str
    name: str
    recipe: dict[str, JsonValue]
    key: str

    @property
    def digest(self) -> str:
        return recipe_digest(self.recipe)

    @property
    def folder(self) -> str:
        """Relative to the store."""
        return f"{self.stage}/{self.name}@{self.digest[:12]}/{self.key}"


class FailureRecord(BaseModel):
    """The last failure of a slide: enough to decide whether to try again."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    slide_key: str
    code: str
    message: str
    retryable: bool
    stage: str
    attempts: int = 1
    tiles: tuple[tuple[str, int, str], ...] = ()
    at: float = 0.0


class Store:
    """Results on a POSIX file system. Opening one creates the folder and probes that it can do what is needed."""

    def __init__(self, root: Path | str) -> None:
        self.root = Path(root).absolute()
        with store_errors(self.root):
            self.root.mkdir(parents=True, exist_ok=True)
            _probe(self.root)
        _sweep(self.root)

    def path(self, address: Address) -> Path:
        """Folder of a result, there or not."""
        return self.root / address.folder

    def read(self, address: Address) -> Manifest | None:
        """The manifest of a result, or None. Whether it fits the slide as it is now is the caller's to compare."""
        return read_manifest(self.path(address))

    @contextmanager
    def lock(self, address: Address, wait_s: float = 0.0) -> Iterator[None]:
        """Hold a slide's result against other processes and threads; the lock dies with its process.

        Raises:
            PartitionBusy: another one holds it still after `wait_s`.
        """
        name = f"{address.key}.{address.stage}.{address.digest[:12]}"
        with self.lock_file(name, f"{address.key}: {address.stage}/{address.name}", wait_s):
            yield

    @contextmanager
    def lock_file(self, name: str, what: str, wait_s: float = 0.0) -> Iterator[None]:
        """As `lock`, for anything of the store that has a name; `what` is what messages call it."""
        path = self.root / LOCKS / name
        with store_errors(path):
            path.parent.mkdir(exist_ok=True)
        with _acquire(path, wait_s, what) as stream:
            try:
                # Who holds it is for people to read; the lock itself is the kernel's.
                owner = {"host": socket.gethostname(), "pid": os.getpid(), "since": time.time()}
                with store_errors(path):
                    stream.truncate(0)
                    stream.write(json.dumps(owner).encode())
                yield
            finally:
                # Before it is let go: whoever waits for this file sees that it is gone and takes the next one.
                with contextlib.suppress(OSError):
                    path.unlink()

    @contextmanager
    def work(self, address: Address) -> Iterator[Path]:
        """An empty folder beside a result to write it in; removed if left unpublished. The caller holds the lock."""
        final = self.path(address)
        work = final.with_name(f"{final.name}{WORK_SUFFIX}")
        try:
            with store_errors(work):
                # Of an owner that died: live ones hold the lock.
                remove_tree(work)
                remove_tree(retired_path(final))
                work.mkdir(parents=True)
            yield work
        finally:
            try:
                # At best: an error here must not hide the one that ended the work, and the next owner clears up anyway.
                shutil.rmtree(work, ignore_errors=True)
            except KeyboardInterrupt:
                shutil.rmtree(work, ignore_errors=True)
                raise

    def publish(self, address: Address, work: Path, manifest: Manifest) -> Manifest:
        """Commit a work folder: record and flush its files, write the manifest last, give it its final name."""
        with store_errors(work):
            complete = manifest.model_copy(update={"files": record_files(work)})
            for record in complete.files:
                sync_file(work / record.name)
            write_atomic(work / MANIFEST, complete.to_json().encode())
        publish_folder(work, self.path(address))
        return complete

    def withdraw(self, address: Address, manifest: Manifest, wait_s: float = 0.0) -> None:
        """Make a result count as absent, since its bytes are not those of this manifest.

        Raises:
            PartitionBusy: another process is writing it.
        """
        with self.lock(address, wait_s):
            if self.read(address) == manifest:  # else someone has written it anew
                folder = self.path(address)
                with store_errors(folder):
                    (folder / MANIFEST).replace(folder / DAMAGED)
                    sync_folder(folder)

    def results_of(self, key: str) -> Iterator[Manifest]:
        """Every readable manifest of one slide."""
        for stage in STAGES:
            for path in sorted((self.root / stage).glob(f"*@*/{key}/{MANIFEST}")):
                with contextlib.suppress(StoreError):
                    if manifest := read_manifest(path.parent):
                        yield manifest

    def results(self) -> Iterator[tuple[Path, Manifest]]:
        """Every finished result, in path order.

        Raises:
            DamagedResult, StoreError: as `read_manifest`.
        """
        for stage in STAGES:
            for path in sorted((self.root / stage).glob(f"*@*/*/{MANIFEST}")):
                unfinished = path.parent.name.endswith(WORK_SUFFIX) or path.parent.name.startswith(".")
                if not unfinished and (manifest := read_manifest(path.parent)):
                    yield path.parent, manifest

    # The last failure of each slide.

    def record_failure(self, failure: FailureRecord) -> None:
        """Remember why a slide failed, counting attempts of the same kind."""
        before = self.failure(failure.slide_key)
        attempts = before.attempts + 1 if before and before.code == failure.code else 1
        record = failure.model_copy(update={"attempts": attempts, "at": time.time()})
        path = self._failure_path(failure.slide_key)
        with store_errors(path):
            path.parent.mkdir(exist_ok=True)
        write_atomic(path, (record.model_dump_json(indent=1) + "\n").encode())

    def failure(self, key: str) -> FailureRecord | None:
        """The last failure of a slide, or None where its last run went well."""
        with contextlib.suppress(OSError, ValueError):
            return FailureRecord.model_validate_json(self._failure_path(key).read_text(encoding="utf-8"))
        return None

    def clear_failure(self, key: str) -> None:
        """Forget a failure: the slide went well since."""
        path = self._failure_path(key)
        with store_errors(path):
            path.unlink(missing_ok=True)

    def _failure_path(self, key: str) -> Path:
        return self.root / FAILURES / f"{key}.json"


@contextmanager
def _acquire(path: Path, wait_s: float, what: str) -> Iterator[FileIO]:
    """The lock file, opened and held. A holder removes it when done, so a name may change its file meanwhile."""
    deadline = time.monotonic() + wait_s
    while True:
        with store_errors(path):
            stream = path.open("ab+", buffering=0)  # what a buffer could not write, its close would try again
        with stream:
            if _try_lock(stream):
                if _is_still(path, stream):
                    yield stream
                    return
                continue
        if time.monotonic() >= deadline:
            raise PartitionBusy(f"{what} is being written by {_owner(path)}; try again later")
        time.sleep(min(0.2, max(0.01, deadline - time.monotonic())))


def _try_lock(stream: FileIO) -> bool:
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EAGAIN, errno.EACCES):
            raise StoreError(f"the store cannot lock files ({error.strerror}): use a POSIX file system") from error
        return False
    return True


def _is_still(path: Path, stream: FileIO) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return os.path.samestat(path.stat(), os.fstat(stream.fileno()))
    return False


def _owner(path: Path) -> str:
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        owner = json.loads(path.read_text(encoding="utf-8"))
        return f"process {owner['pid']} on {owner['host']}"
    return "another process"


def _probe(root: Path) -> None:
    """Refuse at the start a store that cannot lock or rename, rather than after an hour of computing."""
    probe = root / f"{PROBE}{os.getpid()}-{time.monotonic_ns()}"
    renamed = probe.with_suffix(".renamed")
    try:
        with probe.open("wb", buffering=0) as stream:
            _try_lock(stream)
        probe.rename(renamed)
    finally:
        probe.unlink(missing_ok=True)
        renamed.unlink(missing_ok=True)


def _sweep(root: Path) -> None:
    """Remove what writers that were killed left behind long ago; results' own leftovers go with their next owner."""
    now = time.time()
    for folder in (root, root / FAILURES):
        with contextlib.suppress(OSError):
            for path in folder.iterdir():
                scratch = path.name.startswith(PROBE) or (path.name.startswith(".") and path.suffix == ".tmp")
                if scratch and path.is_file() and now - path.stat().st_mtime > SWEEP_AFTER_S:
                    path.unlink(missing_ok=True)
