"""Catalogs: text building, cleaning, category paths, prices, the category of an item."""

import gzip
import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sidgraft import catalog, tables

ROLES = {name: name for name in ("title", "brand", "categories", "price", "description")}


def build(columns, parts=("title", "brand", "categories", "price"), roles=ROLES):
    problems = []
    table, counts = catalog.build(pa.table(columns), "item_id", list(parts), roles, problems)
    return (table.to_pylist() if table is not None else None), counts, problems


def texts(values):
    return tables.clean(pa.chunked_array([pa.array(values, pa.string())])).to_pylist()


def test_text_is_the_parts_in_order_and_leaves_out_what_is_missing():
    rows, _, problems = build(
        {
            "item_id": ["b", "a"],
            "title": ["Soap", "Comb"],
            "brand": [None, "Acme"],
            "categories": [["Beauty", "Bath"], None],
            "price": [0.85, 12.0],
        }
    )
    assert problems == []
    assert [r["item_id"] for r in rows] == ["a", "b"]  # ordered by id
    assert rows[0]["text"] == "Comb Acme price 12"
    assert rows[1]["text"] == "Soap Beauty > Bath price 0.85"
    assert rows[1]["category"] == ["Beauty", "Bath"]
    assert rows[0]["category"] is None


def test_free_attributes_are_text_and_numbers_carry_their_name():
    rows, _, _ = build(
        {"item_id": ["a"], "title": ["Soap"], "grams": [100], "tags": [["mild", "green"]]},
        parts=("grams", "tags", "title"),
    )
    assert rows[0]["text"] == "grams 100 mild, green Soap"


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ([["A", "B"]], ["A", "B"]),
        ([[["A", "B"], ["C"]]], ["A", "B"]),  # of several paths the first
        ([[["A", " ", None, "B"]]], ["A", "B"]),
        (["A > B"], ["A", "B"]),
        (["A|B C"], ["A", "B C"]),
        ([""], None),
        ([[]], None),
        ([None], None),
    ],
)
def test_category_paths_of_every_shape(found, expected):
    rows, _, problems = build({"item_id": ["a"], "title": ["T"], "categories": found})
    assert problems == []
    assert rows[0]["category"] == expected


def test_paths_of_lists_of_paths_stay_with_their_items():
    rows, _, _ = build(
        {"item_id": list("abcd"), "title": list("abcd"), "categories": [[["A"], ["X"]], [], None, [["B", "C"]]]}
    )
    assert [r["category"] for r in rows] == [["A"], None, None, ["B", "C"]]


@pytest.mark.parametrize(
    ("found", "expected"),
    [("$1,299.00", 1299.0), ("0.85", 0.85), ("EUR 5", 5.0), ("12,99", None), ("call us", None), (None, None)],
)
def test_prices_in_text(found, expected):
    rows, counts, _ = build({"item_id": ["a"], "title": ["T"], "price": pa.array([found], pa.string())})
    assert rows[0]["price"] == expected
    assert counts["prices_unreadable"] == (found is not None and expected is None)


def test_cleaning_removes_control_and_hidden_characters_only():
    family = "👨‍👩‍👧"  # held together by zero-width joiners
    assert texts(
        [
            "two\nlines\tand\x00nul \x1b[31m",
            "  a\u00a0\u2028b ",
            "zero\u200bwidth \u202eevil\u202c\ufeff",
            f"{family} ok",
            "שלום <b>&amp;</b> <|im_end|> <s_a_1>",
            "\u200d \u200b\n",
            "",
            None,
        ]
    ) == [
        "two lines and nul [31m",
        "a b",
        "zerowidth evil",
        f"{family} ok",
        "שלום <b>&amp;</b> <|im_end|> <s_a_1>",
        None,
        None,
        None,
    ]


def test_long_text_is_cut_and_counted():
    rows, counts, _ = build({"item_id": ["a", "b"], "title": ["x" * 100_000, "short"]})
    assert len(rows[0]["title"]) == len(rows[0]["text"]) == tables.MAX_CHARACTERS
    assert counts["texts_cut"] >= 1


def test_ids_stay_text_and_whole_floats_lose_the_point():
    rows, _, problems = build({"item_id": [7.0, 3.0], "title": ["a", "b"]})
    assert problems == []
    assert [r["item_id"] for r in rows] == ["3", "7"]


@pytest.mark.parametrize("suffix", ["csv", "tsv", "jsonl", "csv.gz", "jsonl.gz", "parquet"])
def test_every_file_type_gives_the_same_rows(tmp_path, suffix):
    rows = [{"item_id": "007", "title": 'A "big",\nred soap'}, {"item_id": "8", "title": None}]
    file = tmp_path / f"items.{suffix}"
    separator = "\t" if suffix.startswith("tsv") else ","
    text = f'item_id{separator}title\n007{separator}"A ""big"",\nred soap"\n8{separator}\n'
    if "jsonl" in suffix:
        text = "".join(json.dumps(row) + "\n" for row in rows)
    if suffix == "parquet":
        pq.write_table(pa.Table.from_pylist(rows), file)
    elif suffix.endswith("gz"):
        file.write_bytes(gzip.compress(text.encode()))
    else:
        file.write_text(text)
    problems = []
    table, columns = tables.read(str(file), ["item_id", "title", "other"], "catalog", problems)
    assert problems == []
    assert columns == ["item_id", "title"]
    assert table.to_pylist() == rows


def test_json_of_mixed_types_and_broken_surrogates_is_read(tmp_path):
    file = tmp_path / "items.jsonl"
    file.write_text('{"item_id": 1, "title": "a"}\n\n{"item_id": "B2", "title": "bad \\ud800 half"}\n')
    problems = []
    table, _ = tables.read(str(file), ["item_id", "title"], "catalog", problems)
    assert problems == []
    assert table["item_id"].to_pylist() == ["1", "B2"]
    assert table["title"].to_pylist()[1] == "bad � half"


def test_types_that_change_between_pieces_of_json_lines(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "JSON_ROWS", 2)
    file = tmp_path / "items.jsonl"
    ids = [1, 2, None, None, "x", "y", 2.5]
    file.write_text("".join(json.dumps({"item_id": i}) + "\n" for i in ids))
    table, _ = tables.read(str(file), ["item_id"], "catalog", problems := [])
    assert problems == []
    assert table["item_id"].to_pylist() == ["1", "2", None, None, "x", "y", "2.5"]


def test_item_category_is_the_first_level_with_two_values():
    paths = [["Beauty", "Hair", "Combs"], ["Beauty", "Skin"], ["Beauty"], None]
    table = pa.table({"category": pa.array(paths, pa.list_(pa.string()))})
    assert catalog.item_categories(table) == ["Hair", "Skin", None, None]
    assert catalog.item_categories(table.slice(0, 1)) == [None]
    assert catalog.item_categories(table.slice(3, 1)) == [None]
