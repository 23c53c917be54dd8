"""The demo cohort: three synthetic slides whose truth is known."""

import csv
import hashlib
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypedDict

import numpy as np
import openslide
import pytest
from numpy.typing import NDArray
from skimage.color import rgb2hed
from skimage.draw import polygon2mask

from pipelines.demo.cohort import TILE_PX, demo_slides, write_cohort, write_demo_cohort

SCALE = 0.4  # of the slides that are read back here
HAEMATOXYLIN_OD = 0.35  # what a nucleus exceeds at 0.5 µm/px
NAMES = ("demo-1.svs", "demo-2.svs", "demo-3.svs")


class SlideTruth(TypedDict):
    width: int
    height: int
    mpp: float
    mpp_in_file: bool
    nuclei_fraction_dense: float
    nuclei_fraction_outside: float
    damaged_tile: dict[str, int] | None
    dense_polygon: list[list[float]]


@pytest.fixture(scope="module")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_cohort(tmp_path_factory.mktemp("cohort"), demo_slides(SCALE)).parent


def truth_of(folder: Path, name: str) -> SlideTruth:
    truth: SlideTruth = json.loads((folder / "truth.json").read_text())["slides"][name]
    return truth


def cells_of(folder: Path, name: str, key: str) -> NDArray[np.float32]:
    with np.load(folder / "truth.npz") as rasters:
        cells: NDArray[np.float32] = rasters[f"{Path(name).stem}.{key}"]
    return cells


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def haematoxylin(slide: openslide.OpenSlide, x: int, y: int, width: int, height: int) -> NDArray[np.float64]:
    """Base-10 haematoxylin density of a level-0 rectangle, area-averaged to 0.5 µm/px."""
    rgb = np.asarray(slide.read_region((x, y), 0, (width, height)).convert("RGB"))
    halved = rgb.reshape(height // 2, 2, width // 2, 2, 3).mean((1, 3)).round().astype(np.uint8)
    density: NDArray[np.float64] = rgb2hed(halved)[..., 0] * 6
    return density


@pytest.mark.parametrize("name", NAMES)
def test_openslide_reads_an_aperio_slide_of_three_levels(cohort: Path, name: str) -> None:
    truth = truth_of(cohort, name)
    with openslide.OpenSlide(cohort / name) as slide:
        assert slide.properties["openslide.vendor"] == "aperio"
        assert slide.dimensions == (truth["width"], truth["height"])
        assert slide.level_dimensions[1:] == tuple(
            (truth["width"] // 4 // k, truth["height"] // 4 // k) for k in (1, 4)
        )
        assert "thumbnail" in slide.associated_images


def test_the_slides_give_their_resolution_or_the_cohort_file_does(cohort: Path) -> None:
    found = {}
    with (cohort / "cohort.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            with openslide.OpenSlide(cohort / row["path"]) as slide:
                found[row["path"]] = (row["mpp"], slide.properties.get("openslide.mpp-x"))
                assert slide.properties.get("openslide.mpp-x") == slide.properties.get("openslide.mpp-y")
    assert found == {"demo-1.svs": ("", "0.25"), "demo-2.svs": ("", "0.25"), "demo-3.svs": ("0.25", None)}


def test_nothing_in_the_third_slide_hints_at_its_resolution(cohort: Path) -> None:
    with openslide.OpenSlide(cohort / "demo-3.svs") as slide:
        hints = [key for key in slide.properties if "mpp" in key.lower() or "mag" in key.lower() or "power" in key]
        assert [key for key in hints if key != "tiff.ImageDescription"] == []
        assert "MPP" not in slide.properties["tiff.ImageDescription"]
        assert slide.properties["tiff.ResolutionUnit"] == "none"


def test_full_size_slides_differ_and_leave_a_part_of_a_cell_over() -> None:
    sizes = [(slide.section.width, slide.section.height) for slide in demo_slides()]
    assert len(set(sizes)) == 3
    assert all(width % TILE_PX and height % TILE_PX for width, height in sizes)
    assert all(abs(width - 8000) < 500 and abs(height - 6000) < 500 for width, height in sizes)


def test_reading_the_damaged_tile_raises_and_a_new_handle_reads_its_neighbours(cohort: Path) -> None:
    box = truth_of(cohort, "demo-2.svs")["damaged_tile"]
    assert box is not None
    side = box["width"]
    with openslide.OpenSlide(cohort / "demo-2.svs") as slide, pytest.raises(openslide.OpenSlideError):
        slide.read_region((box["x"] + side // 2, box["y"] + side // 2), 0, (8, 8))
    for dy, dx in [(dy, dx) for dy in (-1, 0, 1) for dx in (-1, 0, 1) if (dy, dx) != (0, 0)]:
        with openslide.OpenSlide(cohort / "demo-2.svs") as slide:
            pixels = slide.read_region((box["x"] + dx * side, box["y"] + dy * side), 0, (side, side))
            assert np.asarray(pixels)[..., 3].min() == 255


def test_the_damaged_tile_is_tissue_and_lies_in_one_cell(cohort: Path) -> None:
    box = truth_of(cohort, "demo-2.svs")["damaged_tile"]
    assert box is not None
    for start, cell in ((box["x"], box["col"]), (box["y"], box["row"])):
        assert cell * TILE_PX <= start
        assert start + box["width"] <= (cell + 1) * TILE_PX
    share = box["width"] * box["height"] / TILE_PX**2
    assert cells_of(cohort, "demo-2.svs", "tissue_fraction")[box["row"], box["col"]] >= share


def test_only_the_damaged_tile_of_the_cohort_is_unreadable(cohort: Path) -> None:
    refused = []
    for name in NAMES:
        truth = truth_of(cohort, name)
        slide = openslide.OpenSlide(cohort / name)
        for y in range(0, truth["height"], 256):
            for x in range(0, truth["width"], 256):
                try:
                    slide.read_region((x, y), 0, (256, 256))
                except openslide.OpenSlideError:
                    refused.append((name, x, y))
                    slide.close()
                    slide = openslide.OpenSlide(cohort / name)
        slide.close()
    box = truth_of(cohort, "demo-2.svs")["damaged_tile"]
    assert box is not None
    assert refused == [("demo-2.svs", box["x"], box["y"])]


@pytest.mark.parametrize("name", ["demo-1.svs", "demo-3.svs"])
def test_unmixing_the_dense_region_gives_back_the_painted_nuclei(cohort: Path, name: str) -> None:
    truth = truth_of(cohort, name)
    with openslide.OpenSlide(cohort / name) as slide:
        density = haematoxylin(slide, 0, 0, truth["width"], truth["height"])
    corners = np.array(truth["dense_polygon"])[:, ::-1] / 2 - 0.5
    inside = polygon2mask(density.shape, corners)
    # 0.01 covers what averaging, chroma subsampling and JPEG do at the edges of nuclei.
    assert (density[inside] > HAEMATOXYLIN_OD).mean() == pytest.approx(truth["nuclei_fraction_dense"], abs=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_unmixing_each_cell_gives_back_its_painted_nuclei(cohort: Path, name: str) -> None:
    painted = cells_of(cohort, name, "nuclei_fraction")
    truth = truth_of(cohort, name)
    assert painted.shape == (truth["height"] // TILE_PX, truth["width"] // TILE_PX)
    box = truth["damaged_tile"]
    error = np.zeros(painted.shape)
    with openslide.OpenSlide(cohort / name) as slide:
        for row, col in np.ndindex(*painted.shape):
            if box is None or (row, col) != (box["row"], box["col"]):
                density = haematoxylin(slide, col * TILE_PX, row * TILE_PX, TILE_PX, TILE_PX)
                error[row, col] = (density > HAEMATOXYLIN_OD).mean() - painted[row, col]
    assert np.abs(error).max() < 0.015
    assert np.sqrt((error**2).mean()) < 0.004


@pytest.mark.parametrize("name", NAMES)
def test_the_dense_region_stands_out_and_lies_within_the_tissue(cohort: Path, name: str) -> None:
    truth = truth_of(cohort, name)
    dense, tissue = cells_of(cohort, name, "dense_fraction"), cells_of(cohort, name, "tissue_fraction")
    assert truth["nuclei_fraction_dense"] > 5 * truth["nuclei_fraction_outside"]
    assert np.all(dense <= tissue)
    assert 0 < dense.sum() < tissue.sum() < tissue.size


def test_glass_is_bright_grey_with_sensor_noise(cohort: Path) -> None:
    with openslide.OpenSlide(cohort / "demo-1.svs") as slide:
        glass = np.asarray(slide.read_region((0, 0), 0, (200, 200)).convert("RGB")).astype(float)
    assert glass.mean() == pytest.approx(243, abs=0.5)
    assert 0.2 < glass.std() < 3


def test_every_write_gives_the_same_bytes(cohort: Path, tmp_path: Path) -> None:
    write_cohort(tmp_path, demo_slides(SCALE))
    assert digests(tmp_path) == digests(cohort)
    assert len(digests(tmp_path)) == 7


def test_a_finished_cohort_is_left_alone(cohort: Path) -> None:
    before = {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in cohort.iterdir()}
    assert write_cohort(cohort, demo_slides(SCALE)) == cohort / "cohort.csv"
    assert {path.name: (path.stat().st_ino, path.stat().st_mtime_ns) for path in cohort.iterdir()} == before


@pytest.mark.parametrize("fault", ["no-record", "garbled-record", "truncated-slide", "missing-truth", "other-plan"])
def test_an_unfinished_cohort_is_written_anew(tmp_path: Path, fault: str) -> None:
    slides = demo_slides(0.12)[:1]
    write_cohort(tmp_path, slides)
    complete = digests(tmp_path)
    if fault == "no-record":
        (tmp_path / "written.json").unlink()
    elif fault == "garbled-record":
        (tmp_path / "written.json").write_text('["not", "a", "record"]')
    elif fault == "truncated-slide":
        os.truncate(tmp_path / "demo-1.svs", 4096)
    elif fault == "missing-truth":
        (tmp_path / "truth.json").unlink()
    else:
        write_cohort(tmp_path, demo_slides(0.1)[:1])
        assert digests(tmp_path) != complete
    (tmp_path / ".writing-killed").mkdir()
    write_cohort(tmp_path, slides)
    assert digests(tmp_path) == complete


def test_two_writers_at_once_leave_one_whole_cohort(tmp_path: Path) -> None:
    slides, start = demo_slides(0.12)[:1], threading.Barrier(2)

    def write(_: int) -> Path:
        start.wait(timeout=30)
        return write_cohort(tmp_path / "shared", slides)

    with ThreadPoolExecutor(2) as pool:
        assert set(pool.map(write, range(2))) == {tmp_path / "shared" / "cohort.csv"}
    write_cohort(tmp_path / "alone", slides)
    assert digests(tmp_path / "shared") == digests(tmp_path / "alone")


@pytest.mark.slow
def test_the_full_cohort_has_the_stated_contrast(tmp_path: Path) -> None:
    folder = write_demo_cohort(tmp_path).parent
    for name in NAMES:
        truth = truth_of(folder, name)
        assert 0.35 < truth["nuclei_fraction_dense"] < 0.45
        assert 0.04 < truth["nuclei_fraction_outside"] < 0.06
