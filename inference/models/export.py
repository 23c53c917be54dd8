"""Turns a torch module into a pinned checkpoint, once per (weights, spec, code, torch, processor)."""

import fcntl
import hashlib
import io
import logging
import os
import platform
import shlex
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from inference.errors import ArtifactRefused, ConfigError
from inference.models import _torch_noise as _torch_noise  # before the compiler is first imported
from inference.models.artifact import (
    MAX_BATCH,
    ArtifactManifest,
    Format,
    cpu_features,
    hash_regular_file,
    load_manifest,
    manifest_path,
    scratch_folder,
    verify_artifact,
)
from inference.models.spec import ModelSpec
from inference.store.files import canonical_json, is_disk_full

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

log = logging.getLogger(__name__)

EXPORT_VERSION = 2
"""Raised when the way of exporting changes, so that cached checkpoints are made anew."""


def export_model(module: nn.Module, spec: ModelSpec, folder: Path, *, source_sha256: str) -> Path:
    """The checkpoint of a module, exported on first use and reused while it verifies.

    Args:
        module: uint8 (B, C, H, W), then the spec's extra inputs, or float32 (B, D) for a head -> the spec's outputs,
            each with B rows, normalisation included.
        spec: what the module implements.
        folder: where checkpoints are cached; created if absent.
        source_sha256: digest of the code that defines the module.

    Returns:
        Path of the `.pt2`; its manifest lies beside it.

    Raises:
        ConfigError: the folder cannot be written to, or the C++ compiler fails.
    """
    kind: Format = "aotinductor" if has_cpp_compiler() else "exported-program"
    pinned = ArtifactManifest(
        file="", size=0, sha256="0" * 64, format=kind, torch_version=version("torch"), arch=platform.machine(),
        cpu_features=cpu_features() if kind == "aotinductor" else (), device="cpu",
        weights_sha256=weights_sha256(module), source_sha256=source_sha256, spec=spec,
    )  # fmt: skip
    checkpoint = folder / f"{spec.model_name}-{_identity(pinned)[:12]}.pt2"
    pinned = pinned.model_copy(update={"file": checkpoint.name})
    if (cached := _verified(checkpoint, logging.DEBUG)) and cached.spec == spec:
        return checkpoint  # without the lock, so that a cache which others filled may be read-only
    with _exclusive(folder, checkpoint.name):
        if cached := _verified(checkpoint, logging.WARNING):
            if cached.spec != spec:  # what is only drawn differently needs no new export
                _replace_manifest(checkpoint, cached.model_copy(update={"spec": spec}))
            return checkpoint
        if kind == "exported-program":
            log.warning("no C++ compiler found: %s is exported as a portable program, slower to run", spec.model_name)
        _export(module.eval(), checkpoint, pinned)
    return checkpoint


def weights_sha256(module: nn.Module) -> str:
    """Digest of names, dtypes, shapes and bytes of a module's state."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        # As bytes: numpy has no bfloat16.
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


def has_cpp_compiler() -> bool:
    """Whether torch will find a C++ compiler here: `$CXX` if set, else g++ (clang++ on macOS)."""
    command = shlex.split(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++"))
    return bool(command) and shutil.which(command[0]) is not None


def _identity(pinned: ArtifactManifest) -> str:
    """Digest of all that decides what an export contains."""
    decides = pinned.model_dump(mode="json", exclude={"file", "size", "sha256", "spec"})
    decides |= {"spec": pinned.spec.recipe(), "export_version": EXPORT_VERSION}
    return hashlib.sha256(canonical_json(decides).encode()).hexdigest()


def _export(module: nn.Module, checkpoint: Path, pinned: ArtifactManifest) -> None:
    """Write checkpoint and manifest beside their final places, then give them their names: both or neither."""
    example = torch.zeros((2, *pinned.spec.input_shape), dtype=getattr(torch, pinned.spec.input_dtype))
    extras = [torch.zeros((2, *extra.shape)) for extra in pinned.spec.extra_inputs]
    batch = torch.export.Dim("batch", min=1, max=MAX_BATCH)
    prefix = f".{checkpoint.stem}-"
    for stale in checkpoint.parent.glob(f"{prefix}*/"):  # of an export that was killed: ours is the only one now
        shutil.rmtree(stale, ignore_errors=True)
    inputs = (example, *extras)
    program = torch.export.export(module, inputs, dynamic_shapes=tuple({0: batch} for _ in inputs))
    with _cache_errors(checkpoint.parent), tempfile.TemporaryDirectory(dir=checkpoint.parent, prefix=prefix) as scratch:
        built = Path(scratch) / checkpoint.name
        _write(program, built, pinned.format)
        size, digest = hash_regular_file(built)
        _write_manifest(built, pinned.model_copy(update={"size": size, "sha256": digest}))
        manifest_path(checkpoint).unlink(missing_ok=True)  # never an old manifest beside a new file
        built.replace(checkpoint)
        manifest_path(built).replace(manifest_path(checkpoint))


def _write(program: torch.export.ExportedProgram, path: Path, kind: Format) -> None:
    with _Archive(path) as archive:
        if kind == "exported-program":
            torch.export.save(program, archive)
        else:
            _compile(program, archive)
        if archive.error is not None:
            raise archive.error


def _compile(program: torch.export.ExportedProgram, archive: "_Archive") -> None:
    try:
        # torch reasons about batches of two and more, and would have the package refuse a batch of one.
        options = {"aot_inductor.check_lowerbound": False}
        torch._inductor.aoti_compile_and_package(program, package_path=archive, inductor_configs=options)
    except Exception as error:
        if is_disk_full(error):
            places = [Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR", scratch_folder())), scratch_folder()]
            place = min((p for p in places if p.exists()), key=lambda p: shutil.disk_usage(p).free)
            raise ConfigError(
                f"compiling failed: no space is left in {place}; free some, or point TMPDIR to a folder with room"
            ) from None
        reason = (str(error).splitlines() or [""])[0]
        raise ConfigError(
            f"compiling failed: {reason}; mend the C++ compiler, or set CXX to nothing for the slower portable form"
        ) from error


class _Archive(io.FileIO):
    """A new file whose writes never raise but keep their first error for later.

    torch finishes its archives in a C++ destructor: an exception there, and a full disk is one, ends the process.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(path, "x+")
        self.error: OSError | None = None

    def write(self, data: "ReadableBuffer") -> int:
        """Write all of it, or pretend to; always its length."""
        view = memoryview(data).cast("B")
        done = 0
        try:
            while self.error is None and done < len(view):
                done += super().write(view[done:])
        except OSError as error:
            self.error = error
        return len(view)


def _write_manifest(checkpoint: Path, manifest: ArtifactManifest) -> None:
    manifest_path(checkpoint).write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")


def _replace_manifest(checkpoint: Path, manifest: ArtifactManifest) -> None:
    with (
        _cache_errors(checkpoint.parent),
        tempfile.TemporaryDirectory(dir=checkpoint.parent, prefix=f".{checkpoint.stem}-") as scratch,
    ):
        written = Path(scratch) / checkpoint.name
        _write_manifest(written, manifest)
        manifest_path(written).replace(manifest_path(checkpoint))


def _verified(checkpoint: Path, level: int) -> ArtifactManifest | None:
    """The manifest of a cached checkpoint that can be used as it is; says at this level why it cannot."""
    if not checkpoint.is_file() or not manifest_path(checkpoint).is_file():
        return None
    try:
        manifest = load_manifest(checkpoint)
        verify_artifact(checkpoint, manifest, "cpu")
    except ArtifactRefused as error:
        log.log(level, "%s is exported anew: %s", checkpoint.name, error)
        return None
    return manifest


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
