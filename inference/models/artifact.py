"""A checkpoint and the manifest beside it that says what it is. Trust comes before parsing."""

import hashlib
import os
import platform
import stat
from importlib.metadata import version
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from inference.errors import ArtifactRefused, UnknownModel
from inference.models.spec import ModelSpec

SCHEMA_VERSION = 1

Format = Literal["aotinductor", "exported-program"]


class ArtifactManifest(BaseModel):
    """Pins one checkpoint file: its bytes, what runs it, and the spec it implements."""

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    schema_version: int = SCHEMA_VERSION
    file: str
    size: int
    sha256: str
    format: Format
    torch_version: str
    arch: str
    device: str
    weights_sha256: str
    source_sha256: str
    spec: ModelSpec


def manifest_path(checkpoint: Path) -> Path:
    """The manifest lies beside its checkpoint: `demo.pt2` -> `demo.pt2.json`."""
    return checkpoint.with_name(checkpoint.name + ".json")


def load_manifest(checkpoint: Path) -> ArtifactManifest:
    """Read a checkpoint's manifest.

    Raises:
        UnknownModel: there is no checkpoint.
        ArtifactRefused: there is no manifest, or it is not one, or of a newer schema.
    """
    if not checkpoint.is_file():
        raise UnknownModel(f"no checkpoint at {checkpoint}")
    path = manifest_path(checkpoint)
    try:
        manifest = ArtifactManifest.model_validate_json(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArtifactRefused(
            f"{checkpoint.name} has no manifest {path.name}: a .pt2 is code, so an unpinned one is not loaded"
        ) from None
    except ValidationError as error:
        raise ArtifactRefused(f"{path.name} is not an artifact manifest: {error}") from None
    if manifest.schema_version > SCHEMA_VERSION:
        raise ArtifactRefused(f"{path.name} has schema {manifest.schema_version}, this version reads {SCHEMA_VERSION}")
    return manifest


def verify_artifact(checkpoint: Path, manifest: ArtifactManifest, device: str) -> None:
    """Refuse a checkpoint before anything parses it.

    Raises:
        ArtifactRefused: wrong bytes, torch version, architecture or device, with the remedy.
    """
    remedy = f"export it again: slide-inference run --model {manifest.spec.model_name} exports a registered model"
    if (torch_version := version("torch")) != manifest.torch_version:
        raise ArtifactRefused(
            f"{checkpoint.name} was exported by torch {manifest.torch_version}, this is {torch_version}; {remedy}"
        )
    if manifest.format == "aotinductor" and manifest.arch != platform.machine():
        raise ArtifactRefused(
            f"{checkpoint.name} is compiled for {manifest.arch}, this machine is {platform.machine()}; {remedy}"
        )
    if manifest.format == "aotinductor" and manifest.device != device.split(":")[0]:
        raise ArtifactRefused(f"{checkpoint.name} is compiled for {manifest.device}, not {device}; {remedy}")
    size, digest = hash_regular_file(checkpoint)
    if (size, digest) != (manifest.size, manifest.sha256):
        raise ArtifactRefused(
            f"{checkpoint.name} is not the file its manifest pins (sha256 {digest[:12]}, expected "
            f"{manifest.sha256[:12]}); {remedy}"
        )


def hash_regular_file(path: Path) -> tuple[int, str]:
    """Size and SHA-256 of the opened descriptor; links, pipes and devices are refused."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        raise ArtifactRefused(f"{path.name} cannot be opened as a regular file: {error.strerror}") from None
    with os.fdopen(descriptor, "rb") as stream:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise ArtifactRefused(f"{path.name} is not a regular file")
        return info.st_size, hashlib.file_digest(stream, "sha256").hexdigest()
