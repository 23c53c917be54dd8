"""Killed at any moment, a result is absent, the older one or the newer one: never half, never mixed."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from inference.errors import StoreError
from inference.store import files as files_module
from inference.store.store import Store
from tests.inference.store.publisher import ADDRESS, CRASH_POINTS, REPLACING_POINTS, leftovers, publish, published

REPO = Path(__file__).resolve().parents[3]


def run_publisher(*arguments: str, prefix: tuple[str, ...] = ()) -> int:
    command = [*prefix, sys.executable, "-m", "tests.inference.store.publisher", *arguments]
    environment = os.environ | {"PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=REPO, env=environment, capture_output=True, timeout=60, check=False).returncode


def age_probes(root: Path) -> None:
    """Two days on: only then is a probe surely of a process that is gone."""
    for path in root.glob(".probe-*"):
        os.utime(path, (0, path.stat().st_mtime - 2 * 86_400))


@pytest.mark.parametrize("point", CRASH_POINTS)
def test_a_first_result_killed_on_the_way_is_absent_and_the_next_run_completes_it(point: str, tmp_path: Path) -> None:
    assert run_publisher("publish", str(tmp_path), "new", point) == -signal.SIGKILL
    assert published(tmp_path) is None
    assert not list(Store(tmp_path).results())
    publish(tmp_path, "next")
    assert published(tmp_path) == "next"
    assert leftovers(tmp_path) == []


@pytest.mark.parametrize("point", CRASH_POINTS | REPLACING_POINTS)
def test_a_result_killed_while_it_replaces_another_leaves_one_of_them_whole(point: str, tmp_path: Path) -> None:
    publish(tmp_path, "old")
    assert run_publisher("publish", str(tmp_path), "new", point) == -signal.SIGKILL
    expected = {
        "after the exchange": "new",
        "without exchange, between the renames": None,
        "without exchange, before the old one is deleted": "new",
    }.get(point, "old")
    assert published(tmp_path) == expected
    assert len(list(Store(tmp_path).results())) == (expected is not None), "leftovers are not results"
    publish(tmp_path, "next")
    assert published(tmp_path) == "next"
    assert leftovers(tmp_path) == []


def test_a_result_is_replaced_by_exchange_so_that_there_is_always_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path, "old")
    seen: list[tuple[str | None, bool]] = []
    exchange = files_module._exchange

    def watched(work: Path, final: Path) -> bool:
        before = published(tmp_path)
        done = exchange(work, final)
        seen.append((before, done))
        return done

    monkeypatch.setattr(files_module, "_exchange", watched)
    publish(tmp_path, "new")
    if seen == [("old", False)]:
        pytest.skip("this file system cannot exchange folders")
    assert seen == [("old", True)]
    assert published(tmp_path) == "new"


def test_without_exchange_an_older_result_is_replaced_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files_module, "_exchange", lambda _work, _final: False)
    for text in ("old", "new"):
        publish(tmp_path, text)
        assert published(tmp_path) == text
    assert leftovers(tmp_path) == []


def test_without_exchange_a_rename_that_fails_gives_the_older_result_its_name_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path, "old")
    monkeypatch.setattr(files_module, "_exchange", lambda _work, _final: False)
    rename = Path.rename

    def refusing(self: Path, target: Path) -> Path:
        if self.name.endswith(".work"):
            raise PermissionError(13, "Permission denied")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", refusing)
    with pytest.raises(StoreError, match="cannot write"):
        publish(tmp_path, "new")
    assert published(tmp_path) == "old"
    monkeypatch.setattr(Path, "rename", rename)
    publish(tmp_path, "new")
    assert published(tmp_path) == "new"


def test_the_older_result_that_cannot_be_deleted_does_not_fail_the_newer_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish(tmp_path, "old")
    rmtree = shutil.rmtree

    def busy(path: Path, *, ignore_errors: bool = False) -> None:
        if Path(path).exists() and not ignore_errors:
            raise OSError(39, "Directory not empty")

    monkeypatch.setattr(shutil, "rmtree", busy)
    publish(tmp_path, "new")
    assert published(tmp_path) == "new"
    assert [path.parent.name for path, _ in Store(tmp_path).results()] == [Path(ADDRESS.folder).parent.name]
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    publish(tmp_path, "next")
    assert leftovers(tmp_path) == []


@pytest.mark.slow
@pytest.mark.parametrize("replacing", [False, True], ids=["a first result", "a result that replaces another"])
def test_killed_at_any_system_call_that_changes_the_disk_a_result_is_whole_or_absent(
    replacing: bool, tmp_path: Path
) -> None:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    kills, seen = 0, set()
    for call in ("mkdir", "write", "fsync", "chmod", "ftruncate", "rename", "renameat2", "unlink", "unlinkat", "rmdir"):
        for number in range(1, 100):
            root = tmp_path / f"{call}-{number}"
            if replacing:
                publish(root, "old")
            inject = f"inject={call}:signal=SIGKILL:when={number}"  # counted for each name of a call on its own
            code = run_publisher("publish", str(root), "new", prefix=("strace", "-qq", "-o/dev/null", "-e", inject))
            if code not in (0, -signal.SIGKILL, 128 + signal.SIGKILL):
                pytest.skip("strace cannot trace here")
            seen.add(published(root))
            age_probes(root)
            publish(root, "next")
            assert (published(root), leftovers(root)) == ("next", []), f"{call} {number}"
            if code == 0:
                break
            kills += 1
    assert kills > 15, "hardly ever killed"
    assert seen == {"old" if replacing else None, "new"}
