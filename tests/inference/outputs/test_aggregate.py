"""Slide results against values computed in the open."""

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from inference.errors import ConfigError, ModelContractError
from inference.outputs.aggregate import MeanPool, ScalarSummary


def _pool(
    rows: NDArray[np.float32], ok: NDArray[np.bool_], cuts: list[int]
) -> tuple[NDArray[np.float32] | None, MeanPool]:
    pool = MeanPool()
    pool.start(rows.shape[1])
    for part, part_ok in zip(np.split(rows, cuts), np.split(ok, cuts), strict=True):
        pool.update(part, part_ok)
    return pool.finish(), pool


def test_the_mean_embedding_leaves_failed_tiles_out_and_counts_them() -> None:
    rows = np.array([[1, 10], [np.nan, np.nan], [3, 30]], np.float32)
    mean, pool = _pool(rows, np.array([True, False, True]), [])
    assert mean is not None
    assert mean.dtype == np.float32
    assert mean.tolist() == [2, 20]
    assert (pool.n_ok, pool.n_failed) == (2, 1)


@pytest.mark.parametrize("n_dims", [1, 7])
def test_where_batches_are_cut_changes_no_bit(n_dims: int) -> None:
    random = np.random.default_rng(0)
    rows = (random.standard_normal((500, n_dims)) * 10.0 ** random.integers(-6, 6, (500, n_dims))).astype(np.float32)
    ok = random.random(500) > 0.1
    whole, _ = _pool(rows, ok, [])
    pieces, _ = _pool(rows, ok, [1, 2, 77, 300, 300])
    assert whole is not None
    assert pieces is not None
    assert whole.tobytes() == pieces.tobytes()

    names = [f"output {i}" for i in range(n_dims)]
    summaries = []
    for cuts in ([], [3, 4, 250]):
        summary = ScalarSummary(names, top_k=9, thresholds={names[0]: 0.0})
        summary.start(n_dims)
        for part, part_ok in zip(np.split(rows, cuts), np.split(ok, cuts), strict=True):
            summary.update(part, part_ok)
        summaries.append(summary.finish())
    assert summaries[0] == summaries[1]


def test_a_float64_sum_keeps_a_million_small_tiles_beside_a_large_one() -> None:
    rows = np.full((20_000, 1), 1e-4, np.float32)
    rows[0] = 2**20
    mean, _ = _pool(rows, np.ones(20_000, np.bool_), [])
    assert mean is not None
    assert mean[0] == np.float32(math.fsum(rows[:, 0].tolist()) / 20_000)


def test_no_ok_tile_gives_no_result() -> None:
    mean, pool = _pool(np.full((2, 3), np.nan, np.float32), np.zeros(2, np.bool_), [])
    assert mean is None
    assert (pool.n_ok, pool.n_failed) == (0, 2)


def test_a_summary_has_the_known_statistics_of_each_output() -> None:
    rows = np.array([[0.1, 5], [0.5, 5], [0.9, 5], [0.7, 5], [np.nan, 0]], np.float64)
    summary = ScalarSummary(["tumour", "stroma"], top_k=2, thresholds={"tumour": 0.5})
    summary.start(2)
    summary.update(rows, np.array([True, True, True, True, False]))
    result = summary.finish()
    assert result is not None
    assert result["tumour"] == pytest.approx(
        {"mean": 0.55, "top_k_mean": 0.8, "std": math.sqrt(0.0875), "min": 0.1, "max": 0.9, "fraction_above": 0.5}
    )
    assert result["stroma"] == {"mean": 5, "top_k_mean": 5, "std": 0, "min": 5, "max": 5}
    assert (summary.n_ok, summary.n_failed) == (4, 1)


def test_fewer_tiles_than_top_k_are_all_used() -> None:
    summary = ScalarSummary(["tumour"], top_k=10)
    summary.start(1)
    summary.update(np.array([[1.0], [2.0]]), np.ones(2, np.bool_))
    result = summary.finish()
    assert result is not None
    assert result["tumour"]["top_k_mean"] == 1.5


def test_the_deviation_of_large_nearly_equal_values_does_not_cancel() -> None:
    values = np.float32(1e6) + np.array([0, 0.125, 0.25, 0.375], np.float32)
    summary = ScalarSummary(["gene"])
    summary.start(1)
    summary.update(values[:, None], np.ones(4, np.bool_))
    result = summary.finish()
    assert result is not None
    assert result["gene"]["std"] == pytest.approx(float(np.std(values.astype(np.float64))), rel=1e-12)


def test_a_second_slide_starts_from_nothing() -> None:
    pool = MeanPool()
    for value in (4.0, 8.0):
        pool.start(1)
        pool.update(np.array([[value]], np.float32), np.ones(1, np.bool_))
        mean = pool.finish()
        assert mean is not None
        assert mean.tolist() == [value]
        assert pool.n_ok == 1


@pytest.mark.parametrize("rows", [np.array([[1.0, np.nan]]), np.array([[1.0, np.inf]]), np.array([[1.0]])])
def test_an_ok_tile_that_breaks_the_contract_is_refused(rows: NDArray[np.float64]) -> None:
    pool = MeanPool()
    pool.start(2)
    with pytest.raises(ModelContractError):
        pool.update(rows, np.ones(1, np.bool_))


def test_a_summary_that_cannot_be_meant_is_refused() -> None:
    with pytest.raises(ConfigError, match="stroma"):
        ScalarSummary(["tumour"], thresholds={"stroma": 0.5})
    with pytest.raises(ConfigError, match="top_k"):
        ScalarSummary(["tumour"], top_k=0)
    with pytest.raises(ConfigError, match="distinct"):
        ScalarSummary(["tumour", "tumour"])
    with pytest.raises(ModelContractError, match="returns 2"):
        ScalarSummary(["tumour"]).start(2)
