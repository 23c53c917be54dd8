"""From a model's name and a local weights file to a checkpoint that was compared with its network."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray

from inference.errors import ConfigError
from inference.models.artifact import ArtifactManifest, Format, load_manifest
from inference.models.export import export_model, weights_sha256
from inference.models.golden import Arrays, run_golden
from inference.models.networks import TileNet, build_tile_net, read_weights, source_sha256
from inference.models.regular_files import hash_regular_file
from inference.models.spec import ModelSpec
from inference.models.weights import local_file

Precision = Literal["fp32", "bf16", "fp16"]

FORMATS: dict[str, Format] = {"pt2": "aotinductor", "portable": "exported-program", "onnx": "onnx"}
"""What the command line calls the formats."""

RANDOM = "-random"
"""Ends the name of a stand-in, which must not be taken for the model."""


@dataclass(frozen=True)
class Exported:
    """A checkpoint and its manifest, which has the difference measured between it and its network."""

    path: Path
    manifest: ArtifactManifest


def export_tile_model(
    spec: ModelSpec,
    folder: Path,
    *,
    weights: Path | None = None,
    random_init: bool = False,
    depth: int | None = None,
    device: str = "cpu",
    form: str = "pt2",
    precision: Precision | None = None,
) -> Exported:
    """Build a spec's network, export it and compare the result with it.

    Args:
        folder: the checkpoint lies there in a folder of its own name.
        weights: a local file: safetensors, or a torch file of tensors alone.
        random_init: reproducible random weights instead, for tests; the checkpoint's name then ends in `-random`.
        depth: number of blocks of a stand-in.
        form: `pt2` (compiled for this machine), `portable` or `onnx`.
        precision: of the network; by default the spec's. Pixels, pooling and outputs are float32 in any case.

    Raises:
        ConfigError: a spec or weights that no network can be built from, or an option that does not fit.
        ArtifactRefused: the export returns something else than the network.
    """
    _check_options(spec, weights, random_init, depth, device, form, precision)
    weights = None if weights is None else local_file(weights)
    spec = _as_asked(spec, random_init, depth, precision)
    state = None if weights is None else read_weights(spec, weights)
    in_full = spec.model_copy(update={"precision": "fp32"})
    net = build_tile_net(in_full, state)
    digest = weights_sha256(net.network)
    reference = _eager(net, spec)
    # The export converts its network in place.
    full = TileNet(in_full, copy.deepcopy(net.network)).eval() if spec.precision == "fp16" else None
    path = export_model(
        TileNet(spec, net.network).eval(), spec, folder, source_sha256=source_sha256(), kind=FORMATS[form],
        device=device, name=spec.model_name, weights=digest,
        weights_file=None if weights is None else hash_regular_file(weights)[1], reference=reference,
        fallback=full,
    )  # fmt: skip
    return Exported(path, load_manifest(path))


def _check_options(
    spec: ModelSpec, weights: Path | None, random_init: bool, depth: int | None, device: str, form: str,
    precision: Precision | None,
) -> None:  # fmt: skip
    if (weights is None) != random_init:
        raise ConfigError(
            f"export {spec.model_name} needs --weights FILE, a local file from {spec.weights_source}"
            if weights is None
            else "give --weights or --random-init, not both"
        )
    if depth is not None and not random_init:
        raise ConfigError("--depth is the number of blocks of a stand-in: use it with --random-init")
    if depth is not None and depth < 1:
        raise ConfigError(f"--depth is {depth}: a stand-in has 1 block or more")
    if form not in FORMATS:
        raise ConfigError(f"{form!r} is no format: give {', '.join(FORMATS)}")
    if form == "onnx" and (precision or spec.precision) == "bf16":
        raise ConfigError("ONNX Runtime has no bf16 on the CPU: give --precision fp16 or fp32, or --format pt2")
    if device.split(":")[0] not in {"cpu", "cuda"}:
        raise ConfigError(f"--device {device} is none that is exported for: give cpu or cuda")
    if device.split(":")[0] == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda needs a GPU here: compiled code is made for the one that is present")


def _as_asked(spec: ModelSpec, random_init: bool, depth: int | None, precision: Precision | None) -> ModelSpec:
    changes: dict[str, object] = {}
    if precision is not None:
        changes["precision"] = precision
    if random_init:
        blocks = "" if depth is None else f" of {depth} blocks"
        changes |= {
            "model_name": f"{spec.model_name}{RANDOM}", "license": "Apache-2.0", "access": "open",
            "weights_source": f"none: a random network{blocks} in the shape of {spec.model_name}, for tests",
        }  # fmt: skip
    if depth is not None:
        changes["architecture_args"] = spec.architecture_args | {"depth": depth}
    return spec.model_copy(update=changes)


@torch.inference_mode()
def _eager(net: TileNet, spec: ModelSpec) -> Arrays:
    def run(batch: NDArray[Any], _extras: Mapping[str, NDArray[np.float32]]) -> Arrays:
        return (net(torch.from_numpy(batch)).numpy(),)

    return run_golden(spec, run)
