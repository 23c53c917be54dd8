"""Runs a model in this process behind the same JSON contract that a remote service speaks."""

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import ParamSpec, Self, TypeVar, cast

from inference.batching import BatchScheduler, SchedulerStatistics
from inference.contract import ModelRequest, ModelResponse, parse_request
from inference.errors import BadRequest, ConfigError, ServerClosed
from inference.models.sample import Mode, PreparedSample, TileOutput
from inference.models.server_model import BaseServerModel, build_server_model, respond

PREPARE_THREADS = 4

P = ParamSpec("P")
V = TypeVar("V")


@dataclass(frozen=True, eq=False)
class _Prepared:
    """A request that passed stage 1."""

    request: ModelRequest
    sample: PreparedSample


class InProcessClient:
    """A `Client` over a loaded model. Usable from several threads and event loops at once, which share batches.

    Synchronous and `*_batch` calls run at once, one forward at a time; asynchronous ones gather in one queue,
    or run alone where `dynamic_batching` is off.

    Args:
        model: a loaded server model.
        max_batch_size: most tiles of one forward pass.
        max_wait_ms: how long the first tile of a batch waits for others.
        dynamic_batching: gather concurrent asynchronous calls into batches.

    Raises:
        ConfigError: a setting out of range, or batches larger than the model was loaded for.
    """

    def __init__(
        self,
        model: BaseServerModel,
        max_batch_size: int = 64,
        max_wait_ms: float = 10,
        dynamic_batching: bool = True,
    ) -> None:
        if max_batch_size < 1 or max_wait_ms < 0:
            raise ConfigError(f"max_batch_size {max_batch_size} starts at 1, max_wait_ms {max_wait_ms} at 0")
        largest = model.fixed_batch or model.manifest.max_batch
        if max_batch_size > largest:
            raise ConfigError(f"max_batch_size {max_batch_size} is more than {model.model_name} takes: {largest}")
        self._model = model
        self._max_batch_size = max_batch_size
        self._device = threading.Lock()
        self._prepare = ThreadPoolExecutor(PREPARE_THREADS, thread_name_prefix="prepare")
        self._scheduler: BatchScheduler[_Prepared, TileOutput | ModelResponse] | None = None
        # A model with its own `forward_batch` gets batches of one mode, for that is what it takes.
        self._own_forward = type(model).forward_batch is not BaseServerModel.forward_batch
        if dynamic_batching:
            self._scheduler = BatchScheduler(
                self._forward,
                max_batch_size=max_batch_size,
                max_wait_s=max_wait_ms / 1000,
                nbytes=lambda prepared: prepared.sample.nbytes,
                lane=lambda _prepared, mode: mode if self._own_forward else None,
                device_lock=self._device,
                name=model.model_name,
            )

    @classmethod
    def from_checkpoint(
        cls,
        model: str,
        path: str | Path | None = None,
        device: str = "cpu",
        assets: str | Path | None = None,
        max_batch_size: int = 64,
        max_wait_ms: float = 10,
        dynamic_batching: bool = True,
    ) -> Self:
        """A client over a checkpoint.

        Args:
            model: the model's registered name.
            path: its `.pt2`; found by name where not given.
            device: torch device string.
            assets: folder of further files, for models that say they need it; no image model does.

        Raises:
            UnknownModel: no such model or checkpoint.
            ConfigError: assets were given to a model that takes none.
        """
        if assets is not None:
            raise ConfigError(f"{model} takes no assets folder")
        return cls(build_server_model(model, path, device), max_batch_size, max_wait_ms, dynamic_batching)

    def predict(self, body: str) -> str:
        return self._run([body], "prediction")[0]

    def embed(self, body: str) -> str:
        return self._run([body], "embedding")[0]

    def predict_with_embedding(self, body: str) -> str:
        return self._run([body], "prediction_with_embedding")[0]

    def metadata(self) -> str:
        return self._model.get_metadata().model_dump_json()

    async def predict_async(self, body: str, session: object = None) -> str:
        return await self._run_async(body, "prediction")

    async def embed_async(self, body: str, session: object = None) -> str:
        return await self._run_async(body, "embedding")

    async def predict_with_embedding_async(self, body: str, session: object = None) -> str:
        return await self._run_async(body, "prediction_with_embedding")

    def predict_batch(self, bodies: Sequence[str]) -> list[str]:
        return self._run(bodies, "prediction")

    def embed_batch(self, bodies: Sequence[str]) -> list[str]:
        return self._run(bodies, "embedding")

    def predict_with_embedding_batch(self, bodies: Sequence[str]) -> list[str]:
        return self._run(bodies, "prediction_with_embedding")

    def statistics(self) -> SchedulerStatistics | None:
        """What went through the queue and in which batches; None without dynamic batching."""
        return None if self._scheduler is None else self._scheduler.statistics()

    def close(self) -> None:
        """Answer what is queued, then stop; idempotent. Later calls raise `ServerClosed`."""
        self._prepare.shutdown()
        if self._scheduler is not None:
            self._scheduler.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self, bodies: Sequence[str], mode: Mode) -> list[str]:
        """Prepare in threads, then forward in batches no longer than the limit."""
        self._model.check_mode(mode)
        waiting = [self._start(self._prepared, body, mode) for body in bodies]
        try:
            prepared = [future.result() for future in waiting]
        finally:
            for future in waiting:
                future.cancel()
        answers: list[str] = []
        for start in range(0, len(prepared), self._max_batch_size):
            answers += self._answer(prepared[start : start + self._max_batch_size], mode)
        return answers

    async def _run_async(self, body: str, mode: Mode) -> str:
        self._model.check_mode(mode)
        if self._scheduler is None:
            return await asyncio.wrap_future(self._start(self._run_alone, body, mode))
        prepared = await asyncio.wrap_future(self._start(self._prepared, body, mode))
        found = await asyncio.wrap_future(self._scheduler.submit(prepared, mode, block=False))
        return (found if isinstance(found, ModelResponse) else respond(prepared.request, found, mode)).to_json()

    def _run_alone(self, body: str, mode: Mode) -> str:
        return self._answer([self._prepared(body, mode)], mode)[0]

    def _answer(self, prepared: Sequence[_Prepared], mode: Mode) -> list[str]:
        with self._device:
            responses = self._model.forward_batch([p.sample for p in prepared], [p.request for p in prepared], mode)
        return [response.to_json() for response in responses]

    def _prepared(self, body: str, mode: Mode) -> _Prepared:
        request = parse_request(body)
        if request.model_name not in (None, self._model.model_name):
            raise BadRequest(f"this client runs {self._model.model_name}, the request names {request.model_name!r}")
        if request.mode not in (None, mode):
            raise BadRequest(f"the call is for mode {mode}, the request names {request.mode!r}")
        return _Prepared(request, self._model.prepare_sample(request))

    def _start(self, function: Callable[P, V], *args: P.args, **kwargs: P.kwargs) -> Future[V]:
        try:
            return self._prepare.submit(function, *args, **kwargs)
        except RuntimeError:  # the pool's word for closed
            raise ServerClosed(f"the client of {self._model.model_name} is closed: make a new one") from None

    def _forward(self, batch: Sequence[_Prepared], modes: Sequence[str]) -> Sequence[TileOutput | ModelResponse]:
        samples, asked = [p.sample for p in batch], cast("Sequence[Mode]", modes)
        if self._own_forward:
            return self._model.forward_batch(samples, [p.request for p in batch], asked[0])
        # A row that is not finite comes back as its error; the scheduler hands it to that caller alone.
        return cast("Sequence[TileOutput]", self._model.forward_tiles(samples, asked))
