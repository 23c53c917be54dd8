"""From a request to its answer through one model: what every way of asking it has in common."""

import asyncio
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import ParamSpec, TypeVar, cast

from inference.batching import (
    BatchScheduler,
    FailureKind,
    SchedulerState,
    SchedulerStatistics,
    classify_failure,
    too_late,
)
from inference.contract import ModelRequest, ModelResponse, model_name_of
from inference.errors import (
    BadRequest,
    Broken,
    CallerError,
    ConfigError,
    DeviceBroken,
    ForwardError,
    InferenceError,
    ServerClosed,
    TileError,
)
from inference.models.sample import Mode, PreparedSample, TileOutput
from inference.models.server_model import BaseServerModel

PREPARE_THREADS = 4

TURN_S = 0.5
"""How often a call that waits for the device looks whether it still can be had."""

LONG_OUTPUT = 4096
"""Values from which writing an answer as JSON takes too long for an event loop: a mask has 262,144."""

P = ParamSpec("P")
V = TypeVar("V")

Read = Callable[[], ModelRequest]
"""Gives the request; called in a thread, for parsing takes time."""


@dataclass(frozen=True, eq=False)
class Prepared:
    """A sample that passed stage 1, and its request where it came as one."""

    sample: PreparedSample
    request: ModelRequest | None = None


class ModelPipeline:
    """Stage 1 in a few threads, stage 2 in batches, for one loaded model.

    Thread-safe; any number of event loops may wait in `answer`. `run` forwards at once; `answer` and `submit` gather
    in one queue, or run alone without `dynamic_batching`. Both use the device in turn. A device that broke in either
    stays broken for both.

    Args:
        max_batch_size, max_wait_ms, dynamic_batching: as of `InProcessClient`.
        stuck_after_s: a forward that takes longer breaks the queue; None waits for ever.
        max_queued_items: samples that may wait for a batch.

    Raises:
        ConfigError: a setting out of range, or batches larger than the model was loaded for.
    """

    def __init__(
        self,
        model: BaseServerModel,
        max_batch_size: int = 64,
        max_wait_ms: float = 10,
        dynamic_batching: bool = True,
        stuck_after_s: float | None = None,
        max_queued_items: int = 4096,
    ) -> None:
        if max_batch_size < 1:
            raise ConfigError(f"max_batch_size is {max_batch_size}: give 1 or more")
        if max_wait_ms < 0:
            raise ConfigError(f"max_wait_ms is {max_wait_ms:g}: give milliseconds from 0 up")
        largest = model.fixed_batch or model.manifest.max_batch
        if max_batch_size > largest:
            raise ConfigError(f"max_batch_size {max_batch_size} is more than {model.model_name} takes: {largest}")
        self.model = model
        self._run_size = max_batch_size
        self._device = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        self._broken: str | None = None
        # A model with its own `forward_batch` gets batches of one mode, for that is what it takes.
        own = type(model).forward_batch, type(model).forward
        self._own_forward = own != (BaseServerModel.forward_batch, BaseServerModel.forward)
        self.scheduler: BatchScheduler[Prepared, TileOutput | ModelResponse] | None = None
        if dynamic_batching:
            self.scheduler = BatchScheduler(
                self._forward,
                max_batch_size=max_batch_size,
                max_wait_s=max_wait_ms / 1000,
                nbytes=lambda prepared: prepared.sample.nbytes,
                lane=(lambda _prepared, mode: mode) if self._own_forward else None,
                device_lock=self._device,
                stuck_after_s=stuck_after_s,
                max_queued_items=max_queued_items,
                on_out_of_memory=model.free_memory,
                name=model.model_name,
            )
        self._pool = ThreadPoolExecutor(PREPARE_THREADS, thread_name_prefix="prepare")

    # Stage 1.

    def prepare(self, read: Read, mode: Mode) -> Prepared:
        """One request, alone; whatever goes wrong is its own fault.

        Raises:
            BadRequest: it cannot be used.
        """
        request = read()
        name = self.model.model_name
        if request.model_name is not None and not self.model.serves(model_name_of(request.model_name)):
            raise BadRequest(f"this client runs {name}, the request names {request.model_name[:80]!r}")
        if request.mode not in (None, mode):
            raise BadRequest(f"the call is for mode {mode}, the request names {request.mode[:80]!r}")
        try:
            return Prepared(self.model.prepare_sample(request), request)
        except CallerError:
            raise
        except BaseException as error:
            # Even what a subclass should not raise: it must not end a thread that others need.
            text = f"{name} cannot prepare this request: {type(error).__name__}: {error}"
            raise BadRequest(" ".join(text.split())[:500]) from error

    # Stage 2, in batches that the caller makes.

    def run(self, reads: Sequence[Read], mode: Mode) -> list[str | InferenceError]:
        """One answer or error per request, in order; parts no longer than the limit are forwarded at once."""
        self._check(mode)
        waiting = [self.start(self.prepare, read, mode) for read in reads]
        answers: list[str | InferenceError | None] = [None] * len(reads)
        ready: list[tuple[int, Prepared]] = []
        try:
            for position, future in enumerate(waiting):
                try:
                    ready.append((position, future.result()))
                except InferenceError as error:
                    answers[position] = error
        finally:
            for future in waiting:
                future.cancel()
        while ready:
            part, ready = ready[: self._run_size], ready[self._run_size :]
            for (position, prepared), found in zip(part, self._run_part([p for _, p in part], mode), strict=True):
                answers[position] = found if isinstance(found, InferenceError) else self._text(prepared, found, mode)
        return [answer for answer in answers if answer is not None]

    # Stage 2, in batches that form.

    async def answer(self, read: Read, mode: Mode, *, deadline_s: float | None = None) -> str:
        """The answer to one request as JSON.

        Args:
            deadline_s: from the end of stage 1: when it must have its answer; None waits as long as it takes.

        Raises:
            BadRequest: it cannot be used.
            QueueFull: there is no room for it now.
            DeadlineExceeded: there was none in time.
            ForwardError, Broken, ServerClosed: as `BatchScheduler` says.
        """
        self._check(mode)
        prepared = await asyncio.wrap_future(self.start(self.prepare, read, mode))
        found = await asyncio.wrap_future(self._begin(prepared, mode, deadline_s, block=False))
        if isinstance(found, TileOutput) and _n_values(found) > LONG_OUTPUT:
            with suppress(ServerClosed):  # closed since: the last answers are written here
                return await asyncio.wrap_future(self.start(self._text, prepared, found, mode))
        return self._text(prepared, found, mode)

    def submit(
        self, sample: PreparedSample, mode: Mode, deadline_s: float | None = None, *, block: bool = True
    ) -> "Future[TileOutput]":
        """Queue one prepared sample: the tensor path.

        Args:
            deadline_s: from now: when it must have its answer.
            block: wait for room in the queue.

        Raises:
            BadRequest: no such mode, or a model whose own `forward_batch` needs requests.
            QueueFull, DeviceBroken, ServerClosed: as `BatchScheduler.submit`.
        """
        self._check(mode)
        if not isinstance(sample, PreparedSample):
            raise BadRequest(f"submit takes what prepare_tile or prepare_sample gives, not a {type(sample).__name__}")
        if self._own_forward:
            raise BadRequest(f"{self.model.model_name} has a forward of its own, which takes requests, not samples")
        return cast("Future[TileOutput]", self._begin(Prepared(sample), mode, deadline_s, block=block))

    def start(self, function: Callable[P, V], *args: P.args, **kwargs: P.kwargs) -> Future[V]:
        """Runs a function in the threads of stage 1.

        Raises:
            ServerClosed: after `close`.
            CallerError: in a process that was forked from the one which made this.
        """
        if os.getpid() != self._pid:
            raise CallerError(f"this client of {self.model.model_name} belongs to another process: make a new one here")
        try:
            return self._pool.submit(function, *args, **kwargs)
        except RuntimeError:  # the pool's word for closed
            raise self._closed_error() from None

    # Its state.

    @property
    def fault(self) -> InferenceError | None:
        """Why it takes no more work; None while it does."""
        statistics = self.statistics()
        if self._broken is None and statistics is not None and statistics.state is SchedulerState.BROKEN:
            self._broken = f"{self.model.model_name} can no longer run: start a new process"
        if self._broken is not None:
            return DeviceBroken(self._broken)
        return self._closed_error() if self._closed else None

    def statistics(self) -> SchedulerStatistics | None:
        """What went through the queue and in which batches; None without dynamic batching."""
        return None if self.scheduler is None else self.scheduler.statistics()

    def close(self) -> None:
        """Answer what is queued, then stop; idempotent. Later calls raise `ServerClosed`."""
        if os.getpid() != self._pid:
            return
        self._closed = True
        # The queue first: its answers are written in the pool.
        if self.scheduler is not None:
            self.scheduler.close()
        self._pool.shutdown()

    def _check(self, mode: Mode) -> None:
        self.model.check_mode(mode)
        if self._broken is not None:
            raise DeviceBroken(self._broken)

    def _closed_error(self) -> ServerClosed:
        return ServerClosed(f"the client of {self.model.model_name} is closed: make a new one")

    def _begin(
        self, prepared: Prepared, mode: Mode, deadline_s: float | None, *, block: bool
    ) -> "Future[TileOutput | ModelResponse]":
        if self.scheduler is None:
            latest = None if deadline_s is None else time.monotonic() + deadline_s
            return self.start(self._alone, prepared, mode, latest)
        return self.scheduler.submit(prepared, mode, call_deadline_s=deadline_s, block=block)

    def _alone(self, prepared: Prepared, mode: Mode, latest: float | None) -> TileOutput | ModelResponse:
        if latest is not None and time.monotonic() >= latest:
            raise too_late("queued")
        (found,) = self._halved([prepared], mode)
        if isinstance(found, InferenceError):
            raise found
        return found

    def _run_part(self, batch: Sequence[Prepared], mode: Mode) -> list[TileOutput | ModelResponse | InferenceError]:
        """One result or error per sample; a model that is broken gives each its own error."""
        try:
            self._check(mode)
            return self._halved(batch, mode)
        except Broken as error:
            return [type(error)(error.message, **error.fields) for _ in batch]

    def _halved(self, batch: Sequence[Prepared], mode: Mode) -> list[TileOutput | ModelResponse | InferenceError]:
        """One result or error per sample: a batch that fails is halved until the guilty stand alone."""
        try:
            with self._turn():
                return list(self._forward(batch, [mode] * len(batch)))
        except (Broken, CallerError):
            raise
        except Exception as error:
            kind = classify_failure(error)
            if kind is FailureKind.FATAL:
                self._broken = f"the model can no longer run, start a new process: {type(error).__name__}: {error}"
                raise DeviceBroken(self._broken) from error
            if len(batch) == 1:
                return [_alone_error(error, kind)]
            half = (len(batch) + 1) // 2
            if kind is FailureKind.OUT_OF_MEMORY:
                self._run_size = min(self._run_size, half)
                self.model.free_memory()
            return [*self._halved(batch[:half], mode), *self._halved(batch[half:], mode)]

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """The device; whoever waits for it behind a forward that is stuck learns when that is given up."""
        while not self._device.acquire(timeout=TURN_S):
            fault = self.fault
            if isinstance(fault, DeviceBroken):
                raise fault
        try:
            yield
        finally:
            self._device.release()

    def _forward(self, batch: Sequence[Prepared], modes: Sequence[str]) -> Sequence[TileOutput | ModelResponse]:
        samples, asked = [p.sample for p in batch], cast("Sequence[Mode]", modes)
        try:
            if self._own_forward:
                requests = [p.request for p in batch if p.request is not None]
                return self.model.forward_batch(samples, requests, asked[0])
            # A row that is not finite comes back as its error; the scheduler hands it to that caller alone.
            return cast("Sequence[TileOutput]", self.model.forward_tiles(samples, asked))
        except DeviceBroken as error:
            self._broken = error.message
            raise

    def _text(self, prepared: Prepared, found: TileOutput | ModelResponse, mode: Mode) -> str:
        if isinstance(found, TileOutput):
            assert prepared.request is not None, "only requests are answered in JSON"
            found = self.model.respond(prepared.request, found, mode)
        return found.to_json()


def _alone_error(error: Exception, kind: FailureKind) -> ForwardError:
    """What a forward that failed on one tile says of that tile."""
    if kind is FailureKind.OUT_OF_MEMORY:
        return ForwardError("no memory for this tile even alone: free some, or use a larger device")
    if isinstance(error, ForwardError):
        return TileError(error.message, **error.fields) if type(error) is ForwardError else error
    return TileError(f"the forward pass fails on this tile alone: {type(error).__name__}: {str(error)[:2000]}")


def _n_values(output: TileOutput) -> int:
    if output.mask is not None:
        return output.mask.shape[0] * output.mask.shape[1]
    return max(0 if head is None else head.size for head in (output.embedding, output.prediction))
