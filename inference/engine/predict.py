"""The stage that runs the model: reader threads feed the batch queue, results go to disk in tile order."""

import time
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue

from inference.engine.job import Draft, SlideJob
from inference.engine.model import EngineModel
from inference.engine.recipes import Addresses, execution
from inference.engine.results import FailedTile, ResultTables, TileStage
from inference.engine.survey import read_tiles
from inference.errors import (
    BadRequest,
    MissingPixels,
    NonFiniteOutput,
    TileFailure,
    TooManyTileFailures,
)
from inference.models.sample import PreparedSample, TileOutput
from inference.slides.colour import ToSrgb
from inference.slides.quality import FocusTally, focus
from inference.slides.readahead import ReadAhead
from inference.slides.sampling import TileSampler
from inference.store.manifest import Counts

MAX_MISSING = 0.5
"""Share of a tile that may have no pixels in the slide before the tile fails."""


def predict_tiles(job: SlideJob, model: EngineModel, at: Addresses, work: Path) -> Draft:
    """Stage `predict`: one pass over the planned tiles for every head of the model.

    Raises:
        TooManyTileFailures: beyond the failure budget, or no tile went well.
    """
    row, col, x, y, tissue = read_tiles(job.require(at.tiles, "predict"))
    grid = job.grid(model.spec)
    buffer_bytes = job.settings.read_buffer_mb << 20
    sampler = TileSampler(job.reader, job.plan(model.spec), grid, row, col, buffer_bytes, _colours(job))
    feed = _Feed(job, model, sampler)
    forward_before = model.scheduler.statistics().forward_s if len(row) else 0.0
    clock = time.monotonic()
    about: dict[str, JsonValue] = {"slide_key": job.ref.key, "recipe_digest": at.predict.digest}
    sharpness = FocusTally()
    with ResultTables(work, model.spec, about) as tables, closing(feed.results()) as results:
        for i, (result, tile_focus) in enumerate(results):
            tables.add((int(row[i]), int(col[i]), int(x[i]), int(y[i])), result, tile_focus)
            if tile_focus is not None:
                sharpness.add(tile_focus, float(tissue[i]))
            job.progress(job.ref.key, "predict", i + 1, len(row))
    counts = Counts(grid=grid.n_rows * grid.n_cols, planned=len(row), ok=tables.n_ok, failed=len(row) - tables.n_ok)
    _check_budget(job, counts, tables.failures)
    seconds = time.monotonic() - clock
    forward_s = model.scheduler.statistics().forward_s - forward_before if len(row) else 0.0
    return Draft(
        status="empty" if not len(row) else "ok with failures" if counts.failed else "ok",
        reason=_tiles_reason(job, at) if not len(row) else None,
        counts=counts,
        summary={"failed_tiles": tables.failed_summary(), "quality": {**sharpness.summary()}, **_icc_summary(job)},
        execution=execution(model.manifest, job.settings, job.reader.kind)
        | ({"rows_independent": model.server.rows_independent} if len(row) else {}),
        timings=_timings(len(row), seconds, feed.read_s / job.settings.readers, forward_s, tables.write_s),
    )


@dataclass(frozen=True)
class _Read:
    """A tile that was read, or why it was not."""

    sample: PreparedSample | None
    failure: FailedTile | None
    focus: float | None
    seconds: float


class _Feed:
    """Reads tiles ahead in threads, submits them in order, and hands back results in order."""

    def __init__(self, job: SlideJob, model: EngineModel, sampler: TileSampler) -> None:
        self._job, self._model, self._sampler = job, model, sampler
        self.read_s = 0.0

    def results(self) -> Generator[tuple[TileOutput | FailedTile, float | None], None, None]:
        """One result per tile, and its focus if it was read. A failed tile touches no other; what breaks all is raised.

        Closing it early ends the reading and takes back what is queued.
        """
        settings = self._job.settings
        ahead = 2 * settings.batch_size + settings.readers
        in_flight: deque[tuple[Future[TileOutput] | FailedTile, float | None]] = deque()
        reads = ReadAhead(
            self._read,
            len(self._sampler),
            threads=settings.readers,
            ahead=ahead,
            stalled_after_s=self._job.stalled_after_s,
        )
        with closing(iter(reads)) as found:
            try:
                for read in found:
                    in_flight.append((self._submit(read), read.focus))
                    if len(in_flight) > 2 * ahead:
                        yield _outcome(*in_flight.popleft())
                if in_flight:
                    self._model.scheduler.flush()
                while in_flight:
                    yield _outcome(*in_flight.popleft())
            finally:
                # Taken back first: while the readers end, the model must not go on with what nobody waits for.
                for waiting, _ in in_flight:
                    if isinstance(waiting, Future):
                        waiting.cancel()

    def _read(self, index: int) -> _Read:
        clock = time.monotonic()
        stage: TileStage = "read"
        sharpness = None
        try:
            tile = self._sampler.read(index)
            if tile.missing_fraction > MAX_MISSING:
                raise MissingPixels(f"{tile.missing_fraction:.0%} of the tile has no pixels in the slide")
            sharpness = focus(tile.rgb)
            stage = "prepare"
            sample = self._model.server.prepare_tile(tile.rgb)
        except (TileFailure, BadRequest) as error:
            return _Read(None, FailedTile.of(error, stage), sharpness, time.monotonic() - clock)
        return _Read(sample, None, sharpness, time.monotonic() - clock)

    def _submit(self, read: _Read) -> Future[TileOutput] | FailedTile:
        self.read_s += read.seconds
        if read.sample is None:
            assert read.failure is not None, "a read has a sample or a failure"
            return read.failure
        return self._model.submit(read.sample)


def _outcome(
    item: Future[TileOutput] | FailedTile, sharpness: float | None
) -> tuple[TileOutput | FailedTile, float | None]:
    if isinstance(item, FailedTile):
        return item, sharpness
    try:
        return item.result(), sharpness
    except TileFailure as error:
        return FailedTile.of(error, "output" if isinstance(error, NonFiniteOutput) else "forward"), sharpness


def _colours(job: SlideJob) -> ToSrgb | None:
    """What is done to the colours of the slide's tiles."""
    profile = job.reader.icc_profile
    return ToSrgb(profile, job.ref.name) if job.settings.icc and profile else None


def _icc_summary(job: SlideJob) -> dict[str, JsonValue]:
    """What came of the wish for sRGB."""
    if not job.settings.icc:
        return {}
    return {"icc": "converted to sRGB" if job.reader.icc_profile else "the slide has no ICC profile: colours as stored"}


def _check_budget(job: SlideJob, counts: Counts, failures: list[tuple[tuple[int, int, int, int], FailedTile]]) -> None:
    budget = job.settings.failure_budget(counts.planned)
    if counts.failed <= budget and (counts.ok or not counts.planned):
        return
    (row, col, x, y), first = failures[0]
    raise TooManyTileFailures(
        f"{job.ref.name}: {counts.failed} of {counts.planned} tiles failed (allowed: {budget}); the first: row {row}, "
        f"col {col} at ({x}, {y}), {first.stage}: {first.message}",
        failures=failures,
    )


def _tiles_reason(job: SlideJob, at: Addresses) -> str | None:
    manifest = job.store.read(at.tiles)
    return manifest.reason if manifest else None


def _timings(tiles: int, seconds: float, reading: float, forward: float, writing: float) -> dict[str, JsonValue]:
    """Seconds each stage was busy, the rate, and the stage that bounds it."""
    busy = {"reading": reading, "forward": forward, "writing": writing}
    found: dict[str, JsonValue] = {f"{name}_s": round(s, 3) for name, s in busy.items()}
    if tiles:
        found |= {"tiles_per_s": round(tiles / max(seconds, 1e-9), 1), "bound_by": max(busy, key=lambda k: busy[k])}
    return found
