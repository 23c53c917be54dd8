"""Runs a verified checkpoint: arrays in, arrays out, and nothing else is promised."""

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils import _pytree as pytree

from inference.errors import ArtifactRefused, BadRequest, ConfigError, DeviceBroken, ModelContractError
from inference.models import _torch_noise as _torch_noise  # before the compiler is first imported
from inference.models.artifact import ArtifactManifest, Pin
from inference.models.fallback import FallbackRuntime
from inference.models.golden import check_golden
from inference.models.sample import NO_EXTRAS
from inference.models.spec import ModelSpec
from inference.models.verification import scratch_folder, verified_copy
from inference.store.files import is_disk_full


class Runtime(Protocol):
    """One loaded graph.

    Attributes:
        kind: which machinery runs it, e.g. `aotinductor`; part of the recipe.
        device: torch device string.
    """

    kind: str
    device: str

    def run(
        self, batch: NDArray[Any], extras: Mapping[str, NDArray[np.float32]] = NO_EXTRAS
    ) -> tuple[NDArray[np.float32], ...]:
        """(B, C, H, W) uint8, or (B, D) float32 for a head -> one float32 array per output, each with B rows.

        `extras` are the spec's `extra_inputs`, by name, each with B rows.
        """
        ...


def open_runtime(checkpoint: Path, manifest: ArtifactManifest, device: str = "cpu") -> Runtime:
    """Load a checkpoint and compare it with its golden vectors, which also warms it up.

    Raises:
        ArtifactRefused: the checkpoint is not what its manifest pins, not for this machine, does not load, or returns
            something else than it must.
        ConfigError: this machine has no such device, or a package is missing.
    """
    runtime = open_graph(checkpoint, manifest, device)
    check_golden(checkpoint, manifest, runtime.run)
    return runtime if manifest.fallback is None else FallbackRuntime(runtime, checkpoint, manifest, open_graph)


def open_graph(checkpoint: Path, manifest: ArtifactManifest, device: str = "cpu") -> "GraphRuntime":
    """The graph alone, neither compared nor with its fallback.

    Raises:
        ArtifactRefused, ConfigError: as `open_runtime`.
    """
    if manifest.format == "onnx":
        from inference.models.onnx_runtime import OnnxRuntime  # an optional package

        return OnnxRuntime(checkpoint, manifest, device)
    return TorchRuntime(checkpoint, manifest, device)


class GraphRuntime(ABC):
    """What all runtimes share: inputs are checked before the graph sees them, outputs counted after.

    A graph that was not exported here gets its tiles in the layout, type and normalisation that its spec declares.
    """

    kind: str

    def __init__(self, manifest: ArtifactManifest, device: str) -> None:
        self.device = device
        self.spec: ModelSpec = manifest.spec
        self._names = tuple(output.name for output in self.spec.outputs)
        self._input_shape, self._input_dtype = self.spec.input_shape, np.dtype(self.spec.input_dtype)
        self._extras = {extra.name: extra.shape for extra in self.spec.extra_inputs}
        self._max_batch = manifest.max_batch
        self._foreign = None if self.spec.graph is None else _ForeignInput(self.spec)

    def run(
        self, batch: NDArray[Any], extras: Mapping[str, NDArray[np.float32]] = NO_EXTRAS
    ) -> tuple[NDArray[np.float32], ...]:
        """See `Runtime.run`.

        Raises:
            BadRequest: a batch that the graph was not made for.
            DeviceBroken: the device reported an error that no later call on this process survives.
            torch.OutOfMemoryError, MemoryError: the batch is too large for the device.
            ModelContractError: the graph returned something other than one tensor per declared output.
        """
        self._check(batch, extras)
        first = batch if self._foreign is None else self._foreign.prepared(batch)
        outputs = self._forward(first, [extras[name] for name in self._extras])
        if len(outputs) != len(self._names):
            raise ModelContractError(f"the graph returned {len(outputs)} outputs, its spec names {self._names}")
        return tuple(outputs if self._foreign is None else [self._foreign.planes_first(array) for array in outputs])

    def _check(self, batch: NDArray[Any], extras: Mapping[str, NDArray[np.float32]]) -> None:
        if (
            batch.dtype != self._input_dtype
            or batch.shape[1:] != self._input_shape
            or not 0 < len(batch) <= self._max_batch
        ):
            raise BadRequest(
                f"the graph takes 1 to {self._max_batch} {self._input_dtype} inputs of {self._input_shape}, not "
                f"{batch.dtype} {batch.shape}"
            )
        wanted = {name: (len(batch), *shape) for name, shape in self._extras.items()}
        given = {name: extra.shape for name, extra in extras.items()}
        if given != wanted or any(extra.dtype != np.float32 for extra in extras.values()):
            raise BadRequest(f"the graph takes the further float32 inputs {wanted}, not {given}")

    @abstractmethod
    def _forward(self, batch: NDArray[Any], extras: Sequence[NDArray[np.float32]]) -> list[NDArray[np.float32]]: ...


class _ForeignInput:
    """Brings tiles into the form that a graph of others wants, and its planes into ours."""

    def __init__(self, spec: ModelSpec) -> None:
        assert spec.graph is not None
        self._graph = spec.graph
        self._bgr = spec.color_space == "BGR"
        if spec.mean is None or spec.std is None:
            raise ArtifactRefused(f"{spec.model_name}: its spec has no mean and std, which its graph needs")
        shape = (1, -1, 1, 1)
        self._mean = np.asarray(spec.mean, np.float32).reshape(shape)
        self._std = np.asarray(spec.std, np.float32).reshape(shape)

    def prepared(self, batch: NDArray[Any]) -> NDArray[Any]:
        if self._bgr:
            batch = batch[:, ::-1]
        if self._graph.dtype == "float32":
            batch = (batch.astype(np.float32) / np.float32(255) - self._mean) / self._std
        return np.ascontiguousarray(batch if self._graph.layout == "NCHW" else batch.transpose(0, 2, 3, 1))

    def planes_first(self, array: NDArray[np.float32]) -> NDArray[np.float32]:
        if self._graph.layout == "NHWC" and array.ndim == 4:
            return np.ascontiguousarray(array.transpose(0, 3, 1, 2))
        return array


class TorchRuntime(GraphRuntime):
    """A `.pt2`: an AOTInductor package, or the portable exported program.

    Raises:
        ArtifactRefused: the checkpoint is not what its manifest pins, not for this machine, or does not load.
        ConfigError: this machine has no such device.
    """

    def __init__(self, checkpoint: Path, manifest: ArtifactManifest, device: str = "cpu") -> None:
        super().__init__(manifest, device)
        self.kind = manifest.format
        self._call = load_program(checkpoint, manifest, device)

    def _forward(self, batch: NDArray[Any], extras: Sequence[NDArray[np.float32]]) -> list[NDArray[np.float32]]:
        return call_program(self._call, (batch, *extras), self.device)


def load_program(checkpoint: Path, manifest: Pin, device: str) -> Callable[..., object]:
    """The callable in a verified `.pt2`.

    Raises:
        ArtifactRefused: the checkpoint is not what its manifest pins, not for this machine, or does not load.
        ConfigError: this machine has no such device, or no room to unpack it.
    """
    with verified_copy(checkpoint, manifest, device) as private:
        place = _find_device(device)
        _check_gpu(checkpoint.name, manifest, place)
        try:
            return _load(private, manifest, place)
        except Exception as error:
            reason = (str(error).splitlines() or [""])[0]
            if is_disk_full(error) or "write callback failed" in reason:  # what its unzipping says
                raise ConfigError(
                    f"{checkpoint.name} cannot be unpacked in {scratch_folder()}: no space is left there; "
                    "point TMPDIR to a folder with room"
                ) from None
            raise ArtifactRefused(
                f"{checkpoint.name} does not load: {type(error).__name__}: {reason}; export it again"
            ) from error


@torch.inference_mode()
def call_program(call: Callable[..., object], inputs: Sequence[NDArray[Any]], device: str) -> list[NDArray[np.float32]]:
    """One call with arrays in and float32 arrays out, whatever the device.

    Raises:
        DeviceBroken, torch.OutOfMemoryError, ModelContractError: as `GraphRuntime.run`.
    """
    before = _out_of_memory_count(device)
    try:
        found = call(*(_tensor(array).to(device) for array in inputs))
        outputs = list(found) if isinstance(found, tuple | list) else [found]
        tensors = [output for output in outputs if isinstance(output, torch.Tensor)]
        if len(tensors) != len(outputs):
            kinds = ", ".join(type(output).__name__ for output in outputs)
            raise ModelContractError(f"the graph returned ({kinds}), not tensors")
        return [tensor.to("cpu", torch.float32).numpy() for tensor in tensors]
    except torch.OutOfMemoryError:
        raise
    except torch.AcceleratorError as error:
        if "out of memory" in str(error):
            raise torch.OutOfMemoryError(f"out of memory on {device}") from error
        raise DeviceBroken(f"the device failed: {str(error).splitlines()[0]}") from error
    except RuntimeError as error:
        # Compiled code reports every failure in the same words; the allocator and the device know which it was.
        if _out_of_memory_count(device) > before:
            raise torch.OutOfMemoryError(f"out of memory on {device}") from error
        _require_alive(device)
        raise


def _tensor(array: NDArray[Any]) -> torch.Tensor:
    # A graph may write to its input. Flat and back: compiled code refuses strides that an axis of length 1 may have.
    own = np.require(array, requirements=["C", "W"])
    return torch.from_numpy(own.reshape(-1)).view(array.shape)


def _out_of_memory_count(device: str) -> int:
    if not device.startswith("cuda"):
        return 0
    return int(torch.cuda.memory_stats(device).get("num_ooms", 0))


def free_device_memory(device: str) -> None:
    """Give what torch keeps for later back to the device."""
    if device.startswith("cuda"):
        torch.cuda.empty_cache()


def _require_alive(device: str) -> None:
    if not device.startswith("cuda"):
        return
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        raise DeviceBroken(f"the device failed: {str(error).splitlines()[0]}") from error


def _find_device(name: str) -> torch.device:
    present = {"cpu": 1, "cuda": torch.cuda.device_count(), "mps": int(torch.backends.mps.is_available())}
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(f"{name!r} is no device: give cpu, cuda, cuda:1 or mps") from None
    if (device.index or 0) >= present.get(device.type, 0):
        found = ", ".join(f"{count} {kind}" for kind, count in present.items() if count)
        raise ConfigError(f"this machine has no device {name}: torch sees {found}")
    return device


def _check_gpu(name: str, manifest: Pin, device: torch.device) -> None:
    if manifest.gpu is None or device.type != "cuda":
        return
    if (here := gpu_architecture(device)) != manifest.gpu:
        raise ArtifactRefused(f"{name} is compiled for {manifest.gpu}, this GPU is {here}; export it again on this one")


def gpu_architecture(device: torch.device) -> str:
    """Compute capability as compilers name it, e.g. `sm_90`."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _load(path: Path, manifest: Pin, device: torch.device) -> Callable[..., object]:
    # A compiled package trusts its caller with shapes unless told otherwise, and then reads garbage.
    os.environ["AOTI_RUNTIME_CHECK_INPUTS"] = "1"
    if manifest.format == "aotinductor":
        return _load_compiled(path, -1 if device.index is None or device.type == "cpu" else device.index)
    call: Callable[..., object] = torch.export.load(str(path)).module().to(device)
    return call


def _load_compiled(path: Path, device_index: int) -> Callable[..., object]:
    """What `torch._inductor.aoti_load_package` does, without the compiler's 1,500 modules: 0.02 s instead of 2.2 s.

    The structure of the outputs is read once, not at each call.
    """
    loader = torch._C._aoti.AOTIModelPackageLoader(str(path), "model", False, 1, device_index)
    structure = pytree.treespec_loads(loader.get_call_spec()[1])

    def call(*inputs: torch.Tensor) -> object:
        return pytree.tree_unflatten(loader.boxed_run(list(inputs)), structure)

    return call
