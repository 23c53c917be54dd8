"""Finished results are reused by recipe, so no stage's numbers may move without its version."""

import json
from pathlib import Path

from inference.engine.recipes import STAGE_VERSION
from inference.models.registry import Checkpoint
from tests.inference.engine.golden import GOLDEN, differences, measure


def test_no_stages_numbers_move_without_its_version_being_raised(tmp_path: Path, demo_checkpoint: Checkpoint) -> None:
    recorded = json.loads(GOLDEN.read_text())
    moved = differences(measure(tmp_path, demo_checkpoint), recorded["numbers"])
    silent = {stage for stage in moved if recorded["stage_version"][stage] == STAGE_VERSION[stage]}
    assert not silent, (
        f"raise {', '.join(sorted(silent))} in STAGE_VERSION, then python -m tests.inference.engine.golden"
    )
    assert recorded["stage_version"] == STAGE_VERSION, "record anew: python -m tests.inference.engine.golden"
    assert not moved


def test_a_number_that_moved_a_little_too_far_is_told(demo_checkpoint: Checkpoint) -> None:
    recorded = json.loads(GOLDEN.read_text())["numbers"]
    again = json.loads(GOLDEN.read_text())["numbers"]
    assert differences(again, recorded) == set()
    again["reduced"]["predict"]["first_embedding"][3] += 1e-3
    again["pixel for pixel"]["tiles"]["mask"] = "another"
    assert differences(again, recorded) == {"predict", "tiles"}
