"""The command `slide-inference`: the whole job without Dagster."""

import sys
from collections import Counter
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from inference.cli_models import add_model_commands
from inference.cli_slides import add_slide_commands
from inference.console import complain, log_in_lines, named_path, text_path
from inference.engine.chain import Chain, SlideOutcome, SlideStatus
from inference.engine.inventory import read_inventory, write_inventory
from inference.engine.model import require_usable
from inference.engine.report import write_cohort_report
from inference.engine.run import find_slides
from inference.engine.settings import ReaderMode, Settings, Stage
from inference.engine.tissue_model import require_usable_tissue_model
from inference.errors import ArtifactRefused, Broken, CallerError, ConfigError, InferenceError, StoreError, StoreFull
from inference.interrupts import Interrupted, StopRequest
from inference.models.registry import resolve_model
from inference.serving.command import serve
from inference.slides.discovery import Inventory, printable
from inference.slides.grid import EdgePolicy
from inference.slides.roi import check_rois
from inference.store.store import Store

OK, FAILED, BAD_USAGE = 0, 1, 2

STYLE: dict[SlideStatus, str] = {
    "ok": "green",
    "ok with failures": "yellow",
    "empty": "dim",
    "busy": "yellow",
    "failed": "bold red",
}
LABEL_WIDTH = max(map(len, STYLE)) + 2
MAX_NAME_WIDTH = 48

OUT_HELP = "Folder for results; finished ones are reused, report.html shows all."
MPP_HELP = "Level-0 µm/px, used only for slides that state none; a cohort file's mpp column overrides both."
TISSUE_MODEL_HELP = "Segmentation model that finds the tissue, path or name; by colours if not given."
EDGE_HELP = "A slide's rest where no whole tile fits: dropped, padded, or covered by tiles shifted back to the edge."
READER_HELP = "Read in threads, or in processes that are killed where a read hangs; auto: processes on network mounts."
ROI_HELP = (
    "Region to run: GeoJSON (QuPath) in level-0 pixels or a mask image, or a folder with one for each slide, named "
    "after it or its key; a cohort file's roi column overrides it."
)

app = typer.Typer(
    name="slide-inference",
    help="Slide-scale inference for computational pathology.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_out = Console(soft_wrap=True, highlight=False)
_err = Console(stderr=True, soft_wrap=True, highlight=False)


def _version(wanted: bool) -> None:
    if wanted:
        _out.print(version("slide-inference"))
        raise typer.Exit


@app.callback()
def _root(
    _wanted: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Slide-scale inference for computational pathology."""


@app.command()
def run(
    slides: Annotated[
        list[str], typer.Argument(help="Slides, folders, globs or a cohort file (.csv, .parquet); s3:// URLs too.")
    ],
    model: Annotated[list[str], typer.Option(help="Path of a checkpoint (.pt2, .onnx), or a name such as demo.")],
    out: Annotated[Path, typer.Option(parser=named_path, metavar="PATH", help=OUT_HELP)],
    mpp: Annotated[float | None, typer.Option(help=MPP_HELP)] = None,
    allow_upsampling: Annotated[
        bool, typer.Option("--allow-upsampling", help="Also run slides coarser than the model needs.")
    ] = False,
    min_tissue: Annotated[float, typer.Option(help="Share of a tile that must be tissue, 0 to 1.")] = 0.01,
    max_pen: Annotated[float | None, typer.Option(help="Share of a tile that may be ink of a pen, 0 to 1.")] = None,
    tissue_model: Annotated[str | None, typer.Option(help=TISSUE_MODEL_HELP)] = None,
    stride: Annotated[int | None, typer.Option(help="Model pixels between tiles; the model's own by default.")] = None,
    edge: Annotated[EdgePolicy, typer.Option(help=EDGE_HELP)] = "drop",
    roi: Annotated[Path | None, typer.Option(parser=named_path, metavar="PATH", help=ROI_HELP)] = None,
    icc: Annotated[bool, typer.Option("--icc", help="Convert tiles to sRGB by the slide's ICC profile.")] = False,
    reader: Annotated[ReaderMode, typer.Option(help=READER_HELP)] = "auto",
    batch_size: Annotated[int, typer.Option(help="Tiles per forward pass.")] = 64,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps.")] = "cpu",
    root: Annotated[str | None, typer.Option(help="Folder or URL that slide keys are relative to.")] = None,
) -> None:
    """Tile, embed, predict, aggregate and draw every slide.

    Exit code 0 if all went well (failed tiles within the budget included), 1 if a slide failed, another process is at
    work on it or a row of the cohort file names none, 2 for bad usage, 130 or 143 if interrupted; what is finished is
    kept.
    """
    settings = Settings(
        mpp=mpp, allow_upsampling=allow_upsampling, min_tissue=min_tissue, batch_size=batch_size, device=device,
        stride_px=stride, edge=edge, roi=roi, max_pen=max_pen, tissue_model=tissue_model, icc=icc,
        reader=reader,
    )  # fmt: skip
    if len(model) > 1:
        raise ConfigError("--model is given twice: run one model after the other, into the same --out")
    tally, stop = _Tally(), StopRequest()
    try:
        with stop:
            _run(slides, root, model[0], text_path("--out", out), settings, tally, stop)
    except Interrupted:
        complain(f"interrupted{tally.so_far}; run the same command again to continue")
    # Outside: with the last traceback the model goes, which must not outlive the interpreter.
    raise typer.Exit(stop.exit_code or tally.exit_code)


add_slide_commands(app)
add_model_commands(app)
app.command()(serve)


@dataclass
class _Tally:
    """How far a run is, and how it went until there."""

    slides: int = 0
    counts: Counter[SlideStatus] = field(default_factory=Counter)
    stopped_by: Broken | None = None
    rows_without_slide: int = 0

    @property
    def so_far(self) -> str:
        return f" after {self.counts.total()} of {self.slides} slides" if self.slides else ""

    @property
    def exit_code(self) -> int:
        if isinstance(self.stopped_by, ArtifactRefused):  # found out by the first slide that needed the model
            return BAD_USAGE
        incomplete = self.counts["failed"] or self.counts["busy"] or self.rows_without_slide
        return FAILED if self.stopped_by or incomplete else OK


def _run(
    sources: list[str], root: str | None, model: str, out: Path, settings: Settings, tally: _Tally, stop: StopRequest
) -> None:
    # Slides and model are looked at before anything is created.
    inventory = find_slides(sources, root=root)
    checkpoint = resolve_model(model)
    require_usable(checkpoint, settings)
    require_usable_tissue_model(settings)
    check_rois(inventory.slides, settings.roi)
    with Chain(_open_store(out), [checkpoint], settings) as chain:
        write_inventory(chain.store, inventory.slides, keep=True)
        tally.slides = len(inventory.slides)
        tally.rows_without_slide = sum(skipped.code in ("no_match", "plain_image") for skipped in inventory.skipped)
        try:
            _run_all(chain, inventory, tally, stop)
        except Broken as error:
            tally.stopped_by = error
            complain(f"stopped{tally.so_far}: {error.message}")
            return
        report = out / "report.html"
        # Every slide that was ever run into this store: the page must not lose those of an earlier command.
        write_cohort_report(report, "Slide report", chain, read_inventory(chain.store).values())
    _summarise(tally.counts, inventory, report)


def _open_store(out: Path) -> Store:
    """The store, or bad usage where `--out` cannot hold one."""
    try:
        return Store(out)
    except StoreFull:
        raise
    except StoreError as error:
        remedy = "" if "name a folder" in error.message else ": name another folder"
        raise ConfigError(f"--out {out}: {error.message}{remedy}") from error


def _run_all(chain: Chain, inventory: Inventory, tally: _Tally, stop: StopRequest) -> None:
    """Every slide in turn, each with a bar while it runs and a line when it is done."""
    columns = (
        SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
        TextColumn("tiles"), TimeRemainingColumn(),
    )  # fmt: skip
    slides = inventory.slides
    width = _name_width(inventory)
    twice = {name for name, count in Counter(ref.name for ref in slides).items() if count > 1}
    with Progress(*columns, console=_err, transient=True, disable=not _err.is_terminal) as bars:
        for number, ref in enumerate(slides, 1):
            bar = bars.add_task(f"{number}/{len(slides)} {ref.name}", total=None)

            def show(_key: str, _stage: Stage, done: int, total: int, bar: TaskID = bar) -> None:
                stop.check()
                bars.update(bar, completed=done, total=total)

            stop.check()
            outcome = chain.run_slide(ref, progress=show)
            bars.remove_task(bar)
            tally.counts[outcome.status] += 1
            name = f"{ref.name} [{ref.key}]" if ref.name in twice else ref.name
            _err.print(_labelled(outcome.status, f"{name:{width}}  {_about(outcome)}", STYLE[outcome.status]))
            for note in _notes(outcome):
                _err.print(_labelled("", f"note: {note}", "dim"))


def _name_width(inventory: Inventory) -> int:
    return min(MAX_NAME_WIDTH, max(len(ref.name) for ref in inventory.slides))


def _labelled(label: str, text: str, style: str = "") -> Text:
    return Text.assemble((f"{label:{LABEL_WIDTH}}", style), text)


def _about(outcome: SlideOutcome) -> str:
    """What became of a slide and why, without its name."""
    if outcome.error is not None:
        return f"{outcome.error.code}: {outcome.error.message.removeprefix(f'{outcome.ref.name}: ')}"
    predicted = next((r for r in outcome.results if r.stage == "predict"), None)
    counts = predicted.manifest.counts if predicted else None
    if predicted and predicted.manifest.reason:
        parts = [f"no tiles: {predicted.manifest.reason}"]
    else:
        parts = [f"{counts.ok} of {counts.planned} tiles" if counts else "no tiles"]
    if counts and counts.failed:
        parts.append(f"{counts.failed} failed")
    if rate := _rate(outcome):
        parts.append(rate)
    if outcome.reused:
        parts.append("done before")
    return ", ".join(parts)


def _notes(outcome: SlideOutcome) -> list[str]:
    """What was seen on the slide that a person should look at."""
    warnings = next((r.manifest.summary.get("warnings") for r in outcome.results if r.stage == "tiles"), None)
    return [str(text) for text in warnings] if isinstance(warnings, list) and not outcome.reused else []


def _rate(outcome: SlideOutcome) -> str | None:
    for result in outcome.results:
        timings = result.manifest.run.get("timings")
        if result.stage == "predict" and not result.reused and isinstance(timings, dict) and "tiles_per_s" in timings:
            return f"{timings['tiles_per_s']:.0f} tiles/s, bound by {timings['bound_by']}"
    return None


def _summarise(counts: Counter[SlideStatus], inventory: Inventory, report: Path) -> None:
    hidden = any(ref.hidden for ref in inventory.slides)
    for skipped in inventory.skipped:
        name = "a file" if hidden else printable(skipped.path.name)
        _err.print(_labelled("skipped", f"{name:{_name_width(inventory)}}  {skipped.reason}", "dim"))
    found = ", ".join(f"{counts[status]} {status}" for status in STYLE if counts[status])
    _out.print(f"{counts.total()} slide{'' if counts.total() == 1 else 's'}: {found}", markup=False)
    _out.print(f"report: {report}", markup=False)


def main() -> None:
    """Entry point: errors become one line on stderr and an exit code."""
    log_in_lines()
    try:
        app()
    except InferenceError as error:
        complain(f"error: {error.message}")
        sys.exit(BAD_USAGE if isinstance(error, CallerError | ArtifactRefused) else FAILED)


if __name__ == "__main__":
    main()
