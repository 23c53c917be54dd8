"""What a slide's results hold: complete, the same in every run, and untouched by what fails beside them."""

import json
from pathlib import Path

import numpy as np
import openslide
import pyarrow.parquet as pq
import pytest
import tifffile
from PIL import Image

from inference.engine.chain import SlideOutcome
from inference.engine.settings import STAGES, Stage
from inference.models.registry import Checkpoint
from inference.store.store import Store
from tests.inference.engine.runs import (
    ALL_STAGES,
    contents,
    failures_of,
    make_chain,
    result,
    run,
    script,
    stages_of,
    vectors_of,
)
from tests.inference.engine.tiny_slides import poisoned, ref, section, write_slide

FILES: dict[Stage, set[str]] = {
    "info": {"thumbnail.jpg", "overview.png", "missing.png", "unreadable.png", "slide.json"},
    "tiles": {"tiles.parquet", "mask.png"},
    "predict": {"embeddings.parquet", "predictions.parquet", "quality.parquet", "failures.parquet"},
    "features": {"slide_features.parquet"},
    "prediction": {"slide_prediction.parquet", "slide_prediction.json"},
    "heatmap": {"heatmap.tif", "heatmap.ome.tif", "overlay.png", "preview.jpg"},
}
TABLES: list[Stage] = ["info", "tiles", "predict", "features", "prediction"]
"""All but the pictures, which take the longest."""
POISONED = (2, 1)


@pytest.fixture
def slide(tmp_path: Path) -> Path:
    return write_slide(tmp_path / "slides" / "a.svs", section())


def test_a_slide_gets_every_result_and_nothing_else_lies_in_the_store(
    slide: Path, tmp_path: Path, demo_checkpoint: Checkpoint
) -> None:
    told: list[tuple[int, int]] = []
    (outcome,) = run(
        tmp_path / "store", demo_checkpoint, [ref(slide)], progress=lambda _k, _s, done, of: told.append((done, of))
    )
    assert (outcome.status, outcome.error, outcome.reused) == ("ok", None, False)
    assert stages_of(outcome, reused=False) == ALL_STAGES
    for stage, names in FILES.items():
        found = result(outcome, stage)
        assert {path.name for path in found.folder.iterdir()} == {*names, "manifest.json"}
        assert {record.name for record in found.manifest.files} == names
    assert len(contents(tmp_path / "store")) == sum(map(len, FILES.values())) + len(FILES)
    assert told == [(i + 1, 16) for i in range(16)]


def test_the_tables_agree_with_the_grid_and_with_each_other(
    slide: Path, tmp_path: Path, demo_checkpoint: Checkpoint
) -> None:
    (outcome,) = run(tmp_path / "store", demo_checkpoint, [ref(slide)])
    tiles = pq.read_table(result(outcome, "tiles").folder / "tiles.parquet").to_pylist()
    keys = [(t["row"], t["col"], t["x"], t["y"]) for t in tiles]
    assert keys == [(r, c, 224 * c, 224 * r) for r in range(4) for c in range(4)], "row-major, no glass column"
    for head, width in (("embedding", 64), ("prediction", 3)):
        rows = pq.read_table(result(outcome, "predict").folder / f"{head}s.parquet").to_pylist()
        assert [(t["row"], t["col"], t["x"], t["y"]) for t in rows] == keys
        assert {(t["status"], len(t[head])) for t in rows} == {("ok", width)}
    counts = result(outcome, "predict").manifest.counts
    assert (counts.grid, counts.planned, counts.ok, counts.failed, counts.skipped) == (20, 16, 16, 0, 4)
    features = pq.read_table(result(outcome, "features").folder / "slide_features.parquet").to_pylist()
    mean = np.mean([v for v in vectors_of(outcome, "embedding").values() if v], axis=0)
    assert (features[0]["tiles_ok"], features[0]["tiles_failed"]) == (16, 0)
    np.testing.assert_allclose(features[0]["embedding"], mean, rtol=1e-5)
    summary = json.loads((result(outcome, "prediction").folder / "slide_prediction.json").read_text())
    areas = [v[0] for v in vectors_of(outcome, "prediction").values() if v]
    assert summary["outputs"]["hematoxylin_area"]["mean"] == pytest.approx(np.mean(areas), rel=1e-6)
    raster = tifffile.imread(result(outcome, "heatmap").folder / "heatmap.ome.tif")
    np.testing.assert_allclose(raster[0][:4, :4].ravel(), areas, rtol=1e-6)


def test_two_runs_give_the_same_bytes_of_everything(slide: Path, tmp_path: Path, demo_checkpoint: Checkpoint) -> None:
    refs = [ref(slide), ref(write_slide(slide.with_name("b.svs"), section(seed=2), damaged=[(1, 1)]))]
    for name in ("one", "two"):
        outcomes = run(tmp_path / name, demo_checkpoint, refs)
        assert [outcome.status for outcome in outcomes] == ["ok", "ok with failures"]
    one, two = contents(tmp_path / "one"), contents(tmp_path / "two")
    assert len(one) == 2 * (sum(map(len, FILES.values())) + len(FILES))
    assert one == two


@pytest.mark.parametrize("mpp", [None, 0.37, 0.6], ids=["pixel for pixel", "reduced by area", "enlarged"])
def test_the_number_of_reader_threads_changes_no_byte(
    mpp: float | None, slide: Path, tmp_path: Path, demo_checkpoint: Checkpoint
) -> None:
    for readers in (1, 5):
        (outcome,) = run(
            tmp_path / f"{readers}", demo_checkpoint, [ref(slide, mpp=mpp)], stages=TABLES, readers=readers
        )
        assert outcome.status == "ok"
        summary = result(outcome, "tiles").manifest.summary
        assert summary["resample"] == {None: "none", 0.37: "area", 0.6: "bilinear"}[mpp]
    assert contents(tmp_path / "1") == contents(tmp_path / "5")


def test_what_ran_before_in_the_same_process_changes_no_byte(
    slide: Path, tmp_path: Path, demo_checkpoint: Checkpoint
) -> None:
    other = ref(write_slide(slide.with_name("b.svs"), section(3, 3, seed=2)))
    run(tmp_path / "alone", demo_checkpoint, [ref(slide)], stages=TABLES)
    run(tmp_path / "after", demo_checkpoint, [other, ref(slide)], stages=TABLES)
    after = contents(tmp_path / "after")
    assert all(after[name] == data for name, data in contents(tmp_path / "alone").items())


def same_but_for(damaged: SlideOutcome, whole: SlideOutcome, failed: set[tuple[int, int]]) -> None:
    """Every row but the failed ones, which are null, equals the other slide's bit for bit."""
    for head in ("embedding", "prediction"):
        found, expected = vectors_of(damaged, head), vectors_of(whole, head)
        assert found.keys() == expected.keys()
        assert {key for key, vector in found.items() if vector is None} == failed
        assert all(found[key] == expected[key] for key in expected.keys() - failed)


def test_a_damaged_compressed_tile_fails_the_four_tiles_it_touches_and_no_bit_of_another(
    shared_data: Path, tmp_path: Path, demo_checkpoint: Checkpoint
) -> None:
    sources = (shared_data / "broken" / "tile-garbage.svs", shared_data / "slides" / "CMU-1-Small-Region.svs")
    damaged, whole = run(tmp_path / "store", demo_checkpoint, [ref(path) for path in sources], batch_size=64)
    assert (damaged.status, whole.status) == ("ok with failures", "ok")
    same_but_for(damaged, whole, {(5, 7), (5, 8), (6, 7), (6, 8)})
    failures = failures_of(damaged)
    assert [(f["row"], f["col"]) for f in failures] == [(5, 7), (5, 8), (6, 7), (6, 8)]
    for f in failures:
        assert (f["stage"], f["code"], f["retryable"], f["attempts"]) == ("read", "read_error", False, 2)
        assert "/" not in str(f["message"])
        assert "garbage" not in str(f["message"])
        assert (f["x"], f["y"]) == (224 * int(str(f["col"])), 224 * int(str(f["row"])))
    manifest = result(damaged, "predict").manifest
    assert (manifest.counts.planned, manifest.counts.ok, manifest.counts.failed) == (76, 72, 4)
    assert failures_of(whole) == []
    features = pq.read_table(result(damaged, "features").folder / "slide_features.parquet").to_pylist()
    assert (features[0]["tiles_ok"], features[0]["tiles_failed"]) == (72, 4)
    cells = result(damaged, "heatmap").manifest.summary["cells"]
    assert isinstance(cells, dict)
    assert (cells["failed"], cells["predicted"]) == (4, 72)


@pytest.mark.parametrize(
    ("does", "stage", "codes"),
    [
        ("raise", "forward", {"tile_error"}),
        ("nan", "output", {"non_finite_output"}),
        ("infinity", "output", {"non_finite_output"}),
    ],
)
def test_a_tile_that_the_model_cannot_take_fails_alone(
    does: str, stage: str, codes: set[str], slide: Path, tmp_path: Path, demo_checkpoint: Checkpoint
) -> None:
    path = write_slide(slide.with_name("poisoned.svs"), poisoned(section(), *POISONED))
    (whole,) = run(tmp_path / "whole", demo_checkpoint, [ref(path)], stages=TABLES)
    with make_chain(tmp_path / "store", demo_checkpoint) as chain:
        runtime = script(chain, does)
        outcome = chain.run_slide(ref(path), TABLES)
        assert outcome.status == "ok with failures"
        same_but_for(outcome, whole, {POISONED})
        (failed,) = failures_of(outcome)
        assert (failed["row"], failed["col"], failed["stage"]) == (*POISONED, stage)
        assert failed["code"] in codes
        assert not {"\n", "/", "0x7f"} & {str(failed["message"])}
        assert runtime.calls <= 2 + 2 * 4, "halving costs a logarithm"
        after = chain.run_slide(ref(slide), TABLES)
    assert after.status == "ok"


def test_failure_messages_name_no_path_no_address_and_keep_to_one_line(
    tmp_path: Path, demo_checkpoint: Checkpoint
) -> None:
    path = write_slide(tmp_path / "a.svs", poisoned(section(), *POISONED))
    with make_chain(tmp_path / "store", demo_checkpoint) as chain:
        script(chain, "raise")
        (failed,) = failures_of(chain.run_slide(ref(path), TABLES))
    message = str(failed["message"])
    assert "poison at <address> in <path>" in message
    assert not any(text in message for text in ("\n", "/build", "0x7f"))


@pytest.fixture(params=["smaller than a tile", "glass"])
def empty_slide(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, str]:
    if request.param == "glass":
        return write_slide(tmp_path / "glass.svs", section(glass_cols=5)), "no tissue was found"
    shared: Path = request.getfixturevalue("shared_data")
    return shared / "slides" / "dicom-highdicom" / "sm_image.dcm", "(50 x 50 pixels) is smaller than one tile"


def test_a_slide_without_a_tile_to_compute_is_empty_with_the_reason_and_all_its_files_open(
    empty_slide: tuple[Path, str], tmp_path: Path, demo_checkpoint: Checkpoint
) -> None:
    path, reason = empty_slide
    (outcome,) = run(tmp_path / "store", demo_checkpoint, [ref(path)])
    assert (outcome.status, outcome.error) == ("empty", None)
    assert stages_of(outcome, reused=False) == ALL_STAGES
    for stage in STAGES[1:]:
        manifest = result(outcome, stage).manifest
        assert manifest.status == "empty"
        assert reason in str(manifest.reason)
    folder = result(outcome, "predict").folder
    for name, columns in (("embeddings", "embedding"), ("predictions", "prediction"), ("failures", "code")):
        table = pq.read_table(folder / f"{name}.parquet")
        assert len(table) == 0
        assert columns in table.column_names
    (features,) = pq.read_table(result(outcome, "features").folder / "slide_features.parquet").to_pylist()
    assert (features["tiles_ok"], features["tiles_failed"], features["embedding"]) == (0, 0, None)
    assert len(pq.read_table(result(outcome, "prediction").folder / "slide_prediction.parquet")) == 1
    assert json.loads((result(outcome, "prediction").folder / "slide_prediction.json").read_text())["outputs"] == {}
    heatmap = result(outcome, "heatmap").folder
    with openslide.OpenSlide(heatmap / "heatmap.tif") as opened:
        assert np.asarray(opened.read_region((0, 0), 0, opened.dimensions))[..., 0].max() == 0
    values, validity = tifffile.imread(heatmap / "heatmap.ome.tif")
    assert np.isnan(values).all()
    assert set(np.unique(validity)) <= {0, 1}
    for picture in ("overlay.png", "preview.jpg"):
        Image.open(heatmap / picture).load()
    assert Store(tmp_path / "store").failure(outcome.ref.key) is None
