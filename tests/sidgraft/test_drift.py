"""Drift, against cases worked by hand and plain loops."""

import numpy as np
import pytest

from sidgraft import drift


@pytest.mark.parametrize(
    ("before", "now", "shift"),
    [
        ({"a": 1, "b": 1}, {"a": 50, "b": 50}, 0.0),
        ({"a": 1}, {"b": 7}, 1.0),
        ({"a": 3, "b": 1}, {"a": 1, "b": 1}, 0.25),
        ({"a": 1, "b": 1}, {"a": 1, "b": 1, "c": 2}, 0.5),
        ({}, {}, 0.0),
    ],
)
def test_category_shift(before, now, shift):
    assert drift.category_shift(before, now) == pytest.approx(shift)
    assert drift.category_shift(now, before) == pytest.approx(shift)


def test_collision_rate_by_counting():
    codes_NL = np.random.default_rng(0).integers(0, 3, (40, 3))
    lists = [tuple(row) for row in codes_NL]
    assert 0 < drift.collision_rate(codes_NL) == sum(lists.count(row) > 1 for row in lists) / 40


def test_error_ratio_by_a_plain_loop():
    rng = np.random.default_rng(1)
    vectors_Nd, codes_N = rng.normal(size=(60, 5)), rng.integers(0, 4, 60)
    codes_N[-1] = 4  # a code that no known item has
    known_N = np.arange(60) < 45
    units = [v / np.sqrt((v**2).sum()) for v in vectors_Nd]
    errors = {True: [], False: []}
    for i in range(60):
        members = [units[j] for j in range(60) if known_N[j] and codes_N[j] == codes_N[i]]
        mean = np.mean(members or [units[j] for j in range(60) if known_N[j]], axis=0)
        errors[bool(known_N[i])].append(((units[i] - mean) ** 2).sum())
    wanted = np.mean(errors[False]) / np.mean(errors[True])
    assert drift.error_ratio(vectors_Nd.astype(np.float32), codes_N, known_N) == pytest.approx(wanted, rel=1e-5)


def test_error_ratio_without_a_comparison_is_one():
    vectors_Nd, codes_N = np.ones((3, 2)), np.zeros(3, dtype=np.int64)
    assert drift.error_ratio(vectors_Nd, codes_N, np.ones(3, dtype=bool)) == 1.0
    assert drift.error_ratio(vectors_Nd, codes_N, np.zeros(3, dtype=bool)) == 1.0
    assert drift.error_ratio(vectors_Nd, codes_N, np.array([True, True, False])) == 1.0
