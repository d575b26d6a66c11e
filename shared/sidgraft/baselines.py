"""Recommenders that every model is measured against: popularity and nearest neighbours in the encoder's space.

Shapes: U users · G recommended items a user · N items · d encoder width.
"""

from __future__ import annotations

import numpy as np

USERS_AT_ONCE = 256


def popularity(count_N: np.ndarray, excluded: list[np.ndarray], beams: int) -> tuple[np.ndarray, np.ndarray]:
    """The items with the most training interactions, the same for all users but for what is excluded.

    ``excluded`` holds a user's items that must not be recommended. Ties go to the smaller item_id. Returns items
    [U, G] (-1 where no item is left) and scores [U, G].
    """
    scores = (count_N.astype(np.float32) for _ in excluded)
    return _best([_without(s, e) for s, e in zip(scores, excluded, strict=True)], beams)


def neighbours(
    vectors_Nd: np.ndarray, histories: list[np.ndarray], excluded: list[np.ndarray], beams: int
) -> tuple[np.ndarray, np.ndarray]:
    """The items nearest to the mean of a history's unit vectors, by cosine; see `popularity` for the rest.

    A user without a history gets the items nearest to the mean of all.
    """
    lengths = np.linalg.norm(vectors_Nd, axis=1, keepdims=True)
    unit_Nd = (vectors_Nd / np.maximum(lengths, 1e-12)).astype(np.float32)
    overall_d = unit_Nd.mean(axis=0)
    items, scores = [], []
    for start in range(0, len(histories), USERS_AT_ONCE):
        part = histories[start : start + USERS_AT_ONCE]
        query_Ud = np.stack([unit_Nd[h].mean(axis=0) if len(h) else overall_d for h in part])
        query_Ud /= np.maximum(np.linalg.norm(query_Ud, axis=1, keepdims=True), 1e-12)
        similarity_UN = query_Ud @ unit_Nd.T
        left_out = excluded[start : start + USERS_AT_ONCE]
        found = _best([_without(s, e) for s, e in zip(similarity_UN, left_out, strict=True)], beams)
        items.append(found[0])
        scores.append(found[1])
    return np.concatenate(items), np.concatenate(scores)


def _without(score_N: np.ndarray, excluded: np.ndarray) -> np.ndarray:
    score_N[excluded] = -np.inf
    return score_N


def _best(scores: list[np.ndarray], beams: int) -> tuple[np.ndarray, np.ndarray]:
    """The best items a user, ties to the smaller row; -1 in places that only excluded items could fill."""
    items, kept = [], []
    for score_N in scores:
        width = min(beams, len(score_N))
        # the candidates at or above the width-th best score, then a stable sort of those few
        threshold = np.partition(score_N, len(score_N) - width)[len(score_N) - width]
        candidates = np.flatnonzero(score_N >= threshold)
        chosen = candidates[np.argsort(-score_N[candidates], kind="stable")][:width]
        items.append(np.where(np.isfinite(score_N[chosen]), chosen, -1))
        kept.append(score_N[chosen])
    return np.stack(items), np.stack(kept)
