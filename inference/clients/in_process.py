"""Runs a model in this process behind the same JSON contract that a remote service speaks."""

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Self, cast

from pydantic import ValidationError

from inference.batching import BatchScheduler
from inference.contract import ModelRequest
from inference.errors import BadRequest, ConfigError
from inference.models.sample import Mode, PreparedSample, TileOutput
from inference.models.server_model import BaseServerModel, build_server_model, respond

PREPARE_THREADS = 4


class InProcessClient:
    """A `Client` over a loaded model. Usable from several threads and event loops at once, which share batches.

    Synchronous and `*_batch` calls run at once, one forward at a time; asynchronous ones gather in one queue,
    or run alone where `dynamic_batching` is off.

    Args:
        model: a loaded server model.
        max_batch_size: most tiles of one forward pass.
        max_wait_ms: how long the first tile of a batch waits for others.
        dynamic_batching: gather concurrent asynchronous calls into batches.
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
        self._model = model
        self._max_batch_size = max_batch_size
        self._device = threading.Lock()
        self._prepare = ThreadPoolExecutor(PREPARE_THREADS, thread_name_prefix="prepare")
        self._scheduler: BatchScheduler[PreparedSample, TileOutput] | None = None
        if dynamic_batching:
            self._scheduler = BatchScheduler(
                self._forward,
                max_batch_size=max_batch_size,
                max_wait_s=max_wait_ms / 1000,
                nbytes=lambda sample: sample.nbytes,
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

    def close(self) -> None:
        """Answer what is queued, then stop; idempotent."""
        if self._scheduler is not None:
            self._scheduler.close()
        self._prepare.shutdown()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self, bodies: Sequence[str], mode: Mode) -> list[str]:
        """Prepare in threads, then forward in batches no longer than the limit."""
        self._model.check_mode(mode)
        requests = [parse_request(body) for body in bodies]
        samples = list(self._prepare.map(self._model.prepare_sample, requests))
        answers: list[str] = []
        for start in range(0, len(samples), self._max_batch_size):
            part = slice(start, start + self._max_batch_size)
            with self._device:
                responses = self._model.forward_batch(samples[part], requests[part], mode)
            answers += [response.model_dump_json(exclude_none=True) for response in responses]
        return answers

    async def _run_async(self, body: str, mode: Mode) -> str:
        self._model.check_mode(mode)
        loop = asyncio.get_running_loop()
        if self._scheduler is None:
            return (await loop.run_in_executor(self._prepare, self._run_alone, body, mode))[0]
        request, sample = await loop.run_in_executor(self._prepare, self._prepared, body)
        output = await asyncio.wrap_future(self._scheduler.submit(sample, mode, block=False))
        return respond(request, output, mode).model_dump_json(exclude_none=True)

    def _run_alone(self, body: str, mode: Mode) -> list[str]:
        request, sample = self._prepared(body)
        with self._device:
            responses = self._model.forward_batch([sample], [request], mode)
        return [response.model_dump_json(exclude_none=True) for response in responses]

    def _prepared(self, body: str) -> tuple[ModelRequest, PreparedSample]:
        request = parse_request(body)
        return request, self._model.prepare_sample(request)

    def _forward(self, samples: Sequence[PreparedSample], modes: Sequence[str]) -> Sequence[TileOutput]:
        # A row that is not finite comes back as its error; the scheduler hands it to that caller alone.
        return cast("Sequence[TileOutput]", self._model.forward_tiles(samples, cast("Sequence[Mode]", modes)))


def parse_request(body: str) -> ModelRequest:
    """A request from its JSON.

    Raises:
        BadRequest: not JSON, or a field is missing, unknown or of the wrong kind.
    """
    try:
        return ModelRequest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"])) or "body"
        raise BadRequest(f"request field {where}: {first['msg']}") from None
