"""Queries with graded candidates, as prompts and rows of the item table, ready to train on and to judge by.

Shapes: N items · P pairs of a training query and a relevant item · G recommended items a query.
"""

# pyright: reportAttributeAccessIssue=false
# pyarrow.compute makes its functions at import, where a type checker cannot see them.

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sidgraft.artifacts import Artifact
from sidgraft.graded import LENIENT, graded_metrics

FILE = "queries.parquet"


@dataclass(frozen=True)
class Queries:
    """All queries, their split, and the judgements of their candidates."""

    ids: list[str]
    texts: list[str]  # for an encoder
    prompts: list[str]  # named fields, for the language model
    split: np.ndarray
    judgements: pa.Table
    item_ids: list[str]

    def of(self, split: str, most: int = 0) -> np.ndarray:
        """Numbers of the queries of a split, or of a sample of ``most``, the same in every run on the same data.

        Raises ValueError where there is none.
        """
        chosen = np.flatnonzero(self.split == split)
        if not len(chosen):
            raise ValueError(f"no query belongs to {split}: run `sidgraft prepare` on more queries.")
        if most and most < len(chosen):
            return np.sort(np.random.default_rng(0).choice(chosen, most, replace=False))
        return chosen

    def relevant(self) -> list[list[tuple[int, int]]]:
        """By query, the rows and grades of the candidates judged above 0, the best first, then by row."""
        judged = self.judgements.filter(pc.greater_equal(self.judgements["grade"], LENIENT))
        query = pc.index_in(judged["query_id"], value_set=pa.array(self.ids, pa.string())).to_numpy()
        item = pc.index_in(judged["item_id"], value_set=pa.array(self.item_ids, pa.string())).to_numpy()
        grade = judged["grade"].to_numpy()
        found: list[list[tuple[int, int]]] = [[] for _ in self.ids]
        for place in np.lexsort((item, -grade, query)):
            found[query[place]].append((int(item[place]), int(grade[place])))
        return found

    def best(self, chosen: np.ndarray) -> np.ndarray:
        """The row of the best candidate of each query [Q]; of equals the smaller row."""
        relevant = self.relevant()
        return np.array([relevant[query][0][0] for query in chosen], np.int64)

    def training_pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Query and item row of every training sample [P], [P]: a candidate of grade g stands in g of them.

        A model that learns these pairs gives a candidate a probability in proportion to its gain, so that ranking by
        probability ranks good before maybe.
        """
        relevant = self.relevant()
        pairs = [(query, item) for query in self.of("train") for item, grade in relevant[query] for _ in range(grade)]
        query_P, item_P = np.array(pairs, np.int64).T
        return query_P, item_P

    def metrics(self, chosen: np.ndarray, items_QG: np.ndarray, ks: list[int]) -> dict[tuple[str, int], np.ndarray]:
        """The graded metrics of the recommendations [Q, G] (rows, -1: none) for the queries ``chosen`` [Q]."""
        names = np.asarray(self.item_ids, dtype=object)
        lists = [names[row[row >= 0]].tolist() for row in items_QG]
        ids = [self.ids[query] for query in chosen]
        recommended = pa.table({"user_id": ids, "item_ids": pa.array(lists, pa.list_(pa.string()))})
        return graded_metrics(recommended, self.judgements, ks)


def has_queries(interactions: Artifact) -> bool:
    """Whether an interactions artifact comes from queries with graded candidates, and not from histories."""
    return (interactions.path / FILE).is_file()


def read_queries(interactions: Artifact, item_ids: list[str]) -> Queries | None:
    """Read the queries of an interactions artifact; None where it comes from histories.

    Raises ValueError for judgements of items that are not in ``item_ids``.
    """
    if not has_queries(interactions):
        return None
    table, judgements = interactions.read_table(FILE), interactions.read_table("judgements.parquet")
    unknown = pc.invert(pc.is_in(judgements["item_id"], value_set=pa.array(item_ids, pa.string())))
    if pc.any(unknown).as_py():
        example = judgements["item_id"].filter(unknown)[0].as_py()
        raise ValueError(
            f"the judgements name {pc.sum(unknown).as_py()} items that the catalog lacks, such as {example!r}: give"
            " the interactions and the catalog of one run of `sidgraft prepare`."
        )
    ids, texts, prompts = (table[name].to_pylist() for name in ("query_id", "text", "prompt"))
    return Queries(ids, texts, prompts, np.array(table["split"].to_pylist()), judgements, item_ids)
