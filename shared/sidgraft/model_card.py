"""The README of a published bundle: what it is, how good it is, what made it."""

from __future__ import annotations

from typing import Any

import sidgraft
from sidgraft.artifacts import Artifact

USE = """```
sidgraft recommend --bundles BUNDLES --version {version} --histories histories.parquet --out recommendations
```

`model/` loads with `AutoModelForCausalLM` and `AutoTokenizer`; `semantic_ids/` holds the IDs of the items and the
quantizer that gives new items theirs."""


def model_card(version: str, parts: dict[str, Artifact], facts: dict[str, Any]) -> str:
    """Return the model card as Markdown; ``parts`` are the bundle's artifacts, ``facts`` its own metadata."""
    figures = parts["metrics"].read_table("metrics.parquet").to_pylist()
    overall = [row for row in figures if row["slice"] == "all" and row["metric"] in ("recall", "ndcg")]
    lines = [
        f"# Recommender {version}",
        "",
        f"A language model that recommends {facts['items']} items by their Semantic IDs, published by sidgraft"
        f" {sidgraft.__version__}.",
        "",
        USE.format(version=version),
        "",
        "## What it is made of",
        "",
        *_table(("what", "value"), [(name.replace("_", " "), value) for name, value in facts.items()]),
        "",
        "## Quality",
        "",
        *_table(
            ("recommender", "metric", "value", "95 % interval"),
            [(r["recommender"], f"{r['metric']}@{r['k']}", _number(r["value"]), _interval(r)) for r in overall],
        ),
        "",
        "## Settings",
        "",
        *_table(("stage", "setting", "value"), _settings(parts)),
    ]
    return "\n".join(lines) + "\n"


def _settings(parts: dict[str, Artifact]) -> list[tuple[Any, ...]]:
    lineage: dict[str, dict[str, Any]] = {}
    for part in parts.values():
        lineage |= part.lineage
    rows = {
        (entry["stage"], name, str(value)) for entry in lineage.values() for name, value in entry["arguments"].items()
    }
    return sorted(rows)


def _table(head: tuple[str, ...], rows: list[tuple[Any, ...]]) -> list[str]:
    def line(cells: tuple[Any, ...]) -> str:
        return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    return [line(head), "|" + "---|" * len(head), *map(line, rows)]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _interval(row: dict[str, Any]) -> str:
    return "-" if row["low"] is None else f"{row['low']:.4f} to {row['high']:.4f}"
