"""The examples in the documentation run as they stand."""

import json
import re
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import uvicorn

from inference import BaseServerModel, InProcessClient
from inference.cli import main
from inference.models.registry import Checkpoint
from inference.models.server_model import load_server_model
from inference.serving.app import create_app
from tests.conftest import REPO
from tests.inference.models.kinds import make_request

PATIENCE_S = 60.0


def blocks(page: str, language: str) -> list[str]:
    text = (REPO / "docs" / page).read_text(encoding="utf-8")
    return re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


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
    monkeypatch.setattr(
        sys, "argv", ["slide-inference", "import", str(graph), "--spec", str(spec), "--out", str(tmp_path)]
    )
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 0
    assert capsys.readouterr().out.endswith("superfast-tissue.onnx (onnx): tried and pinned\n")
