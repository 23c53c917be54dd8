"""Running slides in tests, and looking at everything a store holds."""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from inference.engine.chain import Chain, SlideOutcome
from inference.engine.job import Progress, StageResult
from inference.engine.settings import STAGES, Settings, Stage
from inference.errors import DeviceBroken
from inference.models.registry import Checkpoint
from inference.models.runtime import Runtime
from inference.models.sample import NO_EXTRAS
from inference.slides.discovery import SlideRef
from inference.store.store import Store
from tests.inference.engine.tiny_slides import POISON

BATCH = 8
ALL_STAGES = list(STAGES)


def make_chain(root: Path, checkpoint: Checkpoint, **settings: object) -> Chain:
    """A chain over one model with small batches."""
    options: dict[str, object] = {"batch_size": BATCH, "readers": 2} | settings
    return Chain(Store(root), [checkpoint], Settings(**options))  # type: ignore[arg-type]


def run(
    root: Path,
    checkpoint: Checkpoint,
    refs: Sequence[SlideRef],
    *,
    stages: Collection[Stage] = STAGES,
    progress: Progress | None = None,
    **settings: object,
) -> list[SlideOutcome]:
    """Every slide through the stages with a fresh chain."""
    with make_chain(root, checkpoint, **settings) as chain:
        return list(chain.run(refs, stages, progress))


def result(outcome: SlideOutcome, stage: Stage) -> StageResult:
    (found,) = [r for r in outcome.results if r.stage == stage]
    return found


def stages_of(outcome: SlideOutcome, *, reused: bool) -> list[str]:
    return [r.stage for r in outcome.results if r.reused is reused]


def contents(root: Path) -> dict[str, bytes]:
    """Every file of every result by its path in the store; manifests without what may differ between runs."""
    found = {}
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        data = path.read_bytes()
        if path.name == "manifest.json":
            manifest = json.loads(data)
            del manifest["run"]
            data = json.dumps(manifest).encode()
        found[path.relative_to(root).as_posix()] = data
    return found


def vectors_of(outcome: SlideOutcome, head: str) -> dict[tuple[int, int], list[float] | None]:
    """A head's vector of every planned tile by row and column, read by plain pyarrow."""
    rows = pq.read_table(result(outcome, "predict").folder / f"{head}s.parquet").to_pylist()
    assert all((row["status"] == "ok") is (row[head] is not None) for row in rows)
    return {(row["row"], row["col"]): row[head] for row in rows}


def failures_of(outcome: SlideOutcome) -> list[dict[str, object]]:
    return pq.read_table(result(outcome, "predict").folder / "failures.parquet").to_pylist()  # type: ignore[no-any-return]


class Scripted:
    """A runtime that answers like another one, but treats tiles in the poison colour as it is told.

    It sees rows as they are batched, so what it does depends on pixels alone.
    """

    def __init__(self, runtime: Runtime, does: str) -> None:
        self._runtime, self._does = runtime, does
        self.kind, self.device = runtime.kind, runtime.device
        self.calls = self.refused = 0

    def run(
        self, batch: NDArray[np.uint8], extras: Mapping[str, NDArray[np.float32]] = NO_EXTRAS
    ) -> tuple[NDArray[np.float32], ...]:
        self.calls += 1
        poison = (batch == np.array(POISON, np.uint8)[None, :, None, None]).all(axis=(1, 2, 3))
        if self._does == "raise" and poison.any():
            raise RuntimeError("poison at 0x7f0012345678 in /tmp/build/model.cpp:12\nand a second line")
        if self._does == "break the device" and poison.any():
            raise DeviceBroken("the device failed: an illegal memory access")
        if self._does.startswith("run out of memory") and poison.any() and (
            self._does.endswith("always") or not self.refused
        ):  # fmt: skip
            self.refused += 1
            raise MemoryError("cannot allocate 12 GiB")
        outputs = tuple(output.copy() for output in self._runtime.run(batch, extras))
        if self._does == "break the contract" and poison.any():
            return (*outputs[:-1], outputs[-1][:, :-1])
        if self._does == "nan":
            outputs[0][poison, 0] = np.nan
        elif self._does == "infinity":
            outputs[-1][poison, -1] = np.inf
        return outputs


def script(chain: Chain, does: str) -> Scripted:
    """Put a scripted runtime under the chain's model."""
    server = chain.models[0].server
    server.runtime = Scripted(server.runtime, does)
    return server.runtime
