"""Residual k-means: vectors to codes by the directions that are left, level by level.

Shapes: N items · L semantic levels · K codes of a level · d width of the vectors · B rows of a chunk ·
S vectors that are fitted to.

METHOD: r_0 = z; per level u_l = r_l / ||r_l||, k_l = argmin_k ||u_l - c_lk||² (ties to the lowest k),
r_{l+1} = u_l - c_l,k_l. Centroids are not renormalised.
"""

from __future__ import annotations

import numpy as np
import torch

from sidgraft import kmeans, sinkhorn
from sidgraft.progress import Progress
from sidgraft.vectors import Vectors, in_memory, sample_rows

ZERO = 1e-6  # a residual this much shorter than its unit vector is float32 rounding: it counts as zero
START_ROUNDS = 10  # Lloyd rounds on the start sample before mini-batches: the start matters more than the steps


def encode(vectors_Nd: np.ndarray, codebooks: list[np.ndarray]) -> np.ndarray:
    """Codes [N, L], int64, of float32 vectors. The batch that a vector stands in does not change its codes."""
    return _encode(vectors_Nd, codebooks)[0]


def encode_batches(vectors: Vectors, codebooks: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Codes [N, L] and the lengths [N, L] that each level leaves (see `fit_residual`), by rows, in one pass."""
    codes_NL = np.empty((vectors.items, len(codebooks)), np.int64)
    lengths_NL = np.empty(codes_NL.shape)
    with Progress("codes", vectors.items, "items") as progress:
        for rows_B, vectors_Bd in vectors.batches():
            codes_NL[rows_B], lengths_NL[rows_B] = _encode(vectors_Bd, codebooks)
            progress.update(len(rows_B))
    return codes_NL, lengths_NL


def _encode(vectors_Nd: np.ndarray, codebooks: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    residuals_Nd = torch.from_numpy(units(vectors_Nd))
    codes_NL = np.empty((len(vectors_Nd), len(codebooks)), np.int64)
    lengths_NL = np.empty(codes_NL.shape)
    for level, book in enumerate(codebooks):
        codes_N, lengths_N = encode_level_(residuals_Nd, torch.from_numpy(book))
        codes_NL[:, level], lengths_NL[:, level] = codes_N.numpy(), lengths_N.numpy()
    return codes_NL, lengths_NL


def lengths(vectors_Nd: np.ndarray, codes_NL: np.ndarray, codebooks: list[np.ndarray]) -> np.ndarray:
    """The lengths [N, L], float64, that each level leaves of vectors with these codes, as `fit_residual` has them."""
    residuals_Nd = torch.from_numpy(units(vectors_Nd))
    lengths_NL = np.empty(codes_NL.shape)
    for level, book in enumerate(codebooks):
        lengths_N = leave_(residuals_Nd, torch.from_numpy(book), torch.from_numpy(codes_NL[:, level].astype(np.int64)))
        lengths_NL[:, level] = lengths_N.numpy()
    return lengths_NL


def encode_level_(units_Nd: torch.Tensor, centroids_Kd: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One level: codes [N] and residual lengths [N] (float64); the units become the next level's, in place."""
    codes_N = kmeans.nearest(units_Nd, centroids_Kd)
    return codes_N, leave_(units_Nd, centroids_Kd, codes_N)


def leave_(units_Nd: torch.Tensor, centroids_Kd: torch.Tensor, codes_N: torch.Tensor) -> torch.Tensor:
    """Residual lengths [N], float64, of a level with these codes; the units become the next level's, in place."""
    lengths_N = torch.empty(len(units_Nd), dtype=torch.float64)
    for chunk in kmeans.chunks(len(units_Nd), units_Nd.shape[1]):
        units_Nd[chunk] -= centroids_Kd[codes_N[chunk]]
        lengths_N[chunk] = normalise_(units_Nd[chunk], zero=ZERO)
    return lengths_N


def units(vectors_Nd: np.ndarray) -> np.ndarray:
    """The vectors at unit length, float32 [N, d]; zero vectors stay."""
    units_Nd = torch.from_numpy(np.array(vectors_Nd, dtype=np.float32))
    normalise_(units_Nd, zero=0.0)
    return units_Nd.numpy()


def normalise_(rows_Nd: torch.Tensor, *, zero: float) -> torch.Tensor:
    """Scale rows to unit length in place; rows no longer than ``zero`` become zero. Returns lengths, float64 [N].

    Lengths are taken in float64, so that they do not depend on how many rows are summed at once.
    """
    lengths_N = torch.empty(len(rows_Nd), dtype=torch.float64)
    for chunk in kmeans.chunks(len(rows_Nd), rows_Nd.shape[1]):
        lengths_B = torch.linalg.vector_norm(rows_Nd[chunk], dim=1, dtype=torch.float64)
        lengths_B[lengths_B <= zero] = 0.0
        scale_B = torch.where(lengths_B > 0, 1 / lengths_B, 0.0)
        rows_Nd[chunk] *= scale_B.float()[:, None]
        lengths_N[chunk] = lengths_B
    return lengths_N


def fit_residual(
    vectors: Vectors | np.ndarray,
    sizes: list[int],
    *,
    fit: str = "minibatch",
    steps: int = 3000,
    batch_size: int = 2048,
    max_iterations: int = 100,
    seed: int = 0,
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Fit one codebook a level by k-means on the unit residuals of the level before.

    ``sizes`` are the semantic levels' codes. ``fit`` is lloyd (full batch, at most ``max_iterations``), sampled (full
    rounds over growing samples, see `kmeans.sampled`), minibatch (``steps`` of ``batch_size``) or balanced (the same,
    but each batch is assigned in equal shares, see `sinkhorn`; the codes are those of the nearest centroids for all
    four); all start from k-means++. Where a mini-batch would hold all vectors it is full-batch k-means, which stops
    when nothing changes, after at most ``steps``. Returns the codebooks, the codes [N, L], and the residual lengths
    ||u_l - c|| [N, L]: the mean of their squares is a level's error, their product over the levels the relative
    reconstruction error ||z - ẑ|| / ||z||. Raises ValueError when a level has fewer distinct vectors than codes.

    The vectors that are fitted to are in memory once, as float32: all of them, but of sampled only as many as its
    largest sample holds, drawn by the seed and the same for all levels (its rounds copy them once more). Codes and
    lengths of all others then come from one pass over the batches.
    """
    if isinstance(vectors, np.ndarray):
        vectors = in_memory(vectors)
    if fit == "minibatch" and vectors.items <= batch_size:
        fit, max_iterations = "lloyd", steps
    rows_S = sample_rows(vectors.items, kmeans.MOST * max(sizes) if fit == "sampled" else vectors.items, seed)
    units_Sd = torch.from_numpy(vectors.take(rows_S))
    normalise_(units_Sd, zero=0.0)
    codebooks, codes, lengths = [], [], []
    for level, size in enumerate(sizes):
        generator = torch.Generator().manual_seed(seed * len(sizes) + level)
        what = f"k-means level {level}"
        if fit == "sampled":
            centroids_Kd = kmeans.sampled(units_Sd, size, max_iterations, generator, what=what)
        else:
            start_Sd = kmeans.start_sample(units_Sd, size, generator)
            start_Kd = kmeans.start(start_Sd, size, generator, others_Nd=units_Sd, what=what)
            if fit == "lloyd":
                centroids_Kd = kmeans.lloyd(units_Sd, start_Kd, max_iterations, what=what)
            else:
                start_Kd = kmeans.lloyd(start_Sd, start_Kd, START_ROUNDS, what=f"{what} start")
                counts_K = torch.bincount(kmeans.nearest(start_Sd, start_Kd), minlength=size)
                assign = sinkhorn.balanced if fit == "balanced" else None
                if assign:
                    counts_K = torch.full((size,), len(start_Sd) // size)
                centroids_Kd = kmeans.minibatch(
                    units_Sd, start_Kd, counts_K, steps, batch_size, generator, assign=assign, what=what
                )
        codes_S, lengths_S = encode_level_(units_Sd, centroids_Kd)
        codebooks.append(centroids_Kd.numpy())
        codes.append(codes_S.numpy())
        lengths.append(lengths_S.numpy())
    if len(rows_S) < vectors.items:
        return codebooks, *encode_batches(vectors, codebooks)
    return codebooks, np.stack(codes, axis=1), np.stack(lengths, axis=1)


def decode(codes_NL: np.ndarray, codebooks: list[np.ndarray], lengths_L: np.ndarray) -> np.ndarray:
    """What codes [N, L] alone stand for, float32 [N, d]: ``lengths_L`` are the mean lengths that each level leaves."""
    scales_L = np.concatenate([[1.0], np.cumprod(lengths_L)[:-1]]).astype(np.float32)
    decoded_Nd = np.zeros((len(codes_NL), codebooks[0].shape[1]), np.float32)
    for chunk in kmeans.chunks(len(codes_NL), decoded_Nd.shape[1]):
        for level, book_Kd in enumerate(codebooks):
            decoded_Nd[chunk] += scales_L[level] * book_Kd[codes_NL[chunk, level]]
    return decoded_Nd
