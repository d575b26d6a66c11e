"""The stage finetune and, on its model, the stage evaluate."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from peft.import_utils import is_bnb_4bit_available, is_bnb_available
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.models.llama.modeling_llama import LlamaMLP

from sidgraft import adapters, artifacts, lease, training, validation
from sidgraft.models import load_base_model
from sidgraft.stages import finetune as stage
from sidgraft.stages.baselines import baselines
from sidgraft.stages.evaluate import evaluate
from sidgraft.stages.finetune import finetune

SETTINGS = {"epochs": 40, "patience": 40, "learning_rate": 5e-3, "batch_size": 8, "precision": "float32"}


def run(shop, out, **settings):
    inputs = {name: shop[name] for name in ("token_rows", "catalog", "semantic_ids", "interactions")}
    return finetune(**inputs, out=str(out), **(SETTINGS | settings))


@pytest.fixture(scope="module")
def trained(shop, tmp_path_factory):
    out = tmp_path_factory.mktemp("trained") / "model"
    return str(out), run(shop, out)


def judge(shop, model, out, **settings):
    inputs = {n: shop[n] for n in ("semantic_ids", "interactions", "catalog", "baselines")}
    settings = {"precision": "float32", "variant": "v", "bootstrap": 100, "ks": "1,5,10"} | settings
    return evaluate(
        model=model, **inputs, out_recommendations=str(out / "rec"), out_metrics=str(out / "met"), **settings
    )


def recommend(shop, out, **settings):
    """The shop with baselines of other settings."""
    made = dict(shop) | {"baselines": str(out / "baselines")}
    data = (shop["interactions"], shop["catalog"], shop["item_embeddings"])
    baselines(*data, made["baselines"], **({"sasrec_epochs": 1} | settings))
    return made


def test_a_node_looks_from_the_start_whether_a_task_waits_for_it(shop, tmp_path, monkeypatch):
    class Looked(Exception):
        pass

    def look(stage):
        raise Looked(stage)

    monkeypatch.setattr(lease, "end_when_old", look)
    with pytest.raises(Looked, match="finetune"):
        run(shop, tmp_path / "out")


def test_it_learns_a_ring_of_purchases_far_above_popularity(shop, trained, tmp_path):
    summary = judge(shop, trained[0], tmp_path)
    assert summary["model_recall@10"] > 2 * summary["popularity_recall@10"]
    assert summary["model_ndcg@10"] > 2 * summary["popularity_ndcg@10"]


def test_the_model_loads_as_any_other_with_its_tokens_and_tied_weights(trained):
    model = AutoModelForCausalLM.from_pretrained(trained[0])
    tokenizer = AutoTokenizer.from_pretrained(trained[0])
    assert model.lm_head.weight is model.model.embed_tokens.weight
    vocabulary = json.loads((Path(trained[0]) / "sid_vocabulary.json").read_text())
    for token in (vocabulary["tokens"][0], vocabulary["tokens"][-1]):
        assert tokenizer.convert_tokens_to_ids(token["token"]) == token["id"]
    assert model.get_input_embeddings().weight.shape[0] == vocabulary["tokens"][-1]["id"] + 1


def test_the_best_epoch_is_kept_and_its_step_reported(trained):
    training = json.loads((Path(trained[0]) / "training.json").read_text())
    recalls = {row["step"]: row["recall@5"] for row in training["log"] if "recall@5" in row}
    best = max(recalls.values())
    first = min(step for step, recall in recalls.items() if recall == best)
    assert training["t_star"] == first - 1  # counted from 0, as in the papers
    assert training["best_recall@5"] == best
    steps_an_epoch = min(recalls)
    assert training["best_epoch"] == first / steps_an_epoch


def test_patience_counts_epochs_and_ties_keep_the_earlier():
    log = [{"recall@5": r, "step": s} for s, r in enumerate([0.1, 0.3, 0.3, 0.2], 1)]
    assert validation.best_epoch(log)["step"] == 2
    assert validation.is_exhausted(log, 2)
    assert not validation.is_exhausted(log, 3)
    assert not validation.is_exhausted([], 1)


def test_early_stopping_keeps_the_best_weights_not_the_last(shop, tmp_path):
    """The model that was written, decoded for the validation users, reaches the best epoch's figure."""
    summary = run(shop, tmp_path / "model", learning_rate=0.5, patience=2, epochs=8)
    log = json.loads((tmp_path / "model" / "training.json").read_text())["log"]
    recalls = [row["recall@5"] for row in log if "recall@5" in row]
    assert len(recalls) == summary["best_epoch"] + 2 < 8
    made = recommend(shop, tmp_path, split="valid")
    judged = judge(made, str(tmp_path / "model"), tmp_path, split="valid", ks="5")
    assert judged["model_recall@5"] == pytest.approx(recalls[-3]) == pytest.approx(max(recalls))
    assert recalls[-1] < recalls[-3]


KILLED = """
import sys
from sidgraft import validation
from sidgraft.stages.finetune import finetune
import tests_settings as t

finetune(**t.INPUTS, out=sys.argv[1], checkpoints=sys.argv[2], checkpoint_minutes=0.0, **t.SETTINGS)
"""


@pytest.mark.slow
def test_a_run_killed_in_the_middle_of_an_epoch_goes_on_to_the_same_weights(shop, trained, tmp_path):
    inputs = {name: shop[name] for name in ("token_rows", "catalog", "semantic_ids", "interactions")}
    (tmp_path / "tests_settings.py").write_text(f"INPUTS = {inputs!r}\nSETTINGS = {SETTINGS!r}\n")
    (tmp_path / "killed.py").write_text(KILLED)
    out, checkpoints = tmp_path / "model", tmp_path / "checkpoints"
    command = [sys.executable, "killed.py", str(out), str(checkpoints)]
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": path})
    deadline = time.monotonic() + 120
    # five steps an epoch: step 13 lies in the middle of the third
    while not list(checkpoints.glob("*/checkpoint-13")) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not out.exists()
    assert list(checkpoints.glob("*/checkpoint-*"))
    run(shop, out, checkpoints=str(checkpoints))
    expected, found = (load_file(Path(d) / "model.safetensors") for d in (trained[0], out))
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    assert not list(checkpoints.glob("*/checkpoint-*"))
    logs = [json.loads((Path(d) / "training.json").read_text())["log"] for d in (trained[0], out)]
    assert logs[0] == logs[1]


def test_in_bfloat16_it_learns_as_much(shop, trained, tmp_path):
    run(shop, tmp_path / "model", precision="bfloat16")
    half = judge(shop, str(tmp_path / "model"), tmp_path, precision="bfloat16")
    full = judge(shop, trained[0], tmp_path, precision="float32")
    assert half["model_recall@10"] > 2 * half["popularity_recall@10"]
    assert half["model_recall@10"] == pytest.approx(full["model_recall@10"], abs=0.15)


def test_recomputing_activations_runs_each_layer_twice_and_changes_no_result(shop, tmp_path):
    runs = []

    def count(module, _):
        runs[-1] += isinstance(module, LlamaMLP) and torch.is_grad_enabled()

    hook = torch.nn.modules.module.register_module_forward_pre_hook(count)
    for name, checkpointing in (("a", True), ("b", False)):
        runs.append(0)
        run(shop, tmp_path / name, gradient_checkpointing=checkpointing, epochs=1, patience=1)
    hook.remove()
    assert runs == [20, 10]  # of two layers in five steps; hooks of a layer itself stay outside of what is recomputed
    a, b = (load_file(tmp_path / name / "model.safetensors") for name in "ab")
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=1e-5, atol=1e-6)


@pytest.fixture
def asked_anew():
    """peft remembers whether bitsandbytes is there: it is asked again in a test, and again behind it."""
    remembered = (is_bnb_available, is_bnb_4bit_available)
    for answer in remembered:
        answer.cache_clear()
    yield
    for answer in remembered:
        answer.cache_clear()


def test_without_four_bit_layers_qlora_trains_as_lora_and_console_and_artifact_say_so(
    shop, tmp_path, monkeypatch, capsys, asked_anew
):
    monkeypatch.setitem(sys.modules, "bitsandbytes", None)
    made = {}
    for mode in ("lora", "qlora"):
        made[mode] = run(shop, tmp_path / mode, mode=mode, epochs=1, precision="bfloat16")
        said = capsys.readouterr().err
        assert ("mode=qlora cannot train here" in said) == (mode == "qlora")
    assert "over frozen weights in bfloat16" in said
    one, other = (load_file(tmp_path / mode / "model.safetensors") for mode in made)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert made["lora"]["mode"] == made["qlora"]["mode"] == "lora"
    written = artifacts.load(tmp_path / "qlora", "model/v1")
    assert written.arguments["mode"] == "qlora"
    assert written.metadata["why_this_mode"] in said
    assert "why_this_mode" not in made["lora"]


def test_whether_four_bits_are_possible_is_known_before_the_model_is_loaded(shop, tmp_path, monkeypatch):
    def refuse(mode, dtype, device):
        assert (mode, dtype, device.type) == ("qlora", torch.bfloat16, "cuda" if torch.cuda.is_available() else "cpu")
        raise ValueError("repair it")

    monkeypatch.setattr(adapters, "possible", refuse)
    monkeypatch.setattr(stage, "load_grafted", lambda *_: pytest.fail("the model was loaded"))
    with pytest.raises(ValueError, match="repair it"):
        run(shop, tmp_path / "model", mode="qlora", precision="bfloat16")
    assert list(tmp_path.iterdir()) == []


def test_with_four_bit_layers_qlora_trains_over_them(shop, tmp_path, monkeypatch, capsys, asked_anew):
    functional = pytest.importorskip("bitsandbytes.functional")
    settings = {"mode": "qlora", "epochs": 1, "precision": "bfloat16", "learning_rate": 1e-12}
    layers, adapt = set(), adapters.adapt

    def keep(model, *args, **named):
        adapt(model, *args, **named)
        layers.update(type(m) for m in model.modules() if isinstance(m, LoraLayer))

    monkeypatch.setattr(adapters, "adapt", keep)
    summary = run(shop, tmp_path / "model", **settings)
    assert layers == {pytest.importorskip("peft.tuners.lora.bnb").Linear4bit}  # not that over plain weights
    assert (summary["mode"], "why_this_mode" in summary) == ("qlora", False)
    assert "cannot train here" not in capsys.readouterr().err
    # With next to no step what is merged is the base model in 4 bits.
    name = "model.layers.0.mlp.up_proj.weight"
    base = load_base_model("tiny").state_dict()[name]
    small, state = functional.quantize_4bit(base, compress_statistics=True, quant_type="nf4")
    merged = load_file(tmp_path / "model" / "model.safetensors")[name]
    torch.testing.assert_close(merged, functional.dequantize_4bit(small, state), rtol=0, atol=1e-6)
    assert (merged - base).abs().max() > 1e-3


@pytest.mark.parametrize("mode", ["full", "lora"])
def test_steps_in_parts_give_the_loss_and_the_weights_of_whole_steps(shop, tmp_path, monkeypatch, mode):
    once = {"epochs": 2, "patience": 2, "mode": mode, "lora_dropout": 0.0}
    run(shop, tmp_path / "whole", **once)
    places, pack = [], training.pack
    monkeypatch.setattr(training, "pack", lambda some: places.append(len(some) * max(map(len, some))) or pack(some))
    run(shop, tmp_path / "parts", tokens_at_once=250, **once)
    assert len(places) >= 3 * 10  # of ten steps
    assert max(places) <= 250
    logs = [json.loads((tmp_path / name / "training.json").read_text())["log"] for name in ("whole", "parts")]
    for figure in ("loss", "grad_norm", "recall@5"):
        whole, parts = ([row[figure] for row in log if figure in row] for log in logs)
        np.testing.assert_allclose(parts, whole, rtol=1e-4, err_msg=figure)
    whole, parts = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "parts"))
    for name in whole:
        torch.testing.assert_close(parts[name], whole[name], rtol=0, atol=1e-4, msg=name)


@pytest.mark.parametrize(
    "wrong", [{"warmup": 2.0}, {"weight_decay": -1.0}, {"epochs": 0}, {"validation_beams": 3}, {"tokens_at_once": -1}]
)
def test_settings_out_of_range_are_refused_by_name(shop, tmp_path, wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        run(shop, tmp_path / "model", **wrong)
    assert list(tmp_path.iterdir()) == []


def test_recommendations_are_items_and_metrics_follow_from_them(shop, trained, tmp_path):
    judge(shop, trained[0], tmp_path, beams=10)
    catalog = set(pq.read_table(Path(shop["catalog"]) / "catalog.parquet")["item_id"].to_pylist())
    rows = pq.read_table(tmp_path / "rec" / "recommendations.parquet").to_pylist()
    assert {row["recommender"] for row in rows} == {"model", "popularity", "neighbours", "co-occurrence", "sasrec"}
    for row in rows:
        assert len(set(row["item_ids"])) == len(row["item_ids"]) == 10
        assert set(row["item_ids"]) <= catalog
        assert row["scores"] == sorted(row["scores"], reverse=True)
    metrics = pq.read_table(tmp_path / "met" / "metrics.parquet").to_pylist()
    for recommender in ("model", "popularity", "neighbours", "co-occurrence", "sasrec"):
        mine = [row for row in rows if row["recommender"] == recommender]
        for k in (1, 5, 10):
            by_hand = np.mean([row["target_id"] in row["item_ids"][:k] for row in mine])
            (found,) = [
                m["value"]
                for m in metrics
                if (m["recommender"], m["slice"], m["metric"], m["k"]) == (recommender, "all", "recall", k)
            ]
            assert found == pytest.approx(by_hand)


@pytest.mark.parametrize("broken", ["recommendations.parquet", "metrics.parquet"])
def test_of_recommendations_and_metrics_neither_is_finished_where_one_cannot_be_written(
    shop, trained, tmp_path, monkeypatch, broken
):
    write_table = artifacts.Draft.write_table

    def fail(draft, name, table):
        if name == broken:
            raise OSError("disk full")
        write_table(draft, name, table)

    monkeypatch.setattr(artifacts.Draft, "write_table", fail)
    with pytest.raises(OSError, match="disk full"):
        judge(shop, trained[0], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_excluding_the_history_holds_for_the_model_and_the_baselines(shop, trained, tmp_path):
    judge(recommend(shop, tmp_path, exclude_history=True), trained[0], tmp_path, exclude_history=True)
    interactions = pq.read_table(Path(shop["interactions"]) / "interactions.parquet").to_pylist()
    histories = {row["user_id"]: set(row["item_ids"][: row["test_position"]]) for row in interactions}
    rows = pq.read_table(tmp_path / "rec" / "recommendations.parquet").to_pylist()
    assert all(not histories[row["user_id"]] & set(row["item_ids"]) for row in rows)
    assert all(len(row["item_ids"]) == 10 for row in rows)
    metrics = pq.read_table(tmp_path / "met" / "metrics.parquet").to_pylist()
    assert {row["k"] for row in metrics if row["metric"] == "level_1"} == {10}  # the search has no more beams for it


def test_cut_offs_above_the_beams_are_left_out(shop, trained, tmp_path):
    judge(shop, trained[0], tmp_path, ks="5,10,20", beams=6)
    table = pq.read_table(tmp_path / "met" / "metrics.parquet").to_pylist()
    assert {row["k"] for row in table if row["metric"] == "recall"} == {5}
    with pytest.raises(ValueError, match="there are 6 beams"):
        judge(shop, trained[0], tmp_path, ks="20", beams=6)


def test_artifacts_of_another_catalog_are_refused(shop, trained, tmp_path):
    wrong = dict(shop) | {"catalog": str(tmp_path / "catalog")}
    table = pq.read_table(Path(shop["catalog"]) / "catalog.parquet").slice(1)
    with artifacts.create(tmp_path / "catalog", "catalog/v1", stage="prepare", arguments={}) as draft:
        draft.write_table("catalog.parquet", table)
    with pytest.raises(ValueError, match="do not hold the same items"):
        judge(wrong, trained[0], tmp_path)


@pytest.mark.parametrize("other", [{"users": 7}, {"split": "valid"}, {"exclude_history": True}])
def test_baselines_of_other_users_or_rules_are_refused(shop, trained, tmp_path, other):
    name, value = next(iter(other.items()))
    with pytest.raises(ValueError, match=rf"the baselines were made with {name}=.*, but evaluate has {name}={value}"):
        judge(shop, trained[0], tmp_path, **other)
    judge(recommend(shop, tmp_path, **other), trained[0], tmp_path, **other)


def test_baselines_that_are_not_deep_enough_or_of_other_data_are_refused(shop, trained, tmp_path):
    shallow = recommend(shop, tmp_path, depth=7)
    with pytest.raises(ValueError, match="ks goes up to 10, but the baselines hold 7 items a user"):
        judge(shallow, trained[0], tmp_path)
    judge(shallow, trained[0], tmp_path, ks="5")
    with pytest.raises(ValueError, match="expected that of `sidgraft baselines`"):
        judge(shop | {"baselines": str(tmp_path / "rec")}, trained[0], tmp_path / "again")
    table = pq.read_table(Path(shop["interactions"]) / "interactions.parquet").slice(1)
    with artifacts.create(tmp_path / "others", "interactions/v1", stage="prepare", arguments={}) as draft:
        draft.write_table("interactions.parquet", table)
    with pytest.raises(ValueError, match="made from other interactions"):
        judge(shop | {"interactions": str(tmp_path / "others")}, trained[0], tmp_path)


def test_a_run_of_the_whole_catalog_measures_baselines_and_model_alike(shop, trained, tmp_path):
    """Every target is somewhere in a full ranking: Recall@24 of all is 1."""
    judge(shop, trained[0], tmp_path, ks="24", beams=24)
    rows = pq.read_table(tmp_path / "met" / "metrics.parquet").to_pylist()
    found = {r["recommender"]: r["value"] for r in rows if (r["slice"], r["metric"], r["k"]) == ("all", "recall", 24)}
    assert found == dict.fromkeys(("model", "popularity", "neighbours", "co-occurrence", "sasrec"), 1.0)


def test_tensorboard_shows_the_log_of_the_artifact(shop, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(shop, tmp_path / "model", epochs=2, patience=2, report_to="tensorboard")
    log = json.loads((tmp_path / "model" / "training.json").read_text())["log"]
    (folder,) = (tmp_path / "model" / "tensorboard").iterdir()
    events = EventAccumulator(str(folder))
    events.Reload()
    shown = [(event.step, pytest.approx(event.value, rel=1e-6)) for event in events.Scalars("train/loss")]
    assert [(row["step"], row["loss"]) for row in log if "loss" in row] == shown
    artifacts.load(str(tmp_path / "model"), "model/v1")  # the events are among the files that it lists


def test_a_place_to_report_to_that_cannot_be_is_refused(shop, tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="Did you mean tensorboard"):
        run(shop, tmp_path / "model", report_to="tensorbord")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ValueError, match="needs the package mlflow"):
        run(shop, tmp_path / "model", report_to="mlflow")
    assert list(tmp_path.iterdir()) == []
