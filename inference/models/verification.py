"""A checkpoint is code: nothing parses it before its bytes and this machine are those that its manifest pins."""

import hashlib
import os
import platform
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path

from inference.errors import ArtifactRefused, ConfigError
from inference.models.archive import check_archive
from inference.models.artifact import Pin, PinnedFile
from inference.models.regular_files import copy_regular_file, hash_regular_file, open_regular

_SLACK_BYTES = 1 << 20


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
        check_side_file(checkpoint, pinned, manifest)


def check_side_file(checkpoint: Path, pinned: PinnedFile, manifest: Pin) -> None:
    """Refuse a file beside a checkpoint that is not what the manifest pins.

    Raises:
        ArtifactRefused: with the remedy.
    """
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
            size, digest = copy_regular_file(checkpoint, copy)
            for pinned in manifest.data_files:  # under their own names, which the graph has
                found = copy_regular_file(_beside(checkpoint, pinned, manifest), Path(folder) / pinned.file)
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


def cpu_features() -> tuple[str, ...]:
    """Instruction sets of this processor, as torch names them."""
    import torch  # a manifest can be read without it

    return tuple(sorted(name for name, present in torch.cpu.get_capabilities().items() if present is True))


def _check_machine(name: str, manifest: Pin, device: str) -> None:
    remedy, kind = _remedy(manifest), device.split(":")[0]
    if kind not in {"cpu", "cuda", "mps"}:
        raise ConfigError(f"{device!r} is no device: give cpu, cuda, cuda:1 or mps")
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
    if manifest.device != kind:
        raise ArtifactRefused(
            f"{name} is compiled for {manifest.device}, not {device}; run it on {manifest.device}, or export it with "
            f"--device {kind}"
        )


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
