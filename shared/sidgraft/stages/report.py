"""Write one self-contained HTML page and the tables of one or many variants. Run: sidgraft report --help."""

from __future__ import annotations

from typing import Any


def report(
    metrics: list[str],
    recommendations: list[str],
    diagnostics: list[str],
    catalog: str,
    interactions: str,
    semantic_ids: str,
    out: str,
    *,
    title: str = "sidgraft",
    examples: int = 10,
) -> dict[str, Any]:
    """Join the variants' metrics and diagnostics into index.html, metrics.csv and metrics.parquet.

    Args:
        metrics: Directories of the metrics artifacts, one a variant. One that holds a failure is shown as failed.
        recommendations: Directories of the recommendations artifacts, in the same order.
        diagnostics: Directories of the diagnostics artifacts, in the same order.
        catalog: Directory of the catalog artifact.
        interactions: Directory of the interactions artifact.
        semantic_ids: Directory of the semantic_ids artifact, for the quality of the quantizer.
        out: Directory to write the report to.
        title: Title of the page.
        examples: Example users to show, with history, recommendations and target.
    """
    raise NotImplementedError
