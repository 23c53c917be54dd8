"""Whose memory samples and results are, and what a model may return."""

import gc
from collections.abc import Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from inference.batching import BatchScheduler
from inference.errors import ModelContractError, NonFiniteOutput, TileError
from tests.inference.batching.patience import PATIENCE_S

Array = NDArray[Any]


def run(forward: Any, samples: Sequence[Array]) -> list[Future[Array]]:
    """All samples in one batch, all answered."""
    with BatchScheduler[Array, Array](forward, max_batch_size=len(samples), max_wait_s=1000) as scheduler:
        return [scheduler.submit(sample) for sample in samples]


def tiles(count: int) -> list[Array]:
    return [np.full((3, 4, 4), n, np.float32) for n in range(count)]


def test_s5_an_array_with_a_row_per_sample_is_an_answer() -> None:
    futures = run(lambda samples, _: np.stack([s.mean(axis=(1, 2)) for s in samples]), tiles(4))
    assert [future.result(0).tolist() for future in futures] == [[n, n, n] for n in range(4)]


@pytest.mark.parametrize(
    "returned",
    [
        np.float32(1),
        np.zeros((3, 2)),
        np.zeros((5, 2)),
        [np.zeros(2), np.zeros(3), np.zeros(2), np.zeros(2)],
        [np.zeros(2), 3, np.zeros(2), np.zeros(2)],
    ],
    ids=["no rows", "one too few", "one too many", "two shapes", "arrays and a number"],
)
def test_s5_arrays_of_another_shape_fail_the_batch(returned: object) -> None:
    for future in run(lambda samples, _: returned, tiles(4)):
        assert isinstance(future.exception(0), ModelContractError)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "make",
    [
        np.array,
        lambda rows: np.array(rows, np.float32),
        list,
        lambda rows: [complex(row) for row in rows],
        lambda rows: [[0.0, row] for row in rows],
        lambda rows: [(row, "label") for row in rows],
        lambda rows: [[[row]] for row in rows],
        lambda rows: [(np.array([row, 1]), 2) for row in rows],
    ],
    ids=["array", "float32", "floats", "complex", "lists", "tuples", "nested lists", "tuples of arrays"],
)
def test_s5_a_row_that_is_not_finite_is_an_error_in_whatever_form(make: Any, bad: float) -> None:
    futures = run(lambda samples, _: make([1.0, bad, 2.0]), tiles(3))
    assert isinstance(futures[1].exception(0), NonFiniteOutput)
    assert [future.exception(0) for future in (futures[0], futures[2])] == [None, None]


def test_s5_rows_that_are_no_numbers_are_passed_on_as_they_are() -> None:
    rows = [{"a": 1}, "nan", ["nan", 3, True], 10**400]
    futures = run(lambda samples, _: rows, tiles(4))
    assert all(future.result(0) is row for future, row in zip(futures, rows, strict=True))


def test_s5_an_exception_may_stand_beside_arrays() -> None:
    futures = run(lambda samples, _: [np.zeros(2), ValueError("odd"), np.ones(2)], tiles(3))
    assert isinstance(futures[1].exception(0), TileError)
    assert [futures[n].result(0).tolist() for n in (0, 2)] == [[0, 0], [1, 1]]


def test_s26_a_row_that_is_not_finite_fails_alone_among_32() -> None:
    samples = tiles(32)
    samples[19][0, 0, 0] = np.nan
    samples[20][0, 0, 0] = np.inf
    futures = run(lambda batch, _: np.stack(batch).mean(axis=(2, 3)), samples)
    for n, future in enumerate(futures):
        if n in (19, 20):
            assert isinstance(future.exception(0), NonFiniteOutput)
        else:
            assert future.result(0).tolist() == [n] * 3


def test_s26_neighbours_change_a_result_by_no_more_than_the_models_tolerance() -> None:
    dice = np.random.default_rng(0)
    weights = dice.normal(size=(48, 16)).astype(np.float32)
    tile = dice.normal(size=(3, 4, 4)).astype(np.float32)

    def forward(batch: Sequence[Array], _: object) -> Array:
        return np.stack(batch).reshape(len(batch), -1) @ weights

    alone = run(forward, [tile])[0].result(0)
    for _ in range(50):
        neighbours = [dice.normal(size=(3, 4, 4)).astype(np.float32) for _ in range(dice.integers(1, 32))]
        place = int(dice.integers(len(neighbours) + 1))
        futures = run(forward, [*neighbours[:place], tile, *neighbours[place:]])
        np.testing.assert_allclose(futures[place].result(0), alone, rtol=1e-5, atol=1e-5)


def test_s25_what_a_caller_writes_after_submit_the_model_does_not_see() -> None:
    tile = np.zeros((2, 2))
    with BatchScheduler[Array, Array](lambda batch, _: [b.sum(axis=1) for b in batch], max_wait_s=1000) as scheduler:
        future = scheduler.submit(tile)
        tile += 1
    assert future.result(0).tolist() == [0, 0]


def test_s25_a_read_only_sample_is_passed_on_as_it_is() -> None:
    tile = np.zeros((2, 2))
    tile.flags.writeable = False
    seen: list[Array] = []

    def forward(batch: Sequence[Array], _: object) -> list[Array]:
        seen.extend(batch)
        return list(batch)

    row = run(forward, [tile])[0].result(0)
    assert seen[0] is tile
    assert row is not tile  # but the result is the caller's own
    assert not np.shares_memory(row, tile)


def test_s25_a_model_that_writes_to_its_input_harms_nobody() -> None:
    def forward(batch: Sequence[Array], _: object) -> list[Array]:
        for sample in batch:
            if sample[0] == 1:
                sample += 1
        return [sample * 2 for sample in batch]

    futures = run(forward, [np.array([float(n)]) for n in range(4)])
    assert isinstance(futures[1].exception(0), TileError)
    assert [futures[n].result(0).tolist() for n in (0, 2, 3)] == [[0.0], [4.0], [6.0]]


def test_s25_a_kept_row_does_not_keep_the_batch_nor_change_with_a_reused_buffer() -> None:
    buffer = np.zeros((8, 1000))

    def forward(batch: Sequence[Array], _: object) -> Array:
        buffer[: len(batch)] = np.stack(batch)
        return buffer[: len(batch)]

    row = run(forward, [np.full(1000, float(n)) for n in range(8)])[3].result(0)
    run(forward, [np.full(1000, 9.0)] * 8)
    assert row.base is None
    assert row.flags.owndata
    assert (row == 3).all()
    gc.collect()
    assert all(buffer is not held for held in gc.get_referents(row))


def test_s25_a_model_may_write_its_next_results_into_the_arrays_it_returned() -> None:
    buffers = [np.zeros(2) for _ in range(4)]

    def forward(batch: Sequence[Array], _: object) -> list[Array]:
        for buffer, sample in zip(buffers, batch, strict=False):
            buffer[:] = sample
        return buffers[: len(batch)]

    first = [future.result(0) for future in run(forward, [np.full(2, float(n)) for n in range(4)])]
    run(forward, [np.full(2, 9.0)] * 4)
    assert [row.tolist() for row in first] == [[n, n] for n in range(4)]


def test_s25_an_array_returned_for_two_samples_is_two_arrays_for_their_callers() -> None:
    one = np.zeros(2)
    rows = [future.result(0) for future in run(lambda samples, _: [one] * len(samples), tiles(2))]
    rows[0][0] = 99
    assert rows[1].tolist() == [0, 0]
    assert one.tolist() == [0, 0]


def test_s25_a_model_may_empty_the_lists_it_is_given() -> None:
    def forward(batch: list[Array], modes: list[str]) -> list[Array]:
        modes.clear()
        return [batch.pop(0) for _ in range(len(batch))]

    futures = run(forward, tiles(4))
    assert [float(future.result(0)[0, 0, 0]) for future in futures] == [0, 1, 2, 3]


def test_s5_a_model_that_takes_samples_out_and_returns_as_many_as_it_left_breaks_nothing() -> None:
    with BatchScheduler[int, int](lambda batch, _: [batch.pop()], max_batch_size=2, max_wait_s=1000) as scheduler:  # type: ignore[attr-defined]
        futures = [scheduler.submit(sample) for sample in (1, 2)]
        assert all(isinstance(future.exception(PATIENCE_S), ModelContractError) for future in futures)
        last = scheduler.submit(3)
        scheduler.flush()
        assert last.result(PATIENCE_S) == 3
