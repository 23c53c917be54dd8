"""What a person sees on an asset's page."""

import base64
import html
from pathlib import Path

import dagster as dg
from pydantic import JsonValue

from inference.engine.job import StageResult

FAILED_TILES = dg.TableSchema(
    columns=[
        dg.TableColumn("stage", "string", description="read, prepare, forward or output"),
        dg.TableColumn("code", "string"),
        dg.TableColumn("tiles", "int"),
        dg.TableColumn("row", "int", description="grid row of the first such tile"),
        dg.TableColumn("col", "int"),
        dg.TableColumn("x", "int", description="its level-0 pixels"),
        dg.TableColumn("y", "int"),
        dg.TableColumn("message", "string"),
    ]
)


def stage_metadata(result: StageResult) -> dict[str, dg.MetadataValue]:
    """The metadata of one stage of one slide."""
    manifest = result.manifest
    found: dict[str, dg.MetadataValue] = {
        "status": dg.MetadataValue.text(manifest.status),
        "path": dg.MetadataValue.path(result.folder),
        "reused": dg.MetadataValue.bool(result.reused),
        "recipe": dg.MetadataValue.text(manifest.recipe_digest[:12]),
    }
    if manifest.reason:
        found["reason"] = dg.MetadataValue.text(manifest.reason)
    return found | _BY_STAGE[result.stage](result)


def _info(result: StageResult) -> dict[str, dg.MetadataValue]:
    summary = result.manifest.summary
    mpp = summary["mpp"]
    assert isinstance(mpp, list), "µm/px in x and y"
    return {
        "size": dg.MetadataValue.text(f"{summary['width']} x {summary['height']} px"),
        "mpp": dg.MetadataValue.float(float(str(mpp[0]))),
        "mpp_source": dg.MetadataValue.text(str(summary["mpp_source"])),
        "vendor": dg.MetadataValue.text(str(summary["vendor"])),
        "reader": dg.MetadataValue.text(str(summary["reader"])),
    }


def _tiles(result: StageResult) -> dict[str, dg.MetadataValue]:
    counts, summary = result.manifest.counts, result.manifest.summary
    warnings = summary["warnings"]
    assert isinstance(warnings, list), "texts"
    noted = {"notes": dg.MetadataValue.text("; ".join(map(str, warnings)))} if warnings else {}
    return {
        **noted,
        "tiles_planned": dg.MetadataValue.int(counts.planned),
        "tiles_grid": dg.MetadataValue.int(counts.grid),
        "tissue_share": dg.MetadataValue.float(float(str(summary["tissue_share"]))),
        "read_level": dg.MetadataValue.text(
            f"{summary['level']}, reduced {summary['reduction']}x, {summary['resample']}"
        ),
    }


def _predict(result: StageResult) -> dict[str, dg.MetadataValue]:
    counts = result.manifest.counts
    found: dict[str, dg.MetadataValue] = {
        "tiles_planned": dg.MetadataValue.int(counts.planned),
        "tiles_ok": dg.MetadataValue.int(counts.ok),
        "tiles_failed": dg.MetadataValue.int(counts.failed),
        "failed_share": dg.MetadataValue.float(counts.failed / counts.planned if counts.planned else 0.0),
    }
    timings = result.manifest.run.get("timings")
    if isinstance(timings, dict) and "tiles_per_s" in timings:
        found["tiles_per_s"] = dg.MetadataValue.float(float(str(timings["tiles_per_s"])))
        found["bound_by"] = dg.MetadataValue.text(str(timings["bound_by"]))
    quality = result.manifest.summary["quality"]
    if isinstance(quality, dict) and quality["focus_median"] is not None:
        found["focus_median"] = dg.MetadataValue.float(float(str(quality["focus_median"])))
        found["out_of_focus_share"] = dg.MetadataValue.float(float(str(quality["out_of_focus_share"])))
    groups = result.manifest.summary.get("failed_tiles")
    if isinstance(groups, list) and groups:
        records = [_failed_record(group) for group in groups]
        found["failed_tiles"] = dg.MetadataValue.table(records, schema=FAILED_TILES)
    return found


def _failed_record(group: JsonValue) -> dg.TableRecord:
    assert isinstance(group, dict), "one group of failed tiles"
    example = group["example"]
    assert isinstance(example, dict), "its first tile"
    place = {name: int(str(example[name])) for name in ("row", "col", "x", "y")}
    return dg.TableRecord(
        {
            "stage": str(group["stage"]),
            "code": str(group["code"]),
            "tiles": int(str(group["count"])),
            **place,
            "message": str(example["message"])[:200],
        }
    )


def _features(result: StageResult) -> dict[str, dg.MetadataValue]:
    counts = result.manifest.counts
    found: dict[str, dg.MetadataValue] = {"tiles_ok": dg.MetadataValue.int(counts.ok)}
    norm = result.manifest.summary.get("embedding_norm")
    if isinstance(norm, float):
        found["embedding_norm"] = dg.MetadataValue.float(norm)
    return found


def _prediction(result: StageResult) -> dict[str, dg.MetadataValue]:
    outputs = result.manifest.summary["outputs"]
    assert isinstance(outputs, dict), "statistics by output"
    found: dict[str, dg.MetadataValue] = {"tiles_ok": dg.MetadataValue.int(result.manifest.counts.ok)}
    for name, statistics in outputs.items():
        assert isinstance(statistics, dict), "values by statistic"
        for statistic, value in statistics.items():
            found[f"{name}_{statistic}"] = dg.MetadataValue.float(float(str(value)))
    return found


def _heatmap(result: StageResult) -> dict[str, dg.MetadataValue]:
    counts = result.manifest.counts
    output = str(result.manifest.summary["output"])
    return {
        "overlay": picture(result.folder / "preview.jpg", f"heatmap of {output}"),
        "output": dg.MetadataValue.text(output),
        "pyramid": dg.MetadataValue.path(result.folder / "heatmap.tif"),
        "values": dg.MetadataValue.path(result.folder / "heatmap.ome.tif"),
        "tiles_ok": dg.MetadataValue.int(counts.ok),
        "tiles_failed": dg.MetadataValue.int(counts.failed),
    }


def picture(path: Path, text: str) -> dg.MarkdownMetadataValue:
    """A small JPEG as part of the metadata: every reader of the event log carries it, so it stays under 50 kB."""
    data = base64.b64encode(path.read_bytes()).decode()
    return dg.MetadataValue.md(f"![{html.escape(text)}](data:image/jpeg;base64,{data})")


_BY_STAGE = {
    "info": _info,
    "tiles": _tiles,
    "predict": _predict,
    "features": _features,
    "prediction": _prediction,
    "heatmap": _heatmap,
}
