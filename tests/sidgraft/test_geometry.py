"""Geometry: every figure against a direct formula, another library, or a case with a known answer."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from sidgraft import geometry


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def test_centred_equal_rows_are_exactly_zero(rng):
    assert not geometry.centred(np.tile(rng.normal(size=(1, 37)).astype(np.float32), (251, 1))).any()


def test_centred_columns_have_mean_zero(rng):
    rows = rng.normal(size=(9, 4)) + 100
    np.testing.assert_allclose(geometry.centred(rows), rows - rows.mean(0), atol=1e-12)


def test_spectrum_of_identity():
    values = geometry.singular_values(np.eye(6))
    assert geometry.rank(values, (6, 6)) == 6
    assert geometry.effective_rank(values, (6, 6)) == pytest.approx(6)
    assert geometry.sigma_geo(values, (6, 6)) == pytest.approx(1)


def test_spectrum_of_rank_one(rng):
    matrix = np.outer(rng.normal(size=8), rng.normal(size=5))
    values = geometry.singular_values(matrix)
    assert geometry.rank(values, matrix.shape) == 1
    assert geometry.effective_rank(values, matrix.shape) == pytest.approx(1)
    assert geometry.sigma_geo(values, matrix.shape) == pytest.approx(np.linalg.norm(matrix))


def test_effective_rank_and_sigma_geo_by_hand():
    values = geometry.singular_values(np.diag([1.0, 4.0, 3.0]))
    shares = [4 / 8, 3 / 8, 1 / 8]
    assert geometry.effective_rank(values, (3, 3)) == pytest.approx(math.exp(-sum(p * math.log(p) for p in shares)))
    assert geometry.sigma_geo(values, (3, 3)) == pytest.approx(12 ** (1 / 3))


def test_sigma_geo_does_not_underflow():
    assert geometry.sigma_geo(np.full(4000, 1e-3), (4000, 4000)) == pytest.approx(1e-3)


def test_rank_threshold_is_relative_to_float32():
    eps = np.finfo(np.float32).eps
    assert geometry.rank(np.array([2.0, 2 * 10 * eps * 1.01, 2 * 10 * eps * 0.99]), (10, 3)) == 2


def test_zero_matrix_has_rank_zero_and_nothing_else(rng):
    rows = np.tile(rng.normal(size=(1, 5)), (7, 1))
    values = geometry.singular_values(geometry.centred(rows))
    assert (geometry.rank(values, (7, 5)), geometry.effective_rank(values, (7, 5))) == (0, 0.0)
    assert geometry.sigma_geo(values, (7, 5)) == 0.0
    target = geometry.popularity_target(np.arange(7))
    assert geometry.alignment(rows, target, (1, 3)) == {1: None, 3: None}
    assert geometry.neighbourhood_purity(rows, list("aabbccd"), 2) is None
    assert geometry.rsa(rows, rng.normal(size=(7, 3))) == (None, None)
    assert not geometry.principal_plane(rows).any()
    assert not geometry.axis_projection(rows, np.ones(5)).any()


def test_cosines_of_zero_rows():
    zeros = np.zeros((4, 3))
    assert geometry.mean_pairwise_cosine(zeros) is None
    assert geometry.mean_cosine(zeros, np.eye(3)) is None
    assert geometry.mean_matched_cosine(zeros, np.ones((4, 3)), np.zeros(3)) is None
    assert not geometry.cosine_matrix(zeros, np.eye(3)).any()
    with_zero = np.array([[1.0, 0, 0], [0, 0, 0], [1, 1, 0]])
    assert geometry.mean_pairwise_cosine(with_zero) == pytest.approx(1 / math.sqrt(2))


def test_mean_cosines_against_the_matrix(rng):
    rows, others = rng.normal(size=(11, 6)) + 0.5, rng.normal(size=(4, 6))
    matrix = np.array([[a @ b / np.linalg.norm(a) / np.linalg.norm(b) for b in rows] for a in rows])
    np.testing.assert_allclose(geometry.cosine_matrix(rows, rows), matrix)
    assert geometry.mean_pairwise_cosine(rows) == pytest.approx(matrix[np.triu_indices(11, 1)].mean())
    cross = [a @ b / np.linalg.norm(a) / np.linalg.norm(b) for a in rows for b in others]
    assert geometry.mean_cosine(rows, others) == pytest.approx(np.mean(cross))


def test_matched_cosine_is_seen_from_the_origin():
    origin = np.array([10.0, 10.0])
    start = origin + np.array([[1.0, 0], [0, 2.0], [0.0, 0.0]])
    turned = origin + np.array([[3.0, 0], [1.0, 1.0], [5.0, 5.0]])
    expected = (1 + 1 / math.sqrt(2)) / 2  # the third pair stands at the origin and is left out
    assert geometry.mean_matched_cosine(turned, start, origin) == pytest.approx(expected)


def test_matched_cosine_of_a_mean_start_is_undefined(rng):
    base = rng.normal(size=(5000, 16)) * 0.1 + 0.02
    start = np.tile(base.astype(np.float32).mean(0, dtype=np.float64).astype(np.float32), (8, 1))
    assert geometry.mean_matched_cosine(start, start, base.mean(0)) is None


def test_correlations_against_scipy(rng):
    x = rng.integers(0, 6, 200).astype(float)  # many ties
    y = x + rng.normal(size=200)
    assert geometry.pearson(x, y) == pytest.approx(stats.pearsonr(x, y).statistic)
    assert geometry.spearman(x, y) == pytest.approx(stats.spearmanr(x, y).statistic)


def test_correlation_with_a_constant_is_undefined():
    assert geometry.pearson(np.full(5, 0.1) * 3, np.arange(5.0)) is None
    assert geometry.spearman(np.arange(5.0), np.zeros(5)) is None
    assert geometry.pearson(np.ones(1), np.ones(1)) is None


def test_rsa_against_scipy(rng):
    rows, vectors = rng.normal(size=(12, 7)) + 1, rng.normal(size=(12, 3))
    upper = np.triu_indices(12, 1)

    def cosines(x):
        return np.array(
            [x[i] @ x[j] / np.linalg.norm(x[i]) / np.linalg.norm(x[j]) for i, j in zip(*upper, strict=True)]
        )

    r, rho = geometry.rsa(rows, vectors)
    assert r == pytest.approx(stats.pearsonr(cosines(rows), cosines(vectors)).statistic)
    assert rho == pytest.approx(stats.spearmanr(cosines(rows), cosines(vectors)).statistic)


def test_rsa_of_an_isometric_lift_is_one(rng):
    vectors = rng.normal(size=(15, 4))
    lift, _ = np.linalg.qr(rng.normal(size=(20, 4)))
    assert geometry.rsa(3 * vectors @ lift.T, vectors) == pytest.approx((1, 1))


def test_rsa_of_shuffled_rows_is_near_zero(rng):
    vectors = rng.normal(size=(120, 5))
    r, rho = geometry.rsa(vectors[rng.permutation(120)], vectors)
    assert r is not None
    assert rho is not None
    assert abs(r) < 0.08
    assert abs(rho) < 0.08


def test_rsa_leaves_zero_vectors_out(rng):
    rows, vectors = rng.normal(size=(9, 4)), rng.normal(size=(9, 4))
    vectors[4] = 0
    kept = [0, 1, 2, 3, 5, 6, 7, 8]
    assert geometry.rsa(rows, vectors) == pytest.approx(geometry.rsa(rows[kept], vectors[kept]))


def test_code_totals():
    assert geometry.code_totals(np.array([2, 0, 2]), np.array([5, 1, 3]), 4).tolist() == [1, 0, 8, 0]


def test_majority_categories_ties_and_empty_codes():
    codes = np.array([0, 0, 0, 1, 1, 3, 4])
    categories = ["b", "a", "b", "z", "c", None, "Other"]
    assert geometry.majority_categories(codes, categories, 5) == ["b", "c", None, None, "Other"]


def _purity_by_hand(rows, categories, m):
    kept = [k for k, c in enumerate(categories) if c not in (None, "Other")]
    shares = []
    for k in kept:
        others = sorted((np.linalg.norm(rows[k] - rows[j]), j) for j in kept if j != k)
        nearest = [j for _, j in others[:m]]
        shares.append(sum(categories[j] == categories[k] for j in nearest) / len(nearest))
    return sum(shares) / len(shares)


@pytest.mark.parametrize("m", [1, 3, 10, 100])
def test_purity_by_brute_force(rng, m):
    rows = rng.normal(size=(40, 5)) + 50
    categories = rng.choice(["a", "b", "c", "Other", None], 40).tolist()
    assert geometry.neighbourhood_purity(rows, categories, m) == pytest.approx(_purity_by_hand(rows, categories, m))


def test_purity_over_several_blocks(rng, monkeypatch):
    rows, categories = rng.normal(size=(40, 5)), rng.choice(["a", "b"], 40).tolist()
    whole = geometry.neighbourhood_purity(rows, categories, 4)
    monkeypatch.setattr(geometry, "BLOCK", 7)
    assert geometry.neighbourhood_purity(rows, categories, 4) == pytest.approx(whole)


def test_purity_of_planted_clusters_is_one_and_shuffled_is_random(rng):
    categories = np.repeat(["a", "b", "c", "d"], 30)
    rows = np.repeat(rng.normal(size=(4, 8)) * 20, 30, axis=0) + rng.normal(size=(120, 8))
    assert geometry.neighbourhood_purity(rows, categories.tolist(), 10) == 1
    shuffled = rng.permutation(categories).tolist()
    random = geometry.random_purity(shuffled)
    assert random == pytest.approx(29 / 119)
    assert geometry.neighbourhood_purity(rows, shuffled, 10) == pytest.approx(random, abs=0.06)


def test_random_purity_is_the_mean_over_all_neighbour_sets():
    categories = ["a", "a", "b", "a", None, "Other"]
    kept = [0, 1, 2, 3]
    shares = [
        np.mean([categories[j] == categories[k] for j in chosen])
        for k in kept
        for chosen in itertools.combinations([j for j in kept if j != k], 2)
    ]
    assert geometry.random_purity(categories) == pytest.approx(np.mean(shares))


def test_purity_without_categories_is_undefined(rng):
    rows = rng.normal(size=(5, 3))
    assert geometry.neighbourhood_purity(rows, [None] * 5, 2) is None
    assert geometry.random_purity(["a", None, None, None, "Other"]) is None


def test_targets_are_centred_and_empty_codes_count():
    np.testing.assert_allclose(
        geometry.popularity_target(np.array([0, 3, 8])).ravel(),
        np.log([1, 4, 9]) - np.log(36) / 3,
    )
    one_hot = np.array([[1.0, 0], [0, 1], [0, 0], [1, 0]])
    np.testing.assert_allclose(geometry.category_target(["a", "b", None, "a"]), one_hot - one_hot.mean(0))
    assert geometry.category_target([None, None]).shape == (2, 0)


def test_alignment_against_projection(rng):
    rows, target = rng.normal(size=(20, 6)), geometry.centred(rng.normal(size=(20, 3)))
    left = np.linalg.svd(rows - rows.mean(0))[0]
    for q, value in geometry.alignment(rows, target, (1, 3, 5)).items():
        projected = left[:, :q] @ left[:, :q].T @ target
        assert value == pytest.approx(np.sum(projected**2) / np.sum(target**2))


def test_alignment_inside_and_outside_the_span(rng):
    basis, _ = np.linalg.qr(geometry.centred(rng.normal(size=(12, 4))))  # orthonormal, columns of mean zero
    rows = basis[:, :2] * [5.0, 3.0] @ rng.normal(size=(2, 7))
    assert geometry.alignment(rows, basis[:, :1], (1, 2))[2] == pytest.approx(1)
    assert geometry.alignment(rows, basis[:, 2:3], (1, 2)) == pytest.approx({1: 0, 2: 0}, abs=1e-12)


def test_alignment_never_counts_directions_beyond_the_rank(rng):
    basis, _ = np.linalg.qr(geometry.centred(rng.normal(size=(12, 4))))
    rows = np.outer(basis[:, 0], rng.normal(size=7))
    assert geometry.alignment(rows, basis[:, 1:2], (5,))[5] == pytest.approx(0, abs=1e-12)


def test_alignment_with_a_constant_target_is_undefined(rng):
    rows = rng.normal(size=(6, 3))
    assert geometry.alignment(rows, geometry.popularity_target(np.full(6, 7)), (1,)) == {1: None}
    assert geometry.alignment(rows, geometry.category_target([None] * 6), (1,)) == {1: None}


def test_explained_variance_by_hand():
    codes = np.array([[0, 0], [0, 1], [1, 0], [1, 0]])
    counts = np.exp([1.0, 3.0, 5.0, 7.0]) - 1  # a = 1, 3, 5, 7: variance 5
    # One code: means 2, 2, 6, 6 of variance 4. Two codes: 1, 3, 6, 6 of variance 4.5.
    assert geometry.explained_variance(codes, counts) == pytest.approx({1: 4 / 5, 2: 4.5 / 5})


def test_explained_variance_edges():
    codes = np.array([[0, 0], [0, 1], [1, 0]])
    assert geometry.explained_variance(codes, np.array([4, 4, 4])) == {1: None, 2: None}
    assert geometry.explained_variance(codes, np.array([1, 2, 3]))[2] == pytest.approx(1)  # unique prefixes


def test_axis_projection_recovers_the_planted_popularity(rng):
    axis, counts = rng.normal(size=9), rng.integers(0, 100, 30)
    rows = 0.01 * (counts - counts.mean())[:, None] * axis + 5  # theorem 3.1 without a residual
    projection = geometry.axis_projection(rows, axis)
    assert geometry.pearson(projection, counts) == pytest.approx(1)
    np.testing.assert_allclose(projection, 0.01 * (counts - counts.mean()) * np.linalg.norm(axis))


def test_principal_plane_against_eigenvectors(rng):
    rows = rng.normal(size=(25, 6)) * [5, 3, 1, 1, 1, 1]
    plane = geometry.principal_plane(rows)
    centred = rows - rows.mean(0)
    _, vectors = np.linalg.eigh(centred.T @ centred)
    np.testing.assert_allclose(np.abs(plane), np.abs(centred @ vectors[:, [-1, -2]]), atol=1e-9)
    assert (plane[np.argmax(np.abs(plane), axis=0), [0, 1]] > 0).all()


def test_principal_plane_of_one_dimension():
    np.testing.assert_allclose(
        geometry.principal_plane(np.array([[1.0], [4.0], [10.0]])), [[-4, 0], [-1, 0], [5, 0]], atol=1e-12
    )


def test_shuffled_centroids_keep_their_start_and_miss_the_truth(rng):
    mu, truth = rng.normal(size=200) * 3, rng.normal(size=(60, 200))
    start = mu + np.roll(truth, 1, axis=0)
    trained = start + rng.normal(size=start.shape) * 0.1
    to_start = geometry.mean_matched_cosine(trained, start, mu)
    to_truth = geometry.mean_matched_cosine(trained, mu + truth, mu)
    assert to_start == pytest.approx(1 / math.sqrt(1 + 0.1**2), abs=2e-3)
    assert to_truth == pytest.approx(0, abs=0.03)
