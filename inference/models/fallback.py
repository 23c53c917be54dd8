"""A half-precision graph with the same network in full precision behind it, for the tiles that overflow."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from inference.errors import InferenceError
from inference.models.artifact import ArtifactManifest, FallbackPin
from inference.models.sample import NO_EXTRAS
from inference.models.verification import check_side_file

if TYPE_CHECKING:
    from inference.models.runtime import GraphRuntime

log = logging.getLogger(__name__)


def fallback_path(checkpoint: Path) -> Path:
    """It lies beside its checkpoint: `h0.pt2` -> `h0-fp32.pt2`."""
    return checkpoint.with_name(f"{checkpoint.stem}-fp32{checkpoint.suffix}")


def fallback_manifest(manifest: ArtifactManifest, pin: FallbackPin) -> ArtifactManifest:
    """What pins the graph in full precision: it has no manifest of its own."""
    return manifest.model_copy(
        update={
            "file": pin.file, "size": pin.size, "sha256": pin.sha256, "data_files": pin.data_files, "golden": None,
            "fallback": None, "spec": manifest.spec.model_copy(update={"precision": "fp32"}),
        }
    )  # fmt: skip


class FallbackRuntime:
    """Runs the graph in half precision, and the rows of a batch that come out as NaN or infinity once more in full.

    The graph in full precision is loaded when the first row needs it. It gets batches of the same length as the first
    one, so that what holds for fixed batches holds for it too. A tile's result depends on the tile alone.

    Attributes:
        rows_rerun: so far.
    """

    def __init__(
        self,
        runtime: "GraphRuntime",
        checkpoint: Path,
        manifest: ArtifactManifest,
        load: Callable[[Path, ArtifactManifest, str], "GraphRuntime"],
    ) -> None:
        pin = manifest.fallback
        assert pin is not None, "asked for where there is one"
        for pinned in (pin, *pin.data_files):
            check_side_file(checkpoint, pinned, manifest)
        self.kind, self.device, self.rows_rerun = runtime.kind, runtime.device, 0
        self._runtime, self._load = runtime, load
        self._name = manifest.model_name
        self._path, self._manifest = checkpoint.with_name(pin.file), fallback_manifest(manifest, pin)
        self._full: GraphRuntime | None = None
        self._refused = False

    def run(
        self, batch: NDArray[Any], extras: Mapping[str, NDArray[np.float32]] = NO_EXTRAS
    ) -> tuple[NDArray[np.float32], ...]:
        """See `Runtime.run`."""
        outputs = self._runtime.run(batch, extras)
        lost = np.zeros(len(batch), bool)
        for array in outputs:
            lost |= ~np.isfinite(array.reshape(len(batch), -1)).all(axis=1)
        if not lost.any() or (full := self._in_full()) is None:
            return outputs
        rows = np.flatnonzero(lost)
        # The lost rows first, others after them: as long as before.
        order = np.concatenate([rows, np.flatnonzero(~lost)])
        again = full.run(batch[order], {name: values[order] for name, values in extras.items()})
        self.rows_rerun += len(rows)
        log.debug("%s: %d tiles overflow in half precision and are run in full", self._name, len(rows))
        mended = [array.copy() for array in outputs]
        for array, found in zip(mended, again, strict=True):
            array[rows] = found[: len(rows)]
        return tuple(mended)

    def _in_full(self) -> "GraphRuntime | None":
        if self._full is None and not self._refused:
            try:
                self._full = self._load(self._path, self._manifest, self.device)
            except InferenceError as error:
                self._refused = True  # those tiles fail alone, the others are answered
                log.error("%s: tiles that overflow in half precision fail: %s", self._name, error)
            else:
                log.warning("%s: a tile overflows in half precision; such tiles are run in full", self._name)
        return self._full
