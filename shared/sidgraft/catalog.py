"""Catalogs: pick the columns of a user's file, check them, build each item's text and category path."""

# pyright: reportAttributeAccessIssue=false
# pyarrow.compute makes its functions at import, where a type checker cannot see them.

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sidgraft import histories, samples, tables

PATH_SEPARATOR = " > "
STRINGS = pa.list_(pa.string())
TEXT_QUALITIES = ("full", "title", "truncated", "shuffled")
NULL = pa.scalar(None, pa.string())


def source_digest(*sources: str) -> str:
    """SHA-256 over the content of the inputs; of a built-in sample, over its name and package version."""
    parts = [samples.version(s) if samples.is_sample(s) else tables.file_digest(s) for s in sources]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def text_columns(text: str, roles: dict[str, str]) -> list[str]:
    """Return the file's columns that the option ``text`` names; title, brand and so on stand for their columns."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    return list(dict.fromkeys(roles.get(name, name) for name in names))


def missing_columns(
    columns: list[str], item_id: str, parts: list[str], roles: dict[str, str], problems: list[str]
) -> None:
    """Report catalog columns that must be there: the id, what an option names, and one of the text's at least.

    ``roles`` maps title, brand, categories, price, description to columns. A role left at its own name is
    optional; the default text lists four columns, of which any catalog has but some.
    """
    if item_id not in columns:
        problems.append(tables.missing_column(item_id, "item_id", columns, "catalog"))
    for role, column in roles.items():
        if column != role and column not in columns:
            problems.append(tables.missing_column(column, role, columns, "catalog"))
    absent = [name for name in parts if name not in columns]
    for name in absent:
        if name not in roles.values():
            problems.append(tables.missing_column(name, "text", columns, "catalog"))
    if len(absent) == len(parts) and all(name in roles for name in absent):
        problems.append(
            f"catalog: no column to make the text of ({', '.join(parts) or 'text is empty'}); the columns are"
            f" {', '.join(columns)}: name some with text."
        )


def build(
    table: pa.Table, item_id: str, parts: list[str], roles: dict[str, str], problems: list[str]
) -> tuple[pa.Table | None, dict[str, int]]:
    """Make the columns of catalog/v1 from a user's table, and check them.

    Text is the columns ``parts`` in that order, joined by a space: the category path joined by " > ", a number
    behind its name (``price 0.85``), what is missing left out. Rows are ordered by item_id. Returns None and adds
    to ``problems`` where ids are empty or double, or an item has no text; also returns counts for the report.
    """
    ids = tables.as_ids(table[item_id], item_id, "catalog", problems)
    if table.num_rows == 0:
        problems.append("catalog: it has no rows.")
    if ids is None or table.num_rows == 0:
        return None, {}
    counts = {"texts_cut": 0, "prices_unreadable": 0}
    found = len(problems)
    fields = _fields(table, roles, counts, problems)
    text = _text(table, parts, roles, fields)
    counts["texts_cut"] += tables.count_long(text)
    text = tables.clean(text)
    _check_ids(ids, problems)
    _check_text(ids, text, parts, problems)
    if len(problems) > found:
        return None, counts
    built = pa.table({"item_id": ids, "text": text, **fields})
    return built.take(pc.sort_indices(ids)).combine_chunks(), counts


def _fields(table: pa.Table, roles: dict[str, str], counts: dict[str, int], problems: list[str]) -> dict[str, Any]:
    """The catalog's own columns after item_id and text; null where the user's file has no such column."""
    n = table.num_rows
    fields: dict[str, Any] = {}
    for field, role in (("title", "title"), ("brand", "brand"), ("category", "categories"), ("price", "price"),
                        ("description", "description")):  # fmt: skip
        kind = {"category": STRINGS, "price": pa.float64()}.get(field, pa.string())
        if roles[role] not in table.column_names:
            fields[field] = pa.nulls(n, kind)
        elif field == "category":
            fields[field] = _paths(table[roles[role]], roles[role], problems)
        elif field == "price":
            fields[field] = _prices(table[roles[role]], counts)
        else:
            column = table[roles[role]]
            if pa.types.is_string(column.type):
                counts["texts_cut"] += tables.count_long(column)
            fields[field] = tables.as_text(column)
    return fields


def _text(table: pa.Table, parts: list[str], roles: dict[str, str], fields: dict[str, Any]) -> pa.ChunkedArray:
    made = {
        roles["title"]: fields["title"],
        roles["brand"]: fields["brand"],
        roles["categories"]: pc.binary_join(fields["category"], PATH_SEPARATOR),
        roles["description"]: fields["description"],
        roles["price"]: _numbered("price", fields["price"]),
    }
    columns = []
    for name in parts:
        if name not in table.column_names:
            continue
        if name in made:
            column = made[name]
        elif pa.types.is_integer(table[name].type) or pa.types.is_floating(table[name].type):
            column = _numbered(name, tables.plain(table[name]))
        else:
            column = tables.as_text(table[name])
        columns.append(column if isinstance(column, pa.ChunkedArray) else pa.chunked_array([column]))
    aligned = pa.table(columns, names=[str(n) for n in range(len(columns))]).combine_chunks().columns
    # Not null_handling="skip": pyarrow 26 drops a row where all are null. Double spaces go when the text is cleaned.
    joined = pc.binary_join_element_wise(*[pc.fill_null(column, "") for column in aligned], " ")
    return joined if isinstance(joined, pa.ChunkedArray) else pa.chunked_array([joined])


def _numbered(name: str, numbers: Any) -> Any:
    """`price 0.85`; a whole number is written without the point."""
    digits = pc.replace_substring_regex(pc.cast(numbers, pa.string()), r"\.0$", "")
    return pc.binary_join_element_wise(pa.scalar(name), digits, " ")


def _check_ids(ids: pa.ChunkedArray, problems: list[str]) -> None:
    empty = pc.is_null(ids).to_numpy()
    if empty.any():
        problems.append(f"catalog: {empty.sum()} items have no id: {tables.examples(empty)}.")
    codes = ids.combine_chunks().dictionary_encode().indices.to_numpy(zero_copy_only=False)
    codes = np.where(empty, -1, codes).astype(np.int64)
    repeated = np.ones(len(codes), bool)
    repeated[np.unique(codes, return_index=True)[1]] = False
    repeated &= ~empty
    if repeated.any():
        problems.append(
            f"catalog: {repeated.sum()} rows repeat the id of a row before them:"
            f" {tables.examples(repeated, ids)}. Keep one row an item."
        )


def _check_text(ids: pa.ChunkedArray, text: pa.ChunkedArray, parts: list[str], problems: list[str]) -> None:
    empty = pc.is_null(text).to_numpy()
    if empty.any():
        problems.append(
            f"catalog: {empty.sum()} items have no text in {', '.join(parts)}: {tables.examples(empty, ids)}."
            " Fill them, drop them, or name more columns with text."
        )


def _paths(column: pa.ChunkedArray, name: str, problems: list[str]) -> pa.Array:
    """Category paths, clean, without empty levels; null where nothing is left. Of several paths the first.

    All null, and a problem, where the column holds neither text, numbers, lists of them nor lists of such lists.
    """
    try:
        return _paths_of(tables.plain(column).combine_chunks())
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError):  # what has no text: structs, maps, bytes, deeper lists
        problems.append(
            f"catalog: column {name!r} is {column.type}, expected category paths: lists of names, lists of such lists"
            f' (the first is taken), or text such as "A{PATH_SEPARATOR}B".'
        )
        return pa.nulls(len(column), STRINGS)


def _paths_of(array: pa.Array) -> pa.Array:
    if pa.types.is_null(array.type):
        return pa.nulls(len(array), STRINGS)
    if not tables.is_list(array.type):
        text = array.cast(pa.string())
        arrows = pc.any(pc.match_substring(text, PATH_SEPARATOR)).as_py()
        array = pc.split_pattern(text, PATH_SEPARATOR if arrows else "|")
    elif tables.is_list(array.type.value_type):
        lengths = _lengths(array)
        starts = pa.array(np.cumsum(lengths) - lengths, mask=lengths == 0)
        array = pc.take(pc.list_flatten(array), starts)
    elif pa.types.is_null(array.type.value_type):
        return pa.nulls(len(array), STRINGS)
    owner = np.repeat(np.arange(len(array)), _lengths(array))
    names = tables.plain(pa.chunked_array([pc.list_flatten(array)])).cast(pa.string())
    names = tables.clean(names).combine_chunks()
    kept = names.is_valid().to_numpy(zero_copy_only=False)
    lengths = np.bincount(owner[kept], minlength=len(array))
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return pa.ListArray.from_arrays(offsets, names.filter(pa.array(kept)), mask=pa.array(lengths == 0))


def _prices(column: pa.ChunkedArray, counts: dict[str, int]) -> pa.ChunkedArray:
    """Prices as float64. Of text such as "$1,299.00" the number; what is no number is null and counted."""
    column = tables.plain(column)
    kind = column.type
    if pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        price = column.cast(pa.float64())
    else:
        text = pc.replace_substring_regex(tables.as_text(column), r",(\d{3})", r"\1")
        number = pc.struct_field(pc.extract_regex(text, r"^[^\d.,-]*(?P<n>\d+(?:\.\d+)?)[^\d.,]*$"), "n")
        price = number.cast(pa.float64())
    price = pc.if_else(pc.is_finite(price), price, pa.scalar(None, pa.float64()))
    counts["prices_unreadable"] = price.null_count - column.null_count
    return price


def _lengths(array: pa.Array) -> np.ndarray:
    return pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False).astype(np.int64)


def degrade(catalog: pa.Table, quality: str, seed: int) -> pa.Table:
    """Return catalog/v1 with less in its texts, to measure how much of the result depends on them.

    The encoder reads ``text``, grounding and the tasks of fine-tuning the other columns, so both change alike.

    full: nothing is changed. title: the title is all that is left; an item without one keeps its text. truncated: the
    first half of the words of text, title and description (of three words two). shuffled: the words of each of
    these in random order. The last two leave brand, category path and price as they are.
    """
    if quality == "full":
        return catalog
    columns = {name: catalog[name] for name in catalog.column_names}
    if quality == "title":
        for name in ("brand", "category", "price", "description"):
            columns[name] = pa.nulls(catalog.num_rows, catalog.schema.field(name).type)
        columns["text"] = pc.coalesce(catalog["title"], catalog["text"])
        return pa.table(columns, schema=catalog.schema)
    rng = np.random.default_rng(seed)
    for name in ("text", "title", "description"):
        words = [None if text is None else text.split() for text in catalog[name].to_pylist()]
        kept = [
            None if w is None else w[: (len(w) + 1) // 2] if quality == "truncated" else rng.permuted(w) for w in words
        ]
        columns[name] = pa.array([None if w is None else " ".join(w) for w in kept], pa.string())
    return pa.table(columns, schema=catalog.schema)


def describe(catalog: pa.Table) -> dict[str, Any]:
    """Key figures of catalog/v1 for the data report: text lengths, what is there, double titles, categories."""
    n = catalog.num_rows
    titles = catalog["title"].drop_null()
    counted = pc.value_counts(_category_column(catalog).drop_null().sort())  # by name, so that equal sizes are, too
    names, sizes = (pc.struct_field(counted, part) for part in ("values", "counts"))
    largest = np.argsort(-sizes.to_numpy(zero_copy_only=False), kind="stable")[:20]
    return {
        "items": n,
        "text_characters": histories.quantiles(pc.utf8_length(catalog["text"]).to_numpy()),
        "share_with": {
            name: round(1 - catalog[name].null_count / max(n, 1), 4)
            for name in ("title", "brand", "category", "price", "description")
        },
        "items_with_a_title_of_another": int(len(titles) - _singles(titles)),
        "items_with_a_text_of_another": int(n - _singles(catalog["text"])),
        "categories": len(names),
        "largest_categories": {names[int(i)].as_py(): sizes[int(i)].as_py() for i in largest},
    }


def _singles(texts: pa.ChunkedArray) -> int:
    """How many values occur once."""
    counts = pc.struct_field(pc.value_counts(texts), "counts").to_numpy(zero_copy_only=False)
    return int((counts == 1).sum())


def item_categories(catalog: pa.Table, level: int | None = None) -> list[str | None]:
    """Return each item's category: its entry at the first level that takes more than one value (METHOD 10).

    None where an item has no such level, and for every item where no level takes two values. ``level`` takes that
    level (0 is the first) in its place: two catalogs compare at the same level of both. ``catalog`` has the columns of
    catalog/v1.
    """
    return _category_column(catalog, level).to_pylist()


def category_level(catalog: pa.Table) -> int | None:
    """The first level of the category paths that takes more than one value, from 0; None where no level does."""
    lengths, names, first = _levels(catalog)
    for level in range(int(lengths.max(initial=0))):
        if pc.count_distinct(_at(level, lengths, names, first)).as_py() > 1:
            return level
    return None


def _category_column(catalog: pa.Table, level: int | None = None) -> pa.Array:
    level = category_level(catalog) if level is None else level
    return pa.nulls(catalog.num_rows, pa.string()) if level is None else _at(level, *_levels(catalog))


def _levels(catalog: pa.Table) -> tuple[np.ndarray, pa.Array, np.ndarray]:
    """Of each category path its length and where it begins among the names of all, and these names."""
    paths = catalog["category"].combine_chunks()
    if not pa.types.is_list(paths.type):  # a column of nulls
        paths = pa.nulls(len(paths), STRINGS)
    lengths = _lengths(paths)
    return lengths, pc.list_flatten(paths), np.cumsum(lengths) - lengths


def _at(level: int, lengths: np.ndarray, names: pa.Array, first: np.ndarray) -> pa.Array:
    """The names at a level of the paths, null where a path does not reach it."""
    return names.take(pa.array(first + level, mask=lengths <= level))
