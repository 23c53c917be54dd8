"""Asks a remote service, behind the same protocol as a model in this process."""

import asyncio
import math
import random
from collections.abc import Coroutine, Sequence
from concurrent.futures import CancelledError
from typing import Any, NamedTuple, Self, TypeVar
from urllib.parse import quote
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

try:
    import httpx
except ImportError as missing:
    raise ImportError("HttpClient needs the httpx package: install slide-inference[serve]") from missing

from inference.clients._answers import all_or_error
from inference.clients._checks import OUTPUTS, json_object, tile_answer, tile_rows, wrong_answer
from inference.clients._connection import Trust, check_address, token_headers, trusted, unreachable
from inference.clients._loop import LoopThread
from inference.contract.faults import RETRIED, read_error
from inference.contract.frames import MEDIA_TYPE, encode_tiles
from inference.errors import BadRequest, ConfigError, DeadlineExceeded, InferenceError, ServerClosed
from inference.models.rna import bulk_rna_sha256
from inference.models.sample import Mode, TileOutput

FIRST_PAUSE_S = 0.25
LONGEST_PAUSE_S = 8.0
MAX_RETRY_AFTER_S = 60.0

POOL_SIZE = 16
"""Connections of one pool: each request looks at every connection of its pool, so many in one are slow."""

MAX_JSON_BYTES = 64 << 20
"""Of one answer in JSON; the largest has a number for each pixel of a tile."""

MAX_ERROR_BYTES = 1 << 20
"""Of an error body; a longer one is not read."""

V = TypeVar("V")


class _Answer(NamedTuple):
    status: int
    content: bytes
    retry_after: str


class HttpClient:
    """A `Client` over a remote service. Usable from several threads and event loops at once.

    All calls share their connections, on an event loop of the client's own. A call that is answered 429 or 503 is
    repeated after a random pause, not before the `Retry-After` it was given, and only if the answer says that it may
    succeed; each of these errors, and any other, arrives as the class that the model would raise in process. An answer
    that is no result of the tile which was sent is a `ModelContractError`. Not usable in a forked child.

    Args:
        base_url: e.g. `http://127.0.0.1:8080`.
        model: the model's name there.
        token: sent as bearer token.
        timeout_s: longest wait for one answer, repetitions included.
        max_concurrent: requests under way at once; more wait for their turn.
        max_retries: repetitions of one request.
        verify: False, or the certificates to trust: the path of a CA file, a TLS context, or True for the system's.
        transport: in place of the network.
        max_response_bytes: longest answer to a batch; other answers have 64 MiB at most.

    Raises:
        ConfigError: a setting out of range, no http(s) address, a token that no header can carry, or no CA file.
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
        verify: Trust = True,
        transport: httpx.AsyncBaseTransport | None = None,
        max_response_bytes: int = 512 << 20,
    ) -> None:
        if not timeout_s > 0 or max_concurrent < 1 or max_retries < 0 or max_response_bytes < 1:
            raise ConfigError("timeout_s is above 0, max_concurrent and max_response_bytes from 1, max_retries from 0")
        check_address(base_url)
        self._base_url = base_url
        self._model = model
        self._path = quote(model, safe="")
        self._timeout_s = timeout_s
        self._max_retries = max_retries
        self._max_response_bytes = max_response_bytes
        self._slots = asyncio.Semaphore(max_concurrent)
        headers, tls = {"Accept-Encoding": "identity", **token_headers(token)}, trusted(verify)
        self._pools = [
            httpx.AsyncClient(
                base_url=base_url,
                headers=headers,
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
        content = self._wait(self._send("GET", f"/api/metadata/{self._path}"))
        json_object(content)
        return content.decode()

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
            ModelContractError: what came back is not an answer to these tiles.
        """
        if mode not in OUTPUTS:
            raise BadRequest(f"{mode!r} is no mode: give one of {', '.join(OUTPUTS)}")
        try:
            content = encode_tiles(tiles, mode, slide_name, bulk_rna_sha256=rna_sha256, compress=compress)
        except InferenceError:
            raise
        except ValueError:
            raise BadRequest("slide_name is too long or no text, or rna_sha256 is no digest in 64 hex digits") from None
        answer = self._send("POST", f"/api/batch/{self._path}", content, MEDIA_TYPE, self._max_response_bytes)
        return tile_rows(self._wait(answer), len(tiles), mode)

    def register_bulk_rna(self, values: Sequence[float]) -> str:
        """Send a slide's RNA once; returns the digest by which its tiles refer to it (`bulk_rna_sha256`).

        Raises:
            BadRequest: not what the model takes.
            UnknownModel: no model of the service takes RNA.
        """
        sha256 = bulk_rna_sha256(values)
        text = f"[{','.join(map(repr, map(float, values)))}]"
        json_object(self._wait(self._send("PUT", f"/api/bulk-rna/{sha256}", text.encode(), "application/json")))
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
        answer = await self._send("POST", f"/api/{method}/{self._path}", content, "application/json")
        return tile_answer(answer, content, combined=method == "predict_with_embedding")

    async def _send(
        self,
        verb: str,
        path: str,
        content: bytes | None = None,
        media_type: str | None = None,
        max_bytes: int = MAX_JSON_BYTES,
    ) -> bytes:
        headers = {"X-Request-Id": uuid4().hex, **({"Content-Type": media_type} if media_type else {})}
        request = self._pools[0].build_request(verb, path, content=content, headers=headers)
        async with self._slots:
            try:
                async with asyncio.timeout(self._timeout_s):
                    return await self._repeat(request, min(max_bytes, self._max_response_bytes))
            except InferenceError:
                raise
            except (httpx.TimeoutException, TimeoutError) as error:
                raise self._too_late() from error
            except (httpx.HTTPError, httpx.StreamError, OSError, ValueError, ExceptionGroup) as error:
                raise unreachable(error, self._model, self._base_url) from error

    async def _repeat(self, request: httpx.Request, max_bytes: int) -> bytes:
        for attempt in range(self._max_retries + 1):
            answer = await self._request(request, max_bytes)
            if 200 <= answer.status < 300:
                return answer.content
            error, retryable = read_error(answer.status, answer.content)
            if answer.status not in RETRIED or not retryable or attempt == self._max_retries:
                break
            await asyncio.sleep(_pause(attempt, answer.retry_after))
        raise error

    async def _request(self, request: httpx.Request, max_bytes: int) -> _Answer:
        pool = min(range(len(self._pools)), key=self._under_way.__getitem__)
        self._under_way[pool] += 1
        try:
            response = await self._pools[pool].send(request, stream=True)
            try:
                return await _read(response, max_bytes)
            finally:
                await response.aclose()
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
    longest_s = min(math.ldexp(FIRST_PAUSE_S, min(attempt, 64)), LONGEST_PAUSE_S)
    return asked_s + longest_s * (1 + random.random()) / 2  # noqa: S311 - spreads callers, guards nothing


async def _read(response: httpx.Response, max_bytes: int) -> _Answer:
    """An answer, not a byte of it unpacked, and no more than so many; of an error, nothing instead of too much."""
    good = response.is_success
    packed = response.headers.get("Content-Encoding", "").strip().lower() not in ("", "identity")
    if packed and good:
        raise wrong_answer("is compressed, which was not asked for")
    limit = max_bytes if good else min(max_bytes, MAX_ERROR_BYTES)
    found = bytearray()
    if not packed:
        async for part in response.aiter_bytes():
            if len(found) + len(part) > limit:
                if good:
                    raise wrong_answer(f"is longer than its limit of {limit} bytes (of a batch: max_response_bytes)")
                found.clear()
                break
            found += part
    return _Answer(response.status_code, bytes(found), response.headers.get("Retry-After", ""))
