"""The slide at a glance: exact means, block by block in bounded memory, past any damage."""

import tracemalloc
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from inference.slides import overview as overview_module
from inference.slides._tiff_refusal import MAX_SIDE_PX
from inference.slides.opening import open_slide
from inference.slides.overview import BLOCK_PX, MAX_MASK_PIXELS, THUMBNAIL_PX, Overview, read_overview
from inference.slides.pixels import reduce_area
from tests.inference.slides.synthetic import ArrayReader, Pixels, Size, noise


@pytest.fixture
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> int:
    """Blocks of 256 pixels, so that small slides have many."""
    monkeypatch.setattr(overview_module, "BLOCK_PX", 256)
    return 256


def _reduced(image: Pixels, factor: int) -> Pixels:
    """The whole image at once; the last cell is the mean of what it covers, its edge repeated."""
    rest = [(0, -side % factor) for side in image.shape[:2]]
    return reduce_area(np.pad(image, [*rest, (0, 0)], mode="edge"), factor)


def _same(one: Overview, other: Overview, where: NDArray[np.bool_] | None = None) -> None:
    where = np.ones(one.missing.shape, np.bool_) if where is None else where
    assert one.scale == other.scale
    assert np.array_equal(one.rgb[where], other.rgb[where])
    assert np.array_equal(one.missing[where], other.missing[where])


@pytest.mark.parametrize("size", [(256 * 3 + 117, 256 * 2 + 101), (256, 100), (37, 53), (1, 1)])
def test_the_overview_is_the_block_mean_of_the_level_whatever_its_size(size: Size, small_blocks: int) -> None:
    image = noise(size)
    overview = read_overview(ArrayReader([image]), (0.5, 0.5))
    assert overview.scale == (16.0, 16.0)
    assert np.array_equal(overview.rgb, _reduced(image, 16))
    assert not overview.missing.any()
    assert not overview.unreadable.any()
    assert overview.rgb.shape[1] * overview.scale[0] >= size[0]
    assert overview.rgb.shape[0] * overview.scale[1] >= size[1]


@pytest.mark.parametrize("size", [(3100, 500), (1536, 700), (1537, 300), (37, 53)])
def test_the_thumbnail_shows_all_of_the_slide_within_its_bound(size: Size) -> None:
    image = noise(size)
    thumbnail = read_overview(ArrayReader([image]), (0.5, 0.5)).thumbnail
    factor = 1
    while max(size) / factor > THUMBNAIL_PX:
        factor *= 2
    assert np.array_equal(thumbnail, _reduced(image, factor))
    assert max(thumbnail.shape) <= THUMBNAIL_PX


@pytest.mark.parametrize(
    ("sizes", "mpp", "level", "factor"),
    [
        ([(6400, 4800), (1600, 1200), (400, 300)], 0.25, 1, 8),  # the next level is too small for the thumbnail
        ([(6400, 4800), (1600, 1200), (400, 300)], 1.0, 1, 2),
        ([(3200, 2400), (800, 600)], 4.0, 0, 2),  # level 1 would be 16 µm/px
        ([(6400, 4800), (3199, 2399), (1599, 1199)], 0.5, 2, 2),  # 2.001 µm/px: 8 would be beyond
        ([(1200, 900), (600, 450)], 0.25, 0, 32),
        ([(1200, 900)], 28.97, 0, 1),
    ],
)
def test_the_coarsest_level_that_serves_is_read_and_no_other(
    sizes: list[Size], mpp: float, level: int, factor: int
) -> None:
    blank = np.zeros((1, 1, 3), np.uint8)
    levels = [noise(size) if k == level else np.broadcast_to(blank, (*size[::-1], 3)) for k, size in enumerate(sizes)]
    reader = ArrayReader(levels, mpp=(mpp, mpp))
    overview = read_overview(reader, (mpp, mpp))
    assert {request[0] for request in reader.requests} == {level}
    # Reduced in two steps, each rounded.
    truth = _reduced(noise(sizes[level]), factor)
    assert np.abs(overview.rgb.astype(int) - truth).max() <= 1
    scale = [sizes[0][axis] / sizes[level][axis] * factor for axis in (0, 1)]
    assert overview.scale == pytest.approx(scale)
    assert max(overview.scale) * mpp <= max(8.02, mpp)


def test_every_pixel_is_read_once_in_blocks_of_bounded_size(small_blocks: int) -> None:
    width, height = small_blocks * 2 + 100, small_blocks + 1
    reader = ArrayReader([noise((width, height))])
    read_overview(reader, (0.5, 0.5))
    seen = np.zeros((height, width), np.uint8)
    for _, x, y, w, h in reader.requests:
        assert max(w, h) <= small_blocks
        seen[y : y + h, x : x + w] += 1
    assert (seen == 1).all()


class _Endless(ArrayReader):
    """A large level that exists nowhere: every region is made when it is asked for."""

    def __init__(self, size: Size) -> None:
        super().__init__([np.zeros((1, 1, 3), np.uint8)])
        self.level_sizes = (size,)

    def read_region(self, level: int, x: int, y: int, width: int, height: int) -> Pixels:
        return np.full((height, width, 4), 200, np.uint8)


def test_memory_does_not_grow_with_the_level() -> None:
    """A level of 48 million pixels would be 192 MB as RGBA; a block with all that is made of it is below 100."""
    read_overview(_Endless((BLOCK_PX, BLOCK_PX)), (0.5, 0.5))  # loads what is loaded once
    tracemalloc.start()
    try:
        overview = read_overview(_Endless((8000, 6000)), (0.5, 0.5))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert overview.rgb.shape == (375, 500, 3)
    assert peak < 120e6


def test_the_mask_of_a_slide_beyond_all_bounds_is_coarser(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview_module, "MAX_MASK_PIXELS", 1000)
    image = noise((1000, 900))
    overview = read_overview(ArrayReader([image]), (0.5, 0.5))
    assert overview.scale == (32.0, 32.0)
    assert np.array_equal(overview.rgb, _reduced(image, 32))


def test_the_largest_slide_there_can_be_has_a_mask_that_fits() -> None:
    """Whatever a header claims, the planes of the mask stay below the bound."""
    for size in ((MAX_SIDE_PX, MAX_SIDE_PX), (MAX_SIDE_PX, 1), (100_000, 80_000)):
        factor = overview_module._mask_factor(size, 32.0)
        assert -(-size[0] // factor) * -(-size[1] // factor) <= MAX_MASK_PIXELS
    assert overview_module._mask_factor((100_000, 80_000), 32.9) == 32


def test_missing_pixels_take_the_background_and_their_share_is_told() -> None:
    rgba = noise((128, 64), channels=4)
    rgba[..., 3] = 255
    rgba[:32, :32] = 0
    rgba[40:44, 100:104] = 0
    overview = read_overview(ArrayReader([rgba], background=(250, 240, 230)), (0.5, 0.5))
    expected = np.zeros((4, 8), np.float32)
    expected[:2, :2] = 1
    expected[2, 6] = 16 / 256
    assert np.array_equal(overview.missing, expected)
    assert overview.missing.dtype == np.float32
    assert (overview.rgb[:2, :2] == (250, 240, 230)).all()
    assert not overview.unreadable.any()


@pytest.mark.parametrize("tile", [256, 240, 100])
def test_damage_costs_only_the_compressed_tiles_it_lies_in(tile: int, small_blocks: int) -> None:
    """Also where tiles do not divide the blocks, and in several blocks at once."""
    image = noise((1000, 800))
    damaged = [(0, 0, 0), (0, 1, 2), (0, 512 // tile, 3), (0, 2, 999 // tile)]
    overview = read_overview(ArrayReader([image], tile=tile, damaged=damaged), (0.5, 0.5))
    bad = np.zeros(image.shape[:2], np.bool_)
    for _, row, col in damaged:
        bad[row * tile : (row + 1) * tile, col * tile : (col + 1) * tile] = True
    touched = _touched(bad)
    assert np.array_equal(overview.unreadable, touched)
    _same(overview, read_overview(ArrayReader([image]), (0.5, 0.5)), ~touched)


def _touched(bad: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Mask pixels of 16 x 16 that hold any bad pixel."""
    padded = np.pad(bad, [(0, -side % 16) for side in bad.shape])
    return np.asarray(padded.reshape(padded.shape[0] // 16, 16, padded.shape[1] // 16, 16).any(axis=(1, 3)))


def test_a_slide_with_no_readable_tile_is_unreadable_everywhere_and_does_not_raise() -> None:
    damaged = [(0, row, col) for row in range(2) for col in range(3)]
    overview = read_overview(ArrayReader([noise((600, 400))], damaged=damaged), (0.5, 0.5))
    assert overview.unreadable.all()


def test_the_damaged_tile_of_the_broken_slide_is_found_exactly(shared_data: Path) -> None:
    with (
        open_slide(shared_data / "broken" / "tile-garbage.svs", "S1") as broken,
        open_slide(shared_data / "slides" / "CMU-1-Small-Region.svs", "S2") as whole,
    ):
        overview, truth = read_overview(broken, (0.499, 0.499)), read_overview(whole, (0.499, 0.499))
    expected = np.zeros(overview.unreadable.shape, np.bool_)
    expected[1200 // 16 : 1440 // 16, 1680 // 16 : 1920 // 16] = True
    assert np.array_equal(overview.unreadable, expected)
    assert not truth.unreadable.any()
    _same(overview, truth, ~expected)


def test_an_empty_tile_is_missing_and_not_unreadable(shared_data: Path) -> None:
    with open_slide(shared_data / "broken" / "tile-zero-length.svs", "S1") as slide:
        overview = read_overview(slide, (0.499, 0.499))
    assert not overview.unreadable.any()
    expected = np.zeros(overview.missing.shape, np.float32)
    expected[1200 // 16 : 1440 // 16, 1680 // 16 : 1920 // 16] = 1
    assert np.array_equal(overview.missing, expected)
    assert (overview.rgb[expected == 1] == 255).all()


def test_what_lies_outside_a_leica_slides_image_is_missing_and_white(shared_data: Path) -> None:
    with open_slide(shared_data / "derived" / "leica.scn", "S1") as slide:
        overview = read_overview(slide, (0.499, 0.499))
        assert overview.missing.mean() == pytest.approx(0.345, abs=0.01)
        assert (overview.rgb[overview.missing == 1] == 255).all()
        assert overview.missing[30, 30] == 0
        assert overview.missing[10, 30] == overview.missing[30, 10] == 1
