"""Sinkhorn-Knopp against its marginals, a plain NumPy version, and the optimality of its plan."""

import numpy as np
import pytest
import torch

from sidgraft import sinkhorn


def costs(b=60, k=12, seed=0):
    return np.random.default_rng(seed).random((b, k)) * 3


def sinkhorn_plainly(costs, epsilon, iterations):
    """Textbook scaling of exp(-cost / (epsilon * scale)), without any shift for stability."""
    rest = costs - costs.min(axis=1, keepdims=True)
    scale = (rest - rest.min(axis=0)).max()
    plan = np.exp(-costs / (epsilon * scale))
    for _ in range(iterations):
        plan = plan / plan.sum(axis=0) * (len(costs) / costs.shape[1])
        plan = plan / plan.sum(axis=1, keepdims=True)
    return plan


@pytest.mark.parametrize(("b", "k", "epsilon"), [(60, 12, 0.05), (7, 30, 0.2), (40, 40, 0.05), (5, 1, 0.05)])
def test_rows_and_columns_have_their_shares(b, k, epsilon):
    plan = sinkhorn.transport(torch.from_numpy(costs(b, k)), epsilon, iterations=20_000, tolerance=1e-10).numpy()
    np.testing.assert_allclose(plan.sum(axis=1), 1, atol=1e-12)
    np.testing.assert_allclose(plan.sum(axis=0), b / k, rtol=1e-8)
    assert (plan >= 0).all()


def test_the_plan_is_that_of_plain_numpy():
    c = costs()
    found = sinkhorn.transport(torch.from_numpy(c), 0.05, iterations=20_000, tolerance=1e-12).numpy()
    np.testing.assert_allclose(found, sinkhorn_plainly(c, 0.05, 20_000), atol=1e-9)


@pytest.mark.parametrize("seed", range(3))
def test_the_defaults_come_as_near_to_equal_shares_as_they_say_on_clustered_points(seed):
    """Such points end at the last iteration, not at the tolerance. At 50 iterations the columns are 5 to 9 % off."""
    rng = np.random.default_rng(seed)
    points = rng.standard_normal((16, 16))[rng.integers(0, 16, 512)] + 0.5 * rng.standard_normal((512, 16))
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    c = 2 - 2 * points @ points[rng.choice(512, 64, replace=False)].T
    exact = sinkhorn_plainly(c, sinkhorn.EPSILON, 2000)
    np.testing.assert_allclose(exact.sum(axis=0), 8, rtol=1e-6)
    plan = sinkhorn.transport(torch.from_numpy(c)).numpy()
    np.testing.assert_allclose(plan.sum(axis=1), 1, atol=1e-12)
    off = np.abs(plan.sum(axis=0) / 8 - 1)
    assert off.mean() < 0.045
    assert off.max() < 0.25
    assert (plan.argmax(axis=1) == exact.argmax(axis=1)).mean() > 0.94
    assert np.abs(np.bincount(c.argmin(axis=1), minlength=64) / 8 - 1).mean() > 0.5  # of the nearest, in comparison


def test_the_defaults_stop_where_all_columns_are_within_the_tolerance():
    plan = sinkhorn.transport(torch.from_numpy(costs(512, 64))).numpy()
    off = np.abs(plan.sum(axis=0) / 8 - 1).max()
    assert sinkhorn.TOLERANCE / 100 < off < sinkhorn.TOLERANCE


def test_offsets_of_rows_do_not_matter_and_float32_is_taken():
    c = torch.from_numpy(costs())
    moved = c + torch.arange(60)[:, None] * 7.0
    given = moved.clone()
    torch.testing.assert_close(sinkhorn.transport(moved), sinkhorn.transport(c))
    assert torch.equal(moved, given)  # the work is done in place, but not in the place of the costs
    assert sinkhorn.transport(c.float()).dtype == torch.float64


def test_codes_are_nearly_balanced_where_the_nearest_are_not():
    rng = np.random.default_rng(0)
    points, centres = rng.standard_normal((512, 2)), rng.standard_normal((16, 2))
    c = ((points[:, None] - centres) ** 2).sum(axis=2)
    plain = np.bincount(c.argmin(axis=1), minlength=16)
    found = np.bincount(sinkhorn.balanced(torch.from_numpy(c)), minlength=16)
    assert found.std() < 0.4 * plain.std()
    assert found.min() > 0


def test_equal_costs_and_far_outliers_stay_finite():
    assert torch.allclose(sinkhorn.transport(torch.ones(6, 3)), torch.full((6, 3), 1 / 3, dtype=torch.float64))
    c = torch.from_numpy(costs())
    c[0] += 1e6
    c[:, 3] += 1e6
    c[5, 5] += 1e6
    plan = sinkhorn.transport(c, 0.005)
    assert plan.isfinite().all()
    with pytest.raises(ValueError, match=r"epsilon=0.001 .* expected 0.005 or more"):
        sinkhorn.transport(c, 0.001)
