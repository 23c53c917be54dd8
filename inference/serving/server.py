"""Runs the application until it is told to stop: unready first, then no new connections, then the last answers."""

import errno
import logging
import math
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import uvicorn
from fastapi import FastAPI

from inference.errors import ConfigError, DeviceBroken
from inference.serving.app import Service
from inference.serving.protocol import BoundedHead
from inference.serving.settings import is_loopback

log = logging.getLogger(__name__)

KEEP_ALIVE_S = 75
"""Idle connections stay open longer than clients and balancers keep them, so that none is closed as it is used."""


@dataclass(frozen=True)
class Listener:
    """Where to listen, and how to stop.

    Attributes:
        port: 0 takes a free one.
        tls_cert, tls_key: files in PEM; both or neither.
        insecure: listen beyond this machine without a token.
        unready_s: how long, after SIGTERM, requests are still taken while `/ping` says no: until a balancer has
            noticed. SIGINT does not wait.
        drain_s: how long requests under way may then take.
    """

    host: str = "127.0.0.1"
    port: int = 8080
    tls_cert: Path | None = None
    tls_key: Path | None = None
    insecure: bool = False
    unready_s: float = 3.0
    drain_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65_535:
            raise ConfigError(f"port {self.port} is none: give 1 to 65535, or 0 for a free one")
        for name, value in (("unready_s", self.unready_s), ("drain_s", self.drain_s)):
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name} is {value:g}: give seconds from 0 up")


def run_service(app: FastAPI, listener: Listener, announce: Callable[[str], None] = lambda _address: None) -> None:
    """Serve until SIGTERM or SIGINT, a broken device, or a model that does not load.

    Args:
        announce: told the address once requests can be sent there.

    Raises:
        ConfigError: the address cannot be listened on or is open to other machines without a token; or no TLS.
        DeviceBroken: a model can no longer run; a new process is needed.
        InferenceError: a model does not load.
    """
    service: Service = app.state.service
    _check_access(listener, service)
    config = _config(app, listener)
    with _listen(listener.host, listener.port) as sock:
        server = _Server(config, service, listener.unready_s)
        host, port = sock.getsockname()[:2]
        scheme = "https" if config.is_ssl else "http"
        server.on_started = lambda: announce(f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}")
        server.run(sockets=[sock])
    if service.models.failure is not None:
        raise service.models.failure
    if server.broken:
        raise DeviceBroken("a model can no longer run: start a new process")


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config, service: Service, unready_s: float) -> None:
        super().__init__(config)
        self.on_started: Callable[[], None] = lambda: None
        self.broken = False
        self._service = service
        self._unready_s = unready_s
        self._stop_at = float("inf")
        service.on_broken = self._give_up

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.on_started()

    async def on_tick(self, counter: int) -> bool:
        return await super().on_tick(counter) or time.monotonic() >= self._stop_at

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - a signal handler's
        # Not kept for later, as the base class does: a service that was asked to stop and did has not failed.
        asked_before = self._service.models.draining
        self._service.models.draining = True
        if sig == signal.SIGTERM and not asked_before:
            self._stop_at = time.monotonic() + self._unready_s
        elif self.should_exit:
            self.force_exit = True
        else:
            self.should_exit = True

    def _give_up(self) -> None:
        self.broken = True
        self.should_exit = True


def _check_access(listener: Listener, service: Service) -> None:
    if not (is_loopback(listener.host) or service.settings.tokens or listener.insecure):
        raise ConfigError(
            f"{listener.host} can be reached from other machines: give --token-file FILE, or --insecure for everyone"
        )
    if (listener.tls_cert is None) != (listener.tls_key is None):
        raise ConfigError("TLS needs both a certificate and its key: give --tls-cert and --tls-key")


def _config(app: FastAPI, listener: Listener) -> uvicorn.Config:
    config = uvicorn.Config(
        app,
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        http=BoundedHead,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=max(1, round(listener.drain_s)),
        ssl_certfile=listener.tls_cert,
        ssl_keyfile=listener.tls_key,
    )
    try:
        config.load()
    except OSError as error:  # no such file, and every error of TLS
        raise ConfigError(
            f"TLS cannot start with the certificate {listener.tls_cert} and the key {listener.tls_key}: "
            f"{_why_no_tls(listener, error)}"
        ) from None
    return config


def _why_no_tls(listener: Listener, error: OSError) -> str:
    for what, mark, path in (
        ("certificate", b"CERTIFICATE-----", listener.tls_cert),
        ("key", b"PRIVATE KEY-----", listener.tls_key),
    ):
        try:
            if path is not None and mark not in path.read_bytes():
                return f"{path.name} holds no {what} in PEM"
        except OSError as unreadable:
            return f"{path}: {unreadable.strerror}"
    return str(error.strerror or error)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        return socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        other = "--port" if error.errno == errno.EADDRINUSE or error.errno == errno.EACCES else "--host"
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror}; give another {other}") from None
