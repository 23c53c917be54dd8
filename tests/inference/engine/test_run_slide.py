"""The whole job on one slide from Python."""

from pathlib import Path

import pytest

from inference.engine.inventory import read_inventory
from inference.engine.run import run_slide
from inference.engine.settings import Settings
from inference.errors import ConfigError, UnknownModel
from inference.models.registry import Checkpoint
from inference.store.store import Store
from tests.inference.engine.runs import contents
from tests.inference.engine.tiny_slides import section, write_slide


def test_under_a_secret_the_key_tells_nothing_of_the_name(
    tmp_path: Path, demo_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIDE_KEY_SECRET", "a secret")
    slide = write_slide(tmp_path / "in" / "ACC-777.svs", section(2, 3))
    outcome = run_slide(slide, str(demo_checkpoint.path), tmp_path / "out")
    assert outcome.ref.hidden
    written = [p for p in (tmp_path / "out").rglob("*") if p.is_file() and p.name != "cohort.parquet"]
    assert written
    table = tmp_path / "out" / "cohort.parquet"
    assert table.stat().st_mode & 0o777 == 0o600, "the one file that says which slide a key means"
    assert not [p for p in written if "ACC-777" in str(p.relative_to(tmp_path)) or b"ACC-777" in p.read_bytes()]


def test_another_slide_with_the_same_key_is_refused_before_it_replaces_the_firsts_results(
    tmp_path: Path, demo_checkpoint: Checkpoint
) -> None:
    model, out = str(demo_checkpoint.path), tmp_path / "out"
    first, second = (
        write_slide(tmp_path / site / "slides" / "1.svs", section(2, 3, seed=seed)) for seed, site in enumerate("ab")
    )
    done = run_slide(first, model, out)
    before = contents(out)
    with pytest.raises(ConfigError, match=r"key 1-svs-\w{8} has results of another slide .*a/slides/1.svs.*--root"):
        run_slide(second, model, out)
    assert contents(out) == before
    assert run_slide(first, model, out).reused
    assert [str(ref.path) for ref in read_inventory(Store(out)).values()] == [str(first)]
    assert done.ref.key == run_slide(second, model, tmp_path / "another").ref.key


def test_a_slide_that_was_moved_or_copied_is_the_same_one(tmp_path: Path, demo_checkpoint: Checkpoint) -> None:
    model, out = str(demo_checkpoint.path), tmp_path / "out"
    first = write_slide(tmp_path / "a" / "slides" / "1.svs", section(2, 3))
    run_slide(first, model, out)
    moved = tmp_path / "b" / "slides" / "1.svs"
    moved.parent.mkdir(parents=True)
    first.rename(moved)
    assert run_slide(moved, model, out).reused
    assert [ref.path for ref in read_inventory(Store(out)).values()] == [moved]
    moved.write_bytes(write_slide(tmp_path / "new.svs", section(2, 3, seed=5)).read_bytes())
    assert not run_slide(moved, model, out).reused, "changed where it lies: the same slide, with new content"


def test_what_cannot_run_is_refused_before_a_store_is_made_and_under_a_secret_without_the_path(
    tmp_path: Path, demo_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    slide = write_slide(tmp_path / "in" / "ACC-777.svs", section(2, 3))
    model, out = demo_checkpoint.path, tmp_path / "out"
    with pytest.raises(ConfigError, match="takes batches of 1 to 4096 tiles, not 10000"):
        run_slide(slide, str(model), out, settings=Settings(batch_size=10_000))
    with pytest.raises(UnknownModel):
        run_slide(slide, "no-such-model", out)
    monkeypatch.setenv("SLIDE_KEY_SECRET", "a secret")
    (tmp_path / "ACC-778").mkdir()
    with pytest.raises(ConfigError, match=r"^the path names 0 slides") as caught:
        run_slide(tmp_path / "ACC-778", str(model), out)
    assert "ACC" not in caught.value.message
    assert not out.exists()
