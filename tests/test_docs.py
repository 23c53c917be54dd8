"""The examples in the documentation run as they stand."""

import json
import re
import shlex
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
import typer
import uvicorn

from inference import BaseServerModel, InProcessClient
from inference.cli import app, main
from inference.engine.results import QUALITY_SCHEMA
from inference.engine.survey import TILES_SCHEMA
from inference.models.registry import Checkpoint
from inference.models.server_model import load_server_model
from inference.serving.app import create_app
from tests.conftest import REPO
from tests.inference.models.kinds import make_request

PATIENCE_S = 60.0
PROGRAM = "slide-inference"
COLUMN = re.compile(r"^\| (`[a-z_]+`(?:, `[a-z_]+`)*) \| (int32|int64|float32|as above) \|", re.MULTILINE)


def blocks(page: str, language: str) -> list[str]:
    text = (REPO / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def commands(page: str) -> list[list[str]]:
    """The arguments of every call of the command line on a page."""
    lines = "".join(blocks(page, "sh")).splitlines()
    return [shlex.split(line, comments=True)[1:] for line in lines if line.startswith(PROGRAM)]


def run_command(arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> int:
    """The exit code of the command line."""
    monkeypatch.setattr(sys, "argv", [PROGRAM, *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert isinstance(ended.value.code, int)
    return ended.value.code


def run_page(page: str, **names: object) -> dict[str, object]:
    """Runs a page's Python blocks one after the other; returns the names that they leave."""
    for block in blocks(page, "python"):
        exec(compile(block, f"docs/{page}", "exec"), names)  # noqa: S102 - our own page
    return names


@pytest.fixture
def service_url(demo_checkpoint: Checkpoint) -> Iterator[str]:
    """The service on a free port of this machine."""
    app = create_app([load_server_model(demo_checkpoint)])
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    deadline = time.monotonic() + PATIENCE_S
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    server.should_exit = True
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_the_three_uses_of_the_runtime_agree(
    service_url: str, demo_checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLIDE_MODEL_CACHE", str(demo_checkpoint.path.parent))
    run_page("runtime.md", service_url=service_url)
    said = capsys.readouterr().out
    assert said.startswith("12 embeddings of 64 in batches of {")
    assert "3 bad_request: image_data is neither a PNG nor a JPEG file" in said
    assert "(16, 64) float32" in said
    differences = [float(text) for text in re.findall(r"largest difference: (\S+)", said)]
    assert len(differences) == 2
    np.testing.assert_allclose(differences, 0, atol=1e-5)


def test_models_of_every_kind_are_made_as_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    mine = run_page("models.md")["mine"]
    said = capsys.readouterr().out.splitlines()
    assert said[0] == "models/colours/colours.pt2"
    assert "name='prediction'" in said[1]
    alone, told = (float(text) for text in re.findall(r"\[([\d.]+)\]", said[2]))
    assert alone == pytest.approx(0.2)
    assert told == pytest.approx(0.2 + (np.log1p(250_000) + np.log1p(750_000)) / 2, rel=1e-3)
    assert isinstance(mine, BaseServerModel)
    with InProcessClient(mine) as client:
        answer = json.loads(client.embed(make_request(np.full((64, 64, 3), 51, np.uint8)).model_dump_json()))
    assert answer["output"] == pytest.approx([0.2] * 3)


def test_the_spec_of_a_graph_made_elsewhere_imports_it(
    tmp_path: Path, shared_data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (text,) = blocks("models.md", "yaml")
    spec = tmp_path / "tissue.yaml"
    spec.write_text(text)
    graph = shared_data / "models" / "superfast-tissue" / "best_unet.onnx"
    assert run_command(["import", str(graph), "--spec", str(spec), "--out", str(tmp_path)], monkeypatch) == 0
    assert capsys.readouterr().out.endswith("superfast-tissue.onnx (onnx): tried and pinned\n")


@pytest.mark.parametrize("page", ["models.md", "runtime.md", "slides.md"])
def test_every_command_has_the_options_it_is_shown_with(page: str) -> None:
    group = typer.main.get_group(app)
    shown = commands(page)
    assert shown
    for name, *arguments in shown:
        group.commands[name].make_context(name, arguments)


@pytest.fixture
def slides_folder(tmp_path: Path, shared_data: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder SLIDES that docs/slides.md speaks of, in an empty working directory."""
    folder = tmp_path / "SLIDES"
    folder.mkdir()
    shutil.copy(shared_data / "slides" / "CMU-1-Small-Region.svs", folder / "good.svs")
    for name in ("no-mpp.svs", "tile-garbage.svs"):
        shutil.copy(shared_data / "broken" / name, folder / name)
    monkeypatch.chdir(tmp_path)
    return folder


def without_versions(said: str) -> str:
    """What a doctor says, but for this machine's speed and the versions of libraries."""
    said = re.sub(r"\d+ threads: \d+ tiles/s", "# threads: # tiles/s", said)
    return re.sub(r"(simplejpeg|openslide) [\d.]+", r"\1 #", said).strip()


@pytest.mark.usefixtures("slides_folder")
def test_doctor_says_what_the_page_shows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    (shown,) = blocks("slides.md", "text")
    assert run_command(["doctor", "SLIDES"], monkeypatch) == 1
    assert without_versions(capsys.readouterr().out) == without_versions(shown)


def test_the_columns_are_those_that_are_written() -> None:
    text = (REPO / "docs" / "slides.md").read_text(encoding="utf-8")
    types = {
        name: kind for names, kind in COLUMN.findall(text) for name in re.findall(r"[a-z_]+", names) if kind[0] != "a"
    }
    kinds = {"int32": pa.int32(), "int64": pa.int64(), "float32": pa.float32()}
    written = {field.name: field.type for schema in (TILES_SCHEMA, QUALITY_SCHEMA) for field in schema}
    assert {name: kinds[kind] for name, kind in types.items()} == written


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_commands_for_slides_run_as_they_stand(
    slides_folder: Path,
    shared_data: Path,
    demo_checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    here = slides_folder.parent
    models = here / "models"
    models.mkdir()
    for file in demo_checkpoint.path.parent.glob("demo-*"):
        shutil.copy(file, models)
    monkeypatch.setenv("SLIDE_MODEL_CACHE", str(models))
    shutil.copy(shared_data / "models" / "superfast-tissue" / "best_unet.onnx", here)
    (here / "tissue.yaml").write_text(blocks("models.md", "yaml")[0])
    (here / "cohort.csv").write_text(blocks("slides.md", "csv")[0])
    (here / "rois").mkdir()
    corners = [[500, 900], [1800, 900], [1800, 2600], [500, 2600], [500, 900]]
    for roi in (here / "roi.geojson", here / "rois" / "good.geojson", here / "rois" / "tile-garbage.geojson"):
        roi.write_text(json.dumps({"type": "Polygon", "coordinates": [corners]}))

    local = [call for call in commands("slides.md") if not call[1].startswith(("s3://", "/mnt/"))]
    assert len(local) == 9
    for call in local:
        # A slide of the folder states no resolution.
        assert run_command(call, monkeypatch) == ("SLIDES" in call), call
    capsys.readouterr()

    run_page("slides.md")
    said = capsys.readouterr().out.splitlines()
    assert "case-2: 76 tiles, 0 with ink" in said
    assert any(line.endswith(" 0 out of focus, 4 not read") for line in said)
