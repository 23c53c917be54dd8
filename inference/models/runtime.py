"""Runs a verified checkpoint: arrays in, arrays out, and nothing else is promised."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from inference.errors import DeviceBroken, ModelContractError
from inference.models.artifact import ArtifactManifest, verify_artifact


class Runtime(Protocol):
    """One loaded graph.

    Attributes:
        kind: which machinery runs it, e.g. `aotinductor`; part of the recipe.
    """

    kind: str
    device: str

    def run(self, batch: NDArray[np.uint8]) -> tuple[NDArray[np.float32], ...]:
        """(B, C, H, W) uint8 -> one float32 array per output, each with B rows."""
        ...


class TorchRuntime:
    """A `.pt2`: an AOTInductor package, or the portable exported program."""

    def __init__(self, checkpoint: Path, manifest: ArtifactManifest, device: str = "cpu") -> None:
        verify_artifact(checkpoint, manifest, device)
        self.kind: str = manifest.format
        self.device = device
        self._names = tuple(output.name for output in manifest.spec.outputs)
        # A compiled package trusts its caller with shapes unless told otherwise, and then reads garbage.
        os.environ["AOTI_RUNTIME_CHECK_INPUTS"] = "1"
        self._call: Callable[[torch.Tensor], torch.Tensor | Sequence[torch.Tensor]]
        if manifest.format == "aotinductor":
            self._call = torch._inductor.aoti_load_package(str(checkpoint))
        else:
            self._call = torch.export.load(str(checkpoint)).module().to(device)

    @torch.inference_mode()
    def run(self, batch: NDArray[np.uint8]) -> tuple[NDArray[np.float32], ...]:
        """See `Runtime.run`.

        Raises:
            DeviceBroken: CUDA reported an error that no later call on this process survives.
            ModelContractError: the graph returned something other than one tensor per declared output.
        """
        try:
            found = self._call(torch.from_numpy(batch).to(self.device))
            outputs = (found,) if isinstance(found, torch.Tensor) else tuple(found)
            arrays = tuple(output.to("cpu", torch.float32).numpy() for output in outputs)
        except torch.AcceleratorError as error:
            raise DeviceBroken(f"the device failed: {str(error).splitlines()[0]}") from error
        if len(arrays) != len(self._names):
            raise ModelContractError(f"the graph returned {len(arrays)} outputs, its spec names {self._names}")
        return arrays
