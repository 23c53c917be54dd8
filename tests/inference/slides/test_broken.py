"""Each damaged file of the shared data ends as its README says: at the reader, and through the engine."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from inference.errors import TileReadError
from inference.models.registry import Checkpoint
from inference.slides.opening import open_slide
from inference.slides.resolution import plan_reading
from inference.slides.sampling import TileSampler, make_grid
from tests.inference.engine.runs import failures_of, result, run
from tests.inference.engine.tiny_slides import ref

NATIVE = {(5, 7): 0.3214, (5, 8): 0.3673, (6, 7): 0.2143, (6, 8): 0.2449}
"""By hand: the damaged compressed tile covers x 1680-1919 and y 1200-1439, and tiles begin at multiples of 224, so
columns 7 and 8 have 112 and 128 of its columns, rows 5 and 6 have 144 and 96 of its rows: 112 * 144 / 224², …"""
HALVED = {(2, 3): 0.0804, (3, 3): 0.0536}
"""At half the resolution tiles begin at multiples of 448: column 3 has x 1680-1791, rows 2 and 3 have y 1200-1343 and
1344-1439, and a column 4 would not fit: 112 * 144 / 448², …"""
CASES = [(0.5, 1, NATIVE), (1.0, 2, HALVED)]


def _read(path: Path, target: float) -> dict[tuple[int, int], tuple[np.ndarray, float] | None]:
    """Pixels and missing share of every tile of 224 px; None where it cannot be read."""
    found: dict[tuple[int, int], tuple[np.ndarray, float] | None] = {}
    with open_slide(path, "S1") as reader:
        plan = plan_reading("S1", reader.level_sizes, (0.499, 0.499), target)
        grid = make_grid(reader.level_sizes[0], (0.499, 0.499), plan, 224, 224)
        rows, cols = grid.cells()
        sampler = TileSampler(reader, plan, grid, rows, cols)
        for index, cell in enumerate(zip(rows.tolist(), cols.tolist(), strict=True)):
            try:
                tile = sampler.read(index)
            except TileReadError:
                found[cell] = None
            else:
                found[cell] = (tile.rgb, tile.missing_fraction)
    return found


@pytest.mark.parametrize(("target", "reduction", "touched"), CASES)
def test_exactly_the_tiles_on_the_damaged_compressed_tile_fail(
    shared_data: Path, target: float, reduction: int, touched: dict[tuple[int, int], float]
) -> None:
    whole = _read(shared_data / "slides" / "CMU-1-Small-Region.svs", target)
    broken = _read(shared_data / "broken" / "tile-garbage.svs", target)
    assert len(broken) == (2220 // (224 * reduction)) * (2967 // (224 * reduction))
    assert {cell for cell, tile in broken.items() if tile is None} == touched.keys()
    for cell, tile in broken.items():
        if tile is not None:
            truth = whole[cell]
            assert truth is not None
            assert np.array_equal(tile[0], truth[0])
            assert tile[1] == 0


@pytest.mark.parametrize(("target", "reduction", "touched"), CASES)
def test_exactly_the_tiles_on_the_empty_compressed_tile_miss_their_share_and_are_white_there(
    shared_data: Path, target: float, reduction: int, touched: dict[tuple[int, int], float]
) -> None:
    whole = _read(shared_data / "slides" / "CMU-1-Small-Region.svs", target)
    side = 224 * reduction
    for (row, col), tile in _read(shared_data / "broken" / "tile-zero-length.svs", target).items():
        truth = whole[row, col]
        assert tile is not None
        assert truth is not None
        assert tile[1] == pytest.approx(touched.get((row, col), 0.0), abs=5e-5)
        top, bottom = (np.clip(np.array([1200, 1440]) - row * side, 0, side) // reduction).tolist()
        left, right = (np.clip(np.array([1680, 1920]) - col * side, 0, side) // reduction).tolist()
        assert (tile[0][top:bottom, left:right] == 255).all()
        expected = truth[0].copy()
        expected[top:bottom, left:right] = 255
        assert np.array_equal(tile[0], expected)


ENDS = {
    "empty": ("failed", "unreadable_slide", "the file is empty"),
    "html-error-page": ("failed", "unreadable_slide", "not a slide but a web page"),
    "cut-half": ("failed", "unreadable_slide", "truncated"),
    "no-mpp": ("failed", "unknown_resolution", "--mpp"),
    "mpp-zero": ("failed", "unknown_resolution", "--mpp"),
    "tile-garbage": ("ok with failures", None, ""),
    "tile-zero-length": ("ok", None, ""),
}


@pytest.mark.slow
def test_each_broken_file_ends_as_the_readme_says_and_costs_no_other_its_result(
    shared_data: Path, tmp_path: Path, demo_checkpoint: Checkpoint
) -> None:
    refs = [ref(shared_data / "broken" / f"{name}.svs") for name in ENDS]
    outcomes = run(tmp_path / "store", demo_checkpoint, refs, stages=["info", "tiles", "predict"], batch_size=64)
    for (name, (status, code, text)), outcome in zip(ENDS.items(), outcomes, strict=True):
        assert outcome.status == status, name
        if code:
            assert outcome.error is not None
            assert outcome.error.code == code
            assert text in str(outcome.error)
        else:
            assert outcome.error is None
    garbage, missing = outcomes[-2:]
    assert {(f["row"], f["col"], f["stage"]) for f in failures_of(garbage)} == {(*cell, "read") for cell in NATIVE}
    assert failures_of(missing) == []
    rows = pq.read_table(result(missing, "tiles").folder / "tiles.parquet").to_pylist()
    shares = {(row["row"], row["col"]): row["missing_fraction"] for row in rows if row["missing_fraction"]}
    assert shares == pytest.approx(NATIVE, abs=5e-5)
