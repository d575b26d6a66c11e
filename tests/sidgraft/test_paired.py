"""Paired tests over users against scipy and against all sign flips."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pytest
from scipy import stats

from sidgraft.artifacts import SCHEMAS
from sidgraft.paired import hits_by_user, holm, paired_difference, permutation_p


def test_p_equals_all_sign_flips() -> None:
    rng = np.random.default_rng(0)
    for _ in range(20):
        differences = rng.integers(-3, 4, size=10)
        signs = np.array(list(itertools.product((-1, 1), repeat=10)))
        sums = signs @ np.abs(differences)
        expected = (np.abs(sums) >= abs(differences.sum())).mean()
        assert permutation_p(differences) == pytest.approx(expected, abs=1e-12)


def test_p_of_one_seed_is_the_sign_test() -> None:
    differences = np.array([1] * 40 + [-1] * 17 + [0] * 5000)
    assert permutation_p(differences) == pytest.approx(stats.binomtest(40, 57).pvalue, rel=1e-9)
    assert permutation_p(np.zeros(10, dtype=int)) == 1.0


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_hits_by_user() -> None:
    rows = [
        ("model", "u2", "a", ["a", "b"]),
        ("model", "u1", "b", ["a", "b"]),
        ("model", "u3", "c", []),
        ("popularity", "u1", "b", ["b"]),
    ]
    names = ("recommender", "user_id", "target_id", "item_ids")
    schema = pa.schema([SCHEMAS["recommendations/v1"]["recommendations.parquet"].field(name) for name in names])
    table = pa.Table.from_pylist([dict(zip(names, row, strict=True)) for row in rows], schema)
    users, hits = hits_by_user(table, 1)["model"]
    assert users.tolist() == ["u1", "u2", "u3"]
    assert hits.tolist() == [False, True, False]
    assert hits_by_user(table, 2)["model"][1].tolist() == [True, True, False]
    assert hits_by_user(table, 2)["popularity"][1].tolist() == [True]


def test_difference_is_over_users_of_all_seeds() -> None:
    def pair(users: str, hits: list[int]) -> tuple[np.ndarray, np.ndarray]:
        return np.array(list(users)), np.array(hits, dtype=bool)

    ours = [pair("abc", [1, 1, 0]), pair("bcd", [1, 0, 1])]
    theirs = [pair("abc", [0, 0, 1]), pair("bcd", [0, 0, 0])]
    # Users b and c: b is ahead by 1 in both seeds, c behind by 1 in the first: (1 - 0.5) / 2.
    difference, p, users = paired_difference(ours, theirs) or (0.0, 0.0, 0)
    assert users == 2
    assert difference == pytest.approx(0.25)
    assert p == 1.0  # of the sums ±2 ± 1 all four reach 1
    assert paired_difference([pair("a", [1])], [pair("b", [1])]) is None
