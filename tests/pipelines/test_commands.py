"""What operators and CI type, as subprocesses: exit codes and what is in the store afterwards."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from inference.models.registry import Checkpoint
from pipelines.demo.layout import DAGSTER_YAML
from tests.conftest import REPO

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BIN = Path(sys.executable).parent


class Shell:
    """Commands in the repository with their own Dagster home and store."""

    def __init__(self, out: Path, source: Path, models: Path) -> None:
        home = out / "dagster"
        home.mkdir()
        (home / "dagster.yaml").write_text(DAGSTER_YAML, encoding="utf-8")
        self.store = out / "store"
        self._env = {
            **os.environ,
            "DAGSTER_HOME": str(home),
            "SLIDE_SOURCE": str(source),
            "SLIDE_STORE": str(self.store),
            "SLIDE_MODEL_CACHE": str(models),
        }

    def __call__(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [str(BIN / command), *arguments],
            cwd=REPO,
            env=self._env,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )


@pytest.fixture
def shell(tmp_path: Path, shared_data: Path, demo_checkpoint: Checkpoint) -> Shell:
    """Two slides: one good, one empty."""
    source = tmp_path / "two"
    source.mkdir()
    (source / "good.svs").symlink_to(shared_data / "slides/CMU-1-Small-Region.svs")
    (source / "empty.svs").write_bytes(b"")
    file = tmp_path / "cohort.csv"
    file.write_text("path\ntwo/empty.svs\ntwo/good.svs\n")
    return Shell(tmp_path, file, demo_checkpoint.path.parent)


def test_dg_launch_discovers_runs_one_slide_and_says_by_its_exit_code_how_it_went(shell: Shell) -> None:
    found = shell("dg", "launch", "--assets", "slide_inventory")
    assert found.returncode == 0, found.stderr[-2000:]
    keys = sorted(_keys(shell))
    empty, good = keys
    chain = "key:slide_info+ and not key:cohort_report"
    went_well = shell("dg", "launch", "--assets", chain, "--partition", good)
    assert went_well.returncode == 0, went_well.stderr[-2000:]
    assert list(shell.store.glob(f"heatmap/*/{good}/heatmap.tif"))
    failed = shell("dg", "launch", "--assets", chain, "--partition", empty)
    assert failed.returncode == 1
    assert "the file is empty (0 bytes)" in failed.stdout + failed.stderr
    unknown = shell("dg", "launch", "--assets", chain, "--partition", "nobody")
    assert unknown.returncode == 1
    report = shell("dg", "launch", "--assets", "cohort_report")
    assert report.returncode == 0, report.stderr[-2000:]
    assert (shell.store / "report.html").is_file()


def test_dagster_asset_materialize_does_the_same(shell: Shell) -> None:
    module = ("-m", "pipelines.definitions")
    assert shell("dagster", "asset", "materialize", "--select", "slide_inventory", *module).returncode == 0
    empty, good = sorted(_keys(shell))
    select = "key:slide_info+ and not key:cohort_report"
    went_well = shell("dagster", "asset", "materialize", "--select", select, "--partition", good, *module)
    assert went_well.returncode == 0, went_well.stderr[-2000:]
    assert list(shell.store.glob(f"predict/*/{good}/manifest.json"))
    failed = shell("dagster", "asset", "materialize", "--select", select, "--partition", empty, *module)
    assert failed.returncode == 1


def test_the_definitions_validate_through_the_workspace_and_through_dg(shell: Shell) -> None:
    for command in (("dagster", "definitions", "validate", "-w", "workspace.yaml"), ("dg", "check", "defs")):
        found = shell(*command)
        assert found.returncode == 0, found.stdout + found.stderr


def _keys(shell: Shell) -> list[str]:
    import pyarrow.parquet as pq

    return [str(key) for key in pq.read_table(shell.store / "cohort.parquet").column("slide_key").to_pylist()]
