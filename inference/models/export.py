"""Turns a torch module into a pinned checkpoint, once per (weights, spec, code, torch, processor)."""

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from inference.errors import ArtifactRefused
from inference.models import _torch_noise as _torch_noise  # before the compiler is first imported
from inference.models.artifact import ArtifactManifest, FallbackPin, Format
from inference.models.checkpoint_cache import cached, environment, place_of, with_identity
from inference.models.fallback import fallback_manifest, fallback_path
from inference.models.golden import TOLERANCES, check_golden, difference, golden_inputs, write_golden
from inference.models.onnx_runtime import graph_names
from inference.models.regular_files import hash_regular_file
from inference.models.runtime import GraphRuntime, open_graph
from inference.models.spec import ModelSpec
from inference.models.tracing import graph_sha256, has_cpp_compiler, trace, write_graph

log = logging.getLogger(__name__)

ODD_BATCH = 17
"""Larger than the sizes that compilers treat apart."""


def export_model(
    module: nn.Module,
    spec: ModelSpec,
    folder: Path,
    *,
    source_sha256: str | None = None,
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
        source_sha256: digest of the code that defines the module, by which a cached checkpoint of other code is told;
            by default of the graph that the module is traced to, each time.
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
        ConfigError: the module does not take the spec's inputs, the folder cannot be written to, the C++ compiler
            fails, or a package is missing.
        ArtifactRefused: the export returns something else than the reference.
    """
    kind = kind or ("aotinductor" if has_cpp_compiler() else "exported-program")
    program = None
    if source_sha256 is None:
        program = trace(module.eval(), spec, device)
        source_sha256 = graph_sha256(program)
    pinned = with_identity(ArtifactManifest(
        file="", size=0, sha256="0" * 64, format=kind, device=device, spec=spec,
        weights_sha256=weights or weights_sha256(module), weights_file_sha256=weights_file,
        source_sha256=source_sha256, **environment(kind, device),
    ))  # fmt: skip

    def build(path: Path) -> ArtifactManifest:
        if kind == "exported-program" and not has_cpp_compiler():
            log.warning("no C++ compiler found: %s is exported as a portable program, slower to run", spec.model_name)
        graph = trace(module.eval(), spec, device) if program is None else program
        data = write_graph(graph, path, kind, *graph_names(spec))
        size, digest = hash_regular_file(path)
        made = pinned.model_copy(update={"file": path.name, "size": size, "sha256": digest, "data_files": data})
        if reference is None:
            return made
        made = _compared(path, made, reference)
        if fallback is not None:
            made = _with_fallback(path, made, trace(fallback.eval(), spec, device), reference)
        return made

    return cached(place_of(folder, spec.model_name, kind, pinned.identity, name), pinned, build)


def weights_sha256(module: nn.Module) -> str:
    """Digest of names, dtypes, shapes and bytes of a module's state."""
    digest = hashlib.sha256()
    for name, tensor in sorted(module.state_dict().items()):
        digest.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        # As bytes: numpy has no bfloat16.
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


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
