"""Columns of every Arrow type in every role: used, or a problem in words; never an error of Arrow's own."""

import datetime
import decimal

import pyarrow as pa
import pytest

from sidgraft import catalog, histories

MOMENT = datetime.datetime(2017, 1, 31, 12)
COLUMNS = [
    pa.nulls(4),
    pa.array([True, False, None, True]),
    *(pa.array([1, 2, None, 3], kind) for kind in (pa.int8(), pa.int64(), pa.uint64(), pa.float16(), pa.float32())),
    pa.array([1e300, 2.0, float("nan"), float("inf")]),
    pa.array([decimal.Decimal("1.50"), None, decimal.Decimal("2.00"), decimal.Decimal("3.00")]),
    pa.array([decimal.Decimal("1.50")] * 4, pa.decimal256(50, 2)),
    *(pa.array(["a", "b > c", None, ""], kind) for kind in (pa.string(), pa.large_string(), pa.string_view())),
    *(pa.array([b"a", b"b", None, b""], kind) for kind in (pa.binary(), pa.large_binary(), pa.binary_view())),
    pa.array([b"\xff", b"b", None, b""]),
    pa.array([b"ab", b"cd", None, b"\xff\xff"], pa.binary(2)),
    pa.array([b"ab", b"cd", None, b"ef"], pa.binary(2)),
    pa.array([b"0123456789abcdef"] * 4, pa.uuid()),
    pa.array(["a", "b", None, "a"]).dictionary_encode(),
    pa.array([1, 2, None, 1]).dictionary_encode(),
    pa.array([b"a", b"b", None, b"\xff"]).dictionary_encode(),
    pa.array([MOMENT, MOMENT, None, MOMENT]),
    pa.array([1_500_000_000_000_000_001, 2, None, 3], pa.timestamp("ns")),
    pa.array([1_500_000_000_000_000_001] * 4, pa.timestamp("ns", "Europe/Berlin")),
    pa.array([MOMENT.date()] * 4),
    pa.array([MOMENT.date()] * 4, pa.date64()),
    pa.array([MOMENT.time()] * 4),
    pa.array([datetime.timedelta(1)] * 4),
    pa.array([(1, 2, 3)] * 4, pa.month_day_nano_interval()),
    pa.array([{"x": 1}, {"x": None}, None, {"x": 2}]),
    pa.array([[("x", 1)], [], None, [("y", 2)]], pa.map_(pa.string(), pa.int64())),
    pa.array([[], None, [], []]),
    pa.array([["a", None], ["b"], None, []]),
    pa.array([["a", "b"]] * 4, pa.large_list(pa.large_string())),
    pa.array([["a", "b"], None, ["c", None], ["d", "e"]], pa.list_(pa.string(), 2)),
    pa.array([["a", "b"]] * 4, pa.list_view(pa.string())),
    pa.array([[1, 2], [3], None, []]),
    pa.array([[1.5, 2.5]] * 4, pa.list_(pa.float16())),
    pa.array([[b"a", b"b"], None, [b"\xff"], []]),
    pa.array([["a", "b"]] * 4, pa.list_(pa.dictionary(pa.int32(), pa.string()))),
    pa.array([[MOMENT, MOMENT]] * 4),
    pa.array([[{"x": 1}], [], None, [{"x": 2}]]),
    pa.array([[["a", "b"], ["c"]], [], None, [["d"]]]),
    pa.array([[["a", "b"], ["c"]]] * 4, pa.large_list(pa.list_(pa.string()))),
    pa.array([[[["a"]]]] * 4),
]
ROLES = {name: name for name in ("title", "brand", "categories", "price", "description")}


@pytest.mark.parametrize("column", COLUMNS, ids=lambda c: str(c.type))
@pytest.mark.parametrize("role", ["item_id", *ROLES, "free"])
def test_catalog(role, column):
    table = pa.table({"item_id": list("abcd"), "title": list("ABCD")} | {role: column})
    problems = []
    built, _ = catalog.build(table, "item_id", [role, "title"], ROLES, problems)
    assert (built is None) == bool(problems)
    assert all(problem.startswith("catalog: ") for problem in problems)
    if role not in ("item_id", "title", "categories"):
        assert problems == []


@pytest.mark.parametrize("column", COLUMNS, ids=lambda c: str(c.type))
@pytest.mark.parametrize("layout", ["item", "items"])
@pytest.mark.parametrize("role", ["user", "item", "items", "time"])
def test_interactions(role, layout, column):
    columns = {"user": ["u"] * 4, layout: list("abcd") if layout == "item" else [list("abcd")] * 4}
    problems = []
    log, _ = histories.build(
        pa.table(columns | {role: column}), "user", "item", "items", "time", None, False, problems
    )  # fmt: skip
    assert log is not None or problems
    assert all(problem.startswith("interactions: ") for problem in problems)


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary(), pa.binary(2)], ids=str)
def test_bytes_that_are_text_are_ids(kind):
    table = pa.table({"item_id": pa.array([b"i1", b"i0"], kind), "title": ["one", "zero"]})
    built, _ = catalog.build(table, "item_id", ["title"], ROLES, problems := [])
    assert problems == []
    assert built["item_id"].to_pylist() == ["i0", "i1"]
    table = table.set_column(0, "item_id", pa.array([b"\xff\xfe", b"i0"], kind))
    assert catalog.build(table, "item_id", ["title"], ROLES, problems)[0] is None
    assert "expected ids (text or whole numbers)" in problems[0]


@pytest.mark.parametrize("column", [[{"x": "A"}], [[{"x": "A"}]], [[[["A"]]]], [b"\xff"], [[b"\xff"]]], ids=str)
def test_categories_without_names_are_one_problem_among_others(column):
    table = pa.table({"item_id": [""], "title": ["T"], "categories": column})
    built, _ = catalog.build(table, "item_id", ["title", "categories"], ROLES, problems := [])
    assert built is None
    assert len(problems) == 2
    assert "column 'categories' is" in problems[0]
    assert "expected category paths" in problems[0]
