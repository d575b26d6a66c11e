"""The Semantic IDs that variants were judged with, side by side: the rows of quantizers.csv, a table for the page."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pyarrow as pa

from sidgraft.artifacts import Artifact

if TYPE_CHECKING:
    from sidgraft.results import Variant  # brings the page's drawing along, which evaluate has no use for

RECORD = "semantic_ids"  # in the metadata of metrics/v1: what `recorded` returns
OVERALL = ("relative_squared_error", "collision_rate", "largest_bucket", "neighbours_kept")
OF_A_LEVEL = ("codes", "mse", "utilisation", "perplexity", "prefix_neighbours")
ON_THE_PAGE = ("codes", "utilisation", "perplexity")  # of these

COLUMNS = pa.schema(
    [
        ("variant", pa.string()),
        ("seed", pa.int64()),
        ("semantic_ids", pa.string()),  # digest: the same for variants that share their IDs
        ("level", pa.int32()),  # from 1; null for a figure of all levels together
        ("figure", pa.string()),  # one of OVERALL, or of OF_A_LEVEL; each is defined in quality.json and on the page
        ("value", pa.float64()),
    ]
)


def recorded(semantic_ids: Artifact) -> dict[str, Any]:
    """Return the digest of the IDs and, where `quantize` or `extend` left them, the figures of their quality."""
    known: dict[str, Any] = {}
    if (semantic_ids.path / "quality.json").is_file():
        known = semantic_ids.read_json("quality.json")
    figures: dict[str, Any] = {name: known[name] for name in OVERALL if name in known}
    if "levels" in known:
        figures["levels"] = [{name: level[name] for name in OF_A_LEVEL if name in level} for level in known["levels"]]
    return {"digest": semantic_ids.digest} | figures


def rows(variants: list[Variant]) -> list[dict[str, Any]]:
    """Return the rows of COLUMNS, for every variant and seed whose metrics tell of their IDs."""
    made = []
    for v, record in _records(variants):
        figures = [(None, name, record[name]) for name in OVERALL if name in record]
        for number, level in enumerate(record.get("levels", []), 1):
            figures += [(number, name, level[name]) for name in OF_A_LEVEL if name in level]
        for level, name, value in figures:
            made.append(
                dict(zip(COLUMNS.names, (v.name, v.seed, record["digest"], level, name, float(value)), strict=True))
            )
    return made


def side_by_side(variants: list[Variant]) -> list[dict[str, Any]]:
    """Return an entry for each of several Semantic IDs: who has them, and their figures; nothing for a single one."""
    entries: dict[str, dict[str, Any]] = {}
    for v, record in _records(variants):
        levels = record.get("levels", [])
        entry = entries.setdefault(
            record["digest"],
            {"variants": [], "overall": [record.get(name) for name in OVERALL]}
            | {name: [level.get(name) for level in levels] for name in ON_THE_PAGE},
        )
        if v.name not in entry["variants"]:
            entry["variants"].append(v.name)
    return list(entries.values()) if len(entries) > 1 else []


def _records(variants: list[Variant]) -> list[tuple[Variant, dict[str, Any]]]:
    return [(v, v.metrics.metadata[RECORD]) for v in variants if v.metrics is not None and RECORD in v.metrics.metadata]
