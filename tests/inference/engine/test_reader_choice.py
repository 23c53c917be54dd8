"""Which slides are read by processes of their own, and that their results are those of threads."""

from pathlib import Path

import pytest

from inference.engine.job import SlideJob
from inference.engine.settings import Settings
from inference.errors import ConfigError
from inference.models.registry import Checkpoint
from inference.slides.process_reader import ProcessReader
from inference.slides.readahead import STALLED_AFTER_S
from inference.store.store import Store
from tests.inference.engine.runs import contents, result, run, vectors_of
from tests.inference.engine.tiny_slides import ref, section, write_slide


@pytest.fixture
def slide(tmp_path: Path) -> Path:
    return write_slide(tmp_path / "slides" / "a.svs", section())


def _mounted(monkeypatch: pytest.MonkeyPatch, folder: Path, kind: str) -> None:
    """Let the table of mounts say that a folder is a file system of its own."""
    table = folder / "mountinfo"
    table.write_text(f"1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 0:9 / {folder / 'slides'} rw - {kind} somewhere rw\n")
    monkeypatch.setattr("inference.slides._mounts._MOUNTS", table)


@pytest.mark.parametrize(
    ("reader", "mount", "in_process"),
    [
        ("auto", "xfs", False),
        ("auto", "nfs4", True),
        ("auto", "fuse.s3fs", True),
        ("threads", "nfs4", False),
        ("process", "xfs", True),
    ],
)
def test_processes_read_what_lies_elsewhere_or_where_asked_for(
    slide: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reader: str, mount: str, in_process: bool
) -> None:
    _mounted(monkeypatch, tmp_path, mount)
    settings = Settings(reader=reader, read_timeout_s=45)  # type: ignore[arg-type]
    with SlideJob(ref(slide), Store(tmp_path / "store"), settings, lambda *_: None) as job:
        assert isinstance(job.reader, ProcessReader) is in_process
        assert job.reader.kind.endswith(", in a process of its own") is in_process
        assert job.stalled_after_s == (240 if in_process else STALLED_AFTER_S)


def test_a_run_by_processes_has_the_results_of_one_by_threads(
    slide: Path, tmp_path: Path, demo_checkpoint: Checkpoint
) -> None:
    """And a second run finds them: who read a slide is no part of what defines its numbers."""
    threads, processes = (
        run(tmp_path / reader, demo_checkpoint, [ref(slide)], stages=["info", "tiles", "predict"], reader=reader)[0]
        for reader in ("threads", "process")
    )
    assert processes.status == "ok"
    assert vectors_of(processes, "embedding") == vectors_of(threads, "embedding")
    told = [str(result(outcome, "predict").manifest.execution["reader"]) for outcome in (threads, processes)]
    assert told[1] == f"{told[0]}, in a process of its own"
    ours, theirs = contents(tmp_path / "process"), contents(tmp_path / "threads")
    assert ours.keys() == theirs.keys()
    pictures = [name for name in ours if name.endswith((".png", ".jpg", "slide.json"))]
    assert pictures
    assert all(ours[name] == theirs[name] for name in pictures)
    (again,) = run(tmp_path / "threads", demo_checkpoint, [ref(slide)], stages=["info", "tiles"], reader="process")
    assert again.reused


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"reader": "thread"}, "reader is 'thread': give auto, threads or process"),
        ({"reader": None}, "reader is None: give auto"),
        ({"read_timeout_s": 0}, "read_timeout_s is 0: give a number between 0.1 and 86400"),
        ({"read_timeout_s": float("nan")}, "read_timeout_s is nan: give a number"),
    ],
)
def test_what_no_reader_can_be_is_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Settings(**wrong)  # type: ignore[arg-type]
