"""Comparisons of the variants with each other and with the baselines, paired over users: the rows of comparisons.csv.

Shapes: S seeds · U users · M metrics at their cut-offs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from sidgraft.metrics import bootstrap_means, ndcg_at, recall_at
from sidgraft.paired import Ranks, common_users, detectable, graded_by_query, holm, permutation_p, ranks_by_user
from sidgraft.results import INCONCLUSIVE, METRIC_NAMES, MODEL, Variant

SIGNIFICANT = 0.05
BOOTSTRAP = 1000
GAINS = {"recall": recall_at, "ndcg": ndcg_at}  # of a user, given the rank of the target
GRADED = ("precision_strict", "precision_lenient", "composite_ndcg")  # of a query, given the grades of its candidates

COLUMNS = pa.schema(
    [
        ("variant", pa.string()),
        ("against", pa.string()),
        ("baseline", pa.bool_()),  # whether `against` is a baseline, not a variant
        ("metric", pa.string()),
        ("k", pa.int32()),
        ("seeds", pa.int32()),  # those that both have
        ("users", pa.int32()),  # those that all of these runs have
        ("value", pa.float64()),  # means over users and seeds
        ("against_value", pa.float64()),
        ("difference", pa.float64()),
        ("low", pa.float64()),  # of the difference: the 95 % bootstrap over users
        ("high", pa.float64()),
        ("relative_percent", pa.float64()),  # null where against_value is zero
        ("p", pa.float64()),
        ("p_holm", pa.float64()),  # over all rows of the same metric and k
        ("detectable", pa.float64()),
        ("conclusion", pa.string()),  # above, below, inconclusive
    ]
)


def compare(variants: list[Variant], reference: str = "", judgements: pa.Table | None = None) -> list[dict[str, Any]]:
    """Return a row of COLUMNS for every variant against every baseline and against every variant before it.

    ``reference`` counts as the first. Over all users, for Recall and NDCG at every k that all models have; where there
    are ``judgements``, over all queries, for strict and lenient Precision and composite NDCG. A user's
    metric is averaged over the seeds that both have; the p is that of the paired permutation test over users (METHOD
    10), corrected by Holm for the number of comparisons in the metric and k. A difference is inconclusive where the
    corrected p is .05 or more, or the difference smaller than the minimum detectable effect.
    """
    measured = [
        {(m, k) for part, m, k in v.cells[MODEL] if part == "all" and m in (*GAINS, *GRADED)}
        for v in variants
        if MODEL in v.cells
    ]
    order = [*GAINS, *GRADED]
    columns = sorted(set.intersection(*measured), key=lambda c: (order.index(c[0]), c[1])) if measured else []
    runs = _runs(variants, columns, judgements) if columns else {}
    names = list(dict.fromkeys(name for name, recommender, _ in runs if recommender == MODEL))
    names.sort(key=lambda name: name != reference)
    baselines = list(dict.fromkeys(recommender for _, recommender, _ in runs if recommender != MODEL))
    rows = []
    for i, name in enumerate(names):
        seeds = [s for n, r, s in runs if (n, r) == (name, MODEL)]
        # A baseline is taken from the variant's own table: the same users.
        for title, other, recommender in [(b, name, b) for b in baselines] + [(n, n, MODEL) for n in names[:i]]:
            both = [s for s in seeds if (other, recommender, s) in runs]
            if both:
                values = common_users([runs[name, MODEL, s] for s in both], [runs[other, recommender, s] for s in both])
                who = {"variant": name, "against": title, "baseline": recommender != MODEL, "seeds": len(both)}
                rows += [who | row for row in _differences(*values, columns)]
    for column in columns:
        _conclude([row for row in rows if (row["metric"], row["k"]) == column])
    return rows


def _runs(
    variants: list[Variant], columns: list[tuple[str, int]], judgements: pa.Table | None
) -> dict[tuple[str, str, int], Ranks]:
    """What every variant, recommender and seed reaches with each user [U, M]."""
    runs = {}
    for v in variants:
        if v.recommendations is not None:
            names = ["recommender", "user_id", "target_id", "item_ids"]
            lists = v.recommendations.read_table("recommendations.parquet", names)
            if judgements is None:
                found = {
                    recommender: (users, np.stack([GAINS[m](rank, k) for m, k in columns], axis=1))
                    for recommender, (users, rank) in ranks_by_user(lists).items()
                }
            else:
                found = graded_by_query(lists, judgements, columns)
            runs |= {(v.name, recommender, v.seed): values for recommender, values in found.items()}
    return runs


def _differences(ours_SUM: np.ndarray, theirs_SUM: np.ndarray, columns: list[tuple[str, int]]) -> list[dict[str, Any]]:
    """What one pair of recommenders shows at each metric and k, the correction left out; nothing for under two users.

    Sums over the seeds stand for means where only the sign pattern matters: those of recall are integers, those of
    precision k-ths.
    """
    seeds, users, _ = ours_SUM.shape
    if users < 2:
        return []
    pairs = [(ours_SUM[..., i].sum(axis=0), theirs_SUM[..., i].sum(axis=0)) for i in range(len(columns))]
    mean_UM = np.stack([(ours - theirs) / seeds for ours, theirs in pairs], axis=1)
    low_M, high_M = np.quantile(bootstrap_means(mean_UM, BOOTSTRAP, 0), [0.025, 0.975], axis=0)
    rows = []
    for i, ((metric, k), (ours_U, theirs_U)) in enumerate(zip(columns, pairs, strict=True)):
        difference_U = ours_U - theirs_U
        value, against = (float(x.mean() / seeds) for x in (ours_U, theirs_U))
        rows.append(
            {
                "metric": metric,
                "k": k,
                "users": users,
                "value": value,
                "against_value": against,
                "difference": float(mean_UM[:, i].mean()),
                "low": float(low_M[i]),
                "high": float(high_M[i]),
                "relative_percent": 100 * (value / against - 1) if against else None,
                "p": permutation_p(difference_U if "ndcg" in metric else _whole(difference_U, metric, k)),
                "detectable": detectable(mean_UM[:, i]),
            }
        )
    return rows


def _whole(difference_U: np.ndarray, metric: str, k: int) -> np.ndarray:
    """Differences of recall, or of precision in hits, as integers."""
    return np.rint(difference_U * (1 if metric == "recall" else k)).astype(np.int64)


def _conclude(rows: list[dict[str, Any]]) -> None:
    """Correct the p-values of one table and say what each difference comes to."""
    for row, p in zip(rows, holm([row["p"] for row in rows]), strict=True):
        row["p_holm"] = p
        found = p < SIGNIFICANT and abs(row["difference"]) >= row["detectable"]
        row["conclusion"] = ("above" if row["difference"] > 0 else "below") if found else INCONCLUSIVE


def matrices(rows: list[dict[str, Any]], k: int) -> list[dict[str, Any]]:
    """Return a table a metric for the page: variants down, baselines and variants across, a cell both ways round."""
    tables = []
    for metric in (*GAINS, *GRADED):
        chosen = [row for row in rows if (row["metric"], row["k"]) == (metric, k)]
        if not chosen:
            continue
        cells = {(row["variant"], row["against"]): row for row in chosen}
        cells |= {
            (row["against"], row["variant"]): row | {"difference": -row["difference"]}
            for row in chosen
            if not row["baseline"]
        }
        names = list(dict.fromkeys(name for row in chosen for name in _variants_of(row)))
        baselines = list(dict.fromkeys(row["against"] for row in chosen if row["baseline"]))
        users = {row["users"] for row in chosen}
        tables.append(
            {
                "name": f"{METRIC_NAMES[metric]}@{k}",
                "rows": names,
                "columns": [*baselines, *(names if len(names) > 1 else [])],
                "cells": cells,
                "comparisons": len(chosen),
                "users": f"{min(users):,}" if len(users) == 1 else f"{min(users):,} to {max(users):,}",
            }
        )
    return tables


def _variants_of(row: dict[str, Any]) -> list[str]:
    return [row["variant"]] if row["baseline"] else [row["against"], row["variant"]]
