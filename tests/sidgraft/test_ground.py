"""The stage ground: what it changes, what it keeps, and what it refuses."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from sidgraft import artifacts, distributed, training
from sidgraft.models import BaseModel, load_grafted, load_rows
from sidgraft.stages.expand import expand
from sidgraft.stages.ground import ground
from sidgraft.variants import INITIALIZATIONS


def run(shop, out, **settings):
    settings = {"epochs": 1, "precision": "float32", "learning_rate": 1e-2} | settings
    inputs = {name: shop[name] for name in ("token_rows", "catalog", "semantic_ids", "interactions")}
    return ground(**inputs, out=str(out), **settings)


@pytest.mark.parametrize("corpus", ["gti", "gti-text-to-sid", "gti-sid-to-text", "cpt"])
def test_every_corpus_changes_every_row_and_nothing_else(shop, tmp_path, corpus):
    summary = run(shop, tmp_path / "out", corpus=corpus)
    grounded = artifacts.load(tmp_path / "out", "token_rows/v1")
    before, after = (load_file(Path(d) / "rows.safetensors") for d in (shop["token_rows"], grounded.path))
    assert (before["rows"] != after["rows"]).any(dim=1).all()
    assert all(torch.equal(before[name], after[name]) for name in before if name != "rows")
    for name in ("sid_vocabulary.json", "base_model.json"):
        assert (grounded.path / name).read_bytes() == (Path(shop["token_rows"]) / name).read_bytes()
    assert summary["last_loss"] < summary["first_loss"]
    log = json.loads((grounded.path / "training.json").read_text())["log"]
    assert [row["step"] for row in log] == list(range(1, summary["steps"] + 1))


@pytest.mark.parametrize("corpus", ["gti", "cpt"])
@pytest.mark.parametrize("initialization", INITIALIZATIONS)
def test_every_initialization_is_grounded_on_either_corpus(shop, tmp_path, initialization, corpus):
    """As in the variants mean+gti, centroid+gti, random+cpt, …: from the rows it starts with, and they learn."""
    rows = str(tmp_path / "rows")
    expand(
        shop["semantic_ids"], shop["catalog"], shop["item_embeddings"], rows,
        base_model="tiny", initialization=initialization,
    )  # fmt: skip
    summary = run(shop | {"token_rows": rows}, tmp_path / "out", corpus=corpus, epochs=2, keep_epochs="0")
    grounded = artifacts.load(tmp_path / "out", "token_rows/v1")
    assert torch.equal(load_rows(grounded, 0)["rows"], load_file(Path(rows) / "rows.safetensors")["rows"])
    assert summary["last_loss"] < summary["first_loss"]


@pytest.mark.parametrize("corpus", ["gti", "cpt"])
def test_steps_in_parts_give_the_loss_and_the_rows_of_whole_steps(shop, tmp_path, monkeypatch, corpus):
    settings = {"corpus": corpus, "learning_rate": 1e-3, "batch_size": 40, "epochs": 2}
    run(shop, tmp_path / "whole", **settings)
    places, pack = [], training.pack
    monkeypatch.setattr(training, "pack", lambda some: places.append(len(some) * max(map(len, some))) or pack(some))
    summary = run(shop, tmp_path / "parts", tokens_at_once=1500, **settings)
    assert len(places) >= 2 * summary["steps"]
    assert max(places) <= 1500
    logs = [json.loads((tmp_path / name / "training.json").read_text())["log"] for name in ("whole", "parts")]
    for figure in ("loss", "grad_norm"):
        whole, parts = ([row[figure] for row in log] for log in logs)
        np.testing.assert_allclose(parts, whole, rtol=1e-4, err_msg=figure)
    whole, parts = (load_file(tmp_path / name / "rows.safetensors")["rows"] for name in ("whole", "parts"))
    torch.testing.assert_close(parts, whole, rtol=0, atol=1e-4)
    assert (whole - load_file(Path(shop["token_rows"]) / "rows.safetensors")["rows"]).abs().max() > 1e-3


def test_no_corpus_passes_the_rows_through(shop, tmp_path):
    run(shop, tmp_path / "out", corpus="none")
    rows = [(Path(d) / "rows.safetensors").read_bytes() for d in (shop["token_rows"], tmp_path / "out")]
    assert rows[0] == rows[1]


def test_rows_at_asked_epochs_are_kept_and_the_last_are_the_result(shop, tmp_path):
    run(shop, tmp_path / "out", epochs=3, keep_epochs="0,1,3")
    kept = {p.name: load_file(p)["rows"] for p in (tmp_path / "out").glob("rows-epoch-*")}
    assert sorted(kept) == [f"rows-epoch-{epoch}.safetensors" for epoch in (0, 1, 3)]
    assert torch.equal(
        kept["rows-epoch-0.safetensors"], load_file(Path(shop["token_rows"]) / "rows.safetensors")["rows"]
    )
    final = load_file(tmp_path / "out" / "rows.safetensors")["rows"]
    assert torch.equal(kept["rows-epoch-3.safetensors"], final)
    assert not torch.equal(kept["rows-epoch-1.safetensors"], final)


def test_the_rows_kept_at_an_epoch_are_those_of_a_run_of_that_many_epochs(shop, tmp_path):
    """So one run serves a sweep over depths."""
    run(shop, tmp_path / "deep", corpus="cpt", epochs=3, keep_epochs="0,2")
    run(shop, tmp_path / "shallow", corpus="cpt", epochs=2)
    deep = artifacts.load(tmp_path / "deep", "token_rows/v1")
    shallow = load_rows(artifacts.load(tmp_path / "shallow", "token_rows/v1"))
    kept = load_rows(deep, 2)
    assert kept.keys() == shallow.keys()
    assert all(torch.equal(kept[name], shallow[name]) for name in kept)
    start = load_rows(artifacts.load(shop["token_rows"], "token_rows/v1"))
    assert torch.equal(load_rows(deep, 0)["rows"], start["rows"])
    with pytest.raises(ValueError, match=r"epoch 1 were not kept; there are those of \[0, 2\]"):
        load_rows(deep, 1)


def test_two_runs_give_the_same_rows(shop, tmp_path):
    for name in "ab":
        run(shop, tmp_path / name)
    assert (
        artifacts.load(tmp_path / "a", "token_rows/v1").digest == artifacts.load(tmp_path / "b", "token_rows/v1").digest
    )


def test_a_corpus_that_does_not_exist_is_refused_with_a_suggestion(shop, tmp_path):
    with pytest.raises(ValueError, match="Did you mean gti"):
        run(shop, tmp_path / "out", corpus="gtis")
    assert list(tmp_path.iterdir()) == []


def test_epochs_to_keep_that_are_no_numbers_are_refused(shop, tmp_path):
    with pytest.raises(ValueError, match="keep_epochs is '1,last', expected whole numbers"):
        run(shop, tmp_path / "out", keep_epochs="1,last")


def test_epochs_to_keep_beyond_the_last_are_refused_and_a_broken_one_is_not_kept(shop, tmp_path):
    with pytest.raises(ValueError, match="epochs from 0 to the 2 that are trained"):
        run(shop, tmp_path / "out", epochs=2, keep_epochs="3")
    run(shop, tmp_path / "out", epochs=1.5, keep_epochs="1")
    assert [p.name for p in (tmp_path / "out").glob("rows-epoch-*")] == ["rows-epoch-1.safetensors"]


@pytest.mark.parametrize(("max_steps", "trained"), [(0, 18), (5, 5), (12, 12), (18, 18), (500, 18)])
def test_training_ends_after_the_epochs_or_after_max_steps_whichever_comes_first(shop, tmp_path, max_steps, trained):
    """An epoch has nine steps."""
    summary = run(shop, tmp_path / "out", epochs=2, max_steps=max_steps)
    log = json.loads((tmp_path / "out" / "training.json").read_text())["log"]
    assert summary["steps"] == len(log) == trained
    assert log[-1]["epoch"] == pytest.approx(trained / 9)


def test_an_epoch_to_keep_that_max_steps_does_not_reach_is_refused_before_training(shop, tmp_path, monkeypatch):
    run(shop, tmp_path / "whole", epochs=2, max_steps=9, keep_epochs="0,1")
    kept = [load_file(tmp_path / "whole" / name)["rows"] for name in ("rows-epoch-1.safetensors", "rows.safetensors")]
    assert torch.equal(*kept)
    monkeypatch.setattr("sidgraft.stages.ground.train", lambda *_: pytest.fail("it was trained"))
    with pytest.raises(ValueError, match="epoch 1, which ends at step 9, but max_steps is 8: expected no fewer steps"):
        run(shop, tmp_path / "out", epochs=2, max_steps=8, keep_epochs="0,1")
    assert [path.name for path in tmp_path.iterdir()] == ["whole"]


def test_in_bfloat16_the_rows_stay_float32_and_learn(shop, tmp_path):
    summary = run(shop, tmp_path / "out", epochs=2, precision="bfloat16")
    assert load_file(tmp_path / "out" / "rows.safetensors")["rows"].dtype == torch.float32
    assert summary["last_loss"] < summary["first_loss"]


def test_a_loss_that_is_not_a_number_stops_the_run_and_leaves_nothing(shop, tmp_path):
    with pytest.raises(ValueError, match=r"the (loss|gradient's norm) became .* at step"):
        run(shop, tmp_path / "out", learning_rate=1e30, epochs=5)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("length", [{"epochs": 1.5}, {"epochs": 2, "max_steps": 12}])
def test_where_an_epoch_or_a_run_is_cut_short_a_number_that_is_none_is_told_by_the_batches_of_a_whole_epoch(
    shop, tmp_path, monkeypatch, length
):
    """An epoch has nine steps."""
    compute = training.PartsTrainer.compute_loss

    def poisoned(self, *args, **named):
        return compute(self, *args, **named) * (float("nan") if self.state.global_step == 10 else 1)

    monkeypatch.setattr(training.PartsTrainer, "compute_loss", poisoned)
    with pytest.raises(ValueError, match=r"the loss became nan at step 11 \(epoch 2, batch 2 of 9\): lower"):
        run(shop, tmp_path / "out", **length)


def test_what_a_killed_run_left_beside_the_artifact_does_not_end_up_in_it(shop, tmp_path):
    left = tmp_path / ".out.training"
    (left / "tensorboard").mkdir(parents=True)
    for name in ("rows-epoch-7.safetensors", "tensorboard/events"):
        (left / name).write_text("of another run")
    run(shop, tmp_path / "out", max_steps=1, keep_epochs="0")
    assert [p.name for p in (tmp_path / "out").glob("rows-epoch-*")] == ["rows-epoch-0.safetensors"]
    assert not (tmp_path / "out" / "tensorboard").exists()
    assert not left.exists()


@pytest.mark.parametrize("rank", [0, 1])
def test_of_several_processes_one_passes_the_rows_through(shop, tmp_path, monkeypatch, rank):
    monkeypatch.setattr(distributed, "join", lambda: None)  # it would tie this process to the one that started it
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": str(rank), "WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    summary = run(shop, tmp_path / "out", corpus="none")
    assert (tmp_path / "out").exists() == bool(summary) == (rank == 0)


@pytest.mark.parametrize("tokens", [16384, 300])
def test_a_run_that_broke_off_goes_on_from_its_checkpoint_to_the_same_rows(shop, tmp_path, monkeypatch, tokens):
    given = {"epochs": 3, "tokens_at_once": tokens}
    run(shop, tmp_path / "whole", **given)
    kept = training.ShowProgress.on_log

    def break_off(self, args, state, control, **others):
        if state.global_step == 14:  # in the middle of the second epoch of nine steps
            raise KeyboardInterrupt
        kept(self, args, state, control, **others)

    monkeypatch.setattr(training.ShowProgress, "on_log", break_off)
    with pytest.raises(KeyboardInterrupt):
        run(shop, tmp_path / "out", **given, checkpoints=str(tmp_path / "checkpoints"), checkpoint_minutes=0.0)
    assert not (tmp_path / "out").exists()
    assert list((tmp_path / "checkpoints").glob("*/checkpoint-13"))
    monkeypatch.setattr(training.ShowProgress, "on_log", kept)
    run(shop, tmp_path / "out", **given, checkpoints=str(tmp_path / "checkpoints"), checkpoint_minutes=0.0)
    rows = [load_file(tmp_path / name / "rows.safetensors")["rows"] for name in ("whole", "out")]
    assert torch.equal(*rows)
    assert not list((tmp_path / "checkpoints").glob("*/*"))


def test_another_base_model_is_refused_by_its_digest(shop, tmp_path, monkeypatch):
    rows = artifacts.load(shop["token_rows"], "token_rows/v1")
    base = BaseModel.load(rows.path)
    monkeypatch.setattr(BaseModel, "load", lambda _: BaseModel(base.name, "", "0" * 64, False))
    with pytest.raises(ValueError, match="the rows were made for 000000000000"):
        load_grafted(rows, torch.float32)
