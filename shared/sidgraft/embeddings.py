"""Item embeddings as an array."""

from __future__ import annotations

import numpy as np
import pyarrow as pa


def vectors_array(embeddings: pa.Table) -> np.ndarray:
    """The vectors of an item_embeddings table, [N, d] float32."""
    column = embeddings["embedding"].combine_chunks()
    return column.flatten().to_numpy(zero_copy_only=False).reshape(len(column), -1).astype(np.float32)
