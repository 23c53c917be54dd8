"""A model small enough to export in a second, in the portable form so that no compiler is needed."""

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch._inductor.config  # reads CXX when first imported: before a test takes it away
from torch import Tensor, nn

from inference.models.artifact import load_manifest, manifest_path
from inference.models.export import export_model
from inference.models.registry import Checkpoint
from inference.models.spec import ModelSpec, TileSpec

SOURCE = "0" * 64


class TinyNet(nn.Module):
    """Embedding: the channels' means. Prediction: the largest red and the smallest. A tile of 7s gives NaN."""

    scale: Tensor

    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.register_buffer("scale", torch.tensor(scale))

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        x = image.to(torch.float32) * self.scale
        x = torch.where((x == 7).all(dim=(1, 2, 3), keepdim=True), torch.nan, x)
        red = x[:, 0].flatten(1)
        return x.mean(dim=(2, 3)), torch.stack((red.amax(1), red.amin(1)), dim=1)


def tiny_spec(**changes: object) -> ModelSpec:
    fields: dict[str, object] = {
        "model_name": "tiny", "version": "1", "weights_source": "none", "license": "Apache-2.0",
        "tile_spec": TileSpec(size=8, stride=8, resolution=1.0), "architecture": "tiny", "embedding_dim": 3,
        "prediction_names": ("max_red", "min_red"), "output_type": "prediction_with_embedding",
    }  # fmt: skip
    return ModelSpec.model_validate(fields | changes)


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "")


@pytest.fixture
def export_tiny(no_compiler: None, tmp_path: Path) -> Callable[..., Path]:
    """Exports the tiny model to the cache of this test, or finds it there."""

    def export(scale: float = 1.0, **changes: object) -> Path:
        return export_model(TinyNet(scale), tiny_spec(**changes), tmp_path / "cache", source_sha256=SOURCE)

    return export


@pytest.fixture(scope="session")
def _tiny_original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # For the export alone: a yield in here would take the compiler from the whole session.
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", "")
        return export_model(TinyNet(), tiny_spec(), tmp_path_factory.mktemp("tiny"), source_sha256=SOURCE)


@pytest.fixture
def tiny(_tiny_original: Path, tmp_path: Path) -> Checkpoint:
    """The tiny model's checkpoint, for this test to damage."""
    path = tmp_path / "tiny.pt2"
    shutil.copy(_tiny_original, path)
    shutil.copy(manifest_path(_tiny_original), manifest_path(path))
    return Checkpoint(path, load_manifest(path))


@pytest.fixture
def demo(demo_checkpoint: Checkpoint, tmp_path: Path) -> Checkpoint:
    """The demo model's checkpoint, compiled where there is a compiler, for this test to damage."""
    path = tmp_path / "demo.pt2"
    shutil.copy(demo_checkpoint.path, path)
    shutil.copy(manifest_path(demo_checkpoint.path), manifest_path(path))
    return Checkpoint(path, load_manifest(path))
