"""One record in the store that cannot be read costs its own slide a second computation, and no other slide anything."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from inference.engine.report import write_cohort_report
from inference.models.registry import Checkpoint
from inference.slides.discovery import SlideRef
from inference.store.manifest import MANIFEST
from tests.inference.engine.runs import contents, make_chain, run
from tests.inference.engine.tiny_slides import ref, section, write_slide


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "inside").touch()


def _loop(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def _forbidden(path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    path.chmod(0)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "cut": lambda path: os.truncate(path, 50),
    "empty": lambda path: os.truncate(path, 0),
    "not text": lambda path: path.write_bytes(b"\xff\xfe\x00"),
    "other JSON": lambda path: path.write_text("[1, 2]"),
    "deep JSON": lambda path: path.write_text("[" * 200_000),
    "a folder": _folder,
    "a loop of links": _loop,
    "no permission": _forbidden,
}


@pytest.fixture
def two(tmp_path: Path) -> list[SlideRef]:
    return [ref(write_slide(tmp_path / "slides" / f"{n}.svs", section(2, 3, seed=n))) for n in (1, 2)]


@pytest.mark.parametrize("damage", DAMAGE)
@pytest.mark.parametrize("stage", ["info", "predict"])
def test_it_is_reported_for_its_slide_alone_and_computed_again_to_the_same_bytes(
    damage: str,
    stage: str,
    two: list[SlideRef],
    tmp_path: Path,
    demo_checkpoint: Checkpoint,
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = tmp_path / "store"
    run(store, demo_checkpoint, two)
    before = contents(store)
    (manifest,) = store.glob(f"{stage}/*/{two[0].key}/{MANIFEST}")
    DAMAGE[damage](manifest)
    with make_chain(store, demo_checkpoint) as chain:
        first, second = write_cohort_report(tmp_path / "report.html", "report", chain, two)
    assert (first.status, second.status) == ("failed", "ok")
    assert "cannot be read" in (first.reason or "")
    assert "again" in (first.remedy or "")
    outcomes = run(store, demo_checkpoint, two)
    assert [outcome.status for outcome in outcomes] == ["ok", "ok"]
    assert outcomes[1].reused
    assert [record.message.count("computed again") for record in caplog.records] == [1]
    assert contents(store) == before


def test_a_record_that_lacks_what_the_report_shows_costs_its_slide_the_figures_alone(
    two: list[SlideRef], tmp_path: Path, demo_checkpoint: Checkpoint
) -> None:
    store = tmp_path / "store"
    run(store, demo_checkpoint, two)
    (path,) = store.glob(f"tiles/*/{two[0].key}/{MANIFEST}")
    manifest = json.loads(path.read_text())
    del manifest["summary"]["level"]
    path.write_text(json.dumps(manifest))
    with make_chain(store, demo_checkpoint) as chain:
        first, second = write_cohort_report(tmp_path / "report.html", "report", chain, two)
    assert (first.status, second.status) == ("failed", "ok")
    assert first.reason == "damaged_result: a record of it in the store lacks what this version writes there"
