"""Under a secret, whatever goes wrong: nothing that Dagster or the store keeps tells a slide's file or folder."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import dagster as dg
import pytest

from inference.models.registry import Checkpoint
from pipelines.resources import SlideInference
from tests.inference.engine.tiny_slides import section, write_slide
from tests.pipelines.conftest import Pipeline, failure_text

WARD, NAME = "WARD-NINE", "ACC-0042"


@pytest.fixture
def hidden(tmp_path: Path, demo_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipeline]:
    """Three slides in a folder with a name that nobody may learn: good, a web page, without a resolution."""
    ward = tmp_path / WARD
    write_slide(ward / "a" / f"{NAME}-A.svs", section(2, 3))
    (ward / f"{NAME}-B.svs").write_text("<html>")
    write_slide(ward / f"{NAME}-C.svs", section(2, 3), mpp=None)
    (ward / f"{NAME}-D.svs").symlink_to("nowhere")
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.setenv("DAGSTER_HOME", str(home))
    monkeypatch.setenv("SLIDE_KEY_SECRET", "a secret for this test")
    monkeypatch.setenv("SLIDE_SOURCE", str(ward))
    monkeypatch.setenv("SLIDE_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("SLIDE_REPORT", str(tmp_path / "report.html"))
    monkeypatch.setenv("SLIDE_MODEL_CACHE", str(demo_checkpoint.path.parent))
    with dg.DagsterInstance.local_temp(str(home), overrides={"telemetry": {"enabled": False}}) as instance:
        yield Pipeline(instance, ward, tmp_path)


def kept(pipeline: Pipeline) -> list[Path]:
    """Everything that lies outside the source, but for the one file that says which slide a key is."""
    found = [p for p in pipeline.source.parent.rglob("*") if pipeline.source not in (p, *p.parents)]
    return [p for p in found if p.name != "cohort.parquet"]


def assert_nothing_told(pipeline: Pipeline, *words: str) -> None:
    for path in kept(pipeline):
        data = path.read_bytes() if path.is_file() else b""
        for word in words:
            assert word not in path.name, path
            assert word.encode() not in data, (path, data[max(0, data.find(word.encode()) - 300) :][:400])


def test_slides_that_fail_one_by_one_and_a_folder_that_is_lost_during_the_work(hidden: Pipeline) -> None:
    keys = hidden.discover()
    assert len(keys) == 3
    assert not hidden.run_slides(keys).success
    (hidden.source / f"{NAME}-B.svs").unlink()
    assert not hidden.run_slides(keys).success
    shutil.rmtree(hidden.source)
    lost = hidden.run_slides(keys)
    assert not lost.success
    assert "the slide source cannot be reached" in failure_text(lost)
    assert hidden.run_report().success
    assert len(kept(hidden)) > 40
    assert (hidden.store / "cohort.parquet").stat().st_mode & 0o777 == 0o600
    # The source's own folder is no secret to who configured it, but it is not for the event log.
    assert_nothing_told(hidden, NAME, WARD)


def test_a_source_that_is_gone_or_a_cohort_file_with_a_bad_row(
    hidden: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    cohort = hidden.source / f"{NAME}.csv"
    for text in (f"path\n../{NAME}-B.svs\n", f"path,mpp\n{NAME}-A.svs,much\n", f"path\n{NAME}-A.svs\n\0"):
        cohort.write_text(text)
        monkeypatch.setenv("SLIDE_SOURCE", str(cohort))
        assert not hidden.run("inventory").success
    monkeypatch.setenv("SLIDE_SOURCE", str(hidden.source / "a" / f"{NAME}-Z.svs"))
    gone = hidden.run("inventory")
    assert not gone.success
    assert "source 1 does not exist" in failure_text(gone)
    sensor = hidden.definitions.resolve_sensor_def("new_slides")
    with dg.build_sensor_context(
        instance=hidden.instance, resources={"inference": SlideInference()}, definitions=hidden.definitions
    ) as context:
        skipped = sensor(context)
    assert isinstance(skipped, dg.SkipReason)
    assert NAME not in str(skipped.skip_message)
    assert_nothing_told(hidden, f"{NAME}-", WARD)


def test_an_error_that_nobody_foresaw_tells_its_kind_alone(hidden: Pipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_self: SlideInference) -> None:
        raise OSError(5, "Input/output error", os.fspath(hidden.source / f"{NAME}-A.svs"))

    monkeypatch.setattr(SlideInference, "discover", fails)
    result = hidden.run("inventory")
    assert "unexpected OSError; please report it" in failure_text(result)
    assert_nothing_told(hidden, NAME, WARD)
