"""A batch that fails is halved until the item at fault stands alone; its neighbours do not notice."""

import threading
from typing import TYPE_CHECKING

import pytest

from inference.errors import (
    BadRequest,
    DeadlineExceeded,
    ForwardError,
    TileError,
)
from tests.inference.batching.failing import fail_on, outcomes, submit_together
from tests.inference.batching.patience import PATIENCE_S

if TYPE_CHECKING:
    from tests.inference.batching.conftest import FakeModel, Rows, StartScheduler


def test_s10_one_bad_item_of_32_fails_alone_within_11_calls(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start()
    model.react = fail_on(19)
    futures = submit_together(scheduler, model, range(32))
    assert outcomes(futures) == ["tile_error" if n == 19 else f"r{n}" for n in range(32)]
    assert len(model.calls) - 1 <= 11
    error = futures[19].exception(0)
    assert isinstance(error, TileError)
    assert error.fields == {"error_type": "ValueError", "error_text": "cannot compute [19]"}
    assert (error.retryable, error.__cause__, error.__context__) == (False, None, None)


def test_s10_the_pipeline_halves_to_the_end_so_that_no_innocent_item_fails(
    start: "StartScheduler", model: "FakeModel"
) -> None:
    scheduler = start()
    bad = [0, 1, 17, 40, 41, 63]
    model.react = fail_on(*bad)
    futures = submit_together(scheduler, model, range(64))
    assert outcomes(futures) == ["tile_error" if n in bad else f"r{n}" for n in range(64)]
    assert scheduler.statistics().failed == {"tile_error": 6}


@pytest.mark.parametrize("bad", range(32))
def test_s10_with_a_deadline_a_bad_item_of_32_is_found_within_the_default_budget(
    start: "StartScheduler", model: "FakeModel", bad: int
) -> None:
    scheduler = start()
    model.react = fail_on(bad)
    model.occupy(scheduler)
    futures = [scheduler.submit(sample, call_deadline_s=1000) for sample in range(32)]
    model.release()
    assert outcomes(futures) == ["tile_error" if n == bad else f"r{n}" for n in range(32)]
    assert len(model.calls) - 1 <= 11


def test_s10_the_default_budget_binds_items_with_a_deadline_and_no_others(
    start: "StartScheduler", model: "FakeModel"
) -> None:
    scheduler = start()
    bad = [0, 9, 18, 27]
    model.react = fail_on(*bad)
    model.occupy(scheduler)
    futures = [scheduler.submit(sample, deadline_s=1000 if sample % 2 else None) for sample in range(32)]
    model.release()
    found = outcomes(futures)
    assert [found[n] for n in range(0, 32, 2)] == ["tile_error" if n in bad else f"r{n}" for n in range(0, 32, 2)]
    hurried = {found[n] for n in range(1, 32, 2)}
    assert "forward_error" in hurried
    for n in range(1, 32, 2):
        assert found[n] in (["tile_error", "forward_error"] if n in bad else [f"r{n}", "forward_error"])
    spent = [call for call in model.calls[1:] if any(sample % 2 for sample in call)]
    assert len(spent) <= 11


def test_s10_running_out_of_memory_is_not_charged_to_the_retry_budget(
    start: "StartScheduler", model: "FakeModel"
) -> None:
    scheduler = start()

    def react(samples: list[int]) -> "Rows":
        if len(samples) > 1:
            raise MemoryError
        return [f"r{sample}" for sample in samples]

    model.react = react
    model.occupy(scheduler)
    futures = [scheduler.submit(sample, call_deadline_s=1000) for sample in range(64)]
    model.release()
    assert outcomes(futures) == [f"r{n}" for n in range(64)]


def test_s10_a_sample_that_cannot_be_measured_never_enters_a_batch(start: "StartScheduler", model: "FakeModel") -> None:
    def nbytes(sample: int) -> int:
        if sample == 1:
            raise BadRequest("not an image")
        return 1

    scheduler = start(nbytes=nbytes)
    model.occupy(scheduler)
    good = scheduler.submit(0)
    with pytest.raises(BadRequest):
        scheduler.submit(1)
    model.release()
    assert good.result(PATIENCE_S) == "r0"
    assert scheduler.statistics().accepted == 2


def test_s10_what_a_spent_budget_leaves_undecided_may_be_tried_again(
    start: "StartScheduler", model: "FakeModel"
) -> None:
    scheduler = start(retry_budget=3)
    model.react = fail_on(0)
    futures = submit_together(scheduler, model, range(8))
    assert outcomes(futures) == ["forward_error"] * 4 + ["r4", "r5", "r6", "r7"]
    assert model.calls[1:] == [[0, 1, 2, 3, 4, 5, 6, 7], [0, 1, 2, 3], [4, 5, 6, 7], [0, 1]]
    error = futures[0].exception(0)
    assert isinstance(error, ForwardError)
    assert error.retryable


def test_s10_no_budget_means_one_call(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start(retry_budget=0)
    model.react = fail_on(0)
    assert outcomes(submit_together(scheduler, model, range(8))) == ["forward_error"] * 8
    assert len(model.calls) == 2


def test_s10_an_error_of_ours_keeps_its_class_and_fields(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start()

    def react(samples: list[int]) -> "Rows":
        if 1 in samples:
            raise BadRequest("not an image", field="tile")
        return [f"r{sample}" for sample in samples]

    model.react = react
    futures = submit_together(scheduler, model, range(3))
    error = futures[1].exception(PATIENCE_S)
    assert isinstance(error, BadRequest)
    assert error.fields == {"field": "tile"}
    assert [futures[0].result(PATIENCE_S), futures[2].result(PATIENCE_S)] == ["r0", "r2"]


def test_s10_a_batch_is_not_repeated_for_items_past_their_deadline(start: "StartScheduler", model: "FakeModel") -> None:
    now = [0.0]
    scheduler = start(clock=lambda: now[0])
    model.occupy(scheduler)
    futures = [scheduler.submit(1, deadline_s=5), scheduler.submit(2)]

    def react(samples: list[int]) -> "Rows":
        if len(samples) > 1:
            now[0] = 6.0
            raise ValueError
        return [f"r{sample}" for sample in samples]

    model.react = react
    model.release()
    assert isinstance(futures[0].exception(PATIENCE_S), DeadlineExceeded)
    assert futures[1].result(PATIENCE_S) == "r2"
    assert model.calls == [[-1], [1, 2], [2]]


def test_s18_a_batch_is_not_repeated_for_items_that_close_has_answered(
    start: "StartScheduler", model: "FakeModel", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inference.batching.scheduler._JOIN_GRACE_S", 0.01)
    scheduler = start()
    model.occupy(scheduler)
    futures = [scheduler.submit(sample) for sample in range(8)]
    closed = threading.Event()

    def react(samples: list[int]) -> "Rows":
        if len(samples) == 8:
            closing.start()
            assert closed.wait(PATIENCE_S)
        raise ValueError

    def close() -> None:
        scheduler.close(drain_s=0)
        closed.set()

    closing = threading.Thread(target=close)
    model.react = react
    model.release()
    assert outcomes(futures) == ["server_closed"] * 8
    closing.join(PATIENCE_S)
    scheduler.close()
    assert len(model.calls) == 2
