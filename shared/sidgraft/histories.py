"""Histories of users: read a log, sort, filter and sample it, cut and split it, count training targets.

A Log holds one row an interaction, in three arrays of equal length: whole numbers for user and item, and a time
that only serves to compare. All steps work on whole arrays; none loops over rows.
"""

# pyright: reportAttributeAccessIssue=false
# pyarrow.compute makes its functions at import, where a type checker cannot see them.

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sidgraft import tables

TOO_SHORT = 3  # fewer interactions cannot give a training item, a validation target and a test target
DROPPED_EXAMPLES = 3  # rows shown of each kind of interactions that are dropped
# Why an interaction cannot be used: its name in the counts, and what is said of it.
UNUSABLE = {
    "without_user": "have no user",
    "without_item": "have no item",
    "unknown_item": "have an item that is not in the catalog",
}
VALID_QUANTILE, TEST_QUANTILE = 0.8, 0.9  # of time, in the global-time split

NUMBER = r"^\s*[+-]?\d+(\.\d+)?([eE][+-]?\d+)?\s*$"
MOMENT = r"^\s*\d{4}-\d{2}-\d{2}([ T]\d{2}:\d{2}(:\d{2}(\.\d+)?)?)?(Z|[+-]\d{2}(:?\d{2})?)?\s*$"


class Log(NamedTuple):
    """Interactions: ``user`` and ``item`` index ``user_ids`` and the catalog; ``time`` is None without one."""

    user: np.ndarray
    item: np.ndarray
    time: np.ndarray | None
    user_ids: pa.Array

    def keep(self, mask: np.ndarray) -> Log:
        """Return the log of the rows in ``mask``."""
        return Log(self.user[mask], self.item[mask], None if self.time is None else self.time[mask], self.user_ids)


def missing_columns(
    columns: list[str], user_id: str, item_id: str, items: str, timestamp: str, problems: list[str]
) -> None:
    """Report interactions columns that must be there: the user, and the item or the list of items.

    A timestamp column of the default name is optional, one that the user has named is not.
    """
    what = "interactions"
    if user_id not in columns:
        problems.append(tables.missing_column(user_id, "user_id", columns, what))
    if items not in columns and item_id not in columns:
        problems.append(
            tables.missing_column(item_id, "interaction_item_id", columns, what)
            + f" For one row a user, name the column with the list of items by items; {items!r} is not there."
        )
    if timestamp not in ("timestamp", "") and timestamp not in columns:
        problems.append(tables.missing_column(timestamp, "timestamp", columns, what))


def build(
    table: pa.Table, user_id: str, item_id: str, items: str, timestamp: str, item_ids: pa.Array | None,
    strict: bool, problems: list[str],
) -> tuple[Log | None, dict[str, Any]]:  # fmt: skip
    """Make a log, users in the order of their ids and each user's interactions in time order, and check it.

    A column ``items`` of lists means one row a user, perhaps with a list of timestamps beside it; so does one of
    text (split at spaces, commas and bars) where there is no item column. Interactions without a user or an item
    and those with an item that is not in ``item_ids`` (None: not known, skip this check) are dropped and counted
    with example rows, or a problem when ``strict``. Equal times, and rows without times, keep the file's order.
    """
    what = "interactions"
    per_user = items in table.column_names and (
        item_id not in table.column_names or pa.types.is_nested(table[items].type)
    )
    users = tables.as_ids(table[user_id], user_id, what, problems)
    times = table[timestamp] if timestamp in table.column_names else None
    row = np.arange(table.num_rows)
    if per_user:
        lists = _split(tables.plain(table[items]))
        if lists is None:
            problems.append(f"{what}: column {items!r} is {table[items].type}, expected a list of item ids or text.")
            return None, {}
        lengths = _lengths(lists)
        row = np.repeat(row, lengths)
        bought = tables.as_ids(pa.chunked_array([pc.list_flatten(lists)]), items, what, problems)
        if times is not None:
            times = _times_of_lists(times, timestamp, lengths, problems)
            if times is None:
                return None, {}
    else:
        bought = tables.as_ids(table[item_id], item_id, what, problems)
    if len(row) == 0:
        problems.append(f"{what}: there are none.")
    order = None if times is None else _sortable(tables.plain(times), timestamp, row, problems)
    if users is None or bought is None or len(row) == 0 or (times is not None and order is None):
        return None, {}

    user_ids = pc.unique(users.drop_null()).sort()
    user = pc.fill_null(pc.index_in(users, value_set=user_ids), -1).to_numpy().astype(np.int64)[row]
    known = item_ids if item_ids is not None else pc.unique(bought.drop_null())
    item = pc.fill_null(pc.index_in(bought, value_set=known), -1).to_numpy().astype(np.int64)
    counts: dict[str, Any] = {"users_in_file": len(user_ids), "interactions_in_file": len(item)}
    counts |= _count_unusable(user, item, row, bought, strict, problems)
    log = Log(user, item, order, user_ids).keep((user >= 0) & (item >= 0))
    if len(log.item) == 0:
        problems.append(f"{what}: none has both a user and an item of the catalog. Are the ids the same kind?")
    log = _sorted(log)
    if len(log.item) and np.bincount(log.user).max() < TOO_SHORT:
        problems.append(
            f"{what}: no user is long enough: the longest history has {np.bincount(log.user).max()} interactions"
            f" with items of the catalog, and a split needs {TOO_SHORT}."
        )
    return log, counts


def k_core(log: Log, k: int) -> Log:
    """Drop users and items with fewer than ``k`` interactions, until none is left that has fewer."""
    while k > 0:
        keep = (np.bincount(log.user)[log.user] >= k) & (np.bincount(log.item)[log.item] >= k)
        if keep.all():
            break
        log = log.keep(keep)
    return log


def sample_users(log: Log, n: int, seed: int) -> Log:
    """Keep a random sample of ``n`` users; all where ``n`` is 0 or there are no more."""
    users = np.unique(log.user)
    if n == 0 or n >= len(users):
        return log
    return log.keep(np.isin(log.user, np.random.default_rng(seed).choice(users, n, replace=False)))


def most_frequent_items(log: Log, n: int) -> Log:
    """Keep the ``n`` items with the most interactions, the first in catalog order where equal; 0 keeps all."""
    if n == 0 or len(log.item) == 0:
        return log
    count = np.bincount(log.item)
    rank = np.empty(len(count), np.int64)
    rank[np.argsort(-count, kind="stable")] = np.arange(len(count))
    return log.keep(rank[log.item] < n)


def leave_one_out(log: Log, max_history: int) -> dict[str, np.ndarray]:
    """Split each user: the last item tests, the one before validates, the rest trains (METHOD 2).

    Histories are cut to their last ``max_history`` interactions (0: not) before that. Users with fewer than three
    have no targets. Returns, one a user: user, first and end (rows of the log, a half-open range), train_length,
    valid_position, test_position (-1: none).
    """
    user, first, length = _runs(log)
    end = first + length
    if max_history:
        first = np.maximum(first, end - max_history)
    length = end - first
    split = length >= TOO_SHORT
    return {
        "user": user,
        "first": first,
        "end": end,
        "train_length": np.where(split, length - 2, length),
        "valid_position": np.where(split, length - 2, -1),
        "test_position": np.where(split, length - 1, -1),
    }


def global_time(log: Log, max_history: int) -> dict[str, np.ndarray]:
    """Split at two moments for all users: the 80 % and the 90 % quantile of time.

    What comes before the first trains; a user's first item from there to the second moment is the validation
    target, the first one after the second moment the test target; what comes after the last target is left out.
    A target needs at least one item before it. The training part is cut to its last ``max_history`` - 1 items (0:
    not), so that the first target's history has the length it has under leave-one-out; items bought between the
    two targets stay in the test history, uncut. Users without a training part or target are left out. Returns
    what `leave_one_out` returns.
    """
    assert log.time is not None
    cut_valid, cut_test = np.quantile(log.time, [VALID_QUANTILE, TEST_QUANTILE], method="higher")
    user, start, length = _runs(log)
    train = np.add.reduceat((log.time < cut_valid).astype(np.int64), start)
    before_test = np.add.reduceat((log.time < cut_test).astype(np.int64), start)
    valid = np.where((before_test > train) & (train > 0), train, -1)
    test = np.where((length > before_test) & (before_test > 0), before_test, -1)
    kept = np.where(np.maximum(valid, test) >= 0, np.maximum(valid, test) + 1, train)
    cut = np.maximum(train - (max_history - 1), 0) if max_history else np.zeros_like(train)
    split = {
        "user": user,
        "first": start + cut,
        "end": start + kept,
        "train_length": train - cut,
        "valid_position": np.where(valid >= 0, valid - cut, -1),
        "test_position": np.where(test >= 0, test - cut, -1),
    }
    useful = (train > 0) | (np.maximum(valid, test) >= 0)
    return {name: values[useful] for name, values in split.items()}


def to_table(log: Log, split: dict[str, np.ndarray], item_ids: pa.Array) -> pa.Table:
    """Make the table of interactions/v1; ``item_ids`` are the ids that the log's items index."""
    length = split["end"] - split["first"]
    offsets = np.concatenate([[0], np.cumsum(length)])
    rows = np.arange(offsets[-1]) + np.repeat(split["first"] - offsets[:-1], length)
    lists = pa.ListArray.from_arrays(offsets.astype(np.int32), item_ids.take(log.item[rows]))

    def position(name: str) -> pa.Array:
        return pa.array(split[name], pa.int32(), mask=split[name] < 0)

    return pa.table(
        {
            "user_id": log.user_ids.take(split["user"]),
            "item_ids": lists,
            "train_length": pa.array(split["train_length"], pa.int32()),
            "valid_position": position("valid_position"),
            "test_position": position("test_position"),
        }
    )


def describe(interactions: pa.Table, item_ids: list[str] | pa.Array) -> dict[str, Any]:
    """Key figures of interactions/v1 for the data report: counts, lengths, how unevenly items are bought."""
    length = _lengths(interactions["item_ids"].combine_chunks())
    frequency = training_counts(interactions, item_ids)
    head = np.sort(frequency)[::-1][: math.ceil(0.2 * len(item_ids))]
    targets = int(frequency.sum())
    assistant = assistant_counts(interactions, item_ids)
    no_valid, no_test = (interactions[f"{part}_position"].is_null().to_numpy() for part in ("valid", "test"))
    return {
        "users": interactions.num_rows,
        "interactions": int(length.sum()),
        "average_length": round(float(length.mean()), 2) if len(length) else None,
        "length_quantiles": quantiles(length),
        "training_targets": targets,
        "validation_users": int((~no_valid).sum()),
        "test_users": int((~no_test).sum()),
        "users_training_only": int((no_valid & no_test).sum()),
        "items_never_trained_on": int((frequency == 0).sum()),
        "items_trained_on_at_most_once": int((frequency <= 1).sum()),
        "assistant_targets": int(assistant.sum()),
        "items_never_an_assistant_target": int((assistant == 0).sum()),
        "items_at_most_once_an_assistant_target": int((assistant <= 1).sum()),
        "share_of_top_20_percent_items": round(float(head.sum()) / targets, 4) if targets else None,
    }


def quantiles(values: np.ndarray) -> dict[str, float]:
    """Minimum, quartiles, 95 % quantile and maximum; empty for no values."""
    marks = {"min": 0.0, "q25": 0.25, "median": 0.5, "q75": 0.75, "q95": 0.95, "max": 1.0}
    return {name: float(np.quantile(values, q)) for name, q in marks.items()} if len(values) else {}


def training_counts(interactions: pa.Table, item_ids: list[str] | pa.Array) -> np.ndarray:
    """Return f_i, int64, aligned with ``item_ids``: how often an item stands in a training part (METHOD 10).

    Every position of a training part counts, the first one too: next-item fine-tuning supervises all of them.
    ``interactions`` has the columns of interactions/v1; items that are not in ``item_ids`` are not counted.
    """
    rows, positions, lengths = _positions(interactions, item_ids)
    return _count(rows[positions < lengths], item_ids)


def assistant_counts(interactions: pa.Table, item_ids: list[str] | pa.Array) -> np.ndarray:
    """Return, as `training_counts` does, how often an item is the last of a training part (METHOD 10).

    That is the assistant's target in next-item fine-tuning: what stands before it is the user's turn.
    """
    rows, positions, lengths = _positions(interactions, item_ids)
    return _count(rows[positions == lengths - 1], item_ids)


def _positions(interactions: pa.Table, item_ids: list[str] | pa.Array) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return one an interaction: the item's row in ``item_ids`` (-1: none), its position, the train_length."""
    lists = interactions["item_ids"].combine_chunks()
    lengths = _lengths(lists)
    positions = np.arange(lengths.sum()) - np.repeat(np.cumsum(lengths) - lengths, lengths)
    known = item_ids if isinstance(item_ids, pa.Array) else pa.array(item_ids, pa.string())
    codes = pc.index_in(pc.list_flatten(lists), value_set=known)
    rows = pc.fill_null(codes, -1).to_numpy(zero_copy_only=False)
    return rows, positions, np.repeat(interactions["train_length"].to_numpy(), lengths)


def _count(rows: np.ndarray, item_ids: list[str] | pa.Array) -> np.ndarray:
    return np.bincount(rows[rows >= 0], minlength=len(item_ids)).astype(np.int64)


def _split(column: pa.ChunkedArray) -> pa.Array | None:
    """Return lists of items; text is split at spaces, commas and bars. None for anything else."""
    array = column.combine_chunks()
    kind = array.type
    if tables.is_list(kind):
        return array
    if pa.types.is_string(kind):
        return pc.split_pattern_regex(pc.utf8_trim(array, " ,|"), r"[\s,|]+")
    return None


def _times_of_lists(
    times: pa.ChunkedArray, name: str, lengths: np.ndarray, problems: list[str]
) -> pa.ChunkedArray | None:
    """Flatten the timestamps of one row a user; None and a problem where they are no lists as long as the items."""
    if not tables.is_list(times.type):
        problems.append(
            f"interactions: column {name!r} is {times.type}, expected a list of times beside each user's list of"
            ' items. Where the items stand in time order already, leave it out: timestamp="".'
        )
        return None
    array = times.combine_chunks()
    differ = _lengths(array) != lengths
    if differ.any():
        problems.append(
            f"interactions: {differ.sum()} users have another number of {name} than of items:"
            f" {tables.examples(differ)}."
        )
        return None
    return pa.chunked_array([pc.list_flatten(array)])


def _sortable(times: pa.ChunkedArray, name: str, row: np.ndarray, problems: list[str]) -> np.ndarray | None:
    """Return times as numbers that sort as the times do; None and a problem where they cannot be compared."""
    kind = times.type
    if pa.types.is_string(kind):
        bad, values = _parse_times(times)
    elif pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        moments = times.cast(pa.timestamp("ms")) if pa.types.is_date(kind) else times
        bad, values = pc.is_null(times).to_numpy(), moments.cast(pa.int64())  # in the column's own unit
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        values = times.cast(pa.float64()) if pa.types.is_decimal(kind) else times
        bad = pc.invert(pc.fill_null(pc.is_finite(values), False)).to_numpy()
    else:
        problems.append(f"interactions: column {name!r} is {kind}, expected numbers, dates or times.")
        return None
    if bad.any():
        rows = tables.examples(bad, times) if len(row) == len(np.unique(row)) else tables.examples(bad)
        problems.append(
            f"interactions: {bad.sum()} of {len(bad)} {name} values cannot be sorted with the others: {rows}."
            " Expected all numbers, or all dates and times such as 2017-01-31T12:00:00, none empty."
        )
        return None
    return values.to_numpy()


def _parse_times(text: pa.ChunkedArray) -> tuple[np.ndarray, Any]:
    """Read text as numbers or as moments, whichever most of it is; also return which rows are not that."""
    numbers = pc.fill_null(pc.match_substring_regex(text, NUMBER), False).to_numpy()
    numeric = 2 * numbers.sum() >= len(numbers)
    bad = ~(numbers if numeric else pc.fill_null(pc.match_substring_regex(text, MOMENT), False).to_numpy())
    if bad.any():
        return bad, None
    text = pc.utf8_trim_whitespace(text)
    kinds = (pa.int64(), pa.float64()) if numeric else (pa.timestamp("us"), pa.timestamp("us", "UTC"))
    for kind in kinds:
        try:
            parsed = text.cast(kind)
            return bad, parsed if numeric else parsed.cast(pa.int64())
        except pa.ArrowInvalid:
            continue
    return _uncastable(text, kinds[-1] if numeric else kinds[0]), None


def _uncastable(text: pa.ChunkedArray, kind: pa.DataType) -> np.ndarray:
    """Which rows, of the right form, are no time (a month 13), or have a zone where others have none."""

    def fails(value: Any) -> bool:
        try:
            value.cast(kind)
        except pa.ArrowInvalid:
            return True
        return False

    return np.array([fails(value) for value in text])


def _count_unusable(
    user: np.ndarray, item: np.ndarray, row: np.ndarray, bought: pa.ChunkedArray, strict: bool,
    problems: list[str],
) -> dict[str, Any]:  # fmt: skip
    """Count the interactions that cannot be used, with a few rows of the file for each kind that there is."""
    empty_item = pc.is_null(bought).to_numpy()
    masks = {"without_user": user < 0, "without_item": empty_item, "unknown_item": (item < 0) & ~empty_item}
    counts: dict[str, Any] = {name: int(mask.sum()) for name, mask in masks.items()}
    examples = {}
    for name, mask in masks.items():
        if mask.any():
            # Row numbers of the file: with one row a user, several interactions stand in one row.
            rows = [
                f"{row[i] + 1}" + (f" ({tables.shorten(bought[int(i)].as_py())})" if name != "without_item" else "")
                for i in np.flatnonzero(mask)[: tables.EXAMPLES]
            ]
            examples[name] = rows[:DROPPED_EXAMPLES]
            if strict:
                shown = ", ".join(rows) + (", …" if counts[name] > len(rows) else "")
                problems.append(f"interactions: {counts[name]} of {len(mask)} {UNUSABLE[name]}: row {shown} (strict).")
    return counts | {"example_rows_dropped": examples}


def _sorted(log: Log) -> Log:
    """Order by user, then time; both sorts are stable, so equal times keep the order of the file."""
    order = np.argsort(log.user, kind="stable") if log.time is None else np.lexsort((log.time, log.user))
    return log.keep(order)


def _runs(log: Log) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the users, the row where each one's run starts, and its length; the log is ordered by user."""
    return np.unique(log.user, return_index=True, return_counts=True)


def _lengths(array: pa.Array) -> np.ndarray:
    return pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False).astype(np.int64)
