"""How far a catalog has moved from the one that a model was trained on: encoder, categories, errors, collisions.

Shapes: N items · M unchanged ones · S of these, asked · L semantic levels · K codes of a level · d width of what is
quantized.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from sidgraft import quality
from sidgraft.continuity import Issued
from sidgraft.gate import Check
from sidgraft.quantizers import Quantizer
from sidgraft.vectors import Vectors, sample_rows

ASKED = 10_000  # most items that are encoded again
ENCODED_AGAIN = "share of unchanged items that are encoded as before"
LEAST_AGAIN = 0.95  # share of them that get their codes again, from the same encoder (decision 37)


def category_shift(before: Mapping[str, int], now: Mapping[str, int]) -> float:
    """Total variation distance between two mixes of categories, from 0 (the same) to 1 (nothing in common).

    Half the sum of the absolute differences of the shares. Two empty mixes are the same.
    """
    totals = max(sum(before.values()), 1), max(sum(now.values()), 1)
    return sum(abs(before.get(c, 0) / totals[0] - now.get(c, 0) / totals[1]) for c in before.keys() | now.keys()) / 2


def encoded_as_before(
    issued: Issued, quantizer: Quantizer, item_ids: Sequence[str], unchanged_N: np.ndarray, vectors: Vectors
) -> Check:
    """Whether the vectors are of the space that the quantizer was fitted in, by what it makes of unchanged texts.

    ``item_ids`` are those of the rows of ``vectors``; ``unchanged_N`` says which have a Semantic ID in use and the
    text it was given for. The quantizer gives the same semantic codes for the same vector, so these items, or ASKED of
    them, get theirs again, unless the vectors were made in another way: by other weights under the same name, with
    another limit of tokens, by the user with another model.
    """
    rows_M = np.flatnonzero(unchanged_N)
    rows_S = rows_M[sample_rows(len(rows_M), ASKED, 0)]
    current, share = issued.current(), 1.0
    if len(rows_S):
        given_SL = np.stack([current[item_ids[int(row)]][:-1] for row in rows_S])
        share = float((quantizer.encode(vectors.take(rows_S)) == given_SL).all(axis=1).mean())
    return Check(ENCODED_AGAIN, share, least=LEAST_AGAIN)


def error_ratio(vectors_Nd: np.ndarray, centroids_Kd: np.ndarray, codes_N: np.ndarray, at_fit: float) -> float:
    """Error of the first code of some items, in multiples of ``at_fit``, that of the items the quantizer was fitted on.

    See `quality.first_code_error`. Of the first code, because it is fitted to the most items: in a small catalog the
    later levels know the items of their fit by heart, and all others look far off. The fit stays the measure however
    many increments have come since, so that a catalog cannot drift away by small steps. 0.0 where there are no items,
    1.0 where neither they nor those of the fit have an error.
    """
    if len(codes_N) == 0:
        return 0.0
    error = quality.first_code_error(vectors_Nd, centroids_Kd, codes_N)
    if at_fit <= 1e-12:
        return 1.0 if error <= 1e-12 else error / 1e-12
    return error / at_fit


def collision_rate(codes_NL: np.ndarray) -> float:
    """Share of items that share their semantic codes [N, L] with another item."""
    _, place_N, counts = np.unique(codes_NL, axis=0, return_inverse=True, return_counts=True)
    return float((counts[place_N.reshape(-1)] > 1).mean())
