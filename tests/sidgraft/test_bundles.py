"""How catalogs are compared: what differs, against sets, and how much of them stands in memory as Python objects."""

import tracemalloc

import numpy as np
import pyarrow as pa
import pytest

from sidgraft.artifacts import SCHEMAS
from sidgraft.bundles import COMPARED, catalog_digest, differences, item_digests


def digests(rows):
    """A table as `item_digests` gives it, of item -> (text, fields)."""
    names = ("item_id", "text_digest", "fields_digest")
    schema = pa.schema([(name, pa.string()) for name in names])
    return pa.Table.from_pylist([dict(zip(names, (item, *rest), strict=True)) for item, rest in rows.items()], schema)


def drawn(rng):
    """Some of 60 items, in order, with one of three texts and one of two fields or none."""
    kept = np.flatnonzero(rng.random(60) < 0.7)
    return {f"i{n:02d}": (f"t{rng.integers(3)}", [None, "f", "g"][rng.integers(3)]) for n in kept}


def test_items_that_differ_against_sets():
    rng = np.random.default_rng(0)
    for _ in range(20):
        before, now = drawn(rng), drawn(rng)
        both = before.keys() & now.keys()
        changed = {item for item in both if before[item][0] != now[item][0]}
        fields = {item: {before[item][1], now[item][1]} for item in both - changed}
        expected = {
            "new": now.keys() - before.keys(),
            "changed": changed,
            "relabelled": {item for item, found in fields.items() if found == {"f", "g"}},
            "gone": before.keys() - now.keys(),
        }
        # In several chunks, as a table of a Parquet file is.
        tables = (pa.concat_tables([table.slice(0, 7), table.slice(7)]) for table in map(digests, (before, now)))
        assert differences(*tables) == {name: sorted(items) for name, items in expected.items()}


@pytest.mark.parametrize("empty", [0, 1])
def test_nothing_beside_something(empty):
    one = {"a": ("t", "f")}
    found = differences(*map(digests, ({}, one) if empty == 0 else (one, {})))
    assert found == {"new": [], "changed": [], "relabelled": [], "gone": []} | {("new", "gone")[empty]: ["a"]}


def test_a_catalog_is_compared_a_few_rows_at_a_time():
    """As Python objects all texts would be 30 MB, and a dict a row with its digests 12."""
    items = 30_000
    schema = SCHEMAS["catalog/v1"]["catalog.parquet"]
    same = {"text": "x" * 1000, "title": "a title", "brand": "a brand", "category": ["a", "b"], "description": ""}
    columns = {name: pa.repeat(pa.scalar(value, schema.field(name).type), items) for name, value in same.items()}
    columns["item_id"] = pa.array(f"i{n:06d}" for n in range(items))
    catalog = pa.table({name: columns[name] for name in COMPARED})
    tracemalloc.start()
    try:
        found = item_digests(catalog)
        of_digests = tracemalloc.get_traced_memory()[1]
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        assert differences(found, found) == {"new": [], "changed": [], "relabelled": [], "gone": []}
        of_differences = tracemalloc.get_traced_memory()[1] - before
        catalog_digest(found)
    finally:
        tracemalloc.stop()
    assert of_digests < 15e6
    assert of_differences < 1e6
