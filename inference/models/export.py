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
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, JsonValue
from torch import nn

from inference.errors import ArtifactRefused, ConfigError
from inference.models import _torch_noise as _torch_noise  # before the compiler is first imported
from inference.models.artifact import (
    MAX_BATCH,
    ArtifactManifest,
    FallbackPin,
    Format,
    Pin,
    PinnedFile,
    manifest_path,
    read_manifest,
)
from inference.models.fallback import fallback_manifest, fallback_path
from inference.models.golden import TOLERANCES, check_golden, difference, golden_inputs, write_golden
from inference.models.onnx_graph import write_onnx
from inference.models.onnx_runtime import graph_names
from inference.models.regular_files import hash_regular_file
from inference.models.runtime import GraphRuntime, gpu_architecture, open_graph
from inference.models.spec import ModelSpec
from inference.models.verification import cpu_features, scratch_folder, verify_artifact
from inference.store.files import canonical_json, is_disk_full

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

log = logging.getLogger(__name__)

EXPORT_VERSION = 4
"""Raised when the way of exporting changes, so that cached checkpoints are made anew."""

ODD_BATCH = 17
"""Larger than the sizes that compilers treat apart."""


def export_model(
    module: nn.Module,
    spec: ModelSpec,
    folder: Path,
    *,
    source_sha256: str,
    kind: Format | None = None,
    device: str = "cpu",
    name: str | None = None,
    weights: str | None = None,
    weights_file: str | None = None,
    reference: Sequence[NDArray[np.float32]] | None = None,
    fallback: nn.Module | None = None,
) -> Path:
    """The checkpoint of a module, exported on first use and reused while it verifies.

    Args:
        module: uint8 (B, C, H, W), then the spec's extra inputs, or float32 (B, D) for a head -> the spec's outputs,
            each with B rows, normalisation included.
        spec: what the module implements.
        folder: where checkpoints are cached; created if absent.
        source_sha256: digest of the code that defines the module.
        kind: the format; by default compiled where there is a C++ compiler, else portable.
        device: what it is compiled for: cpu or cuda.
        name: of the checkpoint, in a folder of its own; by default the model's name with a digest.
        weights: digest of the network's tensors in full precision; by default of the module as it is.
        weights_file: digest of the file they were read from.
        reference: what the module returns in eager fp32 for the golden inputs; then the export is compared with it
            before it is given its name, and again whenever it is loaded.
        fallback: the same network in full precision, for tiles that overflow; needs the reference.

    Returns:
        Path of the checkpoint; its manifest lies beside it.

    Raises:
        ConfigError: the folder cannot be written to, the C++ compiler fails, or a package is missing.
        ArtifactRefused: the export returns something else than the reference.
    """
    kind = kind or ("aotinductor" if has_cpp_compiler() else "exported-program")
    pinned = with_identity(ArtifactManifest(
        file="", size=0, sha256="0" * 64, format=kind, device=device, spec=spec,
        weights_sha256=weights or weights_sha256(module), weights_file_sha256=weights_file,
        source_sha256=source_sha256, **environment(kind, device),
    ))  # fmt: skip

    def build(path: Path) -> ArtifactManifest:
        if kind == "exported-program" and not has_cpp_compiler():
            log.warning("no C++ compiler found: %s is exported as a portable program, slower to run", spec.model_name)
        data = write_graph(trace(module.eval(), spec, device), path, kind, *graph_names(spec))
        size, digest = hash_regular_file(path)
        made = pinned.model_copy(update={"file": path.name, "size": size, "sha256": digest, "data_files": data})
        if reference is None:
            return made
        made = _compared(path, made, reference)
        if fallback is not None:
            made = _with_fallback(path, made, trace(fallback.eval(), spec, device), reference)
        return made

    return cached(place_of(folder, spec.model_name, kind, pinned.identity, name), pinned, build)


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


def trace(module: nn.Module, spec: ModelSpec, device: str) -> torch.export.ExportedProgram:
    """The module as a program with a free first axis."""
    example = torch.zeros((2, *spec.input_shape), dtype=getattr(torch, spec.input_dtype), device=device)
    extras = [torch.zeros((2, *extra.shape), device=device) for extra in spec.extra_inputs]
    batch = torch.export.Dim("batch", min=1, max=MAX_BATCH)
    inputs = (example, *extras)
    return torch.export.export(module.to(device), inputs, dynamic_shapes=tuple({0: batch} for _ in inputs))


def write_graph(
    program: torch.export.ExportedProgram, path: Path, kind: Format, inputs: Sequence[str], outputs: Sequence[str]
) -> tuple[PinnedFile, ...]:
    """Write a program in one of the formats; returns the further files that an ONNX graph has.

    Raises:
        ConfigError: compiling failed, or a package is missing.
    """
    if kind == "onnx":
        return write_onnx(program, path, inputs, outputs)
    with _Archive(path) as archive:
        if kind == "exported-program":
            program._example_inputs = None  # never needed again, and would be stored as a pickle
            torch.export.save(program, archive)
        else:
            _compile(program, archive)
        if archive.error is not None:
            raise archive.error
    return ()


def _compared(path: Path, made: ArtifactManifest, reference: Sequence[NDArray[np.float32]]) -> ArtifactManifest:
    golden = write_golden(path, made.spec, reference)
    made = made.model_copy(update={"golden": golden})
    runtime = open_graph(path, made, made.device)
    measured = max(check_golden(path, made, runtime.run), _other_sizes(path, made, runtime, reference))
    return made.model_copy(update={"golden": golden.model_copy(update={"measured": measured})})


def _other_sizes(
    path: Path, made: ArtifactManifest, runtime: GraphRuntime, reference: Sequence[NDArray[np.float32]]
) -> float:
    """The largest difference in batches of other sizes than the golden one: a program may be wrong for some alone."""
    first, extras = golden_inputs(made.spec)
    worst = 0.0
    for rows in (np.zeros(1, np.int64), np.arange(ODD_BATCH) % len(first)):
        found = runtime.run(first[rows], {name: values[rows] for name, values in extras.items()})
        worst = max([worst, *(difference(one, other[rows]) for one, other in zip(found, reference, strict=True))])
    if not worst <= TOLERANCES[made.spec.precision]:
        raise ArtifactRefused(f"{path.name} returns other values in batches of 1 or {ODD_BATCH} (by {worst:.1e})")
    return worst


def _with_fallback(
    path: Path, made: ArtifactManifest, program: torch.export.ExportedProgram, reference: Sequence[NDArray[np.float32]]
) -> ArtifactManifest:
    """The manifest with a graph in full precision beside the checkpoint, compared like it."""
    beside = fallback_path(path)
    data = write_graph(program, beside, made.format, *graph_names(made.spec))
    size, digest = hash_regular_file(beside)
    pin = FallbackPin(file=beside.name, size=size, sha256=digest, data_files=data)
    full = fallback_manifest(made, pin)
    _other_sizes(beside, full, open_graph(beside, full, made.device), reference)
    return made.model_copy(update={"fallback": pin})


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


def _compile(program: torch.export.ExportedProgram, archive: "_Archive") -> None:
    try:
        # torch reasons about batches of two and more, and would have the package refuse a batch of one.
        options = {"aot_inductor.check_lowerbound": False}
        # Choosing between equivalent kernels for the example's batch of 2 must not narrow what the package accepts: a
        # convolution would leave it with at most 15 rows.
        with _shape_env(program).suppress_guards():
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


def _shape_env(program: torch.export.ExportedProgram) -> "ShapeEnv":
    from torch._subclasses.fake_tensor import FakeTensor  # with it comes sympy, which a cached export does without

    for node in program.graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, FakeTensor) and value.fake_mode.shape_env is not None:
            return value.fake_mode.shape_env
    raise ConfigError("this network takes no tensors")


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
