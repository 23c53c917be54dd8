"""A model as the engine holds it: known from its manifest at once, loaded when the first tile needs it."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, cast

from inference.batching import BatchScheduler, FailureKind, classify_failure
from inference.engine.results import plain_message
from inference.engine.settings import Settings
from inference.errors import ArtifactRefused, Broken, CallerError, ConfigError, DeviceBroken, ModelContractError
from inference.models.artifact import ArtifactManifest
from inference.models.registry import Checkpoint
from inference.models.sample import Mode, PreparedSample, TileOutput
from inference.models.spec import ModelSpec
from inference.models.verification import check_artifact

if TYPE_CHECKING:
    from inference.models.server_model import BaseServerModel


def require_usable(checkpoint: Checkpoint, settings: Settings) -> None:
    """Refuse a model before anything is created for it; reads the checkpoint once.

    Raises:
        ConfigError: it takes no batches of this size, or its tile is smaller than the stride.
        ArtifactRefused: it is not what its manifest pins, or not for this machine, torch or device.
    """
    _require_batch(checkpoint, settings)
    _require_stride(checkpoint, settings)
    check_artifact(checkpoint.path, checkpoint.manifest, settings.device)


def _require_batch(checkpoint: Checkpoint, settings: Settings) -> None:
    most = checkpoint.manifest.max_batch
    if settings.batch_size > most:
        raise ConfigError(f"{checkpoint.path.name} takes batches of 1 to {most} tiles, not {settings.batch_size}")


def _require_stride(checkpoint: Checkpoint, settings: Settings) -> None:
    side = checkpoint.manifest.spec.tile_spec.size
    if settings.stride_px is not None and settings.stride_px > side:
        raise ConfigError(f"a stride of {settings.stride_px} px leaves gaps between tiles of {side} px: give less")


class EngineModel:
    """One model and its batch queue; `loads` counts how often the checkpoint was loaded (once, or never).

    Raises:
        ConfigError: it takes no batches of this size, or its tile is smaller than the stride.
    """

    def __init__(self, checkpoint: Checkpoint, settings: Settings) -> None:
        _require_batch(checkpoint, settings)
        _require_stride(checkpoint, settings)
        self._checkpoint, self._settings = checkpoint, settings
        self._lock = threading.Lock()
        self._loaded: BaseServerModel | None = None
        self._scheduler: BatchScheduler[PreparedSample, TileOutput] | None = None
        self.loads = 0

    @property
    def manifest(self) -> ArtifactManifest:
        return self._checkpoint.manifest

    @property
    def spec(self) -> ModelSpec:
        return self.manifest.spec

    @property
    def server(self) -> "BaseServerModel":
        """The loaded model.

        Raises:
            Broken: it does not load, or does not run even once; that is no slide's fault.
        """
        with self._lock:
            if self._loaded is None:
                self._loaded = self._load()
                self.loads += 1
            return self._loaded

    def _load(self) -> "BaseServerModel":
        # torch takes seconds to import: a run that finds everything done never needs it.
        from inference.models.server_model import load_server_model

        path, device, size = self._checkpoint.path, self._settings.device, self._settings.batch_size
        try:
            return load_server_model(self._checkpoint, device, fixed_batch=size)
        except ModelContractError as error:
            raise ModelContractError(f"{error.message}: mend the model or its spec and export it again") from error
        except Broken:
            raise
        except CallerError as error:  # of the run, not of the slide at hand
            raise ArtifactRefused(error.message) from error
        except Exception as error:
            text = plain_message(str(error)) or type(error).__name__
            remedy = _REMEDY if classify_failure(error) is FailureKind.OUT_OF_MEMORY else ""
            raise ArtifactRefused(
                f"{path.name} does not run on {device} with batches of {size}: {text}{remedy}"
            ) from error

    @property
    def scheduler(self) -> "BatchScheduler[PreparedSample, TileOutput]":
        """The queue into which every slide of this run feeds its tiles."""
        server = self.server
        with self._lock:
            if self._scheduler is None:
                size = self._settings.batch_size
                self._scheduler = BatchScheduler(
                    partial(self._forward, server),
                    max_batch_size=size,
                    max_wait_s=FILL_WAIT_S,
                    max_queued_items=4 * size,
                    nbytes=lambda sample: sample.nbytes,
                    stuck_after_s=STUCK_AFTER_S,
                    name=self.spec.model_name,
                )
            return self._scheduler

    def submit(self, sample: PreparedSample) -> "Future[TileOutput]":
        """Queue one tile for every head the model has; waits while the queue is full."""
        return self.scheduler.submit(sample, self.spec.output_type)

    def _forward(
        self, server: "BaseServerModel", samples: Sequence[PreparedSample], modes: Sequence[str]
    ) -> Sequence[TileOutput]:
        """One batch. Without memory for it there is none for its halves, which are padded to the same size.

        Raises:
            DeviceBroken: no memory, also once what could be freed was.
        """
        forward = partial(server.forward_tiles, samples, cast("Sequence[Mode]", modes))
        # A row that is not finite comes back as its error; the scheduler hands it to that tile alone.
        try:
            return cast("Sequence[TileOutput]", forward())
        except Exception as error:
            if classify_failure(error) is not FailureKind.OUT_OF_MEMORY:
                raise
        server.free_memory()
        try:
            return cast("Sequence[TileOutput]", forward())
        except Exception as error:
            if classify_failure(error) is not FailureKind.OUT_OF_MEMORY:
                raise
            size, device = self._settings.batch_size, self._settings.device
            raise DeviceBroken(f"{device} has no memory for a batch of {size} tiles{_REMEDY}") from error

    def close(self) -> None:
        """Stop the queue and let the model go."""
        with self._lock:
            if self._scheduler is not None:
                self._scheduler.close()
            self._scheduler = self._loaded = None


_REMEDY = "; free some, or choose a smaller batch size"

STUCK_AFTER_S = 3600.0
"""A batch that takes longer never ends: by its operations, a ViT-g takes 10 minutes for 64 tiles on two cores."""

FILL_WAIT_S = 5.0
"""How long a batch may wait to fill; a slide that has no more tiles flushes instead of waiting."""
