"""The manifest beside a checkpoint, which says what it is."""

import json
import os
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Annotated, ClassVar, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from inference.contract import explain
from inference.errors import ArtifactRefused, UnknownModel
from inference.models.regular_files import open_regular
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


class FallbackPin(PinnedFile):
    """The same network in full precision, for the tiles that overflow in half precision."""

    data_files: tuple[PinnedFile, ...] = ()


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
        fallback: of fp16; None where an overflow is that tile's error.
    """

    KIND = "model of tiles"

    max_batch: Annotated[int, Field(gt=0)] = MAX_BATCH
    fallback: FallbackPin | None = None
    spec: ModelSpec

    @property
    def side_files(self) -> tuple[PinnedFile, ...]:
        """See `Pin.side_files`."""
        further = () if self.fallback is None else (self.fallback, *self.fallback.data_files)
        return (*super().side_files, *further)

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
