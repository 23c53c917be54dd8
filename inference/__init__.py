"""Slide-scale inference for computational pathology.

Names are imported when first used: reading a model's spec, or a result, does not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inference.batching import BatchScheduler
    from inference.clients import InProcessClient
    from inference.contract import Client, ModelMetadata, ModelRequest, ModelResponse
    from inference.engine.chain import SlideOutcome
    from inference.engine.run import run_slide
    from inference.engine.settings import Settings
    from inference.errors import (
        ArtifactRefused,
        BadRequest,
        Broken,
        CallerError,
        ConfigError,
        DamagedResult,
        DeadlineExceeded,
        DeviceBroken,
        ForwardError,
        InferenceError,
        MissingPixels,
        MissingResult,
        ModelContractError,
        NonFiniteOutput,
        Overloaded,
        PartitionBusy,
        QueueFull,
        ResolutionTooCoarse,
        ServerClosed,
        SlideChanged,
        SlideError,
        SourceUnavailable,
        StoreError,
        StoreFull,
        TileError,
        TileFailure,
        TileReadError,
        TooManyTileFailures,
        UnknownModel,
        UnknownResolution,
        UnreadableSlide,
    )
    from inference.models.registry import Checkpoint, resolve_model
    from inference.models.sample import PreparedSample
    from inference.models.server_model import BaseServerModel, build_server_model
    from inference.models.spec import ModelSpec, TileSpec, load_model_spec
    from inference.store.store import Store

__all__ = [
    "ArtifactRefused",
    "BadRequest",
    "BaseServerModel",
    "BatchScheduler",
    "Broken",
    "CallerError",
    "Checkpoint",
    "Client",
    "ConfigError",
    "DamagedResult",
    "DeadlineExceeded",
    "DeviceBroken",
    "ForwardError",
    "InProcessClient",
    "InferenceError",
    "MissingPixels",
    "MissingResult",
    "ModelContractError",
    "ModelMetadata",
    "ModelRequest",
    "ModelResponse",
    "ModelSpec",
    "NonFiniteOutput",
    "Overloaded",
    "PartitionBusy",
    "PreparedSample",
    "QueueFull",
    "ResolutionTooCoarse",
    "ServerClosed",
    "Settings",
    "SlideChanged",
    "SlideError",
    "SlideOutcome",
    "SourceUnavailable",
    "Store",
    "StoreError",
    "StoreFull",
    "TileError",
    "TileFailure",
    "TileReadError",
    "TileSpec",
    "TooManyTileFailures",
    "UnknownModel",
    "UnknownResolution",
    "UnreadableSlide",
    "build_server_model",
    "load_model_spec",
    "resolve_model",
    "run_slide",
]

_HOMES = {
    "inference.batching": ("BatchScheduler",),
    "inference.clients": ("InProcessClient",),
    "inference.contract": ("Client", "ModelMetadata", "ModelRequest", "ModelResponse"),
    "inference.engine.chain": ("SlideOutcome",),
    "inference.engine.run": ("run_slide",),
    "inference.engine.settings": ("Settings",),
    "inference.models.registry": ("Checkpoint", "resolve_model"),
    "inference.models.sample": ("PreparedSample",),
    "inference.models.server_model": ("BaseServerModel", "build_server_model"),
    "inference.models.spec": ("ModelSpec", "TileSpec", "load_model_spec"),
    "inference.store.store": ("Store",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


if not TYPE_CHECKING:  # a type checker that saw it would take every misspelt name for one of ours

    def __getattr__(name: str) -> object:
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(import_module(_HOME_OF.get(name, "inference.errors")), name)
        globals()[name] = found  # the next access does not come here
        return found


def __dir__() -> list[str]:
    return __all__
