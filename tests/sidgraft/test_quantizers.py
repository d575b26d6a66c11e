"""Residual k-means against plain NumPy in float64; deduplication by brute force; quality by direct formulas."""

from collections import defaultdict

import numpy as np
import pytest
import torch

from sidgraft import kmeans, quality, quantizers, residual, sinkhorn
from sidgraft.quantizers import Quantizer


def encode_plainly(vectors, codebooks):
    """METHOD 4, one vector after the other, float64. Residuals of float32 rounding size count as zero."""
    codes, lengths = [], []
    for z in vectors.astype(np.float64):
        r, row, gaps = z, [], []
        for level, book in enumerate(codebooks):
            norm = np.sqrt((r**2).sum())
            u = r / norm if norm > (0 if level == 0 else 1e-6) else np.zeros_like(r)
            distances = ((u - book.astype(np.float64)) ** 2).sum(axis=1)
            row.append(int(np.flatnonzero(distances <= distances.min() + 1e-12)[0]))
            r = u - book[row[-1]]
            gaps.append(np.sqrt((r**2).sum()))
        codes.append(row)
        lengths.append(gaps)
    return np.array(codes), np.array(lengths)


def lloyd_plainly(points, centroids, iterations):
    for _ in range(iterations):
        distances = ((points[:, None] - centroids) ** 2).sum(axis=2)
        codes = distances.argmin(axis=1)
        farthest = np.argsort(-distances.min(axis=1), kind="stable")
        new = centroids.copy()
        empty = [k for k in range(len(centroids)) if not (codes == k).any()]
        for k in range(len(centroids)):
            new[k] = points[farthest[empty.index(k)]] if k in empty else points[codes == k].mean(axis=0)
        centroids = new
    return centroids


def vectors(n=400, d=12, seed=0):
    return np.random.default_rng(seed).standard_normal((n, d)).astype(np.float32)


def test_encode_is_the_formula_zero_residuals_included():
    rng = np.random.default_rng(1)
    books = [rng.standard_normal((k, 12)).astype(np.float32) for k in (7, 5, 9)]
    x = vectors()
    x[3] = 0  # a zero vector
    unit = x[5] / np.linalg.norm(x[5])
    books[0][2] = unit  # a vector that is its own centroid: its residual is zero from then on
    codes, _ = encode_plainly(x, books)
    assert codes[5, 0] == 2
    assert np.array_equal(residual.encode(x, books), codes)


def test_ties_go_to_the_lowest_code():
    book = np.array([[0, 1], [0, -1], [0, 1], [0.5, 0], [0.5, 0]], np.float32)
    x = np.array([[1, 0], [-1, 0], [0, 2], [0, 0]], np.float32)
    assert residual.encode(x, [book])[:, 0].tolist() == [3, 0, 0, 3]


def test_near_ties_are_decided_in_float64():
    # 384 dimensions, pairs of centroids that differ by less than the rounding of a float32 product
    rng = np.random.default_rng(2)
    base = rng.standard_normal((8, 384)).astype(np.float32) / 20
    nudge = 1 + 3e-7 * rng.choice([-1, 1], size=base.shape)
    book = np.concatenate([base, (base * nudge).astype(np.float32)])
    x = vectors(300, 384)
    codes, _ = encode_plainly(x, [book])
    assert len(set(codes[:, 0].tolist())) > 8
    assert np.array_equal(residual.encode(x, [book]), codes)


@pytest.mark.parametrize("bfloat16", [False, True])
@pytest.mark.parametrize("spread", [1.0, 0.02])  # far apart, and so near that most points are close to several
def test_nearest_is_the_exact_one_whatever_the_products_precision(monkeypatch, bfloat16, spread):
    monkeypatch.setattr(kmeans, "BFLOAT16", bfloat16)
    monkeypatch.setattr(kmeans, "WORTH_BFLOAT16", 0)
    monkeypatch.setattr(kmeans, "SCORES_PER_CHUNK", 300 * 40)  # several chunks
    rng = np.random.default_rng(3)
    points = rng.standard_normal((700, 24)).astype(np.float32)
    centres = (points[0] + spread * rng.standard_normal((40, 24))).astype(np.float32)
    centres[31] = centres[7]  # a tie, for the lower one
    distances = ((points[:, None].astype(np.float64) - centres) ** 2).sum(axis=2)
    found = kmeans.nearest(torch.from_numpy(points), torch.from_numpy(centres)).numpy()
    assert np.array_equal(found, distances.argmin(axis=1))
    assert 31 not in found
    # the check is needed: the rounded product alone decides differently
    rounded = kmeans.scores(torch.from_numpy(points).bfloat16(), torch.from_numpy(centres).bfloat16()).argmin(1).numpy()
    assert not np.array_equal(rounded, distances.argmin(axis=1))


def test_codes_do_not_depend_on_the_batch():
    x = vectors(500, 32)
    books, codes, _ = residual.fit_residual(x, [16, 16, 16], fit="lloyd", seed=3)
    one_by_one = np.concatenate([residual.encode(x[i : i + 1], books) for i in range(len(x))])
    assert np.array_equal(one_by_one, codes)
    assert np.array_equal(residual.encode(x[::-1], books), codes[::-1])
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        assert np.array_equal(residual.encode(x, books), codes)
    finally:
        torch.set_num_threads(threads)


def test_lloyd_is_plain_lloyd_from_the_same_start():
    x = torch.from_numpy(vectors(300, 6))
    start = x[:20].clone()
    start[19] = 100.0  # no point is near: an empty code
    for iterations in (1, 2, 7):
        found = kmeans.lloyd(x, start, iterations, what="test")
        expected = lloyd_plainly(x.double().numpy(), start.double().numpy(), iterations)
        np.testing.assert_allclose(found.numpy(), expected, atol=1e-5)


def test_lloyd_stops_where_nothing_changes():
    x = torch.from_numpy(vectors(200, 4))
    a = kmeans.lloyd(x, x[:5], 500, what="test")
    assert torch.equal(a, kmeans.lloyd(x, a, 1, what="test"))


def test_minibatch_centres_are_the_means_of_all_points_they_were_given():
    x = torch.from_numpy(vectors(600, 5))
    start, counts = x[:8].clone(), torch.arange(8)
    found = kmeans.minibatch(x, start, counts, 9, 50, torch.Generator().manual_seed(4), what="test")

    centres, seen = start.double().numpy(), counts.numpy().astype(float)
    sums = centres * seen[:, None]
    generator = torch.Generator().manual_seed(4)
    for _ in range(9):
        batch = x[torch.randint(600, (50,), generator=generator)].double().numpy()
        codes = ((batch[:, None] - centres) ** 2).sum(axis=2).argmin(axis=1)
        for point, code in zip(batch, codes, strict=True):
            sums[code] += point
            seen[code] += 1
        centres = np.where(seen[:, None] > 0, sums / np.maximum(seen, 1)[:, None], centres)
    np.testing.assert_allclose(found.numpy(), centres, atol=1e-5)


@pytest.mark.parametrize("fit", ["minibatch", "lloyd", "sampled", "balanced"])
def test_fit_returns_what_encode_and_the_formula_give(fit):
    x = vectors(700, 10)
    x[13] = 0
    books, codes, lengths = residual.fit_residual(x, [16, 8], fit=fit, steps=40, batch_size=128, seed=1)
    expected_codes, expected_lengths = encode_plainly(x, books)
    assert [b.shape for b in books] == [(16, 10), (8, 10)]
    assert np.array_equal(codes, expected_codes)
    assert np.array_equal(residual.encode(x, books), codes)
    np.testing.assert_allclose(lengths, expected_lengths, atol=1e-6)
    # the product of the lengths is the relative reconstruction error
    keep = np.arange(700) != 13
    for z, row, product in zip(x[keep].astype(float), codes[keep], lengths.prod(axis=1)[keep], strict=True):
        n0 = np.linalg.norm(z)
        r1 = z / n0 - books[0][row[0]]
        back = n0 * (books[0][row[0]] + np.linalg.norm(r1) * books[1][row[1]])
        assert np.linalg.norm(z - back) / n0 == pytest.approx(product, abs=1e-6)


def test_fit_is_no_worse_than_scikit_learn():
    from sklearn.cluster import MiniBatchKMeans

    rng = np.random.default_rng(0)
    x = rng.standard_normal((60, 24))[rng.integers(60, size=3000)] + 0.4 * rng.standard_normal((3000, 24))
    x = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)
    _, _, lengths = residual.fit_residual(x, [32], steps=200, batch_size=512)
    peer = MiniBatchKMeans(32, batch_size=512, n_init=1, random_state=0, max_iter=35, max_no_improvement=None).fit(x)
    peer_mse = (peer.transform(x).min(axis=1) ** 2).mean()
    assert (lengths**2).mean() <= peer_mse * 1.01


def test_sampled_fit_is_as_good_as_full_k_means():
    """Against scikit-learn's KMeans to convergence, on more points than the largest sample holds."""
    from sklearn.cluster import KMeans

    rng = np.random.default_rng(0)
    x = rng.standard_normal((60, 12))[rng.integers(60, size=12_000)] + 0.6 * rng.standard_normal((12_000, 12))
    x = (x / np.linalg.norm(x, axis=1, keepdims=True)).astype(np.float32)
    _, codes, lengths = residual.fit_residual(x, [24], fit="sampled")
    peer = KMeans(24, n_init=1, random_state=0).fit(x)
    assert (lengths**2).mean() <= peer.inertia_ / len(x) * 1.01
    assert len(np.unique(codes)) == 24


def test_sampled_rounds_are_plain_lloyd_on_the_sample(monkeypatch):
    monkeypatch.setattr(kmeans, "BFLOAT16", False)
    monkeypatch.setattr(kmeans, "LEAST_GAIN", -1.0)  # all rounds
    x = torch.from_numpy(vectors(300, 6))
    start = x[:20].clone()
    start[19] = 100.0  # no point is near: an empty code
    for rounds in (1, 2, 7):
        expected = lloyd_plainly(x.double().numpy(), start.double().numpy(), rounds)
        np.testing.assert_allclose(kmeans._rounds(x, start, rounds).numpy(), expected, atol=1e-5)


def test_start_by_region_spreads_as_plain_k_means_plus_plus_does(monkeypatch):
    """The error of the start itself, against the start that looks at all points for each centre."""
    x = torch.from_numpy(vectors(3000, 8))
    x[:50] = x[0]  # equal points, of which only one may be chosen

    def error(many, seed):
        monkeypatch.setattr(kmeans, "MANY", many)
        chosen = kmeans.start(x, 100, torch.Generator().manual_seed(seed), others_Nd=x, what="level 0")
        assert len(torch.unique(chosen, dim=0)) == 100
        return (x - chosen[kmeans.nearest(x, chosen)]).square().sum(1).mean().item()

    plain, by_region = (np.mean([error(many, seed) for seed in range(3)]) for many in (1024, 10))
    assert by_region < 1.05 * plain


def test_fit_is_the_same_for_the_same_seed_only():
    x = vectors(900, 8)
    options = {"steps": 20, "batch_size": 64}
    first, again, other = (residual.fit_residual(x, [12, 12], seed=s, **options)[0] for s in (5, 5, 6))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
    assert not np.array_equal(first[0], other[0])


def test_start_takes_distinct_points_and_says_when_there_are_too_few():
    points = torch.tensor([[1.0, 0], [1, 0], [0, 1], [0, 1], [-1, 0], [0, -1], [0, -1]])
    chosen = kmeans.start(points, 4, torch.Generator().manual_seed(0), others_Nd=points, what="level 0")
    assert len(torch.unique(chosen, dim=0)) == 4
    with pytest.raises(ValueError, match=r"level 0 has 4 distinct vectors for 5 codes: lower codebook_size"):
        kmeans.start(points, 5, torch.Generator().manual_seed(0), others_Nd=points, what="level 0")
    with pytest.raises(ValueError, match="distinct"):
        residual.fit_residual(np.ones((9, 3), np.float32), [2])


def test_nearly_equal_points_still_fill_the_codebook():
    points = torch.tensor([[1.0, 0]]) + 1e-5 * torch.arange(6)[:, None]
    chosen = kmeans.start(points, 6, torch.Generator().manual_seed(0), others_Nd=points, what="level 0")
    assert len(torch.unique(chosen, dim=0)) == 6


def test_deduplicate_against_brute_force():
    codes = np.random.default_rng(0).integers(0, 3, size=(200, 3))
    seen, expected = defaultdict(int), []
    for row in map(tuple, codes.tolist()):
        expected.append([*row, seen[row]])
        seen[row] += 1
    found = quantizers.deduplicate(codes, dedup_size=max(seen.values()))
    assert found.tolist() == expected
    assert len(set(map(tuple, found.tolist()))) == 200
    with pytest.raises(ValueError, match=rf"{max(seen.values())} items share the codes .* raise dedup_size"):
        quantizers.deduplicate(codes, dedup_size=max(seen.values()) - 1)


def test_quality_against_direct_counts():
    codes = np.array([[0, 1, 0], [0, 1, 1], [2, 0, 0], [2, 1, 0], [0, 1, 2]])
    lengths = np.array([[0.5, 0.1], [0.5, 0.2], [1.0, 1.0], [0.0, 0.3], [0.2, 0.5]])
    found = quality.quality(codes, lengths, [4, 2, 8], 0.25, (0.5, [0.75, 0.5]))
    assert found["collision_rate"] == 3 / 5
    assert found["largest_bucket"] == 3
    assert found["relative_squared_error"] == 0.25
    assert found["neighbours_kept"] == 0.5
    assert [level["prefix_neighbours"] for level in found["levels"]] == [0.75, 0.5]
    assert found["levels"][0]["utilisation"] == 0.5
    assert found["levels"][0]["perplexity"] == pytest.approx(0.6**-0.6 * 0.4**-0.4)
    assert found["levels"][1]["mse"] == pytest.approx((0.01 + 0.04 + 1 + 0.09 + 0.25) / 5)
    with pytest.raises(ValueError, match=r"max_collision_rate=0\.5"):
        quality.check_quality(found, 0.5, 0.0)
    with pytest.raises(ValueError, match=r"level 0 uses 0\.5000 of its 4 codes"):
        quality.check_quality(found, 1.0, 0.6)


def test_neighbours_against_the_full_cosine_matrix(monkeypatch):
    monkeypatch.setattr(kmeans, "SCORES_PER_CHUNK", 2000)  # several chunks
    x = vectors(150, 6)
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    cosine = unit @ unit.T
    np.fill_diagonal(cosine, -2)
    expected = np.argsort(-cosine, axis=1)[:, :10]
    found = quality.nearest_neighbours(x, np.arange(150), 10)
    assert np.array_equal(np.sort(found), np.sort(expected))
    codes = np.random.default_rng(0).integers(0, 4, size=(150, 2))
    decoded = x + 0.5 * vectors(150, 6, seed=1)
    prefix = [
        np.mean([(codes[j, :depth] == codes[i, :depth]).all() for i in range(150) for j in expected[i]])
        for depth in (1, 2)
    ]
    to_decoded = (decoded / np.linalg.norm(decoded, axis=1, keepdims=True)) @ unit.T
    np.fill_diagonal(to_decoded, -2)
    around = np.argsort(-to_decoded, axis=1)[:, :10]
    kept = np.mean([len(set(a) & set(b)) / 10 for a, b in zip(expected, around, strict=True)])
    found = quality.neighbours_kept(x, x, decoded, codes, seed=0)
    assert found[0] == pytest.approx(kept)
    assert 0.1 < kept < 0.9
    assert found[1] == pytest.approx(prefix)
    assert quality.neighbours_kept(x, x, x, codes, seed=0)[0] == 1.0
    monkeypatch.setattr(quality, "AMONG", 90)
    rows = quality.among(150, seed=0)
    fewer = quality.neighbours_kept(x, x, decoded, codes, seed=0)
    assert fewer == quality.neighbours_kept(x[rows], x[rows], decoded[rows], codes[rows], seed=0)
    assert fewer != found
    assert quality.neighbours_kept(x[:1], x[:1], x[:1], codes[:1], seed=0) == (1.0, [1.0, 1.0])


def test_what_codes_alone_stand_for_and_its_error():
    x = vectors(300, 6)
    x[4] = 0
    books, codes, lengths = residual.fit_residual(x, [8, 8, 8], fit="lloyd")
    mean = lengths.mean(axis=0)
    expected = np.array([books[0][a] + mean[0] * (books[1][b] + mean[1] * books[2][c]) for a, b, c in codes])
    found = residual.decode(codes, books, mean)
    np.testing.assert_allclose(found, expected, atol=1e-6)
    unit = x.astype(float) / np.maximum(np.linalg.norm(x.astype(float), axis=1, keepdims=True), 1e-30)
    errors = ((unit - expected) ** 2).sum(axis=1)
    errors[4] = 0
    assert quality.relative_squared_error(x, found) == pytest.approx(errors.mean(), rel=1e-5)
    quantizer = Quantizer(books, [8, 8, 8, 300], mean_lengths=mean)
    assert np.array_equal(quantizer.decode(codes), found)
    np.testing.assert_allclose(quantizer.lengths(x, codes), lengths, rtol=1e-9)
    with pytest.raises(ValueError, match=r"which lengths its levels leave, .* run `sidgraft quantize` again"):
        Quantizer(books, [8, 8, 8, 300]).decode(codes)


def test_errors_and_lengths_of_vectors_that_the_quantizer_was_not_fitted_on():
    """By METHOD 4, one vector after the other; the mean lengths stay those of the fit."""
    books, _, fitted = residual.fit_residual(vectors(300, 6), [8, 8], fit="lloyd")
    quantizer = Quantizer(books, [8, 8, 300], mean_lengths=fitted.mean(axis=0))
    x = vectors(50, 6, seed=9)
    codes, lengths = encode_plainly(x, books)
    np.testing.assert_allclose(quantizer.lengths(x, codes), lengths, rtol=1e-5)
    expected = np.array([books[0][a] + fitted.mean(axis=0)[0] * books[1][b] for a, b in codes])
    np.testing.assert_allclose(quantizer.decode(codes), expected, atol=1e-6)
    unit = x.astype(float) / np.linalg.norm(x.astype(float), axis=1, keepdims=True)
    first = ((unit - books[0][codes[:, 0]]) ** 2).sum(axis=1).mean()
    assert quality.first_code_error(x, books[0], codes[:, 0]) == pytest.approx(first, rel=1e-5)
    assert np.square(lengths[:, 0]).mean() == pytest.approx(first, rel=1e-5)  # the error of the first level


def test_balanced_fit_uses_codes_more_equally():
    rng = np.random.default_rng(0)
    crowd = 0.1 * rng.standard_normal((900, 8)) + np.eye(8)[0]
    x = np.concatenate([crowd, rng.standard_normal((300, 8))]).astype(np.float32)
    entropies = {}
    for fit in ("minibatch", "balanced"):
        _, codes, _ = residual.fit_residual(x, [16], fit=fit, steps=60, batch_size=256, seed=1)
        entropies[fit] = quality.code_use(np.bincount(codes[:, 0], minlength=16))[1]
    assert entropies["balanced"] > entropies["minibatch"] + 1


def test_balanced_batches_have_equal_shares_at_every_level(monkeypatch):
    """48, 32 and 24 codes, most points in one crowd: the plans' marginals, the codes of them, and the final codes."""
    rng = np.random.default_rng(3)
    crowd = 0.1 * rng.standard_normal((900, 12)) + np.eye(12)[0]
    x = np.concatenate([crowd, rng.standard_normal((600, 12))]).astype(np.float32)
    sizes, seen = [48, 32, 24], []
    whole = sinkhorn.balanced

    def watched(costs_BK):
        seen.append((costs_BK.double().numpy(), sinkhorn.transport(costs_BK).numpy(), codes_B := whole(costs_BK)))
        return codes_B

    monkeypatch.setattr(sinkhorn, "balanced", watched)
    settings = {"steps": 40, "batch_size": 480, "seed": 2}
    books, codes, _ = residual.fit_residual(x, sizes, fit="balanced", **settings)
    assert [costs.shape for costs, _, _ in seen] == [(480, size) for size in sizes for _ in range(40)]
    off = {size: [] for size in sizes}
    for costs, plan, given in seen:
        share = 480 / costs.shape[1]
        np.testing.assert_allclose(plan.sum(axis=1), 1, atol=1e-12)
        assert np.abs(plan.sum(axis=0) / share - 1).mean() < 0.045
        counts = [np.bincount(c, minlength=costs.shape[1]) for c in (given, costs.argmin(axis=1))]
        off[costs.shape[1]].append([np.abs(c / share - 1).mean() for c in counts])
    for size in sizes:  # shares of whole points: the nearest centroids' are further off, and furthest at the start
        given, nearest = np.array(off[size]).T
        assert given.max() < 0.3
        assert given.mean() < 0.4 * nearest.mean()
    # the codes of the items are those of the nearest centroids all the same, and used more equally for it
    assert np.array_equal(codes, encode_plainly(x, books)[0])
    _, plain, _ = residual.fit_residual(x, sizes, fit="minibatch", **settings)
    use, of_plain = (
        [quality.code_use(np.bincount(c[:, level], minlength=size))[1] for level, size in enumerate(sizes)]
        for c in (codes, plain)
    )
    assert use[0] > 1.3 * of_plain[0]  # the crowd is gone from there on: plain k-means uses what is left equally, too
    assert np.all(np.array(use[1:]) > 0.98 * np.array(sizes[1:]))


@pytest.mark.slow
@pytest.mark.parametrize("fit", ["minibatch", "balanced"])
def test_8192_codes_are_fitted_used_and_assigned_exactly(fit):
    """It takes 4 and 10 seconds of one core; a balanced step over so many codes takes one and a half."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2000, 16))[rng.integers(2000, size=20_000)] + 0.5 * rng.standard_normal((20_000, 16))
    x = x.astype(np.float32)
    books, codes, _ = residual.fit_residual(x, [8192, 64], fit=fit, steps=4, batch_size=2048)
    use = [quality.code_use(np.bincount(codes[:, level], minlength=size)) for level, size in enumerate((8192, 64))]
    assert use[0][0] > 0.98
    assert use[0][1] > 6000  # of 8192, of 20,000 items
    assert use[1][0] == 1.0
    _, bucket, counts = np.unique(codes, axis=0, return_inverse=True, return_counts=True)
    assert (counts[bucket] > 1).mean() < 0.05
    assert np.array_equal(residual.encode(x, books), codes)
    assert np.array_equal(encode_plainly(x[:100], books)[0], codes[:100])


def test_pca_against_scikit_learn():
    from sklearn.decomposition import PCA

    x = vectors(200, 9) @ np.random.default_rng(3).standard_normal((9, 9)).astype(np.float32)
    mean, components = quantizers.fit_pca(x, 4)
    found = quantizers.reduce(x, 4, mean, components)
    expected = PCA(4, svd_solver="full").fit_transform(x.astype(np.float64))
    signs = np.sign((found * expected).sum(axis=0))
    np.testing.assert_allclose(found, expected * signs, atol=1e-4)
    with pytest.raises(ValueError, match="needs at least 9 items"):
        quantizers.fit_pca(x[:5], 9)


def test_quantizer_reduces_new_vectors_first():
    x = vectors(300, 9)
    mean, components = quantizers.fit_pca(x, 4)
    reduced = quantizers.reduce(x, 4, mean, components)
    books, codes, _ = residual.fit_residual(reduced, [8, 8], fit="lloyd")
    assert np.array_equal(Quantizer(books, [8, 8, 4], mean, components).encode(x), codes)
    assert Quantizer(books, [8, 8, 4], mean, components).encode(x[:0]).shape == (0, 2)
    assert np.array_equal(Quantizer(books, [8, 8, 4]).encode(x), residual.encode(x[:, :4], books))
