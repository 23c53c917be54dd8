"""What every request passes before a route sees it: a name, a token, room, limits; and one line in the log after it."""

import json
import logging
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from uuid import uuid4

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from inference.contract.faults import error_body, http_status, log_text
from inference.errors import BadRequest, InferenceError, Overloaded, QueueFull, TooLarge, Unauthorized
from inference.serving.settings import ServiceSettings

log = logging.getLogger("inference.serving.requests")

OPEN_PATHS = frozenset({"/ping", "/docs", "/openapi.json"})
"""What may be asked without a token: health, for balancers have none, and a description without any data."""

REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
GONE = 499
"""Logged where the caller left before the answer; nobody receives it."""


@dataclass(eq=False)
class Call:
    """One request, for the log and for its handler."""

    request_id: str
    caller: str
    method: str
    deadline_at: float
    started_at: float = field(default_factory=time.monotonic)
    route: str = "none"
    model: str | None = None
    digest: str | None = None
    slide: str | None = None
    tiles: int | None = None
    code: str | None = None
    detail: str | None = None
    status: int = 0
    nbytes: int = 0
    reserve: Callable[[int], None] = lambda _nbytes: None

    @property
    def remaining_s(self) -> float:
        """Seconds until the deadline."""
        return self.deadline_at - time.monotonic()

    @property
    def elapsed_s(self) -> float:
        return time.monotonic() - self.started_at

    def log_line(self) -> str:
        """The request as one JSON object; of its content only the slide's name."""
        facts: dict[str, object] = {
            "time": datetime.now(UTC).isoformat(timespec="milliseconds"), "request_id": self.request_id,
            "caller": self.caller, "method": self.method, "route": self.route, "model": self.model,
            "model_digest": self.digest, "slide": self.slide, "tiles": self.tiles, "status": self.status,
            "code": self.code, "detail": self.detail, "ms": round(self.elapsed_s * 1000, 1),
        }  # fmt: skip
        return json.dumps({name: value for name, value in facts.items() if value is not None})


def call_of(request: Request) -> Call:
    """The record of a request that passed the gate."""
    found: Call = request.scope["call"]
    return found


def error_response(error: InferenceError, call: Call) -> Response:
    """The error as its caller may see it; in full only in the log."""
    status = http_status(error)
    call.code = error.code
    call.detail = log_text(error.message) if status >= 500 else None
    headers = {}
    if isinstance(error, Overloaded) and error.retryable and status != 504:
        asked_s = error.fields.get("retry_after_s", 1.0)
        headers["Retry-After"] = str(max(1, math.ceil(asked_s)) if isinstance(asked_s, int | float) else 1)
    if isinstance(error, Unauthorized):
        headers["WWW-Authenticate"] = "Bearer"
    if isinstance(error, TooLarge):
        headers["Connection"] = "close"  # the rest of the body is not read
    return JSONResponse(error_body(error, call.request_id).model_dump(), status, headers)


class Gate:
    """ASGI middleware around the whole service.

    Args:
        observe: told of every request when it is over.
    """

    def __init__(self, app: ASGIApp, settings: ServiceSettings, observe: Callable[[Call], None]) -> None:
        self._app = app
        self._settings = settings
        self._observe = observe
        self._requests = 0
        self._nbytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        call = self._new_call(scope, headers)
        call.reserve = partial(self._reserve, call)
        scope["call"] = call

        async def send_named(message: Message) -> None:
            if message["type"] == "http.response.start":
                call.status = call.status or message["status"]
                MutableHeaders(scope=message)["X-Request-Id"] = call.request_id
            await send(message)

        admitted = False
        try:
            self._admit(scope, headers, call)
            admitted = True
            self._requests += 1
            await self._app(scope, self._bounded(receive, scope, call), send_named)
        except InferenceError as error:
            await error_response(error, call)(scope, receive, send_named)
        finally:
            self._requests -= admitted
            self._nbytes -= call.nbytes
            call.route = getattr(scope.get("route"), "path", "none")
            log.info("%s", call.log_line())
            self._observe(call)

    def _new_call(self, scope: Scope, headers: Headers) -> Call:
        given = headers.get("X-Request-Id", "")
        client = scope.get("client")
        return Call(
            request_id=given if REQUEST_ID.fullmatch(given) else uuid4().hex,
            caller=client[0] if client else "unknown",
            method=scope["method"],
            deadline_at=time.monotonic() + self._settings.deadline_s,
        )

    def _admit(self, scope: Scope, headers: Headers, call: Call) -> None:
        """Whether the request may pass, as far as its head says."""
        settings = self._settings
        if settings.tokens and scope["path"] not in OPEN_PATHS:
            name = settings.caller(headers.get("Authorization", ""))
            if name is None:
                raise Unauthorized("this service wants a token: send it as `Authorization: Bearer TOKEN`")
            call.caller = name
        if asked := headers.get("X-Deadline-Seconds"):
            call.deadline_at = call.started_at + min(_seconds(asked), settings.deadline_s)
        if headers.get("Content-Encoding", "identity") != "identity":
            raise BadRequest("the body has a Content-Encoding: send it as it is")
        length = headers.get("Content-Length", "0")
        if length.isdecimal() and (len(length) > 18 or int(length) > self._limit(scope)):
            raise _too_large(self._limit(scope))
        if self._requests >= settings.max_requests and scope["path"] not in OPEN_PATHS:
            raise QueueFull(f"{self._requests} requests are under way: try again later")

    def _bounded(self, receive: Receive, scope: Scope, call: Call) -> Receive:
        """Receives no more than the body may have, and no more than there is room for."""
        limit = self._limit(scope)

        async def receive_bounded() -> Message:
            message = await receive()
            size = len(message.get("body", b""))
            if call.nbytes + size > limit:
                raise _too_large(limit)
            if size:
                call.reserve(size)
            return message

        return receive_bounded

    def _reserve(self, call: Call, nbytes: int) -> None:
        """Set memory aside for a request until it is over."""
        call.nbytes += nbytes
        self._nbytes += nbytes
        if self._nbytes > self._settings.max_pending_bytes:
            raise QueueFull(f"{self._requests} requests fill the memory set aside for them: try again later")

    def _limit(self, scope: Scope) -> int:
        batch = scope["path"].startswith("/api/batch/")
        return self._settings.max_batch_body_bytes if batch else self._settings.max_body_bytes


def _too_large(limit: int) -> TooLarge:
    return TooLarge(f"the body is larger than {limit} bytes: send less at once")


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = math.nan
    if not 0 < found < math.inf:
        raise BadRequest("X-Deadline-Seconds is no number of seconds above 0")
    return found
