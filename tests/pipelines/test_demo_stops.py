"""What `make demo` says, in one line, when it cannot go on or cannot begin: the cause and the remedy."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from inference.models.registry import Checkpoint
from tests.inference.engine.tiny_slides import section, write_slide
from tests.inference.store.mounts import tmpfs
from tests.interrupting import Ended, run_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


class Demo:
    """The demo on two slides."""

    def __init__(self, checkpoint: Checkpoint, folder: Path) -> None:
        self.folder, self.checkpoint = folder, checkpoint
        self.slides = folder / "slides"
        for name in ("a", "b"):
            write_slide(self.slides / f"{name}.svs", section(2, 3))

    def __call__(self, out: Path | str, *more: str) -> Ended:
        arguments = ["pipelines.demo", "--slides", str(self.slides), "--out", str(out), *more]
        return run_until(arguments, self.folder / "scratch", {"SLIDE_MODEL_CACHE": str(self.checkpoint.path.parent)})


@pytest.fixture
def demo(demo_checkpoint: Checkpoint, tmp_path: Path) -> Demo:
    return Demo(demo_checkpoint, tmp_path)


def test_a_store_that_fills_up(demo: Demo) -> None:
    with tmpfs(demo.folder / "disk", "size=1500k") as disk:
        ended = demo(disk / "out")
        assert ended.code == 1
        assert re.fullmatch(
            r"error: (stopped, no slide is to blame: )?the store is full at \S+: free space and run again; "
            r"what is finished is kept",
            ended.lines[-1],
        )
        subprocess.run(["mount", "-o", "remount,size=16m", str(disk)], check=True)
        again = demo(disk / "out")
    assert again.code == 0, again.lines


def test_a_disk_without_room_for_anything(demo: Demo) -> None:
    with tmpfs(demo.folder / "disk", "size=40k") as disk:
        ended = demo(disk / "out")
    assert ended.code == 1
    assert len(ended.lines) == 1
    assert re.match(r"error: the store is full at \S+: free space and run again", ended.lines[0])


def test_a_store_that_becomes_read_only_during_the_run(demo: Demo) -> None:
    out = demo.folder / "out"
    assert demo(out).code == 0
    write_slide(demo.slides / "c.svs", section(2, 3, seed=3))
    with tmpfs(demo.folder / "kept", "size=16m,ro"):
        # Over one stage alone, so that the run gets as far as that.
        stage = out / "runs" / "slides" / "store" / "predict"
        subprocess.run(["mount", "--bind", str(demo.folder / "kept"), str(stage)], check=True)
        try:
            ended = demo(out)
        finally:
            subprocess.run(["umount", str(stage)], check=True)
    assert ended.code == 1
    assert re.fullmatch(
        r"error: stopped, no slide is to blame: cannot write \S+: Read-only file system: "
        r"name a folder that this user may write to",
        ended.lines[-1],
    ), ended.lines
    assert sum(line.startswith("error: ") for line in ended.lines) == 1


def test_a_model_that_returns_another_shape_than_its_spec_says(demo: Demo) -> None:
    models = demo.folder / "models"
    models.mkdir()
    path = models / demo.checkpoint.path.name
    shutil.copy(demo.checkpoint.path, path)
    manifest = json.loads(demo.checkpoint.path.with_name(f"{path.name}.json").read_text())
    manifest["spec"]["embedding_dim"] += 1
    path.with_name(f"{path.name}.json").write_text(json.dumps(manifest))
    ended = demo(demo.folder / "out", "--model", str(path))
    assert ended.code == 1
    *_, last = ended.lines
    assert last.startswith("error: stopped, no slide is to blame: demo returned "), ended.lines
    assert "its spec declares" in last
    assert last.endswith("export it again"), last
    assert sum("returned" in line for line in ended.lines) == 1


@pytest.mark.parametrize("kind", ["a file", "below a file", "too long", "not UTF-8", "no such device"])
def test_an_output_folder_that_cannot_be_one(kind: str, demo: Demo) -> None:
    (demo.folder / "file").touch()
    out = {
        "a file": str(demo.folder / "file"),
        "below a file": str(demo.folder / "file" / "out"),
        "too long": str(demo.folder / ("x" * 300)),
        "not UTF-8": os.fsdecode(os.fsencode(demo.folder) + b"/\xff\xfe"),
        "no such device": "/proc/nowhere",
    }[kind]
    ended = demo(out)
    assert ended.code == 2
    assert len(ended.lines) == 1
    assert re.match(r"error: --out.*name another folder$", ended.lines[0])
    assert {p.name for p in demo.folder.iterdir()} == {"file", "slides", "scratch"}
