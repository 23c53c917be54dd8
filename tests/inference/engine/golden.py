"""The numbers of every stage on two small slides, to be compared with those recorded in `golden.json`.

    python -m tests.inference.engine.golden

records them anew, and refuses to where a stage's numbers moved but not its STAGE_VERSION.
"""

import hashlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import tifffile

from inference.engine.chain import SlideOutcome
from inference.engine.recipes import STAGE_VERSION
from inference.engine.survey import load_image
from inference.models.registry import Checkpoint, resolve_model
from tests.inference.engine.runs import result, run
from tests.inference.engine.tiny_slides import ref, section, write_slide

GOLDEN = Path(__file__).with_name("golden.json")
CACHE = Path(__file__).resolve().parents[3] / "out" / "cache" / "models"
TOLERANCE = 2e-4
"""Absolute; compilers and processors move the last bits of float32 by far less."""

FIGURES = ("pen_fraction", "dark_fraction", "saturation", "blank_fraction")

MPP = {"pixel for pixel": 0.5, "reduced": 0.37}

Numbers = dict[str, Any]
"""Of one stage: texts and integers, which must be equal, and lists of floats, which must be close."""


def measure(folder: Path, checkpoint: Checkpoint) -> dict[str, dict[str, Numbers]]:
    """Numbers by slide and stage."""
    path = write_slide(folder / "golden.svs", section(3, 4))
    found = {}
    for name, mpp in MPP.items():
        (outcome,) = run(folder / name, checkpoint, [ref(path, mpp=mpp)])
        found[name] = _numbers(outcome)
    return found


def differences(found: dict[str, dict[str, Numbers]], recorded: dict[str, dict[str, Numbers]]) -> set[str]:
    """Stages whose numbers are not the recorded ones."""
    return {
        stage
        for slide, stages in found.items()
        for stage, numbers in stages.items()
        if not _same(numbers, recorded.get(slide, {}).get(stage, {}))
    }


def _same(numbers: Numbers, recorded: Numbers) -> bool:
    def close(a: object, b: object) -> bool:
        if not isinstance(a, list) or not isinstance(b, list):
            return a == b
        return np.shape(a) == np.shape(b) and np.allclose(a, b, rtol=0, atol=TOLERANCE, equal_nan=True)

    return numbers.keys() == recorded.keys() and all(close(numbers[key], recorded[key]) for key in numbers)


def _numbers(outcome: SlideOutcome) -> dict[str, Numbers]:
    folder = {r.stage: r.folder for r in outcome.results}
    tiles = pq.read_table(folder["tiles"] / "tiles.parquet").to_pydict()
    embedding = pq.read_table(folder["predict"] / "embeddings.parquet").column("embedding").to_pylist()
    prediction = pq.read_table(folder["predict"] / "predictions.parquet").column("prediction").to_pylist()
    features = pq.read_table(folder["features"] / "slide_features.parquet").column("embedding").to_pylist()
    outputs = json.loads((folder["prediction"] / "slide_prediction.json").read_text())["outputs"]
    values, validity = tifffile.imread(folder["heatmap"] / "heatmap.ome.tif")
    picture = tifffile.imread(folder["heatmap"] / "heatmap.tif")
    summary = result(outcome, "tiles").manifest.summary
    return {
        "info": {
            "overview": _digest(load_image(folder["info"] / "overview.png")),
            "thumbnail": list(load_image(folder["info"] / "thumbnail.jpg").shape),
        },
        "tiles": {
            "mask": _digest(load_image(folder["tiles"] / "mask.png")),
            "cells": [list(cell) for cell in zip(tiles["row"], tiles["col"], tiles["x"], tiles["y"], strict=True)],
            "shares": [list(pair) for pair in zip(tiles["tissue_fraction"], tiles["missing_fraction"], strict=True)],
            "quality": [list(row) for row in zip(*(tiles[name] for name in FIGURES), strict=True)],
            "read": f"level {summary['level']}, reduction {summary['reduction']}, resample {summary['resample']}",
        },
        "predict": {"first_embedding": _floats(embedding[0]), "predictions": [_floats(p) for p in prediction]},
        "slide": {
            "features": _floats(features[0]),
            "outputs": [[value for _, value in sorted(outputs[name].items())] for name in sorted(outputs)],
        },
        "heatmap": {
            "values": [-1.0 if np.isnan(v) else float(v) for v in values.ravel()],
            "validity": "".join(str(int(v)) for v in validity.ravel()),
            "picture": [float(v) / 255 / 50 for v in picture.ravel()],  # a grey level is within the tolerance
        },
    }


def _floats(values: list[float]) -> list[float]:
    return [round(float(value), 7) for value in values]


def _digest(image: np.ndarray[Any, Any]) -> str:
    return f"{image.shape} {hashlib.sha256(np.ascontiguousarray(image).tobytes()).hexdigest()[:16]}"


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        numbers = measure(Path(folder), resolve_model("demo", cache=CACHE))
    if GOLDEN.exists():
        recorded = json.loads(GOLDEN.read_text())
        moved = differences(numbers, recorded["numbers"])
        if stuck := {stage for stage in moved if recorded["stage_version"].get(stage) == STAGE_VERSION[stage]}:
            sys.exit(f"numbers of {', '.join(sorted(stuck))} moved: raise them in STAGE_VERSION first")
    document = {"stage_version": STAGE_VERSION, "numbers": numbers}
    GOLDEN.write_text(json.dumps(document, indent=None, separators=(",", ":"), sort_keys=True) + "\n")


if __name__ == "__main__":
    main()
