"""Slide-scale inference for computational pathology.

Names are imported when first used: reading a model's spec, or a result, does not load torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inference.batching import BatchScheduler
    from inference.clients.http import HttpClient
    from inference.clients.in_process import InProcessClient
    from inference.contract import Client, Lineage, ModelMetadata, ModelRequest, ModelResponse
    from inference.engine.chain import SlideOutcome
    from inference.engine.run import run_slide
    from inference.engine.settings import Settings
    from inference.errors import (
        ArtifactRefused,
        BadRequest,
        BatchError,
        Broken,
        CallerError,
        ConfigError,
        DamagedResult,
        DeadlineExceeded,
        DeviceBroken,
        ForwardError,
        InferenceError,
        InvalidRequest,
        MissingPixels,
        MissingResult,
        ModelContractError,
        NonFiniteOutput,
        Overloaded,
        PartitionBusy,
        QueueFull,
        ReadStalled,
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
        TooLarge,
        TooManyTileFailures,
        Unauthorized,
        UnknownModel,
        UnknownResolution,
        UnreadableSlide,
        WithdrawnResult,
    )
    from inference.errors import _ForwardError as _ForwardError
    from inference.models.bulk_rna import BulkRnaServerModel
    from inference.models.heads import DownstreamHeadModel
    from inference.models.registry import Checkpoint, resolve_model
    from inference.models.rna import read_bulk_rna
    from inference.models.sample import PreparedSample
    from inference.models.segmentation import SegmentationServerModel
    from inference.models.server_model import BaseServerModel, build_server_model
    from inference.models.spec import MaskSpec, ModelSpec, OmicsSpec, TileSpec, load_model_spec
    from inference.store.store import Store

__all__ = [
    "ArtifactRefused",
    "BadRequest",
    "BaseServerModel",
    "BatchError",
    "BatchScheduler",
    "Broken",
    "BulkRnaServerModel",
    "CallerError",
    "Checkpoint",
    "Client",
    "ConfigError",
    "DamagedResult",
    "DeadlineExceeded",
    "DeviceBroken",
    "DownstreamHeadModel",
    "ForwardError",
    "HttpClient",
    "InProcessClient",
    "InferenceError",
    "InvalidRequest",
    "Lineage",
    "MaskSpec",
    "MissingPixels",
    "MissingResult",
    "ModelContractError",
    "ModelMetadata",
    "ModelRequest",
    "ModelResponse",
    "ModelSpec",
    "NonFiniteOutput",
    "OmicsSpec",
    "Overloaded",
    "PartitionBusy",
    "PreparedSample",
    "QueueFull",
    "ReadStalled",
    "ResolutionTooCoarse",
    "SegmentationServerModel",
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
    "TooLarge",
    "TooManyTileFailures",
    "Unauthorized",
    "UnknownModel",
    "UnknownResolution",
    "UnreadableSlide",
    "WithdrawnResult",
    "build_server_model",
    "load_model_spec",
    "read_bulk_rna",
    "resolve_model",
    "run_slide",
]

_HOMES = {
    "inference.batching": ("BatchScheduler",),
    "inference.clients.http": ("HttpClient",),
    "inference.clients.in_process": ("InProcessClient",),
    "inference.contract": ("Client", "Lineage", "ModelMetadata", "ModelRequest", "ModelResponse"),
    "inference.engine.chain": ("SlideOutcome",),
    "inference.engine.run": ("run_slide",),
    "inference.engine.settings": ("Settings",),
    "inference.models.bulk_rna": ("BulkRnaServerModel",),
    "inference.models.heads": ("DownstreamHeadModel",),
    "inference.models.registry": ("Checkpoint", "resolve_model"),
    "inference.models.rna": ("read_bulk_rna",),
    "inference.models.sample": ("PreparedSample",),
    "inference.models.segmentation": ("SegmentationServerModel",),
    "inference.models.server_model": ("BaseServerModel", "build_server_model"),
    "inference.models.spec": ("MaskSpec", "ModelSpec", "OmicsSpec", "TileSpec", "load_model_spec"),
    "inference.store.store": ("Store",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}


if not TYPE_CHECKING:  # a type checker that saw it would take every misspelt name for one of ours

    def __getattr__(name: str) -> object:
        if name not in __all__ and name != "_ForwardError":  # the original contract's name for `ForwardError`
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(import_module(_HOME_OF.get(name, "inference.errors")), name)
        globals()[name] = found  # the next access does not come here
        return found


def __dir__() -> list[str]:
    return __all__
