"""Writing and reading item embeddings as Parquet against pyarrow's defaults. Run: python benchmarks/parquet.py.

Peer: `pq.write_table` and `pq.read_table` with their default settings, on the same table of float16 vectors.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from measure import bandwidth_roof, medians, options, report

from sidgraft.stages.embed import _batch, _writer

WIDTH = 384
ROWS_AT_ONCE = 65_536


def main() -> None:
    args = options(__doc__)
    rows, rounds = (100_000, 3) if args.quick else (1_000_000, 3)
    vectors_ND = np.random.default_rng(0).standard_normal((rows, WIDTH), np.float32).astype(np.float16)
    ids = pa.array([f"item-{i}" for i in range(rows)])
    with tempfile.TemporaryDirectory() as folder:
        mine, plain = Path(folder) / "mine.parquet", Path(folder) / "plain.parquet"

        def write() -> None:
            with _writer(mine, WIDTH, np.float16) as writer:
                for start in range(0, rows, ROWS_AT_ONCE):
                    at = slice(start, start + ROWS_AT_ONCE)
                    writer.write_batch(_batch(ids[at], vectors_ND[at], writer.schema))

        table = pa.table(
            {"item_id": ids, "embedding": pa.FixedSizeListArray.from_arrays(pa.array(vectors_ND.ravel()), WIDTH)}
        )
        seconds = medians({"sidgraft, write": write, "pyarrow, write": lambda: pq.write_table(table, plain)}, rounds)
        seconds |= medians(
            {"sidgraft, read": lambda: pq.read_table(mine), "pyarrow, read": lambda: pq.read_table(plain)}, rounds
        )
        same = pq.read_table(mine).cast(table.schema).equals(table)
        size = mine.stat().st_size
    ours = seconds["sidgraft, write"] + seconds["sidgraft, read"]
    theirs = seconds["pyarrow, write"] + seconds["pyarrow, read"]
    report(
        args,
        "parquet",
        {"pyarrow's defaults": (theirs / ours, 4)},
        equal={"same table": same},
        roof={"share of memory bandwidth": 2 * size / ours / bandwidth_roof()},
        seconds=seconds,
        about=f"{rows:,} x {WIDTH} float16, written and read, {size / 1e6:.0f} MB",
    )


if __name__ == "__main__":
    main()
