"""K-means: start, full batch, mini-batch, growing samples, and the nearest centre whatever the batch or the threads.

Shapes: N points · K centres · d width · B rows of a chunk or batch · S points of a sample · T candidates.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

from sidgraft.devices import BFLOAT16
from sidgraft.progress import Progress

SCORES_PER_CHUNK = 1 << 21  # bounds the [B, K] scores: 8 MB
NEAR = 2e-6  # float32 scores closer than this are decided in float64
WORTH_BFLOAT16 = 1 << 14  # entries of the centroids; below that the product costs less than what surrounds it
MANY = 1024  # centres from which on k-means++ starts in two stages: its cost grows with their square
AT_ONCE = 8  # most centres that `sampled` draws the candidates of together
# Points a centre of the samples: of k-means++, the first with rounds, the largest. With fewer than 64, rounds leave
# centres that serve a point or two, whose levels then use fewer codes equally (seen: a perplexity of 205 for 225).
START, FIRST, MOST = 16, 64, 256
LEAST_GAIN = 6e-4  # of the error, that a round over a sample must bring for another one


def nearest(points_Nd: torch.Tensor, centroids_Kd: torch.Tensor) -> torch.Tensor:
    """Index [N] of the nearest centroid, ties to the lowest: what exact arithmetic gives, as far as float64 shows it.

    Scores come from one product, in bfloat16 where the machine multiplies in it and in float32 elsewhere. Points whose
    best scores are too close for the product's rounding have them compared in float64, so that neither the
    precision nor the batch nor the number of threads decides.
    """
    longest = centroids_Kd.square().sum(1).max().sqrt().item()
    low = BFLOAT16 and centroids_Kd.numel() >= WORTH_BFLOAT16
    half_K, low_Kd = centroids_Kd.square().sum(1) / 2, centroids_Kd.bfloat16()
    rounding = (centroids_Kd - low_Kd.float()).square().sum(1).max().sqrt().item() if low else 0.0
    codes_N = torch.empty(len(points_Nd), dtype=torch.int64)
    for chunk in chunks(len(points_Nd), len(centroids_Kd)):
        points_Bd = points_Nd[chunk]
        length = points_Bd.norm(dim=1).max().item()
        near = NEAR * (max(1.0, length**2) + longest**2)
        if low:
            scores_BK = torch.sub(half_K, points_Bd.bfloat16() @ low_Kd.T)
            # |p·c - p'·c'| <= |p - p'| |c| + |p'| |c - c'|; the first and the product's own rounding are 2^-9 at most.
            near += 2.1 * length * (2 * 2**-9 * longest + rounding)
        else:
            scores_BK = torch.addmm(half_K, points_Bd, centroids_Kd.T, alpha=-1)
        codes_N[chunk] = _decided(points_Bd, centroids_Kd, scores_BK, near)
    return codes_N


def _decided(points_Bd: torch.Tensor, centroids_Kd: torch.Tensor, scores_BK: torch.Tensor, near: float) -> torch.Tensor:
    """Index [B] of the least score; of those within ``near`` of it, of the least distance. Overwrites the scores."""
    codes_B = torch.from_numpy(scores_BK.numpy().argmin(1))  # several times as fast as torch's
    best_B = scores_BK.gather(1, codes_B[:, None])[:, 0]
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
    """Index [P] of the least distance among the candidates, by differences in float32 and, where close, float64."""
    rows, codes = candidates_PK.nonzero(as_tuple=True)
    for dtype, relative in ((torch.float32, 1e-4), (torch.float64, 0.0)):
        distances = torch.cat(
            [
                (points_Pd[rows[chunk]].to(dtype) - centroids_Kd[codes[chunk]].to(dtype)).square().sum(1)
                for chunk in chunks(len(rows), points_Pd.shape[1])
            ]
        )
        least_P = torch.full((len(points_Pd),), math.inf, dtype=dtype).scatter_reduce_(0, rows, distances, "amin")
        left = distances <= least_P[rows] * (1 + relative)
        rows, codes = rows[left], codes[left]
        if len(rows) == len(points_Pd):
            break
    lowest_P = torch.full((len(points_Pd),), len(centroids_Kd))
    return lowest_P.scatter_reduce_(0, rows, codes, "amin")


def start_sample(points_Nd: torch.Tensor, k: int, generator: torch.Generator) -> torch.Tensor:
    """Points [S, d] to start k-means from: at most max(8192, 4 k), which bounds the cost at any N."""
    return points_Nd[_shuffled_rows(points_Nd, generator)[: max(8192, 4 * k)]]


def _shuffled_rows(points_Nd: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Row numbers in random order, without zero points where there are others.

    Any code serves a zero point, and a centre at zero, which is nearer to every unit vector than most others are,
    would starve the rest.
    """
    rows = points_Nd.any(dim=1).nonzero()[:, 0]
    rows = rows if len(rows) else torch.arange(len(points_Nd))
    return rows[torch.randperm(len(rows), generator=generator)]


def start(
    sample: torch.Tensor,
    k: int,
    generator: torch.Generator,
    *,
    others_Nd: torch.Tensor,
    what: str,
    at_once: int = 1,
) -> torch.Tensor:
    """Greedy k-means++ start [k, d] from a sample [S, d]: the best of several draws by squared distance.

    From MANY centres on in two stages: √k regions, then each region's share of the centres within it. Where the
    sample has too few distinct points, ``others_Nd`` (all points) fill up. ``at_once`` as in `_plus_plus`. Raises
    ValueError when there are fewer than k distinct points.
    """
    chosen_Cd = sample[_plus_plus(sample, k, generator, at_once) if k < MANY else _by_region(sample, k, generator)]
    return torch.cat([chosen_Cd, _distinct_others(others_Nd, chosen_Cd, k, what)])


def _plus_plus(sample: torch.Tensor, k: int, generator: torch.Generator, at_once: int) -> torch.Tensor:
    """Rows of at most k points of a sample: greedy k-means++ until k are chosen or no point is away from them.

    Each centre is the best of 2 + ln k candidates. Those of up to ``at_once`` centres (an eighth of what stands) are
    drawn together: one pass over the sample then serves all of them, and what they are drawn by is a little old.
    """
    draws = 2 + int(math.log(k))
    chosen = [int(torch.randint(len(sample), (1,), generator=generator))]
    squares_S = sample.square().sum(1)
    least_S = _squared_distances(sample, squares_S, sample[chosen])[:, 0]
    while len(chosen) < k and least_S.any():
        centres = max(1, min(at_once, len(chosen) // 8, k - len(chosen)))
        weights_S = least_S.double().cumsum(0)
        targets = torch.rand(draws * centres, generator=generator, dtype=torch.float64) * weights_S[-1]
        candidates_T = torch.searchsorted(weights_S, targets, right=True).clamp(max=len(sample) - 1)
        distances_TS = _squared_distances(sample, squares_S, sample[candidates_T]).T.contiguous()
        for first in range(0, len(candidates_T), draws):
            least_TS = torch.minimum(distances_TS[first : first + draws], least_S)
            best = int(least_TS.double().sum(1).argmin())
            found = int(candidates_T[first + best])
            if least_S[found] > 0:  # not chosen since it was drawn
                least_S = least_TS[best]
                least_S[found] = 0.0
                chosen.append(found)
    return torch.tensor(chosen)


def _by_region(sample: torch.Tensor, k: int, generator: torch.Generator) -> torch.Tensor:
    """Rows of about k points: k-means++ within each of √k regions, as many as its share of the squared error."""
    regions = round(math.sqrt(k))
    centres_Rd = sample[_plus_plus(sample, regions, generator, AT_ONCE)]
    centres_Rd = _rounds(sample, centres_Rd, 3)
    region_S = nearest(sample, centres_Rd)
    errors_R = torch.zeros(len(centres_Rd), dtype=torch.float64)
    errors_R.index_add_(0, region_S, (sample - centres_Rd[region_S]).square().sum(1).double())
    # Rounded so that they add up to k; a region with fewer points than its share gives all it has.
    ends_R = (errors_R.cumsum(0) / errors_R.sum().clamp(min=1e-30) * k).round().long()
    shares_R = torch.diff(ends_R, prepend=torch.zeros(1, dtype=torch.long))
    chosen = []
    for region in shares_R.nonzero()[:, 0].tolist():
        rows = (region_S == region).nonzero()[:, 0]
        chosen.append(rows[_plus_plus(sample[rows], min(int(shares_R[region]), len(rows)), generator, AT_ONCE)])
    return torch.cat(chosen)[:k] if chosen else torch.zeros(1, dtype=torch.long)


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
    squares = sum(points_Nd[chunk].double().square().sum() for chunk in chunks(len(points_Nd), points_Nd.shape[1]))
    with Progress(what, max_iterations, "iterations") as progress:
        for _ in range(max_iterations):
            before_N, codes_N = codes_N, nearest(points_Nd, centroids_Kd)
            sums_Kd = _sums(points_Nd, codes_N, len(centroids_Kd))
            counts_K = torch.bincount(codes_N, minlength=len(centroids_Kd))
            empty = (counts_K == 0).nonzero()[:, 0]
            if torch.equal(codes_N, before_N) and not len(empty):
                break
            # Σ|x - c|² without another pass over the points
            wide_Kd = centroids_Kd.double()
            error = squares - 2 * (sums_Kd * wide_Kd).sum() + (counts_K * wide_Kd.square().sum(1)).sum()
            farthest = _farthest(points_Nd, centroids_Kd[codes_N], len(empty)) if len(empty) else empty
            centroids_Kd = (sums_Kd / counts_K.clamp(min=1)[:, None]).float()
            centroids_Kd[empty] = points_Nd[farthest]
            progress.update(mse=float(error) / len(points_Nd))
    return centroids_Kd


def _sums(points_Nd: torch.Tensor, codes_N: torch.Tensor, k: int) -> torch.Tensor:
    """The sum [k, d] of the points of each code, float64."""
    sums_Kd = torch.zeros(k, points_Nd.shape[1], dtype=torch.float64)
    for chunk in chunks(len(points_Nd), min(k, points_Nd.shape[1])):
        sums_Kd += torch.zeros(sums_Kd.shape).index_add_(0, codes_N[chunk], points_Nd[chunk])
    return sums_Kd


def _farthest(points_Nd: torch.Tensor, centres_Nd: torch.Tensor, count: int) -> torch.Tensor:
    """Rows of the points that are farthest from their own centres, the farthest first."""
    return (points_Nd - centres_Nd).square().sum(1).topk(count).indices


def sampled(
    points_Nd: torch.Tensor, k: int, max_iterations: int, generator: torch.Generator, *, what: str
) -> torch.Tensor:
    """K-means [k, d] by full rounds over samples that grow fourfold, to at most MOST points a centre.

    k-means++ starts on START points a centre, the rounds on FIRST. A sample has its rounds until one lowers the error
    by less than LEAST_GAIN of it, or ``max_iterations``. Most of the way is thus gone over few points, and the cost
    does not grow with N. Raises ValueError when there are fewer than k distinct points.
    """
    rows = _shuffled_rows(points_Nd, generator)
    size, most = FIRST * k, min(len(rows), MOST * k)
    centroids_Kd = start(points_Nd[rows[: START * k]], k, generator, others_Nd=points_Nd, what=what, at_once=AT_ONCE)
    with Progress(what, most, "points of the sample") as progress:
        done = 0
        while done < most:
            done, before, size = min(size, most), done, size * 4
            centroids_Kd = _rounds(points_Nd[rows[:done]], centroids_Kd, max_iterations)
            progress.update(done - before)
    return centroids_Kd


def _rounds(points_Sd: torch.Tensor, centroids_Kd: torch.Tensor, most: int) -> torch.Tensor:
    """Lloyd rounds over a sample, until one brings little, in bfloat16 products where the machine has them.

    The nearest two centres of a point that their rounding confuses serve it about equally, so nothing is checked.
    """
    low_Sd = points_Sd.bfloat16() if BFLOAT16 else points_Sd
    halves_S = points_Sd.square().sum(1) / 2
    best_S, codes_S = torch.empty(len(points_Sd)), torch.empty(len(points_Sd), dtype=torch.int64)
    before = math.inf
    for _ in range(most):
        half_K, low_KdT = centroids_Kd.square().sum(1) / 2, centroids_Kd.to(low_Sd.dtype).T
        for chunk in chunks(len(points_Sd), len(centroids_Kd)):
            scores_BK = torch.sub(half_K, low_Sd[chunk] @ low_KdT)
            codes_S[chunk] = torch.from_numpy(scores_BK.numpy().argmin(1))
            best_S[chunk] = scores_BK.gather(1, codes_S[chunk][:, None])[:, 0]
        sums_Kd = _sums(points_Sd, codes_S, len(centroids_Kd))
        counts_K = torch.bincount(codes_S, minlength=len(centroids_Kd))
        empty = (counts_K == 0).nonzero()[:, 0]
        centroids_Kd = (sums_Kd / counts_K.clamp(min=1)[:, None]).float()
        centroids_Kd[empty] = points_Sd[(halves_S + best_S).topk(len(empty)).indices]
        error = float((halves_S + best_S).double().mean())
        if before - error < LEAST_GAIN * before:
            break
        before = error
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
