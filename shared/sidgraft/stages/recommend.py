"""Recommend items for histories with a published bundle. Run: sidgraft recommend --help."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from sidgraft import artifacts, checks, storage
from sidgraft.beam import SCORES
from sidgraft.bundles import open_bundle
from sidgraft.precisions import DTYPES
from sidgraft.progress import say
from sidgraft.serving import Recommender


def recommend(
    bundles: str,
    histories: str,
    out: str,
    *,
    version: str = "",
    offered: str = "",
    delisted: str = "",
    items: int = 10,
    beams: int = 20,
    score: str = "exact",
    exclude_history: bool = False,
    users_at_once: int = 4096,
    batch_tokens: int = 8192,
    precision: str = "bfloat16",
) -> dict[str, Any]:
    """Recommend items for a Parquet file of histories with a published bundle; only items on offer can come out.

    Args:
        bundles: Folder of all published versions, local or s3://, with the pointer latest.json.
        histories: Parquet file, local or s3://, with the columns user_id and item_ids, the oldest item first.
        out: Directory to write the recommendations to: user_id, item_ids (best first), scores.
        version: Which version of the bundle; empty takes the latest.
        offered: Directory of a catalog artifact, or a Parquet file with the column item_id, local or s3://: recommend
            only these. Empty offers all items of the bundle.
        delisted: The same kinds of input: never recommend these.
        items: Recommendations a user, at most the beams.
        beams: Beams of the search.
        score: exact (log-softmax over the whole vocabulary) or restricted (over the valid children).
        exclude_history: Do not recommend the items of a user's history.
        users_at_once: Users that are held in memory at a time.
        batch_tokens: Prompt tokens in a decoding batch; one that the memory does not hold is halved.
        precision: bfloat16 or float32.
    """
    checks.one_of("score", score, SCORES)
    dtype = DTYPES[checks.one_of("precision", precision, DTYPES)]
    checks.positive(items=items, beams=beams, users_at_once=users_at_once, batch_tokens=batch_tokens)
    if items > beams:
        raise ValueError(f"items is {items}, but there are {beams} beams: give at least as many beams.")
    source = _histories(histories)
    bundle = open_bundle(bundles, version)
    ids = bundle.part("semantic_ids")
    known = ids.read_table("semantic_ids.parquet", ["item_id"])["item_id"].to_pylist()
    on_offer = (_item_ids("offered", offered) if offered else set(known)) - (
        _item_ids("delisted", delisted) if delisted else set()
    )
    recommender = Recommender.load(bundle.part("model"), ids, dtype, offered=on_offer)
    settings = {
        "version": bundle.version,
        "items": items,
        "beams": beams,
        "score": score,
        "exclude_history": exclude_history,
        "users_at_once": users_at_once,
        "batch_tokens": batch_tokens,
        "precision": precision,
    }
    kind = "user_recommendations/v1"
    schema = artifacts.SCHEMAS[kind]["recommendations.parquet"]
    counts = {"users": 0, "history_items": 0, "unknown_history_items": 0, "users_without_known_history": 0}
    inputs = {"bundle": bundle.bundle}
    with artifacts.create(out, kind, stage="recommend", arguments=settings, inputs=inputs) as draft:
        with pq.ParquetWriter(draft.path / "recommendations.parquet", schema, compression="zstd") as writer:
            for users, lists in _batches(source, users_at_once):
                found = recommender.recommend(
                    lists,
                    items=items,
                    beams=beams,
                    score=score,
                    exclude_history=exclude_history,
                    batch_tokens=batch_tokens,
                )
                columns = (users, found.item_ids, found.scores)
                writer.write_table(
                    pa.table([pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema)
                )
                counts["users"] += len(users)
                counts["history_items"] += sum(map(len, lists))
                counts["unknown_history_items"] += found.unknown
                counts["users_without_known_history"] += sum(
                    recommender.row_of.keys().isdisjoint(history) for history in lists
                )
        draft.metadata.update(counts, version=bundle.version, offered=len(recommender.offered), known=len(known))
    if counts["unknown_history_items"]:
        say(
            f"recommend: {counts['unknown_history_items']:,} of {counts['history_items']:,} items in histories are not"
            f" known to {bundle.version} and were skipped."
        )
    return dict(draft.metadata)


def _histories(path: str) -> pq.ParquetFile:
    """Open the histories. Raises ValueError for anything but user_id and item_ids, a list of strings."""
    source = _parquet("histories", path)
    columns = {field.name: field.type for field in source.schema_arrow}
    missing = [name for name in ("user_id", "item_ids") if name not in columns]
    if missing:
        raise ValueError(
            f"histories: {path} has the columns {', '.join(columns)}, but not {' and '.join(missing)}: give user_id"
            " and item_ids, the list of a user's items, oldest first."
        )
    kind = columns["item_ids"]
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind)) or not (
        pa.types.is_string(kind.value_type) or pa.types.is_large_string(kind.value_type)
    ):
        raise ValueError(f"histories: item_ids is {kind} in {path}, expected a list of strings.")
    return source


def _batches(source: pq.ParquetFile, users_at_once: int) -> Iterator[tuple[list[str], list[list[str]]]]:
    for batch in source.iter_batches(batch_size=users_at_once, columns=["user_id", "item_ids"]):
        if batch["user_id"].null_count:
            raise ValueError(f"histories: {batch['user_id'].null_count} rows have no user_id: give every row one.")
        yield batch["user_id"].cast(pa.string()).to_pylist(), [h or [] for h in batch["item_ids"].to_pylist()]


def _item_ids(name: str, path: str) -> set[str]:
    """The item ids of a catalog artifact, or of a Parquet file."""
    folder = storage.local(path)
    if folder.is_dir():
        return set(
            artifacts.load(folder, "catalog/v1").read_table("catalog.parquet", ["item_id"])["item_id"].to_pylist()
        )
    source = _parquet(name, path)
    if "item_id" not in source.schema_arrow.names:
        raise ValueError(f"{name}: {path} has the columns {', '.join(source.schema_arrow.names)}, expected item_id.")
    return set(source.read(["item_id"])["item_id"].cast(pa.string()).to_pylist())


def _parquet(name: str, path: str) -> pq.ParquetFile:
    file = storage.local(path)
    if not file.is_file():
        raise ValueError(f"{name}: {path} does not exist or is not a file; expected a Parquet file.")
    try:
        return pq.ParquetFile(file)
    except pa.ArrowInvalid as error:
        raise ValueError(f"{name}: {path} is not a Parquet file ({error}).") from error
