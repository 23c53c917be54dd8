"""Grids and colours of every shared slide are those that an independent script computed; see `expected/compute.py`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from inference.slides.opening import open_slide
from inference.slides.reader import SlideReader
from inference.slides.resolution import ReadPlan, plan_reading, resolve_mpp
from inference.slides.sampling import TileSampler, make_grid
from tests.inference.slides.expected.compute import FOLDER, SLIDES, TILE, Slide, expected

STORED = 0.0051
"""Grey levels: a level's own pixels have a mean known to all but the two decimals that are committed."""
REDUCED = 0.51
"""Half a level is what rounding each pixel to 8 bits can do to an exact mean, a hair the decimals."""
NEAR = 1.0
"""Where the JPEG decoder reduces (its smaller inverse DCT is no area mean), tiles are resampled, or OpenSlide
interpolates between the pixels of a level; 0.4 was the most when this was written."""

Json = Mapping[str, Any]
COMMITTED: dict[str, Json] = {slide.name: json.loads((FOLDER / f"{slide.name}.json").read_text()) for slide in SLIDES}
CASES = [
    pytest.param(
        slide, target, id=f"{slide.name}-{target}", marks=[pytest.mark.slow] if slide.name[:4] == "tcga" else []
    )
    for slide in SLIDES
    for target in COMMITTED[slide.name]["targets"]
]


@pytest.mark.parametrize(("slide", "target"), CASES)
def test_grid_and_mean_colours_are_those_that_an_independent_script_computed(
    shared_data: Path, slide: Slide, target: str
) -> None:
    truth = COMMITTED[slide.name]["targets"][target]
    path = shared_data / slide.file
    with open_slide(path, "S1", sorted(path.parent.glob("*.dcm"), key=lambda p: p != path)) as reader:
        resolution = resolve_mpp("S1", reader.mpp, reader.objective_power, fallback_mpp=slide.mpp)
        assert resolution.mpp == pytest.approx(tuple(COMMITTED[slide.name]["mpp"]))
        assert resolution.source == COMMITTED[slide.name]["mpp_source"]
        plan = plan_reading("S1", reader.level_sizes, resolution.mpp, float(target))
        assert (plan.level, plan.reduction, plan.resample) == (truth["level"], truth["reduction"], truth["resample"])
        assert plan.mpp == pytest.approx(truth["mpp"], abs=1e-6)
        grid = make_grid(reader.level_sizes[0], resolution.mpp, plan, TILE, TILE)
        assert grid.origins(np.arange(grid.n_cols), 0).tolist() == truth["x"]
        assert grid.origins(np.arange(grid.n_rows), 1).tolist() == truth["y"]
        found = _means(TileSampler(reader, plan, grid, *grid.cells()))
        bound = _bound(reader, plan)
    known = np.array(truth["tiles"], np.float64).reshape(-1, 4)
    assert found.shape == known.shape
    if len(known):
        assert np.abs(found[:, :3] - known[:, :3]).max() <= bound
        assert np.abs(found[:, 3] - known[:, 3]).max() <= 1e-3


def _bound(reader: SlideReader, plan: ReadPlan) -> float:
    """Grey levels by which the mean colour of a tile may differ."""
    if plan.resample != "none":
        return NEAR
    if reader.kind.startswith("openslide") and not all(value.is_integer() for value in plan.downsample):
        return NEAR
    if plan.reduction > 1 and "(jpeg, " in reader.kind:
        return NEAR
    return STORED if plan.reduction == 1 else REDUCED


def _means(sampler: TileSampler) -> NDArray[np.float64]:
    """Mean red, green, blue and missing share of each tile."""
    tiles = [sampler.read(index) for index in range(len(sampler))]
    return np.array([[*tile.rgb.mean(axis=(0, 1), dtype=np.float64), tile.missing_fraction] for tile in tiles]).reshape(
        -1, 4
    )


@pytest.mark.parametrize("name", ["aperio-3level-jp2k-nompp", "philips-sparse", "ome-pyramid", "dicom-highdicom"])
def test_what_is_committed_is_what_the_script_computes(shared_data: Path, name: str) -> None:
    slide = next(slide for slide in SLIDES if slide.name == name)
    found: Json = json.loads(json.dumps(expected(shared_data, slide)))
    committed = COMMITTED[name]
    assert found.keys() == committed.keys()
    assert found["targets"].keys() == committed["targets"].keys()
    for target, truth in committed["targets"].items():
        said = found["targets"][target]
        assert {**said, "tiles": []} == {**truth, "tiles": []}
        # Another machine's sums may round the other way.
        assert np.abs(np.subtract(said["tiles"], truth["tiles"])).max(initial=0) <= 0.0101


def test_every_shared_slide_has_its_expected_values(shared_data: Path) -> None:
    """Of a DICOM series one file stands for all."""
    files = {path for folder in ("slides", "derived") for path in (shared_data / folder).rglob("*") if path.is_file()}
    named = {shared_data / slide.file for slide in SLIDES}
    series = {path for path in files if path.suffix == ".dcm" and path.parent in {n.parent for n in named}}
    assert files - series == named - series
