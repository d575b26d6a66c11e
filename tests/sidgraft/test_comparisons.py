"""The rows of comparisons.csv: values by hand and by NumPy, what is called inconclusive, failures left out."""

from __future__ import annotations

import csv
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from report_artifacts import shared_data, variant_artifacts
from scipy import stats

from sidgraft import artifacts
from sidgraft.artifacts import SCHEMAS, Artifact, ArtifactError
from sidgraft.comparisons import COLUMNS, compare, matrices, slices_to_test
from sidgraft.display import rate
from sidgraft.results import MODEL, Cell, Key, Variant
from sidgraft.stages.report import report

ITEMS = [f"i{n:02d}" for n in range(12)]


def ranked(rank: int) -> list[str]:
    """Ten items with the target, i00, at this rank; not there where it is 0."""
    others = ITEMS[1:]
    return others[: rank - 1] + ITEMS[:1] + others[rank - 1 : 9] if rank else others[:10]


def variant(
    tmp_path: Path,
    name: str,
    seed: int,
    ranks: dict[str, list[int]],
    ks: tuple[int, ...] = (5, 10),
    targets: list[str] | None = None,
    metadata: dict[str, Any] | None = None,
) -> Variant:
    """A variant whose recommenders have the user's target, i00 unless they are given, at these ranks."""
    rows = []
    for r, places in ranks.items():
        for u, rank in enumerate(places):
            target = targets[u] if targets else "i00"
            items = [target if item == "i00" else item for item in ranked(rank)]
            user = {"recommender": r, "user_id": f"u{u:04d}", "target_id": target}
            rows.append(user | {"item_ids": items, "scores": [0.0] * 10})
    path = tmp_path / f"{name}-{seed}"
    with artifacts.create(path, "recommendations/v1", stage="evaluate", arguments={}, inputs={}) as draft:
        schema = SCHEMAS["recommendations/v1"]["recommendations.parquet"]
        draft.write_table("recommendations.parquet", pa.Table.from_pylist(rows, schema))
    cells: dict[Key, Cell] = {("all", m, k): (0.0, None, None) for m in ("recall", "ndcg") for k in ks}
    read = artifacts.load(path, "recommendations/v1")
    metrics = Artifact(Path(), "metrics/v1", "evaluate", "0" * 64, {}, metadata or {}, {})
    return Variant(name, seed, metrics, read, cells={MODEL: cells})


def row_of(
    rows: list[dict[str, Any]], variant: str, against: str, metric: str = "recall", k: int = 10, part: str = "all"
) -> dict[str, Any]:
    wanted = (variant, against, part, metric, k)
    (row,) = [r for r in rows if (r["variant"], r["against"], r["slice"], r["metric"], r["k"]) == wanted]
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


def test_a_baseline_that_all_seeds_share_is_one_run_as_in_the_summary(tmp_path: Path) -> None:
    model = [1, 0, 3]
    runs = [
        variant(tmp_path, name, seed, {MODEL: model, "popularity": [0, 2, 0], "sasrec": [1, seed, 0]})
        for name in ("a", "b")
        for seed in (0, 1, 2)
    ]
    rows = compare(runs)
    found = {
        (row["variant"], row["against"]): (row["seeds"], row["against_seeds"])
        for row in rows
        if (row["metric"], row["k"]) == ("recall", 10)
    }
    own = {(name, "popularity"): (3, 1) for name in "ab"} | {(name, "sasrec"): (3, 3) for name in "ab"}
    assert found == own | {("b", "a"): (3, 3)}  # the same lists from three trainings are three runs
    assert row_of(rows, "a", "popularity")["against_value"] == pytest.approx(1 / 3)


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


SLICES = {"cold": frozenset({"cold"}), "head": frozenset({"head"}), "tail": frozenset({"cold", "tail"})}


def test_a_slice_is_compared_over_its_own_users_with_the_correction_over_all_slices(tmp_path: Path) -> None:
    """Against SciPy on each slice's users alone: McNemar's exact test, the mean difference, Holm over the family."""
    users = 600
    rng = np.random.default_rng(5)
    targets = rng.choice(["cold", "head", "tail"], users, p=[0.2, 0.3, 0.5]).tolist()
    popularity = np.where(np.array(targets) == "head", drawn(0.5, users, 9), 0).tolist()
    variants = [
        variant(tmp_path, name, 0, {MODEL: drawn(share, users, n), "popularity": popularity}, targets=targets)
        for n, (name, share) in enumerate((("gaussian", 0.08), ("centroid", 0.2)))
    ]
    rows = compare(variants, "gaussian", slices=SLICES)
    hits = {"popularity": np.array(popularity) > 0}
    hits |= {
        v: np.array(drawn(share, users, n)) > 0 for n, (v, share) in enumerate((("gaussian", 0.08), ("centroid", 0.2)))
    }
    recall = [r for r in rows if (r["metric"], r["k"]) == ("recall", 10)]
    assert [(r["variant"], r["against"], r["slice"]) for r in recall] == [
        (a, b, part)
        for a, b in (("gaussian", "popularity"), ("centroid", "popularity"), ("centroid", "gaussian"))
        for part in ("all", "cold", "head", "tail")
    ]
    for row in recall:
        of = np.array([row["slice"] == "all" or target in SLICES[row["slice"]] for target in targets])
        ours, theirs = hits[row["variant"]][of], hits[row["against"]][of]
        won, lost = int((ours & ~theirs).sum()), int((theirs & ~ours).sum())
        assert row["users"] == of.sum()
        assert row["value"] == pytest.approx(ours.mean())
        assert row["difference"] == pytest.approx(ours.mean() - theirs.mean())
        gain = 100 * (ours.mean() / theirs.mean() - 1) if theirs.any() else None
        assert row["relative_percent"] == (None if gain is None else pytest.approx(gain))
        assert row["p"] == pytest.approx(stats.binomtest(won, won + lost).pvalue if won + lost else 1.0, rel=1e-6)
        deviation = (ours.astype(float) - theirs).std(ddof=1)
        assert row["detectable"] == pytest.approx((1.959964 + 0.841621) * deviation / np.sqrt(of.sum()), rel=1e-5)
    for family in ([r for r in recall if r["slice"] == "all"], [r for r in recall if r["slice"] != "all"]):
        p = np.array([row["p"] for row in family])
        order = np.argsort(p)
        adjusted = np.minimum(np.maximum.accumulate(p[order] * np.arange(len(p), 0, -1)), 1.0)
        assert np.array([row["p_holm"] for row in family])[order] == pytest.approx(adjusted, rel=1e-6)
    assert {len([r for r in recall if (r["slice"] == "all") == whole]) for whole in (True, False)} == {3, 9}
    # What stands in the main table does not depend on whether the slices are asked for.
    assert compare(variants, "gaussian") == [row for row in rows if row["slice"] == "all"]
    tables = {(t["name"], t["slice"]): t for t in matrices(rows, 10)}
    assert list(tables)[:3] == [("Recall@10", "all"), ("NDCG@10", "all"), ("Recall@10", "cold")]
    assert tables["Recall@10", "head"]["users"] == f"{targets.count('head'):,}"
    assert (tables["Recall@10", "all"]["comparisons"], tables["Recall@10", "head"]["comparisons"]) == (3, 9)


def test_a_slice_of_one_user_has_no_row(tmp_path: Path) -> None:
    targets = ["cold", "head", "tail", "head"]
    variants = [variant(tmp_path, n, 0, {MODEL: places}, targets=targets) for n, places in
                (("a", [1, 0, 1, 0]), ("b", [0, 2, 0, 1]))]  # fmt: skip
    rows = [row for row in compare(variants, slices=SLICES) if (row["metric"], row["k"]) == ("recall", 10)]
    assert [(row["slice"], row["users"], row["difference"]) for row in rows] == [
        ("all", 4, 0.0), ("head", 2, 1.0), ("tail", 2, -1.0),
    ]  # fmt: skip
    assert [row["relative_percent"] for row in rows] == [0.0, None, -100.0]


def two(tmp_path: Path, first: list[str], second: list[str], **told: int) -> list[Variant]:
    """Variants a and b, evaluated with these targets; their metrics tell so many users of each slice."""
    return [
        variant(tmp_path, name, 0, {MODEL: [1, 0, 2]}, targets=targets, metadata=told)
        for name, targets in (("a", first), ("b", second))
    ]


def given(lineage: str = "1" * 64) -> Artifact:
    return Artifact(Path(), "interactions/v1", "prepare", lineage, {}, {}, {})


HEAD, TAIL = ["head", "head", "tail"], ["head", "tail", "tail"]


@pytest.mark.parametrize("slices", [SLICES, {}])
@pytest.mark.parametrize("told", [{}, {"head_users": 2}, {"head_users": 3}])
def test_runs_with_other_targets_are_refused(
    tmp_path: Path, slices: dict[str, frozenset[str]], told: dict[str, int]
) -> None:
    """Whatever the slices of the given interactions say of either run: the users are not the same."""
    runs = two(tmp_path, HEAD, TAIL, **told)
    for variants in (runs, runs[::-1]):
        with pytest.raises(
            ArtifactError, match=r"user 'u0001' has the target '(?:head|tail)' in variant '[ab]', seed 0"
        ):
            compare(variants, slices=slices_to_test(variants, slices, given())[0])


def test_slices_that_a_run_was_not_evaluated_with_are_left_out_and_told(tmp_path: Path) -> None:
    same = two(tmp_path / "same", HEAD, HEAD, head_users=2, tail_users=1, cold_users=0)
    for v in same:
        assert v.metrics is not None
        v.metrics.lineage[given().digest] = {}
    assert slices_to_test(same, SLICES, given()) == (SLICES, "")
    assert {row["slice"] for row in compare(same, slices=SLICES)} == {"all", "head"}
    slices, told = slices_to_test(same, SLICES, given("2" * 64))
    assert slices == SLICES
    assert told == (
        "The slices are those of the given interactions; a and b had others, with as many users in each slice."
    )
    slices, told = slices_to_test(two(tmp_path / "other", HEAD, HEAD, head_users=3), SLICES, given())
    assert slices == {}
    assert "a, seed 0, was evaluated with 3 head users, and by the given interactions 2 are" in told


def test_the_page_tells_why_slices_are_not_tested(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shared = shared_data(tmp_path)
    data = [str(tmp_path / name) for name in ("catalog", "interactions", "ids")]
    paths = variant_artifacts(tmp_path, shared, "<i>cut", 0, 0.06, metadata={"head_users": 1000})
    report(*([path] for path in paths), *data, str(tmp_path / "out"))
    assert {r["slice"] for r in pq.read_table(tmp_path / "out" / "comparisons.parquet").to_pylist()} == {"all"}
    html = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert "No tests by slice: &lt;i&gt;cut, seed 0, was evaluated with 1000 head users, and by the given" in html
    assert "No tests by slice" not in capsys.readouterr().err


def test_a_single_run_is_compared_with_its_baselines_and_told_what_could_be_detected(tmp_path: Path) -> None:
    """As `train` reports: one variant, one seed. The slices are those that the interactions give, recounted here."""
    shared = shared_data(tmp_path)
    metrics, recommendations, diagnostics = variant_artifacts(tmp_path, shared, "model", 0, 0.06)
    data = [str(tmp_path / name) for name in ("catalog", "interactions", "ids")]
    made = report([metrics], [recommendations], [diagnostics], *data, str(tmp_path / "out"))
    rows = pq.read_table(tmp_path / "out" / "comparisons.parquet").to_pylist()
    assert {(row["variant"], row["against"], row["baseline"]) for row in rows} == {
        ("model", "popularity", True), ("model", "neighbours", True),
    }  # fmt: skip
    counts = Counter(
        item
        for row in shared["interactions"].read_table("interactions.parquet").to_pylist()
        for item in row["item_ids"][: row["train_length"]]
    )
    ids = shared["catalog"].read_table("catalog.parquet")["item_id"].to_pylist()
    head = set(sorted(ids, key=lambda item: (-counts[item], item))[: -(-len(ids) // 5)])
    lists = pq.read_table(Path(recommendations) / "recommendations.parquet").to_pylist()
    places: dict[str, list[tuple[str, str, bool]]] = {MODEL: [], "popularity": [], "neighbours": []}
    for row in lists:
        places[row["recommender"]].append((row["user_id"], row["target_id"], row["target_id"] in row["item_ids"]))
    for part, belongs in (
        ("all", lambda item: True),
        ("cold", lambda item: counts[item] <= 1),
        ("head", lambda item: item in head),
        ("tail", lambda item: item not in head),
    ):
        found = {r: {u: hit for u, item, hit in of if belongs(item)} for r, of in places.items()}
        users = sorted(found[MODEL])
        row = row_of(rows, "model", "popularity", part=part)
        assert row["users"] == len(users)
        differences = np.array([float(found[MODEL][u]) - float(found["popularity"][u]) for u in users])
        assert row["difference"] == pytest.approx(differences.mean())
        error = differences.std(ddof=1) / np.sqrt(len(users))
        assert row["detectable"] == pytest.approx((1.959964 + 0.841621) * error, rel=1e-5)
    html = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    detectable = row_of(rows, "model", "popularity")["detectable"]
    assert f"<small>detectable {rate(detectable)}</small>" in html
    assert f"popularity (detectable {rate(detectable, 3)})" in made["verdict"]
    assert "Differences in Recall@10, head, paired over" in html


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
    assert {(row["seeds"], row["against_seeds"]) for row in rows} == {(2, 2)}  # the baselines of each seed are others
    with (tmp_path / "out" / "comparisons.csv").open(newline="", encoding="utf-8") as stream:
        read = list(csv.DictReader(stream))
    assert list(read[0]) == COLUMNS.names
    assert [float(row["p_holm"]) for row in read] == [row["p_holm"] for row in rows]
    html = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert "Differences in Recall@10, paired over 40 users" in html
    assert "Differences in NDCG@10" in html
    assert "<small>inconclusive</small>" in html
    assert "<small>detectable ." in html
