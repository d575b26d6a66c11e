"""Semantic IDs that go on from published ones: items keep theirs, new items take free ones, new codes old numbers.

Shapes: N items · M Semantic IDs that were given before · L semantic levels · K codes of a level.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
from scipy.optimize import linear_sum_assignment

from sidgraft.artifacts import Artifact
from sidgraft.sids import codes_array

FILE = "continuity.json"  # of a semantic_ids artifact: the version it goes on from, and the codes that keep a meaning
RETIRED = "retired.parquet"  # of a semantic_ids artifact: Semantic IDs that were given once and are nobody's now

# A code keeps its meaning where it shares at least this part of all items of the old code and the new one: where both
# have the same number of items, half of them are the same.
LEAST_OVERLAP = 1 / 3


@dataclass(frozen=True)
class Issued:
    """All Semantic IDs [M, L+1] that a published version has given: first those in use, then the retired ones.

    An item may stand more than once: what it has now, and what it had before its text changed.
    """

    item_ids: list[str]
    codes: np.ndarray
    in_use: int

    @staticmethod
    def read(semantic_ids: Artifact) -> Issued:
        """Read them from a semantic_ids artifact."""
        tables = [semantic_ids.read_table("semantic_ids.parquet")]
        if (semantic_ids.path / RETIRED).is_file():
            tables.append(semantic_ids.read_table(RETIRED))
        codes = np.concatenate([codes_array(table) for table in tables])
        return Issued([item for table in tables for item in table["item_id"].to_pylist()], codes, tables[0].num_rows)

    def current(self) -> dict[str, np.ndarray]:
        """The Semantic ID [L+1] of each item that has one in use."""
        return dict(zip(self.item_ids[: self.in_use], self.codes, strict=False))


def extended(issued: Issued, item_ids: Sequence[str], encoded: dict[str, np.ndarray]) -> np.ndarray:
    """The Semantic IDs [N, L+1] of a catalog that moved a little.

    ``encoded`` has the semantic codes [L] of the items that are new or whose text changed. Such an item takes back a
    Semantic ID that it had before with these codes; otherwise the next deduplication code that no item has had among
    these codes, in item_id order. All other items keep theirs. So no Semantic ID ever passes from one item to another.
    The deduplication codes may reach the size of their level: the caller checks.
    """
    current = issued.current()
    own: dict[tuple[str, tuple[int, ...]], np.ndarray] = {}
    free: dict[tuple[int, ...], int] = {}
    for item, sid in zip(issued.item_ids, issued.codes, strict=True):
        semantic = tuple(sid[:-1].tolist())
        own.setdefault((item, semantic), sid)
        free[semantic] = max(free.get(semantic, 0), int(sid[-1]) + 1)
    given: dict[str, np.ndarray] = {}
    for item in sorted(encoded):
        semantic = tuple(encoded[item].tolist())
        sid = own.get((item, semantic))
        if sid is None:
            sid = np.asarray([*semantic, free.get(semantic, 0)])
            free[semantic] = int(sid[-1]) + 1
        given[item] = sid
    return np.stack([given[item] if item in given else current[item] for item in item_ids])


def retired(issued: Issued, item_ids: Sequence[str], codes: np.ndarray) -> pa.Table:
    """The Semantic IDs that were given once and that no item of the catalog has now, by the table's columns."""
    now = {(item, *sid) for item, sid in zip(item_ids, codes.tolist(), strict=True)}
    before = zip(issued.item_ids, issued.codes.tolist(), strict=True)
    rows = [{"item_id": item, "codes": sid} for item, sid in before if (item, *sid) not in now]
    return pa.Table.from_pylist(rows, pa.schema([("item_id", pa.string()), ("codes", pa.list_(pa.int32()))]))


def matched(old_N: np.ndarray, new_N: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers for a level's new codes, so that they go on with the meaning of old ones.

    ``old_N`` and ``new_N`` are the codes of the items that both catalogs have. Returns the number [K] that each new
    code takes, a permutation with the largest sum of overlaps (the Hungarian method), and these overlaps [K]: of the
    items that have the old code or the new one, the share that has both.
    """
    both_KK = np.bincount(new_N * size + old_N, minlength=size * size).reshape(size, size).astype(np.float64)
    either_KK = both_KK.sum(axis=1, keepdims=True) + both_KK.sum(axis=0, keepdims=True) - both_KK
    overlap_KK = both_KK / np.maximum(either_KK, 1)
    new_K, number_K = linear_sum_assignment(overlap_KK, maximize=True)
    return number_K, overlap_KK[new_K, number_K]
