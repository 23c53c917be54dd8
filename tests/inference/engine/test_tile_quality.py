"""Quality of tiles and slides in the results of stage `tiles`."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from inference.engine.chain import SlideOutcome
from inference.models.registry import Checkpoint
from tests.inference.engine.runs import failures_of, result, run
from tests.inference.engine.tiny_slides import GLASS, TILE_PX, Pixels, ref, section, write_slide

INK = (40, 165, 135)
FIGURES = ["pen_fraction", "dark_fraction", "saturation", "blank_fraction"]


def _drawn(rows: int = 2, *, ink_cols: float = 1.0) -> Pixels:
    """Two columns of tissue, of which the first is drawn over from the left, and one of glass."""
    image = section(rows, 3, glass_cols=1)
    image[: rows * TILE_PX, : int(ink_cols * TILE_PX)] = INK
    return image


def _planned(tmp_path: Path, checkpoint: Checkpoint, image: Pixels, **settings: object) -> SlideOutcome:
    slide = ref(write_slide(tmp_path / "a.svs", image))
    (outcome,) = run(tmp_path / "store", checkpoint, [slide], stages=["info", "tiles"], **settings)  # type: ignore[arg-type]
    return outcome


def test_tiles_carry_their_figures_and_the_slide_its_own_with_warnings(
    demo_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    outcome = _planned(tmp_path, demo_checkpoint, _drawn(ink_cols=0.5))
    folder, manifest = result(outcome, "tiles").folder, result(outcome, "tiles").manifest
    table = pq.read_table(folder / "tiles.parquet")
    assert table.column_names[-5:] == ["missing_fraction", *FIGURES]
    assert all(str(table.schema.field(name).type) == "float" for name in FIGURES)
    assert table["col"].to_pylist() == [0, 1, 0, 1]
    assert table["pen_fraction"].to_pylist() == pytest.approx([0.5, 0, 0.5, 0], abs=0.05)
    assert table["tissue_fraction"].to_pylist() == pytest.approx([0.5, 1, 0.5, 1], abs=0.05)
    assert table["saturation"].to_pylist() == pytest.approx([0.6, 0.35, 0.6, 0.35], abs=0.1)
    assert table["dark_fraction"].to_pylist() == [0] * 4
    quality = manifest.summary["quality"]
    assert isinstance(quality, dict)
    area = (2 * TILE_PX + 10) * (3 * TILE_PX + 10)
    assert quality["pen"] == pytest.approx(TILE_PX**2 / area, abs=0.02)
    assert quality["tissue"] == manifest.summary["tissue_share"]
    assert quality["bright_field"] is True
    assert manifest.summary["warnings"] == [
        "16 % of the slide is ink of a pen, which counts as no tissue",
        "if the slide is stained green, blue or red all over, this is no ink: give a --tissue-model",
    ]


def test_tiles_with_more_ink_than_allowed_are_not_planned_and_by_default_all_are(
    demo_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    def cols(**settings: object) -> list[int]:
        outcome = _planned(tmp_path, demo_checkpoint, _drawn(ink_cols=0.5), **settings)
        return pq.read_table(result(outcome, "tiles").folder / "tiles.parquet")["col"].to_pylist()  # type: ignore[no-any-return]

    assert cols() == cols(max_pen=1.0) == cols(max_pen=0.6) == [0, 1, 0, 1]
    assert cols(max_pen=0.4) == cols(max_pen=0.0) == [1, 1]


def test_damage_does_not_hide_behind_ink(demo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    path = write_slide(tmp_path / "a.svs", _drawn(3), damaged=[(0, 0)])
    (outcome,) = run(tmp_path / "store", demo_checkpoint, [ref(path)], stages=["info", "tiles", "predict"], max_pen=0.0)
    assert {failed["stage"] for failed in failures_of(outcome)} == {"read"}


@pytest.mark.parametrize(
    ("image", "settings", "reason"),
    [
        (section(2, 3, glass_cols=3), {}, "no tissue was found: the slide is 100 % bare glass"),
        (_drawn()[: 2 * TILE_PX, :TILE_PX], {}, "no tissue was found: the slide is 100 % ink"),
        (_drawn(ink_cols=1.5)[:, : 2 * TILE_PX], {"max_pen": 0.3}, "all 2 tiles with tissue are more than 30 % ink"),
        (section(2, 3)[:, TILE_PX : 3 * TILE_PX], {"min_tissue": 1.0}, None),
        (section(1, 2)[:, TILE_PX // 2 :], {"min_tissue": 0.9}, "no tile has 90 % tissue (min_tissue): the slide is "),
    ],
)
def test_a_slide_without_tiles_says_what_was_seen_instead(
    image: Pixels, settings: dict[str, object], reason: str | None, demo_checkpoint: Checkpoint, tmp_path: Path
) -> None:
    outcome = _planned(tmp_path, demo_checkpoint, image, **settings)
    found = result(outcome, "tiles").manifest
    assert outcome.status == ("empty" if reason else "ok")
    assert (found.reason or "")[: len(reason or "")] == (reason or "")
    assert (found.counts.planned == 0) is (reason is not None)


def test_a_slide_with_some_ink_and_no_tissue_tells_of_both(demo_checkpoint: Checkpoint, tmp_path: Path) -> None:
    image = np.broadcast_to(np.array(GLASS, np.uint8), (640, 640, 3)).copy()
    image[:160, :160] = INK
    found = result(_planned(tmp_path, demo_checkpoint, image), "tiles").manifest
    assert found.reason == "no tissue was found: the slide is 94 % bare glass, 6 % ink"
