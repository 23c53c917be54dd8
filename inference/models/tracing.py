"""From a torch module to a graph's file: traced with a free batch axis, then compiled, packed or written as ONNX."""

import hashlib
import io
import os
import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from inference.errors import ConfigError
from inference.models import _torch_noise as _torch_noise  # before the compiler is first imported
from inference.models.artifact import MAX_BATCH, Format, PinnedFile
from inference.models.onnx_graph import write_onnx
from inference.models.spec import ModelSpec
from inference.models.verification import scratch_folder
from inference.store.files import is_disk_full

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer
    from torch.fx.experimental.symbolic_shapes import ShapeEnv


def trace(module: nn.Module, spec: ModelSpec, device: str) -> torch.export.ExportedProgram:
    """The module as a program with a free first axis."""
    example = torch.zeros((2, *spec.input_shape), dtype=getattr(torch, spec.input_dtype), device=device)
    extras = [torch.zeros((2, *extra.shape), device=device) for extra in spec.extra_inputs]
    batch = torch.export.Dim("batch", min=1, max=MAX_BATCH)
    inputs = (example, *extras)
    try:
        return torch.export.export(module.to(device), inputs, dynamic_shapes=tuple({0: batch} for _ in inputs))
    except Exception as error:
        names = ", ".join(
            ["tiles" if spec.head is None else "embeddings", *(extra.name for extra in spec.extra_inputs)]
        )
        reason = (str(error).strip().splitlines() or [""])[0][:300]
        raise ConfigError(
            f"the network of {spec.model_name} cannot be traced as forward({names}) with any number of rows: "
            f"{type(error).__name__}: {reason}"
        ) from error


def graph_sha256(program: torch.export.ExportedProgram) -> str:
    """Digest of what a traced program does, but for its weights: operations in order, and constant tensors."""
    digest = hashlib.sha256(program.graph_module.code.encode())
    for name, value in sorted(program.constants.items()):
        digest.update(f"{name}:".encode())
        if isinstance(value, torch.Tensor):
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


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


def has_cpp_compiler() -> bool:
    """Whether torch will find a C++ compiler here: `$CXX` if set, else g++ (clang++ on macOS)."""
    command = shlex.split(os.environ.get("CXX", "clang++" if sys.platform == "darwin" else "g++"))
    return bool(command) and shutil.which(command[0]) is not None


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
