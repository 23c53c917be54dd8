"""The reader: what it says of a slide, exact pixels, and handles that are let go."""

from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

import numpy as np
import openslide
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from inference.slides.opening import open_slide
from inference.slides.openslide_reader import OpenSlideReader
from inference.slides.reader import MAX_REGION_PIXELS, SlideReader
from inference.slides.resolution import plausible
from tests.inference.slides.conftest import OpenHandles
from tests.inference.slides.synthetic import Size, coordinates, write_pyramid

SIZES: list[Size] = [(1603, 1197), (801, 598), (402, 300), (101, 76)]
"""Downsamples 2.0012 x 2.0017, 3.9876 x 3.99 and 15.87 x 15.75."""


@pytest.fixture(scope="module")
def pyramid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pyramid(tmp_path_factory.mktemp("reader") / "s.tif", SIZES, coordinates, mpp=(0.25, 0.26))


def _open(path: Path) -> SlideReader:
    return open_slide(path, "S1")


# --- what a slide says of itself ------------------------------------------------------------------------------

PROPERTIES: list[tuple[str, str, list[Size], tuple[float, float] | None, float | None, Size]] = [
    ("slides/CMU-1-Small-Region.svs", "aperio", [(2220, 2967)], (0.499, 0.499), 20, (240, 240)),
    ("slides/tcga-cr-7395-01a-01-ts1.svs", "aperio", [(4443, 3567), (2221, 1783)], None, None, (256, 256)),
    ("slides/dicom-camelyon/multiframe_camelyon_challenge_image.dcm", "dicom", [(1152, 700)], (28.969, 28.968), None,
     (256, 256)),
    ("slides/dicom-highdicom/sm_image.dcm", "dicom", [(50, 50)], (0.499, 0.499), None, (10, 10)),
    ("derived/aperio-3level-jp2k-nompp.svs", "aperio", [(1200, 1440), (300, 360), (75, 90)], None, 20, (240, 240)),
    ("derived/leica.scn", "leica", [(2820, 3567), (705, 892)], (0.499, 0.499), 20, (256, 256)),
    ("derived/ome-pyramid.ome.tif", "ome-tiff", [(2220, 2967), (1110, 1483), (555, 741), (277, 370)], (0.499, 0.499),
     None, (256, 256)),
    ("derived/philips-sparse.tiff", "philips", [(2560, 3072), (1280, 1536), (640, 768)], (0.499, 0.499), None,
     (512, 512)),
    ("derived/ventana.bif", "ventana", [(1488, 2464), (744, 1232), (372, 616)], (0.499, 0.499), 20, (256, 256)),
    ("derived/dicom-jpeg/volume-2.dcm", "dicom", [(2220, 2967), (555, 741), (138, 185)], (0.499, 0.499), None,
     (256, 256)),
    ("broken/mpp-zero.svs", "aperio", [(2220, 2967)], (0.0, 0.0), 20, (240, 240)),
    ("broken/no-mpp.svs", "aperio", [(2220, 2967)], None, 20, (240, 240)),
]  # fmt: skip


@pytest.mark.parametrize(("file", "vendor", "sizes", "mpp", "power", "tile"), PROPERTIES)
def test_a_slide_says_what_it_is(
    shared_data: Path,
    file: str,
    vendor: str,
    sizes: list[Size],
    mpp: tuple[float, float] | None,
    power: float | None,
    tile: Size,
) -> None:
    with _open(shared_data / file) as slide:
        assert (slide.vendor, list(slide.level_sizes), slide.objective_power) == (vendor, sizes, power)
        assert slide.mpp == (None if mpp is None else pytest.approx(mpp))
        assert slide.stored_tile(0) == tile
        assert slide.background == (255, 255, 255)
        assert slide.quickhash
        assert f"openslide {openslide.__library_version__}" in slide.kind


def test_full_width_strips_are_the_stored_tiles_of_a_hamamatsu_slide(shared_data: Path) -> None:
    with _open(shared_data / "slides" / "test3-DAPI-2-(387).ndpi") as slide:
        assert slide.stored_tile(0) == (3968, 8)
        assert slide.mpp == pytest.approx((0.2282, 0.2282), abs=1e-4)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0.2525", 0.2525), ("0,2525", 0.2525), ("0", 0.0), ("-0.25", -0.25), ("inf", None), ("what", None), ("", None)],
)
def test_the_resolution_in_an_aperio_header_is_read_also_with_a_decimal_comma(
    tmp_path: Path, text: str, expected: float | None
) -> None:
    description = (
        f"Aperio Image Library v12.0.0 \n300x200 [0,0 300x200] (256x256) JPEG/RGB Q=80|AppMag = 40|MPP = {text}"
    )
    path = write_pyramid(tmp_path / "s.svs", [(300, 200)], coordinates, description=description)
    with _open(path) as slide:
        assert slide.vendor == "aperio"
        assert slide.objective_power == 40
        found = slide.mpp
    if expected is None:
        assert found is None or not plausible(found[0])
    else:
        assert found == (expected, expected)


def test_x_and_y_resolution_of_a_plain_tiff_are_kept_apart(pyramid: Path) -> None:
    with _open(pyramid) as slide:
        assert slide.mpp == pytest.approx((0.25, 0.26))
        assert slide.objective_power is None


def test_72_dpi_is_handed_on_and_not_plausible(tmp_path: Path) -> None:
    path = write_pyramid(tmp_path / "s.tif", [(300, 200)], coordinates, mpp=(25400 / 72, 25400 / 72))
    with _open(path) as slide:
        assert slide.mpp == pytest.approx((352.778, 352.778), abs=0.01)
    assert not plausible(25400 / 72)


@pytest.mark.parametrize(
    ("file", "how"),
    [
        ("slides/CMU-1-Small-Region.svs", "compressed tiles (jpeg, simplejpeg {simplejpeg}), "),
        ("derived/aperio-3level-jp2k-nompp.svs", "compressed tiles ("),
        ("derived/generic-pyramid-jpeg.tiff", "compressed tiles (jpeg, "),
        ("derived/philips-sparse.tiff", "compressed tiles (jpeg, "),
        ("derived/ventana.bif", ""),
        ("derived/leica.scn", ""),
        ("derived/dicom-jpeg/volume-0.dcm", "compressed tiles (jpeg, "),
        ("slides/dicom-highdicom/sm_image.dcm", "compressed tiles (uncompressed), "),
        ("slides/test3-DAPI-2-(387).ndpi", ""),
    ],
)
def test_the_reader_that_was_used_is_told(shared_data: Path, file: str, how: str) -> None:
    """The execution record must show which decoder made the pixels."""
    with _open(shared_data / file) as slide:
        assert slide.kind.startswith(how.format(simplejpeg=version("simplejpeg")) or "openslide ")
        assert slide.kind.endswith(f"openslide {openslide.__library_version__}")
        assert slide.reason


# --- pixels ---------------------------------------------------------------------------------------------------


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60, deadline=None)
@given(st.data())
def test_any_region_of_any_level_has_exactly_the_stored_pixels(pyramid: Path, data: st.DataObject) -> None:
    """Also beyond the edges, where alpha is 0. OpenSlide alone would interpolate on every level but the first."""
    level = data.draw(st.integers(0, len(SIZES) - 1))
    (level_w, level_h), truth = SIZES[level], _truth(level)
    width, height = data.draw(st.integers(1, 300)), data.draw(st.integers(1, 300))
    x, y = data.draw(st.integers(1 - width, level_w - 1)), data.draw(st.integers(1 - height, level_h - 1))
    with _open(pyramid) as slide:
        region = slide.read_region(level, x, y, width, height)
    expected = np.zeros((height, width, 4), np.uint8)
    x0, y0, x1, y1 = max(x, 0), max(y, 0), min(x + width, level_w), min(y + height, level_h)
    expected[y0 - y : y1 - y, x0 - x : x1 - x, :3] = truth[y0:y1, x0:x1]
    expected[y0 - y : y1 - y, x0 - x : x1 - x, 3] = 255
    assert np.array_equal(region, expected)


_TRUTHS: dict[int, NDArray[np.uint8]] = {}


def _truth(level: int) -> NDArray[np.uint8]:
    if level not in _TRUTHS:
        _TRUTHS[level] = coordinates(level, SIZES[level])
    return _TRUTHS[level]


@pytest.mark.parametrize(
    ("file", "level"),
    [
        ("derived/aperio-3level-jpeg.svs", 1),
        ("derived/aperio-3level-jpeg.svs", 2),
        ("derived/generic-pyramid-jpeg.tiff", 1),
        ("derived/generic-pyramid-jpeg.tiff", 3),
        ("slides/tcga-cr-7395-01a-01-ts1.svs", 1),
        ("derived/philips-sparse.tiff", 2),
    ],
)
def test_a_region_is_a_part_of_its_level_on_real_slides(shared_data: Path, file: str, level: int) -> None:
    """From its origin OpenSlide reads a level without interpolating: every other reading must give the same pixels."""
    with openslide.OpenSlide(shared_data / file) as plain:
        width, height = (min(side, 1000) for side in plain.level_dimensions[level])
        whole = np.asarray(plain.read_region((0, 0), level, (width, height)))
    with _open(shared_data / file) as slide:
        rng = np.random.default_rng(0)
        for _ in range(8):
            w, h = int(rng.integers(20, 60)), int(rng.integers(20, 60))
            x, y = int(rng.integers(0, width - w)), int(rng.integers(0, height - h))
            assert np.array_equal(slide.read_region(level, x, y, w, h), whole[y : y + h, x : x + w])


def test_bounds_neither_shift_the_origin_nor_crop(shared_data: Path) -> None:
    """The Leica image begins at (300, 300) of its canvas; 34.5 % of the canvas has no pixels."""
    with _open(shared_data / "derived" / "leica.scn") as slide:
        assert (slide.read_region(0, 0, 0, 250, 250) == 0).all()
        corner = slide.read_region(0, 290, 290, 20, 20)[..., 3]
        assert (corner[10:, 10:] == 255).all()
        assert (corner[:10] == 0).all()
        assert (corner[:, :10] == 0).all()
        absent = np.mean(slide.read_region(0, 0, 0, 2820, 3567)[..., 3] == 0)
        assert absent == pytest.approx(0.345, abs=0.001)


def test_absent_tiles_are_transparent_at_level_0_only(shared_data: Path) -> None:
    with _open(shared_data / "derived" / "philips-sparse.tiff") as slide:
        assert np.mean(slide.read_region(0, 0, 0, 2560, 3072)[..., 3] == 0) == pytest.approx(0.367, abs=0.001)
        assert (slide.read_region(1, 0, 0, 1280, 1536)[..., 3] == 255).all()


@pytest.mark.parametrize(
    "region",
    [
        (4, 0, 0, 10, 10),
        (-1, 0, 0, 10, 10),
        (0, 0, 0, 0, 10),
        (0, 0, 0, 10, -1),
        (0, 1603, 0, 10, 10),
        (0, 0, 1197, 10, 10),
        (0, -10, 0, 10, 10),
        (1, 801, 0, 10, 10),
        (0, 0, 0, MAX_REGION_PIXELS + 1, 1),
        (0, 0, 0, 1 << 31, 1 << 31),
    ],
)
def test_a_region_that_cannot_be_is_refused_and_never_blank(pyramid: Path, region: tuple[int, ...]) -> None:
    with _open(pyramid) as slide:
        level, x, y, width, height = region
        with pytest.raises(ValueError, match=r"^S1: "):
            slide.read_region(level, x, y, width, height)
        assert np.array_equal(slide.read_region(0, 3, 4, 5, 6)[..., :3], _truth(0)[4:10, 3:8])


# --- handles ------------------------------------------------------------------------------------------------------


def test_there_are_never_more_handles_than_reads_at_once(pyramid: Path, opened: OpenHandles) -> None:
    with _open(pyramid) as slide:
        assert opened.now == 1
        for _ in range(20):
            slide.read_region(0, 0, 0, 10, 10)
        assert opened.most == 1
        with ThreadPoolExecutor(3) as pool:
            regions = [*pool.map(lambda n: slide.read_region(n % 4, n, n, 16, 16), range(60))]
        for n, region in enumerate(regions):
            assert np.array_equal(region[..., :3], _truth(n % 4)[n : n + 16, n : n + 16])
        assert opened.most <= 3
    assert opened.now == 0


def test_a_closed_slide_refuses_to_read_and_opens_nothing(pyramid: Path, opened: OpenHandles) -> None:
    slide = _open(pyramid)
    slide.read_region(1, 0, 0, 10, 10)
    slide.close()
    slide.close()
    for level in (0, 1):
        with pytest.raises(ValueError, match="closed"):
            slide.read_region(level, 0, 0, 10, 10)
    assert opened.now == 0


def test_a_read_that_is_under_way_when_the_slide_is_closed_still_lets_its_handle_go(
    pyramid: Path, opened: OpenHandles
) -> None:
    slide = OpenSlideReader(pyramid, "S1")
    opened.in_read.clear()
    opened.go_on.clear()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(slide.read_region, 0, 0, 0, 10, 10)
        assert opened.in_read.wait(10)
        slide.close()
        opened.go_on.set()
        assert reading.result(10).shape == (10, 10, 4)
    assert opened.now == 0
