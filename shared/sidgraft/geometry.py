"""The geometry of token rows: spectra, cosines, RSA, purity, and what the leading directions encode.

All in NumPy float64. An undefined figure (a zero matrix, a constant target) is None, never NaN.

Shapes: N items · L semantic levels · K rows or codes · D width · C categories · S singular values, descending.
Sources: GTI (arXiv 2604.02324), fig. 5-7; Centroid ("Preserving Item Semantics for Free"), eq. 3, 6-9, table 1
and theorem 3.1.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

import numpy as np

OTHER = "Other"  # the label of items without a category of their own; it stays out of purity
CONSTANT = 1e-12  # relative spread under which values are equal but for rounding
AT_ORIGIN = 1e-6  # distance from the origin, relative to its length, that is the rounding of a mean in float32
BLOCK = 1024  # rows whose distances to all others are held at once


def centred(rows_KD: np.ndarray) -> np.ndarray:
    """Rows minus their mean, float64 [K, D]. Equal rows give exact zeros: the first is subtracted before the mean."""
    shifted_KD = np.asarray(rows_KD, np.float64) - np.asarray(rows_KD[:1], np.float64)
    return shifted_KD - shifted_KD.mean(axis=0, keepdims=True)


def singular_values(matrix_KD: np.ndarray) -> np.ndarray:
    """Singular values in descending order, float64 [min(K, D)]."""
    return np.linalg.svd(np.asarray(matrix_KD, np.float64), compute_uv=False)


def rank(values_S: np.ndarray, shape: tuple[int, int]) -> int:
    """How many singular values exceed s_1 * max(K, D) * eps(float32); 0 for a zero matrix of that shape."""
    return int(np.sum(values_S > values_S[0] * max(shape) * np.finfo(np.float32).eps))


def effective_rank(values_S: np.ndarray, shape: tuple[int, int]) -> float:
    """exp of the entropy of p_i = s_i / sum s, over the s_i that `rank` counts; 0.0 for a zero matrix."""
    kept = values_S[: rank(values_S, shape)]
    if not len(kept):
        return 0.0
    share = kept / kept.sum()
    return float(np.exp(-np.sum(share * np.log(share))))


def sigma_geo(values_S: np.ndarray, shape: tuple[int, int]) -> float:
    """Geometric mean of the s_i that `rank` counts (Centroid, section 3.2), in logs; 0.0 for a zero matrix."""
    kept = values_S[: rank(values_S, shape)]
    return float(np.exp(np.mean(np.log(kept)))) if len(kept) else 0.0


def unit_rows(rows_KD: np.ndarray) -> np.ndarray:
    """Rows divided by their length, float64; a zero row stays zero."""
    rows_KD = np.asarray(rows_KD, np.float64)
    norms_K1 = np.linalg.norm(rows_KD, axis=1, keepdims=True)
    return np.divide(rows_KD, norms_K1, out=np.zeros_like(rows_KD), where=norms_K1 > 0)


def cosine_matrix(rows_KD: np.ndarray, others_MD: np.ndarray) -> np.ndarray:
    """Cosine of every row with every other row, float64 [K, M]; 0 where one of the two is a zero row."""
    return unit_rows(rows_KD) @ unit_rows(others_MD).T


def mean_pairwise_cosine(rows_KD: np.ndarray) -> float | None:
    """Mean cosine over pairs of different rows (zero rows left out); None for fewer than two rows.

    sum_{i<j} u_i.u_j = (|sum u|^2 - K) / 2 needs no [K, K] matrix.
    """
    units_KD = _without_zero_rows(unit_rows(rows_KD))
    count = len(units_KD)
    if count < 2:
        return None
    return float((np.sum(units_KD.sum(axis=0) ** 2) - count) / (count * (count - 1)))


def mean_cosine(rows_KD: np.ndarray, others_MD: np.ndarray) -> float | None:
    """Mean cosine of every row with every other row (zero rows left out); None when no pair is left."""
    units_KD, units_MD = (_without_zero_rows(unit_rows(x)) for x in (rows_KD, others_MD))
    if not len(units_KD) or not len(units_MD):
        return None
    return float(units_KD.mean(axis=0) @ units_MD.mean(axis=0))


def mean_matched_cosine(rows_KD: np.ndarray, others_KD: np.ndarray, origin_D: np.ndarray) -> float | None:
    """Mean cosine of row k with its counterpart k, both seen from ``origin_D``; None when no pair is left.

    Seen from the mean of the base vocabulary, which all new rows share, unlike rows come out near 0 (Centroid,
    appendix H). Pairs with a row at the origin are left out.
    """
    seen_KD, others_KD = (np.asarray(x, np.float64) - origin_D for x in (rows_KD, others_KD))
    nearest = AT_ORIGIN * np.linalg.norm(origin_D)
    both_K = np.all([np.linalg.norm(x, axis=1) > nearest for x in (seen_KD, others_KD)], axis=0)
    if not both_K.any():
        return None
    return float(np.sum(unit_rows(seen_KD[both_K]) * unit_rows(others_KD[both_K]), axis=1).mean())


def pearson(x: np.ndarray, y: np.ndarray) -> float | None:
    """Pearson correlation; None when one of the two is constant (up to rounding) or there are fewer than two."""
    if len(x) < 2 or _is_constant(x) or _is_constant(y):
        return None
    x, y = x - x.mean(), y - y.mean()
    return float(x @ y / (np.linalg.norm(x) * np.linalg.norm(y)))


def spearman(x: np.ndarray, y: np.ndarray) -> float | None:
    """Spearman rank correlation, ties at their mean rank; None where `pearson` is."""
    if len(x) < 2 or _is_constant(x) or _is_constant(y):
        return None
    return pearson(_mean_ranks(x), _mean_ranks(y))


def pair_cosines(rows_KD: np.ndarray, vectors_Kd: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cosines over the pairs i < j among the rows and among the vectors, in the same order: two [K (K-1) / 2].

    Indices with a zero row on either side are left out.
    """
    rows_KD, vectors_Kd = unit_rows(rows_KD), unit_rows(vectors_Kd)
    both_K = rows_KD.any(axis=1) & vectors_Kd.any(axis=1)
    upper = np.triu_indices(int(both_K.sum()), k=1)
    rows_KD, vectors_Kd = rows_KD[both_K], vectors_Kd[both_K]
    return (rows_KD @ rows_KD.T)[upper], (vectors_Kd @ vectors_Kd.T)[upper]


def rsa(rows_KD: np.ndarray, vectors_Kd: np.ndarray) -> tuple[float | None, float | None]:
    """Representational similarity of rows and codebook vectors: Pearson r and Spearman rho of their pair cosines.

    On raw rows, upper triangle (GTI, fig. 7). None where one side has all cosines equal.
    """
    of_rows, of_vectors = pair_cosines(rows_KD, vectors_Kd)
    return pearson(of_rows, of_vectors), spearman(of_rows, of_vectors)


def code_totals(codes_N: np.ndarray, values_N: np.ndarray, size: int) -> np.ndarray:
    """Sum of the items' values for each code, float64 [size]: n_k of Centroid eq. 6 when values are f_i."""
    return np.bincount(codes_N, weights=values_N, minlength=size)


def majority_categories(codes_N: np.ndarray, categories: Sequence[str | None], size: int) -> list[str | None]:
    """cat_0(k): the most frequent category of each code's items, ties alphabetical (Centroid eq. 7).

    None for a code without items that have a category.
    """
    counts: defaultdict[int, Counter[str]] = defaultdict(Counter)
    for code, category in zip(codes_N.tolist(), categories, strict=True):
        if category is not None:
            counts[code][category] += 1
    return [min(counts[k], key=lambda c: (-counts[k][c], c)) if k in counts else None for k in range(size)]


def neighbourhood_purity(rows_KD: np.ndarray, categories: Sequence[str | None], m: int) -> float | None:
    """P_m: mean share of a code's m nearest codes (L2) with its category (Centroid eq. 3).

    Codes without a category, and those of "Other", are neither asked nor neighbours; fewer than m + 1 codes leave
    fewer neighbours. None for fewer than two codes, or when all their rows are equal and none is nearest.
    """
    kept_K, labels_K = _labelled(categories)
    if len(kept_K) < 2:
        return None
    points_KD = centred(rows_KD[kept_K])  # distances do not see the shift, rounding does
    if not points_KD.any():
        return None
    squares_K = np.sum(points_KD**2, axis=1)
    shares = []
    for first in range(0, len(kept_K), BLOCK):
        block = np.arange(first, min(first + BLOCK, len(kept_K)))
        distances_BK = squares_K - 2 * points_KD[block] @ points_KD.T  # |row|^2 is the same along a line
        distances_BK[np.arange(len(block)), block] = np.inf
        nearest_Bm = np.argsort(distances_BK, axis=1, kind="stable")[:, : min(m, len(kept_K) - 1)]
        shares.append(np.mean(labels_K[nearest_Bm] == labels_K[block, None], axis=1))
    return float(np.concatenate(shares).mean())


def random_purity(categories: Sequence[str | None]) -> float | None:
    """The expectation of `neighbourhood_purity` when neighbours are drawn at random: mean of (n_cat - 1) / (n - 1)."""
    kept_K, labels_K = _labelled(categories)
    if len(kept_K) < 2:
        return None
    sizes_C = np.bincount(labels_K)
    return float(np.mean((sizes_C[labels_K] - 1) / (len(kept_K) - 1)))


def popularity_target(totals_K: np.ndarray) -> np.ndarray:
    """T_pop: log(1 + n_k), column-centred, [K, 1] (Centroid eq. 6)."""
    return centred(np.log1p(totals_K)[:, None])


def category_target(categories: Sequence[str | None]) -> np.ndarray:
    """T_sem: one-hot majority category, zero rows for codes without one, then column-centred, [K, C]."""
    names = sorted({c for c in categories if c is not None})
    onehot_KC = np.array([[float(c == name) for name in names] for c in categories]).reshape(len(categories), -1)
    return centred(onehot_KC)


def alignment(rows_KD: np.ndarray, target_KT: np.ndarray, depths: Sequence[int]) -> dict[int, float | None]:
    """R2_q(T) for each q in ``depths``: the share of |T|_F^2 in the top q left singular vectors of the centred rows.

    ||Z_q^T T||_F^2 / ||T||_F^2 (Centroid, section 3.2). Directions beyond the rank are arbitrary and left out. None
    for a zero matrix and for a constant target.
    """
    centred_KD = centred(rows_KD)
    left_KS, values_S, _ = np.linalg.svd(centred_KD, full_matrices=False)
    found, total = rank(values_S, centred_KD.shape), float(np.sum(target_KT**2))
    if not found or not total:
        return dict.fromkeys(depths)
    captured_S = np.sum((left_KS[:, :found].T @ target_KT) ** 2, axis=1)
    return {q: float(captured_S[:q].sum() / total) for q in depths}


def explained_variance(codes_NL: np.ndarray, counts_N: np.ndarray) -> dict[int, float | None]:
    """EV_rho for rho = 1..L: the share of the variance of a_i = log(1 + f_i) that lies between SID prefixes.

    Var_i[mean of a over the items that share i's first rho codes] / Var_i[a_i] (Centroid eq. 9). ``codes_NL`` are the
    semantic codes. None when all items are equally popular.
    """
    popularity_N = np.log1p(np.asarray(counts_N, np.float64))
    levels = range(1, codes_NL.shape[1] + 1)
    if not len(popularity_N) or _is_constant(popularity_N):
        return dict.fromkeys(levels)
    shares: dict[int, float | None] = {}
    for depth in levels:
        _, group_N = np.unique(codes_NL[:, :depth], axis=0, return_inverse=True)
        group_N = group_N.reshape(-1)
        means_G = np.bincount(group_N, weights=popularity_N) / np.bincount(group_N)
        shares[depth] = float(means_G[group_N].var() / popularity_N.var())
    return shares


def axis_projection(rows_KD: np.ndarray, axis_D: np.ndarray) -> np.ndarray:
    """Signed length of the centred rows along an axis, [K]; zeros when the axis is zero.

    With s = sum_t h_t, h_t the mean final hidden state that predicts the level's codes at step t, this is the
    direction along which training moves code k in proportion to n_k - n_mean (Centroid, theorem 3.1).
    """
    return centred(rows_KD) @ unit_rows(axis_D[None])[0]


def principal_plane(rows_KD: np.ndarray) -> np.ndarray:
    """Coordinates of the centred rows on their first two principal directions, [K, 2], signs fixed.

    Each direction is turned so that its coordinate of largest size is positive. Zeros where there is no direction.
    """
    left_KS, values_S, _ = np.linalg.svd(centred(rows_KD), full_matrices=False)
    plane_K2 = np.zeros((len(rows_KD), 2))
    for axis in range(min(2, len(values_S))):
        column_K = left_KS[:, axis] * values_S[axis]
        plane_K2[:, axis] = column_K * np.sign(column_K[np.argmax(np.abs(column_K))])
    return plane_K2


def _without_zero_rows(rows_KD: np.ndarray) -> np.ndarray:
    return rows_KD[rows_KD.any(axis=1)]


def _is_constant(x: np.ndarray) -> bool:
    return bool(np.ptp(x) <= CONSTANT * np.abs(x).max())


def _mean_ranks(x: np.ndarray) -> np.ndarray:
    """Ranks from 1, equal values at the mean of the ranks they take."""
    _, group, counts = np.unique(x, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[group.reshape(-1)]


def _labelled(categories: Sequence[str | None]) -> tuple[np.ndarray, np.ndarray]:
    """Which codes have a category that counts for purity, and that category as a number."""
    kept_K = np.array([k for k, c in enumerate(categories) if c is not None and c != OTHER], dtype=np.int64)
    names = [categories[k] for k in kept_K]
    return kept_K, np.unique(names, return_inverse=True)[1].reshape(-1) if names else kept_K
