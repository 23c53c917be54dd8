"""Every per-slide asset of every model, as outputs of one step per batch of slides."""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext

import dagster as dg

from inference.engine.job import StageResult
from inference.engine.settings import Stage
from pipelines.batching import run_batch
from pipelines.failures import Around, told_plainly
from pipelines.model_files import PipelineModel, asset_name
from pipelines.resources import SlideInference

SLIDE_INFO = "slide_info"
SLIDE_INVENTORY = "slide_inventory"

_ABOUT = {
    "slide_info": "What the slide is: size, resolution and its source, thumbnail, overview; content identity.",
    "tiles": "Planned tiles of one tiling, row-major, with tissue and missing shares (`tiles.parquet`).",
    "tile_embeddings": "One embedding per planned tile (`embeddings.parquet`); failed tiles are null and listed.",
    "tile_predictions": "One prediction per planned tile (`predictions.parquet`), from the same pass.",
    "slide_features": "Mean embedding of the slide (`slide_features.parquet`).",
    "slide_prediction": "Per output: mean, mean of the highest tiles, spread, share above the threshold.",
    "heatmap": "Pyramid for viewers, float values with a validity plane, and a picture over the thumbnail.",
}

_STAGE: dict[str, Stage] = {
    "slide_info": "info",
    "tiles": "tiles",
    "tile_embeddings": "predict",
    "tile_predictions": "predict",
    "slide_features": "features",
    "slide_prediction": "prediction",
    "heatmap": "heatmap",
}


def slide_chain(
    models: Sequence[PipelineModel],
    partitions: dg.DynamicPartitionsDefinition,
    *,
    prefix: Sequence[str],
    batch: int,
    around: Around = nullcontext,
) -> dg.AssetsDefinition:
    """The per-slide assets of all models; any subset of them can be selected."""

    specs = list(_specs(models, prefix))

    @dg.multi_asset(
        name="slide_chain",
        specs=specs,
        partitions_def=partitions,
        can_subset=True,
        backfill_policy=dg.BackfillPolicy.multi_run(max_partitions_per_run=batch),
    )
    def _slide_chain(
        context: dg.AssetExecutionContext, inference: SlideInference
    ) -> Iterator[dg.MaterializeResult[None]]:
        assets = [spec.key for spec in specs if spec.key in context.selected_asset_keys]
        stages = {_STAGE[key.path[-1]] for key in assets}
        owners = _assets_of(models, prefix)
        with around(), told_plainly():
            yield from run_batch(context, inference.chain, inference.slides(), stages, assets, owners)

    return _slide_chain


def _specs(models: Sequence[PipelineModel], prefix: Sequence[str]) -> Iterator[dg.AssetSpec]:
    info = dg.AssetKey([*prefix, SLIDE_INFO])
    yield _spec(info, [dg.AssetKey([*prefix, SLIDE_INVENTORY])], "slides", {"openslide"})
    for tiling in dict.fromkeys(model.tiling for model in models):
        yield _spec(dg.AssetKey([*prefix, tiling, "tiles"]), [info], "slides", {"parquet"})
    for model in models:
        tiles = dg.AssetKey([*prefix, model.tiling, "tiles"])
        key = {name: dg.AssetKey([*prefix, model.name, name]) for name in _ABOUT}
        if model.spec.embedding_dim:
            yield _spec(key["tile_embeddings"], [tiles], model.name, {"torch", "parquet"})
            yield _spec(key["slide_features"], [key["tile_embeddings"]], model.name, {"parquet"})
        if model.spec.prediction_names:
            yield _spec(key["tile_predictions"], [tiles], model.name, {"torch", "parquet"})
            yield _spec(key["slide_prediction"], [key["tile_predictions"]], model.name, {"parquet"})
            yield _spec(key["heatmap"], [key["tile_predictions"]], model.name, {"tiff"})


def _spec(key: dg.AssetKey, deps: Sequence[dg.AssetKey], group: str, kinds: set[str]) -> dg.AssetSpec:
    return dg.AssetSpec(key, deps=deps, skippable=True, group_name=group, description=_ABOUT[key.path[-1]], kinds=kinds)


class _assets_of:  # noqa: N801 - a function with its models bound
    """The asset keys of a stage result."""

    def __init__(self, models: Sequence[PipelineModel], prefix: Sequence[str]) -> None:
        self._models = {model.spec.model_name: model for model in models}
        self._prefix = tuple(prefix)

    def __call__(self, result: StageResult) -> list[dg.AssetKey]:
        names = [name for name, stage in _STAGE.items() if stage == result.stage]
        if result.model is not None:
            owner = [self._models[result.model].name]
        elif result.stage == "tiles":
            owner = [asset_name(result.manifest.name)]
        else:
            owner = []
        return [dg.AssetKey([*self._prefix, *owner, name]) for name in names]
