"""The console: the comparison at the end, and that it knows a progress line when it sees one."""

import io
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines.console import PROGRESS, Console, clock, comparison
from sidgraft import artifacts, progress


def row(recommender, metric, value, *, variant="centroid", seed=0, slice="all", k=10):
    return {
        "variant": variant,
        "seed": seed,
        "recommender": recommender,
        "slice": slice,
        "metric": metric,
        "k": k,
        "value": value,
        "low": None,
        "high": None,
    }


def written(tmp_path, rows):
    schema = artifacts.SCHEMAS["metrics/v1"]["metrics.parquet"]
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), tmp_path / "metrics.parquet")
    return comparison(tmp_path / "metrics.parquet")


def test_one_variant_stands_beside_the_baselines(tmp_path):
    lines = written(
        tmp_path,
        [
            row("model", "recall", 0.5),
            row("model", "recall", 0.9, k=50),
            row("model", "ndcg", 0.25),
            row("model", "recall", 0.125, slice="cold"),
            row("popularity", "recall", 0.0625),
            row("popularity", "recall", None, slice="cold"),
        ],
    )
    assert lines[0].split() == ["Recall@10", "NDCG@10", "cold", "head", "tail"]
    assert lines[1].split() == ["model", "0.5000", "0.2500", "0.1250", "-", "-"]
    assert lines[2].split() == ["popularity", "0.0625", "-", "-", "-", "-"]


def test_variants_have_names_and_seeds_are_averaged(tmp_path):
    lines = written(
        tmp_path,
        [
            row("model", "recall", 0.5, variant="mean", seed=0),
            row("model", "recall", 0.25, variant="mean", seed=1),
            row("popularity", "recall", 0.125, variant="mean"),
            row("model", "recall", 0.75, variant="gaussian+gti"),
            row("popularity", "recall", 0.125, variant="gaussian+gti"),
        ],
    )
    assert [line.split()[:2] for line in lines[1:4]] == [
        ["mean", "0.3750"],
        ["gaussian+gti", "0.7500"],
        ["popularity", "0.1250"],
    ]


def test_progress_lines_of_the_library_are_recognized(capsys, monkeypatch):
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LINES", -1.0)
    with progress.Progress("embed", 20, "items") as bar:
        bar.update(5, loss=2.3125)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(PROGRESS.match(line) for line in lines)
    assert not PROGRESS.match("[KFP Executor 2026-01-01 00:00:00,000 INFO]: Looking for component `embed`")


def test_progress_is_not_repeated_every_second_in_a_file():
    stream = io.StringIO()
    console = Console(stream)
    console.line("first")
    for _ in range(5):
        console.progress("working")
    assert stream.getvalue() == "first\n"


def test_progress_is_one_line_on_a_terminal():
    stream = io.StringIO()
    stream.isatty = lambda: True
    console = Console(stream)
    console.progress("working 1")
    console.progress("working 2")
    console.line("done")
    last = re.split(r"\r\x1b\[K", stream.getvalue())
    assert last == ["working 1", "working 2", "done\n"]


@pytest.mark.parametrize(("seconds", "text"), [(0.4, "0:00"), (59.6, "1:00"), (75, "1:15"), (3723, "1:02:03")])
def test_clock(seconds, text):
    assert clock(seconds) == text
