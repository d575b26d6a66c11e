"""What a person sees of a local run: one line a stage, the running stage's progress, the figures at the end."""

import re
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from shutil import get_terminal_size
from typing import Any, TextIO

import pyarrow.parquet as pq

SECONDS_BETWEEN_LINES = 15.0  # of progress, where the output is not a terminal

# A line of sidgraft.progress.Progress: what, done/total, unit, share.
PROGRESS = re.compile(r"^\S.*?  \d+/\d+ \S+  \d+%  .*$")

# What a stage says that a person should see at once; the rest of it is in the log.
NOTE = re.compile(
    r"^(epoch \d|SASRec: best|resuming from the checkpoint|embed: \S+ texts were longer|expand: scale=\S+ is left out"
    r"|watch: |publish: )"
)

HEADLINES = ("recall", "precision_strict")  # of users with a target each; of queries with graded candidates

# The rows of the comparison after the variants' models.
BASELINES = ("popularity", "neighbours", "query-neighbours", "co-occurrence", "sasrec")

# The figures of a stage's summary that its line shows, where it has them.
FIGURES = {
    "prepare": ("users", "items", "interactions", "queries", "judgements"),
    "embed": ("items", "width", "encoder"),
    "quantize": ("collision_rate", "relative_squared_error", "utilisation_level_0"),
    "expand": ("initialization", "n_new", "new_rows_norm", "base_rows_norm"),
    "ground": ("corpus", "steps", "first_loss", "last_loss"),
    "finetune": ("best_recall@5", "best_ndcg@5", "best_epoch", "t_star"),
    "baselines": tuple(f"{name}_{figure}@10" for name in BASELINES for figure in HEADLINES),
    "evaluate": tuple(f"{name}_{figure}@10" for name in ("model", *BASELINES) for figure in HEADLINES),
    "diagnose": ("effective_rank_fine_tuning", "rsa_pearson", "purity"),
    "report": ("variants", "failed"),
    "watch": ("decision", "new_items", "changed_items", "gone_items"),
    "extend": ("encoded", "kept", "retired", "collision_rate", "relative_squared_error"),
    "publish": ("published", "version", "previous"),
}

# Figures that are shown only where they are not zero.
LOSSES = {"prepare": ("interactions_dropped", "judgements_dropped", "queries_dropped")}

# The columns of the comparison, (metric, slice) each, with their headings: for users with a target each, and for
# queries with graded candidates.
BY_TARGET = {
    ("recall", "all"): "Recall@{k}", ("ndcg", "all"): "NDCG@{k}",
    ("recall", "cold"): "cold", ("recall", "head"): "head", ("recall", "tail"): "tail",
}  # fmt: skip
BY_GRADE = {
    ("precision_strict", "all"): "strict@{k}", ("precision_lenient", "all"): "lenient@{k}",
    ("composite_ndcg", "all"): "NDCG@{k}",
}  # fmt: skip


@dataclass
class Console:
    """Writes to one stream: permanent lines, and on a terminal one line that is overwritten."""

    stream: TextIO = field(default_factory=lambda: sys.stdout)
    started: float = field(default_factory=time.monotonic)
    printed: float = 0.0
    drawn: bool = False

    def line(self, text: str = "") -> None:
        """Print a line that stays."""
        self._wipe()
        print(text, file=self.stream, flush=True)
        self.printed = time.monotonic()

    def progress(self, text: str) -> None:
        """Show what the running stage does: on the overwritten line, or now and then as a line of its own."""
        if self.stream.isatty():
            self._wipe()
            width = get_terminal_size().columns - 1
            print(text[:width], end="", file=self.stream, flush=True)
            self.drawn = True
        elif time.monotonic() - self.printed > SECONDS_BETWEEN_LINES:
            self.line(text)

    def _wipe(self) -> None:
        if self.drawn:
            print("\r\x1b[K", end="", file=self.stream)
            self.drawn = False


def stage_line(who: str, text: str, seconds: float | None = None) -> str:
    """Return the line of a finished stage: its name, in a study with the variant, its time, what it did."""
    took = "" if seconds is None else clock(seconds)
    return f"  {took:>7}  {who:<22}  {text}"


def key_figures(stage: str, summary: dict[str, Any]) -> str:
    """Return the figures of a summary that say most about the stage."""
    names = [name for name in FIGURES.get(stage, ()) if name in summary]
    names += [name for name in LOSSES.get(stage, ()) if summary.get(name)]
    return ", ".join(f"{name.replace('_', ' ')} {_figure(summary[name])}" for name in names) or "done"


def clock(seconds: float) -> str:
    """Return minutes and seconds, with hours where needed: 0:07, 12:30, 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def comparison(metrics: Path, order: Sequence[str] = ()) -> list[str]:
    """Return the table of a run as lines: each variant's model beside the baselines, means over seeds.

    The models come in the given ``order`` of variants, then the known baselines, then other recommenders.
    Recall and NDCG over all users and the recall of cold, head and tail targets, or precision and NDCG over queries
    with graded candidates, at the largest k up to 10.
    """
    rows = pq.read_table(metrics).to_pylist()
    if not rows:
        return ["no variant has metrics."]
    graded = any(row["metric"] == "precision_strict" for row in rows)
    ks = sorted({row["k"] for row in rows if row["metric"] in ("recall", "precision_strict")})
    k = max([k for k in ks if k <= 10] or ks)
    columns = BY_GRADE if graded else BY_TARGET
    values: dict[tuple[str, str], dict[tuple[str, str], list[float]]] = {}
    for row in rows:
        cell = (row["metric"], row["slice"])
        if row["k"] == k and cell in columns and row["value"] is not None:
            values.setdefault(_name(row), {}).setdefault(cell, []).append(row["value"])
    width = max(14, *(len(variant) for variant, _ in values)) + 2
    head = [heading.format(k=k) for heading in columns.values()]
    alone = len({variant for variant, recommender in values if recommender == "model"}) == 1
    lines = [" " * width + "".join(f"{name:>11}" for name in head)]
    for (variant, recommender), cells in sorted(values.items(), key=lambda entry: _rank(entry[0], order)):
        name = recommender if alone or not variant else variant
        shown = [cells.get(column) for column in columns]
        lines.append(f"{name:<{width}}" + "".join(f"{_mean(v):>11}" for v in shown))
    lines.append(
        "(strict, lenient: Precision, good alone or maybe too; NDCG by grades; intervals are in the report)"
        if graded
        else f"(cold, head, tail: Recall@{k} where the target is such an item; intervals are in the report)"
    )
    return lines


def _name(row: dict[str, Any]) -> tuple[str, str]:
    """The baselines do not depend on the variant: one line for all."""
    return (row["variant"], "model") if row["recommender"] == "model" else ("", row["recommender"])


def _rank(name: tuple[str, str], order: Sequence[str]) -> tuple[bool, int]:
    """Models before recommenders that belong to no variant; both in their order, unknown ones after."""
    variant, recommender = name
    place, places = (variant, order) if variant else (recommender, BASELINES)
    return not variant, places.index(place) if place in places else len(places)


def _mean(values: list[float] | None) -> str:
    return f"{sum(values) / len(values):.4f}" if values else "-"


def _figure(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
