"""`slide-inference serve`: models behind HTTP."""

import logging
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inference.errors import ConfigError
from inference.models.registry import resolve_model

if TYPE_CHECKING:
    from inference.models.server_model import BaseServerModel


def serve(
    model: Annotated[list[str], typer.Option(help="Registered name, or path of a .pt2 checkpoint; may be repeated.")],
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen on; 0 takes a free one.")] = 8080,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps.")] = "cpu",
    batch_size: Annotated[int, typer.Option(help="Most tiles of one forward pass.")] = 64,
    max_wait_ms: Annotated[float, typer.Option(help="How long the first tile of a batch waits for others.")] = 10,
    token_file: Annotated[Path | None, typer.Option(help="One `NAME TOKEN` per line: bearer tokens.")] = None,
    insecure: Annotated[bool, typer.Option("--insecure", help="Listen beyond this machine without a token.")] = False,
    tls_cert: Annotated[Path | None, typer.Option(help="Certificate for TLS, PEM.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="Its private key, PEM.")] = None,
    max_body_bytes: Annotated[int, typer.Option(help="Largest body of one request.")] = 6_291_456,
    deadline: Annotated[float, typer.Option(help="Longest a request may take, in seconds.")] = 60.0,
    unready: Annotated[float, typer.Option(help="Seconds after SIGTERM in which requests are still taken.")] = 3.0,
    drain: Annotated[float, typer.Option(help="Seconds that requests under way may then take.")] = 60.0,
) -> None:
    """Answer tiles over HTTP until SIGTERM.

    Exit code 0 once asked to stop, 1 if a model or its device broke, 2 for bad usage. Each request is one JSON line on
    stdout; /docs describes the routes.
    """
    try:
        from inference.serving import ServiceSettings, create_app, read_tokens
        from inference.serving.server import Listener, run_service
    except ImportError as error:
        raise ConfigError(f"serve needs more packages ({error.name}): install slide-inference[serve]") from error

    settings = ServiceSettings(
        max_batch_size=batch_size, max_wait_ms=max_wait_ms, max_body_bytes=max_body_bytes, deadline_s=deadline,
        tokens=read_tokens(token_file) if token_file else {},
    )  # fmt: skip
    listener = Listener(host, port, tls_cert, tls_key, insecure, unready, drain)
    app = create_app(_find(model, device), settings)
    _log_requests()
    run_service(app, listener, announce=lambda address: typer.echo(f"listening on {address}", err=True))


def _find(names: list[str], device: str) -> "dict[str, Callable[[], BaseServerModel]]":
    """Every model's checkpoint, found now and loaded later.

    Raises:
        UnknownModel, ArtifactRefused: one cannot be found or has no usable manifest.
        ConfigError: two of them are the same.
    """
    from inference.models.server_model import load_server_model

    found: dict[str, Callable[[], BaseServerModel]] = {}
    for name in names:
        checkpoint = resolve_model(name)
        key = checkpoint.manifest.spec.model_name
        if key in found:
            raise ConfigError(f"--model names {key} twice")
        found[key] = partial(load_server_model, checkpoint, device)
    return found


def _log_requests() -> None:
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("%(message)s"))
    log = logging.getLogger("inference.serving.requests")
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)
