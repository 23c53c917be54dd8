"""Stride, edge policy and region of interest on their way from the settings to the results."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image

from inference.engine.chain import SlideOutcome
from inference.engine.inventory import read_inventory, write_inventory
from inference.engine.job import SlideJob
from inference.engine.model import require_usable
from inference.engine.recipes import Addresses, tiling_name
from inference.engine.settings import Settings
from inference.errors import ConfigError, SlideChanged
from inference.models.registry import Checkpoint
from inference.slides.discovery import SlideRef
from inference.slides.overview import read_overview
from inference.slides.roi import check_rois
from inference.store.store import Store
from tests.inference.engine.runs import result, run, stages_of
from tests.inference.engine.tiny_slides import TILE_PX, ref, section, write_slide

TILES = ("info", "tiles")


@pytest.fixture
def slide(tmp_path: Path) -> SlideRef:
    """4 x 5 tiles and 10 pixels more; the last 234 columns are glass."""
    return ref(write_slide(tmp_path / "slides" / "a.svs", section()))


def _tiles(outcome: SlideOutcome) -> list[tuple[int, int, int, int]]:
    table = pq.read_table(result(outcome, "tiles").folder / "tiles.parquet").to_pylist()
    return [(row["row"], row["col"], row["x"], row["y"]) for row in table]


def _geojson(path: Path, x0: float, y0: float, x1: float, y1: float) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    ring = [[x0, y0], [x1, y0], [x1, y1], [x0, y1], [x0, y0]]
    path.write_text(json.dumps({"type": "Polygon", "coordinates": [ring]}))
    return path


def _tile_box(row: int, col: int, rows: int = 1, cols: int = 1) -> tuple[int, int, int, int]:
    return (col * TILE_PX, row * TILE_PX, (col + cols) * TILE_PX, (row + rows) * TILE_PX)


# --- settings and recipes -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"stride_px": 0}, "stride_px is 0: give a whole number, 1 or more"),
        ({"stride_px": 1.5}, "stride_px is 1.5"),
        ({"stride_px": True}, "stride_px is True"),
        ({"edge": "crop"}, "edge is 'crop': give drop, pad or shift"),
        ({"edge": None}, "edge is None"),
        ({"roi": 5}, "roi is no path"),
    ],
    ids=str,
)
def test_a_tiling_that_cannot_be_meant_is_refused(wrong: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        Settings(**wrong)  # type: ignore[arg-type]


def test_stride_and_edge_move_the_tiles_address_and_the_region_does_not(demo_checkpoint: Checkpoint) -> None:
    manifest = demo_checkpoint.manifest

    def folder(**settings: object) -> str:
        return Addresses("key", manifest, Settings(**settings)).tiles.folder  # type: ignore[arg-type]

    assert folder(stride_px=224) == folder(edge="drop") == folder(roi=Path("a")) == folder()
    assert len({folder(), folder(stride_px=112), folder(edge="pad"), folder(edge="shift")}) == 4
    assert tiling_name(manifest.spec, Settings(stride_px=112, edge="pad")) == "t224-s112-0.5um-pad"
    assert tiling_name(manifest.spec, Settings()) == tiling_name(manifest.spec)


def test_a_stride_beyond_the_models_tile_is_refused_before_any_slide_is_opened(demo_checkpoint: Checkpoint) -> None:
    with pytest.raises(ConfigError, match="a stride of 225 px leaves gaps between tiles of 224 px"):
        require_usable(demo_checkpoint, Settings(stride_px=225))


# --- the grid -------------------------------------------------------------------------------------------------


def test_the_stride_and_the_edge_policy_reach_the_planned_tiles(
    slide: SlideRef, tmp_path: Path, demo_checkpoint: Checkpoint
) -> None:
    found = {}
    for edge in ("drop", "pad", "shift"):
        (outcome,) = run(tmp_path / "store", demo_checkpoint, [slide], stages=TILES, edge=edge)  # type: ignore[arg-type]
        found[edge] = _tiles(outcome)
        assert result(outcome, "tiles").manifest.summary["edge"] == edge
    last = {edge: {y for row, _, _, y in tiles if row == 4} for edge, tiles in found.items()}
    assert last == {"drop": set(), "pad": {4 * TILE_PX}, "shift": {4 * TILE_PX + 10 - TILE_PX}}
    assert set(found["drop"]) < set(found["pad"])
    assert set(found["drop"]) < set(found["shift"])
    (outcome,) = run(tmp_path / "store", demo_checkpoint, [slide], stages=TILES, stride_px=112)  # type: ignore[arg-type]
    assert result(outcome, "tiles").manifest.summary["grid"] == [7, 9]


# --- the region of interest -----------------------------------------------------------------------------------


def test_only_tiles_with_tissue_inside_the_region_are_planned(
    slide: SlideRef, tmp_path: Path, demo_checkpoint: Checkpoint
) -> None:
    roi = _geojson(tmp_path / "roi.geojson", *_tile_box(1, 2, 2, 3))
    (outcome,) = run(tmp_path / "store", demo_checkpoint, [slide], roi=roi, min_tissue=0.5)
    assert outcome.status == "ok"
    assert {tile[:2] for tile in _tiles(outcome)} == {(1, 2), (1, 3), (2, 2), (2, 3)}, "column 4 is glass"
    tiles = result(outcome, "tiles")
    assert tiles.manifest.summary["roi_share"] == pytest.approx(6 * TILE_PX**2 / (906 * 1130), abs=0.01)
    assert tiles.manifest.inputs["roi_sha256"]
    with Image.open(tiles.folder / "roi.png") as image:
        assert np.asarray(image).mean() == pytest.approx(6 * TILE_PX**2 / (906 * 1130), abs=0.01)


def test_a_mask_image_and_a_folder_do_the_same_as_geojson(
    slide: SlideRef, tmp_path: Path, demo_checkpoint: Checkpoint
) -> None:
    pixels = np.zeros((906, 1130), np.uint8)
    x0, y0, x1, y1 = _tile_box(1, 2)
    pixels[y0:y1, x0:x1] = 255
    (tmp_path / "rois").mkdir()
    Image.fromarray(pixels).save(tmp_path / "rois" / "a.png")
    (outcome,) = run(tmp_path / "store", demo_checkpoint, [slide], stages=TILES, roi=tmp_path / "rois", min_tissue=0.5)  # type: ignore[arg-type]
    assert [tile[:2] for tile in _tiles(outcome)] == [(1, 2)]


def test_results_without_a_region_are_not_those_with_one_and_each_change_of_it_counts(
    slide: SlideRef, tmp_path: Path, demo_checkpoint: Checkpoint
) -> None:
    store, roi = tmp_path / "store", _geojson(tmp_path / "roi.geojson", *_tile_box(1, 2))
    reused = []
    for settings in ({}, {}, {"roi": roi}, {"roi": roi}):
        (outcome,) = run(store, demo_checkpoint, [slide], stages=TILES, **settings)  # type: ignore[arg-type]
        reused.append(outcome.reused)
    assert reused == [False, True, False, True]
    _geojson(roi, *_tile_box(0, 0))
    (outcome,) = run(store, demo_checkpoint, [replace(slide, roi=roi)], stages=TILES)  # type: ignore[arg-type]
    assert stages_of(outcome, reused=False) == list(TILES)
    assert (0, 0) in {tile[:2] for tile in _tiles(outcome)}
    (outcome,) = run(store, demo_checkpoint, [slide], stages=TILES)  # type: ignore[arg-type]
    assert not outcome.reused
    assert "roi_sha256" not in result(outcome, "tiles").manifest.inputs


def test_a_region_on_glass_is_a_finished_slide_without_tiles_that_says_so(
    slide: SlideRef, tmp_path: Path, demo_checkpoint: Checkpoint
) -> None:
    roi = _geojson(tmp_path / "roi.geojson", 4 * TILE_PX + 50, 0, 5 * TILE_PX, 906)
    (outcome,) = run(tmp_path / "store", demo_checkpoint, [slide], roi=roi)
    assert outcome.status == "empty"
    reason = result(outcome, "tiles").manifest.reason
    assert reason is not None
    assert "inside the region of interest (ROI), which covers 15." in reason


def test_a_slide_without_tissue_is_empty_for_that_reason_whatever_its_region(
    tmp_path: Path, demo_checkpoint: Checkpoint
) -> None:
    glass = ref(write_slide(tmp_path / "g.svs", section(glass_cols=5)))
    roi = _geojson(tmp_path / "roi.geojson", *_tile_box(0, 0))
    (outcome,) = run(tmp_path / "store", demo_checkpoint, [glass], stages=TILES, roi=roi)  # type: ignore[arg-type]
    reason = result(outcome, "tiles").manifest.reason
    assert reason is not None
    assert "ROI" not in reason


def test_damage_outside_the_region_is_not_planned_and_inside_it_is(tmp_path: Path, demo_checkpoint: Checkpoint) -> None:
    slide = ref(write_slide(tmp_path / "a.svs", section(), damaged=[(0, 0)]))
    inside, outside = (_geojson(tmp_path / f"{n}.geojson", *_tile_box(n, n)) for n in (0, 2))
    for roi, planned in ((inside, True), (outside, False)):
        (outcome,) = run(tmp_path / "store", demo_checkpoint, [slide], stages=TILES, roi=roi)  # type: ignore[arg-type]
        assert ((0, 0) in {tile[:2] for tile in _tiles(outcome)}) is planned


def test_a_region_that_cannot_be_used_costs_its_slide_alone_and_names_it(
    slide: SlideRef, tmp_path: Path, demo_checkpoint: Checkpoint
) -> None:
    good = ref(write_slide(tmp_path / "slides" / "b.svs", section(seed=2)))
    bad = replace(slide, roi=_geojson(tmp_path / "far.geojson", 9000, 9000, 9100, 9100))
    gone = replace(slide, key="gone", roi=tmp_path / "gone.geojson")
    first, second, third = run(tmp_path / "store", demo_checkpoint, [bad, gone, good], stages=TILES)  # type: ignore[arg-type]
    assert isinstance(first.error, ConfigError)
    assert first.error.message.startswith("a.svs: the ROI (x 9000 to 9100")
    assert isinstance(second.error, ConfigError)
    assert second.error.message.startswith("a.svs: the ROI file cannot be read")
    assert third.error is None


def test_a_region_that_changes_between_hashing_and_use_is_never_recorded_as_the_other(
    slide: SlideRef, tmp_path: Path, demo_checkpoint: Checkpoint
) -> None:
    roi = _geojson(tmp_path / "roi.geojson", *_tile_box(1, 2))
    with SlideJob(replace(slide, roi=roi), Store(tmp_path / "store"), Settings(), lambda *_: None) as job:
        assert job.inputs["roi_sha256"]
        overview = read_overview(job.reader, job.resolution.mpp)
        _geojson(roi, *_tile_box(0, 0))
        with pytest.raises(SlideChanged, match=r"a\.svs: its ROI file changed"):
            job.roi_on(overview)


def test_the_inventory_remembers_a_slides_region(slide: SlideRef, tmp_path: Path) -> None:
    store = Store(tmp_path / "store")
    with_roi = replace(slide, roi=tmp_path / "ä b.geojson")
    write_inventory(store, [with_roi])
    assert read_inventory(store) == {slide.key: with_roi}


def test_results_of_other_inputs_are_replaced_with_a_word(
    tmp_path: Path, demo_checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_slide(tmp_path / "slides" / "a.svs", section())
    store = tmp_path / "store"
    run(store, demo_checkpoint, [ref(path, mpp=0.5)])
    assert not caplog.records
    run(store, demo_checkpoint, [ref(path, mpp=0.37)])
    assert [r.getMessage() for r in caplog.records] == [
        "a.svs: its results of another µm/px are replaced; give another --out to keep both"
    ]


def test_a_given_resolution_that_is_not_used_is_told(
    tmp_path: Path, demo_checkpoint: Checkpoint, caplog: pytest.LogCaptureFixture
) -> None:
    path = write_slide(tmp_path / "slides" / "a.svs", section())
    run(tmp_path / "store", demo_checkpoint, [ref(path)], mpp=0.25)
    (line,) = [r.getMessage() for r in caplog.records]
    assert line.startswith("a.svs: --mpp 0.25 is not used, since the slide states 0.")


def test_one_region_is_not_laid_over_several_slides(tmp_path: Path) -> None:
    slides = [ref(write_slide(tmp_path / "slides" / f"{name}.svs", section())) for name in "ab"]
    roi = tmp_path / "roi.geojson"
    roi.write_text("{}")
    check_rois(slides[:1], roi)
    with pytest.raises(ConfigError, match=r"^one --roi file for 2 slides: name a folder"):
        check_rois(slides, roi)
