"""Runs a verified ONNX graph."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inference.errors import ArtifactRefused, ConfigError, DeviceBroken
from inference.models.artifact import ArtifactManifest
from inference.models.runtime import GraphRuntime
from inference.models.spec import ModelSpec
from inference.models.verification import verified_copy

TILE = "tile"
"""The name that our exports give their first input."""

_PROVIDERS = {"cpu": "CPUExecutionProvider", "cuda": "CUDAExecutionProvider"}

_QUIET = 3
"""onnxruntime's level `error`."""

_NO_MEMORY = ("failed to allocate memory", "bad_alloc", "out of memory", "bad allocation")
_LASTING = ("illegal memory access", "device-side assert", "cuda failure 7", "ecc error")


class OnnxRuntime(GraphRuntime):
    """An `.onnx` graph, with its external data if it has any, in ONNX Runtime.

    Raises:
        ArtifactRefused: the checkpoint is not what its manifest pins, does not load, or has not the inputs and outputs
            that its spec names.
        ConfigError: this machine has no such device, or the package is missing.
    """

    kind = "onnx"

    def __init__(self, checkpoint: Path, manifest: ArtifactManifest, device: str = "cpu") -> None:
        super().__init__(manifest, device)
        self._inputs, self._outputs = graph_names(manifest.spec)
        with verified_copy(checkpoint, manifest, device) as private:
            self._session = open_session(private, checkpoint.name, device)
        found = {item.name for item in self._session.get_inputs()}, {i.name for i in self._session.get_outputs()}
        if found[0] != set(self._inputs) or not set(self._outputs) <= found[1]:
            raise ArtifactRefused(
                f"{checkpoint.name} takes {', '.join(sorted(found[0]))} and returns {', '.join(sorted(found[1]))}; its "
                f"spec names {', '.join(self._inputs)} and {', '.join(self._outputs)}"
            )

    def _forward(self, batch: NDArray[Any], extras: Sequence[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
        feed = dict(zip(self._inputs, (batch, *extras), strict=True))
        try:
            found = self._session.run(list(self._outputs), feed)
        except Exception as error:
            text = str(error).lower()
            if any(words in text for words in _LASTING):
                raise DeviceBroken(f"the device failed: {str(error).splitlines()[0]}") from error
            if any(words in text for words in _NO_MEMORY):
                raise MemoryError(f"out of memory on {self.device}") from error
            raise
        return [np.asarray(array).astype(np.float32, copy=False) for array in found]


def graph_names(spec: ModelSpec) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of a graph's inputs and outputs, in the spec's order."""
    extras = tuple(extra.name for extra in spec.extra_inputs)
    if spec.graph is None:
        return (TILE, *extras), tuple(output.name for output in spec.outputs)
    return (spec.graph.input_name, *extras), spec.graph.output_names


def open_session(path: Path, name: str, device: str) -> Any:
    """An inference session over a file that was verified; `name` is for messages.

    Raises:
        ArtifactRefused: onnxruntime cannot load it.
        ConfigError: no such device here, or the package is missing.
    """
    try:
        import onnxruntime as ort
    except ImportError:
        raise ConfigError("running .onnx needs another package: pip install 'slide-inference[onnx]'") from None
    options = ort.SessionOptions()
    options.log_severity_level = _QUIET
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")  # waiting costs nothing
    try:
        return ort.InferenceSession(str(path), options, providers=[_provider(device, ort.get_available_providers())])
    except (ConfigError, ArtifactRefused):
        raise
    except Exception as error:
        reason = " ".join(str(error).split())[:300].replace(str(path.parent), "")
        raise ArtifactRefused(f"{name} does not load: {reason}; export or import it again") from error


def _provider(device: str, available: Sequence[str]) -> str | tuple[str, dict[str, int]]:
    kind, _, index = device.partition(":")
    provider = _PROVIDERS.get(kind)
    if provider is None or (index and not index.isdecimal()):
        raise ConfigError(f"{device!r} is no device of ONNX Runtime: give cpu, cuda or cuda:1")
    if provider not in available:
        raise ConfigError(f"this ONNX Runtime has no {kind}: install onnxruntime-gpu, or give cpu")
    return provider if kind == "cpu" else (provider, {"device_id": int(index or 0)})
