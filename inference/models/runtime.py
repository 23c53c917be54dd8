"""Runs a verified checkpoint: arrays in, arrays out, and nothing else is promised."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from inference.errors import ArtifactRefused, BadRequest, ConfigError, DeviceBroken, ModelContractError
from inference.models import _torch_noise as _torch_noise  # before the compiler is first imported
from inference.models.artifact import ArtifactManifest, scratch_folder, verified_copy
from inference.models.sample import NO_EXTRAS
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


class TorchRuntime:
    """A `.pt2`: an AOTInductor package, or the portable exported program.

    Raises:
        ArtifactRefused: the checkpoint is not what its manifest pins, not for this machine, or does not load.
        ConfigError: this machine has no such device.
    """

    def __init__(self, checkpoint: Path, manifest: ArtifactManifest, device: str = "cpu") -> None:
        self.kind: str = manifest.format
        self.device = device
        self._names = tuple(output.name for output in manifest.spec.outputs)
        self._input_shape, self._input_dtype = manifest.spec.input_shape, np.dtype(manifest.spec.input_dtype)
        self._extras = {extra.name: extra.shape for extra in manifest.spec.extra_inputs}
        self._max_batch = manifest.max_batch
        with verified_copy(checkpoint, manifest, device) as private:
            place = _find_device(device)
            try:
                self._call = _load(private, manifest, place)
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
    def run(
        self, batch: NDArray[Any], extras: Mapping[str, NDArray[np.float32]] = NO_EXTRAS
    ) -> tuple[NDArray[np.float32], ...]:
        """See `Runtime.run`.

        Raises:
            BadRequest: a batch that the graph was not made for.
            DeviceBroken: CUDA reported an error that no later call on this process survives.
            ModelContractError: the graph returned something other than one tensor per declared output.
        """
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
        if (given := {name: extra.shape for name, extra in extras.items()}) != wanted:
            raise BadRequest(f"the graph takes the further inputs {wanted}, not {given}")
        inputs = (batch, *(extras[name] for name in wanted))
        try:
            return self._arrays(self._call(*(torch.from_numpy(array).to(self.device) for array in inputs)))
        except torch.AcceleratorError as error:
            raise DeviceBroken(f"the device failed: {str(error).splitlines()[0]}") from error

    def _arrays(self, found: object) -> tuple[NDArray[np.float32], ...]:
        outputs = tuple(found) if isinstance(found, tuple | list) else (found,)
        tensors = [output for output in outputs if isinstance(output, torch.Tensor)]
        if len(tensors) != len(outputs) or len(outputs) != len(self._names):
            kinds = ", ".join(type(output).__name__ for output in outputs)
            raise ModelContractError(f"the graph returned ({kinds}), its spec names the tensors {self._names}")
        return tuple(tensor.to("cpu", torch.float32).numpy() for tensor in tensors)


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


def _load(path: Path, manifest: ArtifactManifest, device: torch.device) -> Callable[..., object]:
    # A compiled package trusts its caller with shapes unless told otherwise, and then reads garbage.
    os.environ["AOTI_RUNTIME_CHECK_INPUTS"] = "1"
    call: Callable[..., object]
    if manifest.format == "aotinductor":
        call = torch._inductor.aoti_load_package(
            str(path), device_index=-1 if device.index is None or device.type == "cpu" else device.index
        )
    else:
        call = torch.export.load(str(path)).module().to(device)
    return call
