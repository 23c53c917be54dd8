"""The server model: stage 1 prepares one request alone, stage 2 runs a batch of prepared ones."""

import gc
import logging
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from inference.contract import Lineage, ModelMetadata, ModelRequest, ModelResponse
from inference.errors import (
    ArtifactRefused,
    BadRequest,
    ConfigError,
    ForwardError,
    InferenceError,
    ModelContractError,
    NonFiniteOutput,
)
from inference.models._trial import rows_are_independent, trial_batch
from inference.models.artifact import ArtifactManifest, load_manifest
from inference.models.registry import Checkpoint, resolve_model
from inference.models.runtime import Runtime, free_device_memory, open_runtime
from inference.models.sample import MODES, NO_EXTRAS, Mode, PreparedSample, TileOutput
from inference.models.spec import ModelSpec
from inference.models.stacking import stack_extras, stack_tiles

log = logging.getLogger(__name__)

NOT_FINITE = "the model returned NaN or infinity for this tile"

T = TypeVar("T", bound=np.generic)


class BaseServerModel:
    """A loaded checkpoint that answers tile requests; used as it is for any image model.

    Subclasses with further inputs override `prepare_sample` and `forward_tiles`, those with answers of their own
    `forward_batch`; one that overrides only the legacy `forward` is served through it. `prepare_sample` may run in
    any number of threads; forwards take turns by `forward_lock`, which models that share a network share.

    Args:
        spec: what the model is; must equal the checkpoint's.
        checkpoint: file name of the `.pt2` or `.onnx` in `directory`.
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
        self.require_parts(spec)
        path = Path(directory) / checkpoint
        self.manifest: ArtifactManifest = load_manifest(path)
        if self.manifest.spec.recipe() != spec.recipe():
            raise ConfigError(f"{checkpoint} implements another spec than {spec.model_name} {spec.version}")
        if fixed_batch is not None and not 1 <= fixed_batch <= self.manifest.max_batch:
            raise ConfigError(f"{checkpoint} takes batches of 1 to {self.manifest.max_batch} tiles, not {fixed_batch}")
        self._spec = spec
        self._fixed_batch = fixed_batch
        self.forward_lock = threading.Lock()
        self.runtime: Runtime = open_runtime(path, self.manifest, device)
        self.rows_independent = self._warm_up()

    def require_parts(self, spec: ModelSpec) -> None:
        """Take from the spec what this class needs of it; called before anything is loaded.

        Raises:
            ConfigError: the spec lacks it.
        """

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

    def serves(self, model_name: str) -> bool:
        """Whether this model answers requests that name `model_name`."""
        return model_name == self.model_name

    # Stage 1: one request, alone.

    def prepare_sample(self, request: ModelRequest) -> PreparedSample:
        """Decode and check one request.

        Raises:
            ValueError: the image does not decode or has not the model's tile size, or RNA for a model that takes none.
        """
        if request.bulk_rna is not None or request.bulk_rna_sha256 is not None:
            raise BadRequest(f"{self.model_name} takes no bulk RNA: leave bulk_rna and bulk_rna_sha256 out")
        return self.prepare_tile(self.read_image(request))

    def read_image(self, request: ModelRequest) -> NDArray[np.uint8]:
        """The request's tile, (H, W, 3) uint8 RGB; of another size than the model's, it is not even decoded.

        Raises:
            ValueError: the image does not decode or has not the model's tile size.
        """
        size = self._spec.tile_spec.size
        if (request.width, request.height) != (size, size):
            raise BadRequest(f"{self.model_name} takes {size} x {size} tiles, not {request.width} x {request.height}")
        return np.asarray(request.image, dtype=np.uint8)

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
        """Apply the spec's omics transform; a model that takes no RNA has none and returns the counts unchanged."""
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
        if type(self).forward is not BaseServerModel.forward:
            return self._forward_legacy(requests, mode)
        answers = []
        for request, output in zip(requests, self.forward_tiles(samples, [mode] * len(samples)), strict=True):
            if isinstance(output, InferenceError):
                raise output
            answers.append(self.respond(request, output, mode))
        return answers

    def respond(self, request: ModelRequest, output: TileOutput, mode: Mode) -> ModelResponse:
        """The response to one request: the head asked for, the request's place echoed, and what made it.

        Raises:
            NonFiniteOutput: what JSON cannot say is in it.
        """
        main = output.embedding if mode == "embedding" else output.predicted()
        assert main is not None, "the mode was checked before the forward"
        also = output.embedding if mode == "prediction_with_embedding" else None
        if not all(np.isfinite(values).all() for values in (main, also) if values is not None):
            raise NonFiniteOutput(NOT_FINITE)
        # Not validated once more: that takes 70 ms for the 262,144 values of a mask.
        return ModelResponse.model_construct(
            output=main.tolist(),
            embedding=None if also is None else also.tolist(),
            slide_name=request.slide_name, x=request.x, y=request.y, width=request.width, height=request.height,
            patch_idx=request.patch_idx, tissue_ratio=request.tissue_ratio, resolution=request.resolution,
            lineage=self.lineage(request, mode),
        )  # fmt: skip

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
        arrays = self.postprocess(self.run_graph(stack_tiles(samples, self._spec), stack_extras(samples, self._spec)))
        results: list[TileOutput | NonFiniteOutput] = []
        for row, mode in enumerate(modes):
            wanted = {name: array[row] for name, array in arrays.items() if name in mode}
            finite = all(np.isfinite(values).all() for values in wanted.values())
            results.append(self.tile_output(wanted) if finite else NonFiniteOutput(NOT_FINITE))
        return results

    def postprocess(self, arrays: dict[str, NDArray[np.float32]]) -> dict[str, NDArray[np.float32]]:
        """The graph's outputs of a batch, brought into the units of the spec; as they are unless a subclass must."""
        return arrays

    def tile_output(self, heads: Mapping[str, NDArray[np.float32]]) -> TileOutput:
        """One row of the outputs that were asked for, all finite, as the result of its tile."""
        # Copies: a kept row must not keep its whole batch alive.
        kept = {name: values.copy() for name, values in heads.items()}
        return TileOutput(kept.get("embedding"), kept.get("prediction"))

    def forward(self, requests: Sequence[ModelRequest]) -> NDArray[np.float32]:
        """Run requests without the two stages (legacy): (N, D), the prediction if there is one.

        Raises:
            NonFiniteOutput: the model returned NaN or infinity for one of them.
        """
        output = self._spec.outputs[-1]
        mode: Mode = "embedding" if output.name == "embedding" else "prediction"
        found = self.forward_tiles([self.prepare_sample(request) for request in requests], [mode] * len(requests))
        rows = []
        for row in found:
            if isinstance(row, NonFiniteOutput):
                raise row
            rows.append(row.embedding if row.embedding is not None else row.predicted())
        width = output.shape[0] if self._spec.mask is None else self._spec.mask.size**2
        return np.stack(rows) if rows else np.zeros((0, width), np.float32)

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
        """Name, input and output specs, configuration, and what runs them."""
        return ModelMetadata(
            model_name=self.model_name, version=self._spec.version, license=self._spec.license,
            input_shape=self._spec.input_shape, input_dtype=self._spec.input_dtype, mpp=self._spec.tile_spec.resolution,
            outputs=self._spec.outputs, device=self.runtime.device, runtime=self.runtime.kind,
            extra_inputs=self._spec.extra_inputs, config=self._spec.config(),
            artifact_sha256=self.manifest.sha256, weights_sha256=self.manifest.weights_sha256,
        )  # fmt: skip

    def lineage(self, request: ModelRequest, mode: Mode) -> Lineage:  # noqa: ARG002 - not the same for every mode of a head
        """What makes the answer to this request."""
        return self._lineage.model_copy(update={"request_id": request.request_id})

    @cached_property
    def _lineage(self) -> Lineage:
        return Lineage(
            request_id="", model_name=self.model_name, model_version=self._spec.version,
            weights_sha256=self.manifest.weights_sha256, artifact_sha256=self.manifest.sha256,
            preprocessing_sha256=self._spec.preprocessing_sha256, precision=self._spec.precision,
            runtime=self.runtime.kind, device=self.runtime.device, code_version=version("slide-inference"),
        )  # fmt: skip

    def _forward_legacy(self, requests: Sequence[ModelRequest], mode: Mode) -> list[ModelResponse]:
        """Answers of a subclass that has only `forward(requests) -> (N, D)`, in whichever mode it was asked."""
        self.check_mode(mode)
        try:
            rows = np.asarray(self.forward(requests), np.float32)
        except InferenceError:
            raise
        except Exception as error:
            raise ForwardError(f"the forward pass of {self.model_name} failed: {_first_line(error)}") from error
        if rows.ndim != 2 or len(rows) != len(requests):
            raise ModelContractError(f"{self.model_name} returned {rows.shape} for {len(requests)} requests")
        if not np.isfinite(rows).all():
            raise NonFiniteOutput("the model returned NaN or infinity for a tile of this batch")
        name = "embedding" if mode == "embedding" else "prediction"
        return [self.respond(q, TileOutput(**{name: row}), mode) for q, row in zip(requests, rows, strict=True)]

    def run_graph(
        self, batch: NDArray[Any], extras: Mapping[str, NDArray[np.float32]] = NO_EXTRAS
    ) -> dict[str, NDArray[np.float32]]:
        """The graph's outputs by name, padded to the fixed batch for the call and cut again.

        Raises:
            ForwardError: the forward pass failed.
            ModelContractError: the graph returned other counts or shapes than its spec declares.
        """
        padded = self._padded(batch)
        further = {name: self._padded(extra) for name, extra in extras.items()}
        try:
            with self.forward_lock:
                outputs = self.runtime.run(padded, further)
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

    def free_memory(self) -> None:
        """What can be let go before a batch that did not fit is tried again, smaller."""
        gc.collect()
        free_device_memory(self.runtime.device)

    def _padded(self, batch: NDArray[T]) -> NDArray[T]:
        size = self._fixed_batch
        if size is None or len(batch) == size:
            return batch
        if len(batch) > size:
            raise BadRequest(f"{len(batch)} tiles in a batch, {self.model_name} was loaded for {size}")
        padded = np.zeros((size, *batch.shape[1:]), batch.dtype)
        padded[: len(batch)] = batch
        return padded

    def trial_extras(self, size: int, rng: np.random.Generator) -> dict[str, NDArray[np.float32]]:
        """Extra inputs of the right shapes for `size` rows, to try the graph with."""
        return {extra.name: rng.random((size, *extra.shape), np.float32) for extra in self._spec.extra_inputs}

    def _warm_up(self) -> bool:
        """Run before anyone waits; whether rows ignore neighbours and place, bit for bit, at the fixed shape."""
        size = self._fixed_batch or min(4, self.manifest.max_batch)
        extras = self.trial_extras(size, np.random.default_rng(2))
        same = rows_are_independent(self.run_graph, trial_batch(self._spec, size), extras, bool(self._fixed_batch))
        if same is None:
            raise ModelContractError(f"{self.model_name} gives a tile another result alone than in a batch")
        if not same:
            log.warning("%s: rows depend on their batch on this device; results hold to a tolerance", self.model_name)
        return same


def build_server_model(
    model: str, checkpoint: Path | str | None = None, device: str = "cpu", *, fixed_batch: int | None = None
) -> BaseServerModel:
    """Load a model by registered name, or the given checkpoint of it, as the class that its spec asks for.

    A head brings its backbone along, found by the name in its spec.

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
    from inference.models._kinds import class_for  # these modules import this one
    from inference.models.heads import DownstreamHeadModel, EmbeddingHead

    spec = found.manifest.spec
    model = class_for(spec)(spec, found.path.name, device, found.path.parent, fixed_batch=fixed_batch)
    if model.manifest != found.manifest:
        # Results would be filed under the weights that were there before.
        raise ArtifactRefused(f"{found.path.name} was replaced since it was found: start again")
    if spec.head is None:
        return model
    assert isinstance(model, EmbeddingHead), "the class of a spec with a head"
    backbone = load_server_model(resolve_model(spec.head.backbone), device, fixed_batch=fixed_batch)
    return DownstreamHeadModel(backbone, {model.model_name: model})


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
