"""Small models of every kind, exported in the portable form so that no compiler is needed, and requests to them."""

import base64
import io
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn

from inference.contract import ModelRequest
from inference.errors import NonFiniteOutput
from inference.models.artifact import load_manifest
from inference.models.export import export_model, weights_sha256
from inference.models.registry import Checkpoint
from inference.models.runtime import Runtime
from inference.models.sample import NO_EXTRAS, TileOutput
from inference.models.spec import ModelSpec
from tests.inference.models.conftest import TinyNet

GENES = ("ENSG01", "ENSG02", "ENSG03", "ENSG04")
TPM = (0.0, 100_000.0, 400_000.0, 500_000.0)
OTHER_TPM = (600_000.0, 0.0, 150_000.0, 250_000.0)


class RnaNet(nn.Module):
    """Embedding: channel means of 0 to 1. Prediction: red and green mean; with RNA, plus 0.5 and the first two genes.

    A tile of 7s predicts NaN. `leak` mixes the RNA into the embedding.
    """

    def __init__(self, leak: float = 0.0) -> None:
        super().__init__()
        self.leak = leak

    def forward(self, image: Tensor, bulk_rna: Tensor, bulk_rna_present: Tensor) -> tuple[Tensor, Tensor]:
        x = image.to(torch.float32)
        seven = (x == 7).all(dim=3).all(dim=2).all(dim=1, keepdim=True)
        embedding = x.mean(dim=(2, 3)) / 255
        prediction = embedding[:, :2] + bulk_rna_present * (0.5 + bulk_rna[:, :2])
        return embedding + self.leak * bulk_rna[:, :3], torch.where(seven, torch.nan, prediction)


class PlaneNet(nn.Module):
    """Planes at half the tile's side: one channel each, divided by 255, then scaled and shifted. 7s give NaN."""

    def __init__(self, n_planes: int, scale: float = 1.0, shift: float = 0.0) -> None:
        super().__init__()
        self.n_planes, self.scale, self.shift = n_planes, scale, shift

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        x = image.to(torch.float32)
        embedding = x.mean(dim=(2, 3))
        x = torch.where((x == 7).all(dim=3).all(dim=2).all(dim=1)[:, None, None, None], torch.nan, x)
        return embedding, x[:, : self.n_planes, ::2, ::2] / 255 * self.scale + self.shift


class HeadNet(nn.Module):
    """Sums of the embedding's values, each times another weight. An embedding above 1,000 gives NaN."""

    weights: Tensor

    def __init__(self, *weights: float, n_values: int = 3) -> None:
        super().__init__()
        self.register_buffer("weights", torch.tensor(weights).expand(n_values, -1).contiguous())

    def forward(self, embedding: Tensor) -> Tensor:
        found = embedding @ self.weights
        return torch.where((embedding > 200).any(dim=1, keepdim=True), torch.nan, found)


def make_spec(name: str, **changes: object) -> ModelSpec:
    fields: dict[str, object] = {
        "model_name": name, "version": "1", "weights_source": "none", "license": "Apache-2.0",
        "tile_spec": {"size": 8, "stride": 8, "resolution": 1.0}, "architecture": name, "embedding_dim": 3,
        "prediction_names": ("a", "b"), "output_type": "prediction_with_embedding",
    }  # fmt: skip
    return ModelSpec.model_validate(fields | changes)


def rna_spec(**changes: object) -> ModelSpec:
    omics: dict[str, object] = {
        "rna_unit": "tpm", "n_genes": 4, "genes": GENES, "transform": "log1p", "output_transform": "expm1",
    }  # fmt: skip
    return make_spec("rna", omics=omics | changes)


def head_spec(name: str, *outputs: str, **changes: object) -> ModelSpec:
    """Of a head over the tiny model."""
    head = {"backbone": "tiny", "embedding_dim": 3, "backbone_weights_sha256": weights_sha256(TinyNet())} | changes
    return make_spec(name, output_type="prediction", prediction_names=outputs, embedding_dim=None, head=head)


def export_portable(module: nn.Module, spec: ModelSpec, folder: Path) -> Checkpoint:
    """A checkpoint `<name>.pt2` in `folder`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CXX", "")
        path = export_model(module, spec, folder, source_sha256="0" * 64)
    return Checkpoint(path, load_manifest(path))


def flat(value: int) -> NDArray[np.uint8]:
    """A tile of one grey value."""
    return np.full((8, 8, 3), value, np.uint8)


def make_request(tile: NDArray[np.uint8], **changes: object) -> ModelRequest:
    buffer = io.BytesIO()
    Image.fromarray(tile).save(buffer, format="PNG")
    fields: dict[str, object] = {
        "image_data": base64.b64encode(buffer.getvalue()).decode(), "slide_name": "s", "x": 5, "y": 6,
        "width": tile.shape[1], "height": tile.shape[0], "patch_idx": 7,
    }  # fmt: skip
    return ModelRequest.model_validate(fields | changes)


def sound(row: TileOutput | NonFiniteOutput) -> TileOutput:
    assert isinstance(row, TileOutput), row
    return row


class CountingRuntime:
    """The real runtime; keeps the number of rows of each call."""

    def __init__(self, real: Runtime) -> None:
        self.kind, self.device = real.kind, real.device
        self._real = real
        self.rows: list[int] = []

    def run(
        self, batch: NDArray[np.uint8], extras: Mapping[str, NDArray[np.float32]] = NO_EXTRAS
    ) -> tuple[NDArray[np.float32], ...]:
        self.rows.append(len(batch))
        return self._real.run(batch, extras)
