"""From tiles to slide: pooled features, slide-level prediction, heatmaps."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from inference.engine.job import Draft, SlideJob
from inference.engine.recipes import Addresses, execution
from inference.engine.survey import load_image, read_tiles, save_image
from inference.models.spec import HeatmapSpec, ModelSpec
from inference.outputs.aggregate import MeanPool, ScalarSummary
from inference.outputs.heatmap import write_heatmap_ome, write_heatmap_tiff
from inference.outputs.overlay import draw_overlay, preview
from inference.outputs.raster import Validity, rasterise
from inference.store.files import canonical_json, write_atomic
from inference.store.manifest import Manifest, read_manifest
from inference.store.tables import VECTOR, TableWriter, matrix, read_column, vectors


def pool_features(job: SlideJob, spec: ModelSpec, at: Addresses, work: Path) -> Draft:
    """Stage `features`: the mean embedding of the tiles that went well, as one row."""
    predict, tiles = _predicted(job, at, "features")
    pool, width = MeanPool(), spec.embedding_dim or 0
    pool.start(width)
    for rows, ok in _batches(predict / "embeddings.parquet", "embedding", width):
        pool.update(rows, ok)
    mean = pool.finish()
    schema = pa.schema(
        [
            pa.field("slide_key", pa.string(), nullable=False),
            pa.field("tiles_ok", pa.int64(), nullable=False),
            pa.field("tiles_failed", pa.int64(), nullable=False),
            pa.field("embedding", VECTOR),
        ]
    )
    values = np.zeros((1, width), np.float32) if mean is None else mean[None]
    with TableWriter(work / "slide_features.parquet", schema, {"recipe_digest": at.features.digest}) as table:
        table.write(
            {
                "slide_key": pa.array([job.ref.key]),
                "tiles_ok": np.array([pool.n_ok]),
                "tiles_failed": np.array([pool.n_failed]),
                "embedding": vectors(values, np.array([mean is not None])),
            }
        )
    norm = {} if mean is None else {"embedding_norm": float(np.linalg.norm(mean))}
    return _like(tiles, job, {"pooling": "mean", "dimensions": width, **norm})


def summarise_predictions(job: SlideJob, spec: ModelSpec, at: Addresses, work: Path) -> Draft:
    """Stage `prediction`: per named output the mean, mean of the highest, spread, and share above the threshold."""
    predict, tiles = _predicted(job, at, "prediction")
    names = spec.prediction_names
    thresholds = dict.fromkeys(names, job.settings.threshold)
    summary = ScalarSummary(names, top_k=job.settings.top_k, thresholds=thresholds)
    summary.start(len(names))
    for rows, ok in _batches(predict / "predictions.parquet", "prediction", len(spec.prediction_names)):
        summary.update(rows, ok)
    found = summary.finish() or {}
    columns = [(f"{name}.{statistic}", value) for name in names for statistic, value in found.get(name, {}).items()]
    schema = pa.schema(
        [pa.field("slide_key", pa.string(), nullable=False), *(pa.field(n, pa.float64()) for n, _ in columns)]
    )
    with TableWriter(work / "slide_prediction.parquet", schema, {"recipe_digest": at.prediction.digest}) as table:
        table.write({"slide_key": pa.array([job.ref.key]), **{n: np.array([v]) for n, v in columns}})
    text = canonical_json({"slide_key": job.ref.key, "tiles_ok": summary.n_ok, "outputs": found})
    write_atomic(work / "slide_prediction.json", (text + "\n").encode())
    return _like(tiles, job, {"outputs": found, "top_k": job.settings.top_k, "threshold": job.settings.threshold})


def draw_heatmap(job: SlideJob, spec: ModelSpec, at: Addresses, heatmap: HeatmapSpec, work: Path) -> Draft:
    """Stage `heatmap`: the value raster for viewers and for analysis, and a picture over the thumbnail."""
    predict, tiles = _predicted(job, at, "heatmap")
    planned = read_tiles(job.require(at.tiles, "heatmap"))
    index = spec.prediction_names.index(heatmap.output)
    parts = list(_batches(predict / "predictions.parquet", "prediction", len(spec.prediction_names)))
    values = np.concatenate([rows[:, index] for rows, _ in parts]) if parts else np.zeros(0, np.float32)
    ok = np.concatenate([good for _, good in parts]) if parts else np.zeros(0, np.bool_)
    raster = rasterise(job.grid(spec), planned.row, planned.col, values, ok)
    address = at.heatmap(heatmap)
    about: dict[str, object] = {
        "slide_key": job.ref.key,
        "model": spec.model_name,
        "output": heatmap.output,
        "recipe_digest": address.digest,
    }
    write_heatmap_tiff(work / "heatmap.tif", raster, low=heatmap.low, high=heatmap.high, description=about)
    seed = f"{address.digest}/{job.identity.sampled_sha256}"
    write_heatmap_ome(work / "heatmap.ome.tif", raster, name=heatmap.output, uuid_seed=seed, description=about)
    thumbnail = load_image(job.require(at.info, "heatmap") / "thumbnail.jpg")
    title = f"{spec.model_name}: {heatmap.output.replace('_', ' ')}"
    size = job.reader.level_sizes[0]
    overlay = draw_overlay(thumbnail, raster, size, title=title, low=heatmap.low, high=heatmap.high)
    save_image(work / "overlay.png", overlay)
    write_atomic(work / "preview.jpg", preview(overlay))
    cells = {kind.name.lower(): int((raster.validity == kind).sum()) for kind in Validity}
    return _like(tiles, job, {"output": heatmap.output, "low": heatmap.low, "high": heatmap.high, "cells": cells})


def _predicted(job: SlideJob, at: Addresses, needed: str) -> tuple[Path, Manifest]:
    folder = job.require(at.predict, needed)
    manifest = read_manifest(folder)
    assert manifest is not None, "a finished result has a manifest"
    return folder, manifest


def _like(tiles: Manifest, job: SlideJob, summary: dict[str, object]) -> Draft:
    """A draft that shares the tiles' fate: their counts, status and reason."""
    done = execution(None, job.settings, job.reader.kind)
    return Draft(tiles.status, tiles.reason, tiles.counts, summary, done)  # type: ignore[arg-type]  # JSON


def _batches(path: Path, column: str, size: int) -> Iterator[tuple[NDArray[np.float32], NDArray[np.bool_]]]:
    """Rows of a vector column and whether each is ok, shard by shard."""
    for part in read_column(path, column):
        yield matrix(part, size)
