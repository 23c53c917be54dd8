"""`make ui`: the Dagster UI over a headless run's folder."""

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from pipelines.demo.__main__ import layout_of

PORT = 3000


def main(
    slides: Annotated[str, typer.Option()] = "",
    mpp: Annotated[str, typer.Option()] = "",
    model: Annotated[str, typer.Option()] = "",
    out: Annotated[Path, typer.Option()] = Path("out"),
    port: Annotated[int, typer.Option()] = PORT,
) -> None:
    """Serve the UI on loopback; results of `make demo` are shown, and new runs can be launched."""
    layout_of(slides, mpp, model, out.absolute()).prepare()
    dagster = Path(sys.executable).with_name("dagster")
    arguments = ["dev", "-w", "workspace.yaml", "-h", "127.0.0.1", "-p", str(port)]
    os.execv(dagster, [str(dagster), *arguments])  # noqa: S606 - our own environment's command


if __name__ == "__main__":
    typer.run(main)
