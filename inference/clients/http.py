"""Asks a remote service, behind the same protocol as a model in this process."""

import asyncio
import math
import random
import ssl
from collections.abc import Coroutine, Sequence
from concurrent.futures import CancelledError
from typing import Any, Self, TypeVar
from urllib.parse import quote
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

try:
    import httpx
except ImportError as missing:
    raise ImportError("HttpClient needs the httpx package: install slide-inference[serve]") from missing

from inference.clients._answers import all_or_error
from inference.clients._loop import LoopThread
from inference.contract.faults import RETRIED, read_error, rebuild
from inference.contract.frames import MEDIA_TYPE, OutputRows, decode_answers, encode_tiles
from inference.errors import BadRequest, ConfigError, DeadlineExceeded, InferenceError, Overloaded, ServerClosed
from inference.models.rna import bulk_rna_sha256
from inference.models.sample import Mode, PackedMask, TileOutput

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 8.0
MAX_RETRY_AFTER_S = 60.0

POOL_SIZE = 16
"""Connections of one pool: each request looks at every connection of its pool, so many in one are slow."""

V = TypeVar("V")


class HttpClient:
    """A `Client` over a remote service. Usable from several threads and event loops at once.

    All calls share their connections, on an event loop of the client's own. A call that is answered 429 or 503 is
    repeated after a random pause, not before the `Retry-After` it was given, and only if the answer says that it may
    succeed; each of these errors, and any other, arrives as the class that the model would raise in process.

    Args:
        base_url: e.g. `http://127.0.0.1:8080`.
        model: the model's name there.
        token: sent as bearer token.
        timeout_s: longest wait for one answer, repetitions included.
        max_concurrent: requests under way at once; more wait for their turn.
        max_retries: repetitions of one request.
        verify: False, or the certificates to trust: a TLS context, or True for the system's.
        transport: in place of the network.

    Raises:
        ConfigError: a setting out of range, or no http(s) address.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        *,
        token: str | None = None,
        timeout_s: float = 120.0,
        max_concurrent: int = 256,
        max_retries: int = 5,
        verify: bool | ssl.SSLContext = True,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        if not timeout_s > 0 or max_concurrent < 1 or max_retries < 0:
            raise ConfigError("timeout_s is above 0, max_concurrent starts at 1, max_retries at 0")
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"{base_url!r} is no address of a service: give http://host:port")
        self._model = model
        self._path = quote(model, safe="")
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._slots = asyncio.Semaphore(max_concurrent)
        tls = ssl.create_default_context() if verify is True else verify
        self._pools = [
            httpx.AsyncClient(
                base_url=base_url,
                headers={"Authorization": f"Bearer {token}"} if token else {},
                timeout=httpx.Timeout(timeout_s),
                limits=httpx.Limits(max_connections=POOL_SIZE, max_keepalive_connections=POOL_SIZE),
                verify=tls,
                transport=transport,
            )
            for _ in range(math.ceil(max_concurrent / POOL_SIZE))
        ]
        self._under_way = [0] * len(self._pools)
        self._loop = LoopThread(f"http client of {model}")

    def predict(self, body: str) -> str:
        return self._wait(self._ask("predict", body))

    def embed(self, body: str) -> str:
        return self._wait(self._ask("embed", body))

    def predict_with_embedding(self, body: str) -> str:
        return self._wait(self._ask("predict_with_embedding", body))

    def metadata(self) -> str:
        return self._wait(self._send("GET", f"/api/metadata/{self._path}")).text

    async def predict_async(self, body: str, session: object = None) -> str:
        return await self._elsewhere(self._ask("predict", body))

    async def embed_async(self, body: str, session: object = None) -> str:
        return await self._elsewhere(self._ask("embed", body))

    async def predict_with_embedding_async(self, body: str, session: object = None) -> str:
        return await self._elsewhere(self._ask("predict_with_embedding", body))

    def predict_batch(self, bodies: Sequence[str]) -> list[str]:
        return self._wait(self._ask_all("predict", bodies))

    def embed_batch(self, bodies: Sequence[str]) -> list[str]:
        return self._wait(self._ask_all("embed", bodies))

    def predict_with_embedding_batch(self, bodies: Sequence[str]) -> list[str]:
        return self._wait(self._ask_all("predict_with_embedding", bodies))

    def run_tiles(
        self,
        tiles: NDArray[np.uint8],
        mode: Mode = "embedding",
        *,
        slide_name: str = "",
        rna_sha256: str | None = None,
        compress: bool = False,
    ) -> list[TileOutput | InferenceError]:
        """Many tiles in one request, without base64 or PNG: a result or an error per tile, in order.

        Args:
            tiles: (N, H, W, C) uint8.
            slide_name: for the service's log.
            rna_sha256: digest of RNA that was registered.
            compress: send them as LZ4.

        Raises:
            InferenceError: the request as a whole was refused.
        """
        content = encode_tiles(tiles, mode, slide_name, bulk_rna_sha256=rna_sha256, compress=compress)
        response = self._wait(self._send("POST", f"/api/batch/{self._path}", content, MEDIA_TYPE))
        header, arrays = decode_answers(response.content)
        rows = iter(range(len(tiles)))
        return [rebuild(error) if error else _row(header.outputs, arrays, next(rows)) for error in header.errors]

    def register_bulk_rna(self, values: Sequence[float]) -> str:
        """Send a slide's RNA once; returns the digest by which its tiles refer to it (`bulk_rna_sha256`).

        Raises:
            BadRequest: not what the model takes.
            UnknownModel: no model of the service takes RNA.
        """
        sha256 = bulk_rna_sha256(values)
        text = f"[{','.join(map(repr, map(float, values)))}]"
        self._wait(self._send("PUT", f"/api/bulk-rna/{sha256}", text.encode(), "application/json"))
        return sha256

    def close(self) -> None:
        """End what is under way with `ServerClosed`, then close the connections; idempotent."""
        self._loop.close(self._close_pools())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # On the caller's side.

    def _wait(self, work: Coroutine[Any, Any, V]) -> V:
        future = self._loop.start(work)
        if future is None:
            raise self._closed()
        try:
            return future.result()
        except CancelledError:
            raise self._closed() from None
        finally:
            future.cancel()  # the caller was interrupted

    async def _elsewhere(self, work: Coroutine[Any, Any, V]) -> V:
        future = self._loop.start(work)
        if future is None:
            raise self._closed()
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise self._closed() from None

    def _closed(self) -> ServerClosed:
        return ServerClosed(f"the client of {self._model} is closed: make a new one")

    # On the client's loop.

    async def _ask_all(self, method: str, bodies: Sequence[str]) -> list[str]:
        answers = await asyncio.gather(*(self._ask(method, body) for body in bodies), return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException) and not isinstance(answer, InferenceError):
                raise answer
        return all_or_error([answer for answer in answers if isinstance(answer, str | InferenceError)])

    async def _ask(self, method: str, body: str) -> str:
        try:
            content = body.encode()
        except UnicodeEncodeError:
            raise BadRequest("the body has a text that is not Unicode") from None
        return (await self._send("POST", f"/api/{method}/{self._path}", content, "application/json")).text

    async def _send(
        self, verb: str, path: str, content: bytes | None = None, media_type: str | None = None
    ) -> httpx.Response:
        headers = {"X-Request-Id": uuid4().hex, **({"Content-Type": media_type} if media_type else {})}
        async with self._slots:
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await self._repeat(verb, path, content, headers)
            except httpx.TimeoutException as error:
                raise self._too_late() from error
            except httpx.TransportError as error:
                text = f"the service of {self._model} cannot be reached ({type(error).__name__}): is it running?"
                raise Overloaded(text) from error
            except TimeoutError as error:
                if isinstance(error, InferenceError):
                    raise
                raise self._too_late() from error

    async def _repeat(self, verb: str, path: str, content: bytes | None, headers: dict[str, str]) -> httpx.Response:
        for attempt in range(self._max_retries + 1):
            response = await self._request(verb, path, content, headers)
            if response.is_success:
                return response
            error, retryable = read_error(response.status_code, response.content)
            pause_s = _pause(attempt, response.headers.get("Retry-After", ""))
            if response.status_code not in RETRIED or not retryable or attempt == self._max_retries:
                break
            await asyncio.sleep(pause_s)
        raise error

    async def _request(self, verb: str, path: str, content: bytes | None, headers: dict[str, str]) -> httpx.Response:
        pool = min(range(len(self._pools)), key=self._under_way.__getitem__)
        self._under_way[pool] += 1
        try:
            return await self._pools[pool].request(verb, path, content=content, headers=headers)
        finally:
            self._under_way[pool] -= 1

    async def _close_pools(self) -> None:
        for pool in self._pools:
            await pool.aclose()

    def _too_late(self) -> DeadlineExceeded:
        return DeadlineExceeded(f"the service of {self._model} gave no answer within {self._timeout_s:g} s")


def _pause(attempt: int, retry_after: str) -> float:
    """Seconds before the next try: a random share of an exponential pause, on top of what the service asks for."""
    asked_s = min(float(retry_after), MAX_RETRY_AFTER_S) if retry_after.isdecimal() else 0.0
    longest_s = min(math.ldexp(FIRST_PAUSE_S, attempt), LONGEST_PAUSE_S)
    return asked_s + longest_s * (1 + random.random()) / 2  # noqa: S311 - spreads callers, guards nothing


def _row(outputs: Sequence[OutputRows], arrays: Sequence[NDArray[Any]], row: int) -> TileOutput:
    found = {output.name: array[row].copy() for output, array in zip(outputs, arrays, strict=True)}
    masks = [PackedMask.pack(found[o.name], o.n_classes) for o in outputs if o.name == "mask"]
    return TileOutput(found.get("embedding"), found.get("prediction"), masks[0] if masks else None)
