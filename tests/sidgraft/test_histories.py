"""Histories: splits by hand-worked cases, filters against a plain Python version, training counts."""

from collections import Counter

import numpy as np
import pyarrow as pa
import pytest

from sidgraft import histories
from sidgraft.histories import Log

ITEMS = pa.array([f"i{n:02d}" for n in range(40)])


def log_of(sequences, times=None):
    """A log of user -> list of item numbers; users are named u0, u1, ..."""
    user = np.repeat(np.arange(len(sequences)), [len(s) for s in sequences])
    item = np.array([i for s in sequences for i in s], np.int64)
    time = None if times is None else np.array([t for s in times for t in s])
    return Log(user, item, time, pa.array([f"u{n}" for n in range(len(sequences))]))


def rows_of(log, split):
    table = histories.to_table(log, split, ITEMS)
    return [
        (r["user_id"], [int(i[1:]) for i in r["item_ids"]], r["train_length"], r["valid_position"], r["test_position"])
        for r in table.to_pylist()
    ]


def test_leave_one_out_by_hand():
    log = log_of([[1, 2, 3, 4, 5, 6], [7, 8, 9], [1, 1], [2]])
    assert rows_of(log, histories.leave_one_out(log, 4)) == [
        ("u0", [3, 4, 5, 6], 2, 2, 3),  # cut to the last four, targets included, before the split
        ("u1", [7, 8, 9], 1, 1, 2),
        ("u2", [1, 1], 2, None, None),  # too short: training only
        ("u3", [2], 1, None, None),
    ]
    assert rows_of(log, histories.leave_one_out(log, 0))[0] == ("u0", [1, 2, 3, 4, 5, 6], 4, 4, 5)


def test_a_test_history_holds_at_most_twenty_items_by_default():
    log = log_of([list(range(40))])
    (_, items, _, valid, test), *_ = rows_of(log, histories.leave_one_out(log, 21))
    assert items == list(range(19, 40))
    assert (valid, test) == (19, 20)


def test_global_time_by_hand():
    # Eleven times in order: 0 1 2 3 4 5 6 8 8 9 9, so that the 80 % quantile is 8 and the 90 % quantile 9.
    log = log_of(
        [[1, 2, 3, 4, 5, 6, 7], [8], [9, 10, 11]],
        [[0, 1, 2, 3, 8, 8, 9], [9], [4, 5, 6]],
    )
    assert np.quantile(log.time, 0.8, method="higher") == 8
    assert np.quantile(log.time, 0.9, method="higher") == 9
    assert rows_of(log, histories.global_time(log, 0)) == [
        ("u0", [1, 2, 3, 4, 5, 6, 7], 4, 4, 6),  # 6 is in the test history, but neither trained on nor a target
        ("u2", [9, 10, 11], 3, None, None),
    ]  # u1 has a target only, and no history before it
    assert rows_of(log, histories.global_time(log, 3))[0] == ("u0", [3, 4, 5, 6, 7], 2, 2, 4)


def test_global_time_against_a_plain_version():
    rng = np.random.default_rng(0)
    sequences = [list(rng.integers(0, 40, n)) for n in rng.integers(1, 30, 60)]
    times = [sorted(rng.integers(0, 1000, len(s))) for s in sequences]
    log = log_of(sequences, times)
    cut_valid, cut_test = np.quantile(np.concatenate(times), [0.8, 0.9], method="higher")
    expected = []
    for user, (items, when) in enumerate(zip(sequences, times, strict=True)):
        train = [i for i, t in zip(items, when, strict=True) if t < cut_valid]
        valid = next((p for p, t in enumerate(when) if cut_valid <= t < cut_test and p), None)
        test = next((p for p, t in enumerate(when) if t >= cut_test and p), None)
        end = max([p + 1 for p in (valid, test) if p is not None] or [len(train)])
        if end:
            expected.append((f"u{user}", items[:end], len(train), valid, test))
    assert rows_of(log, histories.global_time(log, 0)) == expected
    assert any(row[3] is not None and row[4] is not None for row in expected)


def test_k_core_against_a_plain_version():
    rng = np.random.default_rng(1)
    sequences = [list(rng.zipf(1.5, n) % 40) for n in rng.integers(1, 12, 50)]
    kept = [list(s) for s in sequences]
    while True:
        count = Counter(i for s in kept for i in s)
        users = {n for n, s in enumerate(kept) if len(s) >= 4}
        after = [[i for i in s if n in users and count[i] >= 4] for n, s in enumerate(kept)]
        if after == kept:
            break
        kept = after
    log = histories.k_core(log_of(sequences), 4)
    assert sum(len(s) for s in kept) > 0
    assert log.item.tolist() == [i for s in kept for i in s]
    assert log.user.tolist() == [n for n, s in enumerate(kept) for _ in s]


def test_most_frequent_items_breaks_ties_in_catalog_order():
    log = log_of([[5, 3, 3, 2], [5, 9, 2]])
    assert sorted(set(histories.most_frequent_items(log, 2).item)) == [2, 3]  # 2, 3 and 5 occur twice


def test_sampling_users_is_seeded():
    log = log_of([[n, n] for n in range(30)])
    first, again, other = (histories.sample_users(log, 10, seed).user for seed in (0, 0, 1))
    assert len(np.unique(first)) == 10
    assert first.tolist() == again.tolist() != other.tolist()
    assert histories.sample_users(log, 50, 0) is log


def test_training_counts_against_a_plain_version():
    rng = np.random.default_rng(2)
    lists = [[f"i{n:02d}" for n in rng.integers(0, 40, k)] for k in rng.integers(0, 12, 25)]
    train = [int(rng.integers(0, len(items) + 1)) for items in lists]
    table = pa.table({"item_ids": lists, "train_length": pa.array(train, pa.int32())})
    count = Counter(i for items, n in zip(lists, train, strict=True) for i in items[:n])
    ids = ["not there", *ITEMS.to_pylist()[:30]]
    assert histories.training_counts(table, ids).tolist() == [count[i] for i in ids]
    assert histories.training_counts(table.slice(3, 4), ids).sum() <= sum(train[3:7])


def test_assistant_counts_against_a_plain_version():
    rng = np.random.default_rng(3)
    lists = [[f"i{n:02d}" for n in rng.integers(0, 12, k)] for k in rng.integers(0, 12, 25)]
    train = [int(rng.integers(0, len(items) + 1)) for items in lists]
    count = Counter(items[n - 1] for items, n in zip(lists, train, strict=True) if n)
    table = pa.table({"item_ids": lists, "train_length": pa.array(train, pa.int32())})
    ids = ["not there", *ITEMS.to_pylist()[:10]]
    assert histories.assistant_counts(table, ids).tolist() == [count[i] for i in ids]


def build(table, **options):
    arguments = {"user_id": "user", "item_id": "item", "items": "items", "timestamp": "t", "strict": False}
    problems = []
    log, counts = histories.build(
        pa.table(table), **(arguments | options), item_ids=options.get("item_ids", ITEMS), problems=problems
    )
    return log, counts, problems


def test_equal_times_keep_the_order_of_the_file_and_repeats_stay():
    log, _, problems = build(
        {"user": ["b", "a", "b", "b", "b"], "item": ["i03", "i01", "i02", "i01", "i02"], "t": [5, 1, 5, 2, 5]}
    )
    assert [p for p in problems if "long" not in p] == []
    assert log.user_ids.to_pylist() == ["a", "b"]
    assert log.item.tolist() == [1, 1, 3, 2, 2]


def test_times_of_every_kind_sort_alike():
    stamps = ["2017-01-09", "2017-01-10", "2016-12-31"]
    kinds = [
        [9, 10, 1],
        [9.5, 10.0, -1.0],
        ["9", "10", "1"],  # as text, "10" would come before "9"
        ["9.5", "1e1", "-1"],
        stamps,
        [f"{s}T12:00:00Z" for s in stamps],
        pa.array(stamps).cast(pa.date32()),
        pa.array(stamps).cast(pa.timestamp("ns")),
    ]
    for times in kinds:
        log, _, problems = build({"user": ["a"] * 3, "item": ["i01", "i02", "i00"], "t": times})
        assert problems == []
        assert log.item.tolist() == [0, 1, 2]


def test_one_row_a_user_with_lists_text_and_timestamps():
    log, _, problems = build({"user": ["a", "b"], "items": [["i02", "i01", "i00"], ["i05"]]})
    assert problems == []
    assert log.item.tolist() == [2, 1, 0, 5]
    log, _, _ = build({"user": ["a"], "items": ["i02 i01,i00|i05"]})
    assert log.item.tolist() == [2, 1, 0, 5]
    log, _, _ = build({"user": ["a"], "items": [["i02", "i01", "i00"]], "t": [[3, 2, 1]]})
    assert log.item.tolist() == [0, 1, 2]
    _, _, problems = build({"user": ["a"], "items": [["i02", "i01", "i00"]], "t": [[3, 2]]})
    assert "another number of t than of items" in problems[0]


def test_a_text_column_called_items_does_not_hide_the_item_column():
    log, _, _ = build({"user": ["a"] * 3, "item": ["i01", "i02", "i03"], "items": ["2", "1", "4"]})
    assert log.item.tolist() == [1, 2, 3]


PER_USER = {"user": ["a", "b"], "items": [["i02", "i01", "i00"], ["i05", "i06", "i07"]]}
LISTS = [[3, 2, 1], [1, 3, 2]]


@pytest.mark.parametrize(
    "times",
    [
        pa.array(LISTS),
        pa.array(LISTS, pa.large_list(pa.int64())),
        pa.array(LISTS, pa.list_(pa.int32(), 3)),
        pa.array(LISTS, pa.list_(pa.timestamp("ns"))),
        pa.array([[f"2017-01-0{t}" for t in times] for times in LISTS], pa.large_list(pa.large_string())),
    ],
    ids=lambda t: str(t.type),
)
def test_lists_of_times_of_every_type_sort_each_user(times):
    log, _, problems = build(PER_USER | {"t": times})
    assert problems == []
    assert log.item.tolist() == [0, 1, 2, 5, 7, 6]


@pytest.mark.parametrize(
    "times",
    [
        pa.array([1, 2]), pa.array([1.5, None]), pa.array(["3 2 1", "1 3 2"]), pa.array([None, None]),
        pa.array([1, 2], pa.timestamp("s")), pa.array([{"x": 1}, None]), pa.array([[[3]], [[1]]]),
        pa.array([[(1, 2)], None], pa.map_("i4", "i4")),
    ],
    ids=lambda t: str(t.type),
)  # fmt: skip
def test_anything_else_beside_lists_of_items_is_a_problem(times):
    """A timestamp column that is there is used or refused, never passed over."""
    log, _, problems = build(PER_USER | {"t": times})
    assert log is None
    assert any("'t'" in p or "number of t" in p for p in problems)
    assert build(PER_USER | {"t": times}, timestamp="")[2] == []  # said to be none


def test_times_finer_than_a_microsecond_sort():
    times = pa.array([1_500_000_000_000_000_002, 1_500_000_000_000_000_003, 1_500_000_000_000_000_001])
    for zone in (None, "UTC"):
        log, _, problems = build(
            {"user": ["a"] * 3, "item": ["i01", "i02", "i00"], "t": times.cast(pa.timestamp("ns", zone))}
        )
        assert problems == []
        assert log.item.tolist() == [0, 1, 2]


@pytest.mark.parametrize("strict", [False, True])
def test_what_is_dropped_comes_with_rows_of_each_kind(strict):
    good = 4
    users = ["a"] * good + [None] * 5 + ["a"] * 7
    items = ["i01"] * good + ["i02"] * 5 + [None] * 2 + ["gone"] * 5
    _, counts, problems = build({"user": users, "item": items}, strict=strict)
    assert {name: counts[name] for name in histories.UNUSABLE} == {
        "without_user": 5, "without_item": 2, "unknown_item": 5,
    }  # fmt: skip
    assert counts["example_rows_dropped"] == {
        "without_user": ["5 ('i02')", "6 ('i02')", "7 ('i02')"],
        "without_item": ["10", "11"],
        "unknown_item": ["12 ('gone')", "13 ('gone')", "14 ('gone')"],
    }
    assert len(problems) == (3 if strict else 0)
    assert build({"user": ["a"] * 3, "item": ["i01"] * 3})[1]["example_rows_dropped"] == {}
