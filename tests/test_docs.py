"""The examples in the documentation run as they stand."""

import re
import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest
import uvicorn

from inference.models.registry import Checkpoint
from inference.models.server_model import load_server_model
from inference.serving.app import create_app
from tests.conftest import REPO

PATIENCE_S = 60.0


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
    blocks = re.findall(r"^```python\n(.*?)^```", (REPO / "docs" / "runtime.md").read_text(), re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {"service_url": service_url}
    for block in blocks:
        exec(compile(block, "docs/runtime.md", "exec"), names)  # noqa: S102 - our own page
    said = capsys.readouterr().out
    assert said.startswith("12 embeddings of 64 in batches of {")
    assert "3 bad_request: image_data is neither a PNG nor a JPEG file" in said
    assert "(16, 64) float32" in said
    differences = [float(text) for text in re.findall(r"largest difference: (\S+)", said)]
    assert len(differences) == 2
    np.testing.assert_allclose(differences, 0, atol=1e-5)
