"""`make demo`: the whole pipeline, headless, in one process, on the demo cohort or on your slides."""

import logging
import os
import re
import sys
import time
import warnings
from pathlib import Path
from typing import Annotated

import dagster as dg
import typer
from rich.console import Console

from inference.engine.inventory import read_inventory
from inference.engine.run import find_slides
from inference.errors import CallerError, InferenceError, SourceUnavailable
from inference.models.registry import registered_models
from inference.store.store import Store
from pipelines.demo.cohort import write_demo_cohort
from pipelines.demo.console import plain_console
from pipelines.demo.layout import Layout
from pipelines.partitions import DEFAULT_SET, contiguous_chunks, range_tags

_out = Console(soft_wrap=True, highlight=False)


def main(
    slides: Annotated[str, typer.Option(help="Slide, folder, glob or cohort file; the demo cohort if empty.")] = "",
    mpp: Annotated[str, typer.Option(help="Level-0 µm/px for slides that do not state it.")] = "",
    model: Annotated[
        str, typer.Option(help="A .pt2 checkpoint or a model file (YAML); the pipeline's own if empty.")
    ] = "",
    out: Annotated[Path, typer.Option(help="Folder that runs are kept in.")] = Path("out"),
    prepare_only: Annotated[bool, typer.Option(help="Write slides and settings, run nothing.")] = False,
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
    """Where a run of these arguments keeps its things.

    Raises:
        typer.BadParameter: an argument that cannot be used.
    """
    if model and not Path(model).exists() and model not in registered_models():
        raise typer.BadParameter(f"no such file, and not one of {', '.join(registered_models())}", param_hint="MODEL")
    try:
        level0 = float(mpp) if mpp else None
    except ValueError:
        raise typer.BadParameter(f"{mpp!r} is not a number", param_hint="MPP") from None
    # One cache for all runs: exporting a model takes a minute.
    os.environ.setdefault("SLIDE_MODEL_CACHE", str(out / "demo" / "models"))
    if not slides:
        return Layout(out / "demo", mpp=level0, model=model or None)
    source = Path(slides).absolute()
    # Said now, in one line, rather than by a failed run.
    find_slides([source], secret=os.environ.get("SLIDE_KEY_SECRET"))
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", source.stem if source.is_file() else source.name).strip("-.")
    return Layout(out / "runs" / (name or "slides"), source, level0, model or None)


def _run(layout: Layout) -> int:
    """Run the three jobs; how many slides failed."""
    from pipelines.definitions import BATCH, INVENTORY_JOB, REPORT_JOB, SLIDES_JOB, build_definitions

    definitions, clock = build_definitions(loggers={"plain": plain_console}), time.monotonic()
    with dg.DagsterInstance.get() as instance:

        def execute(job: str, tags: dict[str, str] | None = None) -> bool:
            definition = definitions.resolve_job_def(job)
            config: dict[str, object] = {"loggers": {"plain": {}}}
            result = definition.execute_in_process(
                instance=instance, tags=tags, run_config=config, raise_on_error=False
            )
            return result.success

        if not execute(INVENTORY_JOB):
            raise SourceUnavailable("discovery failed: the run's log in Dagster says why")
        store = Store(layout.store)
        wanted = read_inventory(store)
        keys = instance.get_dynamic_partitions(DEFAULT_SET)
        stopped = [
            chunk for chunk in contiguous_chunks(keys, wanted, BATCH) if not execute(SLIDES_JOB, range_tags(chunk))
        ]
        reported = execute(REPORT_JOB)
    failed = [failure for key in wanted if (failure := store.failure(key))]
    _out.print(f"{len(wanted)} slides, {len(failed)} failed, {time.monotonic() - clock:.0f} s", markup=False)
    if reported:
        _out.print(f"report   {layout.report}", markup=False)
        _out.print(f"heatmaps {layout.store / 'heatmap'}", markup=False)
    return max(len(failed), len(stopped), int(not reported))


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=dg.BetaWarning)
    logging.getLogger("tifffile").setLevel(logging.ERROR)
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    try:
        typer.run(main)
    except InferenceError as error:
        Console(stderr=True, soft_wrap=True).print(f"error: {error.message}", markup=False, style="bold red")
        sys.exit(2 if isinstance(error, CallerError) else 1)
