"""`make ui`: the Dagster UI over a headless run's folder."""

import os
import socket
import sys
from pathlib import Path
from typing import Annotated

import typer

from inference.console import text_path
from inference.errors import ConfigError
from pipelines.demo.__main__ import Model, Mpp, Out, Slides, layout_of, run_and_explain

PORT = 3000


def main(
    slides: Slides = "",
    mpp: Mpp = "",
    model: Model = "",
    out: Out = Path("out"),
    port: Annotated[int, typer.Option(envvar="PORT", help="Port on 127.0.0.1.")] = PORT,
) -> None:
    """Serve the UI on loopback; results of `make demo` are shown, and new runs can be launched."""
    layout = layout_of(slides, mpp, model, text_path("--out", out).absolute())
    with socket.socket() as probe:
        # Dagster would go on without its web server, and the browser would show whoever has the port.
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise ConfigError(f"port {port} is taken: choose another with PORT=...")
    layout.prepare()
    dagster = Path(sys.executable).with_name("dagster")
    arguments = ["dev", "-w", "workspace.yaml", "-h", "127.0.0.1", "-p", str(port)]
    os.execv(dagster, [str(dagster), *arguments])  # noqa: S606 - our own environment's command


if __name__ == "__main__":
    run_and_explain(main)
