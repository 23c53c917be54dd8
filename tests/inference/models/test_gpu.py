"""What only a GPU can show: compiled code, half precision, memory that runs out, errors that stay.

Under four minutes in all: one ViT-S is compiled for each precision, everything else uses those.
"""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from inference.batching import BatchScheduler
from inference.errors import ArtifactRefused
from inference.models.artifact import load_manifest
from inference.models.conversion import Exported, Precision, export_tile_model
from inference.models.networks import build_tile_net
from inference.models.registry import Checkpoint
from inference.models.runtime import Runtime, gpu_architecture, open_runtime
from inference.models.sample import PreparedSample, TileOutput
from inference.models.server_model import BaseServerModel, load_server_model
from inference.models.spec import load_model_spec
from tests.conftest import REPO

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(240),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]

CACHE = REPO / "out" / "cache" / "models" / "cuda"
DEVICE = "cuda:0"


def _exported(precision: Precision) -> Exported:
    folder = CACHE / precision
    return export_tile_model(
        load_model_spec("kaiko-vits16"), folder, random_init=True, device="cuda", precision=precision
    )


@pytest.fixture(scope="module")
def full() -> Exported:
    return _exported("fp32")


@pytest.fixture(scope="module")
def runtime(full: Exported) -> Runtime:
    return open_runtime(full.path, full.manifest, DEVICE)


def tiles(count: int, seed: int = 0) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (count, 3, 224, 224), dtype=np.uint8)


def test_a_vit_compiled_for_the_gpu_agrees_with_the_cpu(runtime: Runtime) -> None:
    batch = tiles(8)
    with torch.inference_mode():
        expected = build_tile_net(load_model_spec("kaiko-vits16"))(torch.from_numpy(batch)).numpy()
    (found,) = runtime.run(batch)
    np.testing.assert_allclose(found, expected, atol=2e-3 * np.abs(expected).max())


def test_its_manifest_names_the_gpu_and_another_one_is_refused(full: Exported) -> None:
    assert full.manifest.gpu == gpu_architecture(torch.device(DEVICE))
    other = full.manifest.model_copy(update={"gpu": "sm_10"})
    with pytest.raises(ArtifactRefused, match=r"is compiled for sm_10, this GPU is sm_"):
        open_runtime(full.path, other, DEVICE)


@pytest.mark.parametrize("size", [1, 16, 64])
def test_at_a_fixed_shape_rows_keep_their_bits_in_any_place_beside_any_neighbours(runtime: Runtime, size: int) -> None:
    batch = tiles(size)
    places = np.random.default_rng(1).permutation(size)
    (found,), (moved,) = runtime.run(batch), runtime.run(batch[places])
    np.testing.assert_array_equal(found[places], moved)
    others = tiles(size, seed=7)
    others[size // 2] = batch[size // 2]
    np.testing.assert_array_equal(runtime.run(others)[0][size // 2], found[size // 2])


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_half_precision_is_held_to_the_network_in_full(precision: Precision) -> None:
    made = _exported(precision)
    golden = made.manifest.golden
    assert golden is not None
    assert 0 < golden.measured < golden.tolerance
    strict = golden.model_copy(update={"tolerance": golden.measured / 10})
    with pytest.raises(ArtifactRefused, match=rf"returns values .* in {precision}: export it in bf16 or fp32"):
        open_runtime(made.path, made.manifest.model_copy(update={"golden": strict}), DEVICE)


@pytest.fixture
def little_memory(runtime: Runtime) -> Iterator[None]:
    """Leaves this process room for a forward of a few dozen tiles, whatever the card has."""
    torch.cuda.empty_cache()
    used = torch.cuda.memory_reserved(0)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((used + (600 << 20)) / total, 0)
    yield
    torch.cuda.set_per_process_memory_fraction(1.0, 0)
    torch.cuda.empty_cache()


def test_memory_that_runs_out_is_told_as_such_and_the_next_batch_runs(runtime: Runtime, little_memory: None) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        runtime.run(tiles(2048))
    assert np.isfinite(runtime.run(tiles(4))[0]).all()


def test_a_batch_too_large_for_the_memory_is_halved_until_it_fits(full: Exported, little_memory: None) -> None:
    model: BaseServerModel = load_server_model(Checkpoint(full.path, load_manifest(full.path)), DEVICE)
    batch = tiles(1024)
    sizes: list[int] = []

    def forward(samples: Sequence[PreparedSample], modes: Sequence[str]) -> list[TileOutput | Exception]:
        sizes.append(len(samples))
        return list(model.forward_tiles(samples, [model.check_mode(mode) for mode in modes]))

    scheduler: BatchScheduler[PreparedSample, TileOutput] = BatchScheduler(forward, max_batch_size=1024, max_wait_s=5.0)
    try:
        waiting = [scheduler.submit(model.prepare_tile(tile.transpose(1, 2, 0)), "embedding") for tile in batch]
        outputs = [future.result(timeout=120) for future in waiting]
    finally:
        scheduler.close()
    found = np.stack([np.asarray(output.embedding) for output in outputs])
    assert sizes[0] == 1024
    assert sizes[-1] < 1024
    assert np.isfinite(found).all()
    (expected,) = model.runtime.run(batch[:8])
    np.testing.assert_allclose(found[:8], expected, atol=2e-3 * np.abs(expected).max())


STICKY = """
import sys
import numpy as np, torch
from pathlib import Path
from inference.errors import DeviceBroken
from inference.models.artifact import load_manifest
from inference.models.runtime import open_runtime

path = Path(sys.argv[1])
runtime = open_runtime(path, load_manifest(path), "cuda:0")
try:
    torch.zeros(1, device="cuda")[torch.full((1,), 7, device="cuda")]  # a device-side assert, told by a later call
except RuntimeError:
    pass
batch = np.zeros((2, 3, 224, 224), np.uint8)
for _ in range(2):
    try:
        runtime.run(batch)
    except DeviceBroken as error:
        print(type(error).__name__, error.retryable, "\\n" in error.message)
"""


def test_an_error_that_the_device_keeps_is_a_broken_device_each_time(full: Exported, tmp_path: Path) -> None:
    # In a process of its own: this one has to go on.
    command = [sys.executable, "-c", STICKY, str(full.path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120, cwd=REPO)
    assert done.stdout.splitlines() == ["DeviceBroken True False"] * 2, done.stderr[-2000:]
