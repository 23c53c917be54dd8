"""Several predictions from one backbone: its network runs once for a tile, whichever of them are wanted."""

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from inference.contract import Lineage, ModelMetadata, ModelRequest, OutputSpec
from inference.errors import BadRequest, ConfigError, NonFiniteOutput
from inference.models.artifact import load_manifest
from inference.models.sample import Mode, PreparedSample, TileOutput
from inference.models.server_model import NOT_FINITE, BaseServerModel
from inference.models.spec import ModelSpec

Row = TileOutput | NonFiniteOutput


class EmbeddingHead(BaseServerModel):
    """A loaded head: embeddings in, predictions out. It answers tiles only behind its backbone.

    Raises:
        ConfigError: as `BaseServerModel`, or the spec is not of a head.
    """

    def require_parts(self, spec: ModelSpec) -> None:
        """See `BaseServerModel.require_parts`."""
        if spec.head is None:
            raise ConfigError(f"{spec.model_name} takes tiles, not embeddings: its spec has no head part")
        self.backbone_name, self.embedding_dim = spec.head.backbone, spec.head.embedding_dim

    def prepare_tile(self, rgb: NDArray[np.uint8]) -> PreparedSample:
        """Refused: a head takes embeddings.

        Raises:
            BadRequest: always, with the class that takes tiles.
        """
        raise BadRequest(
            f"{self.model_name} takes embeddings of {self.backbone_name}, not tiles of {rgb.shape}: use it in a "
            "DownstreamHeadModel"
        )

    def predict(self, embeddings: NDArray[np.float32]) -> NDArray[np.float32]:
        """(B, D) float32 embeddings -> (B, K) float32 predictions.

        Raises:
            BadRequest: embeddings of another length.
            ForwardError, ModelContractError: as `run_graph`.
        """
        return self.run_graph(embeddings)["prediction"]


class DownstreamHeadModel(BaseServerModel):
    """Heads over a backbone, in one process.

    One pass of the backbone feeds every head that a batch asks for. A request chooses its head by `model_name`; one
    that names none, or this model, gets the default. Embeddings are the backbone's own. The backbone may be shared
    with other models and clients: forwards through it take turns.

    Args:
        backbone: a loaded model with an embedding.
        heads: by the name that requests give; loaded, or the path of a checkpoint.
        default: name of the head that answers where none is named; by default the first.

    Raises:
        ConfigError: no heads, or one that was made for another backbone, embedding or tile.
        UnknownModel, ArtifactRefused: a checkpoint is not there, or not what its manifest pins.
    """

    def __init__(
        self,
        backbone: BaseServerModel,
        heads: Mapping[str, EmbeddingHead | Path | str],
        default: str | None = None,
    ) -> None:
        if not heads:
            raise ConfigError("a DownstreamHeadModel needs at least one head")
        self._default = next(iter(heads)) if default is None else default
        if self._default not in heads:
            raise ConfigError(f"no head {self._default!r}: there are {', '.join(heads)}")
        self.backbone = backbone
        self.heads = {name: _loaded(head, backbone) for name, head in heads.items()}
        for head in self.heads.values():
            _check_fits(head, backbone)
            head.forward_lock = backbone.forward_lock
        first = self.heads[self._default]
        self._spec = _joined(backbone.model_spec, first.model_spec, self._default)
        self._fixed_batch = backbone.fixed_batch
        self.forward_lock = backbone.forward_lock
        self.runtime = backbone.runtime
        self.rows_independent = all(model.rows_independent for model in (backbone, *self.heads.values()))
        most = min(model.manifest.max_batch for model in (backbone, *self.heads.values()))
        self.manifest = first.manifest.model_copy(update={"spec": self._spec, "max_batch": most})

    def serves(self, model_name: str) -> bool:
        """Whether this model answers requests that name `model_name`: itself and each head."""
        return model_name == self.model_name or model_name in self.heads

    def prepare_sample(self, request: ModelRequest) -> PreparedSample:
        """Decode and check one request, as its backbone does.

        Raises:
            ValueError: as the backbone's, or there is no head of this name.
        """
        found = self.backbone.prepare_sample(request)
        return PreparedSample(found.tile, found.extra_tensors, self._chosen(request.model_name))

    def prepare_tile(self, rgb: NDArray[np.uint8]) -> PreparedSample:
        """Check one tile given as pixels: (H, W, 3) uint8 RGB; the default head predicts.

        Raises:
            BadRequest: wrong shape or dtype.
        """
        return self.backbone.prepare_tile(rgb)

    def forward_tiles(self, samples: Sequence[PreparedSample], modes: Sequence[Mode]) -> list[Row]:
        """Run a batch on the tensor path: one result per sample, in order; see `BaseServerModel.forward_tiles`."""
        if len(samples) != len(modes):
            raise BadRequest(f"{len(samples)} samples and {len(modes)} modes: give one of each per tile")
        for mode in set(modes):
            self.check_mode(mode)
        named = [self._chosen(sample.head) for sample in samples]
        wanted = [[] if mode == "embedding" else [name] for name, mode in zip(named, modes, strict=True)]
        embedded, predicted = self._run_heads(samples, wanted)
        results: list[Row] = []
        for row, mode, names, found in zip(embedded, modes, wanted, predicted, strict=True):
            prediction = found[names[0]] if names else None
            if isinstance(row, NonFiniteOutput) or isinstance(prediction, NonFiniteOutput):
                results.append(NonFiniteOutput(NOT_FINITE))
            else:
                results.append(TileOutput(None if mode == "prediction" else row.embedding, prediction))
        return results

    def predict_heads(
        self, samples: Sequence[PreparedSample], heads: Collection[str] | None = None
    ) -> list[dict[str, Row]]:
        """What several heads say of each sample, after one pass of the backbone.

        Args:
            samples: from `prepare_tile` or `prepare_sample`.
            heads: their names; all of them by default.

        Returns:
            Per sample and head a result with embedding and prediction, or that tile's error.

        Raises:
            BadRequest: no head of this name.
            ForwardError, ModelContractError: as `forward_tiles`.
        """
        names = [self._chosen(name) for name in (self.heads if heads is None else heads)]
        embedded, predicted = self._run_heads(samples, [names] * len(samples))
        results: list[dict[str, Row]] = []
        for row, found in zip(embedded, predicted, strict=True):
            if isinstance(row, NonFiniteOutput):
                results.append({name: NonFiniteOutput(NOT_FINITE) for name in names})
                continue
            results.append(
                {
                    name: values if isinstance(values, NonFiniteOutput) else TileOutput(row.embedding, values)
                    for name, values in found.items()
                }
            )
        return results

    def lineage(self, request: ModelRequest, mode: Mode) -> Lineage:
        """What makes the answer to this request: the backbone, and the head where it predicts."""
        below = self.backbone.lineage(request, "embedding")
        if mode == "embedding":
            return below
        name = self._chosen(request.model_name)
        head = self.heads[name]
        return below.model_copy(
            update={
                "model_name": name, "model_version": head.model_spec.version,
                "weights_sha256": head.manifest.weights_sha256, "artifact_sha256": head.manifest.sha256,
                "backbone_weights_sha256": below.weights_sha256,
            }
        )  # fmt: skip

    def get_metadata(self) -> ModelMetadata:
        """As of one model, with an output `prediction` of the default head and `prediction.NAME` of each other."""
        found = super().get_metadata()
        others = [
            OutputSpec(name=f"prediction.{name}", shape=output.shape, components=output.components)
            for name, head in self.heads.items()
            if name != self._default
            for output in head.model_spec.outputs
        ]
        return found.model_copy(update={"outputs": (*found.outputs, *others)})

    def _run_heads(
        self, samples: Sequence[PreparedSample], wanted: Sequence[Collection[str]]
    ) -> tuple[list[Row], list[dict[str, NDArray[np.float32] | NonFiniteOutput]]]:
        """Embeddings of all samples, and the predictions wanted of each; none where its embedding is not finite."""
        embedded = self.backbone.forward_tiles(samples, ["embedding"] * len(samples))
        predicted: list[dict[str, NDArray[np.float32] | NonFiniteOutput]] = [{} for _ in samples]
        for name, head in self.heads.items():
            rows, vectors = [], []
            for place, found in enumerate(embedded):
                if name in wanted[place]:
                    if isinstance(found, NonFiniteOutput):
                        predicted[place][name] = NonFiniteOutput(NOT_FINITE)
                    else:
                        assert found.embedding is not None, "it was asked for"
                        rows.append(place)
                        vectors.append(found.embedding)
            if rows:
                for place, values in zip(rows, head.predict(np.stack(vectors)), strict=True):
                    finite = bool(np.isfinite(values).all())
                    predicted[place][name] = values.copy() if finite else NonFiniteOutput(NOT_FINITE)
        return embedded, predicted

    def _chosen(self, name: str | None) -> str:
        if name in self.heads:
            return name
        if name is None or name == self.model_name:
            return self._default
        raise BadRequest(f"no head {name[:80]!r}: there are {', '.join(self.heads)}")


def _loaded(head: EmbeddingHead | Path | str, backbone: BaseServerModel) -> EmbeddingHead:
    if isinstance(head, EmbeddingHead):
        return head
    path = Path(head)
    spec = load_manifest(path).spec
    return EmbeddingHead(spec, path.name, backbone.runtime.device, path.parent, fixed_batch=backbone.fixed_batch)


def _check_fits(head: EmbeddingHead, backbone: BaseServerModel) -> None:
    """Refuse a head whose numbers would mean nothing over this backbone.

    Raises:
        ConfigError: with what differs.
    """
    made, here = head.model_spec.head, backbone.model_spec
    assert made is not None, "a loaded head has it"
    differs = None
    if made.backbone != here.model_name:
        differs = f"the backbone {made.backbone}, this is {here.model_name}"
    elif "embedding" not in here.output_type or made.embedding_dim != here.embedding_dim:
        given = here.embedding_dim if "embedding" in here.output_type else "none"
        differs = f"embeddings of {made.embedding_dim} values, {here.model_name} gives {given}"
    elif made.backbone_weights_sha256 != backbone.manifest.weights_sha256:
        differs = f"other weights of {here.model_name} ({made.backbone_weights_sha256[:12]})"
    elif head.model_spec.tile_spec != here.tile_spec:
        differs = f"other tiles than {here.model_name} takes: their tile_spec differs"
    elif head.fixed_batch != backbone.fixed_batch:
        differs = f"batches of {head.fixed_batch}, {here.model_name} was loaded for {backbone.fixed_batch}"
    if differs:
        raise ConfigError(f"the head {head.model_name} was made for {differs}")


def _joined(backbone: ModelSpec, head: ModelSpec, name: str) -> ModelSpec:
    """The spec of a head that takes tiles: the backbone's input and embedding, the head's prediction."""
    omics = backbone.omics and backbone.omics.model_copy(update={"output_transform": "none"})
    kept = {field: getattr(head, field) for field in ("version", "weights_source", "license", "access")}
    kept |= {field: getattr(head, field) for field in ("prediction_names", "prediction_dim", "heatmaps")}
    joined = {"model_name": name, "output_type": "prediction_with_embedding", "mask": None, "omics": omics}
    return backbone.model_copy(update=kept | joined)
