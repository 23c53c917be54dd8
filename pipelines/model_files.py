"""Which models the pipeline runs: one YAML per model, read without loading any."""

from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from inference.contract import explain
from inference.engine.recipes import tiling_name
from inference.errors import ConfigError
from inference.models.artifact import SUFFIXES, load_manifest
from inference.models.registry import Checkpoint, model_places, registered_models, resolve_model
from inference.models.spec import HeatmapSpec, ModelSpec, load_model_spec, read_mapping

FOLDER = Path(__file__).parent / "models"


class _File(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    checkpoint: str
    heatmaps: tuple[HeatmapSpec, ...] = ()


def asset_name(name: str) -> str:
    """A name as part of an asset key, where Dagster takes letters, digits and underscores only."""
    return name.replace("-", "_").replace(".", "_")


@dataclass(frozen=True)
class PipelineModel:
    """A model as the asset graph needs it: what it is called and what it makes."""

    checkpoint: str
    spec: ModelSpec
    heatmaps: tuple[HeatmapSpec, ...]

    @property
    def name(self) -> str:
        return asset_name(self.spec.model_name)

    @property
    def tiling(self) -> str:
        return asset_name(tiling_name(self.spec))

    def resolve(self) -> Checkpoint:
        """Its checkpoint; a model that exports itself does so now, if it never did."""
        return resolve_model(self.checkpoint)


def pipeline_models() -> tuple[PipelineModel, ...]:
    """Models from the YAML files and checkpoints that `SLIDE_MODELS` names, else from `pipelines/models/`.

    Raises:
        ConfigError: a file that cannot be used, or two models of one name.
    """
    models = [_load(path) for place in model_places() or [FOLDER] for path in _files(place)]
    names = [model.name for model in models]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ConfigError(f"more than one model is called {', '.join(sorted(twice))}: rename one or remove its file")
    if not models:
        raise ConfigError("no model is configured: put a YAML file into pipelines/models or name one in SLIDE_MODELS")
    return tuple(models)


def _files(place: Path) -> list[Path]:
    if not place.is_dir():
        return [place]
    try:
        return sorted(path for path in place.iterdir() if path.suffix in {".yaml", ".yml", *SUFFIXES})
    except OSError as error:
        raise ConfigError(f"SLIDE_MODELS names {place}, which cannot be listed: {error.strerror}") from None


def _load(path: Path) -> PipelineModel:
    if path.suffix in SUFFIXES:
        return PipelineModel(str(path), load_manifest(path).spec, ())
    try:
        file = _File.model_validate(read_mapping(path, "model file"))
    except ValidationError as error:
        raise ConfigError(f"model file {path.name} cannot be used: {explain(error)}") from None
    if file.checkpoint in registered_models():
        model = PipelineModel(file.checkpoint, load_model_spec(file.checkpoint), file.heatmaps)
    else:
        checkpoint = path.parent / file.checkpoint
        if checkpoint.suffix not in SUFFIXES or not checkpoint.exists():
            raise ConfigError(
                f"model file {path.name}: checkpoint is {file.checkpoint!r}, which is no {' or '.join(SUFFIXES)} file "
                f"there and none of the registered models: {', '.join(registered_models())}"
            )
        model = PipelineModel(str(checkpoint), load_manifest(checkpoint).spec, file.heatmaps)
    _require_outputs(path, model)
    return model


def _require_outputs(path: Path, model: PipelineModel) -> None:
    """Refuse a heatmap of what the model does not predict, rather than fail every slide at its last stage."""
    known = model.spec.prediction_names
    for number, heatmap in enumerate(model.heatmaps):
        if heatmap.output not in known:
            raise ConfigError(
                f"model file {path.name}: heatmaps.{number}.output is {heatmap.output!r}, "
                f"which {model.spec.model_name} does not predict; it has {', '.join(known) or 'no named prediction'}"
            )
