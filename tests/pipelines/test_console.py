"""The console: the comparison at the end, and that it knows a progress line when it sees one."""

import io
import json
import re
from types import SimpleNamespace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipelines import local
from pipelines.console import NOTE, PROGRESS, Console, clock, comparison, key_figures
from sidgraft import artifacts, progress, tasks


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


def written(tmp_path, rows, order=()):
    schema = artifacts.SCHEMAS["metrics/v1"]["metrics.parquet"]
    pq.write_table(pa.Table.from_pylist(rows, schema=schema), tmp_path / "metrics.parquet")
    return comparison(tmp_path / "metrics.parquet", order)


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


@pytest.mark.parametrize("order", [["mean", "gaussian", "centroid"], ["gaussian", "centroid", "mean"], []])
def test_models_come_in_the_order_of_the_study_then_the_baselines(tmp_path, order):
    stored = ["centroid", "gaussian", "mean"]  # the metrics hold them in an order of their own
    rows = [row(r, "recall", 0.5, variant=v) for v in stored for r in ("other", "neighbours", "popularity", "model")]
    lines = written(tmp_path, rows, order)
    assert [line.split()[0] for line in lines[1:-1]] == [*(order or stored), "popularity", "neighbours", "other"]


def test_lost_interactions_are_shown_where_there_are_any():
    summary = {"users": 10, "items": 5, "interactions": 60, "interactions_dropped": 0}
    assert key_figures("prepare", summary) == "users 10, items 5, interactions 60"
    dropped = key_figures("prepare", summary | {"interactions_dropped": 1234})
    assert dropped == "users 10, items 5, interactions 60, interactions dropped 1,234"


def shown(lines, progress):
    """What the console shows of these lines of a worker, and what its log holds."""
    stream, log = io.StringIO(), io.StringIO()
    worker = SimpleNamespace(stdout=[f"{line}\n" for line in lines])
    local._follow(worker, log, progress, Console(stream))
    return stream.getvalue().splitlines(), log.getvalue().splitlines()


def test_notes_of_a_stage_reach_the_console_and_the_rest_the_log_alone():
    done = tasks.EVENT + json.dumps({"event": "done", "stage": "finetune", "seconds": 1, "summary": {"t_star": 7}})
    epoch = "epoch 1, step 7: validation Recall@5 0.0500, Recall@10 0.1000"
    lines = ["fine-tuning on 700 users, 120 tokens each, on average", epoch, "a word of a package", done]
    on_console, in_log = shown(lines, local.Progress([], running="finetune"))
    assert [line.split() for line in on_console] == [
        ["finetune", *epoch.split()],
        ["0:00", "finetune", "t", "star", "7"],
    ]
    assert in_log == lines


def test_what_the_library_says_of_note_is_recognized(tmp_path, capsys, monkeypatch):
    from sidgraft import validation
    from sidgraft.checkpoints import WHOLE, Checkpoints
    from sidgraft.stages import embed, expand

    found = SimpleNamespace(items_UG=np.array([[1, 2]]))
    monkeypatch.setattr(validation, "decode", lambda *_, **__: found)
    monkeypatch.setattr(validation, "save_best", lambda *_: None)
    settings = {"beams": 10, "patience": 1, "autocast": None, "best": tmp_path}
    validate = validation.ValidateEachEpoch(None, None, [None], validation.recall_of([2], [5, 10]), **settings)
    state = SimpleNamespace(global_step=7, epoch=1.0, log_history=[])
    model = SimpleNamespace(eval=lambda: None, train=lambda: None, parameters=list)
    validate.on_epoch_end(None, state, SimpleNamespace(), model=model)
    embed._tell({"items": 1200, "width": 384, "encoder": "e", "texts_truncated": 1200, "max_tokens": 256})
    expand._checked_scale("mean", "match")
    (tmp_path / "checkpoint-5").mkdir()
    (tmp_path / "checkpoint-5" / WHOLE).write_text("{}")
    Checkpoints(tmp_path, {}, 10.0).last()
    noted = [line.split()[0] for line in capsys.readouterr().err.splitlines() if NOTE.match(line)]
    assert noted == ["epoch", "embed:", "expand:", "resuming"]


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
