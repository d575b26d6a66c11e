"""Item embeddings: as an array, or in batches.

Shapes: N items · D width of the embeddings · B items of a batch.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sidgraft import kmeans
from sidgraft.artifacts import Artifact
from sidgraft.vectors import Batches, Vectors

FILE = "embeddings.parquet"


def vectors_array(embeddings: pa.Table) -> np.ndarray:
    """The vectors of an item_embeddings table, [N, d] float32."""
    column = embeddings["embedding"].combine_chunks()
    return column.flatten().to_numpy(zero_copy_only=False).reshape(len(column), -1).astype(np.float32)


def check_made_from(item_embeddings: Artifact, catalog: Artifact) -> None:
    """Raise ValueError unless the embeddings were made from this very catalog."""
    if catalog.digest not in item_embeddings.lineage:
        raise ValueError(
            "the embeddings were made from another catalog than the one given: run `sidgraft embed` on it."
        )


def in_item_order(item_embeddings: Artifact) -> tuple[pa.Array, np.ndarray, Vectors]:
    """The item ids [N], sorted; the row that each item of the file has among them [N]; and the vectors by these rows.

    Only the ids are in memory, vectors are read from the file in each pass.
    """
    file_ids = item_embeddings.read_table(FILE, columns=["item_id"])["item_id"]
    order_N = pc.sort_indices(file_ids).to_numpy()
    rows_N = np.empty(len(order_N), np.int64)
    rows_N[order_N] = np.arange(len(order_N))
    width = pq.read_schema(item_embeddings.path / FILE).field("embedding").type.list_size

    def read() -> Batches:
        first = 0
        for batch in item_embeddings.read_batches(FILE, ["embedding"], max(1, kmeans.SCORES_PER_CHUNK // width)):
            values = batch["embedding"].flatten().to_numpy(zero_copy_only=False)
            rows_B = rows_N[first : first + len(batch)]
            yield rows_B, values.reshape(len(batch), width).astype(np.float32, copy=False)
            first += len(batch)

    return file_ids.take(order_N).combine_chunks(), rows_N, Vectors(len(order_N), width, read)
