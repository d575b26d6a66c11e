"""Metrics and baselines against hand-worked cases."""

import math

import numpy as np
import pytest

from sidgraft import baselines, metrics


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
    value, low, high = rows["all", "ndcg", 3]
    assert value == pytest.approx((1 + 0.5 + 1 / math.log2(3)) / 4)
    assert low <= value <= high


def test_the_bootstrap_interval_of_a_mean_against_the_normal_formula():
    values = (np.random.default_rng(0).random(2000) < 0.2).astype(float)[:, None]
    low, high = np.quantile(metrics.bootstrap_means(values, 2000, seed=1)[:, 0], [0.025, 0.975])
    mean, error = values.mean(), values.std() / math.sqrt(2000)
    assert low == pytest.approx(mean - 1.96 * error, abs=0.15 * error)
    assert high == pytest.approx(mean + 1.96 * error, abs=0.15 * error)


def test_popularity_is_the_most_frequent_and_skips_what_is_excluded():
    items, scores = baselines.popularity(np.array([3, 9, 3, 1]), [np.array([], int), np.array([1, 0, 2])], 3)
    assert items.tolist() == [[1, 0, 2], [3, -1, -1]]
    assert scores[0].tolist() == [9, 3, 3]


def test_neighbours_are_ranked_by_cosine_to_the_mean_of_unit_vectors():
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(40, 5)).astype(np.float32) * rng.uniform(0.1, 9, (40, 1)).astype(np.float32)
    histories = [np.array([3, 8, 8]), np.array([], int), np.array([11])]
    nothing = [np.array([], int)] * 3
    items, scores = baselines.neighbours(vectors, histories, nothing, 6)
    unit = vectors.astype(np.float64) / np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    for row, history in enumerate(histories):
        query = unit[history].mean(axis=0) if len(history) else unit.mean(axis=0)
        cosine = unit @ query / np.linalg.norm(query)
        order = np.argsort(-cosine, kind="stable")[:6]
        assert items[row].tolist() == order.tolist()
        np.testing.assert_allclose(scores[row], cosine[order], atol=1e-5)
    assert items[2, 0] == 11  # the history's item stays recommendable unless it is excluded
