"""The command that explains slides: `doctor`."""

from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from inference.engine.doctor import DEFAULT_TILE, SAMPLE, Findings, examine
from inference.engine.run import find_slides
from inference.engine.settings import Settings
from inference.models.registry import resolve_model
from inference.slides.discovery import printable

_out = Console(soft_wrap=True, highlight=False)
_LABEL_WIDTH = 12


def add_slide_commands(app: typer.Typer) -> None:
    """Add the commands to the command line."""
    app.command("doctor")(doctor)


def doctor(
    slides: Annotated[list[str], typer.Argument(help="Slides, folders, globs, URLs or a cohort file.")],
    model: Annotated[
        str | None, typer.Option(help="Cut the tiles that this model takes; else 224 px, 0.5 µm/px.")
    ] = None,
    mpp: Annotated[float | None, typer.Option(help="Level-0 µm/px for slides that state none.")] = None,
    allow_upsampling: Annotated[
        bool, typer.Option("--allow-upsampling", help="Also take slides coarser than the model needs.")
    ] = False,
    full: Annotated[bool, typer.Option("--full", help=f"Read every tile with tissue, not only {SAMPLE}.")] = False,
    root: Annotated[str | None, typer.Option(help="Folder or URL that slide keys are relative to.")] = None,
) -> None:
    """Say what each slide is, how it would be read, and what would fail; nothing is written.

    Exit code 0 if every slide could be run, 1 if one would fail, 2 for bad usage.
    """
    tile = resolve_model(model).manifest.spec.tile_spec if model else DEFAULT_TILE
    settings = Settings(mpp=mpp, allow_upsampling=allow_upsampling)
    inventory = find_slides(slides, root=root)
    refused = 0
    for ref in inventory.slides:
        found = examine(ref, settings, tile, sample=None if full else SAMPLE)
        refused += found.refused is not None
        _show(found)
    for skipped in inventory.skipped:
        _out.print(
            Text.assemble((f"{'skipped':{_LABEL_WIDTH}}", "dim"), printable(skipped.path.name), "  ", skipped.reason)
        )
    if len(inventory.slides) > 1:
        _out.print(f"{len(inventory.slides)} slides, of which {refused or 'none'} would fail", markup=False)
    raise typer.Exit(1 if refused else 0)


def _show(found: Findings) -> None:
    _out.print(Text(found.name, "bold"))
    for label, text in found.lines:
        _line(label, text)
    for warning in found.warnings:
        _line("note", warning, "yellow")
    if found.refused:
        _line("would fail", found.refused, "bold red")
    else:
        _line("would run", "with the notes above" if found.warnings else "nothing to complain of", "green")
    _out.print()


def _line(label: str, text: str, style: str = "dim") -> None:
    _out.print(Text.assemble("  ", (f"{label:{_LABEL_WIDTH}}", style), text))
