"""The report's curves as rows: what training logged by optimizer step, the headline metric by epochs of grounding.

The page draws these rows, and curves.csv and curves.parquet hold them.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from sidgraft import results, variants
from sidgraft.results import MODEL, Variant

DECIDING = ("recall@5", "ndcg@5")  # validation figures of which a run has one, that of its best epoch
FIGURES = ("loss", "recall@5", "recall@10", "ndcg@5", "ndcg@10")

COLUMNS = pa.schema(
    [
        ("variant", pa.string()),  # of stage evaluate without its depth: centroid+cpt of centroid+cpt@4
        ("seed", pa.int64()),
        ("stage", pa.string()),  # ground or finetune: figures of its training log; evaluate: the headline metric
        ("step", pa.int64()),  # optimizer steps taken, a warm-up on a grounding corpus included; null for evaluate
        ("epoch", pa.float64()),  # passes that these are; for evaluate, those of grounding
        ("figure", pa.string()),  # loss, or Recall or composite NDCG of the validation part, such as recall@5
        ("value", pa.float64()),
        ("is_t_star", pa.bool_()),  # whether the weights after this step of finetune were kept
    ]
)


def rows(given: list[Variant]) -> list[dict[str, Any]]:
    """Return the rows of COLUMNS: the training of each variant in the given order, then the depths of grounding."""
    measured = [v for v in given if v.metrics is not None]
    return [row for v in given for row in training(v)] + depths(measured, results.headline_k(measured))


def training(variant: Variant) -> list[dict[str, Any]]:
    """Return the rows of a variant's ground and finetune, in the order of their logs."""
    record = variant.geometry.get("training") or {}
    made = []
    for stage in ("ground", "finetune"):
        log = [entry for entry in record.get(stage) or [] if entry.get("step") is not None]
        kept = _kept_step(log) if stage == "finetune" and record.get("t_star") is not None else None
        for entry in log:
            step, epoch = entry["step"], entry.get("epoch")
            at = (step, None if epoch is None else float(epoch))
            found = [name for name in FIGURES if entry.get(name) is not None]
            made += [_row(variant.name, variant.seed, stage, *at, name, entry[name], step == kept) for name in found]
    return made


def depths(measured: list[Variant], k: int) -> list[dict[str, Any]]:
    """Return a row for each run of a variant such as centroid+cpt@4: its headline metric at k over all users."""
    metric = results.headline(measured)
    made = []
    for v in measured:
        found, cell = variants.depth(v.name), v.cells[MODEL].get(("all", metric, k))
        if found and cell and cell[0] is not None:
            name, epoch = found
            made.append(_row(name, v.seed, "evaluate", None, float(epoch), f"{metric}@{k}", cell[0], False))
    return made


def points(of: list[dict[str, Any]], stage: str, *figures: str) -> list[tuple[float, float]]:
    """Return (step, value) of the rows with this stage and one of these figures."""
    return [(row["step"], row["value"]) for row in of if row["stage"] == stage and row["figure"] in figures]


def _kept_step(log: list[dict[str, Any]]) -> int | None:
    """The step with the best deciding figure, the earliest of equals.

    Not looked up by t*, which counts steps from 0 and leaves a warm-up out, as the papers do; the log does neither.
    """
    figures = [(entry[name], entry["step"]) for name in DECIDING for entry in log if entry.get(name) is not None]
    return max(figures, key=lambda pair: pair[0], default=(0.0, None))[1]


def _row(
    variant: str, seed: int, stage: str, step: int | None, epoch: float | None, figure: str, value: float, kept: bool
) -> dict[str, Any]:
    return dict(zip(COLUMNS.names, (variant, seed, stage, step, epoch, figure, float(value), kept), strict=True))
