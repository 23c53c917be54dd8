"""What the README tells a reader to type works as it stands."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPO

README = (REPO / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def test_exactly_two_commands_stand_at_the_top() -> None:
    assert blocks("sh")[0].split("\n") == ["make demo", "make test", ""]
    assert README.split("```sh")[0].strip() == "# slide-inference"


def test_every_make_target_it_names_exists() -> None:
    named = set(re.findall(r"make ([a-z-]+)", README))
    assert named >= {"demo", "test", "ui", "lint"}
    targets = set(re.findall(r"^([a-z-]+):", (REPO / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert named <= targets


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_model_of_ones_own_is_exported_and_run_as_described(tmp_path: Path, shared_data: Path) -> None:
    (code,) = [block for block in blocks("python") if "export_model" in block]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    exported = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=200,
        check=True,
    )
    slide = shared_data / "slides/CMU-1-Small-Region.svs"
    command = [sys.executable, "-m", "inference.cli", "run", str(slide), "--out", "results", "--model"]
    ended = subprocess.run(
        [*command, exported.stdout.strip()],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert list(tmp_path.glob("results/heatmap/brightness-brightness@*/*/overlay.png"))
