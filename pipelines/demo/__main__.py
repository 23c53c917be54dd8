"""`make demo`: the whole pipeline, headless, in one process, on the demo cohort or on your slides."""

import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import dagster as dg
import typer
from rich.console import Console

from inference.cli import MPP_HELP
from inference.console import complain, log_in_lines, text_path
from inference.engine.inventory import read_inventory
from inference.engine.run import find_slides
from inference.errors import Broken, CallerError, ConfigError, InferenceError, StoreError, StoreFull
from inference.interrupts import StopRequest
from inference.models.registry import registered_models
from inference.slides.discovery import is_url
from inference.slides.keys import key_secret
from inference.slides.resolution import parse_mpp
from inference.store.files import store_errors, write_atomic
from inference.store.store import Store
from pipelines.demo.cohort import write_demo_cohort
from pipelines.demo.jobs import Jobs
from pipelines.demo.layout import Layout, run_folder
from pipelines.partitions import DEFAULT_SET, contiguous_chunks, range_tags

_out = Console(soft_wrap=True, highlight=False)

# From the environment too, so that no shell has to quote what make hands on.
Slides = Annotated[str, typer.Option(envvar="SLIDES", help="Slide, folder, glob or cohort file; else the demo cohort.")]
Mpp = Annotated[str, typer.Option(envvar="MPP", help=MPP_HELP)]
Model = Annotated[str, typer.Option(envvar="MODEL", help="A .pt2 checkpoint or a model file (YAML).")]
Out = Annotated[Path, typer.Option(help="Folder that runs are kept in.")]
PrepareOnly = Annotated[bool, typer.Option("--prepare-only", help="Write slides and settings, run nothing.")]


def main(
    slides: Slides = "", mpp: Mpp = "", model: Model = "", out: Out = Path("out"), prepare_only: PrepareOnly = False
) -> None:
    """Run discovery, every stage for every slide, and the report.

    Exit code 0 if all went well, 1 if a slide failed, another process is at work on it, or the run had to stop, 2 for
    bad usage, 130 or 143 if interrupted; what is finished is kept.
    """
    code, stop = 0, StopRequest()
    try:
        with stop:
            layout = prepared(slides, mpp, model, out)
            if not prepare_only:
                code = _run(layout, stop)
    except BaseException:
        if not stop.asked:
            raise
    if stop.asked:
        complain("interrupted: finished slides are kept; run the same command again to continue")
    # Outside: with the last traceback the model goes, which must not outlive the interpreter.
    raise typer.Exit(stop.exit_code or code)


def prepared(slides: str, mpp: str, model: str, out: Path) -> Layout:
    """The layout of a run of these arguments, with its folders, settings and demo slides made.

    Raises:
        ConfigError: an argument that cannot be used, or `out` cannot hold a run.
        StoreFull: it has no room.
    """
    out = text_path("--out", out).absolute()
    with _made_in(out):
        layout = layout_of(slides, mpp, model, out)
        layout.prepare()
        if layout.source is None:
            if not layout.slides.exists():
                _out.print("painting three slides (about 20 s)")
            write_demo_cohort(layout.slides)
    return layout


@contextmanager
def _made_in(out: Path) -> Iterator[None]:
    """An operating system's complaint about `out` in one line."""
    try:
        with store_errors(out):
            yield
    except StoreFull:
        raise
    except StoreError as error:
        remedy = "" if "name a folder" in error.message else ": name another folder"
        raise ConfigError(f"--out: {error.message}{remedy}") from None


def layout_of(slides: str, mpp: str, model: str, out: Path) -> Layout:
    """Where a run of these arguments keeps its things; every argument is checked before anything is made.

    Raises:
        ConfigError: an argument that cannot be used.
    """
    if model and not Path(model).exists() and model not in registered_models():
        raise ConfigError(f"MODEL: no file {model}, and not one of {', '.join(registered_models())}")
    try:
        level0 = parse_mpp(mpp) if mpp else None
    except ConfigError as error:
        raise ConfigError(f"MPP is {mpp!r}: {error.message}") from None
    # One cache for all runs: exporting a model takes a while.
    os.environ.setdefault("SLIDE_MODEL_CACHE", str(out / "demo" / "models"))
    if not slides:
        return Layout(out / "demo", mpp=level0, model=model or None)
    source = slides if is_url(slides) else Path(slides).absolute()
    # Said now, in one line, rather than by a failed run.
    find_slides([source])
    return Layout(run_folder(out / "runs", source, key_secret()), source, level0, model or None)


def _run(layout: Layout, stop: StopRequest) -> int:
    """Run the three jobs; the exit code."""
    from pipelines.definitions import BATCH, INVENTORY_JOB, REPORT_JOB, SLIDES_JOB

    clock = time.monotonic()
    with _disk_blamed(layout.store.parent), dg.DagsterInstance.get() as instance:
        jobs = Jobs(instance, stop)
        if (found := jobs.execute(INVENTORY_JOB)).reason:
            raise Broken(f"discovery failed: {found.reason}")
        wanted = read_inventory(Store(layout.store))
        unfinished: dict[str, str] = {}
        for chunk in contiguous_chunks(instance.get_dynamic_partitions(DEFAULT_SET), wanted, BATCH):
            ended = jobs.execute(SLIDES_JOB, range_tags(chunk))
            unfinished |= ended.slides
            if ended.reason and not ended.slides:
                # Not a slide's fault, so no slide's line has said it, and the next batch would meet it too.
                raise Broken(ended.reason)
        report = jobs.execute(REPORT_JOB)
    busy = sum(code == "partition_busy" for code in unfinished.values())
    counts = f"{len(unfinished) - busy} failed{f', {busy} busy' if busy else ''}"
    seconds = time.monotonic() - clock
    _out.print(f"{len(wanted)} slide{'s' * (len(wanted) != 1)}, {counts}, {seconds:.0f} s", markup=False)
    if report.reason:
        raise Broken(f"the report was not written: {report.reason}")
    _out.print(f"report   {layout.report}", markup=False)
    _out.print(f"heatmaps {layout.store / 'heatmap'}", markup=False)
    return int(bool(unfinished))


@contextmanager
def _disk_blamed(folder: Path) -> Iterator[None]:
    """Where Dagster cannot keep its records, its database speaks of anything; ask the disk itself.

    Raises:
        StoreFull, StoreError: nothing can be written under the folder.
    """
    try:
        yield
    except Exception:
        probe = folder / ".probe"
        write_atomic(probe, bytes(1 << 16))
        probe.unlink()
        raise


def run_and_explain(command: Callable[..., None]) -> None:
    """Run a command; an error of ours becomes one line and an exit code."""
    warnings.filterwarnings("ignore", category=dg.BetaWarning)
    logging.getLogger("tifffile").setLevel(logging.ERROR)
    # Dagster's database says where it was when the run was interrupted, with a traceback.
    logging.getLogger("sqlalchemy.pool").setLevel(logging.CRITICAL)
    log_in_lines()
    try:
        typer.run(command)
    except InferenceError as error:
        complain(f"error: {error.message}")
        sys.exit(2 if isinstance(error, CallerError) else 1)


if __name__ == "__main__":
    run_and_explain(main)
