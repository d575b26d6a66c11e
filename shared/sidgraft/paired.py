"""Paired comparison of recommenders over users: ranks per user, permutation test, detectable effect, Holm's correction.

Shapes: S seeds · U users.
"""

# pyright: reportAttributeAccessIssue=false
# pyarrow.compute makes its functions at import, where a type checker cannot see them.

from __future__ import annotations

import math
import statistics

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sidgraft.graded import graded_metrics

FLIPS = 50_000
FLIPS_AT_ONCE = 256

Ranks = tuple[np.ndarray, np.ndarray]  # user ids, sorted, and what was measured of each


def ranks_by_user(recommendations: pa.Table) -> dict[str, Ranks]:
    """Return, by recommender, the sorted user ids [U] and the target's rank among the items, int [U]; 0: not there.

    ``recommendations`` has the columns recommender, user_id, target_id and item_ids of recommendations/v1.
    """
    items = recommendations["item_ids"].combine_chunks()
    row_of_item = pc.list_parent_indices(items)
    target_of_item = pc.take(recommendations["target_id"].combine_chunks(), row_of_item)
    is_hit = pc.equal(pc.list_flatten(items), target_of_item).to_numpy(zero_copy_only=False)
    row_of_item = row_of_item.to_numpy()
    place_of_item = np.arange(len(row_of_item)) - np.searchsorted(row_of_item, row_of_item)
    rank = np.zeros(recommendations.num_rows, dtype=np.int64)
    rank[row_of_item[is_hit]] = place_of_item[is_hit] + 1
    users = np.asarray(recommendations["user_id"].to_pylist(), dtype=object).astype(str)
    names = np.asarray(recommendations["recommender"].to_pylist(), dtype=object).astype(str)
    result = {}
    for name in dict.fromkeys(names.tolist()):
        rows = np.flatnonzero(names == name)
        rows = rows[np.argsort(users[rows], kind="stable")]
        result[name] = (users[rows], rank[rows])
    return result


def graded_by_query(
    recommendations: pa.Table, judgements: pa.Table, columns: list[tuple[str, int]]
) -> dict[str, Ranks]:
    """Return, by recommender, the sorted query ids [Q] and the graded metrics of each [Q, M], (metric, k) a column.

    ``recommendations`` has the columns of recommendations/v1, ``judgements`` those of judgements.parquet.
    """
    names = np.asarray(recommendations["recommender"].to_pylist(), dtype=object).astype(str)
    result = {}
    for name in dict.fromkeys(names.tolist()):
        rows = recommendations.filter(pa.array(names == name))
        values = graded_metrics(rows, judgements, sorted({k for _, k in columns}))
        queries = np.asarray(rows["user_id"].to_pylist(), dtype=object).astype(str)
        order = np.argsort(queries, kind="stable")
        result[name] = (queries[order], np.stack([values[column][order] for column in columns], axis=1))
    return result


def targets_by_user(recommendations: pa.Table) -> dict[str, str]:
    """Return each user's target, by the first recommender of a table with recommender, user_id and target_id."""
    first = recommendations.filter(pc.equal(recommendations["recommender"], recommendations["recommender"][0]))
    return dict(zip(first["user_id"].to_pylist(), first["target_id"].to_pylist(), strict=True))


def common_users(ours: list[Ranks], theirs: list[Ranks]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the users [U] that all of the given have, and what was measured of two recommenders at them [S, U, …].

    Each recommender is given once a seed.
    """
    common = ours[0][0]
    for users, _ in (*ours, *theirs):
        if not np.array_equal(common, users):
            common = np.intersect1d(common, users)
    first, second = ([rank[np.searchsorted(users, common)] for users, rank in pairs] for pairs in (ours, theirs))
    return common, np.stack(first), np.stack(second)


def permutation_p(differences: np.ndarray) -> float:
    """Two-sided p of the paired permutation test on the users' differences [U]: their signs flip at random.

    The sum under random signs is, for each size v of a difference, v * (2 * Binomial(n_v, 1/2) - n_v). Of integers
    the p is exact, all 2^n flips counted: the distribution of the sum is the convolution over the sizes. Of floats
    it is estimated from FLIPS draws, the observed signs counted as one more (at least 1 / (FLIPS + 1)). Several seeds
    make most sizes those of a single user: these signs are drawn together, a bit each.
    """
    differences = differences[differences != 0]
    if np.issubdtype(differences.dtype, np.integer):
        return _exact_p(differences)
    if len(differences) == 0:
        return 1.0
    sizes, counts = np.unique(np.abs(differences).round(12), return_counts=True)
    rng = np.random.default_rng(0)
    sums = np.zeros(FLIPS)
    for size, count in zip(sizes[counts > 1], counts[counts > 1], strict=True):
        sums += size * (2 * rng.binomial(count, 0.5, size=FLIPS) - count)
    single = sizes[counts == 1]
    for start in range(0, FLIPS, FLIPS_AT_ONCE):
        part = sums[start : start + FLIPS_AT_ONCE]
        octets = rng.integers(256, size=(len(part), -(-len(single) // 8)), dtype=np.uint8)
        part += np.unpackbits(octets, axis=1, count=len(single)) @ (2 * single) - single.sum()
    reached = np.abs(sums) >= abs(differences.sum()) - 1e-9
    return float((1 + reached.sum()) / (1 + FLIPS))


def _exact_p(differences: np.ndarray) -> float:
    sizes, counts = np.unique(np.abs(differences), return_counts=True)
    distribution = np.ones(1)
    for size, count in zip(sizes.tolist(), counts.tolist(), strict=True):
        spread = np.zeros(2 * size * count + 1)
        spread[:: 2 * size] = _binomial_half(count)
        distribution = np.convolve(distribution, spread)
    sums = np.arange(len(distribution)) - len(distribution) // 2
    p = distribution[np.abs(sums) >= abs(int(differences.sum()))].sum()
    return float(min(1.0, p))


def detectable(differences: np.ndarray) -> float:
    """The minimum detectable effect: the mean difference that a two-sided test at .05 finds with a power of .8.

    (z_.975 + z_.8) times the standard error of the mean of the users' differences [U], for one test by itself, before
    any correction; 0 where all users agree.
    """
    z = statistics.NormalDist().inv_cdf
    return float((z(1 - 0.05 / 2) + z(0.8)) * differences.std(ddof=1) / math.sqrt(len(differences)))


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
