"""Item vectors that users bring themselves: checked, and put in the order of the catalog without being held whole.

A file is read in batches, once to check every vector and once to lay it where it belongs; in memory stay the ids and a
few numbers a row.

Shapes: N items of the catalog · M rows of the file · B rows of a batch · D width of the vectors.
"""

# pyright: reportAttributeAccessIssue=false
# pyarrow.compute makes its functions at import, where a type checker cannot see them.

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sidgraft import storage, tables
from sidgraft.artifacts import IN_PARTS

WHAT = "embeddings"
ROWS = 4096  # read at a time


@dataclass(frozen=True)
class OwnVectors:
    """A file of vectors that has been checked. float16 stays float16, the rest is float32."""

    file: Path
    column: str
    width: int
    dtype: type[np.float16] | type[np.float32]
    item_M: np.ndarray  # the item of the catalog that a row belongs to; -1: none

    @property
    def extra(self) -> int:
        """How many rows belong to no item of the catalog."""
        return int((self.item_M < 0).sum())

    def in_order(self, scratch: IO[bytes], rows: int) -> Iterator[np.ndarray]:
        """Yield the vectors in the catalog's order, ``rows`` at a time; an empty file takes all of them on the way."""
        start, size = 0, self.width * np.dtype(self.dtype).itemsize
        for array in _read(self.file, self.column):
            item_B = self.item_M[start : start + len(array)]
            start += len(array)
            vectors_BD = _numbers(array.filter(pa.array(item_B >= 0)), self.dtype).reshape(-1, self.width)
            item_B = item_B[item_B >= 0]
            runs = np.flatnonzero(np.diff(item_B) != 1) + 1  # of rows that stand in the catalog's order already
            for items, vectors in zip(np.split(item_B, runs), np.split(vectors_BD, runs), strict=True):
                if len(items):
                    scratch.seek(int(items[0]) * size)
                    scratch.write(vectors.tobytes())
        scratch.seek(0)
        while block := scratch.read(rows * size):
            yield np.frombuffer(block, self.dtype).reshape(-1, self.width)


def check(path: str, item_column: str, vector_column: str, item_ids: pa.Array) -> OwnVectors:
    """Check a user's Parquet file of vectors for the items of a catalog [N]. Rows of other items are left out.

    Raises one ValueError with everything that is wrong: no such file or column, items without a vector, double ids,
    nulls, unequal widths, NaN.
    """
    problems: list[str] = []
    if Path(path).suffix not in (".parquet", ".pq"):
        raise ValueError(f"{WHAT}: {path} is not a .parquet file.")
    table, columns = tables.read(path, [item_column], WHAT, problems)
    if table is not None:
        for name, option in ((item_column, "embeddings_item_id"), (vector_column, "embeddings_column")):
            if name not in columns:
                problems.append(tables.missing_column(name, option, columns, WHAT))
    tables.raise_all(problems)
    assert table is not None
    ids = tables.as_ids(table[item_column], item_column, WHAT, problems)
    file = storage.local(path)
    kind = pq.read_schema(file).field(vector_column).type
    is_numbers = tables.is_list(kind) and (
        pa.types.is_floating(kind.value_type) or pa.types.is_integer(kind.value_type)
    )
    dtype = np.float16 if is_numbers and kind.value_type == pa.float16() else np.float32
    item_M = np.zeros(table.num_rows, np.int64)  # where ids are unusable every row is looked at
    if ids is not None:
        found = pc.index_in(ids.combine_chunks(), value_set=item_ids)
        item_M = pc.fill_null(found, -1).to_numpy(zero_copy_only=False)
    known_M = item_M >= 0
    width, faulty_M, finite_M = 0, np.zeros(table.num_rows, bool), np.ones(table.num_rows, bool)
    if is_numbers:
        length_M, finite_M = _lengths(file, vector_column, dtype, table.num_rows)
        width, faulty_M = _width(length_M, known_M, vector_column, ids, problems)
    else:
        problems.append(f"{WHAT}: column {vector_column!r} is {kind}, expected lists of numbers.")
    tables.raise_all([] if ids is not None else problems)
    assert ids is not None
    _check_ids(ids.combine_chunks(), known_M, item_ids, problems)
    bad_M = ~finite_M & ~faulty_M & known_M
    if bad_M.any():
        problems.append(f"{WHAT}: {bad_M.sum()} vectors hold NaN or infinity: {tables.examples(bad_M, ids)}.")
    tables.raise_all(problems)
    return OwnVectors(file, vector_column, width, dtype, item_M)


def _read(file: Path, column: str) -> Iterator[pa.Array]:
    with pq.ParquetFile(file, **IN_PARTS) as parquet:
        for batch in parquet.iter_batches(ROWS, columns=[column]):
            yield batch.column(0)


def _numbers(array: pa.Array, dtype: type[np.float16] | type[np.float32]) -> np.ndarray:
    """All numbers of an array of lists, one list behind the other; a null among them is NaN."""
    with np.errstate(over="ignore"):  # a double beyond float32 becomes infinity, reported as such
        return pc.list_flatten(array).to_numpy(zero_copy_only=False).astype(dtype, copy=False)


def _lengths(
    file: Path, column: str, dtype: type[np.float16] | type[np.float32], rows: int
) -> tuple[np.ndarray, np.ndarray]:
    """How many numbers each row's list holds [M], 0 where it is null, and whether all of them are finite [M]."""
    length_M, finite_M = np.zeros(rows, np.int64), np.ones(rows, bool)
    start = 0
    try:
        for array in _read(file, column):
            length_B = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False).astype(np.int64)
            bad_before = np.append(0, (~np.isfinite(_numbers(array, dtype))).cumsum())
            end_B = length_B.cumsum()
            length_M[start : start + len(array)] = length_B
            finite_M[start : start + len(array)] = bad_before[end_B] == bad_before[end_B - length_B]
            start += len(array)
    except (pa.ArrowException, OSError) as error:
        raise ValueError(f"{WHAT}: column {column!r} of {file.name} cannot be read: {error}") from error
    return length_M, finite_M


def _width(
    length_M: np.ndarray, known_M: np.ndarray, name: str, ids: pa.ChunkedArray | None, problems: list[str]
) -> tuple[int, np.ndarray]:
    """The width of most vectors, and the rows that are null, empty or of another width [M], all of known items."""
    null = known_M & (length_M == 0)
    some = length_M[known_M & ~null]
    width = int(np.bincount(some).argmax()) if len(some) else 0
    other = known_M & ~null & (length_M != width)
    if null.any():
        problems.append(f"{WHAT}: {null.sum()} vectors are null or empty: {tables.examples(null, ids)}.")
    if other.any():
        widths = ", ".join(str(w) for w in np.unique(length_M[other])[: tables.EXAMPLES])
        problems.append(
            f"{WHAT}: {other.sum()} vectors have the width {widths}, most have {width}: {tables.examples(other, ids)}."
        )
    if not length_M.any():
        problems.append(f"{WHAT}: column {name!r} holds no vectors.")
    return width, null | other


def _check_ids(ids: pa.Array, known: np.ndarray, item_ids: pa.Array, problems: list[str]) -> None:
    empty = ids.is_null().to_numpy(zero_copy_only=False)
    if empty.any():
        problems.append(f"{WHAT}: {empty.sum()} rows have no item id: {tables.examples(empty)}.")
    first = pc.index_in(ids, value_set=pc.unique(ids)).to_numpy(zero_copy_only=False)
    repeated = np.ones(len(ids), bool)
    repeated[np.unique(first, return_index=True)[1]] = False
    repeated &= known
    if repeated.any():
        problems.append(
            f"{WHAT}: {repeated.sum()} rows repeat the id of a row before them:"
            f" {tables.examples(repeated, pa.chunked_array([ids]))}."
        )
    without = ~pc.is_in(item_ids, value_set=ids).to_numpy(zero_copy_only=False)
    if without.any():
        names = ", ".join(tables.shorten(item_ids[int(r)].as_py()) for r in np.flatnonzero(without)[: tables.EXAMPLES])
        problems.append(
            f"{WHAT}: {without.sum()} of {len(item_ids)} items of the catalog have no vector, such as {names}."
        )
