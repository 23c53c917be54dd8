"""A slide through the stages, and a cohort through the slides: one bad slide never costs another."""

import logging
import traceback
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Self

from inference.engine.job import Draft, Progress, SlideJob, StageResult
from inference.engine.model import EngineModel
from inference.engine.predict import predict_tiles
from inference.engine.recipes import Addresses
from inference.engine.settings import STAGES, Settings, Stage
from inference.engine.summarise import draw_heatmap, pool_features, summarise_predictions
from inference.engine.survey import plan_tiles, survey_slide
from inference.engine.tissue_model import find_tissue_model
from inference.errors import Broken, DamagedResult, InferenceError, Overloaded, PartitionBusy, WithdrawnResult
from inference.models.registry import Checkpoint
from inference.models.spec import HeatmapSpec, ModelSpec
from inference.slides.discovery import SlideRef
from inference.store.store import Address, FailureRecord, Store

log = logging.getLogger(__name__)

SlideStatus = Literal["ok", "ok with failures", "empty", "busy", "failed"]


@dataclass(frozen=True, repr=False)
class SlideOutcome:
    """What became of one slide: the results that are in the store, and the error that ended it, if one did."""

    ref: SlideRef
    results: tuple[StageResult, ...]
    error: InferenceError | None = None

    @property
    def status(self) -> SlideStatus:
        if self.error is not None:
            return "busy" if isinstance(self.error, PartitionBusy) else "failed"
        found = {result.manifest.status for result in self.results}
        return "empty" if "empty" in found else "ok with failures" if "ok with failures" in found else "ok"

    @property
    def reused(self) -> bool:
        """Everything asked for was in the store already."""
        return self.error is None and all(result.reused for result in self.results)

    def __repr__(self) -> str:
        what = [f"{self.ref.name}: {self.error.message if self.error else self.status}"]
        what += [f"  {result.stage:<11}{result.folder}" for result in self.results]
        return "\n".join(what)


class Chain:
    """Takes slides through the chosen stages of the chosen models. Each model is loaded once, when first needed.

    Args:
        checkpoints: the models; their tiles share one result where their tiling is the same.
        heatmaps: what to draw per model name, instead of what its spec says.
    """

    def __init__(
        self,
        store: Store,
        checkpoints: Sequence[Checkpoint],
        settings: Settings,
        *,
        heatmaps: dict[str, tuple[HeatmapSpec, ...]] | None = None,
    ) -> None:
        self.store, self.settings = store, settings
        self.models = tuple(EngineModel(checkpoint, settings) for checkpoint in checkpoints)
        self.tissue_model = find_tissue_model(settings)
        self._heatmaps = heatmaps or {}

    def run(
        self, refs: Iterable[SlideRef], stages: Collection[Stage] = STAGES, progress: Progress | None = None
    ) -> Iterator[SlideOutcome]:
        """Process slide after slide, yielding each outcome as it is known.

        A slide's own failure is part of its outcome and is recorded in the store.

        Raises:
            Broken: the store, the source or the device failed; no slide is to blame and none is recorded.
        """
        for ref in refs:
            yield self.run_slide(ref, stages, progress)

    def run_slide(
        self, ref: SlideRef, stages: Collection[Stage] = STAGES, progress: Progress | None = None
    ) -> SlideOutcome:
        """Process one slide; see `run`."""
        results: list[StageResult] = []
        try:
            with SlideJob(ref, self.store, self.settings, progress or _silent, self.tissue_model) as job:
                self._run_steps(job, stages, results)
        except DamagedResult as error:
            return self._failed(ref, results, error)
        except Broken:
            raise
        except InferenceError as error:
            return self._failed(ref, results, error)
        except Exception as error:  # noqa: BLE001 - a fault of ours or a library's costs this slide, not the others
            return self._failed(ref, results, _unexpected(ref, error))
        self.store.clear_failure(ref.key)
        return SlideOutcome(ref, tuple(results))

    def close(self) -> None:
        """Let every model go."""
        for model in (*self.models, self.tissue_model):
            if model is not None:
                model.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def heatmaps_of(self, spec: ModelSpec) -> tuple[HeatmapSpec, ...]:
        """What is drawn for a model: as configured, else as its spec says, else its first prediction on 0 to 1."""
        if spec.model_name in self._heatmaps:
            return self._heatmaps[spec.model_name]
        return spec.heatmaps or tuple(HeatmapSpec(output=name) for name in spec.prediction_names[:1])

    def addresses(self, key: str) -> Iterator[tuple[EngineModel, Addresses]]:
        """Where each model's results on a slide lie."""
        tissue = self.tissue_model.manifest if self.tissue_model else None
        for model in self.models:
            yield model, Addresses(key, model.manifest, self.settings, tissue)

    def _steps(self, job: SlideJob, stages: Collection[Stage]) -> Iterator[Callable[[], StageResult]]:
        """The chosen stages in the order of their needs; what models share comes once."""
        seen: set[str] = set()
        for model, at in self.addresses(job.ref.key):
            for step in _model_steps(job, model, at, self.heatmaps_of(model.spec)):
                if step.stage in stages and step.folder not in seen:
                    seen.add(step.folder)
                    yield step.run

    def _run_steps(self, job: SlideJob, stages: Collection[Stage], results: list[StageResult]) -> None:
        """Every step in turn into `results`, which keeps what is done when one raises.

        Where a stored result turned out to be damaged, it is computed again, and what is made from it goes on.
        """
        steps = list(self._steps(job, stages))
        for left in reversed(range(len(steps) + 1)):
            results.clear()
            try:
                results.extend(step() for step in steps)
            except WithdrawnResult as error:
                if not left:  # what was just written is damaged again
                    raise
                log.warning("%s", error.message)
            else:
                return

    def _failed(self, ref: SlideRef, results: list[StageResult], error: InferenceError) -> SlideOutcome:
        if isinstance(error, Overloaded):  # another process is at it, or this one is closing: nothing about the slide
            return SlideOutcome(ref, tuple(results), error)
        failures = error.fields.get("failures", [])
        assert isinstance(failures, list), "tile failures travel as a list"
        examples = tuple((failed.code, 1, f"row {k[0]}, col {k[1]} at ({k[2]}, {k[3]})") for k, failed in failures[:20])
        stage = results[-1].stage if results else "open"
        record = FailureRecord(
            slide_key=ref.key,
            code=error.code,
            message=error.message,
            retryable=error.retryable,
            stage=f"after {stage}" if results else stage,
            tiles=examples,
        )
        self.store.record_failure(record)
        return SlideOutcome(ref, tuple(results), error)


@dataclass(frozen=True)
class _Step:
    """A stage of one model on the slide at hand, and the call that brings its result about."""

    stage: Stage
    folder: str
    run: Callable[[], StageResult]


def _model_steps(
    job: SlideJob, model: EngineModel, at: Addresses, heatmaps: tuple[HeatmapSpec, ...]
) -> Iterator[_Step]:
    """A model's stages in the order of their needs."""
    spec, name = model.spec, model.spec.model_name

    def step(stage: Stage, address: Address, compute: Callable[[Path], Draft], owner: str | None = name) -> _Step:
        return _Step(stage, address.folder, partial(job.ensure, stage, address, compute, model=owner))

    yield step("info", at.info, partial(survey_slide, job), None)
    yield step("tiles", at.tiles, partial(plan_tiles, job, spec, at), None)
    yield step("predict", at.predict, partial(predict_tiles, job, model, at))
    if spec.embedding_dim:
        yield step("features", at.features, partial(pool_features, job, spec, at))
    if spec.prediction_names:
        yield step("prediction", at.prediction, partial(summarise_predictions, job, spec, at))
    for heatmap in heatmaps:
        yield step("heatmap", at.heatmap(heatmap), partial(draw_heatmap, job, spec, at, heatmap))


def _unexpected(ref: SlideRef, error: Exception) -> InferenceError:
    """A fault nobody foresaw, logged with where it happened; its text may name files, so a hidden slide's is kept."""
    kind = type(error).__name__
    if ref.hidden:
        log.error("%s: unexpected %s\n%s", ref.name, kind, "".join(traceback.format_tb(error.__traceback__)))
        return InferenceError(f"{ref.name}: unexpected {kind}; please report it")
    log.error("%s: unexpected failure", ref.name, exc_info=error)
    text = (str(error).splitlines() or [""])[0][:200]
    return InferenceError(f"{ref.name}: unexpected {kind}: {text}; please report it")


def _silent(_key: str, _stage: Stage, _done: int, _total: int) -> None:
    """Progress nobody watches."""
