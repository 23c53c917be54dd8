"""`make demo` is asked to stop: one line, no further batch, nothing half-written, and a rerun finishes."""

import signal
from pathlib import Path

import pytest

from inference.models.registry import Checkpoint
from pipelines.definitions import BATCH
from tests.inference.engine.runs import contents
from tests.inference.engine.tiny_slides import section, write_slide
from tests.interrupting import Ended, left_over, run_until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

N_SLIDES = BATCH + 2


class Demos:
    """The demo on the same slides, more than one batch of them, under an output folder of its own choice."""

    def __init__(self, checkpoint: Checkpoint, folder: Path) -> None:
        self.folder, self._models = folder, checkpoint.path.parent
        for number in range(N_SLIDES):
            write_slide(folder / "slides" / f"{number:02}.svs", section(2, 2, seed=number))

    def __call__(self, out: Path, *signals: signal.Signals) -> Ended:
        arguments = ["pipelines.demo", "--slides", str(self.folder / "slides"), "--out", str(out)]
        scratch, environment = out.parent / "scratch", {"SLIDE_MODEL_CACHE": str(self._models)}
        return run_until(arguments, scratch, environment, *signals, at=lambda line: ": ok" in line)

    def store(self, out: Path) -> Path:
        return out / "runs" / "slides" / "store"


@pytest.fixture(scope="module")
def demos(tmp_path_factory: pytest.TempPathFactory, demo_checkpoint: Checkpoint) -> Demos:
    return Demos(demo_checkpoint, tmp_path_factory.mktemp("demos"))


@pytest.fixture(scope="module")
def undisturbed(demos: Demos) -> dict[str, bytes]:
    """Every result of a run that nobody interrupts."""
    assert demos(demos.folder / "whole").code == 0
    return contents(demos.store(demos.folder / "whole"))


@pytest.mark.parametrize(
    ("signals", "code"),
    [([signal.SIGINT], 130), ([signal.SIGTERM, signal.SIGTERM], 143)],
    ids=str,
)
def test_it_says_so_in_one_line_starts_no_other_batch_and_a_rerun_gives_the_same_bytes(
    signals: list[signal.Signals], code: int, demos: Demos, undisturbed: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    ended = demos(out, *signals)
    assert ended.lines[-1] == "interrupted: finished slides are kept; run the same command again to continue"
    done = [line for line in ended.lines if ": ok" in line]
    assert 1 <= len(done) < BATCH
    assert ended.code == code
    assert ended.scratch == []
    assert left_over(demos.store(out)) == []
    assert not list(demos.store(out).glob("predict/*/17-*"))
    again = demos(out)
    assert again.code == 0
    assert sum(line.endswith("already done") for line in again.lines) >= len(done)
    assert contents(demos.store(out)) == undisturbed
