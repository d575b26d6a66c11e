"""The stage recommend: against an exhaustive search over all items, and what it does with items it cannot use."""

import builtins
import json
import re
import shutil
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from kfp import local
from transformers import AutoModelForCausalLM, AutoTokenizer

from sidgraft import artifacts, bundles, cli
from sidgraft.prompts import NextItem
from sidgraft.sids import SidVocabulary, codes_array
from sidgraft.stages.publish import publish
from sidgraft.stages.recommend import recommend

CHECKOUT = Path(__file__).parents[2]
PAGE = CHECKOUT / "docs" / "operations.md"

HISTORIES = [["i03", "i04"], ["i10", "i11", "i12", "i13"], ["i22"], ["gone", "i07", "never"], ["gone"], []]


@pytest.fixture(scope="module")
def place(good, tmp_path_factory):
    root = tmp_path_factory.mktemp("published")
    publish(**good, bundles=str(root / "bundles"), out=str(root / "out"))
    return root / "bundles"


def write_histories(folder, histories=HISTORIES, **options):
    folder.mkdir(exist_ok=True)
    users = [f"u{number}" for number in range(len(histories))]
    table = pa.table({"item_ids": pa.array(histories, pa.list_(pa.string())), "user_id": users})
    pq.write_table(table, folder / "histories.parquet", **options)
    return str(folder / "histories.parquet")


def run(place, folder, histories=HISTORIES, **settings):
    settings = {"precision": "float32", "beams": 24, "items": 24} | settings
    summary = recommend(str(place), write_histories(folder, histories), str(folder / "out"), **settings)
    return summary, artifacts.load(folder / "out", "user_recommendations/v1").read_table(
        "recommendations.parquet"
    ).to_pylist()


def exhaustive(place, history):
    """All items by the log-probability of their codes: one plain forward pass for each, by transformers alone."""
    bundle = bundles.open_bundle(place)
    folder = bundle.bundle.path / "model"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    vocabulary = SidVocabulary.load(folder)
    items = bundle.part("semantic_ids").read_table("semantic_ids.parquet")
    ids, tokens_NS = items["item_id"].to_pylist(), vocabulary.item_tokens(codes_array(items))
    known = [ids.index(item) for item in history if item in ids]
    prompt = torch.from_numpy(NextItem(tokenizer, vocabulary, 1024).prompt(tokens_NS[known])).long()
    scores = {}
    for item, tokens_S in zip(ids, torch.from_numpy(tokens_NS), strict=True):
        codes = tokens_S[1:-1]
        with torch.no_grad():
            logits = model(torch.cat([prompt, codes])[None]).logits[0, len(prompt) - 1 : -1].double()
        scores[item] = float(logits.log_softmax(-1).gather(1, codes[:, None]).sum())
    return sorted(scores.items(), key=lambda entry: -entry[1])


def test_it_finds_what_an_exhaustive_search_finds(place, tmp_path):
    summary, rows = run(place, tmp_path)
    for row, history in zip(rows, HISTORIES, strict=True):
        wanted = exhaustive(place, history)
        assert row["item_ids"] == [item for item, _ in wanted]
        assert row["scores"] == pytest.approx([score for _, score in wanted], abs=1e-4)
    assert [row["user_id"] for row in rows] == [f"u{n}" for n in range(len(HISTORIES))]
    assert summary["unknown_history_items"] == 3
    assert summary["users_without_known_history"] == 2


def test_the_pipeline_of_the_operations_page_recommends(place, tmp_path, monkeypatch):
    """As a component, under KFP's local runner, which knows nothing of the placement."""
    (code,) = re.findall(
        r"^```python\n(from kfp import compiler, .*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(builtins, "print", print)  # KFP's local runner puts its own in place
    component = tmp_path / "components" / "recommend" / "component.mine.yaml"
    component.parent.mkdir(parents=True)
    shutil.copy(CHECKOUT / "components" / "recommend" / "component.yaml", component)
    shutil.copy(CHECKOUT / "pipelines" / "profiles" / "h100.yaml", tmp_path / "mine.yaml")
    exec(code, made := {})
    local.init(local.SubprocessRunner(use_venv=False), pipeline_root=str(tmp_path / "root"), raise_on_error=True)
    made["lists"](bundles=str(place), histories=write_histories(tmp_path), items=5)
    (found,) = (tmp_path / "root").rglob("recommendations.parquet")
    recommend(str(place), str(tmp_path / "histories.parquet"), str(tmp_path / "out"), items=5)
    assert pq.read_table(found).equals(pq.read_table(tmp_path / "out" / "recommendations.parquet"))
    assert pq.read_table(found).num_rows == len(HISTORIES)


def test_delisted_items_and_those_not_on_offer_cannot_come_out(place, good, tmp_path):
    everything = run(place, tmp_path)[1]
    gone = {row["item_ids"][0] for row in everything}
    pq.write_table(pa.table({"item_id": sorted(gone)}), tmp_path / "delisted.parquet")
    summary, rows = run(place, tmp_path, delisted=str(tmp_path / "delisted.parquet"))
    assert summary["offered"] == 24 - len(gone)
    for row, before in zip(rows, everything, strict=True):
        assert row["item_ids"] == [item for item in before["item_ids"] if item not in gone]

    catalog = artifacts.load(good["catalog"], "catalog/v1").read_table("catalog.parquet")
    with artifacts.create(tmp_path / "now", "catalog/v1", stage="prepare", arguments={}) as draft:
        draft.write_table("catalog.parquet", catalog.slice(4, 5))
    offered = set(catalog["item_id"].to_pylist()[4:9])
    _, rows = run(place, tmp_path, offered=str(tmp_path / "now"), beams=5, items=5)
    assert all(set(row["item_ids"]) == offered for row in rows)

    pq.write_table(pa.table({"item_id": ["x", "y"]}), tmp_path / "others.parquet")
    with pytest.raises(ValueError, match="none of the 24 items that the model knows is offered"):
        run(place, tmp_path, offered=str(tmp_path / "others.parquet"))


def test_the_history_is_left_out_on_demand_and_no_place_is_lost(place, tmp_path):
    everything = run(place, tmp_path)[1]
    _, rows = run(place, tmp_path, exclude_history=True, beams=20, items=20)
    for row, before, history in zip(rows, everything, HISTORIES, strict=True):
        assert row["item_ids"] == [item for item in before["item_ids"] if item not in history][:20]
        assert len(row["item_ids"]) == 20


def test_a_user_with_a_long_history_changes_nothing_for_others(place, tmp_path):
    """Were their searches wider for it, one beam would find other items."""
    few = {"exclude_history": True, "beams": 1, "items": 1}
    short, long = [[f"i{n:02d}"] for n in range(24)], [f"i{n:02d}" for n in range(23)]
    _, alone = run(place, tmp_path / "alone", short, **few)
    _, together = run(place, tmp_path / "together", [*short, long], **few)
    assert [row["item_ids"] for row in together] == [*(row["item_ids"] for row in alone), ["i23"]]
    _, wide = run(place, tmp_path / "wide", short, **few | {"beams": 24})
    assert [row["item_ids"] for row in wide] != [row["item_ids"] for row in alone]


@pytest.mark.parametrize("settings", [{"users_at_once": 2}, {"batch_tokens": 1}])
def test_batches_change_no_item_and_scores_by_rounding_alone(place, tmp_path, settings):
    summary, whole = run(place, tmp_path)
    again, parts = run(place, tmp_path, **settings)
    assert again == summary
    for one, other in zip(parts, whole, strict=True):
        assert (one["user_id"], one["item_ids"]) == (other["user_id"], other["item_ids"])
        assert one["scores"] == pytest.approx(other["scores"], abs=1e-4)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"user_id": ["u"], "items": [["a"]]}, "has the columns user_id, items, but not item_ids"),
        ({"user_id": ["u"], "item_ids": ["a b"]}, "item_ids is string"),
        ({"user_id": ["u"], "item_ids": [[1, 2]]}, "expected a list of strings"),
        ({"user_id": ["u", None], "item_ids": [["a"], ["b"]]}, "1 rows have no user_id"),
    ],
)
def test_histories_of_another_form_are_refused(place, tmp_path, table, message):
    pq.write_table(pa.table(table), tmp_path / "h.parquet")
    with pytest.raises(ValueError, match=message):
        recommend(str(place), str(tmp_path / "h.parquet"), str(tmp_path / "out"), precision="float32")
    assert not (tmp_path / "out").exists()


def test_no_parquet_and_no_file_are_refused(place, tmp_path):
    (tmp_path / "h.csv").write_text("user_id,item_ids\n")
    for name, message in (("h.csv", "is not a Parquet file"), ("none.parquet", "does not exist")):
        with pytest.raises(ValueError, match=message):
            recommend(str(place), str(tmp_path / name), str(tmp_path / "out"))


def test_a_newer_bundle_is_one_sentence_on_the_command_line(place, tmp_path, capsys):
    shutil.copytree(place, tmp_path / "bundles")
    (manifest,) = tmp_path.glob("bundles/versions/*/artifact.json")
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"kind": "bundle/v2"}))
    arguments = ["--bundles", str(tmp_path / "bundles"), "--histories", write_histories(tmp_path)]
    assert cli.main(["recommend", *arguments, "--out", str(tmp_path / "out")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "holds bundle/v2, a newer format than the bundle/v1 that sidgraft" in line
    assert not (tmp_path / "out").exists()
