"""Drift, against cases worked by hand and plain loops."""

import inspect

import numpy as np
import pytest

from sidgraft import drift, kmeans
from sidgraft.stages.watch import watch


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


@pytest.mark.parametrize("items_a_code", [0.1, 0.5, 0.9, 2.0])
def test_an_ordinary_increment_keeps_the_default_limit_of_collisions(items_a_code):
    """Items fall on 32,768 codes at random, then as many more as the default share of new items allows.

    By the Poisson distribution 1 - exp(-x) of them collide with x items a code. The worst rise is found by its
    derivative: at x = 4 ln(5/4) the increment of a quarter raises it by 0.8^4 - 0.8^5 = 0.08192.
    """
    defaults = {name: parameter.default for name, parameter in inspect.signature(watch).parameters.items()}
    before = round(32**3 * items_a_code)
    now = round(before / (1 - defaults["max_changed_share"]))
    codes_NL = np.random.default_rng(0).integers(0, 32, (now, 3))
    rise = drift.collision_rate(codes_NL) - drift.collision_rate(codes_NL[:before])
    expected = np.exp(-items_a_code) - np.exp(-items_a_code * now / before)
    assert rise == pytest.approx(expected, abs=0.01)
    assert expected <= 0.8**4 - 0.8**5 + 1e-4 < defaults["max_collision_rise"]


def test_error_ratio_by_a_plain_loop(monkeypatch):
    monkeypatch.setattr(kmeans, "SCORES_PER_CHUNK", 60)  # several chunks
    rng = np.random.default_rng(1)
    vectors_Nd, codes_N = rng.normal(size=(60, 5)).astype(np.float32), rng.integers(0, 4, 60)
    centroids_Kd = rng.normal(size=(4, 5)).astype(np.float32)
    vectors_Nd[7] = 0  # it has no direction, so no error
    total = 0.0
    for vector, code in zip(vectors_Nd.astype(np.float64), codes_N, strict=True):
        length = np.sqrt((vector**2).sum())
        total += ((vector / length - centroids_Kd[code]) ** 2).sum() if length else 0.0
    assert drift.error_ratio(vectors_Nd, centroids_Kd, codes_N, 0.25) == pytest.approx(total / 60 / 0.25, rel=1e-5)


def test_error_ratio_without_a_comparison():
    vectors_Nd, codes_N = np.ones((3, 1), np.float32), np.zeros(3, dtype=np.int64)
    assert drift.error_ratio(vectors_Nd[:0], vectors_Nd, codes_N[:0], 0.5) == 0.0
    assert drift.error_ratio(vectors_Nd, vectors_Nd, codes_N, 0.0) == 1.0  # each item is its centroid, then and now
    assert drift.error_ratio(-vectors_Nd, vectors_Nd, codes_N, 0.0) > 1e6
