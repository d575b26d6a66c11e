"""Graded metrics: by hand, and against scikit-learn."""

import math

import numpy as np
import pyarrow as pa
import pytest
from sklearn.metrics import ndcg_score

from sidgraft.graded import graded_metrics


def recommended(lists):
    return pa.table({"user_id": list(lists), "item_ids": pa.array(list(lists.values()), pa.list_(pa.string()))})


def judged(*rows):
    columns = zip(*rows, strict=True) if rows else ([], [], [])
    return pa.table(dict(zip(("query_id", "item_id", "grade"), map(list, columns), strict=True)))


def test_by_hand():
    lists = {"q": ["maybe", "unjudged", "good", "not"], "none": ["x", "y", "z", "w"], "short": ["good"]}
    judgements = judged(
        ("q", "good", 2), ("q", "maybe", 1), ("q", "not", 0), ("q", "missed", 2),
        ("none", "x", 0), ("short", "good", 2), ("short", "other", 1), ("elsewhere", "x", 2),
    )  # fmt: skip
    values = graded_metrics(recommended(lists), judgements, [1, 3])
    assert values["precision_strict", 1].tolist() == [0, 0, 1]
    assert values["precision_lenient", 1].tolist() == [1, 0, 1]
    assert values["precision_strict", 3] == pytest.approx([1 / 3, 0, 1 / 3])
    assert values["precision_lenient", 3] == pytest.approx([2 / 3, 0, 1 / 3])
    # q: 1 at rank 1, 2 at rank 3; at best 2, 2, 1. short: 2 at rank 1; at best 2, 1.
    q = (1 + 2 / 2) / (2 + 2 / math.log2(3) + 1 / 2)
    short = 2 / (2 + 1 / math.log2(3))
    assert values["composite_ndcg", 3] == pytest.approx([q, math.nan, short], nan_ok=True)
    assert values["composite_ndcg", 1] == pytest.approx([1 / 2, math.nan, 1], nan_ok=True)


@pytest.mark.parametrize("k", [1, 5, 20])
def test_composite_ndcg_is_that_of_scikit_learn(k):
    rng = np.random.default_rng(0)
    grades_QN = rng.choice(3, (30, 40), p=[0.8, 0.1, 0.1])
    rank_QN = np.argsort(rng.random((30, 40)), axis=1)
    lists = {str(q): [str(i) for i in rank_QN[q]] for q in range(30)}
    # every second candidate of grade 0 goes unjudged
    rows = [(str(q), str(i), int(g)) for q in range(30) for i, g in enumerate(grades_QN[q]) if g or i % 2]
    found = graded_metrics(recommended(lists), judged(*rows), [k])["composite_ndcg", k]
    score_QN = np.empty(rank_QN.shape)
    np.put_along_axis(score_QN, rank_QN, -np.arange(40.0)[None, :].repeat(30, axis=0), axis=1)
    expected = [ndcg_score(grades_QN[q : q + 1], score_QN[q : q + 1], k=k) for q in range(30)]
    assert grades_QN.any(axis=1).all()
    np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_bad_judgements_are_refused():
    lists = recommended({"q": ["a", "b"]})
    with pytest.raises(ValueError, match=r"1 of 2 judgements have no grade of 0, 1 or 2, such as .*'b'"):
        graded_metrics(lists, judged(("q", "a", 1), ("q", "b", 3)), [1])
    with pytest.raises(ValueError, match="1 of 1 judgements have no grade"):
        graded_metrics(lists, judged(("q", "a", None)), [1])
    with pytest.raises(ValueError, match="repeat the query and item of another, such as query 'q', item 'a'"):
        graded_metrics(lists, judged(("q", "a", 1), ("q", "a", 2)), [1])
    with pytest.raises(ValueError, match="'q' name an item more than once"):
        graded_metrics(recommended({"q": ["a", "a"]}), judged(("q", "a", 1)), [1])
