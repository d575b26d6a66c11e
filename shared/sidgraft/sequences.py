"""Users' histories as rows of the item table, ready to become token sequences.

Shapes: U users · N items.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sidgraft.artifacts import Artifact


@dataclass(frozen=True)
class Sequences:
    """All users' items in time order, as rows of the item table, with the split markers of interactions/v1."""

    user_ids: list[str]
    items: list[np.ndarray]  # U arrays of rows
    train_length_U: np.ndarray
    positions_U: dict[str, np.ndarray]  # "valid" and "test": position of the target, -1 for users without one

    def training(self) -> list[np.ndarray]:
        """The training part of every user who has one."""
        parts = [items[:length] for items, length in zip(self.items, self.train_length_U, strict=True)]
        return [part for part in parts if len(part)]

    def users_with(self, split: str, most: int = 0) -> np.ndarray:
        """Numbers of the users who have a target in this split, or of a random sample of ``most`` of them.

        The sample does not depend on the run's seed: all runs on the same data judge the same users, so that
        they can be compared user by user.
        """
        users = np.flatnonzero(self.positions_U[split] >= 0)
        if most and most < len(users):
            return np.sort(np.random.default_rng(0).choice(users, most, replace=False))
        return users

    def judged(self, split: str, most: int = 0) -> tuple[np.ndarray, list[np.ndarray], np.ndarray]:
        """The users of `users_with`, their histories and their targets [U]. Raises ValueError where there is none."""
        users = self.users_with(split, most)
        if not len(users):
            raise ValueError(f"no user has a {split} target: give longer histories, or another split.")
        targets = np.asarray([self.target(user, split) for user in users])
        return users, [self.history(user, split) for user in users], targets

    def history(self, user: int, split: str) -> np.ndarray:
        """The items before a user's target (for test: the training part and the validation item)."""
        return self.items[user][: self.positions_U[split][user]]

    def target(self, user: int, split: str) -> int:
        """The row of a user's target item."""
        return int(self.items[user][self.positions_U[split][user]])


def read_sequences(interactions: Artifact, item_ids: list[str]) -> Sequences:
    """Read an interactions artifact against the items of a catalog. Raises ValueError for unknown items."""
    table = interactions.read_table("interactions.parquet")
    lists = table["item_ids"].combine_chunks()
    rows = pc.index_in(lists.flatten(), value_set=pa.array(item_ids, pa.string()))
    if rows.null_count:
        unknown = lists.flatten().filter(rows.is_null())[0].as_py()
        raise ValueError(
            f"the interactions name {rows.null_count} items that the catalog lacks, such as {unknown!r}: give the"
            " interactions and the catalog of one run of `sidgraft prepare`."
        )
    ends = np.cumsum(pc.list_value_length(lists).to_numpy(zero_copy_only=False))
    items = np.split(rows.to_numpy(zero_copy_only=False).astype(np.int64), ends[:-1]) if len(ends) else []
    positions = {
        split: table[f"{split}_position"].fill_null(-1).to_numpy().astype(np.int64) for split in ("valid", "test")
    }
    return Sequences(table["user_id"].to_pylist(), items, table["train_length"].to_numpy(), positions)


def check_same_items(catalog: pa.Table, semantic_ids: pa.Table) -> None:
    """Raise ValueError unless both tables hold the same items in the same order."""
    if not catalog["item_id"].equals(semantic_ids["item_id"]):
        raise ValueError(
            f"the catalog ({catalog.num_rows} items) and the Semantic IDs ({semantic_ids.num_rows} items) do not"
            " hold the same items in the same order: run `sidgraft embed` and `sidgraft quantize` on this catalog."
        )
