"""One contract, three runtimes: AOTInductor, the portable exported program, ONNX Runtime."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from inference.errors import ArtifactRefused, BadRequest, ConfigError, DeviceBroken, ModelContractError
from inference.models import runtime as runtimes
from inference.models.artifact import ArtifactManifest, Format, load_manifest
from inference.models.export import export_model
from inference.models.golden import run_golden
from inference.models.runtime import GraphRuntime, TorchRuntime, call_program, open_graph, open_runtime
from inference.models.spec import ModelSpec, OmicsSpec, TileSpec
from tests.conftest import REPO

SIDE, WIDTH, GENES = 16, 64, 32

SPEC = ModelSpec(
    model_name="conforming", version="1", weights_source="none", license="Apache-2.0",
    tile_spec=TileSpec(size=SIDE, stride=SIDE, resolution=1.0), architecture="conforming", embedding_dim=WIDTH,
    prediction_dim=GENES, output_type="prediction_with_embedding",
    omics=OmicsSpec(rna_unit="counts", n_genes=GENES),
)  # fmt: skip


class ConformingNet(nn.Module):
    """Two convolutions and a linear map of the RNA where it is present; a tile of 7s gives NaN."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first, self.second = nn.Conv2d(3, 8, 3), nn.Conv2d(8, WIDTH, 3)
            self.rna = nn.Linear(GENES, GENES)
            self.head = nn.Linear(WIDTH, GENES)

    def forward(self, image: Tensor, bulk_rna: Tensor, bulk_rna_present: Tensor) -> tuple[Tensor, Tensor]:
        x = image.to(torch.float32) / 255
        x = torch.where((image == 7).all(dim=3).all(dim=2).all(dim=1).view(-1, 1, 1, 1), torch.nan, x)
        x = self.second(torch.relu(self.first(x))).mean(dim=(2, 3))
        return x, self.head(x) + self.rna(bulk_rna) * bulk_rna_present


@pytest.fixture(
    scope="module",
    params=[pytest.param("aotinductor", marks=pytest.mark.slow), "exported-program", "onnx"],
)
def runtime(request: pytest.FixtureRequest) -> GraphRuntime:
    path = _checkpoint(request.param)
    return open_graph(path, load_manifest(path))


def _checkpoint(kind: Format) -> Path:
    net = ConformingNet().eval()
    with torch.inference_mode():
        reference = run_golden(SPEC, lambda *inputs: tuple(t.numpy() for t in _eager(net, *inputs)))
    folder = REPO / "out" / "cache" / "models"
    return export_model(net, SPEC, folder, source_sha256="0" * 64, kind=kind, reference=reference)


def _eager(net: nn.Module, batch: NDArray[np.uint8], extras: dict[str, NDArray[np.float32]]) -> tuple[Tensor, ...]:
    found: tuple[Tensor, ...] = net(torch.from_numpy(batch), *(torch.from_numpy(extra) for extra in extras.values()))
    return found


def tiles(count: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, 3, SIDE, SIDE), dtype=np.uint8)


def extras(count: int) -> dict[str, NDArray[np.float32]]:
    rng = np.random.default_rng(1)
    present = (np.arange(count, dtype=np.float32) % 2)[:, None]
    return {"bulk_rna": rng.random((count, GENES), np.float32), "bulk_rna_present": present}


def test_it_computes_what_the_network_computes(runtime: GraphRuntime) -> None:
    batch, further = tiles(5), extras(5)
    with torch.inference_mode():
        expected = [tensor.numpy() for tensor in _eager(ConformingNet().eval(), batch, further)]
    found = runtime.run(batch, further)
    assert [(array.shape, array.dtype.name) for array in found] == [((5, WIDTH), "float32"), ((5, GENES), "float32")]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-5)


@pytest.mark.parametrize("count", [1, 2, 3, 64, 200])
def test_a_batch_of_any_size_gives_as_many_rows_and_the_same_ones(runtime: GraphRuntime, count: int) -> None:
    batch, further = tiles(count), extras(count)
    found = runtime.run(batch, further)
    assert [array.shape for array in found] == [(count, WIDTH), (count, GENES)]
    last = runtime.run(batch[-1:], {name: extra[-1:] for name, extra in further.items()})
    for many, one in zip(found, last, strict=True):
        np.testing.assert_allclose(many[-1:], one, atol=1e-5)


def test_how_an_array_lies_in_memory_does_not_matter(runtime: GraphRuntime) -> None:
    batch, further = tiles(3), extras(3)
    expected = runtime.run(batch, further)
    strided = np.ascontiguousarray(batch.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
    odd = {name: np.asfortranarray(extra) for name, extra in further.items()}
    batch.setflags(write=False)
    for one, other, third in zip(runtime.run(strided, odd), runtime.run(batch, further), expected, strict=True):
        np.testing.assert_array_equal(one, third)
        np.testing.assert_array_equal(other, third)


def test_further_inputs_reach_the_rows_that_they_are_of(runtime: GraphRuntime) -> None:
    batch, further = tiles(4), extras(4)
    without = runtime.run(batch, further | {"bulk_rna": np.zeros((4, GENES), np.float32)})
    found = runtime.run(batch, further)
    np.testing.assert_array_equal(found[0], without[0])
    moved = np.abs(found[1] - without[1]).max(axis=1) > 1e-3
    assert moved.tolist() == [False, True, False, True]


def test_a_row_that_is_not_finite_stays_alone(runtime: GraphRuntime) -> None:
    batch, further = tiles(6), extras(6)
    expected = runtime.run(batch, further)
    batch[2] = 7
    found = runtime.run(batch, further)
    for one, other in zip(found, expected, strict=True):
        assert np.isnan(one[2]).all()
        np.testing.assert_array_equal(np.delete(one, 2, 0), np.delete(other, 2, 0))


def test_at_a_fixed_shape_rows_keep_their_bits_in_any_place_beside_any_neighbours(runtime: GraphRuntime) -> None:
    batch, further = tiles(16), extras(16)
    places = np.random.default_rng(3).permutation(16)
    moved = runtime.run(batch[places], {name: extra[places] for name, extra in further.items()})
    others = tiles(16, seed=9)
    others[5] = batch[5]
    beside = runtime.run(others, further)
    for one, other, third in zip(runtime.run(batch, further), moved, beside, strict=True):
        np.testing.assert_array_equal(one[places], other)
        np.testing.assert_array_equal(one[5], third[5])


def test_what_it_returns_is_its_callers(runtime: GraphRuntime) -> None:
    batch, further = tiles(2), extras(2)
    first = runtime.run(batch, further)
    kept = [array.copy() for array in first]
    runtime.run(tiles(2, seed=5), further)
    for array, copy in zip(first, kept, strict=True):
        np.testing.assert_array_equal(array, copy)


@pytest.mark.parametrize(
    "change",
    [
        lambda b, e: (b.astype(np.float32), e),
        lambda b, e: (b[:, :2], e),
        lambda b, e: (b[:, :, :8], e),
        lambda b, e: (b.transpose(0, 2, 3, 1), e),
        lambda b, e: (b[0], e),
        lambda b, e: (b[:0], {name: extra[:0] for name, extra in e.items()}),
        lambda b, e: (np.repeat(b, 2049, 0), {name: np.repeat(extra, 2049, 0) for name, extra in e.items()}),
        lambda b, e: (b, {}),
        lambda b, e: (b, e | {"more": e["bulk_rna"]}),
        lambda b, e: (b, e | {"bulk_rna": e["bulk_rna"][:1]}),
        lambda b, e: (b, e | {"bulk_rna": e["bulk_rna"][:, :4]}),
        lambda b, e: (b, e | {"bulk_rna": e["bulk_rna"].astype(np.float64)}),
    ],
    ids=[
        "float tiles", "two channels", "half a tile", "channels last", "one tile alone", "no tile", "too many",
        "no extras", "one extra too many", "too few rows", "too few genes", "doubles",
    ],
)  # fmt: skip
def test_what_the_graph_was_not_made_for_is_refused_before_it_is_called(
    runtime: GraphRuntime, monkeypatch: pytest.MonkeyPatch, change: Callable[..., tuple[object, object]]
) -> None:
    called = []
    monkeypatch.setattr(runtime, "_forward", lambda *_: called.append(1))
    batch, further = change(tiles(2), extras(2))
    with pytest.raises(BadRequest, match="the graph takes"):
        runtime.run(batch, further)  # type: ignore[arg-type]
    assert called == []


def test_another_number_of_outputs_than_declared_is_a_broken_contract(
    runtime: GraphRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    forward = runtime._forward
    monkeypatch.setattr(runtime, "_forward", lambda *inputs: forward(*inputs)[:1])
    with pytest.raises(ModelContractError, match="returned 1 outputs"):
        runtime.run(tiles(2), extras(2))


def test_out_of_memory_passes_through_for_the_scheduler_to_halve(
    runtime: GraphRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    if isinstance(runtime, TorchRuntime):
        monkeypatch.setattr(runtime, "_call", _raises(torch.OutOfMemoryError("CUDA out of memory")))
        expected: type[BaseException] = torch.OutOfMemoryError
    else:
        monkeypatch.setattr(runtime, "_session", _Session(RuntimeError("Failed to allocate memory for 9 bytes")))
        expected = MemoryError
    with pytest.raises(expected):
        runtime.run(tiles(2), extras(2))


def test_an_error_that_the_device_keeps_is_a_broken_device(
    runtime: GraphRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = torch.AcceleratorError("CUDA error: device-side assert triggered\nmore")
    if isinstance(runtime, TorchRuntime):
        monkeypatch.setattr(runtime, "_call", _raises(error))
    else:
        monkeypatch.setattr(runtime, "_session", _Session(RuntimeError("CUDA failure 710: device-side assert")))
    with pytest.raises(DeviceBroken, match=r"the device failed: CUDA [^\n]*$"):
        runtime.run(tiles(2), extras(2))


def _raises(error: Exception) -> Callable[..., object]:
    def call(*_: object) -> object:
        raise error

    return call


class _Session:
    def __init__(self, error: Exception) -> None:
        self.run = _raises(error)


def test_memory_that_the_device_has_no_more_of_is_no_broken_device(monkeypatch: pytest.MonkeyPatch) -> None:
    error = torch.AcceleratorError("CUDA error: out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        call_program(_raises(error), (tiles(1),), "cpu")


def test_compiled_code_that_ran_out_of_memory_is_known_by_the_allocators_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Compiled code reports every failure alike.
    counts = iter([3, 4])
    monkeypatch.setattr(runtimes, "_out_of_memory_count", lambda _: next(counts))
    with pytest.raises(torch.OutOfMemoryError):
        call_program(_raises(RuntimeError("run_func_( ... ) API call failed at model_container_runner.cpp")), (), "cpu")


def test_a_device_that_is_not_there_is_a_config_error(runtime: GraphRuntime) -> None:
    path = _checkpoint(load_kind(runtime))
    manifest = load_manifest(path)
    with pytest.raises(ConfigError if manifest.format != "aotinductor" else ArtifactRefused):
        open_runtime(path, manifest, "cuda:99")


def load_kind(runtime: GraphRuntime) -> Format:
    kinds: dict[str, Format] = {"aotinductor": "aotinductor", "exported-program": "exported-program", "onnx": "onnx"}
    return kinds[runtime.kind]


def test_golden_vectors_are_compared_at_each_load(runtime: GraphRuntime, tmp_path: Path) -> None:
    path = _checkpoint(load_kind(runtime))
    manifest = load_manifest(path)
    assert manifest.golden is not None
    assert manifest.golden.measured < 1e-5
    strict = manifest.model_copy(update={"golden": manifest.golden.model_copy(update={"sha256": "f" * 64})})
    with pytest.raises(ArtifactRefused, match=r"golden\.npz is not the file that the manifest of .* pins"):
        open_runtime(path, strict)


def test_the_manifest_says_what_loads_it(runtime: GraphRuntime) -> None:
    manifest: ArtifactManifest = load_manifest(_checkpoint(load_kind(runtime)))
    assert manifest.format == runtime.kind
    assert (manifest.torch_version is None) == (runtime.kind == "onnx")
    assert bool(manifest.cpu_features) == (runtime.kind == "aotinductor")
