"""Made data for the benchmarks: vectors and texts with the clusters that catalogs have."""

from __future__ import annotations

import numpy as np


def clustered(items: int, width: int = 384, seed: int = 0) -> np.ndarray:
    """Unit vectors [N, width], float32: categories, kinds within them (some much larger than others), and noise.

    The dimensions' variances fall as an encoder's do. Made a part at a time, so that millions fit.
    """
    rng = np.random.default_rng(seed)
    spread_d = (1 / np.sqrt(1 + np.arange(width) / 16)).astype(np.float32)

    def draw(rows: int) -> np.ndarray:
        return rng.standard_normal((rows, width), np.float32) * spread_d

    common, categories, kinds = 0.6 * draw(1), draw(40), 0.7 * draw(2000)
    weights = 1 / np.arange(1, 2001) ** 0.7
    kind_N = rng.choice(2000, items, p=weights / weights.sum())
    vectors_Nd = np.empty((items, width), np.float32)
    for start in range(0, items, 65_536):
        kind_B = kind_N[start : start + 65_536]
        part_Bd = common + categories[kind_B % 40] + kinds[kind_B] + 0.7 * draw(len(kind_B))
        vectors_Nd[start : start + 65_536] = part_Bd / np.linalg.norm(part_Bd, axis=1, keepdims=True)
    return vectors_Nd
