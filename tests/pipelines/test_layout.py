"""Where a headless run keeps its things, and which arguments are refused before anything is made."""

import subprocess
import sys
from pathlib import Path

import pytest

from inference.errors import ConfigError
from pipelines.demo.__main__ import layout_of
from pipelines.demo.layout import run_folder
from tests.conftest import REPO


def test_a_run_is_called_as_its_source_and_another_source_of_that_name_gets_another_folder(tmp_path: Path) -> None:
    for parent in ("a", "b"):
        (tmp_path / parent / "cohort").mkdir(parents=True)
        (tmp_path / parent / "cohort" / "x.svs").touch()
    first = layout_of(str(tmp_path / "a/cohort"), "", "", tmp_path / "out")
    first.prepare()
    assert first.out == tmp_path / "out/runs/cohort"
    assert layout_of(str(tmp_path / "a/cohort"), "", "", tmp_path / "out").out == first.out
    second = layout_of(str(tmp_path / "b/cohort"), "", "", tmp_path / "out")
    assert second.out.name.startswith("cohort-")
    assert second.out != first.out


@pytest.mark.parametrize(
    ("name", "called"), [("o'neil", "o-neil"), ("*.svs", "svs"), ("ünï", "ünï"), ("***", "slides")]
)
def test_odd_names_become_plain_folders(name: str, called: str, tmp_path: Path) -> None:
    assert run_folder(tmp_path, tmp_path / name, None).name == called


def test_under_a_secret_the_folder_does_not_tell_the_name(tmp_path: Path) -> None:
    folder = run_folder(tmp_path, Path("/slides/SMITH_JOHN.svs"), "a secret")
    assert "SMITH" not in str(folder.relative_to(tmp_path))
    assert folder == run_folder(tmp_path, Path("/slides/SMITH_JOHN.svs"), "a secret")


@pytest.mark.parametrize("mpp", ["abc", "60", "-1", "0", "nan", "0,25"])
def test_an_mpp_that_no_slide_has_is_refused_at_once(mpp: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="MPP"):
        layout_of("", mpp, "", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.slow
def test_bad_arguments_are_one_line_and_exit_code_2(tmp_path: Path) -> None:
    for arguments in (["--slides", str(tmp_path / "nowhere")], ["--model", "nobody"], ["--mpp", "60"]):
        command = [sys.executable, "-m", "pipelines.demo", "--out", str(tmp_path / "out"), *arguments]
        ended = subprocess.run(command, cwd=REPO, capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == 2
        assert len(ended.stderr.splitlines()) == 1, ended.stderr
        assert ended.stderr.startswith("error: ")
