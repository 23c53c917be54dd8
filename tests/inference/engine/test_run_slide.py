"""The whole job on one slide from Python."""

from pathlib import Path

import pytest

from inference.engine.run import run_slide
from inference.models.registry import Checkpoint
from tests.inference.engine.tiny_slides import section, write_slide


def test_under_a_secret_the_key_tells_nothing_of_the_name(
    tmp_path: Path, demo_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIDE_KEY_SECRET", "a secret")
    slide = write_slide(tmp_path / "in" / "ACC-777.svs", section(2, 3))
    outcome = run_slide(slide, str(demo_checkpoint.path), tmp_path / "out")
    assert outcome.ref.hidden
    written = [p for p in (tmp_path / "out").rglob("*") if p.is_file()]
    assert written
    assert not [p for p in written if "ACC-777" in str(p.relative_to(tmp_path)) or b"ACC-777" in p.read_bytes()]
