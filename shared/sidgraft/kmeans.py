"""K-means: start, full batch, mini-batch, and the nearest centre whatever the batch or the number of threads.

Shapes: N points · K centres · d width · B rows of a chunk or batch · S points of the start sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from sidgraft.progress import Progress

SCORES_PER_CHUNK = 1 << 21  # bounds the [B, K] scores: 8 MB
NEAR = 2e-6  # float32 scores closer than this are decided in float64


def nearest(points_Bd: torch.Tensor, centroids_Kd: torch.Tensor) -> torch.Tensor:
    """Index [B] of the nearest centroid, ties to the lowest.

    Scores come from one float32 product; where the best two are too close for it, the distances are compared
    in float64, so that neither the batch nor the number of threads decides.
    """
    scores_BK = scores(points_Bd, centroids_Kd)
    best_B, codes_B = scores_BK.min(1)
    longest = max(1.0, points_Bd.square().sum(1).max().item()) if len(points_Bd) else 1.0
    near = NEAR * (longest + centroids_Kd.square().sum(1).max().item())
    scores_BK.scatter_(1, codes_B[:, None], math.inf)
    close_P = (scores_BK.amin(1) <= best_B + near).nonzero()[:, 0]
    if len(close_P):
        scores_PK = scores_BK[close_P].scatter_(1, codes_B[close_P][:, None], -math.inf)
        codes_B[close_P] = _nearest_exactly(
            points_Bd[close_P], centroids_Kd, scores_PK <= (best_B[close_P] + near)[:, None]
        )
    return codes_B


def scores(points_Bd: torch.Tensor, centroids_Kd: torch.Tensor) -> torch.Tensor:
    """||c||²/2 - p·c [B, K]: half the squared distance but for the p term, which is the same for all centroids."""
    return torch.addmm(centroids_Kd.square().sum(1) / 2, points_Bd, centroids_Kd.T, alpha=-1)


def _nearest_exactly(points_Pd: torch.Tensor, centroids_Kd: torch.Tensor, candidates_PK: torch.Tensor) -> torch.Tensor:
    rows, codes = candidates_PK.nonzero(as_tuple=True)
    distances = torch.empty(len(rows), dtype=torch.float64)
    for chunk in chunks(len(rows), points_Pd.shape[1]):
        differences = points_Pd[rows[chunk]].double() - centroids_Kd[codes[chunk]].double()
        distances[chunk] = differences.square().sum(1)
    least_P = torch.full((len(points_Pd),), math.inf, dtype=torch.float64)
    least_P.scatter_reduce_(0, rows, distances, "amin")
    winners = distances == least_P[rows]
    lowest_P = torch.full((len(points_Pd),), len(centroids_Kd))
    return lowest_P.scatter_reduce_(0, rows[winners], codes[winners], "amin")


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
    squares_ST = squares_S[:, None] + 2 * scores(points_Sd, others_Td)
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
            for chunk in chunks(len(points_Nd), len(centroids_Kd)):
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
    assign: Callable[[torch.Tensor], torch.Tensor] | None = None,
    what: str,
) -> torch.Tensor:
    """Mini-batch k-means [K, d]: each centre is the mean of all batch points it was ever given (Sculley 2010).

    ``assign`` gives the codes [B] for the scores [B, K] of a batch; without, each point goes to its nearest centre.

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
            scores_BK = scores(points_Bd, centroids_Kd)
            nearest_B, codes_B = scores_BK.min(1)
            if assign is not None:
                codes_B = assign(scores_BK)
            sums_Kd = torch.zeros_like(centroids_Kd).index_add_(0, codes_B, points_Bd)
            new_K1 = torch.bincount(codes_B, minlength=len(centroids_Kd))[:, None]
            counts_K1 += new_K1
            centroids_Kd += (sums_Kd - new_K1 * centroids_Kd) / counts_K1.clamp(min=1)
            progress.update(mse=1 + 2 * nearest_B.mean().item())
    return centroids_Kd


def chunks(rows: int, columns: int) -> list[slice]:
    """Slices of ``rows`` such that a [B, columns] matrix stays small."""
    step = max(1, SCORES_PER_CHUNK // columns)
    return [slice(first, first + step) for first in range(0, rows, step)]
