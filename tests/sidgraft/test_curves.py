"""The rows of curves.csv: from training.json files written by hand to the report, t* where the weights were kept."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from report_artifacts import shared_data, variant_artifacts

from sidgraft import artifacts, curves, page
from sidgraft.artifacts import Artifact
from sidgraft.results import MODEL, Variant
from sidgraft.stages.diagnose import _training
from sidgraft.stages.report import report

# Two steps an epoch, and a warm-up of one epoch before fine-tuning. Step 6 is the best. t* counts it from 0 and without
# the warm-up, 3; step 4 is nearer to that number, and step 8 is as good, but later.
GROUND = [
    {"step": 1, "epoch": 0.5, "loss": 3.0, "grad_norm": 1.0, "learning_rate": 0.001},
    {"step": 2, "epoch": 1.0, "loss": 2.5},
    {"step": 3, "epoch": 1.5, "loss": 2.25},
]
FINETUNE = [
    {"step": 1, "epoch": 0.5, "loss": 2.0, "grad_norm": 1.0, "learning_rate": 0.001},
    {"step": 2, "epoch": 1.0, "loss": 1.5},
    {"step": 3, "epoch": 1.5, "loss": 1.25},
    {"step": 4, "epoch": 2.0, "loss": 1.0},
    {"step": 4, "epoch": 2.0, "recall@5": 0.1, "recall@10": 0.5},
    {"step": 6, "epoch": 3.0, "loss": 0.75},
    {"step": 6, "epoch": 3.0, "recall@5": 0.1 / 3 + 0.1, "recall@10": 0.2},
    {"step": 8, "epoch": 4.0, "recall@5": 0.1 / 3 + 0.1, "recall@10": 0.3},
]


def training(root: Path, log: list[dict[str, Any]], t_star: int | None, rows_epoch: int = -1) -> dict[str, Any]:
    """What diagnose hands on of two training.json files."""
    made = []
    for stage, content in (("ground", {"log": GROUND}), ("finetune", {"log": log, "t_star": t_star, "best_epoch": 2})):
        (root / stage).mkdir(parents=True)
        (root / stage / "training.json").write_text(json.dumps(content))
        made.append(Artifact(root / stage, "", stage, "", {"rows_epoch": rows_epoch}, {}, {}))
    return _training(*made)


def run(root: Path, variants: list[tuple[str, str, str]]) -> tuple[list[tuple], list[list[str]]]:
    """The table as Parquet and as CSV, without its header."""
    metrics, recommendations, diagnostics = map(list, zip(*variants, strict=True))
    report(metrics, recommendations, diagnostics, *(str(root / n) for n in ("catalog", "interactions", "ids")),
           str(root / "out"))  # fmt: skip
    table = pq.read_table(root / "out" / "curves.parquet")
    assert table.schema == curves.COLUMNS
    with (root / "out" / "curves.csv").open(newline="", encoding="utf-8") as stream:
        header, *lines = csv.reader(stream)
    assert header == curves.COLUMNS.names
    return [tuple(row.values()) for row in table.to_pylist()], lines


def test_the_rows_are_those_of_the_training_logs(tmp_path: Path) -> None:
    shared = shared_data(tmp_path)
    record = training(tmp_path / "hand", FINETUNE, t_star=6 - 2 - 1, rows_epoch=1)
    rows, lines = run(tmp_path, [variant_artifacts(tmp_path, shared, "mean+cpt@1", 3, 0.05, training=record)])
    third = 0.1 / 3 + 0.1
    expected = [
        ("ground", 1, 0.5, "loss", 3.0, False), ("ground", 2, 1.0, "loss", 2.5, False),  # no rows behind epoch 1
        ("finetune", 1, 0.5, "loss", 2.0, False), ("finetune", 2, 1.0, "loss", 1.5, False),
        ("finetune", 3, 1.5, "loss", 1.25, False), ("finetune", 4, 2.0, "loss", 1.0, False),
        ("finetune", 4, 2.0, "recall@5", 0.1, False), ("finetune", 4, 2.0, "recall@10", 0.5, False),
        ("finetune", 6, 3.0, "loss", 0.75, True),
        ("finetune", 6, 3.0, "recall@5", third, True), ("finetune", 6, 3.0, "recall@10", 0.2, True),
        ("finetune", 8, 4.0, "recall@5", third, False), ("finetune", 8, 4.0, "recall@10", 0.3, False),
    ]  # fmt: skip
    by_step = [row for row in rows if row[2] != "evaluate"]
    assert by_step == [("mean+cpt@1", 3, *row) for row in expected]
    assert rows[len(by_step) :] == [("mean+cpt", 3, "evaluate", None, 1.0, "recall@10", 0.05, False)]
    assert [parsed(*line) for line in lines] == rows  # to the last digit


def parsed(variant, seed, stage, step, epoch, figure, value, is_t_star) -> tuple:
    kept = {"True": True, "False": False}[is_t_star]
    return variant, int(seed), stage, int(step) if step else None, float(epoch), figure, float(value), kept


def test_the_page_marks_the_same_step(tmp_path: Path) -> None:
    variant = Variant("mean", 0, geometry={"training": training(tmp_path, FINETUNE, t_star=3)}, label="mean")
    charts = dict(page.training([variant])["charts"])
    assert "t* = 6<" in charts["Validation Recall@5"]
    assert "t* = 4<" not in charts["Validation Recall@5"]


def test_queries_are_validated_by_their_ndcg(tmp_path: Path) -> None:
    log = [{"step": n, "epoch": n, "ndcg@5": x, "ndcg@10": 1 - x} for n, x in ((1, 0.2), (2, 0.4), (3, 0.3))]
    variant = Variant("mean", 0, geometry={"training": training(tmp_path, log, t_star=1)}, label="mean")
    rows = [tuple(row.values())[3:] for row in curves.training(variant) if row["stage"] == "finetune"]
    assert rows == [
        (1, 1.0, "ndcg@5", 0.2, False), (1, 1.0, "ndcg@10", 0.8, False),
        (2, 2.0, "ndcg@5", 0.4, True), (2, 2.0, "ndcg@10", 0.6, True),
        (3, 3.0, "ndcg@5", 0.3, False), (3, 3.0, "ndcg@10", 0.7, False),
    ]  # fmt: skip


@pytest.mark.parametrize("record", [{}, {"ground": [], "finetune": [], "t_star": None}])
def test_without_a_log_there_are_no_rows(record: dict[str, Any]) -> None:
    assert curves.training(Variant("mean", 0, geometry={"training": record} if record else {})) == []


def test_depths_of_grounding_have_a_row_for_each_seed_and_no_other_variant_has_one() -> None:
    def measured(name: str, seed: int, recall: float | None) -> Variant:
        return Variant(name, seed, cells={MODEL: {("all", "recall", 10): (recall, None, None)}})

    given = [measured("centroid+cpt@4", 0, 0.3), measured("centroid+cpt@4", 1, 0.4), measured("mean+cpt@0", 0, 0.1),
             measured("centroid+cpt@1+lc-rec", 0, 0.2), measured("centroid", 0, 0.9),
             measured("mean+cpt@8", 0, None)]  # fmt: skip
    rows = [tuple(row.values()) for row in curves.depths(given, 10)]
    assert rows == [
        ("centroid+cpt", 0, "evaluate", None, 4.0, "recall@10", 0.3, False),
        ("centroid+cpt", 1, "evaluate", None, 4.0, "recall@10", 0.4, False),
        ("mean+cpt", 0, "evaluate", None, 0.0, "recall@10", 0.1, False),
        ("centroid+cpt+lc-rec", 0, "evaluate", None, 1.0, "recall@10", 0.2, False),
    ]


def test_the_training_of_a_quantizer_stands_first_and_belongs_to_no_variant(tmp_path: Path) -> None:
    log = [
        {"step": 50, "epoch": 2, "held_out_error": 0.5, "collision_rate": 0.25, "utilisation": [1.0, 0.75],
         "perplexity": [3.5, 2.0], "loss": 9.0},
        {"step": 100, "epoch": 4, "held_out_error": 0.25, "collision_rate": 0.5, "utilisation": [0.5, 1.0],
         "perplexity": [4.0, 3.0], "loss": 8.0},
    ]  # fmt: skip
    (tmp_path / "training.json").write_text(json.dumps({"log": log, "best_step": 100}))
    ids = Artifact(tmp_path, "", "quantize", "", {}, {}, {})
    variant = Variant("mean", 0, geometry={"training": training(tmp_path / "hand", FINETUNE, t_star=3)})
    rows = [tuple(row.values()) for row in curves.rows([variant], ids)]
    assert rows[:12] == [
        (None, None, "quantize", *at, name, value, kept)
        for at, kept, values in (
            ((50, 2.0), False, (0.5, 0.25, 1.0, 0.75, 3.5, 2.0)),
            ((100, 4.0), True, (0.25, 0.5, 0.5, 1.0, 4.0, 3.0)),
        )
        for name, value in zip(
            ("held_out_error", "collision_rate", "utilisation_level_1", "utilisation_level_2", "perplexity_level_1",
             "perplexity_level_2"), values, strict=True,
        )
    ]  # fmt: skip
    assert rows[12:] == [tuple(row.values()) for row in curves.training(variant)]
    (tmp_path / "training.json").unlink()
    assert curves.rows([variant], ids) == curves.training(variant)


def test_a_failed_variant_has_no_rows_and_the_files_stand_nevertheless(tmp_path: Path) -> None:
    shared_data(tmp_path)
    kinds = ("metrics", "recommendations", "diagnostics")
    for kind in kinds:
        artifacts.record_failure(tmp_path / f"bad-{kind}", f"{kind}/v1", stage="ground", error="no", variant="mean")
    assert run(tmp_path, [tuple(str(tmp_path / f"bad-{kind}") for kind in kinds)]) == ([], [])  # type: ignore[list-item]
