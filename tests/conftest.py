"""Fixtures every test may use."""

import os
from pathlib import Path

import pytest

from inference.models.registry import Checkpoint, resolve_model

REPO = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder of real slides, damaged files and models; skips where it is absent."""
    folder = Path(os.environ.get("SHARED_DATA", REPO.parent / "shared" / "data"))
    if not (folder / "README.md").is_file():
        pytest.skip(f"no test data at {folder}: set SHARED_DATA")
    return folder


@pytest.fixture(scope="session")
def demo_checkpoint() -> Checkpoint:
    """The demo model, exported once and kept between test runs."""
    return resolve_model("demo", cache=REPO / "out" / "cache" / "models")
