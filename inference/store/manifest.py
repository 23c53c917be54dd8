"""The record beside every result: what made it, from what, and which bytes it is."""

import errno
import hashlib
import json
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError

from inference.errors import DamagedResult, StoreError
from inference.store.files import canonical_json

SCHEMA_VERSION = 1
MANIFEST = "manifest.json"

_THIS_FILE_ALONE = frozenset({errno.EACCES, errno.EPERM, errno.EISDIR, errno.ELOOP, errno.EIO})
DAMAGED = "manifest.damaged.json"
"""The manifest of a result that was found damaged: kept to look at, until the result is computed again."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class FileRecord(_Record):
    """One file of a result."""

    name: str
    size: int
    sha256: str


class Counts(_Record):
    """Tiles of a result: in the grid, planned, computed, failed."""

    grid: int = 0
    planned: int = 0
    ok: int = 0
    failed: int = 0

    @property
    def skipped(self) -> int:
        """Grid tiles that were not planned."""
        return self.grid - self.planned


class Manifest(_Record):
    """A finished result. Only `run` may differ between two runs of one recipe on one slide.

    Attributes:
        recipe: what defines the numbers; its digest is part of the path.
        execution: what can move the last bits.
        identity: content of the slide's files.
        inputs: what was said of the slide from outside: µm/px used and its source, upsampling.
        status: `ok`, `ok with failures`, or `empty` (nothing to compute, with the reason).
        summary: the result's own figures.
        run: host, times and stage timings.
    """

    schema_version: int = SCHEMA_VERSION
    stage: str
    name: str
    slide_key: str
    recipe: dict[str, JsonValue]
    recipe_digest: str
    execution: dict[str, JsonValue] = Field(default_factory=dict)
    identity: dict[str, JsonValue]
    inputs: dict[str, JsonValue]
    status: Literal["ok", "ok with failures", "empty"]
    reason: str | None = None
    counts: Counts = Counts()
    summary: dict[str, JsonValue] = Field(default_factory=dict)
    files: tuple[FileRecord, ...] = ()
    run: dict[str, JsonValue] = Field(default_factory=dict)

    def to_json(self) -> str:
        return self.model_dump_json(indent=1) + "\n"


def read_manifest(folder: Path) -> Manifest | None:
    """The manifest of a result folder, or None where there is none.

    Raises:
        DamagedResult: it is not a manifest, or this one file cannot be read.
        StoreError: it was written by a newer version of this library, or the store is out of reach.
    """
    path = folder / MANIFEST
    try:
        data = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        if error.errno in _THIS_FILE_ALONE:
            text = f"{path} cannot be read: {error.strerror}; delete its folder to compute it again"
            raise DamagedResult(text) from error
        text = f"cannot read {path}: {error.strerror}; check that the store's disk or share is there"
        raise StoreError(text) from error
    # Before anything else: a newer manifest has fields that look like damage from here.
    found = _schema_version(data)
    if found is not None and found > SCHEMA_VERSION:
        raise StoreError(f"{path} has schema {found}, this version reads up to {SCHEMA_VERSION}: upgrade")
    try:
        return Manifest.model_validate_json(data)
    except ValidationError as error:
        problem = error.errors()[0]["msg"]
        raise DamagedResult(f"{path} cannot be read: {problem}; delete its folder to compute it again") from None


def _schema_version(data: bytes) -> int | None:
    try:
        found = json.loads(data)["schema_version"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return found if isinstance(found, int) else None


def recipe_digest(recipe: dict[str, JsonValue]) -> str:
    """SHA-256 of a recipe's canonical JSON; its first 12 digits name the folder."""
    return hashlib.sha256(canonical_json(recipe).encode()).hexdigest()


def damage(folder: Path, manifest: Manifest) -> str | None:
    """What is wrong with the files of a result, or None where every byte is as it was written. Reads them all."""
    for record in manifest.files:
        path = folder / record.name
        try:
            if path.stat().st_size != record.size:
                return f"{record.name} has not its recorded size"
            if _sha256(path) != record.sha256:
                return f"{record.name} is not what was written"
        except OSError as error:
            return f"{record.name} cannot be read ({error.strerror})"
    return None


def record_files(folder: Path) -> tuple[FileRecord, ...]:
    """Size and digest of every file of a result, by name."""
    paths = sorted(path for path in folder.iterdir() if path.name != MANIFEST)
    return tuple(FileRecord(name=path.name, size=path.stat().st_size, sha256=_sha256(path)) for path in paths)


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
