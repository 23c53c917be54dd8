"""`make demo`: the whole pipeline, headless, in one process, on the demo cohort or on your slides."""

import logging
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import dagster as dg
import typer
from rich.console import Console

from inference.engine.inventory import read_inventory
from inference.engine.run import find_slides
from inference.engine.settings import Settings
from inference.errors import CallerError, ConfigError, InferenceError, SourceUnavailable
from inference.models.registry import registered_models
from inference.slides.keys import key_secret
from inference.store.store import Store
from pipelines.demo.cohort import write_demo_cohort
from pipelines.demo.console import plain_console
from pipelines.demo.layout import Layout, run_folder
from pipelines.partitions import DEFAULT_SET, contiguous_chunks, range_tags

_out = Console(soft_wrap=True, highlight=False)

# From the environment too, so that no shell has to quote what make hands on.
Slides = Annotated[str, typer.Option(envvar="SLIDES", help="Slide, folder, glob or cohort file; else the demo cohort.")]
Mpp = Annotated[str, typer.Option(envvar="MPP", help="Level-0 µm/px for slides that do not state it.")]
Model = Annotated[str, typer.Option(envvar="MODEL", help="A .pt2 checkpoint or a model file (YAML).")]
Out = Annotated[Path, typer.Option(help="Folder that runs are kept in.")]
PrepareOnly = Annotated[bool, typer.Option(help="Write slides and settings, run nothing.")]


def main(
    slides: Slides = "", mpp: Mpp = "", model: Model = "", out: Out = Path("out"), prepare_only: PrepareOnly = False
) -> None:
    """Run discovery, every stage for every slide, and the report; exit 1 if a slide failed, 2 on bad usage."""
    layout = layout_of(slides, mpp, model, out.absolute())
    layout.prepare()
    if layout.source is None:
        if not layout.slides.exists():
            _out.print("painting three slides (about 20 s)")
        write_demo_cohort(layout.slides)
    if prepare_only:
        return
    failed = _run(layout)
    raise typer.Exit(1 if failed else 0)


def layout_of(slides: str, mpp: str, model: str, out: Path) -> Layout:
    """Where a run of these arguments keeps its things; every argument is checked before anything is made.

    Raises:
        ConfigError: an argument that cannot be used.
    """
    if model and not Path(model).exists() and model not in registered_models():
        raise ConfigError(f"MODEL: no file {model}, and not one of {', '.join(registered_models())}")
    try:
        level0 = Settings(mpp=float(mpp)).mpp if mpp else None
    except ValueError as error:
        raise ConfigError(f"MPP: {error}") from None
    # One cache for all runs: exporting a model takes a while.
    os.environ.setdefault("SLIDE_MODEL_CACHE", str(out / "demo" / "models"))
    if not slides:
        return Layout(out / "demo", mpp=level0, model=model or None)
    source = Path(slides).absolute()
    # Said now, in one line, rather than by a failed run.
    find_slides([source])
    return Layout(run_folder(out / "runs", source, key_secret()), source, level0, model or None)


def _run(layout: Layout) -> int:
    """Run the three jobs; how many slides failed."""
    from pipelines.definitions import BATCH, INVENTORY_JOB, REPORT_JOB, SLIDES_JOB, build_definitions

    definitions, clock = build_definitions(loggers={"plain": plain_console}), time.monotonic()
    problems: list[str] = []
    with dg.DagsterInstance.get() as instance:

        def execute(job: str, tags: dict[str, str] | None = None) -> bool:
            definition = definitions.resolve_job_def(job)
            config: dict[str, object] = {"loggers": {"plain": {}}}
            result = definition.execute_in_process(
                instance=instance, tags=tags, run_config=config, raise_on_error=False
            )
            problems.extend(_cause(event) for event in result.all_events if event.is_step_failure)
            return result.success

        if not execute(INVENTORY_JOB):
            raise SourceUnavailable(f"discovery failed: {problems[-1]}")
        store = Store(layout.store)
        wanted = read_inventory(store)
        chunks = contiguous_chunks(instance.get_dynamic_partitions(DEFAULT_SET), wanted, BATCH)
        ends = [execute(SLIDES_JOB, range_tags(chunk)) for chunk in chunks]
        complete = all(ends)
        failed = [key for key in wanted if store.failure(key)]
        if not complete and not failed:
            # Not a slide's fault, so no slide's line has said it.
            _complain(problems[-1])
        reported = execute(REPORT_JOB)
    seconds = time.monotonic() - clock
    _out.print(f"{len(wanted)} slide{'s' * (len(wanted) != 1)}, {len(failed)} failed, {seconds:.0f} s", markup=False)
    if reported:
        _out.print(f"report   {layout.report}", markup=False)
        _out.print(f"heatmaps {layout.store / 'heatmap'}", markup=False)
    return max(len(failed), int(not complete), int(not reported))


def _cause(event: dg.DagsterEvent) -> str:
    """What is at the bottom of Dagster's wrapping of a failed step, in one line."""
    error = event.step_failure_data.error
    while error is not None and error.cause is not None:
        error = error.cause
    return " ".join(error.message.split()) if error is not None else "a step failed"


def _complain(message: str) -> None:
    Console(stderr=True, soft_wrap=True, highlight=False).print(message, markup=False, style="bold red")


def run_and_explain(command: Callable[..., None]) -> None:
    """Run a command; an error of ours becomes one line and an exit code."""
    warnings.filterwarnings("ignore", category=dg.BetaWarning)
    logging.getLogger("tifffile").setLevel(logging.ERROR)
    try:
        typer.run(command)
    except InferenceError as error:
        _complain(f"error: {error.message}")
        sys.exit(2 if isinstance(error, CallerError) else 1)


if __name__ == "__main__":
    run_and_explain(main)
