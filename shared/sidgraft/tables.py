"""Tables from users: read Parquet, CSV, TSV and JSON Lines files; text columns made clean; problems collected.

What is wrong is appended to a list of problems instead of raised, so that a user sees all of it at once.
"""

# pyright: reportAttributeAccessIssue=false
# pyarrow.compute makes its functions at import, where a type checker cannot see them.

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv
import pyarrow.parquet as pq

from sidgraft import storage

SUFFIXES = (".parquet", ".csv", ".tsv", ".jsonl", ".csv.gz", ".tsv.gz", ".jsonl.gz")
EXAMPLES = 5  # shown of each problem
EXACT = 2**53  # float64 counts in ones up to here
JSON_ROWS = 65_536  # JSON Lines are turned into Arrow in pieces of this many rows
MAX_CHARACTERS = 2_000  # kept of a text field: a 100 kB title helps nobody and floods prompts and reports

SPACES = r"[\s\p{Z}\p{Cc}]+"
# Format characters (bidirectional marks, zero-width spaces, tags) can hide text; the two joiners stay, because
# emoji and several scripts need them. RE2 reads this as: Cf without U+200C and U+200D.
HIDDEN = r"[^\P{Cf}\x{200C}\x{200D}]"
VISIBLE = r"[^\s\x{200C}\x{200D}]"


def read(path: str, wanted: Iterable[str], what: str, problems: list[str]) -> tuple[pa.Table | None, list[str]]:
    """Read the columns of a user's file that are ``wanted`` and there; also return the names of all columns.

    CSV and TSV columns come as text (an id 00123 keeps its zeros; an empty cell is null), Parquet and JSON Lines
    columns as what they are. The table is None where the file cannot be read; ``problems`` then says why.
    """
    try:
        file, wanted = storage.local(path), list(dict.fromkeys(wanted))
    except storage.StorageError as error:
        problems.append(f"{what}: {error}")
        return None, []
    suffix = _suffix(file)
    if not file.exists():
        problems.append(f"{what}: {file} does not exist.")
    elif not file.is_file():
        problems.append(f"{what}: {file} is not a file; expected one of {', '.join(SUFFIXES)}.")
    elif suffix not in SUFFIXES:
        problems.append(f"{what}: the type of {file.name} is not known; expected {', '.join(SUFFIXES)}.")
    else:
        try:
            if suffix == ".parquet":
                return _read_parquet(file, wanted)
            if suffix.startswith(".jsonl"):
                return _read_jsonl(file, wanted, what, problems)
            return _read_csv(file, wanted, "\t" if suffix.startswith(".tsv") else ",", what, problems)
        except (pa.ArrowException, UnicodeError, EOFError, OSError) as error:
            problems.append(f"{what}: {file.name} cannot be read as {suffix[1:]}: {_first_line(error)}")
    return None, []


def missing_column(name: str, option: str, columns: Sequence[str], what: str) -> str:
    """Say that a column is missing: which one, from which option, what there is, what was perhaps meant."""
    near = difflib.get_close_matches(name, columns, n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"{what}: no column {name!r} (option {option}); the columns are {', '.join(columns)}.{hint}"


def is_list(kind: pa.DataType) -> bool:
    """Whether a type is one of the lists that Arrow flattens."""
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def plain(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return a column without what only its storage knows: dictionaries, extension types, views, half floats.

    Text comes as string; bytes do, too, where all of them are UTF-8.
    """
    if isinstance(column.type, pa.BaseExtensionType):
        column = column.cast(column.type.storage_type)
    if pa.types.is_dictionary(column.type):
        column = column.cast(column.type.value_type)
    kind = column.type
    if pa.types.is_float16(kind):
        return column.cast(pa.float32())
    if pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return column.cast(pa.string())
    if _is_binary(kind):
        try:
            return column.cast(pa.binary()).cast(pa.string())
        except pa.ArrowInvalid:
            return column
    return column


def as_ids(column: pa.ChunkedArray, name: str, what: str, problems: list[str]) -> pa.ChunkedArray | None:
    """Return an id column as strings, spaces around them removed and empty ones null.

    Whole floats (what pandas makes of an integer column with gaps) lose their ``.0``. None where the column holds
    neither text nor numbers.
    """
    column = plain(column)
    kind = column.type
    if pa.types.is_floating(kind):
        column = pc.if_else(pc.is_finite(column), column, pa.scalar(None, kind))
        values = column.cast(pa.float64())
        whole = pc.and_(pc.equal(values, pc.floor(values)), pc.less(pc.abs(values), EXACT))
        column = column.cast(pa.int64()) if pc.all(whole, min_count=0).as_py() else column
    elif not (pa.types.is_string(kind) or pa.types.is_integer(kind) or pa.types.is_null(kind)):
        problems.append(f"{what}: column {name!r} is {kind}, expected ids (text or whole numbers).")
        return None
    text = pc.utf8_trim_whitespace(column.cast(pa.string()))
    return pc.if_else(pc.equal(text, ""), pa.scalar(None, pa.string()), text)


def as_text(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Return any column as clean text: see `clean`. Lists are joined by a comma; what is empty is null."""
    column = plain(column)
    try:
        if is_list(column.type):
            column = pc.binary_join(column.cast(pa.list_(pa.string())), ", ")
        text = column.cast(pa.string())
    except pa.ArrowException:
        # Rare in a catalog, and nothing to read aloud: the JSON of it is better than a refusal.
        text = pa.chunked_array([pa.array([_json(v) for v in column.to_pylist()], pa.string())])
    return clean(text)


def clean(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Make text safe to show and to train on, and change nothing else: HTML, emoji, `<|im_end|>` stay data.

    Line breaks, control characters and runs of spaces become one space; hidden format characters go; text is
    cut at MAX_CHARACTERS; what has nothing visible is null.
    """
    text = pc.replace_substring_regex(column, HIDDEN, "")
    text = pc.utf8_trim_whitespace(pc.replace_substring_regex(text, SPACES, " "))
    text = pc.utf8_rtrim_whitespace(pc.utf8_slice_codeunits(text, 0, MAX_CHARACTERS))
    return pc.if_else(pc.match_substring_regex(text, VISIBLE), text, pa.scalar(None, pa.string()))


def count_long(column: pa.ChunkedArray) -> int:
    """How many texts are longer than MAX_CHARACTERS."""
    return pc.sum(pc.greater(pc.utf8_length(column), MAX_CHARACTERS)).as_py() or 0


def examples(mask: np.ndarray, values: pa.ChunkedArray | None = None, first_row: int = 1) -> str:
    """Name the first rows of ``mask`` for a message: ``rows 3, 17 (of 2)``, with their values when given."""
    rows = np.flatnonzero(mask)
    shown = rows[:EXAMPLES]
    names = [str(r + first_row) for r in shown]
    if values is not None:
        names = [f"{n} ({shorten(values[int(r)].as_py())})" for n, r in zip(names, shown, strict=True)]
    more = ", …" if len(rows) > len(shown) else ""
    return f"{'row' if len(rows) == 1 else 'rows'} {', '.join(names)}{more}"


def shorten(value: Any, width: int = 40) -> str:
    """Quote a user's value for a message, control characters escaped, at most ``width`` characters."""
    text = repr(value)
    return text if len(text) <= width else text[: width - 1] + "…"


def raise_all(problems: Sequence[str]) -> None:
    """Raise one ValueError with all problems; do nothing when there are none."""
    if len(problems) == 1:
        raise ValueError(problems[0])
    if problems:
        lines = "\n".join(f"  {n}. {problem}" for n, problem in enumerate(problems, 1))
        raise ValueError(f"{len(problems)} problems in the input:\n{lines}")


def file_digest(path: str | Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    return storage.file_digest(path)


def is_digest(text: str) -> bool:
    """Whether a text is a SHA-256 as `file_digest` gives it, and not a version of somebody's own."""
    return re.fullmatch("[0-9a-f]{64}", text) is not None


def _suffix(file: Path) -> str:
    suffixes = [s.lower() for s in file.suffixes]
    joined = "".join(suffixes[-2:]) if suffixes[-1:] == [".gz"] else "".join(suffixes[-1:])
    return {".ndjson": ".jsonl", ".ndjson.gz": ".jsonl.gz", ".pq": ".parquet"}.get(joined, joined)


def _read_parquet(file: Path, wanted: list[str]) -> tuple[pa.Table, list[str]]:
    columns = pq.read_schema(file).names
    return pq.read_table(file, columns=[name for name in wanted if name in columns]), columns


def _read_csv(
    file: Path, wanted: list[str], delimiter: str, what: str, problems: list[str]
) -> tuple[pa.Table | None, list[str]]:
    bad: list[csv.InvalidRow] = []

    def skip(row: csv.InvalidRow) -> str:
        bad.append(row)
        return "skip"

    # Titles may hold line breaks inside quotes; one thread, so that a bad row comes with its number.
    read_options = csv.ReadOptions(use_threads=False, block_size=1 << 24)
    parse = csv.ParseOptions(delimiter=delimiter, newlines_in_values=True, invalid_row_handler=skip)
    columns = csv.open_csv(file, read_options=read_options, parse_options=parse).schema.names
    bad.clear()
    table = csv.read_csv(
        file,
        read_options=read_options,
        parse_options=parse,
        convert_options=csv.ConvertOptions(
            column_types=dict.fromkeys(columns, pa.string()),
            include_columns=[name for name in wanted if name in columns],
            strings_can_be_null=True,
            null_values=[""],
        ),
    )
    if bad:
        lines = ", ".join(f"{row.number} ({row.actual_columns} fields)" for row in bad[:EXAMPLES])
        more = ", …" if len(bad) > EXAMPLES else ""
        problems.append(
            f"{what}: {len(bad)} rows of {file.name} do not have the header's {len(columns)} fields:"
            f" line {lines}{more}."
        )
    return table, columns


def _read_jsonl(file: Path, wanted: list[str], what: str, problems: list[str]) -> tuple[pa.Table | None, list[str]]:
    """Read JSON Lines with Python's parser: a line that is not an object is named, and mixed types survive."""
    columns: dict[str, None] = {}
    pieces: dict[str, list[pa.Array]] = {name: [] for name in wanted}
    bad: list[str] = []
    bad_count = 0
    with pa.input_stream(str(file), compression="gzip" if file.suffix == ".gz" else None) as stream:
        numbered = enumerate(_lines(stream), 1)
        while lines := list(islice(numbered, JSON_ROWS)):
            rows = []
            for number, line in lines:
                row = _parse(line)
                if row is not None:
                    rows.append(row)
                elif line.strip():
                    bad_count += 1
                    bad += [f"{number} ({shorten(line.decode('utf-8', 'replace').strip())})"][: EXAMPLES - len(bad)]
            for row in rows:
                columns.update(dict.fromkeys(row))
            for name in wanted:
                pieces[name].append(_array([row.get(name) for row in rows]))
    if bad_count:
        more = ", …" if bad_count > len(bad) else ""
        problems.append(
            f"{what}: {bad_count} lines of {file.name} are not JSON objects in UTF-8: line {', '.join(bad)}{more}."
        )
        return None, list(columns)
    return pa.table({n: _unify(pieces[n]) for n in wanted if n in columns}), list(columns)


def _lines(stream: Any) -> Iterator[bytes]:
    rest = b""
    while block := stream.read(1 << 22):
        lines = (rest + block).split(b"\n")
        rest = lines.pop()
        yield from lines
    if rest:
        yield rest


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line.decode("utf-8-sig"))
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _array(values: list[Any]) -> pa.Array:
    """Turn JSON values into one array; where types are mixed, into text."""
    try:
        return pa.array(values)
    except UnicodeEncodeError:  # half of a surrogate pair
        return _array([_repair(value) for value in values])
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError):
        if all(value is None or isinstance(value, list) for value in values):
            return pa.array([value and [_plain(v) for v in value] for value in values])
        return pa.array([_plain(value) for value in values], pa.string())


def _unify(pieces: list[pa.Array]) -> pa.ChunkedArray:
    kinds = {piece.type for piece in pieces if not pa.types.is_null(piece.type)}
    if len(kinds) < 2:
        return pa.chunked_array(pieces, kinds.pop() if kinds else pa.null())
    try:
        schemas = [pa.schema([("column", kind)]) for kind in kinds]
        kind = pa.unify_schemas(schemas, promote_options="permissive").field(0).type
        return pa.chunked_array([piece.cast(kind) for piece in pieces], kind)
    except pa.ArrowException:
        return pa.chunked_array([pa.array([_plain(v) for v in p.to_pylist()], pa.string()) for p in pieces])


def _repair(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return [_repair(v) for v in value] if isinstance(value, list) else value


def _plain(value: Any) -> str | None:
    if value is None or isinstance(value, str):
        return value
    return _json(value)


def _json(value: Any) -> str | None:
    return None if value is None else json.dumps(value, ensure_ascii=False, default=str)


def _is_binary(kind: pa.DataType) -> bool:
    is_any = (
        pa.types.is_binary, pa.types.is_large_binary, pa.types.is_fixed_size_binary, pa.types.is_binary_view,
    )  # fmt: skip
    return any(check(kind) for check in is_any)


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
