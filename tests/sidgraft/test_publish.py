"""The stage publish: what the gate lets through, and a pointer that is never broken."""

import json
import shutil
import subprocess
import sys
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from sidgraft import artifacts, bundles, gate, storage
from sidgraft.serving import Recommender
from sidgraft.stages.baselines import baselines
from sidgraft.stages.publish import publish


def run(judged, place, out, **settings):
    summary = publish(**judged, bundles=str(place), out=str(out), **settings)
    return summary, artifacts.load(out, "decision/v1").read_json("decision.json")


def recorded(judged, recommender="model", metric="ndcg", k=10):
    """The figure that evaluate wrote."""
    rows = artifacts.load(judged["metrics"], "metrics/v1").read_table("metrics.parquet").to_pylist()
    wanted = (recommender, "all", metric, k)
    return next(r["value"] for r in rows if (r["recommender"], r["slice"], r["metric"], r["k"]) == wanted)


@pytest.fixture(scope="module")
def first(good, tmp_path_factory):
    root = tmp_path_factory.mktemp("first")
    return root / "bundles", *run(good, root / "bundles", root / "out")


def test_the_first_model_is_published_with_all_that_serves_it(first, good):
    place, summary, decision = first
    assert decision["published"]
    assert summary["ndcg@10"] == pytest.approx(recorded(good))
    assert summary["popularity"] == pytest.approx(recorded(good, "popularity"))
    assert json.loads((place / "latest.json").read_text()) == {"version": summary["version"], "previous": ""}
    opened = bundles.open_bundle(place)
    model: Any = AutoModelForCausalLM.from_pretrained(opened.bundle.path / "model")
    tokenizer = AutoTokenizer.from_pretrained(opened.bundle.path / "model")
    assert len(tokenizer) == model.get_input_embeddings().weight.shape[0]
    assert opened.part("semantic_ids").digest == artifacts.load(good["semantic_ids"], "semantic_ids/v1").digest
    assert opened.bundle.metadata["encoder"] == "hashing"
    card = (opened.bundle.path / "README.md").read_text()
    assert "| finetune | learning_rate | 0.005 |" in card
    assert f"| model | ndcg@10 | {recorded(good):.4f} |" in card
    assert "| encoder | hashing |" in card


def test_publishing_the_same_again_changes_nothing(first, good, tmp_path):
    place, summary, _ = first
    before = {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in place.rglob("*") if file.is_file()}
    again, _ = run(good, place, tmp_path / "out")
    assert again["version"] == summary["version"]
    after = {file: (file.stat().st_mtime_ns, file.stat().st_size) for file in place.rglob("*") if file.is_file()}
    lock = place / ".publish.lock"
    assert {f: v for f, v in after.items() if f != lock} == {f: v for f, v in before.items() if f != lock}


def test_a_worse_model_is_refused_and_leaves_no_version(first, good, bad, tmp_path):
    place, summary, _ = first
    refused, decision = run(bad, place, tmp_path / "out", popularity_floor=0.0)
    assert not refused["published"]
    assert bundles.latest_version(place) == summary["version"]
    assert [path.name for path in (place / "versions").iterdir()] == [summary["version"]]
    (reason,) = decision["reasons"]
    # The oracle is the figure that evaluate measured for the published model, on the same users.
    limit = 0.98 * recorded(good)
    assert f"ndcg@10 ({summary['version']}: {recorded(good):.4f}) is {recorded(bad):.6g}" in reason
    assert f"at least {limit:.6g}" in reason
    page = (tmp_path / "out" / "decision.md").read_text()
    assert page.startswith(f"# {refused['version']} is refused")
    assert "**no**" in page


def test_a_worse_model_within_the_tolerance_is_published(good, bad, tmp_path):
    one, _ = run(good, tmp_path / "bundles", tmp_path / "one")
    two, _ = run(bad, tmp_path / "bundles", tmp_path / "two", popularity_floor=0.0, tolerance=1.0)
    assert two["published"]
    assert two["previous"] == one["version"]
    assert json.loads((tmp_path / "bundles" / "latest.json").read_text())["version"] == two["version"]


def test_floors_refuse_a_first_model_too(good, tmp_path):
    summary, decision = run(good, tmp_path / "bundles", tmp_path / "out", popularity_floor=100.0)
    assert not summary["published"]
    assert "popularity" in decision["reasons"][0]
    assert bundles.latest_version(tmp_path / "bundles") == ""


def in_use(place, judged, collision_rate):
    """Put a version in use that was made by hand from these parts, with this collision rate; its name."""
    with (
        bundles.new_version(str(place), "v-hand") as folder,
        artifacts.create(folder, bundles.KIND, stage="publish", arguments={"version": "v-hand"}) as draft,
    ):
        for name in ("model", "semantic_ids", "metrics"):
            shutil.copytree(judged[name], draft.path / name)
        table = artifacts.load(judged["catalog"], "catalog/v1").read_table("catalog.parquet")
        bundles.write_items(draft, bundles.item_digests(table))
        draft.write_json("catalog.json", {"categories": {}})
        (draft.path / "README.md").write_text("# By hand\n")
        draft.metadata.update(collision_rate=collision_rate, encoder="hashing")
    bundles.point_to(str(place), "v-hand", "")
    return "v-hand"


@pytest.mark.parametrize(("rise", "published"), [(0.2, False), (0.05, True), (-0.3, True)])
def test_by_default_collisions_may_rise_a_little_above_the_latest_bundle(good, bad, tmp_path, rise, published):
    now = artifacts.load(good["semantic_ids"], "semantic_ids/v1").metadata["collision_rate"]
    version = in_use(tmp_path / "bundles", bad, collision_rate=now - rise)
    summary, decision = run(good, tmp_path / "bundles", tmp_path / "out")
    assert summary["published"] is published
    (check,) = (check for check in decision["checks"] if check["name"].startswith("collision rate"))
    assert (check["value"], check["most"]) == pytest.approx((now, now - rise + 0.1))
    if not published:
        (reason,) = decision["reasons"]
        text = f"collision rate (v-hand: {now - rise:.4f}) is {now:.6g}, at most {now - rise + 0.1:.6g} was expected"
        assert reason == text
        assert bundles.latest_version(tmp_path / "bundles") == version
        loose, _ = run(good, tmp_path / "bundles", tmp_path / "out", max_collision_rise=0.21)
        assert loose["published"]


def test_a_refusal_is_written_down_and_cleared_by_a_publication(good, bad, tmp_path):
    place = tmp_path / "bundles"
    version = in_use(place, good, collision_rate=1.0)
    before = datetime.now(UTC).replace(microsecond=0)
    refused, decision = run(bad, place, tmp_path / "one", popularity_floor=0.0)
    assert not refused["published"]
    record = json.loads((place / "refused.json").read_text())
    assert before <= datetime.fromisoformat(record.pop("time")) <= datetime.now(UTC)
    digest = bundles.open_bundle(place).items()
    assert record == {
        "catalog_digest": bundles.catalog_digest(digest),  # of the catalog that both models know
        "version": refused["version"],
        "latest": version,
        "reasons": decision["reasons"],
    }
    assert json.loads((place / "latest.json").read_text()) == {"version": version, "previous": ""}
    published, _ = run(good, place, tmp_path / "two")
    assert published["published"]
    assert sorted(path.name for path in place.iterdir() if path.name[0] != ".") == ["latest.json", "versions"]


def test_a_publication_of_what_is_in_use_clears_a_refusal_too(first, good, tmp_path):
    """As after a publisher that was killed between the two."""
    place = tmp_path / "bundles"
    shutil.copytree(first[0], place)
    bundles.refuse(str(place), catalog="c", version="v", latest="l", reasons=["r"])
    run(good, place, tmp_path / "out")
    assert not (place / "refused.json").exists()


def test_items_that_the_latest_bundle_does_not_know_are_misses(good, tmp_path, to_rows, train_and_judge):
    """A catalog with new items, which half of the users buy last; one known item is no longer offered."""
    made = {name: str(tmp_path / name) for name in ("catalog", "interactions", "item_embeddings", "semantic_ids")}
    table = artifacts.load(good["catalog"], "catalog/v1").read_table("catalog.parquet")
    new = [dict(row, item_id=f"n{row['item_id']}", text=f"New {row['text']}") for row in table.to_pylist()[:6]]
    kept = [row for row in table.to_pylist() if row["item_id"] != "i23"]
    with artifacts.create(made["catalog"], "catalog/v1", stage="prepare", arguments={}) as draft:
        draft.write_table("catalog.parquet", pa.Table.from_pylist(kept + new, table.schema))
    users = artifacts.load(good["interactions"], "interactions/v1").read_table("interactions.parquet")
    rows = [r for r in users.to_pylist() if "i23" not in r["item_ids"]]
    for number, row in enumerate(rows):
        if number % 2:
            row["item_ids"][-1] = new[number % 6]["item_id"]
    with artifacts.create(made["interactions"], "interactions/v1", stage="prepare", arguments={}) as draft:
        draft.write_table("interactions.parquet", pa.Table.from_pylist(rows, users.schema))
    made["token_rows"] = str(tmp_path / "token_rows")
    to_rows(made)
    made["baselines"] = str(tmp_path / "baselines")
    baselines(made["interactions"], made["catalog"], made["item_embeddings"], made["baselines"], sasrec_epochs=1)
    judged = train_and_judge(made, tmp_path, epochs=1)

    run(good, tmp_path / "bundles", tmp_path / "one")
    _, decision = run(judged, tmp_path / "bundles", tmp_path / "two")
    (compared,) = (check for check in decision["checks"] if check["name"].startswith("ndcg@10 (v-"))
    latest = bundles.open_bundle(tmp_path / "bundles")
    offered = {row["item_id"] for row in kept}
    recommender = Recommender.load(latest.part("model"), latest.part("semantic_ids"), torch.float32, offered=offered)
    gains = []
    for row in rows:  # one user at a time, each with all items as beams
        (found,) = recommender.recommend([row["item_ids"][:-1]], items=10, beams=10).item_ids
        assert "i23" not in found
        gains.append(1 / np.log2(found.index(row["item_ids"][-1]) + 2) if row["item_ids"][-1] in found else 0.0)
    assert 0 < sum(gains) / len(gains) < 1 - len(rows) // 2 / len(rows)
    assert compared["least"] == pytest.approx(0.98 * sum(gains) / len(gains))


def test_artifacts_of_another_model_are_refused(good, bad, tmp_path):
    with pytest.raises(ValueError, match="recommendations were made from another model"):
        run(good | {"recommendations": bad["recommendations"]}, tmp_path / "bundles", tmp_path / "out")
    with pytest.raises(ValueError, match="metrics were made from another model"):
        run(good | {"metrics": bad["metrics"]}, tmp_path / "bundles", tmp_path / "out")
    with pytest.raises(ValueError, match="evaluated with 10 beams"):
        run(good, tmp_path / "bundles", tmp_path / "out", k=20)
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "bundles").exists()


KILLED = """
import os, signal, sys, json
from sidgraft import artifacts
from sidgraft.stages import publish as module
def kill(*_, **__): os.kill(os.getpid(), signal.SIGKILL)
if sys.argv[2] == "writing":
    module.model_card = kill
else:
    module.point_to = kill
module.publish(**json.loads(sys.argv[1]))
"""


@pytest.mark.parametrize("where", ["writing", "pointing"])
def test_a_killed_publisher_leaves_the_pointer_whole_and_the_next_one_ends_its_work(good, bad, tmp_path, where):
    place = tmp_path / "bundles"
    one, _ = run(bad, place, tmp_path / "one", popularity_floor=0.0)
    arguments = good | {"bundles": str(place), "out": str(tmp_path / "two")}
    done = subprocess.run([sys.executable, "-c", KILLED, json.dumps(arguments), where], capture_output=True)
    assert done.returncode == -9, done.stderr.decode()
    assert not (tmp_path / "two").exists()
    assert bundles.open_bundle(place).version == one["version"]
    two, _ = run(good, place, tmp_path / "two")
    assert bundles.open_bundle(place).version == two["version"] != one["version"]
    assert sorted(p.name for p in (place / "versions").iterdir()) == sorted([one["version"], two["version"]])


def test_two_publishers_at_once_judge_one_after_the_other(good, bad, tmp_path):
    place, done = tmp_path / "bundles", {}

    def work(name, judged):
        done[name] = run(judged, place, tmp_path / name, popularity_floor=0.0)[0]

    threads = [threading.Thread(target=work, args=entry) for entry in (("good", good), ("bad", bad))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert done["good"]["published"]
    assert bundles.open_bundle(place).version == done["good"]["version"]  # the better one, whoever was first
    assert done["bad"]["published"] == (done["bad"]["previous"] == "")
    assert done["good"]["previous"] in ("", done["bad"]["version"])


def test_the_order_of_rows_does_not_name_a_catalog_and_what_training_reads_does(good):
    table = artifacts.load(good["catalog"], "catalog/v1").read_table("catalog.parquet")
    digest = bundles.catalog_digest(bundles.item_digests(table))
    turned = table.take(list(reversed(range(table.num_rows))))
    assert bundles.catalog_digest(bundles.item_digests(turned)) == digest
    for name, value in (("text", "."), ("title", "."), ("brand", "."), ("category", ["."]), ("price", 9.5)):
        rows = table.to_pylist()
        rows[3][name] = value
        changed = pa.Table.from_pylist(rows, table.schema)
        assert (bundles.catalog_digest(bundles.item_digests(changed)) == digest) == (name == "price")


def test_figures_by_hand():
    lists = [["a", "b", "c"], ["b", "a"], ["c"], []]
    assert gate.figure(lists, ["a", "a", "a", "a"], "recall", 2) == pytest.approx(2 / 4)
    assert gate.figure(lists, ["a", "a", "a", "a"], "ndcg", 2) == pytest.approx((1 + 1 / np.log2(3)) / 4)
    assert gate.figure(lists, ["c", "a", "a", "a"], "recall", 2) == pytest.approx(1 / 4)
    assert gate.invalid_lists([["a"], ["a", "a"], ["x"], []], {"a", "b"}) == 3


@pytest.mark.parametrize(
    ("check", "passed"),
    [
        (gate.Check("c", 0.5, most=0.5), True),
        (gate.Check("c", 0.51, most=0.5), False),
        (gate.Check("c", 0.5, least=0.5), True),
        (gate.Check("c", 0.49, least=0.5), False),
        (gate.Check("c", float("nan"), least=0.0), False),
        (gate.Check("c", float("nan"), most=1.0), False),
    ],
)
def test_a_check_keeps_its_limit(check, passed):
    assert check.passed is passed


def test_bundles_that_cannot_be_read_say_why(first, tmp_path):
    place = tmp_path / "bundles"
    with pytest.raises(artifacts.ArtifactError, match="nothing is published there yet"):
        bundles.open_bundle(place)
    shutil.copytree(first[0], place)
    (model,) = place.glob("versions/*/model/model.safetensors")
    model.write_bytes(model.read_bytes()[:-1])
    with pytest.raises(artifacts.ArtifactError, match="the artifact is damaged"):
        bundles.open_bundle(place)
    manifest = Path(model.parents[1], "artifact.json")
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"kind": "bundle/v2"}))
    with pytest.raises(artifacts.ArtifactError, match=r"bundle/v2, a newer format than the bundle/v1 .* newer one"):
        bundles.open_bundle(place)
    for content in (b"{", b"[]", b"{}", b"\xff"):
        (place / "latest.json").write_bytes(content)
        with pytest.raises(artifacts.ArtifactError, match=r"latest.json is damaged: expected JSON"):
            bundles.open_bundle(place)


def test_a_store_that_breaks_off_is_no_damaged_pointer(monkeypatch):
    """It was there a moment ago, when it was asked whether there is a pointer."""

    def broken(uri):
        raise storage.StorageError("the store at https://store.example does not answer.")

    monkeypatch.setattr(storage, "exists", lambda uri: True)
    monkeypatch.setattr(storage, "read_text", broken)
    with pytest.raises(storage.StorageError, match="does not answer") as error:
        bundles.latest_version("s3://shop/bundles")
    assert "damaged" not in str(error.value)
