"""Ground the new rows in language, everything else frozen. Run: sidgraft ground --help."""

from __future__ import annotations

from typing import Any


def ground(
    token_rows: str,
    catalog: str,
    semantic_ids: str,
    interactions: str,
    out: str,
    *,
    corpus: str = "gti",
    epochs: float = 10,
    max_steps: int = 0,
    learning_rate: float = 1e-3,
    batch_size: int = 16,
    max_length: int = 1024,
    keep_epochs: str = "",
    precision: str = "bfloat16",
    seed: int = 0,
    checkpoints: str = "",
) -> dict[str, Any]:
    """Train only the new rows to connect Semantic IDs with the text of their items.

    Args:
        token_rows: Directory of the token_rows artifact from expand.
        catalog: Directory of the catalog artifact.
        semantic_ids: Directory of the semantic_ids artifact.
        interactions: Directory of the interactions artifact (read by corpus=cpt; its training part only).
        out: Directory to write the grounded token_rows artifact to.
        corpus: gti (text to ID and ID to text), gti-text-to-sid, gti-sid-to-text, cpt (histories with titles
            as running text), or none (the rows pass through unchanged).
        epochs: Passes over the corpus; may be a fraction.
        max_steps: Stop after this many optimizer steps; 0 trains all epochs.
        learning_rate: Constant learning rate of AdamW (no decay, no warmup).
        batch_size: Sequences in an optimizer step.
        max_length: Longest sequence in tokens.
        keep_epochs: Epochs, comma-separated, whose rows are kept beside the last ones, for a depth sweep.
        precision: bfloat16 or float32, of the frozen model; the rows are always float32.
        seed: Seed of the data order.
        checkpoints: Directory for resumable checkpoints; empty makes none.
    """
    raise NotImplementedError
