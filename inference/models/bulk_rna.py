"""Models that take bulk RNA beside the tile: with it, without it, or some rows so and some so in one batch."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from inference.contract import Lineage, ModelRequest
from inference.errors import BadRequest, ConfigError, ModelContractError
from inference.models._trial import close, trial_batch
from inference.models.rna import TPM_TOTAL, bulk_rna_sha256, check_bulk_rna, transform_bulk_rna
from inference.models.sample import Mode, PreparedSample
from inference.models.server_model import BaseServerModel
from inference.models.spec import ModelSpec, OmicsSpec

MAX_RNA_BYTES = 64 << 20
"""Registered RNA kept by default: 800 slides of 19,374 genes, 4 bytes each."""


class BulkRnaServerModel(BaseServerModel):
    """An image model that may be told a slide's bulk RNA.

    A request brings the values, or the digest under which they were registered, or neither: then the prediction is from
    the image alone. Nothing is remembered between requests but what was registered, and that is used only by requests
    that name it. The embedding is the image's, whether RNA comes along or not, unless the spec says otherwise.

    Args:
        max_rna_bytes: of registered RNA that is kept; what was longest not used goes first.

    Raises:
        ConfigError: as `BaseServerModel`, or the spec has no omics part.
        ModelContractError: the embedding depends on the RNA though the spec says that it does not.
    """

    def __init__(
        self,
        spec: ModelSpec,
        checkpoint: str,
        device: str = "cpu",
        directory: Path | str = "/opt/ml/model",
        *,
        fixed_batch: int | None = None,
        max_rna_bytes: int = MAX_RNA_BYTES,
    ) -> None:
        if spec.omics is None:
            raise ConfigError(f"{spec.model_name} takes no bulk RNA: its spec has no omics part")
        self._omics: OmicsSpec = spec.omics
        self._registered = _Registered(max_rna_bytes)
        self._absent = self._extras(np.zeros(spec.omics.n_genes, np.float32), present=False)
        super().__init__(spec, checkpoint, device, directory, fixed_batch=fixed_batch)
        self._check_embedding()

    def preprocess_bulk_rna(self, counts: Sequence[float]) -> Sequence[float]:
        """Apply the spec's omics transform; without one, return the counts unchanged."""
        if self._omics.transform == "none":
            return counts
        values = np.asarray(counts, np.float64)
        if not (values >= 0).all():
            raise BadRequest(f"bulk RNA is a list of numbers from 0 up: {self._omics.transform} is not for others")
        found: list[float] = transform_bulk_rna(values, self._omics).tolist()
        return found

    def register_bulk_rna(self, values: Sequence[float] | NDArray[np.float64]) -> str:
        """Keep a slide's values, (n_genes,) in the spec's unit, for requests that name them; usable from any thread.

        Returns:
            The digest that requests give as `bulk_rna_sha256`: SHA-256 of the values' little-endian IEEE doubles in
            the order of genes, as `inference.models.rna.bulk_rna_sha256` computes it.

        Raises:
            BadRequest: not one finite, non-negative number per gene, or a sum that is not that of the unit.
        """
        checked = check_bulk_rna(values, self._omics)
        digest = bulk_rna_sha256(checked)
        self._registered.put(digest, self._transformed(checked))
        return digest

    def prepare_sample(self, request: ModelRequest) -> PreparedSample:
        """Decode and check one request.

        Raises:
            ValueError: the image cannot be used, or the RNA cannot, is given in two ways or is not registered.
        """
        if request.bulk_rna is not None and request.bulk_rna_sha256 is not None:
            raise BadRequest("the request has both bulk_rna and bulk_rna_sha256: give one of them")
        sample = self.prepare_tile(self.read_image(request), request.bulk_rna_sha256)
        if request.bulk_rna is None:
            return sample
        values = self._transformed(check_bulk_rna(request.bulk_rna, self._omics))
        return replace(sample, extra_tensors=self._extras(values, present=True))

    def prepare_tile(self, rgb: NDArray[np.uint8], rna_sha256: str | None = None) -> PreparedSample:
        """Check one tile given as pixels: (H, W, 3) uint8 RGB, with registered RNA or without.

        Raises:
            BadRequest: wrong shape or dtype, or no such RNA is registered.
        """
        tile = super().prepare_tile(rgb).tile
        if rna_sha256 is None:
            return PreparedSample(tile, self._absent)
        values = self._registered.get(rna_sha256)
        if values is None:
            raise BadRequest(
                f"no bulk RNA is registered as {rna_sha256[:12]}: register it (again) and repeat the request; "
                f"the last {self._registered.max_bytes >> 20} MiB are kept"
            )
        return PreparedSample(tile, self._extras(values, present=True))

    def postprocess(self, arrays: dict[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
        """The prediction brought back into its unit; never the embedding."""
        if self._omics.output_transform == "none":
            return arrays
        with np.errstate(over="ignore"):  # what overflows is not finite, and that tile's error
            return arrays | {"prediction": np.expm1(arrays["prediction"])}

    def lineage(self, request: ModelRequest, mode: Mode) -> Lineage:
        """What makes the answer to this request: the RNA too, where the answer depends on it."""
        found = super().lineage(request, mode)
        if mode == "embedding" and not self._omics.embedding_uses_rna:
            return found
        digest = request.bulk_rna_sha256
        if request.bulk_rna is not None:
            digest = bulk_rna_sha256(request.bulk_rna)
        return found.model_copy(update={"bulk_rna_sha256": digest})

    def trial_extras(self, size: int, rng: np.random.Generator) -> dict[str, NDArray[np.float32]]:
        """RNA for every second row."""
        present = (np.arange(size) % 2 == 0).astype(np.float32).reshape(size, 1)
        values = rng.exponential(TPM_TOTAL / self._omics.n_genes, (size, self._omics.n_genes))
        return {
            "bulk_rna": transform_bulk_rna(values, self._omics).astype(np.float32) * present,
            "bulk_rna_present": present,
        }

    def _check_embedding(self) -> None:
        if self._omics.embedding_uses_rna or self._spec.embedding_dim is None:
            return
        size = self._fixed_batch or min(4, self.manifest.max_batch)
        tiles, extras = trial_batch(self._spec, size), self.trial_extras(size, np.random.default_rng(2))
        without = {name: np.zeros_like(extra) for name, extra in extras.items()}
        found = [self.run_graph(tiles, given).get("embedding") for given in (extras, without)]
        if found[0] is not None and found[1] is not None and not close(found[0], found[1], 1e-3):
            raise ModelContractError(
                f"{self.model_name}: the embedding depends on the bulk RNA: export it without it, or set "
                "embedding_uses_rna"
            )

    def _transformed(self, checked: NDArray[np.float64]) -> NDArray[np.float32]:
        return transform_bulk_rna(checked, self._omics).astype(np.float32)

    @staticmethod
    def _extras(values: NDArray[np.float32], *, present: bool) -> dict[str, NDArray[np.float32]]:
        flag = np.array([present], np.float32)
        for array in (values, flag):
            array.setflags(write=False)  # samples share them
        return {"bulk_rna": values, "bulk_rna_present": flag}


class _Registered:
    """Values by digest, the longest unused dropped beyond a number of bytes; usable from any thread."""

    def __init__(self, max_bytes: int) -> None:
        if max_bytes < 1:
            raise ConfigError(f"max_rna_bytes {max_bytes} starts at 1")
        self.max_bytes = max_bytes
        self._lock = threading.Lock()
        self._values: OrderedDict[str, NDArray[np.float32]] = OrderedDict()
        self._nbytes = 0

    def put(self, digest: str, values: NDArray[np.float32]) -> None:
        with self._lock:
            if digest not in self._values:
                self._values[digest] = values
                self._nbytes += values.nbytes
            self._values.move_to_end(digest)
            while self._nbytes > self.max_bytes and len(self._values) > 1:  # the newest is kept whatever its size
                self._nbytes -= self._values.popitem(last=False)[1].nbytes

    def get(self, digest: str) -> NDArray[np.float32] | None:
        with self._lock:
            if digest in self._values:
                self._values.move_to_end(digest)
            return self._values.get(digest)
