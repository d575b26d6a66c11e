"""Figures that say how good a quantization is, and the limits a user may set on them.

Shapes: N items · L semantic levels · D width of the embeddings · d width of what is quantized · S sampled items ·
m neighbours.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from sidgraft import kmeans, residual
from sidgraft.vectors import sample_rows

NEIGHBOURS = 10
AMONG = 50_000  # most items that neighbours are looked for among: bounds the time and the memory
DEFINITIONS = {
    "relative_squared_error": "mean over items of ||u - û||², u the item's vector at unit length, û what its codes"
    " alone stand for: of residual k-means the sum of the centroids, each level's times the mean length that the levels"
    " before left at the fit; of an RQ-VAE what the decoder makes of the codes",
    "mse": "mean over items of the squared length that a level leaves, relative to the mean of what it was given",
    "collision_rate": "share of items whose semantic codes another item has, too",
    "largest_bucket": "most items with the same semantic codes",
    "utilisation": "share of a level's codes that any item has",
    "perplexity": "exp(-sum p ln p) of the shares p of items by code: as many codes, used equally, would be as varied",
    "neighbours_kept": f"mean share of an item's {NEIGHBOURS} nearest items, by cosine of the embeddings, that are"
    f" among the {NEIGHBOURS} items whose quantized vectors are nearest to the item's û (not its own vector); of more"
    f" than {AMONG:,} items, among so many drawn at random",
    "prefix_neighbours": f"mean share of an item's {NEIGHBOURS} nearest items (as for neighbours_kept) that share its"
    " codes up to this level",
}


def nearest_neighbours(
    vectors_ND: np.ndarray, sample_S: np.ndarray, k: int, queries_SD: np.ndarray | None = None
) -> np.ndarray:
    """The k items [S, k] nearest by cosine to each sampled item, itself left out.

    With ``queries_SD``, nearest to these, which stand for the sampled items.
    """
    queries = vectors_ND[sample_S] if queries_SD is None else queries_SD
    wanted_SD = torch.from_numpy(queries.astype(np.float32))
    residual.normalise_(wanted_SD, zero=0.0)
    k = min(k, len(vectors_ND))
    best_Sk = torch.full((len(sample_S), k), -math.inf)
    ids_Sk = torch.zeros((len(sample_S), k), dtype=torch.int64)
    itself_S = torch.from_numpy(sample_S)
    if k == 0:
        return ids_Sk.numpy()
    for chunk in kmeans.chunks(len(vectors_ND), max(len(sample_S), vectors_ND.shape[1])):
        items_BD = torch.from_numpy(vectors_ND[chunk].astype(np.float32))
        residual.normalise_(items_BD, zero=0.0)
        ids_B = torch.arange(chunk.start, chunk.start + len(items_BD))
        cosines_SB = wanted_SD @ items_BD.T
        here = ((itself_S >= chunk.start) & (itself_S < chunk.start + len(items_BD))).nonzero()[:, 0]
        cosines_SB[here, itself_S[here] - chunk.start] = -math.inf
        # Most parts of a large catalog hold a nearer item for few of the sampled ones only.
        better = (cosines_SB.amax(1) > best_Sk[:, -1]).nonzero()[:, 0]
        merged = torch.cat([best_Sk[better], cosines_SB[better]], dim=1)
        best_Sk[better], where = merged.topk(k, dim=1)
        ids_Sk[better] = torch.cat([ids_Sk[better], ids_B.expand(len(better), -1)], dim=1).gather(1, where)
    return ids_Sk.numpy()


def among(items: int, seed: int) -> np.ndarray:
    """The rows, at most AMONG, that neighbours are looked for among; drawn apart from the sample of a fit."""
    return sample_rows(items, AMONG, seed, 1)


def neighbours_kept(
    vectors_ND: np.ndarray, vectors_Nd: np.ndarray, decoded_Nd: np.ndarray, codes_NL: np.ndarray, seed: int
) -> tuple[float, list[float]]:
    """Neighbour preservation against the encoder's space: see DEFINITIONS; over at most 1000 items, sampled by seed.

    Of more than AMONG items, among those of `among` alone: giving just these gives the same.
    ``vectors_Nd`` are the vectors that were quantized (reduced or not), ``decoded_Nd`` what their codes stand for.
    With a single item everything is kept.
    """
    if len(vectors_ND) > AMONG:
        rows_M = among(len(vectors_ND), seed)
        vectors_ND, vectors_Nd, decoded_Nd, codes_NL = (
            rows[rows_M] for rows in (vectors_ND, vectors_Nd, decoded_Nd, codes_NL)
        )
    n = len(vectors_ND)
    sample_S = np.sort(np.random.default_rng(seed).permutation(n)[:1000])
    near_Sm = nearest_neighbours(vectors_ND, sample_S, min(NEIGHBOURS, n - 1))
    if near_Sm.size == 0:
        return 1.0, [1.0] * codes_NL.shape[1]
    found_Sm = nearest_neighbours(vectors_Nd, sample_S, near_Sm.shape[1], queries_SD=decoded_Nd[sample_S])
    kept = (near_Sm[:, :, None] == found_Sm[:, None, :]).any(axis=2).mean()
    same_SmL = np.logical_and.accumulate(codes_NL[near_Sm] == codes_NL[sample_S][:, None], axis=2)
    return float(kept), same_SmL.mean(axis=(0, 1)).tolist()


def squared_errors(vectors_Nd: np.ndarray, decoded_Nd: np.ndarray) -> np.ndarray:
    """||u - û||² [N], float64, of the unit vectors u of the items and what their codes stand for; of zero vectors 0."""
    units_Nd = residual.units(vectors_Nd)
    gaps_N = np.square(units_Nd.astype(np.float64) - decoded_Nd).sum(axis=1)
    return np.where(units_Nd.any(axis=1), gaps_N, 0.0)


def relative_squared_error(vectors_Nd: np.ndarray, decoded_Nd: np.ndarray) -> float:
    """Mean of ||u - û||² over the unit vectors u of the items and what their codes stand for; zero vectors count 0."""
    total = 0.0
    for chunk in kmeans.chunks(len(vectors_Nd), vectors_Nd.shape[1]):
        total += float(squared_errors(vectors_Nd[chunk], decoded_Nd[chunk]).sum())
    return total / len(vectors_Nd)


def first_code_error(vectors_Nd: np.ndarray, centroids_Kd: np.ndarray, codes_N: np.ndarray) -> float:
    """Mean of ||u - c||² over the unit vectors u of the items and the centroids c of their first codes."""
    total = 0.0
    for chunk in kmeans.chunks(len(vectors_Nd), vectors_Nd.shape[1]):
        here_Bd = vectors_Nd[chunk]
        total += relative_squared_error(here_Bd, centroids_Kd[codes_N[chunk]]) * len(here_Bd)
    return total / len(vectors_Nd)


def code_use(counts_K: np.ndarray) -> tuple[float, float]:
    """Share of codes in use, and the perplexity exp(-sum p ln p) of their use."""
    p = counts_K[counts_K > 0] / counts_K.sum()
    return float((counts_K > 0).mean()), float(np.exp(-(p * np.log(p)).sum()))


def quality(
    codes: np.ndarray, lengths_NL: np.ndarray, sizes: list[int], error: float, kept: tuple[float, list[float]]
) -> dict[str, Any]:
    """One table of figures, as DEFINITIONS say, from the codes [N, L+1], deduplication last, and all levels' sizes.

    ``lengths_NL`` are the lengths of what each level leaves, relative to what it was given; ``error`` and ``kept``
    come from `relative_squared_error` and `neighbours_kept`.
    """
    levels = []
    for level in range(lengths_NL.shape[1]):
        utilisation, perplexity = code_use(np.bincount(codes[:, level], minlength=sizes[level]))
        levels.append(
            {
                "codes": sizes[level],
                "mse": float(np.square(lengths_NL[:, level]).mean()),
                "utilisation": utilisation,
                "perplexity": perplexity,
                "prefix_neighbours": kept[1][level],
            }
        )
    ranks_N = codes[:, -1]  # every bucket of two or more has one item of rank 1, and one of rank 0
    return {
        "levels": levels,
        "relative_squared_error": error,
        "collision_rate": float(((ranks_N >= 1).sum() + (ranks_N == 1).sum()) / len(codes)),
        "largest_bucket": int(ranks_N.max()) + 1,
        "neighbours_kept": kept[0],
    }


def summary(figures: dict[str, Any], *, items: int, dim: int) -> dict[str, Any]:
    """The figures flat, rounded, with the number of items and the width of what is quantized."""
    rows = figures["levels"]
    flat = {"items": items, "dim": dim, **{k: v for k, v in figures.items() if k != "levels"}}
    for name in ("mse", "utilisation", "perplexity", "prefix_neighbours"):
        flat |= {f"{name}_level_{level}": row[name] for level, row in enumerate(rows)}
    return {k: round(v, 6) if isinstance(v, float) else v for k, v in flat.items()}


def check_quality(figures: dict[str, Any], max_collision_rate: float, min_utilisation: float) -> None:
    """Raise ValueError when the quantization is worse than the user's limits."""
    advice = "raise codebook_size or levels, look at the embeddings, or move the limit."
    if figures["collision_rate"] > max_collision_rate:
        raise ValueError(
            f"{figures['collision_rate']:.4f} of the items share their codes with another item, at most"
            f" max_collision_rate={max_collision_rate} may: {advice}"
        )
    for level, row in enumerate(figures["levels"]):
        if row["utilisation"] < min_utilisation:
            raise ValueError(
                f"level {level} uses {row['utilisation']:.4f} of its {row['codes']} codes, expected at least"
                f" min_utilisation={min_utilisation}: lower codebook_size, look at the embeddings, or move the limit."
            )
