"""Queries and graded judgements from users' files: read and check them, and split the queries without leakage.

Judgements become a `histories.Log`: a query in the place of a user, the grade in the place of the time, so that the
log's own filters and samples serve both.
"""

# pyright: reportAttributeAccessIssue=false
# pyarrow.compute makes its functions at import, where a type checker cannot see them.

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sidgraft import tables
from sidgraft.graded import GRADES, LENIENT, STRICT
from sidgraft.histories import Log

WHAT = "judgements"
SPLITS = ("train", "valid", "test")
HELD_OUT = 0.1  # share of the distinct texts that validate, and that test
# Why a judgement or a query cannot be used: its name in the counts, and what is said of it.
UNUSABLE = {
    "without_query": "have no query",
    "without_item": "have no item",
    "unknown_query": "have a query that is not among the queries",
    "unknown_item": "have an item that is not in the catalog",
}
UNJUDGED = {
    "without_judgement": "have no judgement of an item in the catalog",
    "without_relevant": "have no candidate judged above 0",
}


def fields(query_fields: str) -> list[tuple[str, str]]:
    """The (name, column) pairs of the option query_fields: ``headline=hl,skills`` names a column, or takes its name.

    Raises ValueError where there is none, or a name stands twice.
    """
    parts = [part.strip() for part in query_fields.split(",") if part.strip()]
    pairs = [(" ".join(name.split()), column.strip() or name.strip()) for name, _, column in map(_at_equals, parts)]
    names = [name for name, _ in pairs]
    if not names or len(set(names)) < len(names) or not all(names):
        raise ValueError(
            f"query_fields is {query_fields!r}, expected columns of the queries, comma-separated, each once, such as"
            ' "headline=hl,skills" (the column hl, called headline, and skills).'
        )
    return pairs


def _at_equals(part: str) -> tuple[str, str, str]:
    return part.partition("=")


def missing_columns(columns: list[str], query_id: str, named: list[tuple[str, str]], problems: list[str]) -> None:
    """Report columns that the file of queries must have: the id and all fields."""
    if query_id not in columns:
        problems.append(tables.missing_column(query_id, "query_id", columns, "queries"))
    for _, column in named:
        if column not in columns:
            problems.append(tables.missing_column(column, "query_fields", columns, "queries"))


def missing_judgement_columns(columns: list[str], query_id: str, item_id: str, grade: str, problems: list[str]) -> None:
    """Report columns that the file of judgements must have: query, item and grade."""
    for option, name in (("query_id", query_id), ("interaction_item_id", item_id), ("grade", grade)):
        if name not in columns:
            problems.append(tables.missing_column(name, option, columns, WHAT))


def build_queries(
    table: pa.Table, query_id: str, named: list[tuple[str, str]], problems: list[str]
) -> tuple[pa.Table | None, dict[str, int]]:
    """Make the columns query_id, text and prompt of queries.parquet from a user's table, and check them.

    Text holds the fields' words, for an encoder; prompt the same with their names, a line a field. Both are clean, so
    a value cannot hold a line break that would look like another field. Rows are ordered by query_id. Returns None
    and adds to ``problems`` where ids are empty or double, or a query has no text; also returns counts.
    """
    ids = tables.as_ids(table[query_id], query_id, "queries", problems)
    if table.num_rows == 0:
        problems.append("queries: the file has no rows.")
    if ids is None or table.num_rows == 0:
        return None, {}
    found = len(problems)
    values = [(name, table[column]) for name, column in named]
    cut = sum(tables.count_long(v) for _, v in values if pa.types.is_string(v.type))
    cleaned = [(name, tables.as_text(v)) for name, v in values]
    prompt = _joined([pc.binary_join_element_wise(pa.scalar(name), v, ": ") for name, v in cleaned], "\n")
    text = _joined([v for _, v in cleaned], " ")
    _check(ids, text, [column for _, column in named], problems)
    if len(problems) > found:
        return None, {}
    built = pa.table({"query_id": ids, "text": text, "prompt": prompt})
    return built.take(pc.sort_indices(ids)).combine_chunks(), {"queries_in_file": table.num_rows, "fields_cut": cut}


def _joined(columns: list[pa.ChunkedArray], separator: str) -> pa.ChunkedArray:
    """Join the columns that are not null, row by row; empty where all are."""
    aligned = pa.table(columns, names=[str(n) for n in range(len(columns))]).combine_chunks().columns
    ended = [pc.fill_null(pc.binary_join_element_wise(c, pa.scalar(""), separator), "") for c in aligned]
    joined = pc.binary_join_element_wise(*ended, "")
    joined = pc.utf8_rtrim(joined, separator)
    return joined if isinstance(joined, pa.ChunkedArray) else pa.chunked_array([joined])


def _check(ids: pa.ChunkedArray, text: pa.ChunkedArray, columns: list[str], problems: list[str]) -> None:
    empty = pc.is_null(ids).to_numpy()
    if empty.any():
        problems.append(f"queries: {empty.sum()} have no id: {tables.examples(empty)}.")
    repeated = _repeated(pc.fill_null(ids, "").combine_chunks().dictionary_encode().indices.to_numpy()) & ~empty
    if repeated.any():
        problems.append(
            f"queries: {repeated.sum()} rows repeat the id of a row before them: {tables.examples(repeated, ids)}."
            " Keep one row a query."
        )
    silent = pc.equal(text, "").to_numpy()
    if silent.any():
        problems.append(
            f"queries: {silent.sum()} have no text in {', '.join(columns)}: {tables.examples(silent, ids)}. Fill them,"
            " drop them, or name more columns with query_fields."
        )


def _repeated(codes: np.ndarray) -> np.ndarray:
    """Which values stood before."""
    repeated = np.ones(len(codes), bool)
    repeated[np.unique(codes, return_index=True)[1]] = False
    return repeated


def build(
    table: pa.Table,
    query_id: str,
    item_id: str,
    grade: str,
    query_ids: pa.Array | None,
    item_ids: pa.Array | None,
    strict: bool,
    problems: list[str],
) -> tuple[Log | None, dict[str, Any]]:
    """Make a log of judgements, queries numbered as in ``query_ids``, the time being the grade, and check it.

    Judgements without a query or an item and those with one that is not in ``query_ids`` or ``item_ids`` (None: not
    known, skip this check) are dropped and counted with example rows, or a problem when ``strict``; so are queries
    without a judgement. Queries whose candidates are all judged 0 can neither train nor test: dropped and counted.
    Grades other than 0, 1, 2 and a candidate judged twice for one query are problems.
    """
    queries = tables.as_ids(table[query_id], query_id, WHAT, problems)
    items = tables.as_ids(table[item_id], item_id, WHAT, problems)
    if table.num_rows == 0:
        problems.append(f"{WHAT}: there are none.")
    grades = _grades(table[grade], grade, problems)
    if queries is None or items is None or grades is None or table.num_rows == 0:
        return None, {}
    known_queries = query_ids if query_ids is not None else pc.unique(queries.drop_null()).sort()
    known_items = item_ids if item_ids is not None else pc.unique(items.drop_null())
    query = pc.fill_null(pc.index_in(queries, value_set=known_queries), -1).to_numpy().astype(np.int64)
    item = pc.fill_null(pc.index_in(items, value_set=known_items), -1).to_numpy().astype(np.int64)
    no_query, no_item = pc.is_null(queries).to_numpy(), pc.is_null(items).to_numpy()
    masks = {
        "without_query": (no_query, queries),
        "without_item": (no_item, queries),
        "unknown_query": ((query < 0) & ~no_query, queries),
        "unknown_item": ((item < 0) & ~no_item, items),
    }
    counts: dict[str, Any] = {"judgements_in_file": table.num_rows, "example_rows_dropped": {}}
    _count(masks, UNUSABLE, WHAT, strict, counts, problems)
    usable = (query >= 0) & (item >= 0)
    twice = np.zeros(len(usable), bool)
    twice[usable] = _repeated(query[usable] * (len(known_items) + 1) + item[usable])
    if twice.any():
        problems.append(
            f"{WHAT}: {twice.sum()} judge a candidate again that was judged for the same query before:"
            f" {tables.examples(twice, items)}. Keep one."
        )
    log = Log(query, item, grades, known_queries).keep(usable)
    if not usable.any():
        problems.append(f"{WHAT}: none has both a query and an item of the catalog. Are the ids the same kind?")
        return log, counts
    if query_ids is not None:
        size, relevant = len(query_ids), _has_relevant(log)
        judged, ids = np.bincount(log.user, minlength=size) > 0, pa.chunked_array([query_ids])
        _count({"without_judgement": (~judged, ids)}, UNJUDGED, "queries", strict, counts, problems)
        _count({"without_relevant": (judged & ~relevant, ids)}, UNJUDGED, "queries", False, counts, problems)
        if not relevant.any():
            problems.append(f"{WHAT}: no query has a candidate judged above 0, so there is nothing to find.")
    return with_relevant(log), counts


def with_relevant(log: Log) -> Log:
    """The judgements of queries that have a candidate judged above 0."""
    return log.keep(_has_relevant(log)[log.user])


def _has_relevant(log: Log) -> np.ndarray:
    assert log.time is not None
    return np.bincount(log.user[log.time >= LENIENT], minlength=len(log.user_ids)) > 0


def _grades(column: pa.ChunkedArray, name: str, problems: list[str]) -> np.ndarray | None:
    """Grades as float64 that are whole; None and a problem where some are not 0, 1 or 2."""
    plain = tables.plain(column)
    text = plain.cast(pa.string()) if not pa.types.is_nested(plain.type) else pa.chunked_array([[""] * len(plain)])
    numeric = pc.fill_null(pc.match_substring_regex(text, r"^\s*\+?[0-9]+(\.0*)?\s*$"), False)
    values = pc.if_else(numeric, pc.utf8_trim_whitespace(text), "-1").cast(pa.float64()).to_numpy()
    wrong = ~np.isin(values, GRADES)
    if wrong.any():
        problems.append(
            f"{WHAT}: {wrong.sum()} of {len(wrong)} values in {name!r} are no grade: {tables.examples(wrong, plain)}."
            f" Expected the whole numbers 0 (not), 1 (maybe) and {STRICT} (good)."
        )
        return None
    return values


def _count(
    masks: dict[str, tuple[np.ndarray, pa.ChunkedArray]],
    texts: dict[str, str],
    what: str,
    strict: bool,
    counts: dict[str, Any],
    problems: list[str],
) -> None:
    """Count what cannot be used, with examples; a problem each when ``strict``."""
    for name, (mask, values) in masks.items():
        counts[name] = int(mask.sum())
        if mask.any():
            shown = (
                tables.examples(mask, values)
                if what == WHAT
                else ", ".join(tables.shorten(values[int(i)].as_py()) for i in np.flatnonzero(mask)[: tables.EXAMPLES])
            )
            counts["example_rows_dropped"][name] = shown
            if strict:
                problems.append(f"{what}: {counts[name]} of {len(mask)} {texts[name]}: {shown} (strict).")


def split(log: Log, queries: pa.Table, seed: int) -> np.ndarray:
    """Which split each query of the log belongs to, an array of SPLITS aligned with ``queries``, "" for the others.

    A tenth of the distinct texts tests, a tenth validates, at least one each; queries of the same text, whatever its
    capitals, stand on the same side, so that no test text was trained on. The order is that of a SHA-256 of seed and
    text: a text mostly keeps its side when others come or go. Raises ValueError for fewer than three texts.
    """
    texts = [text.casefold() for text in queries["prompt"].to_pylist()]
    present = np.zeros(len(texts), bool)
    present[log.user] = True
    distinct = {text for text, is_there in zip(texts, present, strict=True) if is_there}
    if len(distinct) < len(SPLITS):
        raise ValueError(
            f"{present.sum()} queries with {len(distinct)} different texts are left: a split into training, validation"
            f" and test needs {len(SPLITS)}. Loosen k_core, max_users and max_items, or give more queries."
        )
    ordered = sorted(distinct, key=lambda text: hashlib.sha256(f"{seed}\n{text}".encode()).digest())
    held = max(1, round(HELD_OUT * len(ordered)))
    side = dict.fromkeys(ordered, "train") | dict.fromkeys(ordered[held : 2 * held], "valid")
    side |= dict.fromkeys(ordered[:held], "test")
    return np.array([side[t] if is_there else "" for t, is_there in zip(texts, present, strict=True)])


def to_tables(log: Log, side_Q: np.ndarray, queries: pa.Table, item_ids: pa.Array) -> dict[str, pa.Table]:
    """Make the tables of interactions/v1 for queries, by file name.

    interactions.parquet has a row for each training query alone, with its relevant items by falling grade: what
    counts popularity or reads training parts meets no other query. Judgements of all queries stand in their own.
    """
    assert log.time is not None
    grade = log.time.astype(np.int32)
    order = np.lexsort((log.item, -grade, log.user))
    query, item, grade = log.user[order], log.item[order], grade[order]
    trained = (side_Q[query] == "train") & (grade >= LENIENT)
    users, lengths = np.unique(query[trained], return_counts=True)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    ids = queries["query_id"].combine_chunks()
    kept = np.flatnonzero(side_Q != "")
    return {
        "interactions.parquet": pa.table(
            {
                "user_id": ids.take(users),
                "item_ids": pa.ListArray.from_arrays(offsets, item_ids.take(item[trained])),
                "train_length": pa.array(lengths, pa.int32()),
                "valid_position": pa.nulls(len(users), pa.int32()),
                "test_position": pa.nulls(len(users), pa.int32()),
            }
        ),
        "queries.parquet": queries.take(kept).append_column("split", pa.array(side_Q[kept], pa.string())),
        "judgements.parquet": pa.table(
            {"query_id": ids.take(query), "item_id": item_ids.take(item), "grade": pa.array(grade, pa.int32())}
        ),
    }


def describe(made: dict[str, pa.Table]) -> dict[str, Any]:
    """Key figures for the data report: queries by split, judgements by grade, what training sees."""
    side, grades = made["queries.parquet"]["split"], made["judgements.parquet"]["grade"].to_numpy()
    prompts = made["queries.parquet"]["prompt"]
    pairs = pc.list_value_length(made["interactions.parquet"]["item_ids"]).to_numpy()
    trained = pc.list_flatten(made["interactions.parquet"]["item_ids"])
    return {
        "queries": len(side),
        "training_queries": pc.sum(pc.equal(side, "train")).as_py(),
        "validation_queries": pc.sum(pc.equal(side, "valid")).as_py(),
        "test_queries": pc.sum(pc.equal(side, "test")).as_py(),
        "queries_with_the_text_of_another": len(side) - len({text.casefold() for text in prompts.to_pylist()}),
        "judgements": len(grades),
        "judged_good": int((grades == STRICT).sum()),
        "judged_maybe": int((grades == LENIENT).sum()),
        "judged_not": int((grades == 0).sum()),
        "relevant_items_a_training_query": round(float(pairs.mean()), 2),
        "training_pairs": int(pairs.sum()),
        "items_in_a_training_pair": len(pc.unique(trained)),
    }
