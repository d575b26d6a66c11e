"""The rows of comparisons.csv: values by hand and by NumPy, what is called inconclusive, failures left out."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from report_artifacts import shared_data, variant_artifacts
from scipy import stats

from sidgraft import artifacts
from sidgraft.artifacts import SCHEMAS, Artifact
from sidgraft.comparisons import COLUMNS, compare, matrices
from sidgraft.results import MODEL, Cell, Key, Variant
from sidgraft.stages.report import report

ITEMS = [f"i{n:02d}" for n in range(12)]


def ranked(rank: int) -> list[str]:
    """Ten items with the target, i00, at this rank; not there where it is 0."""
    others = ITEMS[1:]
    return others[: rank - 1] + ITEMS[:1] + others[rank - 1 : 9] if rank else others[:10]


def variant(
    tmp_path: Path, name: str, seed: int, ranks: dict[str, list[int]], ks: tuple[int, ...] = (5, 10)
) -> Variant:
    """A variant whose recommenders have the user's target at these ranks."""
    rows = [
        {"recommender": r, "user_id": f"u{u:04d}", "target_id": "i00", "item_ids": ranked(rank), "scores": [0.0] * 10}
        for r, places in ranks.items()
        for u, rank in enumerate(places)
    ]
    path = tmp_path / f"{name}-{seed}"
    with artifacts.create(path, "recommendations/v1", stage="evaluate", arguments={}, inputs={}) as draft:
        schema = SCHEMAS["recommendations/v1"]["recommendations.parquet"]
        draft.write_table("recommendations.parquet", pa.Table.from_pylist(rows, schema))
    cells: dict[Key, Cell] = {("all", m, k): (0.0, None, None) for m in ("recall", "ndcg") for k in ks}
    read = artifacts.load(path, "recommendations/v1")
    return Variant(
        name, seed, Artifact(Path(), "metrics/v1", "evaluate", "0" * 64, {}, {}, {}), read, cells={MODEL: cells}
    )


def row_of(
    rows: list[dict[str, Any]], variant: str, against: str, metric: str = "recall", k: int = 10
) -> dict[str, Any]:
    (row,) = [r for r in rows if (r["variant"], r["against"], r["metric"], r["k"]) == (variant, against, metric, k)]
    return row


def test_one_pair_by_hand(tmp_path: Path) -> None:
    """Seeds 0 and 1 of two variants; of three users the first is found by both, the second by one, the third not."""
    first = [variant(tmp_path, "a", s, {MODEL: places}) for s, places in ((0, [1, 0, 0]), (1, [1, 6, 0]))]
    second = [
        variant(tmp_path, "b", s, {MODEL: places}) for s, places in ((0, [2, 3, 0]), (1, [7, 1, 0]), (2, [1, 1, 1]))
    ]
    rows = compare([*first, *second])
    row = row_of(rows, "b", "a")
    assert (row["baseline"], row["seeds"], row["users"]) == (False, 2, 3)  # seed 2 is of one alone
    assert row["value"] == pytest.approx(2 / 3)
    assert row["against_value"] == pytest.approx((1 + 0.5) / 3)
    assert row["difference"] == pytest.approx(0.5 / 3)
    assert row["relative_percent"] == pytest.approx(100 * (4 / 3 - 1))
    assert row["p"] == row["p_holm"] == 1.0
    assert row["detectable"] == pytest.approx((1.959964 + 0.841621) * np.std([0, 0.5, 0], ddof=1) / np.sqrt(3))
    assert row["conclusion"] == "inconclusive"
    at_5 = row_of(rows, "b", "a", k=5)
    assert at_5["value"] == pytest.approx((0.5 + 1) / 3)  # rank 7 is beyond
    ndcg = row_of(rows, "b", "a", "ndcg", 5)
    assert ndcg["value"] == pytest.approx((1 / np.log2(3) + 1 / np.log2(4) + 1) / 2 / 3)
    assert len(rows) == 4


def drawn(share: float, users: int, seed: int) -> list[int]:
    """A target within the first ten for about this share of the users."""
    rng = np.random.default_rng(seed)
    return np.where(rng.random(users) < share, rng.integers(1, 11, users), 0).tolist()


def test_p_values_are_those_of_scipy_with_holm(tmp_path: Path) -> None:
    users = 400
    baselines = {"popularity": drawn(0.10, users, 9), "sasrec": drawn(0.2, users, 8)}
    variants = [
        variant(tmp_path, name, 0, {MODEL: drawn(share, users, n)} | baselines)
        for n, (name, share) in enumerate((("gaussian", 0.08), ("centroid", 0.3)))
    ]
    rows = [row for row in compare(variants) if (row["metric"], row["k"]) == ("recall", 10)]
    assert [(row["variant"], row["against"]) for row in rows] == [
        ("gaussian", "popularity"),
        ("gaussian", "sasrec"),
        ("centroid", "popularity"),
        ("centroid", "sasrec"),
        ("centroid", "gaussian"),
    ]
    hits = {name: np.array(places) > 0 for name, places in baselines.items()}
    hits |= {"gaussian": np.array(drawn(0.08, users, 0)) > 0, "centroid": np.array(drawn(0.3, users, 1)) > 0}
    expected = []
    for row in rows:  # McNemar's exact test is the permutation test of one seed
        ours, theirs = hits[row["variant"]], hits[row["against"]]
        won, lost = int((ours & ~theirs).sum()), int((theirs & ~ours).sum())
        expected.append(stats.binomtest(won, won + lost).pvalue)
        assert row["difference"] == pytest.approx(ours.mean() - theirs.mean())
        assert row["low"] < row["difference"] < row["high"]
    assert [row["p"] for row in rows] == pytest.approx(expected, rel=1e-6)
    order = np.argsort(expected)
    adjusted = np.minimum(np.maximum.accumulate(np.array(expected)[order] * np.arange(5, 0, -1)), 1.0)
    assert np.array([row["p_holm"] for row in rows])[order] == pytest.approx(adjusted, rel=1e-6)
    assert {row["conclusion"] for row in rows} == {"above", "below", "inconclusive"}
    for row in rows:
        small = abs(row["difference"]) < row["detectable"]
        assert (row["conclusion"] == "inconclusive") == (row["p_holm"] >= 0.05 or small)


def test_a_significant_difference_below_the_detectable_one_is_inconclusive(tmp_path: Path) -> None:
    """11 users of 200 change, all but one for the better: p = .012 by the sign test, yet 2.7 standard errors."""
    better, worse = [1] * 10 + [0] * 190, [0] * 10 + [1] + [0] * 189
    row = row_of(
        compare([variant(tmp_path, "a", 0, {MODEL: worse}), variant(tmp_path, "b", 0, {MODEL: better})]), "b", "a"
    )
    assert row["p_holm"] == pytest.approx(stats.binomtest(10, 11).pvalue)
    assert row["p_holm"] < 0.05
    assert 0 < row["difference"] < row["detectable"] * 1.05
    assert (row["conclusion"] == "inconclusive") == (row["difference"] < row["detectable"])


def test_the_reference_is_what_others_are_compared_with(tmp_path: Path) -> None:
    variants = [variant(tmp_path, name, 0, {MODEL: drawn(0.3, 50, n)}) for n, name in enumerate("abc")]
    pairs = {(row["variant"], row["against"]) for row in compare(variants, "b")}
    assert pairs == {("a", "b"), ("c", "b"), ("c", "a")}
    table, ndcg = matrices(compare(variants), 10)
    assert (table["rows"], table["columns"]) == (["a", "b", "c"], ["a", "b", "c"])
    assert table["cells"]["a", "c"]["difference"] == -table["cells"]["c", "a"]["difference"]
    assert (table["name"], ndcg["name"], table["comparisons"]) == ("Recall@10", "NDCG@10", 3)


def test_only_cut_offs_that_all_models_have_are_compared(tmp_path: Path) -> None:
    variants = [
        variant(tmp_path, "a", 0, {MODEL: [1, 0]}),
        variant(tmp_path, "b", 0, {MODEL: [0, 2]}, ks=(10,)),
    ]
    assert {row["k"] for row in compare(variants)} == {10}
    assert compare([variant(tmp_path, "alone", 0, {MODEL: [1, 0]})]) == []


def test_the_report_writes_them_and_shows_what_is_inconclusive(tmp_path: Path) -> None:
    shared = shared_data(tmp_path)
    paths = [variant_artifacts(tmp_path, shared, name, seed, 0.06) for name in ("mean", "centroid") for seed in (0, 1)]
    artifacts.record_failure(tmp_path / "bad", "metrics/v1", stage="ground", error="no", variant="gaussian+gti")
    paths.append((str(tmp_path / "bad"), *paths[0][1:]))
    metrics, recommendations, diagnostics = (list(column) for column in zip(*paths, strict=True))
    catalog, interactions, ids = (str(tmp_path / name) for name in ("catalog", "interactions", "ids"))
    out = str(tmp_path / "out")
    report(metrics, recommendations, diagnostics, catalog, interactions, ids, out, reference="mean")
    table = pq.read_table(tmp_path / "out" / "comparisons.parquet")
    assert table.schema == COLUMNS
    rows = table.to_pylist()
    assert {(r["variant"], r["against"]) for r in rows} == {
        ("mean", "popularity"), ("mean", "neighbours"), ("centroid", "popularity"), ("centroid", "neighbours"),
        ("centroid", "mean"),
    }  # fmt: skip
    assert {row["seeds"] for row in rows} == {2}
    with (tmp_path / "out" / "comparisons.csv").open(newline="", encoding="utf-8") as stream:
        read = list(csv.DictReader(stream))
    assert list(read[0]) == COLUMNS.names
    assert [float(row["p_holm"]) for row in read] == [row["p_holm"] for row in rows]
    html = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert "Differences in Recall@10, paired over 40 users" in html
    assert "Differences in NDCG@10" in html
    assert "<small>inconclusive</small>" in html
    assert "<small>detectable ." in html
