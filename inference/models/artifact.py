"""A checkpoint and the manifest beside it that says what it is. Trust comes before parsing."""

import hashlib
import json
import os
import platform
import shutil
import stat
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, BinaryIO, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from inference.contract import explain
from inference.errors import ArtifactRefused, ConfigError, UnknownModel
from inference.models.archive import check_archive
from inference.models.spec import ModelSpec

SCHEMA_VERSION = 2
"""Version 1 had no further files, no golden vectors and no ONNX."""

MAX_MANIFEST_BYTES = 16 << 20
"""A spec with 20,000 gene names takes 0.4 MB."""

MAX_BATCH = 4096
"""Upper bound of the dynamic batch axis of our exports."""

FILE_NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,254}$"
"""Of a file beside a checkpoint: never a path."""

SUFFIXES = (".pt2", ".onnx")

_SLACK_BYTES = 1 << 20

Format = Literal["aotinductor", "exported-program", "onnx"]
P = TypeVar("P", bound="Pin")
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class PinnedFile(BaseModel):
    """A file in the checkpoint's folder: its name there, without any folder, and its bytes."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    file: Annotated[str, Field(pattern=FILE_NAME)]
    size: Annotated[int, Field(ge=0)]
    sha256: Sha256


class GoldenPin(PinnedFile):
    """What the checkpoint must return for fixed inputs.

    Attributes:
        tolerance: largest difference from the eager fp32 network, as a part of an output's largest value.
        measured: the difference found when the checkpoint was made.
    """

    tolerance: Annotated[float, Field(gt=0)]
    measured: Annotated[float, Field(ge=0)]


class Pin(BaseModel, ABC):
    """Pins one checkpoint file: its bytes, the files it needs, and what runs it.

    Attributes:
        torch_version: of torch formats, which no other version loads.
        producer: what wrote an ONNX graph or tried it; not enforced, for its format is stable.
        arch: machine type it was made on, e.g. `x86_64`.
        cpu_features: instruction sets that compiled code may use; code that meets another processor dies of it.
        gpu: compute capability that compiled code is for, e.g. `sm_90`.
        data_files: an ONNX graph's external data.
        golden: None for a checkpoint that was not compared with its network.
        weights_sha256: digest of the network's tensors in full precision.
        weights_file_sha256: digest of the file they were read from.
        source_sha256: digest of the code that defines the module.
        identity: digest of all that decides what an export contains; the same again needs no new export.
    """

    KIND: ClassVar[str]

    model_config = ConfigDict(frozen=True, extra="forbid", protected_namespaces=())

    schema_version: int = SCHEMA_VERSION
    file: str
    size: int
    sha256: Sha256
    format: Format
    torch_version: str | None = None
    producer: str = ""
    arch: str
    cpu_features: tuple[str, ...] = ()
    device: str
    gpu: str | None = None
    data_files: tuple[PinnedFile, ...] = ()
    golden: GoldenPin | None = None
    weights_sha256: Sha256
    weights_file_sha256: Sha256 | None = None
    source_sha256: Sha256
    identity: str = ""

    @model_validator(mode="after")
    def _is_whole(self) -> Self:
        if self.format != "onnx" and not self.torch_version:
            raise ValueError(f"torch_version is missing, which {self.format} needs")
        if self.format != "onnx" and self.data_files:
            raise ValueError(f"data_files are for onnx, the format is {self.format}")
        names = [self.file, *(pinned.file for pinned in self.side_files)]
        if len({name.casefold() for name in names}) != len(names):
            raise ValueError("the same file is pinned twice")
        return self

    @property
    def side_files(self) -> tuple[PinnedFile, ...]:
        """All files that lie beside the checkpoint because of it, but for the manifest."""
        return self.data_files if self.golden is None else (*self.data_files, self.golden)

    @property
    @abstractmethod
    def model_name(self) -> str:
        """The name of what it implements."""


class ArtifactManifest(Pin):
    """Pins a model of tiles (or of their embeddings) and the spec it implements.

    Attributes:
        max_batch: most rows of one forward.
    """

    KIND = "model of tiles"

    max_batch: Annotated[int, Field(gt=0)] = MAX_BATCH
    spec: ModelSpec

    @property
    def model_name(self) -> str:
        """The name in its spec."""
        return self.spec.model_name


def manifest_path(checkpoint: Path) -> Path:
    """The manifest lies beside its checkpoint: `demo.pt2` -> `demo.pt2.json`."""
    return checkpoint.with_name(checkpoint.name + ".json")


def load_manifest(checkpoint: Path) -> ArtifactManifest:
    """Read a checkpoint's manifest.

    Raises:
        UnknownModel: there is no checkpoint.
        ArtifactRefused: the checkpoint is no regular file, or its manifest is missing, unusable or of a newer schema.
    """
    return read_manifest(checkpoint, ArtifactManifest)


def read_manifest(checkpoint: Path, kind: type[P]) -> P:
    """As `load_manifest`, for any kind of manifest."""
    if not os.path.lexists(checkpoint):
        raise UnknownModel(f"no checkpoint at {checkpoint}")
    with open_regular(checkpoint):
        pass
    path = manifest_path(checkpoint)
    if not os.path.lexists(path):
        code = "a .pt2 is code, so an unpinned one is not loaded" if checkpoint.suffix == ".pt2" else "pin it"
        raise ArtifactRefused(
            f"{checkpoint.name} has no manifest {path.name}: {code}; slide-inference import {checkpoint.name} "
            "--spec SPEC.yaml tries it and writes one"
        )
    with open_regular(path) as stream:
        text = stream.read(MAX_MANIFEST_BYTES + 1)
    try:
        if len(text) > MAX_MANIFEST_BYTES:
            raise ArtifactRefused(f"{path.name} is not an artifact manifest: it has over {MAX_MANIFEST_BYTES} bytes")
        fields = json.loads(text)
        _check_schema(fields, path.name)
        _check_kind(fields, kind, checkpoint.name)
        return kind.model_validate_json(text)
    except ValidationError as error:
        raise ArtifactRefused(f"{path.name} is not an artifact manifest: {explain(error)}") from None
    except (ValueError, RecursionError) as error:
        raise ArtifactRefused(f"{path.name} is not an artifact manifest: {error}") from None


def verify_artifact(checkpoint: Path, manifest: Pin, device: str) -> None:
    """Refuse a checkpoint before anything parses it.

    Raises:
        ArtifactRefused: wrong bytes, torch version, processor or device, with the remedy.
    """
    check_artifact(checkpoint, manifest, device)
    _check_processor(checkpoint.name, manifest)


def check_artifact(checkpoint: Path, manifest: Pin, device: str) -> None:
    """As `verify_artifact`, but for the processor's instruction sets: only torch, slow to import, knows those.

    Raises:
        ArtifactRefused: wrong bytes, torch version, machine type or device, with the remedy.
    """
    _check_machine(checkpoint.name, manifest, device)
    _check_bytes(checkpoint.name, manifest, *hash_regular_file(checkpoint))
    for pinned in manifest.side_files:
        _check_side(pinned, manifest, *hash_regular_file(_beside(checkpoint, pinned, manifest)))


@contextmanager
def verified_copy(checkpoint: Path, manifest: Pin, device: str) -> Iterator[Path]:
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
            copy = Path(folder) / ("model.onnx" if manifest.format == "onnx" else "model.pt2")
            size, digest = _copy(checkpoint, copy)
            for pinned in manifest.data_files:  # under their own names, which the graph has
                found = _copy(_beside(checkpoint, pinned, manifest), Path(folder) / pinned.file)
                _check_side(pinned, manifest, *found)
        except OSError as error:
            raise ConfigError(
                f"{checkpoint.name} cannot be copied to {place}: {error.strerror}; point TMPDIR to a folder with room"
            ) from None
        _check_bytes(checkpoint.name, manifest, size, digest)
        if manifest.format != "onnx":
            check_archive(copy, checkpoint.name)
        yield copy


def read_pinned(checkpoint: Path, pinned: PinnedFile, manifest: Pin) -> bytes:
    """A small file beside a checkpoint, if it is what the manifest pins.

    Raises:
        ArtifactRefused: it is not.
    """
    with open_regular(_beside(checkpoint, pinned, manifest)) as stream:
        content = stream.read(pinned.size + 1)
    _check_side(pinned, manifest, len(content), hashlib.sha256(content).hexdigest())
    return content


def scratch_folder() -> Path:
    """Where torch's loader unpacks a package: it takes `TMPDIR` as it is, while Python passes over a full one."""
    return Path(os.environ.get("TMPDIR") or tempfile.gettempdir())


def hash_regular_file(path: Path) -> tuple[int, str]:
    """Size and SHA-256 of the opened descriptor; links, pipes and devices are refused."""
    with open_regular(path) as stream:
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


def _check_kind(manifest: object, kind: type[Pin], name: str) -> None:
    found = manifest.get("kind", ArtifactManifest.KIND) if isinstance(manifest, dict) else kind.KIND
    if found != kind.KIND:
        raise ArtifactRefused(f"{name} is a {found}, where a {kind.KIND} is needed")


def _check_machine(name: str, manifest: Pin, device: str) -> None:
    remedy = _remedy(manifest)
    if manifest.format == "onnx":
        return
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


def _check_processor(name: str, manifest: Pin) -> None:
    if manifest.format != "aotinductor" or not manifest.cpu_features:
        return
    if missing := set(manifest.cpu_features) - set(cpu_features()):
        raise ArtifactRefused(
            f"{name} is compiled for a processor with {', '.join(sorted(missing))}, which this one lacks; "
            f"{_remedy(manifest)}"
        )


def _check_bytes(name: str, manifest: Pin, size: int, digest: str) -> None:
    if (size, digest) != (manifest.size, manifest.sha256):
        raise ArtifactRefused(
            f"{name} is not the file its manifest pins ({size} bytes, sha256 {digest[:12]}; expected {manifest.size}, "
            f"{manifest.sha256[:12]}); {_remedy(manifest)}"
        )


def _check_side(pinned: PinnedFile, manifest: Pin, size: int, digest: str) -> None:
    if (size, digest) != (pinned.size, pinned.sha256):
        raise ArtifactRefused(
            f"{pinned.file} is not the file that the manifest of {manifest.file} pins ({size} bytes, sha256 "
            f"{digest[:12]}; expected {pinned.size}, {pinned.sha256[:12]}); {_remedy(manifest)}"
        )


def _beside(checkpoint: Path, pinned: PinnedFile, manifest: Pin) -> Path:
    path = checkpoint.with_name(pinned.file)
    if not os.path.lexists(path):
        raise ArtifactRefused(f"{checkpoint.name} comes with {pinned.file}, which is not there; {_remedy(manifest)}")
    return path


def _copy(source: Path, target: Path) -> tuple[int, str]:
    with open_regular(source) as stream, target.open("xb") as copy:
        return _hash(stream, copy)


def _remedy(manifest: Pin) -> str:
    return f"export it again: slide-inference export {manifest.model_name}"


def _require_room(name: str, manifest: Pin, folder: Path) -> None:
    # Found out now: a loader that runs out of space leaves what it unpacked behind.
    need = manifest.size * (2 if manifest.format == "aotinductor" else 1) + _SLACK_BYTES
    need += sum(pinned.size for pinned in manifest.data_files)
    free = shutil.disk_usage(folder).free
    if free < need:
        raise ConfigError(
            f"{name} needs {need / 1e6:.1f} MB to be unpacked in {folder}, which has {free / 1e6:.1f} MB free; "
            "point TMPDIR to a folder with room"
        )


@contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """A file opened for reading, once it is known to be a regular one with one name.

    Raises:
        ArtifactRefused: it is not.
    """
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
