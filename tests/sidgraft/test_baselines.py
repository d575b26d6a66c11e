"""Untrained baselines against hand-worked cases and brute force; the stage; tables of recommendations."""

import math
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from sidgraft import artifacts, recommendations
from sidgraft.baselines import best, co_occurrence, neighbours, popularity
from sidgraft.stages.baselines import baselines

NOTHING = np.array([], dtype=int)


def test_popularity_is_the_most_frequent_and_skips_what_is_excluded():
    items, scores = popularity(np.array([3, 9, 3, 1]), [NOTHING, np.array([1, 0, 2])], 3)
    assert items.tolist() == [[1, 0, 2], [3, -1, -1]]
    assert scores[0].tolist() == [9, 3, 3]
    assert scores[1].tolist() == [1, -np.inf, -np.inf]


def test_neighbours_are_ranked_by_cosine_to_the_mean_of_unit_vectors():
    rng = np.random.default_rng(0)
    vectors = rng.normal(size=(40, 5)).astype(np.float32) * rng.uniform(0.1, 9, (40, 1)).astype(np.float32)
    histories = [np.array([3, 8, 8]), NOTHING, np.array([11])]
    items, scores = neighbours(vectors, histories, [NOTHING] * 3, 6)
    unit = vectors.astype(np.float64) / np.linalg.norm(vectors.astype(np.float64), axis=1, keepdims=True)
    for row, history in enumerate(histories):
        query = unit[history].mean(axis=0) if len(history) else unit.mean(axis=0)
        cosine = unit @ query / np.linalg.norm(query)
        order = np.argsort(-cosine, kind="stable")[:6]
        assert items[row].tolist() == order.tolist()
        np.testing.assert_allclose(scores[row], cosine[order], atol=1e-5)
    assert items[2, 0] == 11  # the history's item stays recommendable unless it is excluded


def test_co_occurrence_equals_its_formula_counted_by_hand():
    """Sets and dictionaries, no matrices; users and items of all lengths, repeats among them."""
    rng = np.random.default_rng(1)
    N, users = 25, 60
    training = [rng.integers(0, 20, size=rng.integers(1, 9)) for _ in range(users)]  # five items never occur
    count = np.bincount(np.concatenate(training), minlength=N)
    histories = [rng.integers(0, N, size=rng.integers(0, 7)) for _ in range(30)]
    excluded = [np.unique(h) if u % 2 else h[:0] for u, h in enumerate(histories)]
    items, scores = co_occurrence(training, count, histories, excluded, N)

    having = {i: {u for u, s in enumerate(training) if i in s} for i in range(N)}

    def similarity(i, j):
        both = len(having[i] & having[j])
        return both / math.sqrt(len(having[i]) * len(having[j])) if both and i != j else 0.0

    for u, history in enumerate(histories):
        by_hand = {
            j: sum(similarity(i, j) / age for age, i in enumerate(reversed(history), 1))
            for j in range(N)
            if j not in excluded[u]
        }
        # float32 scores may order by rounding what is equal: rounded, then popularity, then the smaller item
        order = sorted(by_hand, key=lambda j: (-round(by_hand[j], 9), -count[j], j))
        found = items[u][items[u] >= 0]
        np.testing.assert_allclose(scores[u][: len(order)], [by_hand[j] for j in order], atol=1e-6)
        never = [j for j in order if by_hand[j] == 0.0]
        assert found[len(order) - len(never) :].tolist() == never
        assert sorted(found) == sorted(order)


def test_the_best_are_those_of_a_stable_sort_with_ties_and_exclusions():
    rng = np.random.default_rng(2)
    scores = rng.integers(0, 4, size=(50, 30)).astype(np.float32)
    excluded = [rng.choice(30, size=u % 30, replace=False) for u in range(50)]
    items, kept = best(scores.copy(), excluded, 9)
    for u in range(50):
        left = [i for i in np.argsort(-scores[u], kind="stable") if i not in excluded[u]][:9]
        assert items[u].tolist() == left + [-1] * (9 - len(left))
        assert kept[u][: len(left)].tolist() == scores[u][left].tolist()


def test_a_table_of_recommendations_comes_back_as_it_was():
    rng = np.random.default_rng(3)
    ids = [f"i{i}" for i in range(12)]
    full = np.stack([rng.permutation(12)[:5] for _ in range(4)])
    short = np.where(np.arange(5) < np.array([[5], [0], [3], [1]]), full, -1)
    scores = np.where(short >= 0, rng.random((4, 5), dtype=np.float32), -np.inf).astype(np.float32)
    given = {"b": (full, rng.random((4, 5), dtype=np.float32)), "a": (short, scores)}
    table = recommendations.to_table(given, ["u", "v", "w", "x"], np.array([1, 2, 3, 4]), ids)
    assert table["target_id"].to_pylist() == ["i1", "i2", "i3", "i4"] * 2
    assert table["item_ids"][4 + 2].as_py() == [ids[i] for i in full[2, :3]]
    found = recommendations.from_table(table, ids)
    assert list(found) == ["b", "a"]
    for name, (items, values) in given.items():
        np.testing.assert_array_equal(found[name][0], items)
        np.testing.assert_array_equal(found[name][1], values)
    with pytest.raises(ValueError, match="catalog lacks"):
        recommendations.from_table(table, ids[:3])


def run(shop, out, **settings):
    data = (shop["interactions"], shop["catalog"], shop["item_embeddings"])
    return baselines(*data, str(out), **({"sasrec_epochs": 3} | settings))


def test_every_baseline_recommends_to_the_same_users_items_of_the_catalog(shop, tmp_path):
    summary = run(shop, tmp_path / "a", depth=10, users=15, exclude_history=True)
    rows = pq.read_table(tmp_path / "a" / "recommendations.parquet").to_pylist()
    interactions = pq.read_table(Path(shop["interactions"]) / "interactions.parquet").to_pylist()
    users = {row["user_id"]: row for row in interactions}
    names = ("popularity", "neighbours", "co-occurrence", "sasrec")
    assert list(dict.fromkeys(row["recommender"] for row in rows)) == list(names)
    judged = {name: [r["user_id"] for r in rows if r["recommender"] == name] for name in names}
    assert all(judged[name] == judged["popularity"] for name in names)
    assert len(judged["popularity"]) == 15
    for row in rows:
        user = users[row["user_id"]]
        assert row["target_id"] == user["item_ids"][user["test_position"]]
        assert len(set(row["item_ids"])) == 10
        assert not set(row["item_ids"]) & set(user["item_ids"][: user["test_position"]])
        assert row["scores"] == sorted(row["scores"], reverse=True)
    for name in names:
        mine = [row for row in rows if row["recommender"] == name]
        assert summary[f"{name}_recall@10"] == np.mean([row["target_id"] in row["item_ids"] for row in mine])


def test_sasrec_follows_the_ring_of_purchases_and_the_others_do_not_reach_it(shop, tmp_path):
    summary = run(shop, tmp_path / "a", depth=1, sasrec_epochs=60, sasrec_dropout=0.1, sasrec_learning_rate=5e-3)
    recalls = {
        name: np.mean([row["target_id"] in row["item_ids"] for row in rows])
        for name, rows in by_recommender(tmp_path / "a").items()
    }
    assert recalls["sasrec"] > 0.8
    assert recalls["popularity"] < 0.3
    log = artifacts.load(tmp_path / "a", "recommendations/v1").read_json("sasrec.json")
    assert log["best_epoch"] == summary["sasrec_best_epoch"]


def by_recommender(out):
    rows = pq.read_table(out / "recommendations.parquet").to_pylist()
    return {name: [r for r in rows if r["recommender"] == name] for name in {r["recommender"] for r in rows}}


def test_the_stage_repeats_itself_and_leaves_sasrec_out_on_request(shop, tmp_path):
    run(shop, tmp_path / "a")
    run(shop, tmp_path / "b")
    digests = [artifacts.load(tmp_path / name, "recommendations/v1").digest for name in "ab"]
    assert digests[0] == digests[1]
    run(shop, tmp_path / "c", sasrec_epochs=0)
    assert "sasrec" not in by_recommender(tmp_path / "c")


@pytest.mark.parametrize(
    "wrong", [{"depth": 0}, {"sasrec_dropout": 1.0}, {"sasrec_heads": 3}, {"users": -1}, {"split": "tset"}]
)
def test_settings_out_of_range_are_refused_by_name(shop, tmp_path, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        run(shop, tmp_path / "a", **wrong)
    assert list(tmp_path.iterdir()) == []
