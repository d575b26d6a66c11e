"""Paired tests over users against scipy and against all sign flips."""

from __future__ import annotations

import itertools

import numpy as np
import pyarrow as pa
import pytest
from scipy import stats

from sidgraft.artifacts import SCHEMAS
from sidgraft.paired import common_users, detectable, holm, permutation_p, ranks_by_user


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


def scipy_p(differences: np.ndarray, n_resamples: float) -> float:
    """The same test by SciPy: samples are paired, and the signs of their differences flip."""
    zeros = np.zeros(len(differences))
    return stats.permutation_test(
        (differences, zeros), lambda x, y, axis: (x - y).mean(axis=axis), permutation_type="samples", vectorized=True,
        n_resamples=n_resamples,  # type: ignore[arg-type]
    ).pvalue  # fmt: skip


def test_p_is_that_of_scipy() -> None:
    rng = np.random.default_rng(1)
    for _ in range(5):
        differences = rng.integers(-2, 4, size=12)
        assert permutation_p(differences) == pytest.approx(scipy_p(differences, n_resamples=np.inf), abs=1e-12)


def test_p_of_real_differences_is_that_of_scipy_up_to_the_draws() -> None:
    rng = np.random.default_rng(2)
    for shift in (0.0, 0.25, 0.5):
        gains = rng.choice([0.0, 0.3562, 0.5, 0.6309, 1.0], size=(2, 14))
        differences = gains[0] - gains[1] + shift * (gains[0] > 0)
        exact = scipy_p(differences, n_resamples=np.inf)
        assert permutation_p(differences) == pytest.approx(exact, abs=5 * np.sqrt(exact / 50_000) + 1e-4)
    assert permutation_p(np.zeros(10)) == 1.0


@pytest.mark.parametrize("singles", [1, 9, 14])
def test_p_of_sizes_of_one_user_is_that_of_scipy_up_to_the_draws(singles: int) -> None:
    """Sizes that one user has beside sizes that several have, as over several seeds: 14 users, 2^14 sign patterns."""
    rng = np.random.default_rng(singles)
    for shift in (0.0, 0.3, 0.6):
        sizes = np.concatenate([rng.uniform(0.1, 3, singles), np.full(14 - singles, 0.6309)])
        differences = sizes * np.where(rng.random(14) < 0.5 + shift / 2, 1, -1)
        exact = scipy_p(differences, n_resamples=np.inf)
        assert permutation_p(differences) == pytest.approx(exact, abs=5 * np.sqrt(exact / 50_000) + 1e-4)


def test_p_of_many_sizes_is_that_of_the_normal_distribution() -> None:
    """Random signs of n sizes have a sum of mean 0 and variance sum(d²): for n = 5000, normal in good approximation."""
    rng = np.random.default_rng(7)
    for shift in (0.0, 0.02, 0.04):
        differences = rng.normal(shift, 1, size=5000)
        expected = 2 * stats.norm.sf(abs(differences.sum()) / np.sqrt(np.square(differences).sum()))
        assert permutation_p(differences) == pytest.approx(expected, abs=5 * np.sqrt(expected / 50_000) + 1e-3)


def test_p_of_real_differences_has_the_resolution_of_its_draws() -> None:
    assert permutation_p(np.full(500, 0.5)) == pytest.approx(1 / 50_001)


def test_the_detectable_effect_is_found_with_a_power_of_80_percent() -> None:
    """Simulated: normal differences with that mean, tested by SciPy's paired t-test."""
    rng = np.random.default_rng(3)
    noise = rng.normal(size=(4000, 200))
    effect = np.mean([detectable(row) for row in noise[:200]])
    found = stats.ttest_1samp(noise + effect, 0, axis=1).pvalue < 0.05
    assert found.mean() == pytest.approx(0.8, abs=0.03)
    assert detectable(np.zeros(5)) == 0.0


def test_holm_is_that_of_the_definition() -> None:
    """Reject in the order of p while p_(i) <= alpha / (m - i): the adjusted p is the least alpha that rejects."""
    ps = np.random.default_rng(4).uniform(0, 0.2, size=7)
    adjusted = holm(ps.tolist())
    for alpha in np.linspace(0.001, 1, 200):
        order = np.argsort(ps)
        rejected = set()
        for i, place in enumerate(order):
            if ps[place] > alpha / (len(ps) - i):
                break
            rejected.add(int(place))
        assert {i for i, p in enumerate(adjusted) if p <= alpha and p < 1} <= rejected
        assert rejected <= {i for i, p in enumerate(adjusted) if p <= alpha}


def test_holm_by_hand() -> None:
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


def test_ranks_by_user() -> None:
    rows = [
        ("model", "u2", "a", ["a", "b"]),
        ("model", "u1", "b", ["a", "b"]),
        ("model", "u3", "c", []),
        ("popularity", "u1", "b", ["c", "a", "b"]),
        ("popularity", "u0", "b", ["c", "a"]),
    ]
    names = ("recommender", "user_id", "target_id", "item_ids")
    schema = pa.schema([SCHEMAS["recommendations/v1"]["recommendations.parquet"].field(name) for name in names])
    table = pa.Table.from_pylist([dict(zip(names, row, strict=True)) for row in rows], schema)
    users, ranks = ranks_by_user(table)["model"]
    assert users.tolist() == ["u1", "u2", "u3"]
    assert ranks.tolist() == [2, 1, 0]
    users, ranks = ranks_by_user(pa.concat_tables([table, table])[5:])["popularity"]  # in chunks, from the middle
    assert (users.tolist(), ranks.tolist()) == (["u0", "u1"], [0, 3])


def test_only_users_of_all_seeds_are_compared() -> None:
    def pair(users: str, ranks: list[int]) -> tuple[np.ndarray, np.ndarray]:
        return np.array(list(users)), np.array(ranks)

    users, ours, theirs = common_users(
        [pair("abc", [1, 2, 3]), pair("bcd", [4, 5, 6])], [pair("abc", [7, 8, 9]), pair("bcd", [10, 11, 12])]
    )
    assert users.tolist() == ["b", "c"]
    assert ours.tolist() == [[2, 3], [4, 5]]
    assert theirs.tolist() == [[8, 9], [10, 11]]
    assert common_users([pair("a", [1])], [pair("b", [1])])[1].shape == (1, 0)
