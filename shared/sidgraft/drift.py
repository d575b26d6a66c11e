"""How far a catalog has moved from the one that a model was trained on: items, categories, errors, collisions.

Shapes: N items · L semantic levels · d width of the embeddings.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np


def category_shift(before: Mapping[str, int], now: Mapping[str, int]) -> float:
    """Total variation distance between two mixes of categories, from 0 (the same) to 1 (nothing in common).

    Half the sum of the absolute differences of the shares. Two empty mixes are the same.
    """
    totals = max(sum(before.values()), 1), max(sum(now.values()), 1)
    return sum(abs(before.get(c, 0) / totals[0] - now.get(c, 0) / totals[1]) for c in before.keys() | now.keys()) / 2


def error_ratio(vectors_Nd: np.ndarray, codes_N: np.ndarray, is_known_N: np.ndarray) -> float:
    """Error of the first code for items that the quantizer was not fitted on, in multiples of that for known items.

    The error is the mean squared distance of the unit vectors to the mean of the known items with the same first
    code; where a code has none, to the mean of all known items. It asks nothing of how the quantizer decodes. 1.0
    where there are no items to compare, or where the known items have no error and neither have the others.
    """
    if is_known_N.all() or not is_known_N.any():
        return 1.0
    units_Nd = vectors_Nd.astype(np.float64)
    units_Nd /= np.maximum(np.linalg.norm(units_Nd, axis=1, keepdims=True), 1e-12)
    known_Kd, known_codes_K = units_Nd[is_known_N], codes_N[is_known_N]
    counts_C = np.bincount(known_codes_K, minlength=codes_N.max() + 1)
    means_Cd = np.zeros((len(counts_C), units_Nd.shape[1]))
    np.add.at(means_Cd, known_codes_K, known_Kd)
    means_Cd /= np.maximum(counts_C, 1)[:, None]
    means_Cd[counts_C == 0] = known_Kd.mean(axis=0)
    errors_N = np.square(units_Nd - means_Cd[codes_N]).sum(axis=1)
    known, others = float(errors_N[is_known_N].mean()), float(errors_N[~is_known_N].mean())
    if known <= 1e-12:
        return 1.0 if others <= 1e-12 else float(others / 1e-12)
    return others / known


def collision_rate(codes_NL: np.ndarray) -> float:
    """Share of items that share their semantic codes [N, L] with another item."""
    _, place_N, counts = np.unique(codes_NL, axis=0, return_inverse=True, return_counts=True)
    return float((counts[place_N.reshape(-1)] > 1).mean())
