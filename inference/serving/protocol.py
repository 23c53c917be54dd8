"""HTTP/1.1 as uvicorn speaks it, with an end to what a connection may send, and wait, before its request is whole."""

import asyncio
import json
from uuid import uuid4

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from inference.contract.faults import error_body
from inference.errors import TooLarge

MAX_HEAD_BYTES = 64 << 10
"""Request line and headers; what is read at once, at most 256 KiB, may come on top."""

HEAD_S = 75.0
"""From the first byte, or from the connection, to the end of the headers."""


class BoundedHead(HttpToolsProtocol):
    """Ends connections whose headers do not end."""

    _head_bytes = 0
    _in_head = True
    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """A new connection: its first headers are awaited."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing more is awaited."""
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Bytes of a head or a body."""
        super().data_received(data)
        if self._in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                self._refuse()

    def on_message_begin(self) -> None:
        """The first byte of a request."""
        self._await_head()
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """The last byte of its headers."""
        self._in_head, self._head_bytes = False, 0
        self._stop_waiting()
        super().on_headers_complete()

    def _await_head(self) -> None:
        self._stop_waiting()
        self._in_head, self._head_bytes = True, 0
        self._timer = self.loop.call_later(HEAD_S, self._give_up)

    def _stop_waiting(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _give_up(self) -> None:
        if self._in_head and not self.transport.is_closing():
            self.transport.close()

    def _refuse(self) -> None:
        if self.transport.is_closing():
            return
        error = TooLarge(f"the headers are longer than {MAX_HEAD_BYTES} bytes")
        body = json.dumps(error_body(error, uuid4().hex).model_dump()).encode()
        head = "HTTP/1.1 413 Content Too Large\r\nConnection: close\r\nContent-Type: application/json\r\n"
        self.transport.write(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        self.transport.close()
