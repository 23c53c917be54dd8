"""The demo model against scikit-image's stain separation and against tiles whose answer is known.

Tolerance: float32 sums against scikit-image's float64, 2e-5 of an optical density below 1 and 2e-5 of its value above;
the share of nuclei may differ by the share of pixels that lie within 1e-5 of the threshold.
"""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from skimage.color import rgb2hed

from inference.models.demo import HEMATOXYLIN_POSITIVE_OD, POOL, DemoNet
from inference.models.registry import Checkpoint
from inference.models.runtime import TorchRuntime

TILE = 224
CELL = TILE // POOL
TOLERANCE = 2e-5

IMAGES = (
    "histolab-high-nuclei-score-level0", "histolab-low-nuclei-score-level0",
    "histolab-high-nuclei-score-red-pen-level1", "histolab-no-tissue-green-pen", "histolab-no-tissue",
    "histolab-diagnostic-slide-thumb-rgb", "histoqc-pen-1k_version-pen_green", "skimage-ihc",
)  # fmt: skip

Pixels = NDArray[np.uint8]
Values = NDArray[np.float32]
Run = Callable[[Pixels], tuple[Values, ...]]


@pytest.fixture(scope="module", params=["eager", "exported"])
def run(request: pytest.FixtureRequest) -> Run:
    """Runs tiles (B, H, W, 3): embeddings, predictions."""
    if request.param == "eager":
        net = DemoNet().eval()

        def call(batch: Pixels) -> tuple[Values, ...]:
            with torch.inference_mode():
                return tuple(output.numpy() for output in net(torch.from_numpy(batch)))
    else:
        checkpoint: Checkpoint = request.getfixturevalue("demo_checkpoint")
        call = TorchRuntime(checkpoint.path, checkpoint.manifest).run
    return lambda tiles: call(np.ascontiguousarray(tiles.transpose(0, 3, 1, 2)))


def _maps(tile: Pixels) -> NDArray[np.float64]:
    """Haematoxylin and eosin optical density. scikit-image's unit is -log10(1e-6) = 6 of them."""
    found: NDArray[np.float64] = 6 * rgb2hed(tile)[..., :2]
    return found


def _cells(values: NDArray[np.float64]) -> NDArray[np.float64]:
    return values.reshape(POOL, CELL, POOL, CELL).swapaxes(1, 2).reshape(POOL * POOL, CELL * CELL)


def _expected_embedding(tile: Pixels) -> NDArray[np.float64]:
    h, e = np.moveaxis(_maps(tile), 2, 0)
    gradient = np.pad(np.abs(np.diff(h, axis=1)), ((0, 0), (0, 1)))
    gradient += np.pad(np.abs(np.diff(h, axis=0)), ((0, 1), (0, 0)))
    return np.concatenate([_cells(h).mean(1), _cells(e).mean(1), _cells(h).std(1), _cells(gradient).mean(1)])


def _agree(found: object, expected: object) -> None:
    np.testing.assert_allclose(np.asarray(found, float), np.asarray(expected, float), rtol=TOLERANCE, atol=TOLERANCE)


def _check(run: Run, tiles: Pixels) -> None:
    embeddings, predictions = run(tiles)
    for tile, embedding, (area, mean_h, mean_e) in zip(tiles, embeddings, predictions, strict=True):
        h, e = np.moveaxis(_maps(tile), 2, 0)
        undecided = (np.abs(h - HEMATOXYLIN_POSITIVE_OD) < 1e-5).mean()
        assert abs(area - (h > HEMATOXYLIN_POSITIVE_OD).mean()) <= undecided + 1e-6
        _agree([mean_h, mean_e], [h.mean(), e.mean()])
        _agree(embedding, _expected_embedding(tile))


@pytest.mark.parametrize("name", IMAGES)
def test_on_real_images_it_agrees_with_scikit_image(run: Run, shared_data: Path, name: str) -> None:
    image = np.asarray(Image.open(shared_data / "images" / f"{name}.png").convert("RGB"))
    height, width = image.shape[:2]
    places = {(0, 0), (height - TILE, width - TILE), ((height - TILE) // 2, (width - TILE) // 2)}
    _check(run, np.stack([image[y : y + TILE, x : x + TILE] for y, x in sorted(places)]))


def test_on_random_pixels_it_agrees_with_scikit_image(run: Run) -> None:
    _check(run, np.random.default_rng(0).integers(0, 256, (3, TILE, TILE, 3), dtype=np.uint8))


def test_on_every_grey_level_and_the_extremes_it_agrees_with_scikit_image(run: Run) -> None:
    ramp = np.broadcast_to(np.arange(TILE, dtype=np.uint8)[:, None, None] + 32, (TILE, TILE, 3))
    edges = np.zeros((TILE, TILE, 3), np.uint8)
    edges[::2] = 255
    edges[:, ::3, 1] = 1
    _check(run, np.stack([ramp, edges]))


@pytest.mark.parametrize("colour", [(255, 255, 255), (0, 0, 0), (120, 60, 160), (1, 254, 3)])
def test_an_even_tile_has_even_means_and_neither_spread_nor_gradient(run: Run, colour: tuple[int, int, int]) -> None:
    tile = np.full((1, TILE, TILE, 3), colour, np.uint8)
    embedding, prediction = (found[0] for found in run(tile))
    h, e = _maps(tile[0])[0, 0]
    _agree(embedding[:16], np.full(16, h))
    _agree(embedding[16:32], np.full(16, e))
    _agree(embedding[32:], np.zeros(32))
    _agree(prediction, [h > HEMATOXYLIN_POSITIVE_OD, h, e])


@pytest.mark.parametrize("side", ["left", "top"])
def test_a_half_dark_tile_lights_the_cells_of_that_half_and_the_border_before_its_end(run: Run, side: str) -> None:
    tile = np.full((TILE, TILE, 3), 255, np.uint8)
    dark = tile[:, : TILE // 2] if side == "left" else tile[: TILE // 2]
    dark[:] = (60, 60, 140)
    h = _maps(tile)[0, 0, 0]
    assert h > 0.5
    first_half = np.zeros((POOL, POOL))
    border = np.zeros((POOL, POOL))
    if side == "left":
        first_half[:, :2], border[:, 1] = 1, 1
    else:
        first_half[:2], border[1] = 1, 1
    embedding, prediction = (found[0] for found in run(tile[None]))
    _agree(embedding[:16].reshape(POOL, POOL), first_half * h)
    _agree(embedding[32:48], np.zeros(16))
    _agree(embedding[48:].reshape(POOL, POOL), border * h / CELL)
    assert prediction[0] == 0.5
    _agree(prediction[1], h / 2)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_compiled_and_eager_differ_by_less_than_single_precision_leaves(
    demo_checkpoint: Checkpoint, count: int
) -> None:
    batch = np.random.default_rng(count).integers(0, 256, (count, 3, TILE, TILE), dtype=np.uint8)
    with torch.inference_mode():
        eager = DemoNet()(torch.from_numpy(batch))
    for one, other in zip(TorchRuntime(demo_checkpoint.path, demo_checkpoint.manifest).run(batch), eager, strict=True):
        np.testing.assert_allclose(one, other.numpy(), atol=3e-6)
