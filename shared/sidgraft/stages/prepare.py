"""Read a catalog and interactions, check them, split histories or queries. Run: sidgraft prepare --help."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from sidgraft import artifacts, checks, histories, judgements, samples, tables
from sidgraft import catalog as catalogs
from sidgraft.progress import say

SPLITS = ("leave-one-out", "global-time")

Source = tuple[str, str, list[str]]  # what it is, where it is, the columns that are wanted of it
Read = tuple[pa.Table | None, list[str]]  # of these the columns that there are, and the names of all


def prepare(
    catalog: str,
    interactions: str,
    out_catalog: str,
    out_interactions: str,
    *,
    queries: str = "",
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
    query_id: str = "query_id",
    query_fields: str = "text",
    grade: str = "grade",
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
    """Read a catalog and interactions, report what is wrong with them at once, and split histories or queries.

    Args:
        catalog: Items, one a row: a Parquet, CSV, TSV or JSON Lines file (text files also as .gz; path or s3://),
            or sample:complete-journey.
        interactions: One row an interaction (user, item and perhaps a timestamp) or one row a user (user and the
            list of items in time order): the same file types, or sample:complete-journey. With queries, graded
            judgements: one row a query and candidate, with the grade 2 (good), 1 (maybe) or 0 (not).
        out_catalog: Directory to write the catalog artifact to.
        out_interactions: Directory to write the interactions artifact to.
        queries: Texts to find items for, one query a row: the same file types, or sample:complete-journey. Empty
            recommends from histories.
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
        query_id: Column with the query's id, in queries and in the judgements.
        query_fields: Columns of the queries, comma-separated, that make up the prompt, a named line each, in this
            order; name=column calls the column another name, as in "headline=hl,skills".
        grade: Judgements column with the grade.
        split: leave-one-out (last item tests, the one before validates) or global-time (cut by time at the
            80 % and 90 % quantile, which avoids the leak of the future). Of histories only: of the queries a tenth
            tests and a tenth validates, by their texts, so that equal texts stand on one side.
        max_history: Interactions kept of each user, the latest ones, targets included; 0 keeps all. Under
            global-time, the training part and the first target together. Judgements are not cut.
        k_core: Drop users (or queries) and items with fewer interactions (or judgements) than this, repeatedly;
            0 keeps all.
        max_users: Keep a random sample of this many users, or queries; 0 keeps all.
        max_items: Keep this many of the most frequent items; 0 keeps all.
        text_quality: full; or how much less the texts say, to measure what depends on them: title (nothing but the
            title), truncated (the first half of the words) or shuffled (the words in random order). Encoder, grounding
            and tasks all read these texts.
        strict: Fail on interactions with unknown items, or without user or item, instead of dropping them with
            a count; likewise on such judgements, and on queries without one.
        seed: Seed of the user sample, of the split of queries and of shuffled words.
        source_digest: Digest of the inputs, when the caller knows it; a difference is an error. Or any other text that
            changes with them. It makes a pipeline run prepare again when the content behind a path has changed.

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
    if queries:
        task = _Queries(query_id, judgements.fields(query_fields), bought_id, grade)
        settings |= {"query_id": query_id, "query_fields": query_fields, "grade": grade}
    else:
        task = _Histories(user_id, bought_id, items, timestamp, split, max_history)
    problems = _wrong_settings(max_history, k_core, max_users, max_items)
    if queries and split != SPLITS[0]:
        problems.append(f"split is {split}, but there are queries, which have no time to split by: leave it out.")

    # Read, and bring into shape what could be read. What is wrong is collected; nothing is computed with or written
    # before all of it has been reported.
    sources = [("catalog", catalog, [item_id, *parts, *roles.values()]), *task.sources(interactions, queries)]
    read = _read(sources, problems)
    table, text_counts = _catalog(read[0], item_id, parts, roles, problems)
    known = None if table is None else table["item_id"].combine_chunks()
    log, asked, log_counts = task.build(read[1:], known, strict, problems)
    readable = all(found is not None for found, _ in read)
    digest = _digest([source for _, source, _ in sources], source_digest, problems) if readable else ""
    tables.raise_all(problems)
    assert table is not None
    assert log is not None

    # Filter and sample, then cut and split.
    counts = {"items_in_file": table.num_rows, "items_never_bought": table.num_rows - len(np.unique(log.item))}
    log = histories.k_core(log, k_core)
    log = histories.sample_users(log, max_users, seed)
    log = histories.most_frequent_items(log, max_items)
    log = task.usable(histories.k_core(log, k_core), f"{k_core=}, {max_users=} and {max_items=}")
    made = task.split(log, asked, table["item_id"].combine_chunks(), seed)
    if k_core or max_items:
        table = table.take(np.unique(log.item))
    table = catalogs.degrade(table, text_quality, seed)

    # Describe, write, tell.
    report = {"catalog": catalogs.describe(table) | text_counts, **task.describe(made, table, log_counts)}
    report["catalog"] |= counts
    summary = task.summary(report) | {"source_digest": digest}
    with artifacts.create(out_catalog, "catalog/v1", stage="prepare", arguments=settings) as draft:
        draft.write_table("catalog.parquet", table)
        draft.write_json("data_report.json", report)
        draft.metadata.update(summary)
        draft.facts["source_digest"] = digest
        written = draft.seal()  # one inside the other, so that a failure in either leaves neither
        with artifacts.create(
            out_interactions, "interactions/v1", stage="prepare", arguments=settings, inputs={"catalog": written}
        ) as draft:
            for name, content in made.items():
                draft.write_table(name, content)
            draft.metadata.update(summary)
            draft.facts["source_digest"] = digest
    task.tell(report)
    _tell_of_catalog(report["catalog"])
    return summary


@dataclass(frozen=True)
class _Histories:
    """What users took, an item or a user a row: the columns of the file, and how it is cut and split."""

    user_id: str
    item_id: str
    items: str
    timestamp: str
    split_by: str
    max_history: int

    def sources(self, interactions: str, _: str) -> list[Source]:
        """What is read beside the catalog."""
        return [("interactions", interactions, [self.user_id, self.item_id, self.items, self.timestamp])]

    def build(
        self, read: list[Read], known: pa.Array | None, strict: bool, problems: list[str]
    ) -> tuple[histories.Log | None, None, dict[str, Any]]:
        """The log, as far as it can be made, and what was counted; what is wrong is added to problems."""
        ((rows, columns),) = read
        if rows is None:
            return None, None, {}
        named = (self.user_id, self.item_id, self.items, self.timestamp)
        histories.missing_columns(columns, *named, problems)
        if self.user_id not in columns or not {self.items, self.item_id} & set(columns):
            return None, None, {}
        log, counts = histories.build(rows, *named, known, strict, problems)
        if log is not None and log.time is None and self.split_by == "global-time":
            problems.append("interactions: split is global-time, which needs a timestamp; name its column.")
        return log, None, counts

    def usable(self, log: histories.Log, filters: str) -> histories.Log:
        """The log. Raises ValueError where the filters have left no user with enough items for a split."""
        longest = np.bincount(log.user).max() if len(log.user) else 0
        if longest < histories.TOO_SHORT:
            raise ValueError(
                f"{filters} leave {len(np.unique(log.user))} users and {len(log.user)} interactions, no user with the"
                f" {histories.TOO_SHORT} that a split needs: loosen them."
            )
        return log

    def split(self, log: histories.Log, _: pa.Table | None, item_ids: pa.Array, seed: int) -> dict[str, pa.Table]:
        """The tables of the interactions artifact."""
        if self.split_by == "leave-one-out":
            parted = histories.leave_one_out(log, self.max_history)
        else:
            parted = histories.global_time(log, self.max_history)
            if max(parted["valid_position"].max(initial=-1), parted["test_position"].max(initial=-1)) < 0:
                raise ValueError(
                    "split global-time: no user has an interaction both before and after the 80 % quantile of time."
                )
        return {"interactions.parquet": histories.to_table(log, parted, item_ids)}

    def describe(self, made: dict[str, pa.Table], catalog: pa.Table, counts: dict[str, Any]) -> dict[str, Any]:
        """What the data report says of it."""
        described = histories.describe(made["interactions.parquet"], catalog["item_id"].combine_chunks())
        return {"interactions": described | counts}

    def summary(self, report: dict[str, Any]) -> dict[str, Any]:
        """The key figures of the data report."""
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

    def tell(self, report: dict[str, Any]) -> None:
        """Say what there is, and what was dropped."""
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


@dataclass(frozen=True)
class _Queries:
    """Queries with graded candidates: the columns of the two files. The methods are those of `_Histories`."""

    query_id: str
    fields: list[tuple[str, str]]  # name and column
    item_id: str
    grade: str

    def sources(self, interactions: str, queries: str) -> list[Source]:
        """What is read beside the catalog."""
        return [
            (judgements.WHAT, interactions, [self.query_id, self.item_id, self.grade]),
            ("queries", queries, [self.query_id, *(column for _, column in self.fields)]),
        ]

    def build(
        self, read: list[Read], known: pa.Array | None, strict: bool, problems: list[str]
    ) -> tuple[histories.Log | None, pa.Table | None, dict[str, Any]]:
        """The log of the judgements and the queries, as far as they can be made, and what was counted."""
        (rows, columns), (asked_rows, asked_columns) = read
        asked = log = None
        counts: dict[str, Any] = {}
        if asked_rows is not None:
            judgements.missing_columns(asked_columns, self.query_id, self.fields, problems)
            if {self.query_id, *(column for _, column in self.fields)} <= set(asked_columns):
                asked, counts = judgements.build_queries(asked_rows, self.query_id, self.fields, problems)
        if rows is not None:
            named = (self.query_id, self.item_id, self.grade)
            judgements.missing_judgement_columns(columns, *named, problems)
            if set(named) <= set(columns):
                ids = None if asked is None else asked["query_id"].combine_chunks()
                log, more = judgements.build(rows, *named, ids, known, strict, problems)
                counts = counts | more
        return log, asked, counts

    def usable(self, log: histories.Log, _: str) -> histories.Log:
        """The judgements of queries for which there is still something to find."""
        return judgements.with_relevant(log)

    def split(self, log: histories.Log, asked: pa.Table | None, item_ids: pa.Array, seed: int) -> dict[str, pa.Table]:
        """The tables of the interactions artifact."""
        assert asked is not None
        return judgements.to_tables(log, judgements.split(log, asked, seed), asked, item_ids)

    def describe(self, made: dict[str, pa.Table], _: pa.Table, counts: dict[str, Any]) -> dict[str, Any]:
        """What the data report says of it."""
        return {"queries": judgements.describe(made) | counts}

    def summary(self, report: dict[str, Any]) -> dict[str, Any]:
        """The key figures of the data report."""
        catalog, queries = report["catalog"], report["queries"]
        shown = (
            "queries", "judgements", "training_queries", "validation_queries", "test_queries", "training_pairs",
            "items_in_a_training_pair",
        )  # fmt: skip
        return {
            "items": catalog["items"],
            **{name: queries[name] for name in shown},
            "judgements_dropped": sum(queries[name] for name in judgements.UNUSABLE),
            "queries_dropped": sum(queries[name] for name in judgements.UNJUDGED),
            "texts_cut": catalog["texts_cut"],
        }

    def tell(self, report: dict[str, Any]) -> None:
        """Say what there is, and what was dropped."""
        queries = report["queries"]
        say(
            f"prepare: {report['catalog']['items']:,} items, {queries['queries']:,} queries,"
            f" {queries['judgements']:,} judgements ({queries['judged_good']:,} good,"
            f" {queries['judged_maybe']:,} maybe)."
        )
        say(
            f"prepare: {queries['test_queries']:,} queries to test, {queries['validation_queries']:,} to validate,"
            f" {queries['training_queries']:,} to train on, with {queries['relevant_items_a_training_query']} relevant"
            f" items each; {queries['items_in_a_training_pair']:,} items are in a training pair."
        )
        for what, reasons in (("judgements", judgements.UNUSABLE), ("queries", judgements.UNJUDGED)):
            for reason, text in reasons.items():
                if queries[reason]:
                    shown = queries["example_rows_dropped"][reason]
                    say(f"prepare: {queries[reason]:,} {what} {text} and were dropped, such as {shown}.")
        if queries["fields_cut"]:
            say(f"prepare: {queries['fields_cut']:,} fields of queries were cut at {tables.MAX_CHARACTERS} characters.")


def _wrong_settings(max_history: int, k_core: int, max_users: int, max_items: int) -> list[str]:
    sizes = {"max_history": max_history, "k_core": k_core, "max_users": max_users, "max_items": max_items}
    problems = [f"{name} is {value}, expected 0 or more." for name, value in sizes.items() if value < 0]
    if 0 < max_history < histories.TOO_SHORT:
        problems.append(
            f"max_history is {max_history}, expected 0 (all) or at least {histories.TOO_SHORT}: an item to train"
            " on and two targets."
        )
    return problems


def _read(sources: list[Source], problems: list[str]) -> list[Read]:
    found: dict[str, tuple[pa.Table, ...]] = {}
    for source in {source for _, source, _ in sources if samples.is_sample(source)}:
        try:
            found[source] = samples.read(source, judged=len(sources) > 2)
        except ValueError as error:
            problems.append(str(error))
    read: list[Read] = []
    for place, (what, source, wanted) in enumerate(sources):
        if source in found:
            read.append((found[source][place], found[source][place].column_names))
        elif samples.is_sample(source):
            read.append((None, []))
        else:
            read.append(tables.read(source, wanted, what, problems))
    return read


def _catalog(
    read: Read, item_id: str, parts: list[str], roles: dict[str, str], problems: list[str]
) -> tuple[pa.Table | None, dict[str, int]]:
    """The catalog, as far as it can be made, and what was counted; what is wrong is added to problems."""
    rows, columns = read
    if rows is None:
        return None, {}
    catalogs.missing_columns(columns, item_id, parts, roles, problems)
    if item_id not in columns or not set(parts) & set(columns):
        return None, {}
    return catalogs.build(rows, item_id, parts, roles, problems)


def _digest(sources: list[str], expected: str, problems: list[str]) -> str:
    digest = catalogs.source_digest(*sources)
    if tables.is_digest(expected) and digest != expected:
        problems.append(
            f"the inputs have the digest {digest}, source_digest says {expected}: they changed since it was taken."
        )
    return digest


def _tell_of_catalog(catalog: dict[str, Any]) -> None:
    notes = {
        f"texts were cut at {tables.MAX_CHARACTERS} characters": catalog["texts_cut"],
        "prices are no numbers and were left out": catalog["prices_unreadable"],
        "items share their title with another": catalog["items_with_a_title_of_another"],
    }
    for note, count in notes.items():
        if count:
            say(f"prepare: {count:,} {note}.")
