"""The whole job from Python, and the cohort's report over what lies in the store."""

import os
import re
from pathlib import Path

import pytest

from inference import run_slide
from inference.engine.report import write_cohort_report
from inference.engine.run import find_slides
from inference.engine.settings import Settings
from inference.errors import ConfigError, UnknownModel, UnknownResolution
from inference.models.registry import Checkpoint
from tests.inference.engine.runs import make_chain
from tests.inference.engine.tiny_slides import ref, section, write_slide

SMALL = Settings(batch_size=8, readers=2)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "slides"


def test_run_slide_gives_the_outcome_and_reports_progress(
    folder: Path, tmp_path: Path, demo_checkpoint: Checkpoint
) -> None:
    path = write_slide(folder / "a.svs", section(2, 3))
    told: list[int] = []
    outcome = run_slide(
        path,
        model=str(demo_checkpoint.path),
        out=tmp_path / "out",
        settings=SMALL,
        progress=lambda _key, _stage, done, _total: told.append(done),
    )
    assert (outcome.status, told) == ("ok", [1, 2, 3, 4])
    assert run_slide(str(path), str(demo_checkpoint.path), str(tmp_path / "out"), settings=SMALL).reused


def test_run_slide_raises_why_a_slide_failed(folder: Path, tmp_path: Path, demo_checkpoint: Checkpoint) -> None:
    path = write_slide(folder / "a.svs", section(2, 3), mpp=None)
    with pytest.raises(UnknownResolution, match="--mpp X"):
        run_slide(path, str(demo_checkpoint.path), tmp_path / "out", settings=SMALL)
    with pytest.raises(UnknownModel):
        run_slide(path, "no-such-model", tmp_path / "out", settings=SMALL)


def test_run_slide_takes_one_slide(folder: Path, tmp_path: Path, demo_checkpoint: Checkpoint) -> None:
    for name in ("a.svs", "b.svs"):
        write_slide(folder / name, section(2, 3))
    with pytest.raises(ConfigError, match="names 2 slides: run_slide takes one"):
        run_slide(folder, str(demo_checkpoint.path), tmp_path / "out", settings=SMALL)


def test_finding_nothing_says_where_and_why_in_one_line_and_names_no_file_under_a_secret(folder: Path) -> None:
    folder.mkdir()
    (folder / "ACC-1.svs").symlink_to(folder / "nowhere")
    with pytest.raises(ConfigError, match=r"no slide found under .*slides \(ACC-1\.svs: a link whose target") as caught:
        find_slides([folder])
    assert "\n" not in caught.value.message
    with pytest.raises(ConfigError, match="no slide found under the sources") as caught:
        find_slides([folder], secret="s3cret")  # noqa: S106
    assert "ACC-1" not in caught.value.message
    assert str(folder) not in caught.value.message


def test_the_report_shows_every_slide_whatever_became_of_it(
    folder: Path, tmp_path: Path, demo_checkpoint: Checkpoint
) -> None:
    good = ref(write_slide(folder / "good.svs", section(2, 3)))
    hurt = ref(write_slide(folder / "hurt.svs", section(), damaged=[(1, 1)]))
    glass = ref(write_slide(folder / "glass.svs", section(2, 3, glass_cols=3)))
    bad = ref(write_slide(folder / "bad.svs", section(2, 3), mpp=None))
    rotten = ref(write_slide(folder / "rotten.svs", section(2, 3)))
    never = ref(write_slide(folder / "never.svs", section(2, 3)))
    path = tmp_path / "report.html"
    with make_chain(tmp_path / "store", demo_checkpoint) as chain:
        list(chain.run([good, hurt, glass, bad, rotten]))
        for manifest in (tmp_path / "store").glob(f"*/*/{rotten.key}/manifest.json"):
            os.truncate(manifest, 50)
        rows = write_cohort_report(path, "cohort", chain, [good, hurt, glass, bad, rotten, never])
    assert {row.name: (row.status, row.n_ok, row.n_failed) for row in rows} == {
        "good.svs": ("ok", 4, 0),
        "hurt.svs": ("ok with failures", 12, 4),
        "glass.svs": ("empty", 0, 0),
        "bad.svs": ("failed", 0, 0),
        "rotten.svs": ("failed", 0, 0),
        "never.svs": ("not run", 0, 0),
    }
    reasons = {row.name: row.reason or "" for row in rows}
    assert "--mpp X" in reasons["bad.svs"]
    assert "no tissue was found" in reasons["glass.svs"]
    assert reasons["never.svs"] == "not run yet with the settings below"
    assert re.match(r"damaged_result: \S+manifest\.json cannot be read: .*; delete its folder", reasons["rotten.svs"])
    (group,) = rows[1].failures
    assert (group.code, group.n_tiles) == ("read: read_error", 4)
    assert group.example.startswith("row 1, col 1 at (224, 224): ")
    page = path.read_text()
    assert all(name in page for name in reasons)
