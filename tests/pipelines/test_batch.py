"""A batch of five slides with one bad slide among them, in one process, as Dagster runs it."""

import base64
import io
import os

import dagster as dg
import pyarrow.parquet as pq
import pytest
from PIL import Image

from inference.engine.model import EngineModel
from inference.engine.recipes import Addresses
from inference.engine.settings import Settings
from inference.store.store import Store
from pipelines.model_files import pipeline_models
from pipelines.partitions import range_tags
from pipelines.resources import SlideInference
from tests.pipelines.conftest import Pipeline, failure_text

TILING = "t224_s224_0_5um"
PER_SLIDE = [
    ("slide_info",),
    (TILING, "tiles"),
    *(
        ("demo", name)
        for name in ("tile_embeddings", "tile_predictions", "slide_features", "slide_prediction", "heatmap")
    ),
]


def test_one_bad_slide_fails_the_run_and_costs_no_other_slide_anything(pipeline: Pipeline) -> None:
    keys = pipeline.discover()
    bad = next(key for key in keys if "empty" in key)
    result = pipeline.run_slides(keys)
    assert not result.success
    for asset in PER_SLIDE:
        assert pipeline.materialised(*asset) == set(keys) - {bad}, asset
    text = failure_text(result)
    assert "c-empty.svs: the file is empty (0 bytes)" in text
    assert "1 of 5 slides failed" in text
    for key in set(keys) - {bad}:
        folder = next(pipeline.store.glob(f"heatmap/demo-hematoxylin_area@*/{key}"))
        assert {p.name for p in folder.iterdir()} >= {"heatmap.tif", "heatmap.ome.tif", "overlay.png", "manifest.json"}


def test_a_damaged_tile_is_metadata_and_not_a_failure(pipeline: Pipeline) -> None:
    keys = pipeline.discover()
    damaged = next(key for key in keys if "damaged" in key)
    assert pipeline.run_slides([damaged]).success
    metadata = pipeline.latest("demo", "tile_predictions", partition=damaged)
    assert metadata["status"].value == "ok with failures"
    assert metadata["tiles_failed"].value == 4
    table = metadata["failed_tiles"]
    assert isinstance(table, dg.TableMetadataValue)
    (record,) = table.records
    assert record.data["stage"] == "read"
    assert record.data["code"] == "read_error"
    assert (record.data["tiles"], record.data["row"], record.data["col"]) == (4, 5, 7)
    folder = next(pipeline.store.glob(f"predict/demo@*/{damaged}"))
    failures = pq.read_table(folder / "failures.parquet").to_pylist()
    assert {(f["row"], f["col"]) for f in failures} == {(5, 7), (5, 8), (6, 7), (6, 8)}


def test_a_batch_that_goes_well_gives_each_partition_its_own_metadata_and_one_event(pipeline: Pipeline) -> None:
    keys = [key for key in pipeline.discover() if "empty" not in key]
    result = pipeline.run_slides(keys[:2])
    assert result.success
    planned = {key: pipeline.latest(TILING, "tiles", partition=key)["tiles_planned"].value for key in keys[:2]}
    assert planned == {keys[0]: 76, keys[1]: 76}
    for key in keys[:2]:
        found = pipeline.instance.fetch_materializations(
            dg.AssetRecordsFilter(asset_key=dg.AssetKey(["demo", "heatmap"]), asset_partitions=[key]), limit=5
        )
        assert len(found.records) == 1


def test_the_overlay_on_the_asset_is_a_small_picture(pipeline: Pipeline) -> None:
    key = pipeline.discover()[0]
    assert pipeline.run_slides([key]).success
    overlay = pipeline.latest("demo", "heatmap", partition=key)["overlay"].value
    assert isinstance(overlay, str)
    data = base64.b64decode(overlay.split("base64,")[1].rstrip(")"))
    assert len(data) <= 50_000
    assert max(Image.open(io.BytesIO(data)).size) <= 512


def test_the_model_is_loaded_once_for_a_batch_and_not_at_all_when_everything_is_done(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    chains: list[tuple[EngineModel, ...]] = []
    teardown = SlideInference.teardown_after_execution

    def remember(self: SlideInference, context: dg.InitResourceContext) -> None:
        if self._chain is not None:
            chains.append(self._chain.models)
        teardown(self, context)

    monkeypatch.setattr(SlideInference, "teardown_after_execution", remember)
    keys = pipeline.discover()[:2]
    assert pipeline.run_slides(keys).success
    assert pipeline.run_slides(keys).success
    assert [[model.loads for model in models] for models in chains] == [[1], [0]]
    assert pipeline.latest("demo", "heatmap", partition=keys[0])["reused"].value is True


@pytest.mark.slow
def test_any_stage_can_be_selected_alone_once_what_it_needs_is_there(pipeline: Pipeline) -> None:
    key = pipeline.discover()[0]
    job = pipeline.definitions.resolve_job_def("slides")

    def run(*path: str) -> dg.ExecuteInProcessResult:
        return job.execute_in_process(
            instance=pipeline.instance,
            partition_key=key,
            asset_selection=[dg.AssetKey(path)],
            raise_on_error=False,
        )

    early = run("demo", "heatmap")
    assert not early.success
    assert "run that stage first" in failure_text(early)
    for asset in (("slide_info",), (TILING, "tiles"), ("demo", "tile_predictions"), ("demo", "heatmap")):
        assert run(*asset).success, asset
    assert pipeline.materialised("demo", "heatmap") == {key}
    assert pipeline.materialised("demo", "tile_embeddings") == set()


def test_a_key_that_is_not_in_the_inventory_fails_with_the_remedy(pipeline: Pipeline) -> None:
    pipeline.discover()
    pipeline.instance.add_dynamic_partitions("slide_inference_slides", ["stranger"])
    result = pipeline.run_slides(["stranger"])
    assert not result.success
    text = failure_text(result)
    assert "stranger: no such slide in the inventory" in text


@pytest.mark.slow
def test_the_report_names_every_slide_whatever_became_of_it(pipeline: Pipeline) -> None:
    keys = pipeline.discover()
    pipeline.run_slides(keys)
    result = pipeline.run_report()
    assert result.success
    html = pipeline.report.read_text(encoding="utf-8")
    for name in ("a.svs", "b.tiff", "c-empty.svs", "d-damaged.svs", "e.svs"):
        assert name in html
    assert "the file is empty (0 bytes)" in html
    (event,) = result.get_asset_materialization_events()
    metadata = event.materialization.metadata
    assert (metadata["ok"].value, metadata["ok_with_failures"].value, metadata["failed"].value) == (3, 1, 1)


@pytest.mark.slow
def test_under_a_secret_no_file_name_reaches_the_store_the_event_log_or_the_report(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIDE_KEY_SECRET", "a secret")
    for name, secret in {
        "a.svs": "S26-04711_A.svs",
        "c-empty.svs": "S26-04712_B.svs",
        "d-damaged.svs": "S26-04713_C.svs",
    }.items():
        (pipeline.source / name).rename(pipeline.source / secret)
    os.mkfifo(pipeline.source / "S26-04714_D.svs")
    keys = pipeline.discover()
    pipeline.run_slides(keys)
    assert pipeline.run_report().success
    written = [p for p in pipeline.source.parent.rglob("*") if p.is_file() and pipeline.source not in p.parents]
    assert len(written) > 50
    assert (pipeline.store / "cohort.parquet").stat().st_mode & 0o777 == 0o600
    named = [p for p in written if b"S26-047" in p.read_bytes() or "S26-047" in p.name]
    assert [p.name for p in named] in ([], ["cohort.parquet"])


@pytest.mark.slow
def test_a_slide_that_another_process_works_on_is_busy_and_no_failure_of_its_own(pipeline: Pipeline) -> None:
    keys = pipeline.discover()[:2]
    store = Store(pipeline.store)
    manifests = [model.resolve().manifest for model in pipeline_models()]
    with store.lock(Addresses(keys[1], manifests[0], Settings()).info):
        result = pipeline.definitions.resolve_job_def("slides").execute_in_process(
            instance=pipeline.instance,
            tags=range_tags(keys),
            run_config={"resources": {"inference": {"config": {"lock_wait_s": 0.0}}}},
            raise_on_error=False,
        )
    assert not result.success
    text = failure_text(result)
    assert "1 of 2 slides busy" in text
    assert f"is being written by process {os.getpid()} on" in text
    assert "try again later" in text
    assert "failed:" not in text
    assert pipeline.materialised("slide_info") == {keys[0]}
    assert store.failure(keys[1]) is None
    assert pipeline.run_slides(keys).success
