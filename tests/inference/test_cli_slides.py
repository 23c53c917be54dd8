"""`slide-inference doctor`: what it says of good slides, of bad ones, and of what lies among them."""

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from inference.cli import app
from inference.engine.doctor import examine
from inference.engine.settings import Settings
from inference.models.spec import TileSpec
from inference.slides.discovery import discover

SHARED = {
    "slides/CMU-1-Small-Region.svs": None,
    "derived/ome-pyramid.ome.tif": None,
    "derived/leica.scn": None,
    "derived/ventana.bif": None,
    "slides/test3-DAPI-2-(387).ndpi": None,
    "slides/dicom-highdicom/sm_image.dcm": None,
    "slides/tcga-cr-7395-01a-01-ts1.svs": r"says nothing of its resolution: .*--mpp",
    "slides/dicom-camelyon/multiframe_camelyon_challenge_image.dcm": r"the model needs 0\.5: .*--allow-upsampling",
    "broken/no-mpp.svs": r"says nothing of its resolution: .*--mpp.*20x suggests about 0\.5",
    "broken/mpp-zero.svs": r"claims 0 µm/px",
    "broken/cut-half.svs": "^truncated: ",
    "broken/empty.svs": "^the file is empty",
    "broken/html-error-page.svs": "web page",
    "broken/tile-garbage.svs": None,
    "broken/tile-zero-length.svs": None,
}


@pytest.mark.parametrize(("file", "refusal"), SHARED.items())
def test_it_says_what_would_fail_and_nothing_else(shared_data: Path, file: str, refusal: str | None) -> None:
    (ref,) = discover([shared_data / file]).slides
    found = examine(ref, Settings())
    assert (found.refused is None) == (refusal is None)
    if refusal:
        assert re.search(refusal, found.refused or "")
    assert str(shared_data) not in f"{found}"


def test_a_good_slide_is_described(shared_data: Path) -> None:
    (ref,) = discover([shared_data / "slides" / "CMU-1-Small-Region.svs"]).slides
    found = examine(ref, Settings())
    said = dict(found.lines)
    assert said["format"] == "Aperio SVS, 1.9 MB"
    assert said["levels"] == "1: 2,220 x 2,967 pixels"
    assert said["resolution"] == "0.499 µm/px, as the slide states (20x objective)"
    assert re.fullmatch(r"3\d % of the slide; the rest is 6\d % glass", said["tissue"])
    assert said["reading"] == "level 0, pixel for pixel"
    assert re.fullmatch(r"of 224 px at 0\.5 µm/px: 117 in the grid, \d\d with tissue", said["tiles"])
    assert not found.warnings


def test_a_garbage_tile_costs_the_four_tiles_over_it(shared_data: Path) -> None:
    (ref,) = discover([shared_data / "broken" / "tile-garbage.svs"]).slides
    warnings = examine(ref, Settings()).warnings
    assert any(re.match(r"4 tiles would fail, the first at \(1568, 1120\): ", text) for text in warnings)


def test_the_tiles_asked_for_are_those_described(shared_data: Path) -> None:
    (ref,) = discover([shared_data / "derived" / "generic-pyramid-jpeg.tiff"]).slides
    said = dict(examine(ref, Settings(), TileSpec(size=256, stride=128, resolution=1.5)).lines)
    assert said["reading"] == "level 1, then resampled by the area mean to 1.5 µm/px"
    assert said["tiles"].startswith("of 256 px at 1.5 µm/px: ")
    said = dict(examine(ref, Settings(), TileSpec(size=112, stride=112, resolution=8)).lines)
    assert said["reading"] == "level 3 reduced exactly by 2"


def test_mpp_fills_in_and_a_sample_is_said_to_be_one(shared_data: Path) -> None:
    (ref,) = discover([shared_data / "broken" / "no-mpp.svs"]).slides
    found = examine(ref, Settings(mpp=0.5), sample=10)
    assert found.refused is None
    assert dict(found.lines)["resolution"] == "0.5 µm/px, from --mpp (20x objective)"
    assert dict(found.lines)["read"].startswith("10 of them, spread over the slide, with ")


def test_the_command_lists_every_slide_and_exits_1_if_one_would_fail(shared_data: Path) -> None:
    good = CliRunner().invoke(app, ["doctor", str(shared_data / "derived" / "ventana.bif")])
    assert good.exit_code == 0
    assert "would run" in good.output
    run = CliRunner().invoke(app, ["doctor", str(shared_data / "broken")])
    assert run.exit_code == 1
    assert "7 slides, of which 5 would fail" in run.output
    assert run.output.count("would fail  ") == 5


def test_nothing_to_look_at_is_bad_usage(tmp_path: Path) -> None:
    run = CliRunner().invoke(app, ["doctor", str(tmp_path / "none.svs")])
    assert run.exit_code != 0
    assert "does not exist" in str(run.exception)
