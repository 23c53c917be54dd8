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
    [np.float32(1), np.zeros((3, 2)), np.zeros((5, 2)), [np.zeros(2), np.zeros(3), np.zeros(2), np.zeros(2)]],
    ids=["no rows", "one too few", "one too many", "two shapes"],
)
def test_s5_arrays_of_another_shape_fail_the_batch(returned: object) -> None:
    for future in run(lambda samples, _: returned, tiles(4)):
        assert isinstance(future.exception(0), ModelContractError)


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

    assert run(forward, [tile])[0].result(0) is tile
    assert seen[0] is tile


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
