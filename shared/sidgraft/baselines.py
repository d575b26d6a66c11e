"""Untrained recommenders that every model is measured against: popularity, embedding neighbours, co-occurrence.

The trained one is `sasrec`. Each returns the best ``most`` items a user [U, G] (-1 in places that only excluded items
could fill) and their scores [U, G]; ``excluded`` holds each user's items that must not be recommended.

Shapes: U users · G recommended items a user · N items · d encoder width.
"""

from __future__ import annotations

import numpy as np
from scipy import sparse

USERS_AT_ONCE = 256
NEAREST_QUERIES = 10  # training queries that vote on a query's items

Recommended = tuple[np.ndarray, np.ndarray]


def popularity(count_N: np.ndarray, excluded: list[np.ndarray], most: int) -> Recommended:
    """The items with the most training interactions, the same for all users but for what is excluded.

    Ties go to the smaller item_id.
    """
    order_N = np.argsort(-count_N, kind="stable")
    items, scores = [], []
    for left_out in excluded:
        kept = order_N[: most + len(left_out)]
        kept = kept[~np.isin(kept, left_out)][:most]
        items.append(_filled(kept, min(most, len(count_N)), -1))
        scores.append(_filled(count_N[kept].astype(np.float32), min(most, len(count_N)), -np.inf))
    return np.stack(items), np.stack(scores)


def neighbours(
    vectors_Nd: np.ndarray, histories: list[np.ndarray], excluded: list[np.ndarray], most: int
) -> Recommended:
    """The items nearest to the mean of a history's unit vectors, by cosine; ties go to the smaller item_id.

    A user without a history gets the items nearest to the mean of all.
    """
    unit_Nd = _unit(vectors_Nd)
    overall_d = unit_Nd.mean(axis=0)

    def similarity(part: list[np.ndarray]) -> np.ndarray:
        query_Ud = np.stack([unit_Nd[h].mean(axis=0) if len(h) else overall_d for h in part])
        query_Ud /= np.maximum(np.linalg.norm(query_Ud, axis=1, keepdims=True), 1e-12)
        return query_Ud @ unit_Nd.T

    return _in_parts(similarity, histories, excluded, most)


def nearest(vectors_Nd: np.ndarray, queries_Qd: np.ndarray, most: int) -> Recommended:
    """The items nearest to each query's vector, by cosine; ties go to the smaller item_id."""
    unit_Nd, unit_Qd = _unit(vectors_Nd), _unit(queries_Qd)
    nothing = [np.zeros(0, np.int64)] * len(unit_Qd)
    return _in_parts(lambda part: np.stack(part) @ unit_Nd.T, list(unit_Qd), nothing, most)


def query_neighbours(
    trained_Rd: np.ndarray,
    query_P: np.ndarray,
    item_P: np.ndarray,
    gain_N: np.ndarray,
    queries_Qd: np.ndarray,
    most: int,
) -> Recommended:
    """The candidates of the NEAREST_QUERIES training queries, which vote by their cosine (0 where it is below).

    Pairs (query_P: a row of ``trained_Rd``, item_P) of a training query and an item count as often as they stand
    there. Ties (all items that no vote is for) go to the larger ``gain_N``, then to the smaller item_id.
    """
    order_N = np.argsort(-gain_N, kind="stable")  # in this order a stable sort breaks ties by popularity
    place_N = np.argsort(order_N)
    unit_Rd, unit_Qd = _unit(trained_Rd), _unit(queries_Qd)
    shape = (len(unit_Rd), len(gain_N))
    gain_RN = sparse.csr_array((np.ones(len(item_P), np.float32), (query_P, place_N[item_P])), shape=shape)

    def score(part: list[np.ndarray]) -> np.ndarray:
        vote_UR = np.maximum(np.stack(part) @ unit_Rd.T, 0.0)
        if len(unit_Rd) > NEAREST_QUERIES:
            least_U1 = np.partition(vote_UR, -NEAREST_QUERIES, axis=1)[:, [-NEAREST_QUERIES]]
            vote_UR[vote_UR < least_U1] = 0.0
        return np.asarray(vote_UR @ gain_RN, np.float32)

    items_UG, scores_UG = _in_parts(score, list(unit_Qd), [np.zeros(0, np.int64)] * len(unit_Qd), most)
    return np.where(items_UG >= 0, order_N[items_UG], -1), scores_UG


def _unit(vectors: np.ndarray) -> np.ndarray:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    return (vectors / np.maximum(lengths, 1e-12)).astype(np.float32)


def co_occurrence(
    training: list[np.ndarray],
    count_N: np.ndarray,
    histories: list[np.ndarray],
    excluded: list[np.ndarray],
    most: int,
) -> Recommended:
    """The items that other users have beside those of the history.

    With n_i the number of users whose training part holds item i and n_ij the number of those that hold both, the
    similarity is n_ij / sqrt(n_i n_j), zero for i = j. The score of an item sums its similarity with the items of the
    history, divided by 1 for the latest, 2 for the one before and so on. Ties (all that never occurred with the
    history) go to the item with the larger ``count_N``, then to the smaller item_id.
    """
    order_N = np.argsort(-count_N, kind="stable")  # in this order a stable sort breaks ties by popularity
    place_N = np.argsort(order_N)
    similarity_NN = _similarity([np.unique(place_N[items]) for items in training], len(count_N))

    def score(part: list[np.ndarray]) -> np.ndarray:
        ages = [np.arange(len(history), 0, -1) for history in part]
        recency_UN = _matrix([place_N[h] for h in part], [1.0 / age for age in ages], len(count_N))
        return (recency_UN @ similarity_NN).toarray().astype(np.float32)

    items_UG, scores_UG = _in_parts(score, histories, [place_N[e] for e in excluded], most)
    return np.where(items_UG >= 0, order_N[items_UG], -1), scores_UG


def _similarity(sets: list[np.ndarray], items: int) -> sparse.csr_array:
    held_UN = _matrix(sets, [np.ones(len(s)) for s in sets], items)
    scale_N = 1.0 / np.sqrt(np.maximum(held_UN.sum(axis=0), 1.0))
    similarity_NN = sparse.csr_array(held_UN.T @ held_UN)
    similarity_NN.setdiag(0.0)
    scale_NN = sparse.diags_array(scale_N)
    return sparse.csr_array(scale_NN @ similarity_NN @ scale_NN)


def _matrix(columns: list[np.ndarray], values: list[np.ndarray], width: int) -> sparse.csr_array:
    """A sparse matrix with a row an entry; values of the same column add up."""
    ends = np.cumsum([0, *map(len, columns)])
    flat = np.concatenate(columns) if columns else np.zeros(0, dtype=np.int64)
    data = np.concatenate(values) if values else np.zeros(0)
    return sparse.csr_array((data, flat, ends), shape=(len(columns), width))


def _in_parts(score, histories: list[np.ndarray], excluded: list[np.ndarray], most: int) -> Recommended:
    """The best items by ``score(histories) -> [users, N]``, some users at a time."""
    found = [
        best(score(histories[start : start + USERS_AT_ONCE]), excluded[start : start + USERS_AT_ONCE], most)
        for start in range(0, len(histories), USERS_AT_ONCE)
    ]
    return np.concatenate([items for items, _ in found]), np.concatenate([scores for _, scores in found])


def best(scores_UN: np.ndarray, excluded: list[np.ndarray], most: int) -> Recommended:
    """The items with the highest scores a user, ties to the smaller row; writes over ``scores_UN``."""
    items, kept = [], []
    for score_N, left_out in zip(scores_UN, excluded, strict=True):
        score_N[left_out] = -np.inf
        width = min(most, len(score_N))
        # the candidates at or above the width-th best score, then a stable sort of those few
        threshold = np.partition(score_N, len(score_N) - width)[len(score_N) - width]
        above = np.flatnonzero(score_N > threshold)
        level = np.flatnonzero(score_N == threshold)[: width - len(above)]
        candidates = np.sort(np.concatenate([above, level]))
        chosen = candidates[np.argsort(-score_N[candidates], kind="stable")]
        items.append(np.where(np.isfinite(score_N[chosen]), chosen, -1))
        kept.append(score_N[chosen])
    return np.stack(items), np.stack(kept)


def _filled(values: np.ndarray, width: int, value: float) -> np.ndarray:
    """``values``, made ``width`` long with ``value``."""
    return np.concatenate([values, np.full(width - len(values), value, dtype=values.dtype)])
