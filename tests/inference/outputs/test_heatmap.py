"""One marked tile must be found at its own pixels, whatever the grid, and in every file."""

import json
from pathlib import Path

import numpy as np
import openslide
import pytest
import tifffile
from numpy.typing import NDArray

from inference.errors import ConfigError, ModelContractError
from inference.outputs.heatmap import write_heatmap_ome, write_heatmap_tiff
from inference.outputs.raster import HeatmapRaster, Validity, canvas_shape, halvings, rasterise
from inference.slides.grid import TileGrid

LEVEL0_MPP = 0.25
PLAIN = TileGrid((2000, 1500), 224, 224, (0.5, 0.5), (448.0, 448.0))
GRIDS = {
    "whole number of tiles": TileGrid((448 * 4, 448 * 3), 224, 224, (0.5, 0.5), (448.0, 448.0)),
    "slide is no multiple of the tile": PLAIN,
    "tiles overlap by half": TileGrid((2000, 1500), 224, 112, (0.5, 0.5), (448.0, 448.0)),
    "tiles overlap by a ninth": TileGrid((2000, 1500), 216, 192, (0.5, 0.5), (432.0, 432.0)),
    "footprint is not whole": TileGrid((3000, 2500), 224, 224, (490.98 / 896, 490.98 / 896), (490.98, 490.98)),
    "footprint is not whole and tiles overlap": TileGrid((3000, 2500), 224, 56, (0.548, 0.548), (490.98, 490.98)),
    "pixels are not square": TileGrid((2000, 3000), 224, 112, (0.5, 0.5), (448.0, 224.5)),
    "slide is smaller than a tile": TileGrid((300, 300), 224, 224, (0.5, 0.5), (448.0, 448.0)),
}
WITH_TILES = [name for name, grid in GRIDS.items() if grid.n_rows]


def _tiles_over_cells(grid: TileGrid, raster: HeatmapRaster) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Which grid rows cover the middle of which raster row, and the same for columns."""
    covers = []
    for axis, (n_tiles, n_cells) in enumerate(zip((grid.n_cols, grid.n_rows), raster.values.shape[::-1], strict=True)):
        middles = (np.arange(n_cells) + 0.5) * raster.cell_footprint[axis]
        starts = np.arange(n_tiles)[:, None] * grid.step[axis]
        covers.append((starts < middles) & (middles < starts + grid.footprint[axis]))
    return covers[1], covers[0]


def _marked(grid: TileGrid, row: int, col: int) -> HeatmapRaster:
    rows, cols = grid.cells()
    return rasterise(grid, rows, cols, ((rows == row) & (cols == col)).astype(np.float32), np.ones(rows.size, np.bool_))


def _random(grid: TileGrid, seed: int = 0) -> HeatmapRaster:
    """A third of the tiles not planned, a tenth failed."""
    random = np.random.default_rng(seed)
    rows, cols = grid.cells()
    planned = random.random(rows.size) < 0.66
    rows, cols = rows[planned], cols[planned]
    ok = random.random(rows.size) < 0.9
    return rasterise(grid, rows, cols, np.where(ok, random.random(rows.size), np.nan).astype(np.float32), ok)


@pytest.mark.parametrize("name", WITH_TILES)
def test_one_marked_tile_is_found_at_its_cells(name: str) -> None:
    grid = GRIDS[name]
    for row, col in {(0, 0), (grid.n_rows // 2, grid.n_cols // 2), (grid.n_rows - 1, grid.n_cols - 1)}:
        raster = _marked(grid, row, col)
        over_rows, over_cols = _tiles_over_cells(grid, raster)
        expected = over_rows[row][:, None] & over_cols[col]
        assert np.array_equal(raster.values > 0, expected)


@pytest.mark.parametrize("name", WITH_TILES)
def test_a_cell_is_the_mean_of_the_predicted_tiles_over_it(name: str) -> None:
    grid = GRIDS[name]
    rows, cols = grid.cells()
    ok = np.arange(rows.size) % 5 != 3
    values = np.random.default_rng(1).random(rows.size, dtype=np.float32)
    raster = rasterise(grid, rows, cols, values, ok)
    over_rows, over_cols = _tiles_over_cells(grid, raster)
    tiles, is_ok = values.reshape(grid.n_rows, grid.n_cols).astype(np.float64), ok.reshape(grid.n_rows, grid.n_cols)
    counts = over_rows.T.astype(float) @ is_ok @ over_cols
    with np.errstate(invalid="ignore"):
        expected = (over_rows.T.astype(float) @ (tiles * is_ok) @ over_cols) / counts
    np.testing.assert_allclose(raster.values, expected, rtol=1e-6)
    assert np.array_equal(raster.validity == Validity.PREDICTED, counts > 0)


@pytest.mark.parametrize("name", GRIDS)
def test_the_raster_spans_the_slide_and_no_more_than_one_cell_beyond(name: str) -> None:
    grid = GRIDS[name]
    raster = _random(grid)
    assert raster.values.shape == raster.validity.shape == canvas_shape(grid)
    for axis in (0, 1):
        span = raster.values.shape[1 - axis] * raster.cell_footprint[axis]
        assert grid.slide_size[axis] - 1e-3 <= span < grid.slide_size[axis] + raster.cell_footprint[axis]
        assert raster.cell_mpp[axis] == grid.mpp[axis] * raster.cell_px


def test_validity_tells_the_four_kinds_of_emptiness_apart() -> None:
    rows, cols = np.array([0, 0], np.int32), np.array([0, 1], np.int32)
    raster = rasterise(PLAIN, rows, cols, np.array([0.5, np.nan], np.float32), np.array([True, False]))
    assert raster.validity.tolist() == [[3, 2, 1, 1, 0], [1, 1, 1, 1, 0], [1, 1, 1, 1, 0], [0, 0, 0, 0, 0]]
    assert raster.values[0, 0] == 0.5
    assert np.isnan(raster.values[raster.validity != Validity.PREDICTED]).all()


def test_where_tiles_overlap_predicted_beats_failed_beats_skipped() -> None:
    grid = TileGrid((8, 4), 4, 2, (1.0, 1.0), (4.0, 4.0))
    raster = rasterise(
        grid,
        np.zeros(2, np.int32),
        np.array([0, 1], np.int32),
        np.array([1, np.nan], np.float32),
        np.array([True, False]),
    )
    assert raster.validity[0].tolist() == [3, 3, 2, 1]


def test_a_predicted_zero_is_not_the_absence_of_a_prediction(tmp_path: Path) -> None:
    raster = rasterise(
        PLAIN, np.zeros(1, np.int32), np.zeros(1, np.int32), np.zeros(1, np.float32), np.ones(1, np.bool_)
    )
    write_heatmap_tiff(tmp_path / "h.tif", raster, low=0, high=1, description={})
    assert tifffile.imread(tmp_path / "h.tif")[0, :2].tolist() == [1, 0]


def test_more_than_255_overlapping_tiles_do_not_wrap() -> None:
    grid = TileGrid((64, 64), 32, 1, (1.0, 1.0), (32.0, 32.0))
    rows, cols = grid.cells()
    raster = rasterise(grid, rows, cols, np.full(rows.size, 0.75, np.float32), np.ones(rows.size, np.bool_))
    assert (raster.values == 0.75).all()


def test_an_ok_tile_without_a_finite_value_is_refused() -> None:
    with pytest.raises(ModelContractError):
        rasterise(
            PLAIN, np.zeros(1, np.int32), np.zeros(1, np.int32), np.full(1, np.nan, np.float32), np.ones(1, np.bool_)
        )


def test_a_raster_too_large_to_hold_is_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match="choose a stride"):
        canvas_shape(TileGrid((100_000, 100_000), 224, 223, (0.25, 0.25), (224.0, 224.0)))


def test_a_reduction_is_the_mean_of_all_predicted_cells_beneath() -> None:
    values = np.full((3, 5), np.nan, np.float32)
    values[:2, :2] = [[1, 2], [6, 7]]
    values[0, 2], values[2, 4] = 10, 8
    validity = np.where(np.isnan(values), Validity.SKIPPED, Validity.PREDICTED).astype(np.uint8)
    validity[2, 2] = Validity.FAILED
    levels = list(halvings(HeatmapRaster(values, validity, 1, (1.0, 1.0), (1.0, 1.0)), 2))
    np.testing.assert_array_equal(levels[1][0], np.array([[4, 10, np.nan], [np.nan, np.nan, 8]], np.float32))
    assert levels[1][1].tolist() == [[3, 3, 1], [1, 2, 3]]
    np.testing.assert_array_equal(levels[2][0], np.array([[26 / 5, 8]], np.float32))


def test_the_eight_bit_scale_ends_at_1_and_255_and_clips_beyond(tmp_path: Path) -> None:
    grid = TileGrid((7, 1), 1, 1, (1.0, 1.0), (1.0, 1.0))
    values = np.array([-9, -2, -1.99, 0, 2, 3, np.nan], np.float32)
    rows, cols = grid.cells()
    raster = rasterise(grid, rows, cols, values, np.isfinite(values))
    write_heatmap_tiff(tmp_path / "h.tif", raster, low=-2, high=2, description={"recipe_digest": "3f0c9a1be77d"})
    assert tifffile.imread(tmp_path / "h.tif").tolist() == [[1, 1, 2, 128, 255, 255, 0]]
    with openslide.OpenSlide(tmp_path / "h.tif") as slide:
        description = json.loads(slide.properties["tiff.ImageDescription"])
    assert description["recipe_digest"] == "3f0c9a1be77d"
    assert (description["scale"]["low"], description["scale"]["high"]) == (-2, 2)
    assert description["cell_footprint_level0_px"] == [1, 1]


@pytest.mark.parametrize(("low", "high"), [(1, 1), (2, 1), (0, np.nan), (-np.inf, 1)])
def test_a_scale_that_does_not_rise_is_refused(tmp_path: Path, low: float, high: float) -> None:
    with pytest.raises(ConfigError, match="scale"):
        write_heatmap_tiff(tmp_path / "h.tif", _random(PLAIN), low=low, high=high, description={})


@pytest.mark.parametrize("name", GRIDS)
def test_openslide_finds_the_marked_tile_by_physical_position(tmp_path: Path, name: str) -> None:
    grid = GRIDS[name]
    level0_mpp = tuple(mpp * grid.tile_px / footprint for mpp, footprint in zip(grid.mpp, grid.footprint, strict=True))
    row, col = grid.n_rows - 1, grid.n_cols - 1
    write_heatmap_tiff(tmp_path / "h.tif", _marked(grid, row, col), low=0, high=1, description={})
    with openslide.OpenSlide(tmp_path / "h.tif") as slide:
        assert slide.properties["openslide.vendor"] == "generic-tiff"
        mpp = float(slide.properties["openslide.mpp-x"]), float(slide.properties["openslide.mpp-y"])
        pixels = np.asarray(slide.read_region((0, 0), 0, slide.dimensions))[..., 0]
    if grid.n_rows == 0:
        assert (pixels == 0).all()
        return
    ys, xs = np.nonzero(pixels > 1)
    for cells, size, axis, index in ((xs, pixels.shape[1], 0, col), (ys, pixels.shape[0], 1, row)):
        edges = np.array([cells.min(), cells.max() + 1]) * mpp[axis] / level0_mpp[axis]
        start = index * grid.step[axis]
        assert edges == pytest.approx([start, start + grid.footprint[axis]], abs=1e-3)
        assert cells.max() < size


def test_a_large_heatmap_is_a_pyramid_that_openslide_reads_at_every_level(tmp_path: Path) -> None:
    grid = TileGrid((901 * 256, 701 * 256), 256, 256, (0.25, 0.25), (256.0, 256.0))
    raster = _random(grid)
    write_heatmap_tiff(tmp_path / "h.tif", raster, low=0, high=1, description={})
    with openslide.OpenSlide(tmp_path / "h.tif") as slide:
        assert slide.level_dimensions == ((901, 701), (451, 351), (226, 176))
        assert slide.level_downsamples == pytest.approx([1, 2, 4], rel=0.005)
        assert float(slide.properties["openslide.mpp-x"]) == pytest.approx(64)
        for level, (values, _) in enumerate(halvings(raster, 2)):
            size = slide.level_dimensions[level]
            pixels = np.asarray(slide.read_region((0, 0), level, size))[..., 0].astype(float)
            assert np.array_equal(pixels == 0, np.isnan(values))
            np.testing.assert_allclose((pixels[pixels > 0] - 1) / 254, values[pixels > 0], atol=0.5 / 254 + 1e-6)


def test_every_reduction_carries_its_own_resolution(tmp_path: Path) -> None:
    raster = _random(TileGrid((60_000, 40_000), 100, 100, (0.5, 0.25), (100.0, 100.0)))
    write_heatmap_tiff(tmp_path / "h.tif", raster, low=0, high=1, description={})
    write_heatmap_ome(tmp_path / "h.ome.tif", raster, name="tumour", uuid_seed="seed", description={})
    for name in ("h.tif", "h.ome.tif"):
        with tifffile.TiffFile(tmp_path / name) as tif:
            for level, series in enumerate(tif.series[0].levels):
                resolution = series.keyframe.get_resolution("micrometer")
                assert (1 / resolution[0], 1 / resolution[1]) == pytest.approx((50 * 2**level, 25 * 2**level))
            assert level == 2


def test_a_slim_heatmap_is_not_reduced_until_its_short_side_distorts_the_factor(tmp_path: Path) -> None:
    grid = TileGrid((1001 * 8, 9 * 8), 8, 8, (1.0, 1.0), (8.0, 8.0))
    write_heatmap_tiff(tmp_path / "h.tif", _random(grid), low=0, high=1, description={})
    with openslide.OpenSlide(tmp_path / "h.tif") as slide:
        assert slide.level_dimensions == ((1001, 9),)


@pytest.mark.parametrize("size", [(5, 4), (701, 401)])
def test_the_ome_tiff_keeps_values_and_validity_to_the_bit(tmp_path: Path, size: tuple[int, int]) -> None:
    grid = TileGrid((size[0] * 100, size[1] * 100), 200, 100, (0.5, 0.25), (200.0, 200.0))
    raster = _random(grid)
    write_heatmap_ome(tmp_path / "h.ome.tif", raster, name='<b>"µ" & co', uuid_seed="seed", description={"a": "<b>"})
    with tifffile.TiffFile(tmp_path / "h.ome.tif") as tif:
        assert tif.is_ome
        series = tif.series[0]
        assert series.axes == "CYX"
        assert len(series.levels) == (3 if size[0] > 256 else 1)
        np.testing.assert_array_equal(series.asarray(), np.stack([raster.values, raster.validity]))
        for level, planes in zip(series.levels, halvings(raster, len(series.levels) - 1), strict=True):
            np.testing.assert_array_equal(level.asarray(), np.stack(planes))
        image = tifffile.xml2dict(tif.ome_metadata)["OME"]["Image"]
    pixels = image["Pixels"]
    assert (pixels["PhysicalSizeX"], pixels["PhysicalSizeY"], pixels["PhysicalSizeXUnit"]) == (50.0, 25.0, "µm")
    assert image["Name"] == pixels["Channel"][0]["Name"] == '<b>"µ" & co'
    assert json.loads(image["Description"])["a"] == "<b>"


def test_equal_rasters_give_equal_bytes_and_the_uuid_follows_the_seed_alone(tmp_path: Path) -> None:
    for copy in ("1", "2"):
        raster = _random(TileGrid((700_00, 400_00), 200, 100, (0.5, 0.25), (200.0, 200.0)))
        write_heatmap_tiff(tmp_path / f"{copy}.tif", raster, low=0, high=1, description={"b": 1, "a": 2})
        write_heatmap_ome(tmp_path / f"{copy}.ome.tif", raster, name="tumour", uuid_seed="seed", description={})
    write_heatmap_ome(tmp_path / "other.ome.tif", raster, name="tumour", uuid_seed="other seed", description={})
    assert (tmp_path / "1.tif").read_bytes() == (tmp_path / "2.tif").read_bytes()
    assert (tmp_path / "1.ome.tif").read_bytes() == (tmp_path / "2.ome.tif").read_bytes()
    uuids = set()
    for name in ("1", "other"):
        with tifffile.TiffFile(tmp_path / f"{name}.ome.tif") as tif:
            uuids.add(tifffile.xml2dict(tif.ome_metadata)["OME"]["UUID"])
    assert len(uuids) == 2


def test_the_files_name_no_date_host_or_software(tmp_path: Path) -> None:
    write_heatmap_tiff(tmp_path / "h.tif", _random(PLAIN), low=0, high=1, description={})
    write_heatmap_ome(tmp_path / "h.ome.tif", _random(PLAIN), name="tumour", uuid_seed="seed", description={})
    for name in ("h.tif", "h.ome.tif"):
        with tifffile.TiffFile(tmp_path / name) as tif:
            for page in tif.pages:
                assert not {"DateTime", "HostComputer", "Software", "Artist"} & {tag.name for tag in page.tags}
        assert b"tifffile" not in (tmp_path / name).read_bytes()
