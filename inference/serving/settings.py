"""What a service is set to, and who may use it."""

import hmac
import ipaddress
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from inference.errors import ConfigError

log = logging.getLogger(__name__)

MAX_BODY_BYTES = 6_291_456
"""Largest body that Amazon SageMaker passes to a real-time endpoint: 6 MiB."""

DEADLINE_S = 60.0
"""Longest that Amazon SageMaker waits for a response of a real-time endpoint."""

MIN_TOKEN_LENGTH = 16


@dataclass(frozen=True)
class ServiceSettings:
    """Limits of a service, and the tokens it asks for.

    Attributes:
        max_batch_size, max_wait_ms: as of `InProcessClient`.
        max_body_bytes: of one request; bodies of the binary batch route may have `max_batch_body_bytes`.
        max_tile_bytes: of the tiles of one binary batch, decompressed.
        max_queued_items: tiles that may wait for a batch, per model.
        max_requests: under way at once, whatever they wait for.
        max_pending_bytes: of their bodies together.
        deadline_s: longest a request may take; it may ask for less.
        stuck_after_s: a forward pass that takes longer breaks its model.
        tokens: by the name under which their bearer is logged; none leaves the service open.
    """

    max_batch_size: int = 64
    max_wait_ms: float = 10
    max_body_bytes: int = MAX_BODY_BYTES
    max_batch_body_bytes: int = 64 << 20
    max_tile_bytes: int = 256 << 20
    max_queued_items: int = 4096
    max_requests: int = 1024
    max_pending_bytes: int = 1 << 30
    deadline_s: float = DEADLINE_S
    stuck_after_s: float = 300.0
    tokens: Mapping[str, str] = field(default_factory=dict, repr=False)

    def __post_init__(self) -> None:
        for name in (
            "max_batch_size",
            "max_queued_items",
            "max_body_bytes",
            "max_batch_body_bytes",
            "max_tile_bytes",
            "max_requests",
            "max_pending_bytes",
        ):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}: give 1 or more")
        if not 0 <= self.max_wait_ms < float("inf"):
            raise ConfigError(f"max_wait_ms is {self.max_wait_ms:g}: give milliseconds from 0 up")
        if not 0 < self.deadline_s < float("inf"):
            raise ConfigError(f"deadline_s is {self.deadline_s}: give seconds above 0")

    def caller(self, authorization: str) -> str | None:
        """The name of the token in an `Authorization` header; None if it is no known token."""
        scheme, _, given = authorization.partition(" ")
        # Every token is compared, each in constant time: the time taken says nothing of how near a guess was.
        matches = [
            name
            for name, token in self.tokens.items()
            if hmac.compare_digest(given.strip().encode("utf-8", "surrogateescape"), token.encode())
        ]
        return matches[0] if matches and scheme.lower() == "bearer" else None


def read_tokens(path: Path) -> dict[str, str]:
    """Tokens by name from a file with one `NAME TOKEN` per line; empty lines and those that start with # are left out.

    Raises:
        ConfigError: it cannot be read, holds no token, or a line of it is not such a pair.
    """
    lines = _lines(path)
    found: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.startswith("#"):
            continue
        parts = line.split()
        wrong = None
        if len(parts) != 2:
            wrong = "is not a name and a token with a space between"
        elif len(parts[1]) < MIN_TOKEN_LENGTH:
            wrong = f"has a token of {len(parts[1])} characters: {MIN_TOKEN_LENGTH} or more are needed"
        elif parts[0] in found:
            wrong = "has a name that an earlier line has"
        if wrong:
            raise ConfigError(f"line {number} of {path} {wrong}")
        found[parts[0]] = parts[1]
    if not found:
        raise ConfigError(f"the token file {path} holds no token: write one `NAME TOKEN` per line")
    return found


def _lines(path: Path) -> list[str]:
    try:
        if not path.is_file():  # a pipe would be waited for
            raise ConfigError(f"the token file {path} cannot be read: it is no regular file")
        if path.stat().st_mode & 0o077:
            log.warning("the token file %s can be read by others: chmod 600 %s", path, path)
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the token file {path} cannot be read: {type(error).__name__}") from None


def is_loopback(host: str) -> bool:
    """Whether an address to listen on is reachable from this machine alone."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
