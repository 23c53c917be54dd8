"""The command line's stride, edge policy and region of interest."""

import json
from pathlib import Path

import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from inference.cli import app
from inference.errors import ConfigError
from inference.models.registry import Checkpoint
from tests.inference.engine.tiny_slides import TILE_PX, section, write_slide


@pytest.fixture
def command(tmp_path: Path, demo_checkpoint: Checkpoint) -> list[str]:
    """A run of one slide of 4 x 5 tiles."""
    slide = write_slide(tmp_path / "slides" / "a.svs", section())
    return ["run", str(slide), "--model", str(demo_checkpoint.path), "--out", str(tmp_path / "out")]


def test_stride_edge_and_roi_travel_from_the_command_line_into_the_tiles(command: list[str], tmp_path: Path) -> None:
    ring = [[0, 0], [TILE_PX, 0], [TILE_PX, 2000], [0, 2000]]
    roi = tmp_path / "roi.geojson"
    roi.write_text(json.dumps({"type": "Polygon", "coordinates": [ring]}))
    outcome = CliRunner().invoke(
        app, [*command, "--stride", "112", "--edge", "shift", "--roi", str(roi), "--min-tissue", "0.9"]
    )
    assert outcome.exit_code == 0, outcome.output
    (tiles,) = (tmp_path / "out").glob("tiles/t224-s112-0.5um-shift@*/*/tiles.parquet")
    found = pq.read_table(tiles).to_pylist()
    bottom = 4 * TILE_PX + 10 - TILE_PX
    assert [(row["x"], row["y"]) for row in found] == [(0, y) for y in [*range(0, 673, 112), bottom]]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--stride", "225"], "leaves gaps between tiles"),
        (["--stride", "0"], "stride_px is 0"),
        (["--roi", "/absent.geojson"], "--roi names no file"),
    ],
    ids=str,
)
def test_a_wrong_tiling_is_bad_usage_and_nothing_is_created(
    command: list[str], tmp_path: Path, options: list[str], says: str
) -> None:
    outcome = CliRunner().invoke(app, [*command, *options])
    assert isinstance(outcome.exception, ConfigError)
    assert says in outcome.exception.message
    assert not (tmp_path / "out").exists()


def test_an_unknown_edge_policy_is_bad_usage(command: list[str]) -> None:
    assert CliRunner().invoke(app, [*command, "--edge", "crop"]).exit_code == 2
