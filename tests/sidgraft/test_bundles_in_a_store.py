"""Bundles in an object store: published, refused, watched and served as from a folder."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from sidgraft import artifacts, bundles, models, storage
from sidgraft.stages import publish as stage
from sidgraft.stages.expand import expand
from sidgraft.stages.extend import extend
from sidgraft.stages.publish import publish
from sidgraft.stages.recommend import recommend
from sidgraft.stages.watch import watch

pytestmark = pytest.mark.s3


def test_a_bundle_is_published_watched_and_served_from_the_store(store, shop, good, bad, tmp_path):
    place = store.place
    one = publish(**bad, bundles=place, out=str(tmp_path / "one"), popularity_floor=0.0)
    two = publish(**good, bundles=place, out=str(tmp_path / "two"))
    assert two["previous"] == one["version"]
    refused = publish(**bad, bundles=place, out=str(tmp_path / "three"), popularity_floor=0.0)
    assert refused["version"] == one["version"]
    assert not refused["published"]
    assert json.loads(storage.read_text(f"{place}/refused.json"))["version"] == one["version"]
    assert json.loads(storage.read_text(f"{place}/latest.json")) == {
        "version": two["version"],
        "previous": one["version"],
    }
    assert bundles.open_bundle(place).part("model").digest == artifacts.load(good["model"], "model/v1").digest

    seen = watch(shop["catalog"], shop["item_embeddings"], place, str(tmp_path / "decision"))
    assert seen["decision"] == "none"
    assert bundles.refusal(place, seen["catalog_digest"], two["version"])
    publish(**good, bundles=place, out=str(tmp_path / "again"))
    assert not storage.exists(f"{place}/refused.json")
    assert not bundles.refusal(place, seen["catalog_digest"], two["version"])

    histories = pa.table({"user_id": ["u"], "item_ids": pa.array([["i03", "i04"]], pa.list_(pa.string()))})
    pq.write_table(histories, tmp_path / "h.parquet")
    storage.upload(tmp_path / "h.parquet", f"{place}/h.parquet")
    recommend(place, f"{place}/h.parquet", str(tmp_path / "remote"), precision="float32")
    publish(**good, bundles=str(tmp_path / "bundles"), out=str(tmp_path / "four"))
    recommend(str(tmp_path / "bundles"), str(tmp_path / "h.parquet"), str(tmp_path / "local"), precision="float32")
    read = [artifacts.load(tmp_path / name, "user_recommendations/v1") for name in ("remote", "local")]
    tables = [artifact.read_table("recommendations.parquet") for artifact in read]
    assert tables[0].equals(tables[1])
    assert tables[0].num_rows == 1


def test_a_training_goes_on_from_a_version_in_the_store(store, shop, good, tmp_path):
    version = publish(**good, bundles=store.place, out=str(tmp_path / "one"))["version"]
    previous = watch(shop["catalog"], shop["item_embeddings"], store.place, str(tmp_path / "seen"), force="full")[
        "bundle"
    ]
    assert previous == f"{store.place}/versions/{version}"
    where = shop["catalog"], shop["item_embeddings"]
    extend(*where, previous, str(tmp_path / "ids"))
    expand(str(tmp_path / "ids"), *where, str(tmp_path / "rows"), base_model="tiny", previous=previous)
    grafted, _, _ = models.load_grafted(artifacts.load(tmp_path / "rows", "token_rows/v1"), torch.float32)
    last, _, _ = models.load_model(artifacts.load(good["model"], "model/v1"), torch.float32)
    found, expected = grafted.state_dict(), last.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_publisher_that_was_overtaken_judges_again(store, good, bad, tmp_path, monkeypatch):
    """Between the judgement of the worse model and its move of the pointer, the better one is published."""
    place, write = store.place, stage._write_bundle

    def overtaken(*arguments):
        monkeypatch.setattr(stage, "_write_bundle", write)
        publish(**good, bundles=place, out=str(tmp_path / "good"))
        write(*arguments)

    monkeypatch.setattr(stage, "_write_bundle", overtaken)
    late = publish(**bad, bundles=place, out=str(tmp_path / "bad"), popularity_floor=0.0)
    assert not late["published"]
    assert bundles.latest_version(place) == late["previous"] != late["version"]
