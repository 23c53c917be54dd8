"""A small cohort, a store, and an in-process Dagster instance."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from inference.models.registry import Checkpoint
from pipelines.definitions import INVENTORY_JOB, REPORT_JOB, SLIDES_JOB, build_definitions
from pipelines.partitions import DEFAULT_SET, range_tags

NO_MPP = ("no-mpp.svs", "mpp-zero.svs")


class Pipeline:
    """The pipeline over one source and one store, run in this process as Dagster runs it."""

    def __init__(self, instance: dg.DagsterInstance, source: Path, out: Path) -> None:
        self.instance, self.source, self.store = instance, source, out / "store"
        self.report = out / "report.html"
        self.definitions = build_definitions()

    def run(self, job: str, tags: dict[str, str] | None = None) -> dg.ExecuteInProcessResult:
        return self.definitions.resolve_job_def(job).execute_in_process(
            instance=self.instance, tags=tags, raise_on_error=False
        )

    def discover(self) -> list[str]:
        assert self.run(INVENTORY_JOB).success
        return list(self.instance.get_dynamic_partitions(DEFAULT_SET))

    def run_slides(self, keys: list[str]) -> dg.ExecuteInProcessResult:
        return self.run(SLIDES_JOB, range_tags(keys))

    def run_report(self) -> dg.ExecuteInProcessResult:
        return self.run(REPORT_JOB)

    def materialised(self, *path: str) -> set[str]:
        return set(self.instance.get_materialized_partitions(dg.AssetKey(path)))

    def latest(self, *path: str, partition: str) -> dict[str, dg.MetadataValue]:
        records = self.instance.fetch_materializations(
            dg.AssetRecordsFilter(asset_key=dg.AssetKey(path), asset_partitions=[partition]), limit=1
        ).records
        event = records[0].asset_materialization
        assert event is not None
        return dict(event.metadata)


def failure_text(result: dg.ExecuteInProcessResult) -> str:
    """What the failed step says."""
    return str(next(event for event in result.all_events if event.is_step_failure).step_failure_data.error)


@pytest.fixture
def five_slides(tmp_path: Path, shared_data: Path) -> Path:
    """Four good slides (one with a damaged tile) and an empty file in the middle."""
    folder = tmp_path / "five"
    folder.mkdir()
    for name, source in {
        "a.svs": "slides/CMU-1-Small-Region.svs",
        "b.tiff": "derived/generic-pyramid-jpeg.tiff",
        "c-empty.svs": "broken/empty.svs",
        "d-damaged.svs": "broken/tile-garbage.svs",
        "e.svs": "derived/aperio-3level-jpeg.svs",
    }.items():
        shutil.copy(shared_data / source, folder / name)
    return folder


@pytest.fixture
def pipeline(
    tmp_path: Path, five_slides: Path, demo_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Pipeline]:
    """The pipeline over `five_slides`."""
    monkeypatch.setenv("SLIDE_SOURCE", str(five_slides))
    monkeypatch.setenv("SLIDE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("SLIDE_REPORT", str(tmp_path / "report.html"))
    monkeypatch.setenv("SLIDE_MODEL_CACHE", str(demo_checkpoint.path.parent))
    with dg.DagsterInstance.local_temp(str(tmp_path), overrides={"telemetry": {"enabled": False}}) as instance:
        yield Pipeline(instance, five_slides, tmp_path)
