"""The models of a service: loaded one after another, looked up by name, closed together."""

import asyncio
import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Protocol, runtime_checkable

from inference.clients.pipeline import ModelPipeline
from inference.contract import model_name_of
from inference.errors import (
    BadRequest,
    CallerError,
    DeviceBroken,
    InferenceError,
    Overloaded,
    ServerClosed,
    UnknownModel,
)
from inference.models.rna import bulk_rna_sha256
from inference.models.server_model import BaseServerModel

log = logging.getLogger(__name__)

LOADING_RETRY_S = 5.0

Load = Callable[[], BaseServerModel]
Models = Iterable[BaseServerModel] | Mapping[str, Load]


@runtime_checkable
class TakesBulkRna(Protocol):
    """A model that keeps a slide's RNA for requests that name it by its digest."""

    def register_bulk_rna(self, values: Sequence[float]) -> str: ...


class ModelTable:
    """Pipelines by model name; those that have yet to load are known but refuse work.

    Args:
        models: loaded models, or functions that load them, by name.
        start: makes the pipeline of a loaded model.
    """

    def __init__(self, models: Models, start: Callable[[BaseServerModel], ModelPipeline]) -> None:
        self._start = start
        self._pipelines: dict[str, ModelPipeline | None] = {}
        self._loads: dict[str, Load] = {}
        self._lock = threading.Lock()
        self._loader: threading.Thread | None = None
        self.draining = False
        self.failure: BaseException | None = None
        if isinstance(models, Mapping):
            self._loads = dict(models)
            self._pipelines = dict.fromkeys(models)
        else:
            for model in models:
                self._pipelines[model.model_name] = start(model)

    def load(self, on_failure: Callable[[], None] = lambda: None) -> None:
        """Load and warm up, in a thread, what is not loaded yet; the first failure ends it."""
        if self._loads and self._loader is None:
            self._loader = threading.Thread(target=self._load_all, args=(on_failure,), name="load models", daemon=True)
            self._loader.start()

    def loaded(self) -> list[tuple[str, ModelPipeline]]:
        """Names and pipelines of what takes work."""
        return [(name, pipeline) for name, pipeline in self._pipelines.items() if pipeline is not None]

    @property
    def names(self) -> tuple[str, ...]:
        """Every model of the service, loaded or not."""
        return tuple(sorted(self._pipelines))

    def __getitem__(self, name: str) -> ModelPipeline:
        """A model that takes work.

        Raises:
            UnknownModel: the service has no such model.
            Overloaded: it is not loaded yet.
            DeviceBroken: it never will be, for it or one before it failed to load.
        """
        name = model_name_of(name)
        if self._pipelines.get(name, True) is None:
            raise self._not_loaded(name)
        for _, pipeline in self.loaded():
            if pipeline.model.serves(name):
                return pipeline
        raise UnknownModel(f"no model {name[:80]!r} here: this service runs {', '.join(self.names)}")

    @property
    def fault(self) -> InferenceError | None:
        """Why the service should get no requests; None when it is ready."""
        if self.draining:
            return ServerClosed("the service is shutting down: ask another one")
        for name, pipeline in self._pipelines.items():
            if pipeline is None:
                return self._not_loaded(name)
            if fault := pipeline.fault:
                return fault
        return None

    async def register_bulk_rna(self, sha256: str, values: list[float]) -> list[str]:
        """Names of the models that now know these values by their digest.

        Raises:
            UnknownModel: no model here takes bulk RNA.
            BadRequest: the values have another digest, or no model takes them.
        """
        found = bulk_rna_sha256(values)
        if found != sha256:
            raise BadRequest(f"the values have the digest {found}, not {sha256[:64]!r}")
        taking = [(name, p, p.model) for name, p in self.loaded() if isinstance(p.model, TakesBulkRna)]
        if not taking:
            raise UnknownModel("no model here takes bulk RNA")
        registered, refused = [], []
        for name, pipeline, model in taking:
            try:
                await asyncio.wrap_future(pipeline.start(model.register_bulk_rna, values))
                registered.append(name)
            except CallerError as error:
                refused.append(error)
        if not registered:
            raise refused[0]
        return registered

    def close(self) -> None:
        """Answer what is queued, then stop."""
        self.draining = True
        with self._lock:
            pipelines = self.loaded()
        for _, pipeline in pipelines:
            pipeline.close()

    def _not_loaded(self, name: str) -> InferenceError:
        if self.failure is not None:
            return DeviceBroken(f"{name} was not loaded: the log has the reason; start the service again")
        return Overloaded(f"{name} is being loaded: try again later", retry_after_s=LOADING_RETRY_S)

    def _load_all(self, on_failure: Callable[[], None]) -> None:
        for name, load in self._loads.items():
            try:
                pipeline = self._start(load())
            except BaseException as error:
                log.exception("%s does not load", name)
                self.failure = error
                on_failure()
                return
            with self._lock:
                if not self.draining:
                    self._pipelines[name] = pipeline
                    continue
            pipeline.close()
            return
