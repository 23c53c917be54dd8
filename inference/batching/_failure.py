"""What an exception of the forward pass says about the batch, and what each waiter gets of it."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial

from inference.errors import DeviceBroken, ForwardError, InferenceError, ModelContractError, TileError

OUT_OF_MEMORY_TEXTS = (
    "out of memory",  # CUDA and MPS, torch's allocators and drivers alike
    "can't allocate memory",  # torch's CPU allocator
    "not enough memory",  # the same on Windows
    "failed to allocate memory",  # ONNX Runtime's arenas
    "bfcarena::allocaterawinternal",
    "bad allocation",  # C++
    "std::bad_alloc",
    "cublas_status_alloc_failed",
    "cudnn_status_alloc_failed",
)

FATAL_TEXTS = (
    # Descriptions of the CUDA runtime's errors after which, its documentation says, the process must be relaunched:
    # https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html (cudaError_t)
    "uncorrectable ecc error",
    "uncorrectable nvlink error",
    "illegal memory access",
    "the launch timed out and was terminated",
    "device-side assert",
    "hardware stack error",
    "illegal instruction was encountered",
    "misaligned address",
    "operation not supported on global/shared address space",
    "invalid program counter",
    "unspecified launch failure",
    "context is destroyed",
    # The device has left, or the driver does not answer.
    "no cuda-capable device is detected",
    "cuda-capable device(s) is/are busy or unavailable",
    "fallen off the bus",
    "driver shutting down",
    "cuda driver error",
)


class FailureKind(Enum):
    """What an exception of the forward pass says about the batch."""

    ITEM = "item"
    """Some item may be to blame: halve until it stands alone."""
    OUT_OF_MEMORY = "out_of_memory"
    """The batch was too large: halve and remember."""
    FATAL = "fatal"
    """The device is unusable from here on."""


def classify_failure(error: BaseException) -> FailureKind:
    """Judges an exception and its causes by class and text, knowing no framework.

    Out of memory: `MemoryError`, a class named `OutOfMemoryError`, or an allocator's words. Fatal: `DeviceBroken`, or
    the words of a CUDA error that lasts until the process ends. All else may be an item's fault.
    """
    chain = list(_causes(error))
    if any(isinstance(e, DeviceBroken) for e in chain):
        return FailureKind.FATAL
    # Memory first: "CUDA driver error: out of memory" passes when memory is freed.
    if any(_is_out_of_memory(e) for e in chain):
        return FailureKind.OUT_OF_MEMORY
    if any(text in _text(e).lower() for e in chain for text in FATAL_TEXTS):
        return FailureKind.FATAL
    return FailureKind.ITEM


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or any(c.__name__ == "OutOfMemoryError" for c in type(error).__mro__):
        return True
    return any(text in _text(error).lower() for text in OUT_OF_MEMORY_TEXTS)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:  # noqa: BLE001 - whatever a foreign __str__ raises
        return "its text cannot be read"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """The exception and what it was raised from: a model may wrap what its framework raised."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        yield error
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)


@dataclass(frozen=True)
class Failure:
    """A failed forward pass, reduced to what each waiter's own exception is made from.

    Keeping the exception itself would keep its traceback, and with that the tensors of the failed batch.
    """

    kind: FailureKind | None  # None: the model broke its contract, whichever the items
    make_error: Callable[[], InferenceError]


def describe(error: BaseException, kind: FailureKind | None) -> Failure:
    """Keeps the class and fields of our own errors; wraps others, with their type and text as fields.

    A `ForwardError` blames a batch; where one item is to blame, it becomes that item's `TileError`. A class of our own
    errors that cannot be made anew from a message and fields is wrapped too.
    """
    kept: type[InferenceError] = InferenceError
    wrapper: type[InferenceError] = TileError
    text = "the forward pass fails on this tile alone"
    if kind is FailureKind.FATAL:
        kept, wrapper, text = DeviceBroken, DeviceBroken, "the model can no longer run, start a new process"
    elif kind is FailureKind.OUT_OF_MEMORY:
        wrapper, text = ForwardError, "no memory for this tile even alone"
    elif kind is None:
        wrapper, text = ModelContractError, "the model broke its contract"
    name, cause = type(error).__name__, _text(error)[:2000]
    wrap = partial(wrapper, f"{text}: {name}: {cause}", error_type=name, error_text=cause)
    if not isinstance(error, kept):
        return Failure(kind, wrap)
    like = TileError if kind is FailureKind.ITEM and type(error) is ForwardError else type(error)
    message, fields = getattr(error, "message", cause), getattr(error, "fields", {})
    return Failure(kind, partial(_made_anew, like, message, fields, wrap))


def _made_anew(
    like: type[InferenceError], message: str, fields: Mapping[str, object], wrap: Callable[[], InferenceError]
) -> InferenceError:
    """An error of this class, or a wrapped one: a subclass may have a constructor that takes something else."""
    try:
        error = like(message, **fields)
        usable = isinstance(error.message, str) and isinstance(error.fields, dict)
    except Exception:  # noqa: BLE001 - whatever a foreign constructor raises
        return wrap()
    return error if usable else wrap()
