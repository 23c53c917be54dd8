"""`make demo`: the whole pipeline, headless, in one process, on the demo cohort or on your slides."""

import logging
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Annotated

import dagster as dg
import typer
from rich.console import Console

from inference.engine.inventory import read_inventory
from inference.errors import InferenceError
from inference.models.registry import registered_models
from inference.store.store import Store
from pipelines.demo.cohort import write_demo_cohort
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
        _out.print("writing the demo cohort (three slides, about 20 s the first time)")
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
    return Layout(out / "runs" / (source.stem if source.is_file() else source.name), source, level0, model or None)


def _run(layout: Layout) -> int:
    """Run the three jobs; how many slides failed."""
    from pipelines.definitions import BATCH, INVENTORY_JOB, REPORT_JOB, SLIDES_JOB, defs

    definitions, clock = defs(), time.monotonic()
    with dg.DagsterInstance.get() as instance:

        def execute(job: str, tags: dict[str, str] | None = None) -> dg.ExecuteInProcessResult:
            config = {"loggers": {"console": {"config": {"log_level": "INFO"}}}}
            return definitions.resolve_job_def(job).execute_in_process(
                instance=instance, tags=tags, raise_on_error=False, run_config=config
            )

        if not execute(INVENTORY_JOB).success:
            return 1
        store = Store(layout.store)
        wanted = read_inventory(store)
        keys = instance.get_dynamic_partitions(DEFAULT_SET)
        for chunk in contiguous_chunks(keys, wanted.keys(), BATCH):
            execute(SLIDES_JOB, range_tags(chunk))
        reported = execute(REPORT_JOB).success
    failures = {key: failure for key in wanted if (failure := store.failure(key))}
    for failure in failures.values():
        _out.print(f"failed   {failure.message}", markup=False, style="red")
    _out.print(f"{len(wanted)} slides, {len(failures)} failed, {time.monotonic() - clock:.0f} s", markup=False)
    if not reported:
        return max(1, len(failures))
    _out.print(f"report   {layout.report}", markup=False)
    _out.print(f"heatmaps {layout.store / 'heatmap'}", markup=False)
    return len(failures)


if __name__ == "__main__":
    warnings.filterwarnings("ignore", category=dg.BetaWarning)
    logging.getLogger("tifffile").setLevel(logging.ERROR)
    try:
        typer.run(main)
    except InferenceError as error:
        Console(stderr=True, soft_wrap=True).print(f"error: {error.message}", markup=False, style="bold red")
        sys.exit(2)
