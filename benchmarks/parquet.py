"""Writing and reading item embeddings as Parquet against pyarrow's defaults. Run: python benchmarks/parquet.py.

Ours is what the stages do: written as `embed` writes, in its batches; read as `quantize` reads, in batches, by rows in
item_id order. The peer is `pq.write_table` and `pq.read_table` with their default settings, on the same table, then
sorted. Both readers give the same two things: the ids in order, and all vectors as one float32 array in that order.
The encoder's vectors are float32, a user's own may be float16, for which the goal of 4 is set; float32, which the
defaults do not encode as slowly, must be no slower.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from measure import bandwidth_roof, medians, options, report

from sidgraft import artifacts
from sidgraft.embeddings import FILE, in_item_order
from sidgraft.stages.embed import ROWS, _batch, _writer

WIDTH = 384
Read = tuple[pa.Array, np.ndarray]  # ids [N], sorted, and their vectors [N, WIDTH], float32


def main() -> None:
    args = options(__doc__)
    rows, rounds = (100_000, 3) if args.quick else (1_000_000, 3)
    vectors_ND = np.random.default_rng(0).standard_normal((rows, WIDTH), np.float32)
    ratios: dict[str, tuple[float, float]] = {}
    equal: dict[str, bool] = {}
    seconds: dict[str, float] = {}
    roof: dict[str, float] = {}
    sizes = []
    bandwidth = bandwidth_roof()
    for dtype, goal in ((np.float16, 4), (np.float32, 1)):
        name = np.dtype(dtype).name
        found, same, size = compare(vectors_ND.astype(dtype, copy=False), rounds)
        ours, theirs = (found[f"{who}, write"] + found[f"{who}, read"] for who in ("sidgraft", "pyarrow"))
        ratios[f"pyarrow's defaults, {name}"] = (theirs / ours, goal)
        equal[f"same table, {name}"] = same
        seconds |= {f"{what}, {name}": value for what, value in found.items()}
        roof[f"share of memory bandwidth, {name}"] = 2 * size / ours / bandwidth
        sizes.append(f"{name} {size / 1e6:.0f} MB")
    report(
        args,
        "parquet",
        ratios,
        equal=equal,
        roof=roof,
        seconds=seconds,
        about=f"{rows:,} x {WIDTH}, written and read in item_id order, {', '.join(sizes)}",
    )


def compare(vectors_ND: np.ndarray, rounds: int) -> tuple[dict[str, float], bool, int]:
    """Seconds of both to write and to read, whether both give back what was written, and the bytes of our file."""
    rows = len(vectors_ND)
    ids = pa.array([f"item-{i}" for i in range(rows)])
    table = pa.table(
        {"item_id": ids, "embedding": pa.FixedSizeListArray.from_arrays(pa.array(vectors_ND.ravel()), WIDTH)}
    )
    with tempfile.TemporaryDirectory() as folder:
        mine, plain = Path(folder) / "mine", Path(folder) / "plain.parquet"

        def write(file: Path) -> None:
            with _writer(file, WIDTH, vectors_ND.dtype) as writer:
                for start in range(0, rows, ROWS):
                    at = slice(start, start + ROWS)
                    writer.write_batch(_batch(ids[at], vectors_ND[at], writer.schema))

        with artifacts.create(mine, "item_embeddings/v1", stage="embed", arguments={}) as draft:
            write(draft.path / FILE)  # the artifact that is read; its digest is not timed
        embeddings = artifacts.load(mine, "item_embeddings/v1")
        runs = {
            "sidgraft, write": lambda: write(Path(folder) / "again.parquet"),
            "pyarrow, write": lambda: pq.write_table(table, plain),
        }
        seconds = medians(runs, rounds)
        seconds |= medians(
            {"sidgraft, read": lambda: our_read(embeddings), "pyarrow, read": lambda: their_read(plain)}, rounds
        )
        order_N = np.argsort([f"item-{i}" for i in range(rows)])
        same = all(
            found[0].equals(ids.take(pa.array(order_N))) and np.array_equal(found[1], vectors_ND[order_N])
            for found in (our_read(embeddings), their_read(plain))
        )
        return seconds, same, (mine / FILE).stat().st_size


def our_read(embeddings: artifacts.Artifact) -> Read:
    ids, _, vectors = in_item_order(embeddings)
    return ids, vectors.take(np.arange(len(ids)))


def their_read(file: Path) -> Read:
    table = pq.read_table(file)
    order_N = pc.sort_indices(table["item_id"])
    column = table["embedding"].combine_chunks()
    vectors_ND = column.flatten().to_numpy().reshape(-1, WIDTH)[order_N.to_numpy()]
    return table["item_id"].take(order_N).combine_chunks(), vectors_ND.astype(np.float32, copy=False)


if __name__ == "__main__":
    main()
