"""Paired comparison of recommenders over users: hits per user, an exact permutation test, Holm's correction."""

# pyright: reportAttributeAccessIssue=false
# pyarrow.compute makes its functions at import, where a type checker cannot see them.

from __future__ import annotations

import math

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc


def hits_by_user(recommendations: pa.Table, k: int) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return, by recommender, the sorted user ids [U] and whether the target is among the first k items, bool [U].

    ``recommendations`` has the columns of recommendations/v1. The mean of the hits is Recall@k.
    """
    first_k = pc.list_slice(recommendations["item_ids"].combine_chunks(), 0, k)
    row_of_item = pc.list_parent_indices(first_k)
    target_of_item = pc.take(recommendations["target_id"].combine_chunks(), row_of_item)
    is_hit = pc.equal(pc.list_flatten(first_k), target_of_item).to_numpy(zero_copy_only=False)
    hits = np.zeros(recommendations.num_rows, dtype=bool)
    hits[row_of_item.to_numpy()[is_hit]] = True
    users = np.asarray(recommendations["user_id"].to_pylist(), dtype=object).astype(str)
    names = np.asarray(recommendations["recommender"].to_pylist(), dtype=object).astype(str)
    result = {}
    for name in dict.fromkeys(names.tolist()):
        rows = np.flatnonzero(names == name)
        rows = rows[np.argsort(users[rows], kind="stable")]
        result[name] = (users[rows], hits[rows])
    return result


def paired_difference(
    ours: list[tuple[np.ndarray, np.ndarray]], theirs: list[tuple[np.ndarray, np.ndarray]]
) -> tuple[float, float, int] | None:
    """Compare two recommenders, each given as (users, hits) of the same seeds: mean difference, p, users.

    A user's metric is averaged over the seeds first (METHOD 10); users that some seed did not evaluate are left
    out. None when no user is left.
    """
    common = ours[0][0]
    for users, _ in (*ours, *theirs):
        if not np.array_equal(common, users):
            common = np.intersect1d(common, users)
    if len(common) == 0:
        return None
    total = np.sum([_at(pair, common) for pair in ours], axis=0) - np.sum(
        [_at(pair, common) for pair in theirs], axis=0
    )
    return float(total.mean() / len(ours)), permutation_p(total), len(common)


def _at(pair: tuple[np.ndarray, np.ndarray], users: np.ndarray) -> np.ndarray:
    """The hits of ``users`` (sorted, all of them in the pair) as int64."""
    return pair[1][np.searchsorted(pair[0], users)].astype(np.int64)


def permutation_p(differences: np.ndarray) -> float:
    """Two-sided p of the paired permutation test on integer differences, exact: all 2^n sign flips count.

    The sum under random signs is, for each size v of a difference, v * (2 * Binomial(n_v, 1/2) - n_v); the
    distribution of the whole sum is the convolution over the sizes.
    """
    sizes, counts = np.unique(np.abs(differences[differences != 0]), return_counts=True)
    distribution = np.ones(1)
    for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
        spread = np.zeros(2 * size * count + 1)
        spread[:: 2 * size] = _binomial_half(count)
        distribution = np.convolve(distribution, spread)
    sums = np.arange(len(distribution)) - len(distribution) // 2
    p = distribution[np.abs(sums) >= abs(int(differences.sum()))].sum()
    return float(min(1.0, p))


def _binomial_half(n: int) -> np.ndarray:
    logs = np.array([math.lgamma(n + 1) - math.lgamma(i + 1) - math.lgamma(n - i + 1) for i in range(n + 1)])
    return np.exp(logs - n * math.log(2))


def holm(ps: list[float]) -> list[float]:
    """Return Holm's adjusted p-values in the given order."""
    adjusted = [0.0] * len(ps)
    running = 0.0
    for rank, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        running = max(running, min(1.0, (len(ps) - rank) * ps[i]))
        adjusted[i] = running
    return adjusted
