"""What a slide is, how it would be read, and what would fail: found out without a model and without a store."""

import time
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from inference.engine.predict import MAX_MISSING
from inference.engine.settings import Settings
from inference.errors import ConfigError, SlideError, SourceUnavailable, TileFailure, UnknownResolution
from inference.models.spec import TileSpec
from inference.slides.discovery import SlideRef
from inference.slides.objects import fetch, refreshed
from inference.slides.opening import open_slide
from inference.slides.overview import Overview, read_overview
from inference.slides.quality import percent, slide_quality
from inference.slides.readahead import ReadAhead
from inference.slides.reader import SlideReader
from inference.slides.resolution import ReadPlan, SlideResolution, plan_reading, resolve_mpp
from inference.slides.sampling import TileSampler, make_grid
from inference.slides.tissue import appearance, coverage

DEFAULT_TILE = TileSpec(size=224, stride=224, resolution=0.5)
"""What most models take."""

SAMPLE = 256
"""Planned tiles that are read to see whether they can be."""

_FORMATS = {
    "aperio": "Aperio SVS",
    "dicom": "DICOM whole-slide image",
    "generic-tiff": "tiled TIFF",
    "hamamatsu": "Hamamatsu",
    "leica": "Leica SCN",
    "mirax": "3DHISTECH MRXS",
    "ome-tiff": "OME-TIFF",
    "philips": "Philips TIFF",
    "sakura": "Sakura SVSLIDE",
    "tiff": "tiled TIFF",
    "trestle": "Trestle TIFF",
    "ventana": "Ventana BIF",
    "zeiss": "Zeiss CZI",
}
_MUCH_MISSING = 0.01


@dataclass
class Findings:
    """What was found of one slide, as labelled lines in the order in which they were found.

    Attributes:
        refused: why the slide would fail as a whole, with the remedy.
        warnings: what would go otherwise than expected.
    """

    name: str
    lines: list[tuple[str, str]] = field(default_factory=list)
    refused: str | None = None
    warnings: list[str] = field(default_factory=list)

    def say(self, label: str, text: str) -> None:
        self.lines.append((label, text))


def examine(
    ref: SlideRef, settings: Settings, tile: TileSpec = DEFAULT_TILE, *, sample: int | None = SAMPLE
) -> Findings:
    """Look at a slide as a run would.

    Args:
        tile: the tiles that would be cut.
        sample: how many of them to read, spread over the slide; None for all.

    Raises:
        SourceUnavailable: its folder, share or bucket cannot be reached; that says nothing of the slide.
    """
    found = Findings(ref.name)
    try:
        ref = refreshed(ref)
        with fetch(ref) or nullcontext(), open_slide(ref.path, ref.name, ref.files) as reader:
            _describe(found, ref, reader)
            _examine(found, ref, reader, settings, tile, sample)
    except SourceUnavailable:
        raise
    except (SlideError, ConfigError) as error:
        found.refused = error.message.removeprefix(f"{ref.name}: ")
    return found


def _describe(found: Findings, ref: SlideRef, reader: SlideReader) -> None:
    size = sum(file.stat().st_size for file in ref.files)
    files = f" in {len(ref.files)} files" if len(ref.files) > 1 else ""
    found.say("format", f"{_FORMATS.get(reader.vendor, reader.vendor)}, {_bytes(size)}{files}")
    sizes = [f"{width:,} x {height:,}" for width, height in reader.level_sizes]
    found.say("levels", f"{len(sizes)}: {', '.join(sizes)} pixels")
    found.say("reader", reader.kind)
    found.say("because", reader.reason)
    found.say("colours", "as stored; --icc would use its ICC profile" if reader.icc_profile else "without ICC profile")


def _examine(
    found: Findings, ref: SlideRef, reader: SlideReader, settings: Settings, tile: TileSpec, sample: int | None
) -> None:
    unknown: UnknownResolution | None = None
    try:
        resolution = resolve_mpp(
            ref.name, reader.mpp, reader.objective_power, cohort_mpp=ref.mpp, fallback_mpp=settings.mpp
        )
        found.say("resolution", _resolution(resolution, reader.objective_power))
    except UnknownResolution as error:
        unknown = error
        power = reader.objective_power
        guess = 10 / power if power else tile.resolution
        resolution = SlideResolution((guess, guess), "--mpp")
        why = f"as its {power:g}x objective suggests" if power else "a guess"
        found.say("resolution", f"unknown; {guess:.3g} µm/px, {why}, for what follows")
    overview = read_overview(reader, resolution.mpp)
    tissue = _look(found, overview)
    if unknown:
        raise unknown
    _tile(found, ref, reader, resolution, (settings, tile, sample), (overview, tissue))


def _look(found: Findings, overview: Overview) -> NDArray[np.bool_]:
    """Say what is seen on the slide; returns where tissue is."""
    seen = appearance(overview)
    quality = slide_quality(overview, seen, seen.tissue)
    glass = max(0.0, 1 - quality.tissue - quality.pen - quality.missing)
    parts = {"glass" if quality.bright_field else "dark": glass, "ink": quality.pen, "without pixels": quality.missing}
    rest = ", ".join(f"{percent(share)} {name}" for name, share in parts.items() if share > 0)
    found.say("tissue", f"{percent(quality.tissue)} of the slide; the rest is {rest or 'nothing'}")
    found.warnings += quality.warnings()
    if quality.missing >= _MUCH_MISSING:
        found.warnings.append(f"{percent(quality.missing)} of the slide has no pixels, which counts as background")
    return seen.tissue


def _tile(
    found: Findings,
    ref: SlideRef,
    reader: SlideReader,
    resolution: SlideResolution,
    wanted: tuple[Settings, TileSpec, int | None],
    looked: tuple[Overview, NDArray[np.bool_]],
) -> None:
    settings, tile, sample = wanted
    plan = plan_reading(
        ref.name,
        reader.level_sizes,
        resolution.mpp,
        tile.resolution,
        kernel=tile.kernel,
        allow_upsampling=settings.allow_upsampling,
    )
    stride = settings.stride_px or tile.stride
    grid = replace(make_grid(reader.level_sizes[0], resolution.mpp, plan, tile.size, stride), edge=settings.edge)
    shares = coverage(*looked, grid)
    rows, cols = (index[shares.planned(settings.min_tissue)] for index in grid.cells())
    found.say("reading", _plan(plan))
    found.say(
        "tiles",
        f"of {tile.size} px at {tile.resolution:g} µm/px: {grid.n_rows * grid.n_cols:,} in the grid, "
        f"{len(rows):,} with tissue",
    )
    if len(rows):
        _read(found, TileSampler(reader, plan, grid, *_spread(rows, cols, sample)), len(rows), settings)
    else:
        why = "it is smaller than one" if not grid.n_rows * grid.n_cols else "none has tissue"
        found.warnings.append(f"no tile would be run, since {why}: the slide would finish with zero tiles")


def _spread(
    rows: NDArray[np.int32],
    cols: NDArray[np.int32],
    count: int | None,
) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """At most so many cells, evenly spread, in order."""
    chosen = np.unique(np.linspace(0, len(rows) - 1, min(count or len(rows), len(rows))).astype(np.intp))
    return rows[chosen], cols[chosen]


def _read(found: Findings, sampler: TileSampler, planned: int, settings: Settings) -> None:
    """Read the chosen tiles and say how fast, and which fail."""
    clock = time.monotonic()
    threads = settings.readers
    results = list(ReadAhead(lambda i: _problem(sampler, i), len(sampler), threads=threads, ahead=len(sampler)))
    rate = len(sampler) / max(time.monotonic() - clock, 1e-9)
    which = "all" if len(sampler) == planned else f"{len(sampler)} of them, spread over the slide,"
    found.say("read", f"{which} with {threads} threads: {rate:.0f} tiles/s on this machine")
    bad = [(index, problem) for index, problem in enumerate(results) if problem]
    if bad:
        x, y = (int(value) for value in sampler.positions[:, bad[0][0]])
        tiles = "1 tile" if len(bad) == 1 else f"{len(bad)} tiles"
        found.warnings.append(f"{tiles} would fail, the first at ({x}, {y}): {bad[0][1]}")
    share = len(bad) / len(sampler)
    if len(bad) == len(sampler) or share * planned > settings.failure_budget(planned):
        raise SlideError(f"{percent(share)} of the tiles cannot be read, more than a slide may lose: copy it again")


def _problem(sampler: TileSampler, index: int) -> str | None:
    try:
        missing = sampler.read(index).missing_fraction
    except TileFailure as error:
        return error.message
    return f"{missing:.0%} of the tile has no pixels in the slide" if missing > MAX_MISSING else None


def _resolution(resolution: SlideResolution, power: float | None) -> str:
    x, y = resolution.mpp
    value = f"{x:g} µm/px" if x == y else f"{x:g} x {y:g} µm/px"
    source = {"slide": "as the slide states", "cohort file": "from the cohort file", "--mpp": "from --mpp"}
    return f"{value}, {source[resolution.source]}" + (f" ({power:g}x objective)" if power else "")


def _plan(plan: ReadPlan) -> str:
    text = f"level {plan.level}" + (f" reduced exactly by {plan.reduction}" if plan.reduction > 1 else "")
    if plan.resample == "none":
        return text if plan.reduction > 1 else f"{text}, pixel for pixel"
    x, y = plan.mpp
    how = "enlarged" if plan.resample == "bilinear" else f"resampled by the {plan.resample} mean"
    return f"{text}, then {how} to {x:g}" + ("" if x == y else f" x {y:g}") + " µm/px"


def _bytes(size: float) -> str:
    for unit in ("bytes", "kB", "MB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "bytes" or size >= 10 else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:.1f} GB"
