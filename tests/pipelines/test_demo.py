"""The whole job on the demo cohort, as `make demo` runs it, against the cohort's own ground truth."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import openslide
import pyarrow.parquet as pq
import pytest
import tifffile
from numpy.typing import NDArray

from inference.models.registry import Checkpoint
from tests.conftest import REPO

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NAMES = ("demo-1", "demo-2", "demo-3")
CELL = 448  # level-0 pixels of one tile: 224 px at 0.5 µm/px on a slide of 0.25 µm/px


def run_demo(out: Path, models: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`make demo` without the install."""
    return subprocess.run(
        [sys.executable, "-m", "pipelines.demo", "--out", str(out), *arguments],
        cwd=REPO,
        env={**os.environ, "SLIDE_MODEL_CACHE": str(models)},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory, demo_checkpoint: Checkpoint) -> Path:
    """The folder of a finished demo run."""
    out = tmp_path_factory.mktemp("demo")
    result = run_demo(out, demo_checkpoint.path.parent)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    assert str(out / "demo" / "report.html") in result.stdout
    return out / "demo"


def test_everything_lies_under_the_demo_folder_and_the_report_names_each_slide(demo: Path) -> None:
    assert {p.name for p in demo.iterdir()} == {"store", "report.html", "slides", "dagster"}
    html = (demo / "report.html").read_text(encoding="utf-8")
    assert all(f"{name}.svs" in html for name in NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_the_heatmap_has_the_density_that_was_painted(demo: Path, name: str) -> None:
    values, validity = heatmap(demo, name)
    truth = np.load(demo / "slides" / "truth.npz")
    painted, dense, tissue = (
        truth[f"{name}.{kind}"] for kind in ("nuclei_fraction", "dense_fraction", "tissue_fraction")
    )
    rows, cols = painted.shape
    predicted = validity[:rows, :cols] == 3
    inside, outside = predicted & (dense == 1), predicted & (dense == 0) & (tissue > 0.5)
    assert inside.sum() > 5
    assert outside.sum() > 30
    measured = values[:rows, :cols]
    np.testing.assert_allclose(measured[inside], painted[inside], atol=0.02)
    expected = painted[inside].mean() / painted[outside].mean()
    ratio = measured[inside].mean() / measured[outside].mean()
    assert ratio == pytest.approx(expected, rel=0.1)
    assert ratio > 5


@pytest.mark.parametrize("name", NAMES)
def test_each_tile_is_at_its_pixels_in_the_heatmap_to_the_last_row_and_column(demo: Path, name: str) -> None:
    values, validity = heatmap(demo, name)
    width, height = openslide.OpenSlide(demo / "slides" / f"{name}.svs").dimensions
    assert values.shape == (-(-height // CELL), -(-width // CELL))
    table = pq.read_table(one(demo, "predict/demo@*", name) / "predictions.parquet").to_pylist()
    for tile in table:
        place = (tile["y"] // CELL, tile["x"] // CELL)
        assert (tile["x"] % CELL, tile["y"] % CELL) == (0, 0)
        assert place == (tile["row"], tile["col"])
        if tile["status"] == "ok":
            assert validity[place] == 3
            assert values[place] == np.float32(tile["prediction"][0])
        else:
            assert validity[place] == 2
            assert np.isnan(values[place])
    covered = np.zeros(values.shape, bool)
    covered[: height // CELL, : width // CELL] = True
    assert ((validity == 0) == ~covered).all()


def test_the_damaged_tile_of_the_second_slide_is_recorded_and_costs_nothing_else(demo: Path) -> None:
    failures = pq.read_table(one(demo, "predict/demo@*", "demo-2") / "failures.parquet").to_pylist()
    damage = json.loads((demo / "slides/truth.json").read_text())["slides"]["demo-2.svs"]["damaged_tile"]
    x, y, width, height = (damage[side] for side in ("x", "y", "width", "height"))
    assert failures
    for tile in failures:
        assert (tile["stage"], tile["code"], tile["attempts"]) == ("read", "read_error", 2)
        assert tile["x"] < x + width
        assert x < tile["x"] + CELL
        assert tile["y"] < y + height
        assert y < tile["y"] + CELL
    assert pq.read_table(one(demo, "predict/demo@*", "demo-1") / "failures.parquet").num_rows == 0


def test_the_third_slide_got_its_resolution_from_the_cohort_file(demo: Path) -> None:
    manifest = json.loads((one(demo, "info/qc@*", "demo-3") / "manifest.json").read_text())
    assert manifest["inputs"]["mpp"] == [0.25, 0.25]
    assert manifest["inputs"]["mpp_source"] == "cohort file"


def test_the_heatmap_opens_as_a_slide_at_its_own_resolution(demo: Path) -> None:
    with openslide.OpenSlide(one(demo, "heatmap/demo-*", "demo-1") / "heatmap.tif") as slide:
        assert float(slide.properties["openslide.mpp-x"]) == pytest.approx(112.0, rel=1e-3)


def test_running_it_again_skips_everything(demo: Path, demo_checkpoint: Checkpoint) -> None:
    before = {p: p.stat().st_mtime_ns for p in demo.rglob("store/*/*/*/*")}
    result = run_demo(demo.parent, demo_checkpoint.path.parent)
    assert result.returncode == 0
    assert (result.stdout + result.stderr).count("already done") == 3
    assert {p: p.stat().st_mtime_ns for p in demo.rglob("store/*/*/*/*")} == before


def test_two_runs_into_two_stores_give_equal_bytes(demo: Path, tmp_path: Path, demo_checkpoint: Checkpoint) -> None:
    assert run_demo(tmp_path, demo_checkpoint.path.parent).returncode == 0
    first, second = demo / "store", tmp_path / "demo" / "store"
    names = sorted(p.relative_to(first) for p in first.glob("*/*@*/*/*"))
    assert names == sorted(p.relative_to(second) for p in second.glob("*/*@*/*/*"))
    assert {p.suffix for p in names} >= {".parquet", ".tif", ".png", ".json"}
    for name in names:
        if name.name == "manifest.json":
            a, b = (json.loads((store / name).read_text()) for store in (first, second))
            # Written at another time, the slides have other mtimes; everything else is the same.
            for manifest in (a, b):
                del manifest["run"]
                for file in manifest["identity"]["files"]:
                    del file["mtime_ns"]
            assert a == b, name
        else:
            assert (first / name).read_bytes() == (second / name).read_bytes(), name


def test_a_folder_with_bad_slides_finishes_the_good_ones_and_exits_non_zero(
    tmp_path: Path, shared_data: Path, demo_checkpoint: Checkpoint
) -> None:
    models = demo_checkpoint.path.parent
    for folder, bad in (("slides", 2), ("derived", 1)):
        result = run_demo(tmp_path, models, "--slides", str(shared_data / folder))
        text = result.stdout + result.stderr
        assert result.returncode == 1, text[-2000:]
        assert text.count("give its level-0 µm/px with --mpp X") >= 1
        store = tmp_path / "runs" / folder / "store"
        assert len(list(store.glob(".failures/*.json"))) == bad
        again = run_demo(tmp_path, models, "--slides", str(shared_data / folder), "--mpp", "0.5")
        left = [json.loads(p.read_text())["code"] for p in store.glob(".failures/*.json")]
        assert left == (["resolution_too_coarse"] if folder == "slides" else [])
        assert again.returncode == (1 if left else 0)


def one(demo: Path, place: str, name: str) -> Path:
    """The one result folder of a slide."""
    (folder,) = (demo / "store").glob(f"{place}/{name}-svs-*")
    return folder


def heatmap(demo: Path, name: str) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Values and validity of a slide's heatmap."""
    values, validity = tifffile.imread(one(demo, "heatmap/demo-*", name) / "heatmap.ome.tif")
    return values, validity
