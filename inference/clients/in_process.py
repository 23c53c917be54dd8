"""Runs a model in this process behind the same JSON contract that a remote service speaks."""

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Self

from inference.batching import SchedulerStatistics
from inference.clients._answers import all_or_error
from inference.clients.pipeline import ModelPipeline
from inference.contract import parse_request
from inference.errors import BadRequest, ConfigError, InferenceError
from inference.models.sample import Mode, PreparedSample, TileOutput
from inference.models.server_model import BaseServerModel, build_server_model


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
        self.pipeline = ModelPipeline(model, max_batch_size, max_wait_ms, dynamic_batching)

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
            assets: folder of further files, for models that say they need it; none here does.

        Raises:
            UnknownModel: no such model or checkpoint.
            ConfigError: assets were given to a model that takes none.
        """
        if assets is not None:
            raise ConfigError(f"{model} takes no assets folder: leave it out")
        return cls(build_server_model(model, path, device), max_batch_size, max_wait_ms, dynamic_batching)

    def predict(self, body: str) -> str:
        return self._run_one(body, "prediction")

    def embed(self, body: str) -> str:
        return self._run_one(body, "embedding")

    def predict_with_embedding(self, body: str) -> str:
        return self._run_one(body, "prediction_with_embedding")

    def metadata(self) -> str:
        return self.pipeline.model.get_metadata().model_dump_json()

    async def predict_async(self, body: str, session: object = None) -> str:
        return await self.pipeline.answer(partial(parse_request, body), "prediction")

    async def embed_async(self, body: str, session: object = None) -> str:
        return await self.pipeline.answer(partial(parse_request, body), "embedding")

    async def predict_with_embedding_async(self, body: str, session: object = None) -> str:
        return await self.pipeline.answer(partial(parse_request, body), "prediction_with_embedding")

    def predict_batch(self, bodies: Sequence[str]) -> list[str]:
        return all_or_error(self._run(bodies, "prediction"))

    def embed_batch(self, bodies: Sequence[str]) -> list[str]:
        return all_or_error(self._run(bodies, "embedding"))

    def predict_with_embedding_batch(self, bodies: Sequence[str]) -> list[str]:
        return all_or_error(self._run(bodies, "prediction_with_embedding"))

    def submit(
        self, sample: PreparedSample, mode: Mode = "prediction_with_embedding", deadline_s: float | None = None
    ) -> "Future[TileOutput]":
        """Queue one prepared sample, without JSON; waits for room in the queue.

        Args:
            deadline_s: from now: when it must have its answer, else `DeadlineExceeded`.

        Raises:
            BadRequest: no such mode, or a model whose own `forward_batch` needs requests.
            DeadlineExceeded, DeviceBroken, QueueFull, ServerClosed: as `BatchScheduler.submit`.
        """
        return self.pipeline.submit(sample, mode, deadline_s)

    def statistics(self) -> SchedulerStatistics | None:
        """What went through the queue and in which batches; None without dynamic batching."""
        return self.pipeline.statistics()

    def close(self) -> None:
        """Answer what is queued, then stop; idempotent. Later calls raise `ServerClosed`."""
        self.pipeline.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run_one(self, body: str, mode: Mode) -> str:
        (answer,) = self._run([body], mode)
        if isinstance(answer, InferenceError):
            raise answer
        return answer

    def _run(self, bodies: Sequence[str], mode: Mode) -> list[str | InferenceError]:
        if isinstance(bodies, str | bytes):
            raise BadRequest("a batch is a list of bodies, this is one: use the call without _batch, or [body]")
        return self.pipeline.run([partial(parse_request, body) for body in bodies], mode)
