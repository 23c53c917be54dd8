"""The command `slide-inference`: the whole job without Dagster."""

import logging
import os
import sys
from collections import Counter
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

from inference.engine.chain import Chain, SlideOutcome
from inference.engine.report import write_cohort_report
from inference.engine.run import find_slides
from inference.engine.settings import Settings, Stage
from inference.errors import Broken, CallerError, InferenceError
from inference.models.registry import registered_models, resolve_model
from inference.slides.discovery import Inventory
from inference.store.store import Store

OK, FAILED, BAD_USAGE = 0, 1, 2

app = typer.Typer(
    name="slide-inference",
    help="Slide-scale inference for computational pathology.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
_out = Console(soft_wrap=True, highlight=False)
_err = Console(stderr=True, soft_wrap=True, highlight=False)


@app.callback()
def _root() -> None:
    """Slide-scale inference for computational pathology."""


@app.command()
def run(
    slides: Annotated[list[str], typer.Argument(help="Slides, folders, globs or a cohort file (.csv, .parquet).")],
    model: Annotated[str, typer.Option(help="Path of a .pt2 checkpoint, or a registered name such as demo.")],
    out: Annotated[Path, typer.Option(help="Folder for results; finished ones in it are reused.")],
    mpp: Annotated[float | None, typer.Option(help="Level-0 µm/px for slides that do not state it.")] = None,
    allow_upsampling: Annotated[bool, typer.Option(help="Also run slides coarser than the model needs.")] = False,
    batch_size: Annotated[int, typer.Option(help="Tiles per forward pass.")] = 64,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps.")] = "cpu",
    root: Annotated[Path | None, typer.Option(help="Folder that slide keys are relative to.")] = None,
) -> None:
    """Tile, embed, predict, aggregate and draw every slide; exit 0 if all went well, 1 if a slide failed."""
    settings = Settings(mpp=mpp, allow_upsampling=allow_upsampling, batch_size=batch_size, device=device)
    inventory = find_slides(slides, root=root, secret=os.environ.get("SLIDE_KEY_SECRET"))
    with Chain(Store(out), [resolve_model(model)], settings) as chain:
        outcomes = _run_all(chain, inventory)
        report = out / "report.html"
        write_cohort_report(report, out.name, chain, inventory.slides)
    _summarise(outcomes, inventory, report)
    raise typer.Exit(FAILED if any(outcome.error for outcome in outcomes) else OK)


@app.command()
def models() -> None:
    """List the models that can be run by name."""
    for name in registered_models():
        _out.print(name)


def _run_all(chain: Chain, inventory: Inventory) -> list[SlideOutcome]:
    columns = (
        SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn(),
        TextColumn("tiles"), TimeRemainingColumn(),
    )  # fmt: skip
    outcomes = []
    with Progress(*columns, console=_err, transient=True) as bars:
        for number, ref in enumerate(inventory.slides, 1):
            bar = bars.add_task(f"{number}/{len(inventory.slides)} {ref.name}", total=None)

            def show(_key: str, _stage: Stage, done: int, total: int, bar: TaskID = bar) -> None:
                bars.update(bar, completed=done, total=total)

            outcome = chain.run_slide(ref, progress=show)
            bars.remove_task(bar)
            outcomes.append(outcome)
            bars.console.print(_line(outcome), markup=False)
    return outcomes


def _line(outcome: SlideOutcome) -> str:
    """One slide in one line: what became of it, and why."""
    if outcome.error is not None:
        return f"failed   {outcome.error.message}"
    predicted = next((r for r in outcome.results if r.stage == "predict"), None)
    counts = predicted.manifest.counts if predicted else None
    text = f"{'done    ' if outcome.reused else 'ok      '} {outcome.ref.name}: "
    text += f"{counts.ok} of {counts.planned} tiles" if counts and counts.planned else "no tiles"
    if counts and counts.failed:
        text += f", {counts.failed} failed"
    if predicted and predicted.manifest.reason:
        text += f" ({predicted.manifest.reason})"
    if rate := _rate(outcome):
        text += f", {rate}"
    return text


def _rate(outcome: SlideOutcome) -> str | None:
    for result in outcome.results:
        timings = result.manifest.run.get("timings")
        if result.stage == "predict" and not result.reused and isinstance(timings, dict) and "tiles_per_s" in timings:
            return f"{timings['tiles_per_s']} tiles/s, bound by {timings['bound_by']}"
    return None


def _summarise(outcomes: list[SlideOutcome], inventory: Inventory, report: Path) -> None:
    for skipped in inventory.skipped:
        _err.print(f"skipped  {skipped.path.name}: {skipped.reason}", markup=False)
    counts = Counter(outcome.status for outcome in outcomes)
    found = ", ".join(f"{counts[s]} {s}" for s in ("ok", "ok with failures", "empty", "failed") if counts[s])
    _out.print(f"{len(outcomes)} slides: {found}", markup=False)
    _out.print(f"report   {report}", markup=False)


def main() -> None:
    """Entry point: errors become one line on stderr and an exit code."""
    logging.basicConfig(level=logging.WARNING, format="%(levelname)s %(name)s: %(message)s")
    try:
        app()
    except CallerError as error:
        _err.print(f"error: {error.message}", markup=False, style="bold red")
        sys.exit(BAD_USAGE)
    except Broken as error:
        _err.print(f"stopped: {error.message}", markup=False, style="bold red")
        sys.exit(FAILED)
    except InferenceError as error:
        _err.print(f"error: {error.message}", markup=False, style="bold red")
        sys.exit(FAILED)


if __name__ == "__main__":
    main()
