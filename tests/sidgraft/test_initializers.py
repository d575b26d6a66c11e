"""Each initialization against its equation."""

import numpy as np
import pytest
import torch

from sidgraft import initializers
from sidgraft.initializers import LIFT, NOISE, stream


def base_rows(v=500, d=6, seed=0):
    rng = np.random.default_rng(seed)
    return torch.from_numpy(rng.standard_normal((v, d)) @ rng.standard_normal((d, d)) + 3).float()


def test_mean():
    rows = base_rows()
    found = initializers.mean(rows, 4)
    np.testing.assert_allclose(found, np.tile(rows.double().numpy().mean(axis=0), (4, 1)), rtol=1e-6)


def test_random_has_the_range_of_the_config_and_no_mean():
    found = initializers.random(20000, 5, 0.02, stream(1, NOISE)).double().numpy()
    np.testing.assert_allclose(np.cov(found.T), 0.02**2 * np.eye(5), atol=1.5e-5)
    assert np.abs(found.mean(axis=0)).max() < 1e-3


def test_gaussian_has_mean_mu_and_covariance_epsilon_sigma():
    # Rows with a mean near zero, so that float32 keeps the digits of the noise.
    rows = base_rows(d=4) - base_rows(d=4).mean(dim=0)
    found = initializers.gaussian(rows, 40000, stream(0, NOISE)).double().numpy()
    sigma = np.cov(rows.double().numpy().T, bias=True)
    np.testing.assert_allclose(np.cov(found.T) / 1e-9, sigma, atol=0.03 * np.abs(sigma).max())
    np.testing.assert_allclose(found.mean(axis=0), rows.double().numpy().mean(axis=0), atol=2e-6)


def test_gaussian_is_not_mu_even_where_sigma_is_singular():
    rows = base_rows(v=20, d=40)  # rank 19 at most: no Cholesky factor
    found = initializers.gaussian(rows, 30, stream(0, NOISE))
    assert found.dtype == torch.float32
    assert (found != initializers.mean(rows, 1)).any(dim=1).all()
    assert len(torch.unique(found, dim=0)) == 30
    assert (found - initializers.mean(rows, 1)).abs().max() < 1e-3


def test_covariance_and_norm_against_numpy(monkeypatch):
    monkeypatch.setattr(initializers, "ROWS_PER_CHUNK", 64)
    rows = base_rows()
    plain = rows.double().numpy()
    np.testing.assert_allclose(initializers.covariance(rows), np.cov(plain.T, bias=True), rtol=1e-9)
    expected = np.linalg.norm(plain - plain.mean(axis=0), axis=1).mean()
    assert initializers.mean_centred_norm(rows) == pytest.approx(expected)


def books(*sizes, d):
    rng = np.random.default_rng(7)
    return [rng.standard_normal((k, d)).astype(np.float32) for k in sizes]


def test_centroid_of_the_models_width_is_the_equation():
    codebooks, rows = books(5, 3, d=6), base_rows()
    found = initializers.centroid(initializers.centroid_parts(codebooks, 6, 0), rows, match=False)
    everything = np.concatenate(codebooks).astype(float)
    mu = rows.double().numpy().mean(axis=0)
    expected = [c - everything.mean(axis=0) + mu for c in everything]  # the mean over all levels
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_lift_has_orthonormal_columns_and_keeps_all_distances():
    q = initializers.lift(6, 20, seed=3).numpy()
    np.testing.assert_allclose(q.T @ q, np.eye(6), atol=1e-12)
    codebooks = books(9, 4, d=6)
    parts = initializers.centroid_parts(codebooks, 20, seed=3).numpy()
    centroids = np.concatenate(codebooks).astype(float)
    before = np.linalg.norm(centroids[:, None] - centroids[None], axis=2)
    after = np.linalg.norm(parts[:, None] - parts[None], axis=2)
    np.testing.assert_allclose(after, before, atol=1e-12)
    assert not np.allclose(parts, initializers.centroid_parts(codebooks, 20, seed=4).numpy())
    assert np.array_equal(parts, initializers.centroid_parts(codebooks, 20, seed=3).numpy())


def test_wider_centroids_are_refused():
    with pytest.raises(ValueError, match="run `sidgraft quantize` again with --dim 5"):
        initializers.centroid_parts(books(3, d=6), 5, 0)


def test_match_gives_the_mean_centred_norm_of_the_base_and_the_same_directions():
    rows = base_rows(d=12)
    parts = initializers.centroid_parts(books(5, 4, d=6), 12, 0)
    centred = initializers.centroid(parts, rows, match=True).double() - rows.double().mean(dim=0)
    plain = rows.double().numpy()
    expected = np.linalg.norm(plain - plain.mean(axis=0), axis=1).mean()
    assert centred.norm(dim=1).mean().item() == pytest.approx(expected, rel=1e-5)
    cosines = torch.nn.functional.cosine_similarity(centred, parts)
    np.testing.assert_allclose(cosines, 1, atol=1e-5)


def test_shuffled_permutes_within_each_level():
    rows = torch.arange(200.0).reshape(100, 2)
    found = initializers.shuffled(rows, [60, 40], stream(0, LIFT))
    for level in (slice(0, 60), slice(60, 100)):
        assert not torch.equal(found[level], rows[level])
        assert torch.equal(found[level].sort(dim=0).values, rows[level])


def test_description_is_the_mean_over_the_tokens_of_the_codes_items(monkeypatch):
    monkeypatch.setattr(initializers, "ROWS_PER_CHUNK", 3)
    rows = base_rows(v=30)
    tokens = [[1, 2, 2], [], [5], [7, 8], [29, 29, 29, 0], [4], []]
    codes = np.array([[0, 1], [0, 0], [2, 1], [0, 1], [2, 2], [2, 0], [3, 3]])
    found, known = initializers.description(lambda chunk: tokens[chunk], codes, [4, 4], rows)
    for level in (0, 1):
        for code in range(4):
            ids = [t for item, row in zip(tokens, codes, strict=True) if row[level] == code for t in item]
            row = 4 * level + code
            assert bool(known[row]) == bool(ids)
            if ids:
                np.testing.assert_allclose(found[row], rows[ids].double().mean(dim=0), rtol=1e-5)
    assert not known[[1, 3, 7]].any()
