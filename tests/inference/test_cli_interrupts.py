"""`slide-inference run` is asked to stop: one line, the right exit code, nothing half-written, and a rerun finishes."""

import signal
from pathlib import Path

import pytest

from inference.models.registry import Checkpoint
from tests.inference.engine.runs import BATCH, contents
from tests.inference.engine.tiny_slides import section, write_slide
from tests.interrupting import Ended, left_over, run_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

N_SLIDES = 4


class Runs:
    """The command on the same slides, each time into a store of its own choice."""

    def __init__(self, checkpoint: Checkpoint, folder: Path) -> None:
        self.folder, self._model = folder, str(checkpoint.path)
        for number in range(N_SLIDES):
            write_slide(folder / "slides" / f"{number}.svs", section(seed=number))

    def __call__(self, out: Path, *signals: signal.Signals) -> Ended:
        arguments = ["inference.cli", "run", str(self.folder / "slides"), "--model", self._model, "--out", str(out)]
        arguments += ["--batch-size", str(BATCH)]
        return run_until(arguments, out.parent / "scratch", {}, *signals, at=lambda line: line.startswith("ok "))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory, demo_checkpoint: Checkpoint) -> Runs:
    return Runs(demo_checkpoint, tmp_path_factory.mktemp("runs"))


@pytest.fixture(scope="module")
def undisturbed(runs: Runs) -> dict[str, bytes]:
    """Every result of a run that nobody interrupts."""
    assert runs(runs.folder / "whole").code == 0
    return results(runs.folder / "whole")


def results(store: Path) -> dict[str, bytes]:
    return {name: data for name, data in contents(store).items() if not name.endswith(".html")}


@pytest.mark.parametrize(
    ("signals", "code"),
    [
        ([signal.SIGINT], 130),
        ([signal.SIGTERM], 143),
        # `timeout` and make pass a signal on that the process got already.
        ([signal.SIGTERM, signal.SIGTERM], 143),
        ([signal.SIGINT, signal.SIGTERM], 130),
    ],
    ids=str,
)
def test_it_says_so_in_one_line_leaves_nothing_half_done_and_a_rerun_gives_the_same_bytes(
    signals: list[signal.Signals], code: int, runs: Runs, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    ended = runs(out, *signals)
    *done, last = ended.lines
    assert all(line.startswith("ok ") for line in done), ended.lines
    assert len(done) < N_SLIDES
    assert last == f"interrupted after {len(done)} of {N_SLIDES} slides; run the same command again to continue"
    assert ended.code == code
    assert ended.scratch == []
    assert left_over(out) == []
    again = runs(out)
    assert again.code == 0
    assert sum(line.endswith("done before") for line in again.lines) >= len(done)
    assert results(out) == undisturbed
