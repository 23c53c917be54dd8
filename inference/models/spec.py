"""What a model is: one frozen record per model, read from one YAML file."""

import hashlib
from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from inference.contract import OutputSpec, explain
from inference.errors import ConfigError
from inference.store.files import canonical_json

SPEC_FOLDER = Path(__file__).parent / "specs"

MODEL_NAME = r"^[a-z0-9][a-z0-9._-]{0,63}$"

MAX_CLASSES = 256
"""Classes of a mask are numbered in one byte."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class TileSpec(_Record):
    """The tile a model was made for.

    Attributes:
        size: side in pixels.
        stride: step between tiles in pixels, at most the size.
        resolution: µm per pixel.
        kernel: how pixels of another resolution are brought to this one.
    """

    size: Annotated[int, Field(gt=0)]
    stride: Annotated[int, Field(gt=0)]
    resolution: Annotated[float, Field(ge=0.05, le=50)]
    unit: Literal["um/px"] = "um/px"
    kernel: Literal["area", "bilinear"] = "area"

    @model_validator(mode="after")
    def _stride_within_tile(self) -> "TileSpec":
        if self.stride > self.size:
            raise ValueError(f"stride {self.stride} is larger than the tile ({self.size}): pixels would be skipped")
        return self


class HeatmapSpec(_Record):
    """A prediction drawn as a heatmap, and the values that its colours span."""

    output: str
    low: float = 0.0
    high: float = 1.0

    @model_validator(mode="after")
    def _spans_something(self) -> "HeatmapSpec":
        if self.low >= self.high:
            raise ValueError(f"heatmap {self.output}: low {self.low} must be below high {self.high}")
        return self


class OmicsSpec(_Record):
    """Bulk RNA that goes into the model beside the tile; a request may leave it out.

    Attributes:
        rna_unit: what the values are per gene: transcripts per million, or raw counts.
        n_genes: how many values a request has.
        genes: Ensembl identifiers in the order of the values; empty where they are not published.
        transform: applied to the values before they go in.
        output_transform: applied to the prediction, to bring it back into the unit.
        tpm_share: least part of a whole profile (10^6) that the model's genes hold; below 1 for a model that knows
            only some of the genes that are quantified.
        embedding_uses_rna: whether the embedding depends on the RNA; where it must not, loading checks that.
    """

    rna_unit: Literal["tpm", "counts"]
    n_genes: Annotated[int, Field(gt=0)]
    genes: tuple[str, ...] = ()
    transform: Literal["log1p", "none"] = "none"
    output_transform: Literal["expm1", "none"] = "none"
    tpm_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    embedding_uses_rna: bool = False

    @model_validator(mode="after")
    def _genes_are_distinct_and_counted(self) -> "OmicsSpec":
        if self.genes and len(self.genes) != self.n_genes:
            raise ValueError(f"omics: {len(self.genes)} genes are named, n_genes is {self.n_genes}")
        if len(set(self.genes)) != len(self.genes):
            raise ValueError("omics: the same gene is named twice")
        if self.tpm_share != 1 and self.rna_unit != "tpm":
            raise ValueError(f"omics: tpm_share is for tpm, rna_unit is {self.rna_unit}")
        return self


class MaskSpec(_Record):
    """A dense prediction: one plane per class.

    Attributes:
        size: side of the planes in pixels; divides the tile.
        values: what the graph returns: probabilities, or logits of a sigmoid or softmax.
        threshold: a single plane counts as positive from here; several planes are compared with each other.
    """

    size: Annotated[int, Field(gt=0)]
    values: Literal["probability", "sigmoid_logit", "softmax_logit"] = "probability"
    threshold: Annotated[float, Field(ge=0, le=1)] = 0.5


class GraphSpec(_Record):
    """How a graph that was not exported here wants its tiles: those of ours take uint8 (B, C, H, W).

    Attributes:
        output_names: the graph's names of the spec's outputs, in their order.
        layout: of the tiles, and of a mask's planes.
        dtype: `float32` graphs get pixels divided by 255, then minus `mean`, divided by `std`.
    """

    input_name: str
    output_names: tuple[str, ...]
    layout: Literal["NCHW", "NHWC"] = "NCHW"
    dtype: Literal["uint8", "float32"] = "uint8"

    @model_validator(mode="after")
    def _names_are_distinct(self) -> "GraphSpec":
        if len({self.input_name, *self.output_names}) != 1 + len(self.output_names):
            raise ValueError("graph: the same name is given twice")
        return self


class HeadSpec(_Record):
    """What a downstream head takes instead of a tile: float32 embeddings (B, `embedding_dim`) of one backbone.

    Attributes:
        backbone: `model_name` of the backbone that it was trained on.
        backbone_weights_sha256: the backbone's weights: a part of what defines the head's numbers.
    """

    backbone: Annotated[str, Field(pattern=MODEL_NAME)]
    embedding_dim: Annotated[int, Field(gt=0)]
    backbone_weights_sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class HardwareSpec(_Record):
    """What the model needs to run at a useful speed; a hint, never enforced."""

    memory_gb: Annotated[float, Field(gt=0)] | None = None
    device: Literal["cpu", "cuda"] = "cpu"


class ModelSpec(_Record):
    """A model's identity, input and output. Constants have a public source, named in `weights_source`.

    Attributes:
        access: whether the weights can be had by anyone, after asking, or not at all.
        mean, std: per channel, of pixels divided by 255; None where the vendor has not published them.
        resize, crop: in the graph, the tile is first resized to this side, then this side is cut from its middle.
        architecture: timm's name of the network, or a name of this library.
        architecture_args: further arguments of the network's constructor.
        pooling: how the tokens become the embedding: the class token, the mean of the patch tokens, or both in that
            order; prefix tokens (class token and registers) are never part of the mean.
        prediction_dim: number of predictions where their names are not published.
        mask, omics, head: what makes it more than a model of tiles and vectors; at most one of them. The `tile_spec`
            of a head is its backbone's.
    """

    model_name: Annotated[str, Field(pattern=MODEL_NAME)]
    version: str
    weights_source: str
    license: str
    access: Literal["open", "gated", "proprietary"] = "open"
    tile_spec: TileSpec
    num_channels: Annotated[int, Field(gt=0)] = 3
    mean: tuple[float, ...] | None = (0.0, 0.0, 0.0)
    std: tuple[float, ...] | None = (1.0, 1.0, 1.0)
    resize: Annotated[int, Field(gt=0)] | None = None
    crop: Annotated[int, Field(gt=0)] | None = None
    interpolation: Literal["bilinear", "bicubic", "none"] = "none"
    antialias: bool = True
    color_space: Literal["RGB", "BGR", "HED"] = "RGB"
    stain_normalization: Literal["macenko", "reinhard", "vahadane", "none"] = "none"
    architecture: str
    architecture_args: dict[str, JsonValue] = Field(default_factory=dict)
    patch_size: Annotated[int, Field(gt=0)] | None = None
    num_prefix_tokens: Annotated[int, Field(ge=0)] | None = None
    pooling: Literal["class_token", "patch_mean", "class_token_and_patch_mean", "none"] = "none"
    embedding_dim: Annotated[int, Field(gt=0)] | None = None
    prediction_names: tuple[str, ...] = ()
    prediction_dim: Annotated[int, Field(gt=0)] | None = None
    output_type: Literal["embedding", "prediction", "prediction_with_embedding"] = "embedding"
    mask: MaskSpec | None = None
    omics: OmicsSpec | None = None
    head: HeadSpec | None = None
    graph: GraphSpec | None = None
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    hardware: HardwareSpec = HardwareSpec()
    heatmaps: tuple[HeatmapSpec, ...] = ()

    @model_validator(mode="after")
    def _has_an_output(self) -> "ModelSpec":
        if "embedding" in self.output_type and not self.embedding_dim:
            raise ValueError(f"output_type {self.output_type} needs embedding_dim")
        if "prediction" in self.output_type and not self.n_predictions:
            raise ValueError(f"output_type {self.output_type} needs prediction_names")
        if len(set(self.prediction_names)) != len(self.prediction_names):
            raise ValueError("prediction_names has the same name twice")
        if self.prediction_names and self.prediction_dim not in (None, len(self.prediction_names)):
            raise ValueError(f"prediction_dim is {self.prediction_dim} for {len(self.prediction_names)} names")
        if unknown := {heatmap.output for heatmap in self.heatmaps} - set(self.prediction_names):
            raise ValueError(f"heatmaps name {', '.join(sorted(unknown))}, which is no prediction of this model")
        return self

    @model_validator(mode="after")
    def _constants_fit_the_channels(self) -> "ModelSpec":
        for name, values in (("mean", self.mean), ("std", self.std)):
            if values is not None and len(values) != self.num_channels:
                raise ValueError(f"{name} has {len(values)} values for {self.num_channels} channels")
        if self.std is not None and min(self.std) <= 0:
            raise ValueError("std must be above 0")
        if self.crop is not None and self.crop > (self.resize or self.tile_spec.size):
            raise ValueError(
                f"crop {self.crop} is larger than what it is cut from ({self.resize or self.tile_spec.size})"
            )
        if self.mask is not None and self.tile_spec.size % self.mask.size:
            raise ValueError(f"a mask of {self.mask.size} px does not divide a tile of {self.tile_spec.size} px")
        return self

    @model_validator(mode="after")
    def _is_of_one_kind(self) -> "ModelSpec":
        kinds = [name for name in ("mask", "omics", "head") if getattr(self, name) is not None]
        if len(kinds) > 1:
            raise ValueError(f"{' and '.join(kinds)} cannot be combined: a model is of one kind")
        if self.mask is not None:
            if "prediction" not in self.output_type:
                raise ValueError(f"a mask is a prediction, output_type is {self.output_type}")
            if self.mask.values == "softmax_logit" and self.n_predictions == 1:
                raise ValueError("mask values are softmax_logit of a single plane: say sigmoid_logit")
            if self.n_predictions > MAX_CLASSES:
                raise ValueError(f"a mask has at most {MAX_CLASSES} classes, not {self.n_predictions}")
        if self.omics is not None and self.omics.output_transform != "none" and "prediction" not in self.output_type:
            raise ValueError(f"omics: output_transform is for a prediction, output_type is {self.output_type}")
        if self.head is not None and self.output_type != "prediction":
            raise ValueError(f"a head gives a prediction, output_type is {self.output_type}")
        if self.graph is not None and len(self.graph.output_names) != len(self.outputs):
            raise ValueError(f"graph names {len(self.graph.output_names)} outputs, the model has {len(self.outputs)}")
        return self

    def recipe(self) -> dict[str, JsonValue]:
        """The part of the spec that defines the model's numbers: how they are drawn and what runs them does not.

        Fields at their default are left out, so that a field added later changes no model that does not use it.
        """
        return self.model_dump(mode="json", exclude={"heatmaps", "hardware", "access"}, exclude_defaults=True)

    def config(self) -> dict[str, JsonValue]:
        """The fields that are not at their default, but for the names of genes and predictions: those are long."""
        return self.model_dump(
            mode="json", exclude={"prediction_names": True, "omics": {"genes"}}, exclude_defaults=True
        )

    @property
    def preprocessing_sha256(self) -> str:
        """Digest of all that is done to a tile's pixels before the network."""
        names = {"tile_spec", "num_channels", "mean", "std", "resize", "crop", "interpolation", "antialias"}
        names |= {"color_space", "stain_normalization", "graph"}
        return hashlib.sha256(canonical_json(self.model_dump(mode="json", include=names)).encode()).hexdigest()

    @property
    def n_predictions(self) -> int:
        """Length of the prediction, or number of planes of a mask; 0 where there is none."""
        return len(self.prediction_names) or self.prediction_dim or 0

    @property
    def input_shape(self) -> tuple[int, ...]:
        """(C, H, W) of one prepared tile; (D,) of the embedding that a head takes."""
        if self.head is not None:
            return (self.head.embedding_dim,)
        return (self.num_channels, self.tile_spec.size, self.tile_spec.size)

    @property
    def input_dtype(self) -> Literal["uint8", "float32"]:
        """Of tiles, or of the embeddings that a head takes."""
        return "uint8" if self.head is None else "float32"

    @property
    def extra_inputs(self) -> tuple[OutputSpec, ...]:
        """The graph's further float32 inputs per row, in the order they follow the tile.

        `bulk_rna_present` is 1 where `bulk_rna` holds values and 0 where the tile comes without.
        """
        if self.omics is None:
            return ()
        rna = OutputSpec(name="bulk_rna", shape=(self.omics.n_genes,), components=self.omics.genes)
        return (rna, OutputSpec(name="bulk_rna_present", shape=(1,)))

    @property
    def outputs(self) -> tuple[OutputSpec, ...]:
        """The graph's outputs, in order: embedding first, then prediction."""
        found = []
        if "embedding" in self.output_type:
            found.append(OutputSpec(name="embedding", shape=(self.embedding_dim or 0,)))
        if "prediction" in self.output_type:
            shape = (self.n_predictions,) if self.mask is None else (self.n_predictions, self.mask.size, self.mask.size)
            found.append(OutputSpec(name="prediction", shape=shape, components=self.prediction_names))
        return tuple(found)


def load_model_spec(name_or_path: str | Path) -> ModelSpec:
    """The spec of a known model, or of a YAML file.

    Raises:
        ConfigError: no such spec, or a field of it is missing, unknown or of the wrong kind.
    """
    path = Path(name_or_path)
    if path.suffix not in {".yaml", ".yml"}:
        path = SPEC_FOLDER / f"{name_or_path}.yaml"
    if not path.is_file():
        raise ConfigError(f"no model spec {name_or_path!s}: known are {', '.join(known_specs())}, or give a .yaml file")
    try:
        return ModelSpec.model_validate(read_mapping(path, "model spec"))
    except ValidationError as error:
        raise ConfigError(f"model spec {path.name} cannot be used: {explain(error)}") from None


def read_mapping(path: Path, what: str) -> dict[object, object]:
    """The mapping that a YAML file holds; `what` it is goes into messages, which have one line.

    Raises:
        ConfigError: it is no regular file, no UTF-8 text, no YAML, or holds something else.
    """
    try:
        if not path.is_file():  # a pipe would be waited for
            raise ConfigError(f"{what} {path.name} cannot be used: it is no regular file")
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except ConfigError:
        raise
    except OSError as error:
        raise ConfigError(f"{what} {path.name} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{what} {path.name} cannot be read: it is not UTF-8 text") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(
            f"{what} {path.name} cannot be used: it is not YAML: {' '.join(str(error).split())[:300]}"
        ) from None
    if not isinstance(found, dict):
        kind = {type(None): "nothing", list: "a list"}.get(type(found), "a single value")
        raise ConfigError(f"{what} {path.name} cannot be used: it holds {kind}: write lines of the form 'key: value'")
    return found


def known_specs() -> tuple[str, ...]:
    """Names of the specs that come with the library."""
    return tuple(sorted(path.stem for path in SPEC_FOLDER.glob("*.yaml")))
