"""Read a catalog and interactions, check them, split every user's history. Run: sidgraft prepare --help."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from sidgraft import artifacts, checks, histories, samples, tables
from sidgraft import catalog as catalogs
from sidgraft.progress import say

SPLITS = ("leave-one-out", "global-time")


def prepare(
    catalog: str,
    interactions: str,
    out_catalog: str,
    out_interactions: str,
    *,
    item_id: str = "item_id",
    text: str = "title,brand,categories,price",
    title: str = "title",
    brand: str = "brand",
    categories: str = "categories",
    price: str = "price",
    description: str = "description",
    user_id: str = "user_id",
    interaction_item_id: str = "",
    items: str = "items",
    timestamp: str = "timestamp",
    split: str = "leave-one-out",
    max_history: int = 21,
    k_core: int = 0,
    max_users: int = 0,
    max_items: int = 0,
    text_quality: str = "full",
    strict: bool = False,
    seed: int = 0,
    source_digest: str = "",
) -> dict[str, Any]:
    """Read a catalog and interactions, report what is wrong with them at once, and split every history.

    Args:
        catalog: Items, one a row: a Parquet, CSV, TSV or JSON Lines file (text files also as .gz; path or s3://),
            or sample:complete-journey.
        interactions: One row an interaction (user, item and perhaps a timestamp) or one row a user (user and the
            list of items in time order): the same file types, or sample:complete-journey.
        out_catalog: Directory to write the catalog artifact to.
        out_interactions: Directory to write the interactions artifact to.
        item_id: Catalog column with the item's id.
        text: Catalog columns, comma-separated, that make up the text of an item, in this order. Title, brand,
            categories, price and description stand for the columns named for them below, where there are such.
        title: Catalog column with the title.
        brand: Catalog column with the brand; ignored where the catalog has none.
        categories: Catalog column with the category path: a list, a list of paths, or text such as "A > B".
        price: Catalog column with the price.
        description: Catalog column with a longer description.
        user_id: Interactions column with the user's id.
        interaction_item_id: Interactions column with the item's id; empty means the same name as item_id.
        items: Interactions column with a user's list of items, in the one-row-a-user layout; text is split at
            spaces, commas and bars.
        timestamp: Interactions column to sort by, where there is one; otherwise row order is time order.
        split: leave-one-out (last item tests, the one before validates) or global-time (cut by time at the
            80 % and 90 % quantile, which avoids the leak of the future).
        max_history: Interactions kept of each user, the latest ones, targets included; 0 keeps all. Under
            global-time, the training part and the first target together.
        k_core: Drop users and items with fewer interactions than this, repeatedly; 0 keeps all.
        max_users: Keep a random sample of this many users; 0 keeps all.
        max_items: Keep this many of the most frequent items; 0 keeps all.
        text_quality: full; or how much less the texts say, to measure what depends on them: title (nothing but the
            title), truncated (the first half of the words) or shuffled (the words in random order). Encoder, grounding
            and tasks all read these texts.
        strict: Fail on interactions with unknown items, or without user or item, instead of dropping them with
            a count.
        seed: Seed of the user sample and of shuffled words.
        source_digest: Digest of the two inputs, when the caller knows it; a difference is an error. It makes
            a pipeline run prepare again when the content behind a path has changed.

    Raises:
        ValueError: For everything that is wrong with the inputs, in one message with counts and example rows.
    """
    checks.one_of("split", split, SPLITS)
    checks.one_of("text_quality", text_quality, catalogs.TEXT_QUALITIES)
    roles = {
        "title": title, "brand": brand, "categories": categories, "price": price, "description": description,
    }  # fmt: skip
    settings = roles | {
        "item_id": item_id, "text": text, "user_id": user_id, "interaction_item_id": interaction_item_id,
        "items": items, "timestamp": timestamp, "split": split, "max_history": max_history, "k_core": k_core,
        "max_users": max_users, "max_items": max_items,
        "text_quality": text_quality, "strict": strict, "seed": seed,
    }  # fmt: skip
    parts = catalogs.text_columns(text, roles)
    bought_id = interaction_item_id or item_id
    problems = _wrong_settings(max_history, k_core, max_users, max_items)

    # Read. What is wrong is collected; nothing is computed with or written before all of it has been reported.
    rows, columns, log_rows, log_columns = _read(
        catalog, interactions, [item_id, *parts, *roles.values()], [user_id, bought_id, items, timestamp], problems
    )
    if rows is not None:
        catalogs.missing_columns(columns, item_id, parts, roles, problems)
    if log_rows is not None:
        histories.missing_columns(log_columns, user_id, bought_id, items, timestamp, problems)

    # Check the content of what could be read, and bring it into shape.
    table = log = None
    text_counts: dict[str, int] = {}
    log_counts: dict[str, Any] = {}
    if rows is not None and item_id in columns and set(parts) & set(columns):
        table, text_counts = catalogs.build(rows, item_id, parts, roles, problems)
    if log_rows is not None and user_id in log_columns and (items in log_columns or bought_id in log_columns):
        known = None if table is None else table["item_id"].combine_chunks()
        log, log_counts = histories.build(log_rows, user_id, bought_id, items, timestamp, known, strict, problems)
        if log is not None and log.time is None and split == "global-time":
            problems.append("interactions: split is global-time, which needs a timestamp; name its column.")
    digest = (
        _digest(catalog, interactions, source_digest, problems) if rows is not None and log_rows is not None else ""
    )
    tables.raise_all(problems)
    assert rows is not None
    assert table is not None
    assert log is not None

    # Filter and sample, then cut and split.
    never_bought = table.num_rows - len(np.unique(log.item))
    log = histories.k_core(log, k_core)
    log = histories.sample_users(log, max_users, seed)
    log = histories.most_frequent_items(log, max_items)
    log = histories.k_core(log, k_core)
    _check_left(log, k_core, max_users, max_items)
    item_ids = table["item_id"].combine_chunks()
    if split == "leave-one-out":
        parted = histories.leave_one_out(log, max_history)
    else:
        parted = histories.global_time(log, max_history)
        if max(parted["valid_position"].max(initial=-1), parted["test_position"].max(initial=-1)) < 0:
            raise ValueError(
                "split global-time: no user has an interaction both before and after the 80 % quantile of time."
            )
    users = histories.to_table(log, parted, item_ids)
    if k_core or max_items:
        table = table.take(np.unique(log.item))
    table = catalogs.degrade(table, text_quality, seed)

    # Describe, write, tell.
    described = histories.describe(users, table["item_id"].combine_chunks())
    report = {"catalog": catalogs.describe(table) | text_counts, "interactions": described | log_counts}
    report["catalog"] |= {"items_in_file": rows.num_rows, "items_never_bought": never_bought}
    summary = _summary(report) | {"source_digest": digest}
    with artifacts.create(out_catalog, "catalog/v1", stage="prepare", arguments=settings) as draft:
        draft.write_table("catalog.parquet", table)
        draft.write_json("data_report.json", report)
        draft.metadata.update(summary)
        draft.facts["source_digest"] = digest
        written = draft.seal()  # one inside the other, so that a failure in either leaves neither
        with artifacts.create(
            out_interactions, "interactions/v1", stage="prepare", arguments=settings, inputs={"catalog": written}
        ) as draft:
            draft.write_table("interactions.parquet", users)
            draft.metadata.update(summary)
            draft.facts["source_digest"] = digest
    _tell(report)
    return summary


def _wrong_settings(max_history: int, k_core: int, max_users: int, max_items: int) -> list[str]:
    sizes = {"max_history": max_history, "k_core": k_core, "max_users": max_users, "max_items": max_items}
    problems = [f"{name} is {value}, expected 0 or more." for name, value in sizes.items() if value < 0]
    if 0 < max_history < histories.TOO_SHORT:
        problems.append(
            f"max_history is {max_history}, expected 0 (all) or at least {histories.TOO_SHORT}: an item to train"
            " on and two targets."
        )
    return problems


def _read(
    catalog: str, interactions: str, wanted: list[str], log_wanted: list[str], problems: list[str]
) -> tuple[pa.Table | None, list[str], pa.Table | None, list[str]]:
    """Read both inputs: the wanted columns that are there, and the names of all columns."""
    found: dict[str, tuple[pa.Table, pa.Table]] = {}
    for source in {catalog, interactions}:
        if samples.is_sample(source):
            try:
                found[source] = samples.read(source)
            except ValueError as error:
                problems.append(str(error))
    tables_read: list[tuple[pa.Table | None, list[str]]] = []
    for place, (source, names, what) in enumerate(
        [(catalog, wanted, "catalog"), (interactions, log_wanted, "interactions")]
    ):
        if source in found:
            sample = found[source][place]
            tables_read.append((sample, sample.column_names))
        elif samples.is_sample(source):
            tables_read.append((None, []))
        else:
            tables_read.append(tables.read(source, names, what, problems))
    return (*tables_read[0], *tables_read[1])


def _digest(catalog: str, interactions: str, expected: str, problems: list[str]) -> str:
    digest = catalogs.source_digest(catalog, interactions)
    if expected and digest != expected:
        problems.append(
            f"the inputs have the digest {digest}, source_digest says {expected}: they changed since it was taken."
        )
    return digest


def _check_left(log: histories.Log, k_core: int, max_users: int, max_items: int) -> None:
    longest = np.bincount(log.user).max() if len(log.user) else 0
    if longest < histories.TOO_SHORT:
        raise ValueError(
            f"k_core={k_core}, max_users={max_users} and max_items={max_items} leave {len(np.unique(log.user))} users"
            f" and {len(log.user)} interactions, no user with the {histories.TOO_SHORT} that a split needs: loosen"
            " them."
        )


def _summary(report: dict[str, Any]) -> dict[str, Any]:
    catalog, interactions = report["catalog"], report["interactions"]
    dropped = sum(interactions[name] for name in histories.UNUSABLE)
    return {
        "items": catalog["items"],
        "users": interactions["users"],
        "interactions": interactions["interactions"],
        "average_length": interactions["average_length"],
        "interactions_dropped": dropped,
        "validation_users": interactions["validation_users"],
        "test_users": interactions["test_users"],
        "users_training_only": interactions["users_training_only"],
        "training_targets": interactions["training_targets"],
        "items_never_trained_on": interactions["items_never_trained_on"],
        "texts_cut": catalog["texts_cut"],
    }


def _tell(report: dict[str, Any]) -> None:
    catalog, log = report["catalog"], report["interactions"]
    text = catalog["text_characters"]
    say(
        f"prepare: {catalog['items']:,} items (text {text['median']:.0f} characters in the median),"
        f" {log['users']:,} users, {log['interactions']:,} interactions after the cut,"
        f" {log['average_length']} a user."
    )
    say(
        f"prepare: {log['test_users']:,} users to test, {log['validation_users']:,} to validate,"
        f" {log['users_training_only']:,} in training only; {log['training_targets']:,} training targets;"
        f" {log['items_never_trained_on']:,} items are in no training part,"
        f" {log['items_never_an_assistant_target']:,} never the last of one."
    )
    for reason, text in histories.UNUSABLE.items():
        if log[reason]:
            rows = ", ".join(log["example_rows_dropped"][reason])
            say(f"prepare: {log[reason]:,} interactions {text} and were dropped, such as row {rows}.")
    notes = {
        f"texts were cut at {tables.MAX_CHARACTERS} characters": catalog["texts_cut"],
        "prices are no numbers and were left out": catalog["prices_unreadable"],
        "items share their title with another": catalog["items_with_a_title_of_another"],
    }
    for note, count in notes.items():
        if count:
            say(f"prepare: {count:,} {note}.")
