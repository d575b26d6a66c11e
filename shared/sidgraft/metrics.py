"""Metrics of ranked recommendations: recall, NDCG, slices by popularity, bootstrap intervals over users.

Shapes: U users · G recommended items a user · N items · M values of a user · V distinct rows of them · S samples.
"""

from __future__ import annotations

import numpy as np

BOOTSTRAP_AT_ONCE = 64


def ranks(items_UG: np.ndarray, target_U: np.ndarray) -> np.ndarray:
    """The rank of each user's target among the recommended items, from 1; 0 where it is not among them."""
    hit_UG = items_UG == target_U[:, None]
    return np.where(hit_UG.any(axis=1), hit_UG.argmax(axis=1) + 1, 0)


def recall_at(rank_U: np.ndarray, k: int) -> np.ndarray:
    """Per user: 1 when the one relevant item is among the first k, else 0."""
    return ((rank_U > 0) & (rank_U <= k)).astype(np.float64)


def ndcg_at(rank_U: np.ndarray, k: int) -> np.ndarray:
    """Per user: 1 / log2(rank + 1) when the one relevant item is among the first k, else 0 (the ideal is 1)."""
    return np.where((rank_U > 0) & (rank_U <= k), 1.0 / np.log2(np.maximum(rank_U, 1) + 1.0), 0.0)


def slices(count_N: np.ndarray, target_U: np.ndarray) -> dict[str, np.ndarray]:
    """Which users belong to each slice, by their target: all, cold, head, tail.

    ``count_N`` says how often each item is a training target, in item_id order. Cold: at most once, zero
    included. Head: the first ceil(0.2 N) items by falling count, then item_id. Tail: the others.
    """
    order_N = np.argsort(-count_N, kind="stable")
    is_head_N = np.zeros(len(count_N), dtype=bool)
    is_head_N[order_N[: int(np.ceil(0.2 * len(count_N)))]] = True
    return {
        "all": np.ones(len(target_U), dtype=bool),
        "cold": count_N[target_U] <= 1,
        "head": is_head_N[target_U],
        "tail": ~is_head_N[target_U],
    }


def bootstrap_means(values_UM: np.ndarray, samples: int, seed: int) -> np.ndarray:
    """Means of M values over resampled users [samples, M].

    A mean depends on how often each of the V distinct rows was drawn, not on whose they are, so that one multinomial
    draw over these stands for one over the users: the same distribution. Of recall and NDCG, V is one more than the
    beams; of differences over several seeds it is up to U, and then this costs what drawing users costs.
    """
    rng = np.random.default_rng(seed)
    users = len(values_UM)
    rows_VM, count_V = np.unique(values_UM, axis=0, return_counts=True)
    means = []
    for start in range(0, samples, BOOTSTRAP_AT_ONCE):
        drawn_SV = rng.multinomial(users, count_V / users, size=min(BOOTSTRAP_AT_ONCE, samples - start))
        means.append(drawn_SV @ rows_VM / users)
    return np.concatenate(means)


def metric_rows(
    rank_U: np.ndarray,
    kept_UL: np.ndarray | None,
    member: dict[str, np.ndarray],
    ks: list[int],
    *,
    beams: int,
    bootstrap: int,
    seed: int,
) -> list[tuple[str, str, int, float | None, float | None, float | None]]:
    """All figures of one recommender: (slice, metric, k, value, low, high); low and high are the 95 % bootstrap.

    Metrics are recall and ndcg at each k and, where ``kept_UL`` tells it, level_1, level_2, …: how often the
    beams hold the right first 1, 2, … codes (k is the number of beams), and lost_1, lost_2, …: how often they lose
    the right item at code 1, 2, … and not before. The slice head/tail is the ratio of the
    two. A slice without users, or a ratio to zero, has no value.
    """
    columns = [("recall", k, recall_at(rank_U, k)) for k in ks] + [("ndcg", k, ndcg_at(rank_U, k)) for k in ks]
    if kept_UL is not None:
        columns += [(f"level_{i + 1}", beams, kept_UL[:, i].astype(np.float64)) for i in range(kept_UL.shape[1])]
        # A beam that holds a prefix comes from one that held its beginning: kept falls from left to right.
        lost_UL = -np.diff(kept_UL.astype(np.float64), axis=1, prepend=1.0)
        columns += [(f"lost_{i + 1}", beams, lost_UL[:, i]) for i in range(kept_UL.shape[1])]
    rows = mean_rows(columns, member, bootstrap=bootstrap, seed=seed)
    means = {row[:3]: row[3] for row in rows}
    for metric, k, _ in columns:
        if metric in ("recall", "ndcg"):
            head, tail = means["head", metric, k], means["tail", metric, k]
            rows.append(("head/tail", metric, k, head / tail if head is not None and tail else None, None, None))
    return rows


def mean_rows(
    columns: list[tuple[str, int, np.ndarray]], member: dict[str, np.ndarray], *, bootstrap: int, seed: int
) -> list[tuple[str, str, int, float | None, float | None, float | None]]:
    """The mean of each column (metric, k, values [U]) over each slice, with the 95 % bootstrap over its users."""
    values_UM = np.stack([values for _, _, values in columns], axis=1)
    rows = []
    for name, is_in_U in member.items():
        chosen = values_UM[is_in_U]
        interval = None
        if len(chosen) and bootstrap:
            interval = np.quantile(bootstrap_means(chosen, bootstrap, seed), [0.025, 0.975], axis=0)
        for m, (metric, k, _) in enumerate(columns):
            value = None if not len(chosen) else float(chosen[:, m].mean())
            low, high = (None, None) if interval is None else (float(interval[0, m]), float(interval[1, m]))
            rows.append((name, metric, k, value, low, high))
    return rows
