"""Read a catalog and interactions, check them, split every user's history. Run: sidgraft prepare --help."""

from __future__ import annotations

from typing import Any


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
    strict: bool = False,
    seed: int = 0,
    source_digest: str = "",
) -> dict[str, Any]:
    """Read a catalog and interactions, report what is wrong with them at once, and split every history.

    Args:
        catalog: Items, one a row: a Parquet, CSV, TSV or JSON Lines file, or sample:complete-journey.
        interactions: One row an interaction (user, item and perhaps a timestamp) or one row a user (user and the
            list of items in time order): the same file types, or sample:complete-journey.
        out_catalog: Directory to write the catalog artifact to.
        out_interactions: Directory to write the interactions artifact to.
        item_id: Catalog column with the item's id.
        text: Catalog columns, comma-separated, that make up the text of an item, in this order.
        title: Catalog column with the title.
        brand: Catalog column with the brand; ignored where the catalog has none.
        categories: Catalog column with the category path: a list, a list of paths, or text such as "A > B".
        price: Catalog column with the price.
        description: Catalog column with a longer description.
        user_id: Interactions column with the user's id.
        interaction_item_id: Interactions column with the item's id; empty means the same name as item_id.
        items: Interactions column with a user's list of items, in the one-row-a-user layout.
        timestamp: Interactions column to sort by, where there is one; otherwise row order is time order.
        split: leave-one-out (last item tests, the one before validates) or global-time (cut by time at the
            80 % and 90 % quantile, which avoids the leak of the future).
        max_history: Interactions kept of each user, the latest ones, targets included; 0 keeps all.
        k_core: Drop users and items with fewer interactions than this, repeatedly; 0 keeps all.
        max_users: Keep a random sample of this many users; 0 keeps all.
        max_items: Keep this many of the most frequent items; 0 keeps all.
        strict: Fail on interactions with unknown items instead of dropping them with a count.
        seed: Seed of the user sample.
        source_digest: Digest of the two inputs, when the caller knows it; a difference is an error. It makes
            a pipeline run prepare again when the content behind a path has changed.
    """
    raise NotImplementedError
