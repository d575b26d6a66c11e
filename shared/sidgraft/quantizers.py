"""Residual k-means: vectors to codes, with the deduplication code and the figures that say how good the codes are.

Shapes: N items · L semantic levels · K codes of a level · d width of the vectors · B rows of a chunk.

METHOD: r_0 = z; per level u_l = r_l / ||r_l||, k_l = argmin_k ||u_l - c_lk||² (ties to the lowest k),
r_{l+1} = u_l - c_l,k_l. Centroids are not renormalised.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file

from sidgraft.artifacts import Artifact
from sidgraft.progress import Progress

CODEBOOKS, DESCRIPTION = "codebooks.safetensors", "quantizer.json"
SCORES_PER_CHUNK = 1 << 21  # bounds the [B, K] scores: 8 MB
ZERO = 1e-6  # a residual this much shorter than its unit vector is float32 rounding: it counts as zero
START_ROUNDS = 10  # Lloyd rounds on the start sample before mini-batches: the start matters more than the steps
NEAR = 2e-6  # float32 scores closer than this are decided in float64


@dataclass(frozen=True)
class Quantizer:
    """A fitted residual quantizer; encodes new vectors exactly as those it was fitted on.

    ``codebooks`` has one float32 array [K_l, d] a level; ``sizes`` are the codes of each level, deduplication
    last. ``mean_D`` and ``components_Dd`` are the PCA that comes before, if any.
    """

    codebooks: list[np.ndarray]
    sizes: list[int]
    mean_D: np.ndarray | None = None
    components_Dd: np.ndarray | None = None

    @property
    def dim(self) -> int:
        """Width d of the centroids."""
        return self.codebooks[0].shape[1]

    def encode(self, vectors_ND: np.ndarray) -> np.ndarray:
        """The semantic codes [N, L] of vectors as the encoder gives them, int64, without the deduplication code."""
        codes = [np.zeros((0, len(self.codebooks)), np.int64)]
        for chunk in _chunks(len(vectors_ND), self.dim):
            codes.append(encode(reduce(vectors_ND[chunk], self.dim, self.mean_D, self.components_Dd), self.codebooks))
        return np.concatenate(codes)

    def tensors(self) -> dict[str, np.ndarray]:
        """What `codebooks.safetensors` holds."""
        pca = {"pca_mean": self.mean_D, "pca_components": self.components_Dd}
        books = {f"codebook_{level}": book for level, book in enumerate(self.codebooks)}
        return books | {name: tensor for name, tensor in pca.items() if tensor is not None}


def load(semantic_ids: Artifact) -> Quantizer:
    """The quantizer of a semantic_ids artifact."""
    tensors = load_file(semantic_ids.path / CODEBOOKS)
    sizes = semantic_ids.read_json(DESCRIPTION)["sizes"]
    codebooks = [tensors[f"codebook_{level}"] for level in range(len(sizes) - 1)]
    return Quantizer(codebooks, sizes, tensors.get("pca_mean"), tensors.get("pca_components"))


# Reduction


def fit_pca(vectors_ND: np.ndarray, dim: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean [D] and first ``dim`` principal components [D, dim], float64 inside, float32 out.

    The largest entry of each component is positive, so that the result has no arbitrary signs.
    """
    if dim > len(vectors_ND):
        raise ValueError(
            f"pca to dim={dim} needs at least {dim} items, found {len(vectors_ND)}: lower --dim or use"
            " --reduction truncate."
        )
    mean_D = vectors_ND.mean(axis=0, dtype=np.float64)
    covariance_DD = np.zeros((len(mean_D), len(mean_D)))
    for chunk in _chunks(len(vectors_ND), len(mean_D)):
        centred_BD = vectors_ND[chunk] - mean_D
        covariance_DD += centred_BD.T @ centred_BD
    components_Dd = np.linalg.eigh(covariance_DD)[1][:, ::-1][:, :dim]
    largest_d = components_Dd[np.abs(components_Dd).argmax(axis=0), np.arange(dim)]
    return mean_D.astype(np.float32), (components_Dd * np.where(largest_d < 0, -1.0, 1.0)).astype(np.float32)


def reduce(vectors_ND: np.ndarray, dim: int, mean_D: np.ndarray | None, components_Dd: np.ndarray | None) -> np.ndarray:
    """Vectors [N, D] to float32 [N, dim]: projected on the components where given, else their first dimensions."""
    if mean_D is None or components_Dd is None:
        return vectors_ND[:, :dim].astype(np.float32, copy=False)
    reduced_Nd = np.empty((len(vectors_ND), dim), np.float32)
    for chunk in _chunks(len(vectors_ND), vectors_ND.shape[1]):
        reduced_Nd[chunk] = (vectors_ND[chunk] - mean_D.astype(np.float64)) @ components_Dd.astype(np.float64)
    return reduced_Nd


# Encoding


def encode(vectors_Nd: np.ndarray, codebooks: list[np.ndarray]) -> np.ndarray:
    """Codes [N, L], int64, of float32 vectors. The batch that a vector stands in does not change its codes."""
    residuals_Nd = torch.from_numpy(np.array(vectors_Nd, dtype=np.float32))
    normalise_(residuals_Nd, zero=0.0)
    codes_NL = np.empty((len(vectors_Nd), len(codebooks)), np.int64)
    for level, book in enumerate(codebooks):
        codes_N, _ = encode_level_(residuals_Nd, torch.from_numpy(book))
        codes_NL[:, level] = codes_N.numpy()
    return codes_NL


def encode_level_(units_Nd: torch.Tensor, centroids_Kd: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One level: codes [N] and residual lengths [N] (float64); the units become the next level's, in place."""
    codes_N = torch.empty(len(units_Nd), dtype=torch.int64)
    lengths_N = torch.empty(len(units_Nd), dtype=torch.float64)
    for chunk in _chunks(len(units_Nd), len(centroids_Kd)):
        codes_N[chunk] = nearest(units_Nd[chunk], centroids_Kd)
        units_Nd[chunk] -= centroids_Kd[codes_N[chunk]]
        lengths_N[chunk] = normalise_(units_Nd[chunk], zero=ZERO)
    return codes_N, lengths_N


def normalise_(rows_Nd: torch.Tensor, *, zero: float) -> torch.Tensor:
    """Scale rows to unit length in place; rows no longer than ``zero`` become zero. Returns lengths, float64 [N].

    Lengths are taken in float64, so that they do not depend on how many rows are summed at once.
    """
    lengths_N = torch.empty(len(rows_Nd), dtype=torch.float64)
    for chunk in _chunks(len(rows_Nd), rows_Nd.shape[1]):
        rows_Bd = rows_Nd[chunk].double()
        lengths_B = rows_Bd.square().sum(1).sqrt()
        lengths_B[lengths_B <= zero] = 0.0
        scale_B = torch.where(lengths_B > 0, 1 / lengths_B, 0.0)
        rows_Nd[chunk] = (rows_Bd * scale_B[:, None]).float()
        lengths_N[chunk] = lengths_B
    return lengths_N


def nearest(units_Bd: torch.Tensor, centroids_Kd: torch.Tensor) -> torch.Tensor:
    """Index [B] of the nearest centroid, ties to the lowest.

    Scores come from one float32 product; where the best two are too close for it, the distances are compared
    in float64, so that neither the batch nor the number of threads decides.
    """
    scores_BK = _scores(units_Bd, centroids_Kd)
    best_B, codes_B = scores_BK.min(1)
    near = NEAR * (1 + centroids_Kd.square().sum(1).max().item())
    scores_BK.scatter_(1, codes_B[:, None], math.inf)
    close_P = (scores_BK.amin(1) <= best_B + near).nonzero()[:, 0]
    if len(close_P):
        scores_PK = scores_BK[close_P].scatter_(1, codes_B[close_P][:, None], -math.inf)
        codes_B[close_P] = _nearest_exactly(
            units_Bd[close_P], centroids_Kd, scores_PK <= (best_B[close_P] + near)[:, None]
        )
    return codes_B


def _scores(units_Bd: torch.Tensor, centroids_Kd: torch.Tensor) -> torch.Tensor:
    """||c||²/2 - u·c [B, K]: half the squared distance but for the u term, which is the same for all centroids."""
    return torch.addmm(centroids_Kd.square().sum(1) / 2, units_Bd, centroids_Kd.T, alpha=-1)


def _nearest_exactly(units_Pd: torch.Tensor, centroids_Kd: torch.Tensor, candidates_PK: torch.Tensor) -> torch.Tensor:
    rows, codes = candidates_PK.nonzero(as_tuple=True)
    distances = torch.empty(len(rows), dtype=torch.float64)
    for chunk in _chunks(len(rows), units_Pd.shape[1]):
        differences = units_Pd[rows[chunk]].double() - centroids_Kd[codes[chunk]].double()
        distances[chunk] = differences.square().sum(1)
    least_P = torch.full((len(units_Pd),), math.inf, dtype=torch.float64)
    least_P.scatter_reduce_(0, rows, distances, "amin")
    winners = distances == least_P[rows]
    lowest_P = torch.full((len(units_Pd),), len(centroids_Kd))
    return lowest_P.scatter_reduce_(0, rows[winners], codes[winners], "amin")


# Fitting


def fit_residual(
    vectors_Nd: np.ndarray,
    sizes: list[int],
    *,
    fit: str = "minibatch",
    steps: int = 3000,
    batch_size: int = 2048,
    max_iterations: int = 100,
    seed: int = 0,
) -> tuple[list[np.ndarray], np.ndarray, np.ndarray]:
    """Fit one codebook a level by k-means on the unit residuals of the level before.

    ``sizes`` are the semantic levels' codes. ``fit`` is lloyd (full batch, at most ``max_iterations``) or
    minibatch (``steps`` of ``batch_size``); both start from k-means++. Where a mini-batch would hold all vectors
    it is full-batch k-means, which stops when nothing changes, after at most ``steps``. Returns the codebooks,
    the codes [N, L], and the residual lengths ||u_l - c|| [N, L]: the mean of their squares is a level's error,
    their product over the levels the relative reconstruction error ||z - ẑ|| / ||z||. Raises ValueError when a
    level has fewer distinct vectors than codes.
    """
    units_Nd = torch.from_numpy(np.array(vectors_Nd, dtype=np.float32))
    normalise_(units_Nd, zero=0.0)
    if fit == "minibatch" and len(units_Nd) <= batch_size:
        fit, max_iterations = "lloyd", steps
    codebooks, codes, lengths = [], [], []
    for level, size in enumerate(sizes):
        generator = torch.Generator().manual_seed(seed * len(sizes) + level)
        sample_Sd = start_sample(units_Nd, size, generator)
        start_Kd = start(sample_Sd, size, generator, others_Nd=units_Nd, what=f"level {level}")
        what = f"k-means level {level}"
        if fit == "lloyd":
            centroids_Kd = lloyd(units_Nd, start_Kd, max_iterations, what=what)
        else:
            start_Kd = lloyd(sample_Sd, start_Kd, START_ROUNDS, what=f"{what} start")
            counts_K = torch.bincount(nearest(sample_Sd, start_Kd), minlength=size)
            centroids_Kd = minibatch(units_Nd, start_Kd, counts_K, steps, batch_size, generator, what=what)
        codes_N, lengths_N = encode_level_(units_Nd, centroids_Kd)
        codebooks.append(centroids_Kd.numpy())
        codes.append(codes_N.numpy())
        lengths.append(lengths_N.numpy())
    return codebooks, np.stack(codes, axis=1), np.stack(lengths, axis=1)


def start_sample(points_Nd: torch.Tensor, k: int, generator: torch.Generator) -> torch.Tensor:
    """Points [S, d] to start k-means from: at most max(8192, 4 k), which bounds the cost at any N.

    Zero points are left out where they can be: any code serves them, and a centre at zero, which is nearer to
    every unit vector than most others are, would starve the rest.
    """
    nonzero_Nd = points_Nd[points_Nd.any(dim=1)]
    points_Nd = nonzero_Nd if len(nonzero_Nd) else points_Nd
    order_N = torch.randperm(len(points_Nd), generator=generator)
    return points_Nd[order_N[: max(8192, 4 * k)]]


def start(
    sample: torch.Tensor, k: int, generator: torch.Generator, *, others_Nd: torch.Tensor, what: str
) -> torch.Tensor:
    """Greedy k-means++ start [k, d] from a sample [S, d]: the best of several draws by squared distance.

    Where the sample has too few distinct points, ``others_Nd`` (all points) fill up. Raises ValueError when there
    are fewer than k distinct points.
    """
    draws = 2 + int(math.log(k))
    chosen = [int(torch.randint(len(sample), (1,), generator=generator))]
    squares_S = sample.square().sum(1)
    least_S = _squared_distances(sample, squares_S, sample[chosen])[:, 0]
    while len(chosen) < k and least_S.any():
        weights_S = least_S.double().cumsum(0)
        targets = torch.rand(draws, generator=generator, dtype=torch.float64) * weights_S[-1]
        candidates = torch.searchsorted(weights_S, targets, right=True).clamp(max=len(sample) - 1)
        least_TS = torch.minimum(_squared_distances(sample, squares_S, sample[candidates]).T, least_S)
        best = int(least_TS.double().sum(1).argmin())
        least_S = least_TS[best]
        least_S[candidates[best]] = 0.0
        chosen.append(int(candidates[best]))
    return torch.cat([sample[chosen], _distinct_others(others_Nd, sample[chosen], k, what)])


def _squared_distances(points_Sd: torch.Tensor, squares_S: torch.Tensor, others_Td: torch.Tensor) -> torch.Tensor:
    """[S, T]; what is below the rounding of the product is zero, so that equal points have no distance."""
    squares_ST = squares_S[:, None] + 2 * _scores(points_Sd, others_Td)
    return torch.where(squares_ST > NEAR, squares_ST, 0.0)


def _distinct_others(points_Nd: torch.Tensor, chosen_Cd: torch.Tensor, k: int, what: str) -> torch.Tensor:
    """Distinct points to fill ``chosen`` up to k, where k-means++ ran out of points that differ clearly."""
    missing = k - len(chosen_Cd)
    if missing == 0:
        return chosen_Cd[:0]
    distinct_Ud = torch.unique(points_Nd, dim=0)
    if len(distinct_Ud) < k:
        raise ValueError(
            f"{what} has {len(distinct_Ud)} distinct vectors for {k} codes: lower codebook_size to at most"
            f" {len(distinct_Ud)}, use fewer levels, or give more items."
        )
    together = torch.cat([chosen_Cd, distinct_Ud])
    _, index, counts = torch.unique(together, dim=0, return_inverse=True, return_counts=True)
    unchosen_U = counts[index[len(chosen_Cd) :]] == 1
    return distinct_Ud[unchosen_U][:missing]


def lloyd(points_Nd: torch.Tensor, start_Kd: torch.Tensor, max_iterations: int, *, what: str) -> torch.Tensor:
    """Full-batch k-means [K, d] from a start: until no point changes its code, or ``max_iterations``.

    A centre without points moves to the point farthest from its own centre.
    """
    centroids_Kd = start_Kd.clone()
    codes_N = torch.full((len(points_Nd),), -1)
    with Progress(what, max_iterations, "iterations") as progress:
        for _ in range(max_iterations):
            sums_Kd = torch.zeros(centroids_Kd.shape, dtype=torch.float64)
            counts_K = torch.zeros(len(centroids_Kd), dtype=torch.int64)
            gaps_N = torch.empty(len(points_Nd))
            changed = False
            for chunk in _chunks(len(points_Nd), len(centroids_Kd)):
                points_Bd = points_Nd[chunk]
                codes_B = nearest(points_Bd, centroids_Kd)
                changed |= not torch.equal(codes_B, codes_N[chunk])
                codes_N[chunk] = codes_B
                gaps_N[chunk] = (points_Bd - centroids_Kd[codes_B]).square().sum(1)
                sums_Kd += torch.zeros_like(centroids_Kd).index_add_(0, codes_B, points_Bd)
                counts_K += torch.bincount(codes_B, minlength=len(centroids_Kd))
            empty = (counts_K == 0).nonzero()[:, 0]
            if not changed and not len(empty):
                break
            centroids_Kd = (sums_Kd / counts_K.clamp(min=1)[:, None]).float()
            centroids_Kd[empty] = points_Nd[gaps_N.topk(len(empty)).indices]
            progress.update(mse=gaps_N.mean().item())
    return centroids_Kd


def minibatch(
    points_Nd: torch.Tensor,
    start_Kd: torch.Tensor,
    counts_K: torch.Tensor,
    steps: int,
    batch_size: int,
    generator: torch.Generator,
    *,
    what: str,
) -> torch.Tensor:
    """Mini-batch k-means [K, d]: each centre is the mean of all batch points it was ever given (Sculley 2010).

    ``counts_K`` points stand behind each start centre already: with none, the few points of the first batch would
    replace it, and centres that then win more points grow at the others' cost (seen: a perplexity
    of 90 instead of 190 at K = 256). Batches are drawn with replacement. Runs exactly ``steps`` steps.
    """
    centroids_Kd = start_Kd.clone()
    counts_K1 = counts_K[:, None].clone()
    with Progress(what, steps, "steps") as progress:
        for _ in range(steps):
            rows_B = torch.randint(len(points_Nd), (batch_size,), generator=generator)
            points_Bd = points_Nd.index_select(0, rows_B)
            scores_B, codes_B = _scores(points_Bd, centroids_Kd).min(1)
            sums_Kd = torch.zeros_like(centroids_Kd).index_add_(0, codes_B, points_Bd)
            new_K1 = torch.bincount(codes_B, minlength=len(centroids_Kd))[:, None]
            counts_K1 += new_K1
            centroids_Kd += (sums_Kd - new_K1 * centroids_Kd) / counts_K1.clamp(min=1)
            progress.update(mse=1 + 2 * scores_B.mean().item())
    return centroids_Kd


def _chunks(rows: int, columns: int) -> list[slice]:
    """Slices of ``rows`` such that a [B, columns] matrix stays small."""
    step = max(1, SCORES_PER_CHUNK // columns)
    return [slice(first, first + step) for first in range(0, rows, step)]


# Deduplication


def deduplicate(codes_NL: np.ndarray, dedup_size: int) -> np.ndarray:
    """Append the deduplication code, int64 [N, L+1]: an item's rank among the items with its L codes.

    Rows stand in item_id order, which is the order of the ranks. Raises ValueError when more than
    ``dedup_size`` items share their codes.
    """
    order_N, first_N = _buckets(codes_NL)
    starts = np.flatnonzero(first_N)
    ranks_N = np.arange(len(codes_NL)) - starts[np.cumsum(first_N) - 1]
    if len(ranks_N) and ranks_N.max() >= dedup_size:
        shared = codes_NL[order_N[ranks_N.argmax()]].tolist()
        raise ValueError(
            f"{ranks_N.max() + 1} items share the codes {shared}, but dedup_size={dedup_size} tells only"
            f" {dedup_size} apart: raise dedup_size, codebook_size or levels. If most items share few codes, look"
            " at the embeddings: they may be nearly equal."
        )
    codes = np.empty((len(codes_NL), codes_NL.shape[1] + 1), np.int64)
    codes[:, :-1] = codes_NL
    codes[order_N, -1] = ranks_N
    if not _buckets(codes)[1].all():
        raise AssertionError("two items got the same Semantic ID: this is a defect of sidgraft, please report it.")
    return codes


def _buckets(codes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The order that puts equal rows together, each in its former order, and which of these rows are a new one."""
    order_N = np.lexsort(codes.T[::-1])
    sorted_codes = codes[order_N]
    first_N = np.ones(len(codes), dtype=bool)
    first_N[1:] = (sorted_codes[1:] != sorted_codes[:-1]).any(axis=1)
    return order_N, first_N


# Quality


def nearest_neighbours(vectors_ND: np.ndarray, sample_S: np.ndarray, k: int) -> np.ndarray:
    """The k items [S, k] nearest by cosine to each sampled item, itself left out."""
    queries_SD = torch.from_numpy(vectors_ND[sample_S].astype(np.float32))
    normalise_(queries_SD, zero=0.0)
    best_Sk = torch.full((len(sample_S), 0), -math.inf)
    ids_Sk = torch.zeros((len(sample_S), 0), dtype=torch.int64)
    itself_S = torch.from_numpy(sample_S)
    for chunk in _chunks(len(vectors_ND), max(len(sample_S), vectors_ND.shape[1])):
        items_BD = torch.from_numpy(vectors_ND[chunk].astype(np.float32))
        normalise_(items_BD, zero=0.0)
        ids_B = torch.arange(chunk.start, chunk.start + len(items_BD))
        cosines_SB = torch.where(ids_B == itself_S[:, None], -math.inf, queries_SD @ items_BD.T)
        merged = torch.cat([best_Sk, cosines_SB], dim=1)
        best_Sk, where = merged.topk(min(k, merged.shape[1]), dim=1)
        ids_Sk = torch.cat([ids_Sk, ids_B.expand(len(sample_S), -1)], dim=1).gather(1, where)
    return ids_Sk.numpy()


def neighbour_preservation(vectors_ND: np.ndarray, codes_NL: np.ndarray, seed: int, k: int = 10) -> float:
    """Share of the k nearest items by cosine that share an item's first code; over at most 1000 sampled items."""
    n = len(vectors_ND)
    sample_S = np.sort(np.random.default_rng(seed).permutation(n)[:1000])
    neighbours_Sk = nearest_neighbours(vectors_ND, sample_S, min(k, n - 1))
    if neighbours_Sk.size == 0:
        return 1.0
    return float((codes_NL[neighbours_Sk, 0] == codes_NL[sample_S, 0][:, None]).mean())


def quality(codes: np.ndarray, lengths_NL: np.ndarray, sizes: list[int]) -> dict[str, Any]:
    """Figures of a quantization, from the codes [N, L+1], the residual lengths [N, L] and all levels' sizes.

    Per level the mean squared error of the unit residual, the share of codes in use, and the perplexity
    exp(-sum p ln p) of their use. For all: the relative squared error mean(||z - ẑ||² / ||z||²), the share of
    items that share their L codes with another item, and the most items that share them.
    """
    levels = []
    for level in range(lengths_NL.shape[1]):
        counts_K = np.bincount(codes[:, level], minlength=sizes[level])
        p = counts_K[counts_K > 0] / len(codes)
        levels.append(
            {
                "codes": sizes[level],
                "mse": float(np.square(lengths_NL[:, level]).mean()),
                "utilisation": float((counts_K > 0).mean()),
                "perplexity": float(np.exp(-(p * np.log(p)).sum())),
            }
        )
    ranks_N = codes[:, -1]  # every bucket of two or more has one item of rank 1, and one of rank 0
    return {
        "levels": levels,
        "relative_squared_error": float(np.square(lengths_NL.prod(axis=1)).mean()),
        "collision_rate": float(((ranks_N >= 1).sum() + (ranks_N == 1).sum()) / len(codes)),
        "largest_bucket": int(ranks_N.max()) + 1,
    }


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
