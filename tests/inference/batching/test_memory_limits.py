"""What running out of memory teaches about the size of later batches, and how that is unlearnt."""

from typing import TYPE_CHECKING

import pytest

from inference.batching._queue import RAISE_AFTER
from tests.inference.batching.failing import fail_on, outcomes, submit_together
from tests.inference.batching.patience import PATIENCE_S
from tests.inference.batching.queues import Queue, books, make_queue

if TYPE_CHECKING:
    from tests.inference.batching.conftest import FakeModel, Rows, StartScheduler


def note_fits(queue: Queue, size: int, times: int) -> None:
    for _ in range(times):
        queue.note_fit("A", size)


def test_s12_a_limit_doubles_after_64_batches_that_fit_until_it_is_forgotten() -> None:
    assert RAISE_AFTER == 64
    queue = make_queue(max_batch_size=16)
    queue.lower_limit("A", 4)
    note_fits(queue, 4, 63)
    assert queue.limit("A") == 4
    note_fits(queue, 4, 1)
    assert queue.limit("A") == 8
    note_fits(queue, 8, 64)
    assert queue.limit("A") == 16
    assert books(queue).batch_limits == {}


def test_s12_smaller_batches_and_other_lanes_raise_no_limit() -> None:
    queue = make_queue(max_batch_size=16)
    queue.lower_limit("A", 4)
    note_fits(queue, 3, 200)
    for _ in range(200):
        queue.note_fit("B", 4)
    assert books(queue).batch_limits == {"A": 4}


def test_s12_a_raised_limit_that_fails_again_waits_for_as_many_batches_anew() -> None:
    queue = make_queue(max_batch_size=16)
    queue.lower_limit("A", 4)
    note_fits(queue, 4, 64)
    queue.lower_limit("A", 4)
    note_fits(queue, 4, 63)
    assert queue.limit("A") == 4
    note_fits(queue, 4, 1)
    assert queue.limit("A") == 8


@pytest.mark.parametrize("place", range(16))
def test_s12_an_item_that_does_not_fit_even_alone_lowers_no_limit(
    start: "StartScheduler", model: "FakeModel", place: int
) -> None:
    scheduler = start(max_batch_size=16)
    model.react = fail_on(place, error=MemoryError)
    found = outcomes(submit_together(scheduler, model, range(16)))
    assert found == ["forward_error" if n == place else f"r{n}" for n in range(16)]
    outcomes(submit_together(scheduler, model, range(100, 132)))
    assert [len(call) for call in model.calls[-2:]] == [16, 16]
    assert scheduler.statistics().batch_limits == {}


def test_s12_what_was_learnt_before_such_an_item_stays(start: "StartScheduler", model: "FakeModel") -> None:
    scheduler = start(max_batch_size=16)

    def react(samples: list[int]) -> "Rows":
        if 7 in samples or len(samples) > 8:
            raise MemoryError
        return [f"r{sample}" for sample in samples]

    model.react = react
    outcomes(submit_together(scheduler, model, range(100, 116)))
    assert outcomes(submit_together(scheduler, model, [7])) == ["forward_error"]
    outcomes(submit_together(scheduler, model, range(16)))
    assert scheduler.statistics().batch_limits == {None: 8}


def test_s12_when_memory_is_there_again_batches_grow_to_their_full_size(
    start: "StartScheduler", model: "FakeModel"
) -> None:
    scheduler = start(max_batch_size=4)
    scarce = True

    def react(samples: list[int]) -> "Rows":
        if scarce and len(samples) > 1:
            raise MemoryError
        return [f"r{sample}" for sample in samples]

    model.react = react
    outcomes(submit_together(scheduler, model, range(4)))
    assert scheduler.statistics().batch_limits == {None: 1}
    scarce = False
    futures = submit_together(scheduler, model, range(300))
    assert [future.result(PATIENCE_S) for future in futures] == [f"r{n}" for n in range(300)]
    sizes = [len(call) for call in model.calls]
    assert sizes.count(2) >= 64
    assert 4 in sizes[-2:]
    assert scheduler.statistics().batch_limits == {}
