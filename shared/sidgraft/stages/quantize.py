"""Quantize item embeddings into unique Semantic IDs. Run: sidgraft quantize --help."""

from __future__ import annotations

from typing import Any


def quantize(
    item_embeddings: str,
    out: str,
    *,
    levels: int = 3,
    codebook_size: int = 256,
    dedup_size: int = 256,
    fit: str = "minibatch",
    steps: int = 3000,
    batch_size: int = 2048,
    max_iterations: int = 100,
    dim: int = 0,
    reduction: str = "truncate",
    max_collision_rate: float = 1.0,
    min_utilisation: float = 0.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Quantize the embeddings by residual k-means and give every item a unique Semantic ID.

    Args:
        item_embeddings: Directory of the item_embeddings artifact.
        out: Directory to write the semantic_ids artifact to.
        levels: Semantic levels L; one deduplication level is added after them.
        codebook_size: Codes per level, K.
        dedup_size: Codes of the deduplication level: the most items that may share all L codes.
        fit: minibatch (3000 steps of 2048, the Amazon setting) or lloyd (full batch to convergence).
        steps: Steps of mini-batch k-means per level.
        batch_size: Vectors in one of these steps.
        max_iterations: Upper limit on Lloyd iterations per level.
        dim: Reduce the vectors to this many dimensions first, so that centroids fit the language model's
            width; 0 keeps them as they are.
        reduction: truncate (the first dimensions: for Matryoshka encoders) or pca (for all others).
        max_collision_rate: Fail when a larger share of items shares its L codes with another item.
        min_utilisation: Fail when a level uses a smaller share of its codes.
        seed: Seed of the k-means start and of the mini-batches.
    """
    raise NotImplementedError
