"""Checkpoints by what they contain: made once, all of their files or none, and reused while they verify."""

import fcntl
import hashlib
import logging
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, JsonValue

from inference.errors import ArtifactRefused, ConfigError
from inference.models.artifact import Format, Pin, manifest_path, read_manifest
from inference.models.runtime import gpu_architecture
from inference.models.spec import ModelSpec
from inference.models.verification import cpu_features, verify_artifact
from inference.store.files import canonical_json, is_disk_full

log = logging.getLogger(__name__)

EXPORT_VERSION = 4
"""Raised when the way of exporting changes, so that cached checkpoints are made anew."""

M = TypeVar("M", bound=Pin)


def cached(checkpoint: Path, pinned: M, build: Callable[[Path], M]) -> Path:
    """A checkpoint that is there and verifies, else one that `build` writes: all of its files or none.

    Args:
        pinned: its manifest but for what only the finished files tell.
        build: writes the checkpoint to a path, other files beside it, and returns the whole manifest.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    if (found := _verified(checkpoint, pinned, logging.DEBUG)) and _specs_agree(found, pinned):
        return checkpoint  # without the lock, so that a cache which others filled may be read-only
    with _exclusive(checkpoint.parent, checkpoint.name):
        if found := _verified(checkpoint, pinned, logging.WARNING):
            if not _specs_agree(found, pinned):  # what is only drawn differently needs no new export
                _replace_manifest(checkpoint, found.model_copy(update={"spec": _spec_of(pinned)}))
            return checkpoint
        _build(checkpoint, build)
    return checkpoint


def place_of(folder: Path, model_name: str, kind: Format, identity: str, name: str | None = None) -> Path:
    """Where a checkpoint is kept: in a folder of its own if it has a name, else named after what it contains."""
    suffix = ".onnx" if kind == "onnx" else ".pt2"
    return folder / name / f"{name}{suffix}" if name else folder / f"{model_name}-{identity[:12]}{suffix}"


def environment(kind: Format, device: str) -> dict[str, Any]:
    """What of this machine decides whether an export runs elsewhere: fields of its manifest."""
    if kind == "onnx":
        return {"arch": platform.machine(), "producer": f"torch {version('torch')}"}
    found: dict[str, Any] = {"arch": platform.machine(), "torch_version": version("torch")}
    if kind == "aotinductor" and device == "cpu":
        found["cpu_features"] = cpu_features()
    if kind == "aotinductor" and device.startswith("cuda"):
        found["gpu"] = gpu_architecture(torch.device(device))
    return found


def with_identity(pinned: M) -> M:
    """With the digest of all that decides what the export contains."""
    left_out = {"schema_version", "file", "size", "sha256", "spec", "identity", "data_files", "golden"}
    left_out |= {"weights_file_sha256", "fallback"}  # the tensors count, not the file they came in
    decides = pinned.model_dump(mode="json", exclude=left_out)
    decides |= {"spec": _recipe(pinned), "export_version": EXPORT_VERSION}
    if getattr(_spec_of(pinned), "precision", "fp32") == "fp16":
        decides["fallback"] = "fp32"
    digest = hashlib.sha256(canonical_json(decides).encode()).hexdigest()
    return pinned.model_copy(update={"identity": digest})


def _build(checkpoint: Path, build: Callable[[Path], M]) -> None:
    """Write all files beside their final places, then give them their names: all or none."""
    folder, prefix = checkpoint.parent, f".{checkpoint.stem}-"
    for stale in folder.glob(f"{prefix}*/"):  # of an export that was killed: ours is the only one now
        shutil.rmtree(stale, ignore_errors=True)
    with _cache_errors(folder), tempfile.TemporaryDirectory(dir=folder, prefix=prefix) as scratch:
        built = Path(scratch) / checkpoint.name
        manifest = build(built)
        _write_manifest(built, manifest)
        manifest_path(checkpoint).unlink(missing_ok=True)  # never an old manifest beside a new file
        for pinned in manifest.side_files:
            built.with_name(pinned.file).replace(checkpoint.with_name(pinned.file))
        built.replace(checkpoint)
        manifest_path(built).replace(manifest_path(checkpoint))


def _spec_of(pinned: Pin) -> object:
    return getattr(pinned, "spec", None)


def _specs_agree(found: Pin, pinned: Pin) -> bool:
    return _spec_of(found) == _spec_of(pinned)


def _recipe(pinned: Pin) -> JsonValue:
    spec = _spec_of(pinned)
    if isinstance(spec, ModelSpec):
        return spec.recipe()
    assert isinstance(spec, BaseModel)
    return spec.model_dump(mode="json")


def _write_manifest(checkpoint: Path, manifest: Pin) -> None:
    manifest_path(checkpoint).write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")


def _replace_manifest(checkpoint: Path, manifest: Pin) -> None:
    with (
        _cache_errors(checkpoint.parent),
        tempfile.TemporaryDirectory(dir=checkpoint.parent, prefix=f".{checkpoint.stem}-") as scratch,
    ):
        written = Path(scratch) / checkpoint.name
        _write_manifest(written, manifest)
        manifest_path(written).replace(manifest_path(checkpoint))


def _verified(checkpoint: Path, pinned: M, level: int) -> M | None:
    """The manifest of a cached checkpoint that can be used as it is; says at this level why it cannot."""
    if not checkpoint.is_file() or not manifest_path(checkpoint).is_file():
        return None
    try:
        manifest = read_manifest(checkpoint, type(pinned))
        verify_artifact(checkpoint, manifest, pinned.device)
    except ArtifactRefused as error:
        log.log(level, "%s is exported anew: %s", checkpoint.name, error)
        return None
    return manifest if manifest.identity == pinned.identity else None


@contextmanager
def _exclusive(folder: Path, name: str) -> Iterator[None]:
    """One exporter at a time; the lock goes with its process."""
    with _cache_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        stream = (folder / f".{name}.lock").open("w")
    with stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


@contextmanager
def _cache_errors(folder: Path) -> Iterator[None]:
    """Turn what the system says of the cache folder into bad configuration with the remedy."""
    try:
        yield
    except OSError as error:
        need = "with room" if is_disk_full(error) else "to write to"
        raise ConfigError(
            f"models cannot be exported to {folder}: {error.strerror}; set SLIDE_MODEL_CACHE to a folder {need}"
        ) from None
