"""Decode recommendations under the trie of the catalog and measure them. Run: sidgraft evaluate --help."""

from __future__ import annotations

from typing import Any


def evaluate(
    model: str,
    semantic_ids: str,
    interactions: str,
    catalog: str,
    item_embeddings: str,
    out_recommendations: str,
    out_metrics: str,
    *,
    split: str = "test",
    ks: str = "5,10,20,50,100",
    beams: int = 10,
    score: str = "exact",
    users: int = 0,
    exclude_history: bool = False,
    batch_tokens: int = 8192,
    precision: str = "bfloat16",
    bootstrap: int = 1000,
    variant: str = "",
    seed: int = 0,
) -> dict[str, Any]:
    """Recommend for every user by trie-constrained beam search and compare with the baselines.

    Args:
        model: Directory of the model artifact.
        semantic_ids: Directory of the semantic_ids artifact.
        interactions: Directory of the interactions artifact.
        catalog: Directory of the catalog artifact.
        item_embeddings: Directory of the item_embeddings artifact, for the nearest-neighbour baseline.
        out_recommendations: Directory to write the recommendations artifact to.
        out_metrics: Directory to write the metrics artifact to.
        split: test or valid: which target is predicted, from the history before it.
        ks: Cut-offs, comma-separated; those above the number of beams are left out.
        beams: Beams of the search.
        score: exact (log-softmax over the whole vocabulary) or restricted (over the valid children).
        users: Evaluate a random sample of this many users; 0 takes all.
        exclude_history: Leave the items of the history out, for the model and the baselines alike.
        batch_tokens: Prompt tokens in a decoding batch.
        precision: bfloat16 or float32.
        bootstrap: Bootstrap samples over users for the 95 % intervals.
        variant: Name of this variant in the tables.
        seed: Seed of the run, shown in the tables; also draws the sample of users and the bootstrap.
    """
    raise NotImplementedError
