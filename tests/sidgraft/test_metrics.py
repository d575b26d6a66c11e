"""Metrics against hand-worked cases."""

import math

import numpy as np
import pytest
from scipy import stats

from sidgraft import metrics


def test_ranks_recall_and_ndcg_by_hand():
    items = np.array([[4, 2, 7], [1, 3, 5], [9, 8, -1]])
    rank = metrics.ranks(items, np.array([2, 6, 9]))
    assert rank.tolist() == [2, 0, 1]
    assert metrics.recall_at(rank, 1).tolist() == [0, 0, 1]
    assert metrics.recall_at(rank, 3).tolist() == [1, 0, 1]
    np.testing.assert_allclose(metrics.ndcg_at(rank, 3), [1 / math.log2(3), 0, 1])
    np.testing.assert_allclose(metrics.ndcg_at(rank, 1), [0, 0, 1])


def test_slices_by_hand():
    # ten items: the head is the first ceil(0.2 * 10) = 2 by falling count, ties by item order: items 3 and 0
    count = np.array([5, 5, 0, 9, 1, 2, 0, 3, 1, 4])
    member = metrics.slices(count, np.array([0, 1, 2, 3, 4, 5]))
    assert member["all"].all()
    assert member["head"].tolist() == [True, False, False, True, False, False]
    assert member["tail"].tolist() == [False, True, True, False, True, True]
    assert member["cold"].tolist() == [False, False, True, False, True, False]


def test_metric_rows_by_hand_with_an_empty_slice_and_a_ratio_to_zero():
    rank = np.array([1, 3, 0, 2])
    member = {
        "all": np.ones(4, dtype=bool),
        "cold": np.zeros(4, dtype=bool),
        "head": np.array([True, True, False, False]),
        "tail": np.array([False, False, True, True]),
    }
    kept = np.array([[True, True], [True, False], [False, False], [True, True]])
    rows = {r[:3]: r[3:] for r in metrics.metric_rows(rank, kept, member, [1, 3], beams=3, bootstrap=200, seed=0)}
    assert rows["all", "recall", 3][0] == 0.75
    assert rows["cold", "recall", 3] == (None, None, None)
    assert rows["head", "recall", 1][0] == 0.5
    assert rows["tail", "recall", 1][0] == 0.0
    assert rows["head/tail", "recall", 1] == (None, None, None)
    assert rows["head/tail", "recall", 3][0] == 2.0
    assert rows["all", "level_1", 3][0] == 0.75
    assert rows["all", "level_2", 3][0] == 0.5
    # The third user loses the item at once, the second at the second code; the others keep it.
    assert [rows["all", f"lost_{n}", 3][0] for n in (1, 2)] == [0.25, 0.25]
    assert [rows["head", f"lost_{n}", 3][0] for n in (1, 2)] == [0.0, 0.5]
    assert [rows["tail", f"lost_{n}", 3][0] for n in (1, 2)] == [0.5, 0.0]
    assert rows["cold", "lost_1", 3][0] is None
    value, low, high = rows["all", "ndcg", 3]
    assert value == pytest.approx((1 + 0.5 + 1 / math.log2(3)) / 4)
    assert low <= value <= high


def test_the_bootstrap_interval_of_a_mean_against_the_normal_formula():
    values = (np.random.default_rng(0).random(2000) < 0.2).astype(float)[:, None]
    low, high = np.quantile(metrics.bootstrap_means(values, 2000, seed=1)[:, 0], [0.025, 0.975])
    mean, error = values.mean(), values.std() / math.sqrt(2000)
    assert low == pytest.approx(mean - 1.96 * error, abs=0.15 * error)
    assert high == pytest.approx(mean + 1.96 * error, abs=0.15 * error)


def test_the_bootstrap_is_that_of_users_drawn_one_by_one():
    """Against U users drawn with replacement 4000 times, and of recall against the binomial that it is."""
    rng = np.random.default_rng(3)
    rank = np.where(rng.random(60) < 0.4, rng.integers(1, 11, 60), 0)
    values = np.stack([metrics.recall_at(rank, 10), metrics.ndcg_at(rank, 10), rng.random(60)], axis=1)
    for columns in (values[:, :2], values):  # few rows that many users share; as many rows as users
        plain = columns[rng.integers(0, 60, (4000, 60))].mean(axis=1)
        found = metrics.bootstrap_means(columns, 4000, seed=1)
        assert found.shape == plain.shape
        error = columns.std(axis=0) / math.sqrt(60)
        np.testing.assert_allclose(found.mean(axis=0), columns.mean(axis=0), atol=0.06 * error.max())
        np.testing.assert_allclose(np.cov(found.T), np.cov(plain.T), rtol=0.1, atol=0.05 * error.max() ** 2)
        for i in range(1, columns.shape[1]):
            assert stats.ks_2samp(found[:, i], plain[:, i]).statistic < 0.044  # exceeded by chance 1 time in 1000
        hits = np.arange(61)  # the recall of a resample is a binomial share: the distribution itself
        share = (np.rint(60 * found[:, 0])[:, None] <= hits).mean(axis=0)
        np.testing.assert_allclose(share, stats.binom(60, columns[:, 0].mean()).cdf(hits), atol=0.031)
        assert np.array_equal(found, metrics.bootstrap_means(columns, 4000, seed=1))
        assert not np.array_equal(found, metrics.bootstrap_means(columns, 4000, seed=2))


def test_a_bootstrap_mean_is_a_mean_of_users_and_one_that_never_varies_has_no_width():
    found = metrics.bootstrap_means(np.array([[0.0, 2.0], [1.0, 2.0], [0.0, 2.0]]), 200, seed=0)
    assert set(np.round(3 * found[:, 0], 9)) == {0.0, 1.0, 2.0, 3.0}
    assert np.allclose(found[:, 1], 2.0)
