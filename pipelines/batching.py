"""A batch of slides in one step: each slide on its own, skipped if done, and every result told to Dagster.

Dagster has no "this partition of the batch failed". So a batch with failures logs a materialisation for each
result that is in the store and then fails, naming the bad slides; a batch without yields one result per asset.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import dagster as dg

from inference.engine.chain import Chain, SlideOutcome
from inference.engine.job import StageResult
from inference.engine.settings import Stage
from inference.errors import Broken, ConfigError, InferenceError, PartitionBusy
from inference.slides.discovery import SlideRef
from pipelines.metadata import stage_metadata

PROGRESS_EVERY_S = 10.0

FAILED_SLIDES = "failed_slides"
"""Metadata of a batch that failed: key, code and reason of each slide without a full result."""

AssetsOf = Callable[[StageResult], Sequence[dg.AssetKey]]
"""The asset keys that one stage result stands for."""


@dataclass(frozen=True)
class FailedSlide:
    """A slide of the batch that has no full result."""

    key: str
    error: InferenceError


def run_batch(
    context: dg.AssetExecutionContext,
    chain: Chain,
    slides: Mapping[str, SlideRef],
    stages: Collection[Stage],
    assets: Sequence[dg.AssetKey],
    assets_of: AssetsOf,
) -> Iterator[dg.MaterializeResult[None]]:
    """Run the context's partitions through the stages and report to Dagster; results lie in the store already.

    Args:
        assets: what was selected, in the order of needs, which Dagster insists on.

    Raises:
        dagster.Failure: naming each slide that failed and why. Retried only if a retry can help.
    """
    committed: list[tuple[str, StageResult]] = []
    failed: list[FailedSlide] = []
    try:
        for key in context.partition_keys:
            if key not in slides:
                text = f"{key}: no such slide in the inventory; materialise slide_inventory, or check the source"
                failed.append(FailedSlide(key, ConfigError(text)))
                continue
            outcome = chain.run_slide(slides[key], stages, _Progress(context))
            committed += [(key, result) for result in outcome.results]
            _tell(context, outcome)
            if outcome.error is not None:
                failed.append(FailedSlide(key, outcome.error))
    except Broken as error:
        for event in _events(committed, assets, assets_of):
            context.log_event(event)
        # `from None`: Dagster would write the causes into its event log, with the paths in their texts.
        text = f"stopped, no slide is to blame: {error.message}"
        raise dg.Failure(text, allow_retries=error.retryable) from None
    if failed:
        for event in _events(committed, assets, assets_of):
            context.log_event(event)
        raise _failure(failed, len(context.partition_keys))
    yield from _results(context, _events(committed, assets, assets_of), assets)


def _results(
    context: dg.AssetExecutionContext, events: Iterable[dg.AssetMaterialization], assets: Sequence[dg.AssetKey]
) -> Iterator[dg.MaterializeResult[None]]:
    """One result per selected asset, each slide's own metadata on its partition."""
    for event in events:
        context.add_asset_metadata(event.metadata, asset_key=event.asset_key, partition_key=event.partition)
    for asset in assets:
        yield dg.MaterializeResult(asset_key=asset)


def _events(
    committed: list[tuple[str, StageResult]], assets: Sequence[dg.AssetKey], assets_of: AssetsOf
) -> Iterator[dg.AssetMaterialization]:
    """What the store holds of the selected assets, slide by slide."""
    for key, result in committed:
        metadata = stage_metadata(result)
        for asset in assets_of(result):
            if asset in assets:
                yield dg.AssetMaterialization(asset_key=asset, partition=key, metadata=metadata)


def _failure(failed: list[FailedSlide], of: int) -> dg.Failure:
    lines = "; ".join(slide.error.message for slide in failed[:5])
    more = f"; and {len(failed) - 5} more" if len(failed) > 5 else ""
    busy = sum(isinstance(slide.error, PartitionBusy) for slide in failed)
    bad = len(failed) - busy
    found = f"{bad} of {of} slides failed{f', {busy} busy' * bool(busy)}" if bad else f"{busy} of {of} slides busy"
    records = [dg.TableRecord({"slide": s.key, "code": s.error.code, "reason": s.error.message[:300]}) for s in failed]
    return dg.Failure(
        f"{found}: {lines}{more}",
        metadata={FAILED_SLIDES: dg.MetadataValue.table(records)},
        allow_retries=any(slide.error.retryable for slide in failed),
    )


def _tell(context: dg.AssetExecutionContext, outcome: SlideOutcome) -> None:
    if outcome.error is not None:
        reason = outcome.error.message.removeprefix(f"{outcome.ref.name}: ")
        context.log.error("%s: %s: %s: %s", outcome.ref.key, outcome.status, outcome.error.code, reason)
    elif outcome.reused:
        context.log.info("%s: already done", outcome.ref.key)
    else:
        counts = [r.manifest.counts for r in outcome.results if r.stage == "predict"]
        tiles = f", {counts[0].ok} of {counts[0].planned} tiles" if counts else ""
        context.log.info("%s: %s%s", outcome.ref.key, outcome.status, tiles)


class _Progress:
    """Says how far a slide is, every few seconds, with the rate and what is left."""

    def __init__(self, context: dg.AssetExecutionContext) -> None:
        self._log = context.log
        self._started = self._told = time.monotonic()

    def __call__(self, key: str, _stage: Stage, done: int, total: int, /) -> None:
        now = time.monotonic()
        if now - self._told < PROGRESS_EVERY_S:
            return
        self._told = now
        rate = done / (now - self._started)
        self._log.info("%s: %d of %d tiles, %.0f tiles/s, %.0f s left", key, done, total, rate, (total - done) / rate)
