"""Colours at known places of a drawn heatmap."""

import io
from pathlib import Path

import numpy as np
import openslide
import pytest
from numpy.typing import NDArray
from PIL import Image

from inference.outputs.overlay import FAILED_COLOUR, colours, draw_overlay, preview
from inference.outputs.raster import HeatmapRaster, rasterise
from inference.slides.grid import TileGrid

VIRIDIS_LOW, VIRIDIS_HIGH = (68, 1, 84), (253, 231, 37)
GREY = 180


def _thumbnail(height: int, width: int) -> NDArray[np.uint8]:
    return np.full((height, width, 3), GREY, np.uint8)


def _raster(grid: TileGrid, tiles: dict[tuple[int, int], float]) -> HeatmapRaster:
    """Planned tiles by (row, col); NaN is a failed one."""
    values = np.array(list(tiles.values()), np.float32)
    rows, cols = np.array(list(tiles), np.int32).reshape(-1, 2).T
    return rasterise(grid, rows, cols, values, np.isfinite(values))


def _draw(
    thumbnail: NDArray[np.uint8], raster: HeatmapRaster, grid: TileGrid, title: str = "tumour"
) -> NDArray[np.uint8]:
    return np.asarray(draw_overlay(thumbnail, raster, grid.slide_size, title=title, low=0, high=1))


def test_tiles_take_the_palettes_ends_and_the_rest_of_the_slide_stays_as_it_is() -> None:
    grid = TileGrid((2000, 1000), 200, 200, (0.5, 0.5), (200.0, 200.0))
    picture = _draw(_thumbnail(500, 1000), _raster(grid, {(0, 0): 0, (4, 9): 1, (2, 5): 7}), grid)
    assert (picture[:100, :100] == VIRIDIS_LOW).all()
    assert (picture[400:500, 900:1000] == VIRIDIS_HIGH).all()
    assert (picture[200:300, 500:600] == VIRIDIS_HIGH).all()
    bare = np.ones((500, 1000), np.bool_)
    bare[:100, :100] = bare[400:500, 900:1000] = bare[200:300, 500:600] = False
    assert (picture[:500, :1000][bare] == GREY).all()


@pytest.mark.parametrize(
    "grid",
    [
        TileGrid((3000, 2500), 224, 224, (0.5, 0.5), (490.98, 490.98)),
        TileGrid((3000, 2500), 224, 112, (0.5, 0.5), (448.0, 448.0)),
        TileGrid((2999, 2501), 224, 224, (0.5, 0.5), (333.3, 250.1)),
    ],
    ids=["footprint is not whole", "overlap", "not square"],
)
def test_the_last_tile_is_drawn_at_its_level_0_place(grid: TileGrid) -> None:
    row, col = grid.n_rows - 1, grid.n_cols - 1
    thumbnail = _thumbnail(417, 500)
    picture = _draw(thumbnail, _raster(grid, {(row, col): 0.5}), grid)[:417, :500]
    ys, xs = np.nonzero((picture != GREY).any(axis=2))
    for found, index, axis, pixels in ((xs, col, 0, 500), (ys, row, 1, 417)):
        scale = pixels / grid.slide_size[axis]
        assert found.min() == pytest.approx(index * grid.step[axis] * scale, abs=0.5)
        assert found.max() + 1 == pytest.approx((index * grid.step[axis] + grid.footprint[axis]) * scale, abs=0.5)


def test_neighbouring_tiles_keep_a_sharp_edge() -> None:
    grid = TileGrid((400, 200), 200, 200, (0.5, 0.5), (200.0, 200.0))
    picture = _draw(_thumbnail(500, 1000), _raster(grid, {(0, 0): 0, (0, 1): 1}), grid)
    assert (picture[:500, 499] == VIRIDIS_LOW).all()
    assert (picture[:500, 500] == VIRIDIS_HIGH).all()


def test_a_failed_tile_is_boxed_and_hatched_in_a_colour_outside_the_palette() -> None:
    grid = TileGrid((2000, 1000), 200, 200, (0.5, 0.5), (200.0, 200.0))
    picture = _draw(_thumbnail(500, 1000), _raster(grid, {(1, 3): np.nan, (1, 4): 1}), grid)
    box = picture[100:200, 300:400]
    red = (box == FAILED_COLOUR).all(axis=2)
    assert red[0].all()
    assert red[-1].all()
    assert red[:, 0].all()
    assert red[:, -1].all()
    assert 0.15 < red[10:-10, 10:-10].mean() < 0.4
    outside = picture[:500, :1000].copy()
    outside[100:200, 300:400] = 0
    assert not (outside == FAILED_COLOUR).all(axis=2).any()
    palette = colours(np.linspace(0, 1, 256, dtype=np.float32), 0, 1)
    assert np.abs(palette - FAILED_COLOUR).sum(axis=1).min() > 100


def test_a_failed_tile_smaller_than_a_pixel_is_still_seen() -> None:
    grid = TileGrid((224_000, 112_000), 224, 224, (0.25, 0.25), (224.0, 224.0))
    for tile in ((0, 0), (250, 501), (499, 999)):
        picture = _draw(_thumbnail(250, 500), _raster(grid, {tile: np.nan}), grid)[:250, :500]
        ys, xs = np.nonzero((picture == FAILED_COLOUR).all(axis=2))
        assert np.ptp(ys) >= 4
        assert np.ptp(xs) >= 4
        assert abs(ys.mean() - tile[0] / 2) < 5
        assert abs(xs.mean() - tile[1] / 2) < 5


def test_tissue_shows_through_lighter_and_darker_around_the_palettes_colour() -> None:
    grid = TileGrid((300, 100), 100, 100, (0.5, 0.5), (100.0, 100.0))
    thumbnail = _thumbnail(100, 300)
    thumbnail[:, :100], thumbnail[:, 200:] = 60, 250
    picture = _draw(thumbnail, _raster(grid, {(0, 0): 0.5, (0, 1): 0.5, (0, 2): 0.5}), grid).astype(int)
    middle = np.rint(colours(np.array([0.5], np.float32), 0, 1)[0])
    assert np.abs(picture[50, 150] - middle).max() <= 1
    assert (picture[50, 50] < picture[50, 150]).all()
    assert (picture[50, 250] > picture[50, 150]).all()


def test_the_legend_names_failed_tiles_only_where_there_are_some() -> None:
    grid = TileGrid((2000, 1000), 200, 200, (0.5, 0.5), (200.0, 200.0))
    for tiles, expected in (({(0, 0): 1.0}, False), ({(0, 0): 1.0, (1, 1): np.nan}, True)):
        legend = _draw(_thumbnail(500, 1000), _raster(grid, tiles), grid)[500:]
        assert (legend == FAILED_COLOUR).all(axis=2).any() == expected
        assert (legend == VIRIDIS_HIGH).all(axis=2).any()


@pytest.mark.parametrize("shape", [(50, 50), (1200, 60), (60, 1200), (1200, 1200), (7, 5)])
def test_any_shape_of_slide_and_length_of_title_can_be_drawn(shape: tuple[int, int]) -> None:
    grid = TileGrid((shape[1] * 10, shape[0] * 10), 10, 10, (0.5, 0.5), (10.0, 10.0))
    for title in ("", "tumour", "adenocarcinoma epithelium " * 9, "ENSG00000141510" * 20):
        picture = _draw(_thumbnail(*shape), _raster(grid, {(0, 0): 1, (1, 1): np.nan}), grid, title)
        assert picture.shape[0] >= shape[0]
        assert picture.shape[1] >= shape[1]


def test_a_slide_without_any_planned_tile_is_drawn_bare() -> None:
    grid = TileGrid((2000, 1000), 200, 200, (0.5, 0.5), (200.0, 200.0))
    picture = _draw(_thumbnail(500, 1000), _raster(grid, {}), grid)
    assert (picture[:500, :1000] == GREY).all()


def test_a_preview_is_a_jpeg_within_its_bytes_and_512_pixels() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (1200, 900, 3), dtype=np.uint8)
    for max_bytes in (48_000, 5_000):
        data = preview(Image.fromarray(noise), max_bytes)
        assert len(data) <= max_bytes
        with Image.open(io.BytesIO(data)) as image:
            assert image.format == "JPEG"
            assert max(image.size) <= 512
            assert image.width / image.height == pytest.approx(0.75, abs=0.02)


def test_the_preview_of_a_real_slide_is_at_its_full_512_pixels(shared_data: Path) -> None:
    with openslide.OpenSlide(shared_data / "slides" / "CMU-1-Small-Region.svs") as slide:
        thumbnail = np.asarray(slide.get_thumbnail((1200, 1200)).convert("RGB"))
        grid = TileGrid(slide.dimensions, 224, 224, (0.499, 0.499), (224.0, 224.0))
    rows, cols = grid.cells()
    values = np.linspace(0, 1, rows.size, dtype=np.float32)
    raster = rasterise(grid, rows, cols, values, np.arange(rows.size) % 10 > 0)
    data = preview(draw_overlay(thumbnail, raster, grid.slide_size, title="tumour", low=0, high=1))
    assert len(data) <= 48_000
    with Image.open(io.BytesIO(data)) as image:
        assert max(image.size) == 512
