"""Every error this library raises on purpose, and who is at fault.

    InferenceError
    ├── CallerError(ValueError)            the request, the configuration or the slide is wrong
    │   ├── BadRequest                       an image or value that cannot be used
    │   │   ├── InvalidRequest               a field is missing, unknown or of the wrong kind
    │   │   └── TooLarge                     more than the service takes
    │   ├── Unauthorized                     the service wants a token it was not given
    │   ├── ConfigError                      a setting, cohort file, model spec or command line
    │   │   ├── UnknownModel
    │   │   └── MissingResult                a stage was asked for before the one it needs
    │   └── SlideError                       this slide cannot be processed as it is
    │       ├── UnreadableSlide
    │       ├── UnknownResolution
    │       ├── ResolutionTooCoarse
    │       ├── SlideChanged
    │       ├── ReadStalled
    │       └── TooManyTileFailures
    ├── TileFailure                        this tile's fault; its neighbours are untouched
    │   ├── TileReadError
    │   ├── MissingPixels
    │   └── ForwardError(RuntimeError)       stage 2; `TileError` and `NonFiniteOutput` name one tile
    ├── Overloaded                         try again later
    │   ├── QueueFull
    │   ├── DeadlineExceeded(TimeoutError)
    │   ├── ServerClosed
    │   └── PartitionBusy
    ├── BatchError                         an explicit batch of which some items failed; holds them all
    └── Broken                             the surroundings are broken; no slide is to blame
        ├── ModelContractError
        ├── ArtifactRefused
        ├── DeviceBroken
        ├── StoreError
        │   ├── StoreFull
        │   └── DamagedResult
        │       └── WithdrawnResult        it was found damaged, and counts as absent now
        └── SourceUnavailable

Each class carries a stable `code` (for tables, JSON and logs) and says whether the same call may
succeed later (`retryable`). `fields` holds the structured part; the text ends with the remedy.
"""

from typing import ClassVar


class InferenceError(Exception):
    """Base of all errors raised on purpose."""

    code: ClassVar[str] = "error"
    retryable: ClassVar[bool] = False

    def __init__(self, message: str, **fields: object) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields

    def __str__(self) -> str:
        return self.message


class CallerError(InferenceError, ValueError):
    """What was asked for cannot be done as asked."""

    code = "caller_error"


class BadRequest(CallerError):
    """A request whose image or fields cannot be used."""

    code = "bad_request"


class InvalidRequest(BadRequest):
    """A request that breaks the schema: a field is missing, unknown or of the wrong kind."""

    code = "invalid_request"


class TooLarge(BadRequest):
    """A body, image or list larger than the service takes."""

    code = "too_large"


class Unauthorized(CallerError):
    """The service wants a token that it was not given."""

    code = "unauthorized"


class ConfigError(CallerError):
    """A setting, cohort file, model spec or command line that cannot be used."""

    code = "bad_config"


class UnknownModel(ConfigError):
    """No checkpoint and no registered model has this name."""

    code = "unknown_model"


class MissingResult(ConfigError):
    """A stage needs the result of an earlier stage that is not in the store."""

    code = "missing_result"


class SlideError(CallerError):
    """This slide cannot be processed as it is; other slides are not affected."""

    code = "slide_error"


class UnreadableSlide(SlideError):
    """Not a slide, damaged beyond opening, or gone."""

    code = "unreadable_slide"


class UnknownResolution(SlideError):
    """The slide has no usable µm/px and none was given."""

    code = "unknown_resolution"


class ResolutionTooCoarse(SlideError):
    """Level 0 is coarser than 1.25 times what the model needs."""

    code = "resolution_too_coarse"


class SlideChanged(SlideError):
    """The slide's files changed while it was being processed."""

    code = "slide_changed"
    retryable = True


class ReadStalled(SlideError):
    """Nothing of the slide could be read for too long: a disk, a share or a decoder hangs."""

    code = "read_stalled"
    retryable = True


class TooManyTileFailures(SlideError):
    """More tiles failed than the failure budget allows, or every planned tile did."""

    code = "too_many_tile_failures"


class TileFailure(InferenceError):
    """One tile could not be processed."""

    code = "tile_failure"


class TileReadError(TileFailure):
    """The pixels of one tile could not be decoded."""

    code = "read_error"


class MissingPixels(TileFailure):
    """Over half of a tile has no pixels in the slide (alpha 0)."""

    code = "missing_pixels"


class ForwardError(TileFailure, RuntimeError):
    """The model's forward pass failed (stage 2)."""

    code = "forward_error"
    retryable = True


_ForwardError = ForwardError
"""The name that the original contract gives it."""


class TileError(ForwardError):
    """The forward pass fails on this very tile, alone."""

    code = "tile_error"
    retryable = False


class NonFiniteOutput(TileError):
    """The model returned NaN or infinity for this tile."""

    code = "non_finite_output"


class Overloaded(InferenceError):
    """Nothing is wrong with the request; there is no room for it now."""

    code = "overloaded"
    retryable = True


class QueueFull(Overloaded):
    """The batch queue is at its limit."""

    code = "queue_full"


class DeadlineExceeded(Overloaded, TimeoutError):
    """The item was not computed before its deadline."""

    code = "deadline_exceeded"


class ServerClosed(Overloaded):
    """The scheduler is closing or closed."""

    code = "server_closed"


class PartitionBusy(Overloaded):
    """Another process is writing this slide's result."""

    code = "partition_busy"


class BatchError(InferenceError):
    """Some items of an explicit batch failed. Nothing is lost: `results` has every item's result or error, in order.

    Attributes:
        results: per position, what the call would have returned for it, or its `InferenceError`.
    """

    code = "batch_error"

    @property
    def results(self) -> "list[object]":
        found = self.fields.get("results", [])
        assert isinstance(found, list), "made with one result per item"
        return found


class Broken(InferenceError):
    """Something beneath all slides is broken."""

    code = "broken"


class ModelContractError(Broken):
    """A model returned something other than its spec declares."""

    code = "model_contract"


class ArtifactRefused(Broken):
    """A checkpoint does not match its manifest, this torch version or this device."""

    code = "artifact_refused"


class DeviceBroken(Broken):
    """The compute device is in an error state; a new process is needed."""

    code = "device_broken"
    retryable = True


class StoreError(Broken):
    """The result store cannot be used."""

    code = "store_error"
    retryable = True


class StoreFull(StoreError):
    """No space is left in the result store."""

    code = "store_full"


class DamagedResult(StoreError):
    """One result in the store is not what was written there; the others are not affected."""

    code = "damaged_result"
    retryable = False


class WithdrawnResult(DamagedResult):
    """A result whose bytes are not those that were written; it counts as absent now, so the next run computes it."""

    code = "withdrawn_result"
    retryable = True


class SourceUnavailable(Broken):
    """The folder or mount that holds the slides cannot be reached."""

    code = "source_unavailable"
    retryable = True
