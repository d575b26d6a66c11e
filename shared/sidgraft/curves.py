"""The report's curves as rows: what training logged by step, the headline metric by epochs of grounding.

The page draws these rows, and curves.csv and curves.parquet hold them.
"""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from sidgraft import results, variants
from sidgraft.artifacts import Artifact
from sidgraft.results import MODEL, Variant

DECIDING = ("recall@5", "ndcg@5")  # validation figures of which a run has one, that of its best epoch
QUANTIZER = "training.json"  # in the artifact semantic_ids, of RQ-VAE
FIGURES = ("loss", "recall@5", "recall@10", "ndcg@5", "ndcg@10")

COLUMNS = pa.schema(
    [
        ("variant", pa.string()),  # of stage evaluate without its depth: centroid+cpt of centroid+cpt@4; see stage
        ("seed", pa.int64()),
        # ground or finetune: figures of its training log; evaluate: the headline metric; quantize: the training of the
        # quantizer (RQ-VAE), which all variants share, so that variant and seed are null
        ("stage", pa.string()),
        ("step", pa.int64()),  # optimizer steps taken, a warm-up on a grounding corpus included; null for evaluate
        ("epoch", pa.float64()),  # passes that these are; for evaluate, those of grounding
        # loss, or Recall or composite NDCG of the validation part, such as recall@5; of quantize held_out_error,
        # collision_rate, and utilisation_level_1, perplexity_level_1 and so on
        ("figure", pa.string()),
        ("value", pa.float64()),
        ("is_t_star", pa.bool_()),  # whether the weights after this step of finetune, or of quantize, were kept
    ]
)


def rows(given: list[Variant], semantic_ids: Artifact) -> list[dict[str, Any]]:
    """Return the rows of COLUMNS: the quantizer, the training of each variant as given, the depths of grounding."""
    measured = [v for v in given if v.metrics is not None]
    trained = [row for v in given for row in training(v)]
    return quantizer(semantic_ids) + trained + depths(measured, results.headline_k(measured))


def quantizer(semantic_ids: Artifact) -> list[dict[str, Any]]:
    """Return the rows of a quantizer that was trained by steps, and none of another."""
    if not (semantic_ids.path / QUANTIZER).is_file():
        return []
    record = semantic_ids.read_json(QUANTIZER)
    made = []
    for entry in record["log"]:
        figures = {name: entry[name] for name in ("held_out_error", "collision_rate")}
        for name in ("utilisation", "perplexity"):
            figures |= {f"{name}_level_{level}": value for level, value in enumerate(entry[name], 1)}
        at, kept = (entry["step"], float(entry["epoch"])), entry["step"] == record["best_step"]
        made += [_row(None, None, "quantize", *at, name, value, kept) for name, value in figures.items()]
    return made


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
    variant: str | None,
    seed: int | None,
    stage: str,
    step: int | None,
    epoch: float | None,
    figure: str,
    value: float,
    kept: bool,
) -> dict[str, Any]:
    return dict(zip(COLUMNS.names, (variant, seed, stage, step, epoch, figure, float(value), kept), strict=True))
