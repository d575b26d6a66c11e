"""Comparisons of the variants with each other and with the baselines, paired over users: the rows of comparisons.csv.

Shapes: S seeds · U users · M metrics at their cut-offs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from sidgraft.artifacts import Artifact, ArtifactError
from sidgraft.display import joined
from sidgraft.metrics import bootstrap_means, ndcg_at, recall_at
from sidgraft.paired import (
    Ranks,
    common_users,
    detectable,
    graded_by_query,
    holm,
    permutation_p,
    ranks_by_user,
    targets_by_user,
)
from sidgraft.provenance import made_from_others
from sidgraft.results import INCONCLUSIVE, METRIC_NAMES, MODEL, Variant

ALL = "all"  # the slice of all users
SIGNIFICANT = 0.05
BOOTSTRAP = 1000
GAINS = {"recall": recall_at, "ndcg": ndcg_at}  # of a user, given the rank of the target
GRADED = ("precision_strict", "precision_lenient", "composite_ndcg")  # of a query, given the grades of its candidates

COLUMNS = pa.schema(
    [
        ("variant", pa.string()),
        ("against", pa.string()),
        ("baseline", pa.bool_()),  # whether `against` is a baseline, not a variant
        ("slice", pa.string()),  # the users over whom the pair is tested: all, or cold, head, tail by their target
        ("metric", pa.string()),
        ("k", pa.int32()),
        ("seeds", pa.int32()),  # runs of `variant`: those of the seeds that both have
        ("against_seeds", pa.int32()),  # runs of `against` in them; a baseline that all seeds share is one run
        ("users", pa.int32()),  # those of the slice that all of these runs have
        ("value", pa.float64()),  # means over users and seeds
        ("against_value", pa.float64()),
        ("difference", pa.float64()),
        ("low", pa.float64()),  # of the difference: the 95 % bootstrap over users
        ("high", pa.float64()),
        ("relative_percent", pa.float64()),  # null where against_value is zero
        ("p", pa.float64()),
        ("p_holm", pa.float64()),  # over the rows of the same metric and k: those of all users, or those of all slices
        ("detectable", pa.float64()),
        ("conclusion", pa.string()),  # above, below, inconclusive
    ]
)


def compare(
    variants: list[Variant],
    reference: str = "",
    judgements: pa.Table | None = None,
    slices: Mapping[str, frozenset[str]] | None = None,
) -> list[dict[str, Any]]:
    """Return rows of COLUMNS for every variant against every baseline and against every variant before it.

    ``reference`` counts as the first. Over all users, then over those whose target is among the items of each of the
    ``slices``, for Recall and NDCG at every k that all models have; where there are ``judgements``, over all queries,
    for strict and lenient Precision and composite NDCG. A user's metric is averaged over the seeds that both have; the
    p is that of the paired permutation test over users (METHOD 10), corrected by Holm for the number of comparisons in
    the metric and k: over all users, and once more over all slices together. A difference is inconclusive where the
    corrected p is .05 or more, or the difference smaller than the minimum detectable effect. A slice with fewer than
    two users has no row. Raises ArtifactError where a user has another target in another run.
    """
    measured = [
        {(m, k) for part, m, k in v.cells[MODEL] if part == ALL and m in (*GAINS, *GRADED)}
        for v in variants
        if MODEL in v.cells
    ]
    order = [*GAINS, *GRADED]
    columns = sorted(set.intersection(*measured), key=lambda c: (order.index(c[0]), c[1])) if measured else []
    runs = _runs(variants, columns, judgements) if columns else {}
    target_of = _target_of_each(variants) if judgements is None else {}
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
                users_U, ours_SUM, theirs_SUM = common_users(
                    [runs[name, MODEL, s] for s in both], [runs[other, recommender, s] for s in both]
                )
                is_shared = recommender != MODEL and bool((theirs_SUM == theirs_SUM[:1]).all())
                who = {"variant": name, "against": title, "baseline": recommender != MODEL}
                who |= {"seeds": len(both), "against_seeds": 1 if is_shared else len(both)}
                for part, users_P in _parts(users_U, slices or {}, target_of).items():
                    found = _differences(ours_SUM[:, users_P], theirs_SUM[:, users_P], columns)
                    rows += [who | {"slice": part} | row for row in found]
    for column in columns:
        table = [row for row in rows if (row["metric"], row["k"]) == column]
        _conclude([row for row in table if row["slice"] == ALL])
        _conclude([row for row in table if row["slice"] != ALL])
    return rows


def _parts(
    users_U: np.ndarray, slices: Mapping[str, frozenset[str]], target_of: dict[str, str]
) -> dict[str, np.ndarray]:
    """The places of the users that belong to each slice, that of all first."""
    targets = [target_of.get(user) for user in users_U.tolist()]
    found = {part: [i for i, target in enumerate(targets) if target in items] for part, items in slices.items()}
    return {ALL: np.arange(len(users_U))} | {part: np.array(places, dtype=int) for part, places in found.items()}


def slices_to_test(
    variants: list[Variant], slices: Mapping[str, frozenset[str]], interactions: Artifact
) -> tuple[Mapping[str, frozenset[str]], str]:
    """Return the slices, none where a variant was evaluated with others, and what a reader must know of them, if so.

    ``slices`` are those of the given ``interactions``. Metrics tell how many users of each slice a run had: with
    another number, its slices are others. The same number proves nothing for a run of other interactions.
    """
    for v in variants:
        targets = [] if v.recommendations is None else list(_targets(v).values())
        for part, items in slices.items():
            users = sum(target in items for target in targets)
            told = v.metrics.metadata.get(f"{part}_users", users) if v.metrics is not None and targets else users
            if told != users:
                return {}, (
                    f"No tests by slice: {v.name}, seed {v.seed}, was evaluated with {told} {part} users, and by the"
                    f" given interactions {users} are. Give the catalog and the interactions that all runs were made"
                    " from."
                )
    if slices and (others := made_from_others(variants, interactions)):
        return slices, (
            f"The slices are those of the given interactions; {joined(others)} had others, with as many users in each"
            " slice."
        )
    return slices, ""


def _target_of_each(variants: list[Variant]) -> dict[str, str]:
    """The target of each user, the same in all runs."""
    target_of: dict[str, str] = {}
    for v in variants:
        found = {} if v.recommendations is None else _targets(v)
        for user in target_of.keys() & found.keys():
            if target_of[user] != found[user]:
                raise ArtifactError(
                    f"user {user!r} has the target {found[user]!r} in variant {v.name!r}, seed {v.seed}, and"
                    f" {target_of[user]!r} in another: expected runs of the same split of the same interactions, whose"
                    " users can be compared one by one. Write a report of each."
                )
        target_of |= found
    return target_of


def _targets(variant: Variant) -> dict[str, str]:
    assert variant.recommendations is not None
    columns = ["recommender", "user_id", "target_id"]
    return targets_by_user(variant.recommendations.read_table("recommendations.parquet", columns))


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
    """Return a table a metric and slice for the page: variants down, baselines and variants across.

    A cell stands both ways round. Tables of all users come first.
    """
    tables = []
    parts = sorted(dict.fromkeys(row["slice"] for row in rows), key=lambda part: part != ALL)
    for part, metric in [(part, metric) for part in parts for metric in (*GAINS, *GRADED)]:
        family = [row for row in rows if (row["metric"], row["k"], row["slice"] == ALL) == (metric, k, part == ALL)]
        chosen = [row for row in family if row["slice"] == part]
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
                "slice": part,
                "rows": names,
                "columns": [*baselines, *(names if len(names) > 1 else [])],
                "cells": cells,
                "comparisons": len(family),  # that Holm's correction is over
                "users": f"{min(users):,}" if len(users) == 1 else f"{min(users):,} to {max(users):,}",
            }
        )
    return tables


def _variants_of(row: dict[str, Any]) -> list[str]:
    return [row["variant"]] if row["baseline"] else [row["against"], row["variant"]]
