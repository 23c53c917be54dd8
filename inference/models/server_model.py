"""The server model: stage 1 prepares one request alone, stage 2 runs a batch of prepared ones."""

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from inference.contract import ModelMetadata, ModelRequest, ModelResponse
from inference.errors import (
    ArtifactRefused,
    BadRequest,
    ConfigError,
    ForwardError,
    InferenceError,
    ModelContractError,
    NonFiniteOutput,
)
from inference.models.artifact import ArtifactManifest, load_manifest
from inference.models.registry import Checkpoint, resolve_model
from inference.models.runtime import Runtime, TorchRuntime
from inference.models.sample import MODES, Mode, PreparedSample, TileOutput
from inference.models.spec import ModelSpec

log = logging.getLogger(__name__)


class BaseServerModel:
    """A loaded checkpoint that answers tile requests; used as it is for any image model.

    Subclasses with further inputs override `prepare_sample` and `forward_batch`. One instance is used by
    one forward at a time; `prepare_sample` may run in any number of threads.

    Args:
        spec: what the model is; must equal the checkpoint's.
        checkpoint: file name of the `.pt2` in `directory`.
        device: torch device string.
        directory: folder of exported checkpoints.
        fixed_batch: pad every forward to exactly this many rows. At a fixed shape a row's result does
            not depend on its neighbours or its place, so results are reproducible bit for bit.

    Raises:
        UnknownModel: no such checkpoint.
        ArtifactRefused: the checkpoint is not what its manifest pins, or not for this machine.
        ConfigError: another spec than the checkpoint's, a device that is not there, or a batch it cannot take.
    """

    def __init__(
        self,
        spec: ModelSpec,
        checkpoint: str,
        device: str = "cpu",
        directory: Path | str = "/opt/ml/model",
        *,
        fixed_batch: int | None = None,
    ) -> None:
        path = Path(directory) / checkpoint
        self.manifest: ArtifactManifest = load_manifest(path)
        if self.manifest.spec.recipe() != spec.recipe():
            raise ConfigError(f"{checkpoint} implements another spec than {spec.model_name} {spec.version}")
        if fixed_batch is not None and not 1 <= fixed_batch <= self.manifest.max_batch:
            raise ConfigError(f"{checkpoint} takes batches of 1 to {self.manifest.max_batch} tiles, not {fixed_batch}")
        self._spec = spec
        self._fixed_batch = fixed_batch
        self.runtime: Runtime = TorchRuntime(path, self.manifest, device)
        self.rows_independent = self._warm_up()

    @property
    def model_spec(self) -> ModelSpec:
        """The model's specification: tile size, normalisation, outputs."""
        return self._spec

    @property
    def model_name(self) -> str:
        """The model's identifier, e.g. `demo`."""
        return self._spec.model_name

    @property
    def fixed_batch(self) -> int | None:
        """Rows of every forward, or None where the batch is as long as it comes."""
        return self._fixed_batch

    # Stage 1: one request, alone.

    def prepare_sample(self, request: ModelRequest) -> PreparedSample:
        """Decode and check one request.

        Raises:
            ValueError: the image does not decode or has not the model's tile size.
        """
        return self.prepare_tile(np.asarray(request.image, dtype=np.uint8))

    def prepare_tile(self, rgb: NDArray[np.uint8]) -> PreparedSample:
        """Check one tile given as pixels: (H, W, 3) uint8 RGB.

        Raises:
            BadRequest: wrong shape or dtype.
        """
        channels, height, width = self._spec.input_shape
        if rgb.shape != (height, width, channels) or rgb.dtype != np.uint8:
            raise BadRequest(
                f"{self.model_name} takes {height} x {width} x {channels} uint8 tiles, not {rgb.shape} {rgb.dtype}"
            )
        tile = np.array(rgb.transpose(2, 0, 1), order="C")  # a copy: the caller may reuse its buffer
        tile.setflags(write=False)
        return PreparedSample(tile)

    def preprocess_bulk_rna(self, counts: Sequence[float]) -> Sequence[float]:
        """Apply the spec's omics transform; without one, return the counts unchanged."""
        return counts

    # Stage 2: a batch of prepared samples.

    def forward_batch(
        self, samples: Sequence[PreparedSample], requests: Sequence[ModelRequest], mode: Mode
    ) -> list[ModelResponse]:
        """Run a batch and answer each request, in order.

        Raises:
            ForwardError: the forward pass failed, or a row of it is not finite.
            BadRequest: the model has no such mode, or there are more samples than requests or fewer.
        """
        if len(samples) != len(requests):
            raise BadRequest(f"{len(samples)} samples and {len(requests)} requests: give one of each per tile")
        answers = []
        for request, output in zip(requests, self.forward_tiles(samples, [mode] * len(samples)), strict=True):
            if isinstance(output, InferenceError):
                raise output
            answers.append(respond(request, output, mode))
        return answers

    def forward_tiles(
        self, samples: Sequence[PreparedSample], modes: Sequence[Mode]
    ) -> list[TileOutput | NonFiniteOutput]:
        """Run a batch on the tensor path: one result per sample, in order.

        A row with NaN or infinity in a head that was asked for is an error; its neighbours are not affected.

        Raises:
            ForwardError: the forward pass failed as a whole.
            ModelContractError: the graph returned other counts or shapes than its spec declares.
            BadRequest: an unknown mode, or a sample that is not one of this model.
        """
        if len(samples) != len(modes):
            raise BadRequest(f"{len(samples)} samples and {len(modes)} modes: give one of each per tile")
        for mode in set(modes):
            self.check_mode(mode)
        if not samples:
            return []
        arrays = self._run(self._stacked(samples))
        results: list[TileOutput | NonFiniteOutput] = []
        for row, mode in enumerate(modes):
            wanted = [name for name in arrays if name in mode]
            if not all(np.isfinite(arrays[name][row]).all() for name in wanted):
                results.append(NonFiniteOutput("the model returned NaN or infinity for this tile"))
                continue
            # Copies: a kept row must not keep its whole batch alive.
            heads = {name: arrays[name][row].copy() for name in wanted}
            results.append(TileOutput(heads.get("embedding"), heads.get("prediction")))
        return results

    def forward(self, requests: Sequence[ModelRequest]) -> NDArray[np.float32]:
        """Run requests without the two stages (legacy): (N, D), the prediction if there is one."""
        output = self._spec.outputs[-1]
        if not requests:
            return np.zeros((0, *output.shape), np.float32)
        samples = [self.prepare_sample(request) for request in requests]
        return self._run(self._stacked(samples))[output.name]

    def check_mode(self, mode: str) -> Mode:
        """Refuse a mode that does not exist or that this model has no head for.

        Raises:
            BadRequest: with the modes that would do.
        """
        named = {output.name for output in self._spec.outputs}
        usable = [m for m in MODES if all(part in named for part in m.split("_with_"))]
        if mode not in usable:
            raise BadRequest(f"{self.model_name} has no mode {mode!r}; it offers {', '.join(usable)}")
        return mode

    def get_metadata(self) -> ModelMetadata:
        """Name, input and output specs, and what runs them."""
        return ModelMetadata(
            model_name=self.model_name, version=self._spec.version, license=self._spec.license,
            input_shape=self._spec.input_shape, input_dtype="uint8", mpp=self._spec.tile_spec.resolution,
            outputs=self._spec.outputs, device=self.runtime.device, runtime=self.runtime.kind,
            artifact_sha256=self.manifest.sha256, weights_sha256=self.manifest.weights_sha256,
        )  # fmt: skip

    def _stacked(self, samples: Sequence[PreparedSample]) -> NDArray[np.uint8]:
        shape = self._spec.input_shape
        for sample in samples:
            if sample.tile.shape != shape or sample.tile.dtype != np.uint8:
                raise BadRequest(
                    f"{self.model_name} takes uint8 tiles of {shape}, not {sample.tile.dtype} {sample.tile.shape}"
                )
        return np.stack([sample.tile for sample in samples])

    def _run(self, batch: NDArray[np.uint8]) -> dict[str, NDArray[np.float32]]:
        """Every output by name, padded to the fixed batch for the call and cut again."""
        padded = self._padded(batch)
        try:
            outputs = self.runtime.run(padded)
        except InferenceError:
            raise
        except Exception as error:
            raise ForwardError(f"the forward pass of {self.model_name} failed: {_first_line(error)}") from error
        declared = [(len(padded), *spec.shape) for spec in self._spec.outputs]
        if [array.shape for array in outputs] != declared:
            raise ModelContractError(
                f"{self.model_name} returned {[array.shape for array in outputs]} for {len(padded)} tiles, "
                f"its spec declares {declared}"
            )
        return {spec.name: array[: len(batch)] for spec, array in zip(self._spec.outputs, outputs, strict=True)}

    def _padded(self, batch: NDArray[np.uint8]) -> NDArray[np.uint8]:
        size = self._fixed_batch
        if size is None or len(batch) == size:
            return batch
        if len(batch) > size:
            raise BadRequest(f"{len(batch)} tiles in a batch, {self.model_name} was loaded for {size}")
        padded = np.zeros((size, *batch.shape[1:]), np.uint8)
        padded[: len(batch)] = batch
        return padded

    def _warm_up(self) -> bool:
        """Run before anyone waits; whether rows ignore neighbours and place, bit for bit, at the fixed shape."""
        size = self._fixed_batch or min(4, self.manifest.max_batch)
        tiles = np.random.default_rng(0).integers(0, 256, (size, *self._spec.input_shape), dtype=np.uint8)
        order = np.random.default_rng(1).permutation(size)
        first, moved, alone = self._run(tiles), self._run(tiles[order]), self._run(tiles[:1])
        if not all(_close(first[n][:1], alone[n]) for n in first):
            raise ModelContractError(f"{self.model_name} gives a tile another result alone than in a batch")
        same = all(np.array_equal(first[n][order], moved[n], equal_nan=True) for n in first)
        if self._fixed_batch:
            same = same and all(np.array_equal(first[n][:1], alone[n], equal_nan=True) for n in first)
        if not same:
            log.warning("%s: rows depend on their batch on this device; results hold to a tolerance", self.model_name)
        return same


def _close(one: NDArray[np.float32], other: NDArray[np.float32]) -> bool:
    """Equal to what half precision and another order of summation leave; a wrong shape in compiled code is far off."""
    scale = float(np.nanmax(np.abs(one), initial=0.0))
    return np.allclose(one, other, rtol=0, atol=0.05 * scale + 1e-6, equal_nan=True)


def respond(request: ModelRequest, output: TileOutput, mode: Mode) -> ModelResponse:
    """The response to one request: the head asked for, and the request's place echoed."""
    main = output.embedding if mode == "embedding" else output.prediction
    assert main is not None, "the mode was checked before the forward"
    also = output.embedding if mode == "prediction_with_embedding" else None
    return ModelResponse(
        output=main.ravel().tolist(),
        embedding=None if also is None else also.ravel().tolist(),
        slide_name=request.slide_name, x=request.x, y=request.y, width=request.width, height=request.height,
        patch_idx=request.patch_idx, tissue_ratio=request.tissue_ratio, resolution=request.resolution,
    )  # fmt: skip


def build_server_model(
    model: str, checkpoint: Path | str | None = None, device: str = "cpu", *, fixed_batch: int | None = None
) -> BaseServerModel:
    """Load a model by registered name, or the given checkpoint of it.

    Raises:
        UnknownModel: no such model or checkpoint.
        ArtifactRefused: the checkpoint is not what its manifest pins, or not for this machine.
        ConfigError: the checkpoint holds another model.
    """
    if checkpoint is None:
        return load_server_model(resolve_model(model), device, fixed_batch=fixed_batch)
    found = Checkpoint(Path(checkpoint), load_manifest(Path(checkpoint)))
    if found.manifest.spec.model_name != model:
        raise ConfigError(f"{found.path.name} holds {found.manifest.spec.model_name}, not {model}")
    return load_server_model(found, device, fixed_batch=fixed_batch)


def load_server_model(found: Checkpoint, device: str = "cpu", *, fixed_batch: int | None = None) -> BaseServerModel:
    """Load a resolved checkpoint.

    Raises:
        ArtifactRefused: as `BaseServerModel`, or another checkpoint lies there now.
    """
    model = BaseServerModel(found.manifest.spec, found.path.name, device, found.path.parent, fixed_batch=fixed_batch)
    if model.manifest != found.manifest:
        # Results would be filed under the weights that were there before.
        raise ArtifactRefused(f"{found.path.name} was replaced since it was found: start again")
    return model


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
