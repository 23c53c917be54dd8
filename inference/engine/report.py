"""What the store knows of each slide, gathered for people: the cohort's report."""

from collections.abc import Iterable
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from pydantic import JsonValue

from inference.engine.chain import Chain
from inference.engine.recipes import Addresses
from inference.errors import DamagedResult
from inference.models.spec import ModelSpec
from inference.outputs.report import FailedTiles, SlideReport, write_report
from inference.slides.discovery import SlideRef
from inference.slides.quality import percent
from inference.store.manifest import Manifest
from inference.store.store import Address, FailureRecord

MUCH_BLUR = 0.05
"""Share of tiles out of focus from which the report says so."""


def write_cohort_report(path: Path, title: str, chain: Chain, refs: Iterable[SlideRef]) -> list[SlideReport]:
    """Write one HTML file over the slides of a cohort, from what lies in the store; returns what it says.

    A slide that was never run appears as such, so that nothing is silently absent; a damaged record in the store costs
    its slide the entry's figures, and no other slide anything.
    """
    slides = [_slide(chain, ref, at, model.spec) for ref in refs for model, at in chain.addresses(ref.key)]
    run = {
        "models": ", ".join(f"{m.spec.model_name} {m.spec.version}" for m in chain.models),
        "settings": ", ".join(f"{name} {value}" for name, value in chain.settings.changed().items()) or "defaults",
        "slide-inference": version("slide-inference"),
    }
    now = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    write_report(path, title, slides, generated=now, run=run)
    return slides


def _slide(chain: Chain, ref: SlideRef, at: Addresses, spec: ModelSpec) -> SlideReport:
    try:
        return _figures(chain, ref, at, spec)
    except DamagedResult as error:
        reason = f"{error.code}: {error.message}"
    except (LookupError, TypeError, ValueError, AssertionError):
        reason = f"{DamagedResult.code}: a record of it in the store lacks what this version writes there"
    return SlideReport(ref.key, ref.name, "failed", reason, "Run the slide again: what is damaged is computed again.")


def _figures(chain: Chain, ref: SlideRef, at: Addresses, spec: ModelSpec) -> SlideReport:
    store = chain.store
    failure = store.failure(ref.key)
    info, tiles, predict, prediction = map(store.read, (at.info, at.tiles, at.predict, at.prediction))
    heatmaps = [a for a in map(at.heatmap, chain.heatmaps_of(spec)) if store.read(a)]
    last = predict or tiles
    status = "failed" if failure else predict.status if predict else "not run"
    return SlideReport(
        key=ref.key,
        name=ref.name,
        status=status,
        reason=_reason(failure, predict),
        n_grid=last.counts.grid if last else 0,
        n_planned=last.counts.planned if last else 0,
        n_ok=predict.counts.ok if predict else 0,
        n_failed=predict.counts.failed if predict else 0,
        notes=_notes(tiles, predict),
        tissue_share=_number(tiles, "tissue_share"),
        mpp=_pair(info),
        mpp_source=info.inputs["mpp_source"] if info else None,  # type: ignore[arg-type]  # one of three
        level=_level(tiles),
        tiles_per_s=_timing(predict, "tiles_per_s"),  # type: ignore[arg-type]
        bound_by=_timing(predict, "bound_by"),  # type: ignore[arg-type]
        failures=_failed_tiles(predict, failure),
        prediction=_statistics(prediction) if prediction else {},
        overlay=store.path(heatmaps[0]) / "overlay.png" if heatmaps else None,
        files=_files(chain, at, heatmaps),
        digests={"recipe of predictions": at.predict.digest[:12], "of tiles": at.tiles.digest[:12]} if predict else {},
    )


def _statistics(prediction: Manifest) -> dict[str, dict[str, float]]:
    """Statistics by output, called what they are: with the number of tiles and the threshold."""
    outputs, k, threshold = (prediction.summary[name] for name in ("outputs", "top_k", "threshold"))
    assert isinstance(outputs, dict), "statistics by output"
    names = {"top_k_mean": f"top-{k} mean", "fraction_above": f"share > {threshold:g}"}
    return {
        output: {names.get(name, name): float(str(value)) for name, value in found.items()}
        for output, found in outputs.items()
        if isinstance(found, dict)
    }


def _reason(failure: FailureRecord | None, predict: Manifest | None) -> str | None:
    if failure is not None:
        return f"{failure.code}: {failure.message}"
    if predict is None:
        return "not run yet with the settings below"
    return predict.reason


def _notes(tiles: Manifest | None, predict: Manifest | None) -> tuple[str, ...]:
    """What was seen on the slide, and how sharp it is, where that is worth a word."""
    warnings = tiles.summary.get("warnings", []) if tiles else []
    assert isinstance(warnings, list), "texts"
    quality = predict.summary.get("quality") if predict else None
    blurred = quality.get("out_of_focus_share") if isinstance(quality, dict) else None
    found = [str(text) for text in warnings]
    if isinstance(blurred, float) and blurred >= MUCH_BLUR:
        found.append(f"{percent(blurred)} of the tiles with tissue are out of focus")
    icc = predict.summary.get("icc") if predict else None
    return (*found, *([str(icc)] if icc else []))


def _failed_tiles(predict: Manifest | None, failure: FailureRecord | None) -> tuple[FailedTiles, ...]:
    if failure is not None:
        return tuple(FailedTiles(*row) for row in failure.tiles)
    found = predict.summary.get("failed_tiles", []) if predict else []
    assert isinstance(found, list), "a list of failed tiles by code"
    return tuple(_failed_group(group) for group in found)


def _failed_group(group: JsonValue) -> FailedTiles:
    assert isinstance(group, dict), "one group of failed tiles"
    e = group["example"]
    assert isinstance(e, dict), "its example"
    where = f"row {e['row']}, col {e['col']} at ({e['x']}, {e['y']})"
    return FailedTiles(f"{group['stage']}: {group['code']}", int(str(group["count"])), f"{where}: {e['message']}")


def _files(chain: Chain, at: Addresses, heatmaps: list[Address]) -> dict[str, Path]:
    wanted = [
        ("embeddings", at.predict, "embeddings.parquet"),
        ("predictions", at.predict, "predictions.parquet"),
        ("failed tiles", at.predict, "failures.parquet"),
        ("slide features", at.features, "slide_features.parquet"),
        ("slide prediction", at.prediction, "slide_prediction.json"),
        *(("heatmap for viewers", a, "heatmap.tif") for a in heatmaps),
        *(("heatmap for analysis", a, "heatmap.ome.tif") for a in heatmaps),
    ]
    paths = ((label, chain.store.path(address) / name) for label, address, name in wanted)
    return {label: path for label, path in paths if path.is_file()}


def _number(manifest: Manifest | None, name: str) -> float | None:
    value = manifest.summary.get(name) if manifest else None
    return float(value) if isinstance(value, int | float) else None


def _timing(manifest: Manifest | None, name: str) -> JsonValue:
    timings = manifest.run.get("timings") if manifest else None
    return timings.get(name) if isinstance(timings, dict) else None


def _pair(info: Manifest | None) -> tuple[float, float] | None:
    mpp = info.inputs["mpp"] if info else None
    return (float(str(mpp[0])), float(str(mpp[1]))) if isinstance(mpp, list) else None


def _level(tiles: Manifest | None) -> str | None:
    if tiles is None:
        return None
    level, reduction, resample = (tiles.summary[k] for k in ("level", "reduction", "resample"))
    parts = [str(level)]
    if reduction != 1:
        parts.append(f"reduced {reduction}x")
    if resample != "none":
        parts.append("enlarged" if resample == "bilinear" else "resampled")
    return ", ".join(parts)
