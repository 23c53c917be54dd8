"""A checkpoint and the manifest beside it that says what it is. Trust comes before parsing."""

import hashlib
import json
import os
import platform
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, BinaryIO, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from inference.contract import explain
from inference.errors import ArtifactRefused, ConfigError, UnknownModel
from inference.models.spec import ModelSpec

SCHEMA_VERSION = 1

MAX_MANIFEST_BYTES = 16 << 20
"""A spec with 20,000 gene names takes 0.4 MB."""

MAX_BATCH = 4096
"""Upper bound of the dynamic batch axis of our exports."""

_SLACK_BYTES = 1 << 20

Format = Literal["aotinductor", "exported-program"]
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class ArtifactManifest(BaseModel):
    """Pins one checkpoint file: its bytes, what runs it, and the spec it implements.

    Attributes:
        arch: machine type it was made on, e.g. `x86_64`.
        cpu_features: instruction sets that compiled code may use; code that meets another processor dies of it.
        max_batch: most rows of one forward.
        source_sha256: digest of the code that defines the module.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    schema_version: int = SCHEMA_VERSION
    file: str
    size: int
    sha256: Sha256
    format: Format
    torch_version: str
    arch: str
    cpu_features: tuple[str, ...] = ()
    device: str
    max_batch: Annotated[int, Field(gt=0)] = MAX_BATCH
    weights_sha256: Sha256
    source_sha256: Sha256
    spec: ModelSpec


def manifest_path(checkpoint: Path) -> Path:
    """The manifest lies beside its checkpoint: `demo.pt2` -> `demo.pt2.json`."""
    return checkpoint.with_name(checkpoint.name + ".json")


def load_manifest(checkpoint: Path) -> ArtifactManifest:
    """Read a checkpoint's manifest.

    Raises:
        UnknownModel: there is no checkpoint.
        ArtifactRefused: the checkpoint is no regular file, or its manifest is missing, unusable or of a newer schema.
    """
    if not os.path.lexists(checkpoint):
        raise UnknownModel(f"no checkpoint at {checkpoint}")
    with _open_regular(checkpoint):
        pass
    path = manifest_path(checkpoint)
    if not os.path.lexists(path):
        raise ArtifactRefused(
            f"{checkpoint.name} has no manifest {path.name}: a .pt2 is code, so an unpinned one is not loaded"
        )
    with _open_regular(path) as stream:
        text = stream.read(MAX_MANIFEST_BYTES + 1)
    try:
        if len(text) > MAX_MANIFEST_BYTES:
            raise ArtifactRefused(f"{path.name} is not an artifact manifest: it has over {MAX_MANIFEST_BYTES} bytes")
        _check_schema(json.loads(text), path.name)
        return ArtifactManifest.model_validate_json(text)
    except ValidationError as error:
        raise ArtifactRefused(f"{path.name} is not an artifact manifest: {explain(error)}") from None
    except (ValueError, RecursionError) as error:
        raise ArtifactRefused(f"{path.name} is not an artifact manifest: {error}") from None


def verify_artifact(checkpoint: Path, manifest: ArtifactManifest, device: str) -> None:
    """Refuse a checkpoint before anything parses it.

    Raises:
        ArtifactRefused: wrong bytes, torch version, processor or device, with the remedy.
    """
    check_artifact(checkpoint, manifest, device)
    _check_processor(checkpoint.name, manifest)


def check_artifact(checkpoint: Path, manifest: ArtifactManifest, device: str) -> None:
    """As `verify_artifact`, but for the processor's instruction sets: only torch, slow to import, knows those.

    Raises:
        ArtifactRefused: wrong bytes, torch version, machine type or device, with the remedy.
    """
    _check_machine(checkpoint.name, manifest, device)
    _check_bytes(checkpoint.name, manifest, *hash_regular_file(checkpoint))


@contextmanager
def verified_copy(checkpoint: Path, manifest: ArtifactManifest, device: str) -> Iterator[Path]:
    """A private copy of a checkpoint that verifies, to load from: loaders open by path, and paths change hands.

    Raises:
        ArtifactRefused: as `verify_artifact`.
        ConfigError: no room for the copy, or for the loader to unpack it.
    """
    _check_machine(checkpoint.name, manifest, device)
    _check_processor(checkpoint.name, manifest)
    with ExitStack() as stack:
        place = scratch_folder()
        try:
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="slide-inference-", dir=place))
            _require_room(checkpoint.name, manifest, place)
            copy = Path(folder) / "model.pt2"
            with _open_regular(checkpoint) as source, copy.open("xb") as target:
                size, digest = _hash(source, target)
        except OSError as error:
            raise ConfigError(
                f"{checkpoint.name} cannot be copied to {place}: {error.strerror}; point TMPDIR to a folder with room"
            ) from None
        _check_bytes(checkpoint.name, manifest, size, digest)
        yield copy


def scratch_folder() -> Path:
    """Where torch's loader unpacks a package: it takes `TMPDIR` as it is, while Python passes over a full one."""
    return Path(os.environ.get("TMPDIR") or tempfile.gettempdir())


def hash_regular_file(path: Path) -> tuple[int, str]:
    """Size and SHA-256 of the opened descriptor; links, pipes and devices are refused."""
    with _open_regular(path) as stream:
        return _hash(stream)


def cpu_features() -> tuple[str, ...]:
    """Instruction sets of this processor, as torch names them."""
    import torch  # a manifest can be read without it

    return tuple(sorted(name for name, present in torch.cpu.get_capabilities().items() if present is True))


def _check_schema(manifest: object, name: str) -> None:
    # Before validation: a newer schema has fields that this one would call unknown.
    found = manifest.get("schema_version", SCHEMA_VERSION) if isinstance(manifest, dict) else SCHEMA_VERSION
    if isinstance(found, int) and found > SCHEMA_VERSION:
        raise ArtifactRefused(
            f"{name} has schema {found}, this version reads {SCHEMA_VERSION}: upgrade slide-inference"
        )


def _check_machine(name: str, manifest: ArtifactManifest, device: str) -> None:
    remedy = _remedy(manifest)
    if (torch_version := version("torch")) != manifest.torch_version:
        raise ArtifactRefused(
            f"{name} was exported by torch {manifest.torch_version}, this is {torch_version}; {remedy}"
        )
    if manifest.format != "aotinductor":
        return
    if manifest.arch != platform.machine():
        raise ArtifactRefused(f"{name} is compiled for {manifest.arch}, this machine is {platform.machine()}; {remedy}")
    if manifest.device != device.split(":")[0]:
        raise ArtifactRefused(f"{name} is compiled for {manifest.device}, not {device}; run it on {manifest.device}")


def _check_processor(name: str, manifest: ArtifactManifest) -> None:
    if manifest.format != "aotinductor" or not manifest.cpu_features:
        return
    if missing := set(manifest.cpu_features) - set(cpu_features()):
        raise ArtifactRefused(
            f"{name} is compiled for a processor with {', '.join(sorted(missing))}, which this one lacks; "
            f"{_remedy(manifest)}"
        )


def _check_bytes(name: str, manifest: ArtifactManifest, size: int, digest: str) -> None:
    if (size, digest) != (manifest.size, manifest.sha256):
        raise ArtifactRefused(
            f"{name} is not the file its manifest pins ({size} bytes, sha256 {digest[:12]}; expected {manifest.size}, "
            f"{manifest.sha256[:12]}); {_remedy(manifest)}"
        )


def _remedy(manifest: ArtifactManifest) -> str:
    return f"export it again: slide-inference run --model {manifest.spec.model_name} exports a registered model"


def _require_room(name: str, manifest: ArtifactManifest, folder: Path) -> None:
    # Found out now: a loader that runs out of space leaves what it unpacked behind.
    need = manifest.size * (2 if manifest.format == "aotinductor" else 1) + _SLACK_BYTES
    free = shutil.disk_usage(folder).free
    if free < need:
        raise ConfigError(
            f"{name} needs {need / 1e6:.1f} MB to be unpacked in {folder}, which has {free / 1e6:.1f} MB free; "
            "point TMPDIR to a folder with room"
        )


@contextmanager
def _open_regular(path: Path) -> Iterator[BinaryIO]:
    # O_NONBLOCK: a pipe must be refused, not waited for.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ArtifactRefused(f"{path.name} cannot be opened as a regular file, not a link: {error.strerror}") from None
    info = os.fstat(descriptor)
    if not stat.S_ISREG(info.st_mode) or info.st_nlink != 1:
        os.close(descriptor)
        raise ArtifactRefused(f"{path.name} is not a regular file with one name: copy the file itself there")
    with os.fdopen(descriptor, "rb") as stream:
        yield stream


def _hash(source: BinaryIO, copy: BinaryIO | None = None) -> tuple[int, str]:
    digest, size = hashlib.sha256(), 0
    while block := source.read(1 << 20):
        digest.update(block)
        size += len(block)
        if copy is not None:
            copy.write(block)
    return size, digest.hexdigest()
