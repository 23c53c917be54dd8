"""fp16 with its network in full precision behind it: a tile that overflows gets the full one's values, alone."""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from inference.errors import ArtifactRefused, NonFiniteOutput
from inference.models.artifact import Format, load_manifest
from inference.models.conversion import export_tile_model
from inference.models.export import export_model
from inference.models.fallback import FallbackRuntime, fallback_path
from inference.models.golden import run_golden
from inference.models.registry import Checkpoint
from inference.models.runtime import open_runtime
from inference.models.server_model import load_server_model
from inference.models.spec import ModelSpec, TileSpec
from tests.inference.models.test_networks import small

SIDE = 16

SPEC = ModelSpec(
    model_name="loud", version="1", weights_source="none", license="Apache-2.0",
    tile_spec=TileSpec(size=SIDE, stride=SIDE, resolution=1.0), architecture="loud", embedding_dim=3,
    output_type="embedding", precision="fp16",
)  # fmt: skip

OVERFLOWS = 7
"""A tile of this value alone is infinite in fp16; said outright, for compilers keep some steps in float32."""


class Loud(nn.Module):
    """Means per channel and one, in the given precision."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def forward(self, image: Tensor) -> Tensor:
        mean = (image.to(torch.float32).mean(dim=(2, 3)) / 255 + 1).to(self.dtype).to(torch.float32)
        if self.dtype == torch.float32:
            return mean
        loud = (image == OVERFLOWS).all(dim=3).all(dim=2).all(dim=1).view(-1, 1)
        return torch.where(loud, torch.inf, mean)


def export(folder: Path, kind: Format) -> Path:
    full = Loud(torch.float32)
    reference = run_golden(SPEC, lambda batch, _extras: (full(torch.from_numpy(batch)).numpy(),))
    return export_model(
        Loud(torch.float16), SPEC, folder, source_sha256="0" * 64, kind=kind, name="loud", reference=reference,
        fallback=full,
    )  # fmt: skip


KINDS = (
    pytest.param("aotinductor", marks=pytest.mark.slow),
    "exported-program",
    pytest.param("onnx", marks=pytest.mark.slow),
)


@pytest.fixture(scope="module", params=KINDS)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return export(tmp_path_factory.mktemp(request.param), request.param)


def tiles(*values: int) -> NDArray[np.uint8]:
    return np.stack([np.full((3, SIDE, SIDE), value, np.uint8) for value in values])


def test_a_tile_that_overflows_gets_the_full_values_and_no_bit_of_another_changes(checkpoint: Path) -> None:
    runtime = open_runtime(checkpoint, load_manifest(checkpoint))
    assert isinstance(runtime, FallbackRuntime)
    (without,) = runtime.run(tiles(1, 2, 3, 4))
    assert runtime.rows_rerun == 0
    (found,) = runtime.run(tiles(1, OVERFLOWS, 3, OVERFLOWS))
    assert runtime.rows_rerun == 2
    np.testing.assert_array_equal(found[[0, 2]], without[[0, 2]])
    np.testing.assert_allclose(found[[1, 3]], 1 + OVERFLOWS / 255, rtol=1e-6)  # fp16 would be off by 5e-4


def test_what_is_not_finite_in_full_precision_either_stays_that_tiles_error(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = open_runtime(checkpoint, load_manifest(checkpoint))
    assert isinstance(runtime, FallbackRuntime)
    monkeypatch.setattr(runtime, "_load", lambda *_: runtime._runtime)  # as good as one that overflows too
    (found,) = runtime.run(tiles(1, OVERFLOWS))
    assert np.isfinite(found[0]).all()
    assert not np.isfinite(found[1]).any()


@pytest.fixture
def portable(tmp_path: Path) -> Path:
    return export(tmp_path, "exported-program")


def test_it_is_part_of_the_checkpoint_and_refused_at_load_when_it_is_not_what_was_pinned(portable: Path) -> None:
    manifest = load_manifest(portable)
    assert manifest.fallback is not None
    full = fallback_path(portable)
    assert full.name == "loud-fp32.pt2"
    assert manifest.fallback.file == full.name
    raw = bytearray(full.read_bytes())
    raw[len(raw) // 2] ^= 1
    full.write_bytes(raw)
    with pytest.raises(ArtifactRefused, match=r"loud-fp32\.pt2 is not the file that the manifest of loud\.pt2 pins"):
        open_runtime(portable, manifest)
    full.unlink()
    with pytest.raises(ArtifactRefused, match=r"loud\.pt2 comes with loud-fp32\.pt2, which is not there"):
        open_runtime(portable, manifest)


def test_one_that_is_damaged_later_costs_the_tiles_that_need_it_alone(
    portable: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = load_server_model(Checkpoint(portable, load_manifest(portable)))
    fallback_path(portable).write_bytes(b"")
    samples = [model.prepare_tile(tile.transpose(1, 2, 0)) for tile in tiles(1, OVERFLOWS)]
    with caplog.at_level(logging.ERROR):
        good, lost = model.forward_tiles(samples, ["embedding"] * 2)
    assert not isinstance(good, NonFiniteOutput)
    assert isinstance(lost, NonFiniteOutput)
    (record,) = caplog.records
    assert "loud: tiles that overflow in half precision fail: loud-fp32.pt2 is not the file" in record.getMessage()


def test_at_a_fixed_batch_a_tile_keeps_its_bits_whatever_its_neighbours(portable: Path) -> None:
    model = load_server_model(Checkpoint(portable, load_manifest(portable)), fixed_batch=4)
    first, second = [
        [row.embedding for row in model.forward_tiles(
            [model.prepare_tile(tile.transpose(1, 2, 0)) for tile in batch], ["embedding"] * len(batch)
        ) if not isinstance(row, NonFiniteOutput)]
        for batch in (tiles(OVERFLOWS, 1), tiles(2, 3, OVERFLOWS))
    ]  # fmt: skip
    np.testing.assert_array_equal(first[0], second[2])


def test_an_export_in_fp16_brings_its_network_in_full_precision(tmp_path: Path) -> None:
    made = export_tile_model(small(), tmp_path, random_init=True, form="portable", precision="fp16")
    assert made.manifest.fallback is not None
    assert fallback_path(made.path).stat().st_size > made.path.stat().st_size
    assert (
        export_tile_model(small(), tmp_path, random_init=True, form="portable", precision="bf16").manifest.fallback
        is None
    )
