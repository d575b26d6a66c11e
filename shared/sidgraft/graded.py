"""Metrics of rankings whose candidates are judged in grades: 2 good, 1 maybe, 0 not; what nobody judged counts as 0.

    judgements = pa.table({"query_id": [...], "item_id": [...], "grade": [...]})
    values = graded_metrics(recommendations, judgements, ks=[5, 10])
    np.nanmean(values["composite_ndcg", 10])

``recommendations`` has the columns user_id and item_ids of recommendations/v1, a query's id in place of a user's.
The setting is that of GTI's industrial tables: Precision strict (good) and lenient (good and maybe), composite NDCG.

Shapes: Q queries · G recommendations of a query, the longest list · J judgements.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

GRADES = (0, 1, 2)  # the gain of a grade is the grade
STRICT, LENIENT = 2, 1  # the lowest grade that counts as a hit


def graded_metrics(
    recommendations: pa.Table, judgements: pa.Table, ks: Sequence[int]
) -> dict[tuple[str, int], np.ndarray]:
    """Return the values [Q] of precision_strict, precision_lenient and composite_ndcg at each k, a query each.

    Precision@k is the share of the first k that have the grade; places that a short list leaves empty count as
    misses. NDCG@k is the sum of grade / log2(rank + 1) over the first k, divided by the same sum of the query's best
    judged candidates; NaN for a query none of whose candidates is judged above 0. Raises ValueError for grades other
    than 0, 1, 2, a candidate judged twice for one query, and one recommended twice.
    """
    graded = _checked(judgements)
    queries = recommendations["user_id"].to_pylist()
    best: dict[str, list[int]] = {query: [] for query in queries}
    for (query, _), grade in graded.items():
        if query in best:
            best[query].append(grade)
    lists = recommendations["item_ids"].to_pylist()
    for query, items in zip(queries, lists, strict=True):
        if len(set(items)) < len(items):
            raise ValueError(f"the recommendations for {query!r} name an item more than once, expected each once.")
    both = zip(queries, lists, strict=True)
    found_QG = _padded([[graded.get((query, item), 0) for item in items] for query, items in both])
    ideal_QG = _padded([sorted(best[query], reverse=True) for query in queries])
    values: dict[tuple[str, int], np.ndarray] = {}
    for k in ks:
        values["precision_strict", k] = (found_QG[:, :k] >= STRICT).sum(axis=1) / k
        values["precision_lenient", k] = (found_QG[:, :k] >= LENIENT).sum(axis=1) / k
        ideal_Q = _discounted(ideal_QG[:, :k])
        with np.errstate(invalid="ignore"):
            values["composite_ndcg", k] = _discounted(found_QG[:, :k]) / np.where(ideal_Q > 0, ideal_Q, np.nan)
    return values


def _checked(judgements: pa.Table) -> dict[tuple[str, str], int]:
    """Grades by query and item."""
    grades = judgements["grade"].cast(pa.float64())
    wrong = judgements.filter(pc.invert(pc.is_in(grades, value_set=pa.array(GRADES, pa.float64()))))
    if wrong.num_rows:
        example = wrong.slice(0, 1).to_pylist()[0]
        raise ValueError(
            f"{wrong.num_rows} of {judgements.num_rows} judgements have no grade of 0, 1 or 2, such as {example}."
        )
    pairs = list(zip(judgements["query_id"].to_pylist(), judgements["item_id"].to_pylist(), strict=True))
    graded = dict(zip(pairs, map(int, grades.to_pylist()), strict=True))
    if len(graded) < len(pairs):
        twice = next(pair for pair, times in Counter(pairs).items() if times > 1)
        raise ValueError(
            f"{len(pairs) - len(graded)} judgements repeat the query and item of another, such as query {twice[0]!r},"
            f" item {twice[1]!r}: keep one."
        )
    return graded


def _padded(rows: list[list[int]]) -> np.ndarray:
    """Grades as a matrix, 0 behind the end of each row."""
    matrix = np.zeros((len(rows), max(map(len, rows), default=0)))
    for row, grades in zip(matrix, rows, strict=True):
        row[: len(grades)] = grades
    return matrix


def _discounted(grades_QG: np.ndarray) -> np.ndarray:
    return (grades_QG / np.log2(np.arange(grades_QG.shape[1]) + 2)).sum(axis=1)
