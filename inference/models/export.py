"""Turns a torch module into a pinned checkpoint, once per (weights, spec, torch, architecture)."""

import fcntl
import hashlib
import logging
import os
import platform
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import torch
from torch import nn

from inference.errors import ArtifactRefused
from inference.models.artifact import (
    ArtifactManifest,
    Format,
    hash_regular_file,
    load_manifest,
    manifest_path,
    verify_artifact,
)
from inference.models.spec import ModelSpec
from inference.store.files import canonical_json

log = logging.getLogger(__name__)

MAX_BATCH = 4096
"""Upper bound of the dynamic batch axis."""


def export_model(module: nn.Module, spec: ModelSpec, folder: Path, *, source_sha256: str) -> Path:
    """The checkpoint of a module, exported on first use and reused while it verifies.

    Args:
        module: uint8 (B, C, H, W) -> the spec's outputs, each with B rows, normalisation included.
        spec: what the module implements.
        folder: where checkpoints are cached; created if absent.
        source_sha256: digest of the code that defines the module.

    Returns:
        Path of the `.pt2`; its manifest lies beside it.
    """
    weights = weights_sha256(module)
    kind: Format = "aotinductor" if has_cpp_compiler() else "exported-program"
    identity = (
        f"{weights}:{source_sha256}:{canonical_json(spec.recipe())}:{version('torch')}:{platform.machine()}:{kind}"
    )
    name = f"{spec.model_name}-{hashlib.sha256(identity.encode()).hexdigest()[:12]}.pt2"
    checkpoint = folder / name
    folder.mkdir(parents=True, exist_ok=True)
    with _exclusive(folder / f".{name}.lock"):
        if _verifies(checkpoint):
            return checkpoint
        if kind == "exported-program":
            log.warning("no C++ compiler found: %s is exported as a portable program, slower to run", spec.model_name)
        _export(module.eval(), spec, checkpoint, kind, weights, source_sha256)
    return checkpoint


def weights_sha256(module: nn.Module) -> str:
    """Digest of names, dtypes, shapes and bytes of a module's state."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        digest.update(tensor.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()


def has_cpp_compiler() -> bool:
    """Whether AOTInductor can compile here: `$CXX`, g++ or clang++."""
    return any(shutil.which(name) for name in (os.environ.get("CXX", ""), "g++", "clang++") if name)


def _export(
    module: nn.Module, spec: ModelSpec, checkpoint: Path, kind: Format, weights: str, source_sha256: str
) -> None:
    example = torch.zeros((2, *spec.input_shape), dtype=torch.uint8)
    batch = torch.export.Dim("batch", min=1, max=MAX_BATCH)
    program = torch.export.export(module, (example,), dynamic_shapes=({0: batch},))
    # Compiled beside its final place, so that the rename stays within one file system.
    with tempfile.TemporaryDirectory(dir=checkpoint.parent, prefix=".export-") as scratch:
        built = Path(scratch) / "model.pt2"
        _writers()[kind](program, built)
        size, digest = hash_regular_file(built)
        manifest = ArtifactManifest(
            file=checkpoint.name, size=size, sha256=digest, format=kind, torch_version=version("torch"),
            arch=platform.machine(), device="cpu", weights_sha256=weights, source_sha256=source_sha256, spec=spec,
        )  # fmt: skip
        written = Path(scratch) / "manifest.json"
        written.write_text(manifest.model_dump_json(indent=1) + "\n", encoding="utf-8")
        built.replace(checkpoint)
        written.replace(manifest_path(checkpoint))


def _writers() -> dict[Format, Callable[[torch.export.ExportedProgram, Path], object]]:
    return {
        "aotinductor": lambda program, path: torch._inductor.aoti_compile_and_package(program, package_path=str(path)),
        "exported-program": lambda program, path: torch.export.save(program, str(path)),
    }


def _verifies(checkpoint: Path) -> bool:
    if not checkpoint.is_file() or not manifest_path(checkpoint).is_file():
        return False
    try:
        verify_artifact(checkpoint, load_manifest(checkpoint), "cpu")
    except ArtifactRefused as error:
        log.warning("%s is exported anew: %s", checkpoint.name, error)
        return False
    return True


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """One exporter at a time; the lock goes with its process."""
    with path.open("w") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
