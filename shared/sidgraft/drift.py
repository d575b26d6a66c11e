"""How far a catalog has moved from the one that a model was trained on: items, categories, errors, collisions.

Shapes: N items · L semantic levels · K codes of a level · d width of what is quantized.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from sidgraft import quality


def category_shift(before: Mapping[str, int], now: Mapping[str, int]) -> float:
    """Total variation distance between two mixes of categories, from 0 (the same) to 1 (nothing in common).

    Half the sum of the absolute differences of the shares. Two empty mixes are the same.
    """
    totals = max(sum(before.values()), 1), max(sum(now.values()), 1)
    return sum(abs(before.get(c, 0) / totals[0] - now.get(c, 0) / totals[1]) for c in before.keys() | now.keys()) / 2


def error_ratio(vectors_Nd: np.ndarray, centroids_Kd: np.ndarray, codes_N: np.ndarray, at_fit: float) -> float:
    """Error of the first code of some items, in multiples of ``at_fit``, that of the items the quantizer was fitted on.

    See `quality.first_code_error`. Of the first code, because it is fitted to the most items: in a small catalog the
    later levels know the items of their fit by heart, and all others look far off. The fit stays the measure however
    many increments have come since, so that a catalog cannot drift away by small steps. 1.0 where there are no items,
    or where neither they nor those of the fit have an error.
    """
    if len(codes_N) == 0:
        return 1.0
    error = quality.first_code_error(vectors_Nd, centroids_Kd, codes_N)
    if at_fit <= 1e-12:
        return 1.0 if error <= 1e-12 else error / 1e-12
    return error / at_fit


def collision_rate(codes_NL: np.ndarray) -> float:
    """Share of items that share their semantic codes [N, L] with another item."""
    _, place_N, counts = np.unique(codes_NL, axis=0, return_inverse=True, return_counts=True)
    return float((counts[place_N.reshape(-1)] > 1).mean())
