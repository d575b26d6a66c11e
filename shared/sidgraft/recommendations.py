"""Recommendations of several recommenders for the same users: arrays to a recommendations/v1 table and back.

Shapes: U users · G recommended items a user.
"""

# pyright: reportAttributeAccessIssue=false
# pyarrow.compute makes its functions at import, where a type checker cannot see them.

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sidgraft.artifacts import SCHEMAS

SCHEMA = SCHEMAS["recommendations/v1"]["recommendations.parquet"]


def to_table(
    recommended: dict[str, tuple[np.ndarray, np.ndarray]],
    user_ids: list[str],
    target_U: np.ndarray,
    item_ids: list[str],
) -> pa.Table:
    """Make the table of recommendations/v1 from items [U, G] (rows of ``item_ids``, -1: none) and scores [U, G]."""
    names = pa.array(item_ids, pa.string())
    parts = []
    for recommender, (items_UG, scores_UG) in recommended.items():
        is_item_UG = items_UG >= 0
        offsets = pa.array(np.concatenate([[0], np.cumsum(is_item_UG.sum(axis=1))]), pa.int32())
        columns = [
            pa.array([recommender] * len(user_ids), pa.string()),
            pa.array(user_ids, pa.string()),
            names.take(pa.array(target_U)),
            pa.ListArray.from_arrays(offsets, names.take(pa.array(items_UG[is_item_UG]))),
            pa.ListArray.from_arrays(offsets, pa.array(scores_UG[is_item_UG], pa.float32())),
        ]
        parts.append(pa.table(columns, SCHEMA))
    return pa.concat_tables(parts)


def from_table(table: pa.Table, item_ids: list[str]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Read what `to_table` has written: by recommender, items [U, G] and scores [U, G] in the table's order of users.

    G is the longest list of a recommender; shorter ones are filled with -1 and -inf.
    """
    names = table["recommender"].to_numpy()
    result = {}
    for recommender in dict.fromkeys(names.tolist()):
        rows = table.filter(pa.array(names == recommender))
        lists = rows["item_ids"].combine_chunks()
        lengths = pc.list_value_length(lists).to_numpy(zero_copy_only=False).astype(np.int64)
        found = pc.index_in(lists.flatten(), value_set=pa.array(item_ids, pa.string()))
        if found.null_count:
            raise ValueError(f"{recommender} recommends items that the catalog lacks: give those of one catalog.")
        is_item_UG = np.arange(lengths.max(initial=0)) < lengths[:, None]
        items_UG = np.full(is_item_UG.shape, -1)
        items_UG[is_item_UG] = found.to_numpy(zero_copy_only=False)
        scores_UG = np.full(is_item_UG.shape, -np.inf, dtype=np.float32)
        scores_UG[is_item_UG] = rows["scores"].combine_chunks().flatten().to_numpy(zero_copy_only=False)
        result[recommender] = (items_UG, scores_UG)
    return result
