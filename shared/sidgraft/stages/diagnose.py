"""Diagnose the geometry of the new rows before and after each stage. Run: sidgraft diagnose --help."""

from __future__ import annotations

from typing import Any


def diagnose(
    initial_rows: str,
    grounded_rows: str,
    model: str,
    semantic_ids: str,
    catalog: str,
    interactions: str,
    out: str,
    *,
    level: int = 0,
    neighbours: int = 10,
    text_rows: int = 256,
    variant: str = "",
    seed: int = 0,
) -> dict[str, Any]:
    """Compute spectra, RSA, purity, popularity and semantic alignment at initialization, grounding and fine-tuning.

    Args:
        initial_rows: Directory of the token_rows artifact from expand.
        grounded_rows: Directory of the token_rows artifact from ground.
        model: Directory of the model artifact from finetune.
        semantic_ids: Directory of the semantic_ids artifact.
        catalog: Directory of the catalog artifact.
        interactions: Directory of the interactions artifact.
        out: Directory to write the diagnostics artifact to.
        level: Level whose rows are diagnosed one by one (0 is the first).
        neighbours: Nearest codes that count for the neighbourhood purity.
        text_rows: Text rows sampled for the cosine of new rows with text rows.
        variant: Name of this variant in the tables.
        seed: Seed of the run, shown in the tables; also draws the samples.
    """
    raise NotImplementedError
