"""What a model is: one frozen record per model, read from one YAML file."""

from pathlib import Path
from typing import Annotated, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, JsonValue, ValidationError, model_validator

from inference.contract import OutputSpec, explain
from inference.errors import ConfigError

SPEC_FOLDER = Path(__file__).parent / "specs"

MODEL_NAME = r"^[a-z0-9][a-z0-9._-]{0,63}$"


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


class ModelSpec(_Record):
    """A model's identity, input and output. Constants have a public source, named in `weights_source`."""

    model_name: Annotated[str, Field(pattern=MODEL_NAME)]
    version: str
    weights_source: str
    license: str
    tile_spec: TileSpec
    num_channels: Annotated[int, Field(gt=0)] = 3
    mean: tuple[float, ...] = (0.0, 0.0, 0.0)
    std: tuple[float, ...] = (1.0, 1.0, 1.0)
    interpolation: Literal["bilinear", "bicubic", "none"] = "none"
    antialias: bool = True
    color_space: Literal["RGB", "BGR", "HED"] = "RGB"
    stain_normalization: Literal["macenko", "reinhard", "vahadane", "none"] = "none"
    architecture: str
    patch_size: Annotated[int, Field(gt=0)] | None = None
    num_prefix_tokens: Annotated[int, Field(ge=0)] | None = None
    embedding_dim: Annotated[int, Field(gt=0)] | None = None
    prediction_names: tuple[str, ...] = ()
    output_type: Literal["embedding", "prediction", "prediction_with_embedding"] = "embedding"
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    heatmaps: tuple[HeatmapSpec, ...] = ()

    @model_validator(mode="after")
    def _has_an_output(self) -> "ModelSpec":
        if "embedding" in self.output_type and not self.embedding_dim:
            raise ValueError(f"output_type {self.output_type} needs embedding_dim")
        if "prediction" in self.output_type and not self.prediction_names:
            raise ValueError(f"output_type {self.output_type} needs prediction_names")
        if len(set(self.prediction_names)) != len(self.prediction_names):
            raise ValueError("prediction_names has the same name twice")
        if unknown := {heatmap.output for heatmap in self.heatmaps} - set(self.prediction_names):
            raise ValueError(f"heatmaps name {', '.join(sorted(unknown))}, which is no prediction of this model")
        return self

    def recipe(self) -> dict[str, JsonValue]:
        """The part of the spec that defines the model's numbers: how they are drawn does not."""
        return self.model_dump(mode="json", exclude={"heatmaps"})

    @property
    def input_shape(self) -> tuple[int, int, int]:
        """(C, H, W) of one prepared tile."""
        return (self.num_channels, self.tile_spec.size, self.tile_spec.size)

    @property
    def outputs(self) -> tuple[OutputSpec, ...]:
        """The graph's outputs, in order: embedding first, then prediction."""
        found = []
        if "embedding" in self.output_type:
            found.append(OutputSpec(name="embedding", shape=(self.embedding_dim or 0,)))
        if "prediction" in self.output_type:
            names = self.prediction_names
            found.append(OutputSpec(name="prediction", shape=(len(names),), components=names))
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
        return ModelSpec.model_validate(yaml.safe_load(path.read_text(encoding="utf-8")))
    except ValidationError as error:
        raise ConfigError(f"model spec {path.name} cannot be used: {explain(error)}") from None
    except (yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"model spec {path.name} cannot be read: {error}") from None


def known_specs() -> tuple[str, ...]:
    """Names of the specs that come with the library."""
    return tuple(sorted(path.stem for path in SPEC_FOLDER.glob("*.yaml")))
