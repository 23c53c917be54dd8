"""What the text and class of an exception say, as frameworks write them."""

import logging
import weakref
from typing import TYPE_CHECKING

import pytest
import torch

from inference.batching import FailureKind, classify_failure
from inference.errors import DeviceBroken, ForwardError, ModelContractError
from tests.inference.batching.failing import outcomes, submit_together

if TYPE_CHECKING:
    from tests.inference.batching.conftest import FakeModel, Rows, StartScheduler


class AcceleratorError(RuntimeError):
    """As torch names what CUDA reports."""


CUDA_HINT = (
    "\nCUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be "
    "incorrect.\nFor debugging consider passing CUDA_LAUNCH_BLOCKING=1\n"
)


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("no text that says so"),
        RuntimeError("CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total capacity of 15.77 GiB"),
        AcceleratorError("CUDA error: out of memory" + CUDA_HINT),
        RuntimeError("CUDA driver error: out of memory"),
        RuntimeError("MPS backend out of memory (MPS allocated: 9.00 GB, max allowed: 9.07 GB)"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:118] err == 0. DefaultCPUAllocator: can't allocate memory"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
        RuntimeError(
            "[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : Non-zero status code returned while running Conv node. "
            "bfc_arena.cc:376 AllocateRawInternal Failed to allocate memory for requested buffer of size 411041792"
        ),
        RuntimeError("[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION : std::bad_alloc"),
        RuntimeError("bad allocation"),
    ],
    ids=lambda error: str(error)[:40],
)
def test_s12_running_out_of_memory_is_told_by_class_or_text(error: Exception) -> None:
    assert classify_failure(error) is FailureKind.OUT_OF_MEMORY


@pytest.mark.parametrize(
    "error",
    [
        DeviceBroken("given up"),
        AcceleratorError("CUDA error: an illegal memory access was encountered" + CUDA_HINT),
        RuntimeError("CUDA error: device-side assert triggered" + CUDA_HINT),
        RuntimeError("CUDA error: uncorrectable ECC error encountered"),
        RuntimeError("CUDA error: unspecified launch failure"),
        RuntimeError("CUDA error: misaligned address"),
        RuntimeError("CUDA error: the launch timed out and was terminated"),
        RuntimeError("CUDA driver error: invalid device context"),
        RuntimeError("No CUDA-capable device is detected"),
        RuntimeError("[ONNXRuntimeError] : 1 : FAIL : CUDA failure 700: an illegal memory access was encountered"),
    ],
    ids=lambda error: str(error)[:40],
)
def test_s13_a_lasting_device_error_is_told_by_its_text(error: Exception) -> None:
    assert classify_failure(error) is FailureKind.FATAL


@pytest.mark.parametrize(
    "error",
    [
        ValueError("bad tile"),
        ForwardError("the forward pass failed"),
        ModelContractError("wrong shape"),
        RuntimeError("CUDA error: invalid configuration argument"),  # passes, and a smaller batch may do
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (4x8 and 16x2)"),
        IndexError("index out of range in self"),
    ],
    ids=lambda error: str(error)[:40],
)
def test_s10_all_else_may_be_an_items_fault(error: Exception) -> None:
    assert classify_failure(error) is FailureKind.ITEM


def _wrapped(cause: Exception, *, explicit: bool) -> Exception:
    try:
        try:
            raise cause
        except Exception as error:
            if explicit:
                raise ForwardError("the forward pass failed") from error
            raise ForwardError("the forward pass failed")  # noqa: B904 - its context is what is tested
    except ForwardError as error:
        return error


@pytest.mark.parametrize("explicit", [True, False])
def test_s12_s13_what_a_model_wraps_is_still_seen(explicit: bool) -> None:
    memory = _wrapped(torch.OutOfMemoryError("CUDA out of memory"), explicit=explicit)
    device = _wrapped(RuntimeError("CUDA error: device-side assert triggered"), explicit=explicit)
    assert classify_failure(memory) is FailureKind.OUT_OF_MEMORY
    assert classify_failure(device) is FailureKind.FATAL


def test_s13_an_error_raised_while_handling_an_unrelated_one_is_judged_alone() -> None:
    error = ValueError("bad tile")
    error.__context__ = RuntimeError("CUDA error: device-side assert triggered")
    error.__suppress_context__ = True
    assert classify_failure(error) is FailureKind.ITEM


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError


def test_s10_an_exception_without_a_readable_text_is_an_items_fault() -> None:
    assert classify_failure(Unspeakable()) is FailureKind.ITEM


def test_s13_exceptions_that_cause_each_other_are_read_once() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert classify_failure(one) is FailureKind.ITEM


class Tensors:
    """What a failed forward pass leaves on the device."""


def test_s12_torchs_own_error_halves_and_caches_are_dropped_when_its_tensors_are_gone(
    start: "StartScheduler", model: "FakeModel", caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.ERROR, logger="inference.batching")  # a captured record would keep the traceback
    held: list[weakref.ref[Tensors]] = []
    alive: list[bool] = []

    def drop_caches() -> None:
        alive.append(held[-1]() is not None)
        raise RuntimeError("no cache to drop")  # and that must not matter

    def react(samples: list[int]) -> "Rows":
        tensors = Tensors()
        held.append(weakref.ref(tensors))
        if len(samples) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")
        return [f"r{sample}" for sample in samples]

    scheduler = start(on_out_of_memory=drop_caches)
    model.react = react
    assert outcomes(submit_together(scheduler, model, range(32))) == [f"r{n}" for n in range(32)]
    assert [len(call) for call in model.calls[1:]] == [32, 16, 8, 8, 8, 8]
    assert alive == [False, False]
