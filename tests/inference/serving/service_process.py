"""A service in a process of its own, whose model waits for a file before its first forward pass.

    python -m tests.inference.serving.service_process CHECKPOINT GATE [UNREADY_S]

A gate that holds the word `break` breaks the device; one that holds `unloadable` is not waited for: nothing loads.
"""

import sys
import time
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from inference.errors import DeviceBroken, InferenceError
from inference.models.registry import resolve_model
from inference.models.runtime import Runtime
from inference.models.sample import NO_EXTRAS
from inference.models.server_model import BaseServerModel, load_server_model
from inference.serving import ServiceSettings, create_app
from inference.serving.server import Listener, run_service


class GatedRuntime:
    """The real runtime, once the gate is there."""

    def __init__(self, real: Runtime, gate: Path) -> None:
        self.kind, self.device = real.kind, real.device
        self._real, self._gate = real, gate

    def run(
        self, batch: NDArray[np.uint8], extras: Mapping[str, NDArray[np.float32]] = NO_EXTRAS
    ) -> tuple[NDArray[np.float32], ...]:
        print("entered", flush=True)  # noqa: T201 - the test waits for it
        while not self._gate.exists():
            time.sleep(0.01)
        if self._gate.read_text() == "break":
            raise DeviceBroken("the device failed: an illegal memory access was encountered")
        return self._real.run(batch, extras)


def main() -> int:
    """Serve until told to stop; 1 if something of ours failed."""
    checkpoint, gate = sys.argv[1], Path(sys.argv[2])

    def load() -> BaseServerModel:
        if gate.exists() and gate.read_text() == "unloadable":
            raise InferenceError("the checkpoint is torn")
        model = load_server_model(resolve_model(checkpoint))
        model.runtime = GatedRuntime(model.runtime, gate)
        return model

    listener = Listener(port=0, unready_s=float(sys.argv[3]) if len(sys.argv) > 3 else 0.0)
    app = create_app({"demo": load}, ServiceSettings(max_wait_ms=0))
    try:
        run_service(app, listener, announce=lambda address: print(address, flush=True))  # noqa: T201
    except InferenceError as error:
        print(error.message, file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
