"""Initializations of the new rows: what each token's embedding starts from (METHOD 5).

Shapes: V base vocabulary rows · D model width · n new rows · K codes of a level · d width of the centroids.
Everything is computed in float64 and returned as float32: noise of 3e-6 would vanish in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np
import torch

EPSILON = 1e-9  # of the covariance, in the gaussian start
NOISE, LIFT, SHUFFLE = range(3)  # independent random streams of one seed
ROWS_PER_CHUNK = 16384


def mean(rows_VD: torch.Tensor, n: int) -> torch.Tensor:
    """mu, the mean of the base rows, n times [n, D] (GTI, arXiv 2604.02324, eq. 1)."""
    return _mean(rows_VD).float().expand(n, -1).clone()


def random(n: int, width: int, initializer_range: float, rng: np.random.Generator) -> torch.Tensor:
    """Draws [n, D] from N(0, initializer_range² I) (the random rows of GTI's figures 5-7)."""
    return torch.from_numpy(rng.standard_normal((n, width)) * initializer_range).float()


def gaussian(rows_VD: torch.Tensor, n: int, rng: np.random.Generator) -> torch.Tensor:
    """Draws [n, D] from N(mu, 1e-9 Sigma), Sigma the covariance of the base rows (Centroid, eq. 2).

    The same as transformers' mean resizing, but sampled through the eigenvectors of Sigma, so that a covariance
    that is singular up to rounding is no reason to fall back to mu.
    """
    mu_D = _mean(rows_VD)
    variances_D, axes_DD = torch.linalg.eigh(covariance(rows_VD))
    deviations_D = (EPSILON * variances_D.clamp(min=0)).sqrt()
    noise_nD = torch.from_numpy(rng.standard_normal((n, rows_VD.shape[1])))
    return (mu_D + (noise_nD * deviations_D) @ axes_DD.T).float()


def centroid_parts(codebooks: list[np.ndarray], width: int, seed: int) -> torch.Tensor:
    """Phi_D(c - c_bar) for all semantic codes, level by level [sum K_l, D], float64 (Centroid, eq. 5).

    c_bar is the mean over the centroids of all levels. Narrower centroids (d < D) are lifted by a seeded matrix
    with orthonormal columns, which keeps all distances and angles. Raises ValueError when d > D.
    """
    centroids_nd = np.concatenate(codebooks).astype(np.float64)
    d = centroids_nd.shape[1]
    if d > width:
        raise ValueError(
            f"the centroids have {d} dimensions, but the model's embedding has {width}: run `sidgraft quantize`"
            f" again with --dim {width} (--reduction truncate for a Matryoshka encoder, else pca)."
        )
    centred_nd = torch.from_numpy(centroids_nd - centroids_nd.mean(axis=0))
    return centred_nd if d == width else centred_nd @ lift(d, width, seed).T


def lift(d: int, width: int, seed: int) -> torch.Tensor:
    """A random matrix [width, d] with orthonormal columns, float64; the same for the same seed."""
    return torch.from_numpy(np.linalg.qr(stream(seed, LIFT).standard_normal((width, d)))[0])


def centroid(parts_nD: torch.Tensor, rows_VD: torch.Tensor, *, match: bool) -> torch.Tensor:
    """Centroid parts around mu [n, D]; with ``match`` their mean length becomes that of the centred base rows."""
    factor = mean_centred_norm(rows_VD) / parts_nD.norm(dim=1).mean() if match else 1.0
    return (parts_nD * factor + _mean(rows_VD)).float()


def shuffled(rows_nD: torch.Tensor, sizes: list[int], rng: np.random.Generator) -> torch.Tensor:
    """The same rows permuted within each level (Centroid, appendix H)."""
    starts = np.cumsum([0, *sizes[:-1]])
    order = np.concatenate([start + rng.permutation(size) for start, size in zip(starts, sizes, strict=True)])
    return rows_nD[torch.from_numpy(order)]


def description(
    token_ids: Callable[[slice], list[list[int]]], codes_NL: np.ndarray, sizes: list[int], rows_VD: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean of the base rows over all text tokens of the items that carry a code [sum K_l, D].

    ``token_ids`` gives the ids of the items in a slice; a token counts as often as it occurs. The second
    result [sum K_l] tells which codes have any token; the others' rows are zero and mean nothing.
    """
    firsts_L = torch.from_numpy(np.cumsum([0, *sizes[:-1]]))
    sums_nD = torch.zeros((sum(sizes), rows_VD.shape[1]), dtype=torch.float64)
    counts_n = torch.zeros(sum(sizes), dtype=torch.int64)
    for chunk in _chunks(len(codes_NL)):
        ids = token_ids(chunk)
        lengths_B = torch.tensor([len(i) for i in ids])
        flat = torch.tensor([token for i in ids for token in i], dtype=torch.int64)
        sums_BD = torch.nn.functional.embedding_bag(flat, rows_VD, lengths_B.cumsum(0) - lengths_B, mode="sum")
        for targets_B in (torch.from_numpy(codes_NL[chunk]) + firsts_L).T:
            sums_nD.index_add_(0, targets_B, sums_BD.double())
            counts_n.index_add_(0, targets_B, lengths_B)
    return (sums_nD / counts_n.clamp(min=1)[:, None]).float(), counts_n > 0


def mean_centred_norm(rows_VD: torch.Tensor) -> float:
    """mean_v ||E_v - mu||."""
    mu_D = _mean(rows_VD)
    return float(sum((rows_VD[c].double() - mu_D).norm(dim=1).sum() for c in _chunks(len(rows_VD))) / len(rows_VD))


def covariance(rows_VD: torch.Tensor) -> torch.Tensor:
    """Covariance [D, D] of the rows (divided by V), float64."""
    mu_D = _mean(rows_VD)
    sums_DD = torch.zeros((len(mu_D), len(mu_D)), dtype=torch.float64)
    for chunk in _chunks(len(rows_VD)):
        centred_BD = rows_VD[chunk].double() - mu_D
        sums_DD += centred_BD.T @ centred_BD
    return sums_DD / len(rows_VD)


def stream(seed: int, purpose: int) -> np.random.Generator:
    """The random numbers of one purpose: NOISE, LIFT or SHUFFLE."""
    return np.random.default_rng([seed, purpose])


def _mean(rows_VD: torch.Tensor) -> torch.Tensor:
    return rows_VD.mean(dim=0, dtype=torch.float64)


def _chunks(rows: int) -> Iterable[slice]:
    return (slice(first, first + ROWS_PER_CHUNK) for first in range(0, rows, ROWS_PER_CHUNK))
