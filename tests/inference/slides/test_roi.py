"""Regions of interest: known areas from GeoJSON and masks, and files that cannot be one."""

import io
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tifffile
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from inference.errors import ConfigError
from inference.slides import polygons, roi
from inference.slides.discovery import SlideRef, discover
from inference.slides.polygons import fill_polygon
from inference.slides.roi import check_rois, find_roi, load_roi, roi_sha256

SLIDE = (1000, 800)
SCALE = (8.0, 8.0)
SHAPE = (100, 125)


def _square(x: float, y: float, side: float) -> list[list[float]]:
    return [[x, y], [x + side, y], [x + side, y + side], [x, y + side], [x, y]]


def _polygon(*rings: list[list[float]]) -> dict[str, object]:
    return {"type": "Polygon", "coordinates": list(rings)}


def _feature(geometry: object) -> dict[str, object]:
    return {"type": "Feature", "id": "a", "geometry": geometry, "properties": {"objectType": "annotation"}}


def _write(folder: Path, document: object, name: str = "roi.geojson") -> Path:
    path = folder / name
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return path


def _plane(path: Path) -> NDArray[np.bool_]:
    return load_roi(path).plane(SLIDE, SHAPE, SCALE)


def _expected(*boxes: tuple[int, int, int, int]) -> NDArray[np.bool_]:
    """Left, top, right and bottom in pixels of the plane."""
    plane = np.zeros(SHAPE, np.bool_)
    for x0, y0, x1, y1 in boxes:
        plane[y0:y1, x0:x1] = True
    return plane


# --- GeoJSON --------------------------------------------------------------------------------------------------

BOX = _polygon(_square(80, 160, 240))
FOUND = (10, 20, 40, 50)


@pytest.mark.parametrize(
    "document",
    [
        {"type": "FeatureCollection", "features": [_feature(BOX)]},
        [_feature(BOX)],
        _feature(BOX),
        BOX,
        {"type": "MultiPolygon", "coordinates": [BOX["coordinates"]]},
        {"type": "GeometryCollection", "geometries": [{"type": "GeometryCollection", "geometries": [BOX]}]},
        _polygon([[*point, 0.5] for point in _square(80, 160, 240)]),  # with a third coordinate
        _polygon(_square(80, 160, 240)[:-1]),  # not closed
        _polygon(_square(80, 160, 240)[::-1]),  # the other way round
    ],
    ids=["collection", "list", "feature", "bare", "multi", "nested", "3d", "open", "reversed"],
)
def test_a_rectangle_is_found_in_every_form_of_geojson(tmp_path: Path, document: object) -> None:
    path = _write(tmp_path, document)
    assert np.array_equal(_plane(path), _expected(FOUND))
    assert load_roi(path).ignored == 0
    assert load_roi(path).sha256 == roi_sha256(path)


def test_polygons_are_joined_and_rings_within_one_are_holes(tmp_path: Path) -> None:
    ring = _polygon(_square(80, 80, 400), _square(160, 160, 240))
    island = _polygon(_square(240, 240, 80))
    again = _polygon(_square(80, 80, 80))  # lies on the ring: joined, not cut out
    document = [
        _feature(ring),
        _feature(island),
        _feature({"type": "MultiPolygon", "coordinates": [again["coordinates"]]}),
    ]
    plane = _expected((10, 10, 60, 60)) & ~_expected((20, 20, 50, 50)) | _expected((30, 30, 40, 40))
    assert np.array_equal(_plane(_write(tmp_path, document)), plane)


def test_points_and_lines_are_counted_and_left_out(tmp_path: Path) -> None:
    rest = [{"type": "Point", "coordinates": [1, 2]}, {"type": "LineString", "coordinates": [[1, 2], [3, 4]]}, None]
    path = _write(tmp_path, [_feature(geometry) for geometry in (*rest, BOX)])
    assert load_roi(path).ignored == 3
    assert np.array_equal(_plane(path), _expected(FOUND))


def test_what_reaches_beyond_the_slide_is_cut_off(tmp_path: Path) -> None:
    assert np.array_equal(_plane(_write(tmp_path, _polygon(_square(-500, -500, 580)))), _expected((0, 0, 10, 10)))
    assert _plane(_write(tmp_path, _polygon(_square(-500, -500, 5000)))).all()


DEEP = "[" * 200_000


@pytest.mark.parametrize(
    ("document", "says"),
    [
        ("", "neither GeoJSON nor"),
        ("not json", "neither GeoJSON nor"),
        (DEEP, "neither GeoJSON nor"),
        ('{"type": "Polygon"', "neither GeoJSON nor"),
        ({"type": "FeatureCollection", "features": []}, "no polygon: draw an area"),
        ([], "no polygon"),
        ({"type": "Point", "coordinates": [1, 2]}, "no polygon, but 1 without an area"),
        (_polygon([[1, 1], [2, 2]]), "no polygon"),
        ({"type": "Polygon"}, "not GeoJSON"),
        ({"a": 1}, "not GeoJSON"),
        ("7", "not GeoJSON"),
        ([[1, 2]], "not GeoJSON"),
        ({"type": "Polygon", "coordinates": [1, 2]}, "no pixels of a slide"),
        (_polygon([[0, 0], [1], [2, 2]]), "no pixels of a slide"),
        (_polygon([["0", "0"], ["1", "0"], ["1", "1"]]), "no pixels of a slide"),  # type: ignore[list-item]
        ('{"type": "Polygon", "coordinates": [[[0, 0], [NaN, 1], [1, 1]]]}', "no pixels of a slide"),
        ('{"type": "Polygon", "coordinates": [[[0, 0], [1e300, 1], [1, 1]]]}', "no pixels of a slide"),
        (_polygon(_square(5000, 0, 100)), r"lies outside the slide \(1000 x 800\)"),
        (_polygon(_square(-200, -200, 100)), "lies outside the slide"),
    ],
)
def test_what_is_no_region_of_this_slide_is_refused_in_one_line(tmp_path: Path, document: object, says: str) -> None:
    path = _write(tmp_path, document, "Jane Doe.geojson")
    with pytest.raises(ConfigError, match=says) as caught:
        _plane(path)
    assert "\n" not in caught.value.message
    assert "Jane" not in caught.value.message


def test_a_file_that_is_absent_no_file_or_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.mkfifo(tmp_path / "pipe.geojson")
    for name in ("absent.geojson", "pipe.geojson", "."):
        for read in (load_roi, roi_sha256):
            with pytest.raises(ConfigError, match="cannot be read"):
                read(tmp_path / name)
    path = _write(tmp_path, BOX)
    monkeypatch.setattr(roi, "MAX_BYTES", path.stat().st_size)
    assert load_roi(path).ignored == 0
    monkeypatch.setattr(roi, "MAX_BYTES", path.stat().st_size - 1)
    with pytest.raises(ConfigError, match="simplify its outlines"):
        load_roi(path)


# --- polygons -------------------------------------------------------------------------------------------------


def _inside(rings: list[NDArray[np.float64]], shape: tuple[int, int]) -> NDArray[np.bool_]:
    """Pixel by pixel: how often a ray to the left of its centre meets an edge."""
    plane = np.zeros(shape, np.bool_)
    for row in range(shape[0]):
        for col in range(shape[1]):
            x, y = col + 0.5, row + 0.5
            for ring in rings:
                for (x0, y0), (x1, y1) in zip(ring, np.roll(ring, -1, axis=0), strict=True):
                    if (y0 <= y) != (y1 <= y) and x0 + (y - y0) * (x1 - x0) / (y1 - y0) <= x:
                        plane[row, col] ^= True
    return plane


# Sixteenths: on centres, on corners and between.
COORDINATES = st.integers(-64, 256).map(lambda value: value / 16)
RINGS = st.lists(st.lists(st.tuples(COORDINATES, COORDINATES), min_size=3, max_size=7), min_size=1, max_size=3)


@settings(deadline=None)
@given(RINGS, st.integers(1, 12), st.integers(1, 12), st.sampled_from([1, 3, 1 << 22]))
def test_any_polygon_fills_the_pixels_whose_centre_is_inside(
    corners: list[list[tuple[float, float]]], height: int, width: int, at_a_time: int
) -> None:
    rings = [np.array(ring) for ring in corners]
    plane = np.zeros((height, width), np.bool_)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(polygons, "CROSSINGS", at_a_time)
        fill_polygon(plane, rings)
    assert np.array_equal(plane, _inside(rings, (height, width)))


def test_areas_are_exact_on_average_and_neighbours_share_no_pixel_and_leave_none_out() -> None:
    angle = np.linspace(0, 2 * np.pi, 720, endpoint=False)
    circle = np.stack([700.3 + 500 * np.cos(angle), 600.7 + 500 * np.sin(angle)], axis=1)
    plane = np.zeros((1300, 1400), np.bool_)
    fill_polygon(plane, [circle])
    assert plane.sum() == pytest.approx(np.pi * 500**2, rel=1e-4)
    left, right = np.zeros((40, 40), np.bool_), np.zeros((40, 40), np.bool_)
    fill_polygon(left, [np.array([[0, 0], [17.5, 0], [22.5, 40], [0, 40]])])
    fill_polygon(right, [np.array([[17.5, 0], [40, 0], [40, 40], [22.5, 40]])])
    assert (left ^ right).all()


# --- mask images ----------------------------------------------------------------------------------------------


def _image(path: Path, pixels: NDArray[np.uint8] | NDArray[np.uint16] | NDArray[np.bool_]) -> Path:
    if path.suffix == ".png":
        Image.fromarray(pixels).save(path)
    else:
        tifffile.imwrite(path, pixels, photometric="minisblack" if pixels.ndim == 2 else "rgb")
    return path


@pytest.mark.parametrize("suffix", [".png", ".tif"])
@pytest.mark.parametrize("size", [(250, 200), (125, 100), (25, 20), (1000, 800), (126, 100)], ids=str)
def test_a_mask_of_any_size_marks_the_same_part_of_the_slide(
    tmp_path: Path, size: tuple[int, int], suffix: str
) -> None:
    pixels = np.zeros(size[::-1], np.uint8)
    pixels[size[1] // 5 : size[1] // 2, size[0] // 5 : size[0] * 2 // 5] = 7
    plane = _plane(_image(tmp_path / f"roi{suffix}", pixels))
    assert np.count_nonzero(plane ^ _expected((25, 20, 50, 50))) <= (30 if size == (126, 100) else 0)


@pytest.mark.parametrize(
    ("pixels", "suffix"),
    [
        (np.array([[0, 255], [1, 0]], np.uint8), ".png"),
        (np.array([[0, 65535], [1, 0]], np.uint16), ".png"),
        (np.array([[0, 300], [1, 0]], np.uint16), ".tif"),
        (np.array([[False, True], [True, False]]), ".png"),
        (np.array([[[0, 0, 0], [0, 0, 1]], [[9, 0, 0], [0, 0, 0]]], np.uint8), ".png"),
        (np.array([[[0, 0, 0], [0, 0, 1]], [[9, 0, 0], [0, 0, 0]]], np.uint8), ".tif"),
        (np.array([[[9, 9, 9, 0], [0, 0, 1, 255]], [[9, 0, 0, 1], [0, 0, 0, 255]]], np.uint8), ".png"),
    ],
)
def test_inside_is_what_is_not_zero_in_a_colour_and_not_transparent(
    tmp_path: Path, pixels: NDArray[np.uint8], suffix: str
) -> None:
    found = load_roi(_image(tmp_path / f"roi{suffix}", pixels)).plane((100, 100), (2, 2), (50.0, 50.0))
    assert found.tolist() == [[False, True], [True, False]]


def test_a_palette_image_is_judged_by_its_colours(tmp_path: Path) -> None:
    image = Image.fromarray(np.array([[0, 1], [2, 3]], np.uint8), "P")
    image.putpalette([255, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1])
    image.save(tmp_path / "roi.png")
    found = load_roi(tmp_path / "roi.png").plane((100, 100), (2, 2), (50.0, 50.0))
    assert found.tolist() == [[True, False], [False, True]]


def test_masks_that_are_empty_of_other_proportions_or_damaged_are_refused(tmp_path: Path) -> None:
    ones = np.ones((100, 125), np.uint8)
    with pytest.raises(ConfigError, match="is empty"):
        load_roi(_image(tmp_path / "a.png", ones * 0))
    for size in ((128, 100), (125, 103), (100, 125)):
        with pytest.raises(ConfigError, match="has not the slide's proportions"):
            _plane(_image(tmp_path / "a.png", np.ones(size[::-1], np.uint8)))
    for name in ("a.png", "a.tif"):
        path = _image(tmp_path / name, np.random.default_rng(0).integers(0, 255, (100, 125, 3), np.uint8))
        path.write_bytes(path.read_bytes()[:-20_000])
        with pytest.raises(ConfigError, match="does not decode"):
            load_roi(path)
        path.write_bytes(path.read_bytes()[:8])
        with pytest.raises(ConfigError, match="ROI mask"):
            load_roi(path)
    tifffile.imwrite(tmp_path / "b.tif", np.ones((3, 4, 5), np.uint8), photometric="rgb", planarconfig="separate")
    with pytest.raises(ConfigError, match="several planes"):
        load_roi(tmp_path / "b.tif")


def test_a_bomb_is_refused_before_it_is_decoded(tmp_path: Path) -> None:
    data = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(data, "PNG")
    (tmp_path / "roi.png").write_bytes(data.getvalue())
    # Pillow would warn, which fails the test.
    with pytest.raises(ConfigError, match="20000 x 20000 pixels: 64 million do"):
        load_roi(tmp_path / "roi.png")


# --- which file -----------------------------------------------------------------------------------------------


def _slides(folder: Path, *names: str) -> tuple[SlideRef, ...]:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    return discover([folder]).slides


def test_a_slides_roi_is_the_cohorts_else_the_file_else_that_in_the_folder(tmp_path: Path) -> None:
    one, other = _slides(tmp_path / "slides", "a.svs", "b.svs")
    folder = tmp_path / "rois"
    folder.mkdir()
    for name in ("a.geojson", "b.geojson", f"{other.key}.png"):
        (folder / name).touch()
    assert find_roi(one, None) is None
    assert find_roi(one, folder) == folder / "a.geojson"
    assert find_roi(other, folder) == folder / f"{other.key}.png", "the key is surer than a name"
    assert find_roi(one, folder / "b.geojson") == folder / "b.geojson"
    own = tmp_path / "own.geojson"
    assert find_roi(replace(one, roi=own), folder) == find_roi(replace(one, roi=own), None) == own
    check_rois([one, other], folder)


def test_a_folder_without_a_roi_for_a_slide_or_with_two_is_refused(tmp_path: Path) -> None:
    (slide,) = _slides(tmp_path / "slides", "a.svs")
    folder = tmp_path / "rois"
    folder.mkdir()
    with pytest.raises(ConfigError, match=r"a\.svs: the folder of ROIs has no file for it"):
        find_roi(slide, folder)
    (folder / "a.geojson").touch()
    (folder / "a.png").touch()
    with pytest.raises(ConfigError, match="has several files for it"):
        find_roi(slide, folder)


def test_a_slide_is_not_its_own_roi(tmp_path: Path) -> None:
    (slide,) = _slides(tmp_path, "a.tif")
    (tmp_path / "link.tif").symlink_to(slide.path)
    for path in (slide.path, tmp_path / "link.tif"):
        with pytest.raises(ConfigError, match="is the slide itself"):
            find_roi(slide, path)


def test_slides_of_one_name_never_share_a_roi_of_the_folder(tmp_path: Path) -> None:
    slides = _slides(tmp_path / "slides", "1/a.svs", "2/a.svs")
    folder = tmp_path / "rois"
    folder.mkdir()
    check_rois(slides, folder)
    (folder / "a.geojson").touch()
    with pytest.raises(ConfigError, match=r"2 slides \(1/a\.svs, 2/a\.svs\): name it after a slide_key"):
        check_rois(slides, folder)
    (folder / f"{slides[0].key}.geojson").touch()
    check_rois(slides, folder)


def test_a_roi_that_is_not_there_is_refused_before_any_slide_is_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="check the spelling"):
        check_rois((), tmp_path / "absent")
    check_rois((), None)


def test_a_cohort_file_gives_each_slide_its_roi_relative_to_itself(tmp_path: Path) -> None:
    _slides(tmp_path, "a.svs", "b.svs", "c.svs")
    (tmp_path / "c.csv").write_text(f"path,roi\na.svs,rois/a.geojson\nb.svs,{tmp_path}/b.png\nc.svs, \n")
    assert [ref.roi for ref in discover([tmp_path / "c.csv"]).slides] == [
        tmp_path / "rois" / "a.geojson",
        tmp_path / "b.png",
        None,
    ]
    (tmp_path / "c.csv").write_text("path,ROI\na.svs,a.geojson\n")
    with pytest.raises(ConfigError, match="call it 'roi'"):
        discover([tmp_path / "c.csv"])
    (tmp_path / "c.csv").write_text("path,roi\na.svs,a.geojson\n*.svs,b.geojson\n")
    with pytest.raises(ConfigError, match="another roi before"):
        discover([tmp_path / "c.csv"])
    (tmp_path / "c.csv").write_text("path,roi\na.svs,s3://bucket/a.geojson\n")
    with pytest.raises(ConfigError, match="row 2: a ROI is read from a local file"):
        discover([tmp_path / "c.csv"])


@pytest.mark.parametrize("photometric", ["minisblack", "miniswhite"])
def test_a_tiff_mask_is_inside_where_it_is_white_whichever_way_it_is_stored(tmp_path: Path, photometric: str) -> None:
    shown = np.zeros((40, 60), np.uint8)
    shown[5:15, 10:30] = 255
    path = tmp_path / "m.tif"
    tifffile.imwrite(path, shown if photometric == "minisblack" else 255 - shown, photometric=photometric)
    plane = load_roi(path).plane((600, 400), (40, 60), (10.0, 10.0))
    assert np.array_equal(plane, shown > 0)


def test_polygons_that_would_take_hours_are_refused(tmp_path: Path) -> None:
    square = [[0, 0], [60_000, 0], [60_000, 60_000], [0, 60_000], [0, 0]]
    path = tmp_path / "r.geojson"
    path.write_text(json.dumps({"type": "MultiPolygon", "coordinates": [[square]] * 400}))
    with pytest.raises(ConfigError, match="too many, too large or too jagged"):
        load_roi(path).plane((60_000, 60_000), (6000, 6000), (10.0, 10.0))
