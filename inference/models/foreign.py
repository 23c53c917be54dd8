"""Graphs that were not exported here: tried with a batch, then pinned."""

import hashlib
import logging
import shutil
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference.errors import ArtifactRefused, ConfigError, InferenceError
from inference.models._trial import rows_are_independent, trial_batch
from inference.models.archive import check_archive, compiled
from inference.models.artifact import ArtifactManifest, Format, load_manifest
from inference.models.checkpoint_cache import cached, environment, place_of, with_identity
from inference.models.conversion import Exported
from inference.models.golden import run_golden, write_golden
from inference.models.onnx_graph import external_files, pinned_data
from inference.models.regular_files import hash_regular_file
from inference.models.runtime import GraphRuntime, open_graph
from inference.models.spec import ModelSpec

log = logging.getLogger(__name__)

MAX_BATCH = 256
"""Most rows asked of a graph whose own limit is not known."""

TRIAL = 4
"""Rows of the trial batch."""


def import_graph(source: Path, spec: ModelSpec, folder: Path, *, device: str = "cpu") -> Exported:
    """Pin a graph of others, once it has run a batch and returned what the spec declares.

    The graph and its data are copied into a folder of the model's name, with a manifest and with what it returned for
    the golden inputs, which it must return again at every load.

    Args:
        source: an `.onnx` or `.pt2`. A `.pt2` is code, and trying it runs it: only one from a source you trust.
        spec: what it is; for `.onnx` with a `graph` part that names its input and outputs.

    Raises:
        ConfigError: the spec does not fit the graph, or asks for what a graph of single tiles cannot have.
        ArtifactRefused: the file cannot be used, or the graph returned something else than its spec declares.
    """
    _check_spec(spec, source)
    size, digest = hash_regular_file(source)
    data = external_files(source) if source.suffix == ".onnx" else ()
    kind = _format(source)
    if kind != "onnx":
        log.warning("%s is code, and runs with your rights: import only what you trust", source.name)
    everything = hashlib.sha256(digest.encode())
    for name in data:
        everything.update(hash_regular_file(source.with_name(name))[1].encode())
    pinned = with_identity(ArtifactManifest(
        file="", size=size, sha256=digest, format=kind, device=device, spec=spec, max_batch=MAX_BATCH,
        weights_sha256=everything.hexdigest(), weights_file_sha256=digest, source_sha256=digest,
        **environment(kind, device),
    ))  # fmt: skip
    if kind == "onnx":
        pinned = pinned.model_copy(update={"producer": f"tried in onnxruntime {version('onnxruntime')}"})

    def build(path: Path) -> ArtifactManifest:
        shutil.copyfile(source, path)
        for name in data:
            shutil.copyfile(source.with_name(name), path.with_name(name))
        copied = pinned_data(path) if kind == "onnx" else ()
        made = pinned.model_copy(update={"file": path.name, "data_files": copied})
        return _tried(path, made)

    path = cached(place_of(folder, spec.model_name, kind, pinned.identity, spec.model_name), pinned, build)
    return Exported(path, load_manifest(path))


def _check_spec(spec: ModelSpec, source: Path) -> None:
    if source.suffix not in {".onnx", ".pt2"}:
        raise ConfigError(f"{source.name} is no .onnx or .pt2")
    if spec.color_space == "HED" or spec.stain_normalization != "none":
        raise ConfigError(
            f"{spec.model_name}: stain separation and normalisation need statistics of the whole slide, which a graph "
            "of single tiles has not; declare color_space RGB and stain_normalization none, and give it planes that "
            "were prepared so"
        )
    if spec.resize is not None or spec.crop is not None:
        raise ConfigError(f"{spec.model_name}: resize and crop are done in graphs exported here; set the tile_spec")


def _format(source: Path) -> Format:
    if source.suffix == ".onnx":
        return "onnx"
    check_archive(source, source.name)
    return "aotinductor" if compiled(source) else "exported-program"


def _tried(path: Path, made: ArtifactManifest) -> ArtifactManifest:
    """The manifest with the batch that the graph takes and with what it returns."""
    _require_names(path, made)
    runtime = open_graph(path, made, made.device)
    most = _largest(path.name, runtime, made)
    outputs = run_golden(made.spec, runtime.run, min(TRIAL, most))
    for output, array in zip(made.spec.outputs, outputs, strict=True):
        if not np.isfinite(array).all():
            raise ArtifactRefused(f"{path.name} returns NaN or infinity as {output.name} for ordinary tiles")
    made = made.model_copy(update={"max_batch": most})
    return made.model_copy(update={"golden": write_golden(path, made.spec, outputs)})


def _require_names(path: Path, made: ArtifactManifest) -> None:
    if made.format == "onnx" and made.spec.graph is None:
        from inference.models.onnx_runtime import open_session

        session = open_session(path, path.name, "cpu")
        takes = ", ".join(f"{i.name} {i.type} {i.shape}" for i in session.get_inputs())
        returns = ", ".join(f"{i.name} {i.shape}" for i in session.get_outputs())
        raise ConfigError(
            f"the spec of {made.spec.model_name} needs graph: {{input_name, output_names, layout, dtype}}; "
            f"{path.name} takes {takes} and returns {returns}"
        )


def _largest(name: str, runtime: GraphRuntime, made: ArtifactManifest) -> int:
    """Rows that the graph takes: any number, or one; refused if its outputs are not the spec's."""
    spec = made.spec

    def run(batch: NDArray[Any], extras: Mapping[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
        found = runtime.run(batch, extras)
        for output, array in zip(spec.outputs, found, strict=True):
            if array.shape != (len(batch), *output.shape):
                planes = array.ndim == 4 and output.name == "prediction" and spec.mask is None
                hint = "; for a prediction per pixel the spec needs mask: {size, values, threshold}" if planes else ""
                raise ArtifactRefused(
                    f"{name} returns {output.name} of {array.shape[1:]} for {len(batch)} tiles, its spec declares "
                    f"{output.shape}{hint}"
                )
        return {output.name: array for output, array in zip(spec.outputs, found, strict=True)}

    one, extras = trial_batch(spec, 1), _extras(spec, 1)
    try:
        run(one, extras)
    except InferenceError:
        raise
    except Exception as error:
        raise ArtifactRefused(f"{name} does not run a tile of {spec.input_shape}: {_first(error)}") from error
    try:
        independent = rows_are_independent(run, trial_batch(spec, TRIAL), _extras(spec, TRIAL), alone_too=False)
    except InferenceError:
        raise
    except Exception as error:  # noqa: BLE001 - whatever its engine says of a batch that it does not take
        log.warning("%s takes one tile at a time: %s", name, _first(error))
        return 1
    if independent is None:
        raise ArtifactRefused(f"{name} gives a tile another result alone than in a batch: it cannot be batched")
    return made.max_batch


def _extras(spec: ModelSpec, size: int) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(3)
    return {extra.name: rng.random((size, *extra.shape), np.float32) for extra in spec.extra_inputs}


def _first(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
