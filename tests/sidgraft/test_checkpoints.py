"""Checkpoints of fine-tuning: resumed, refused, cut short, spoilt."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sidgraft import artifacts, checkpoints, training
from sidgraft.models import load_base, made_for
from sidgraft.stages.expand import expand
from sidgraft.stages.finetune import finetune
from sidgraft.stages.ground import ground
from sidgraft.stages.quantize import quantize

INPUTS = ("token_rows", "catalog", "semantic_ids", "interactions")
SETTINGS = {"epochs": 3, "patience": 3, "learning_rate": 5e-3, "batch_size": 8, "precision": "float32"}  # 5 steps each


def run(shop, out, **settings):
    return finetune(**{name: shop[name] for name in INPUTS}, out=str(out), **(SETTINGS | settings))


def same_weights(a, b):
    one, other = (load_file(Path(folder) / "model.safetensors") for folder in (a, b))
    return all(torch.equal(one[name], other[name]) for name in one)


def break_off(monkeypatch, step, error):
    """Raise ``error`` when a step is logged."""
    kept = training.ShowProgress.on_log

    def on_log(self, args, state, control, logs=None, **others):
        if state.global_step == step:
            raise error
        kept(self, args, state, control, logs=logs, **others)

    monkeypatch.setattr(training.ShowProgress, "on_log", on_log)


GIVEN = [
    {},
    {"mode": "lora"},
    {"mode": "lora", "tokens_at_once": 250},
    {"mode": "qlora", "precision": "bfloat16"},
]


@pytest.mark.parametrize("given", GIVEN)
def test_a_run_that_broke_off_goes_on_to_the_same_bits(shop, tmp_path, monkeypatch, given):
    if given.get("mode") == "qlora":
        pytest.importorskip("bitsandbytes")
    every = given | {"checkpoints": str(tmp_path / "checkpoints"), "checkpoint_minutes": 0.0}
    run(shop, tmp_path / "whole", **given)
    with monkeypatch.context() as patch:
        break_off(patch, 8, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            run(shop, tmp_path / "out", **every)
    (kept,) = (tmp_path / "checkpoints").glob("*/checkpoint-*")
    assert kept.name == "checkpoint-7"  # in the middle of the second epoch; the older ones are gone
    run(shop, tmp_path / "out", **every)
    assert same_weights(tmp_path / "whole", tmp_path / "out")
    logs = [json.loads((tmp_path / name / "training.json").read_text())["log"] for name in ("whole", "out")]
    assert logs[0] == logs[1]
    assert not list((tmp_path / "checkpoints").glob("*/*"))


def test_on_a_full_disk_the_older_checkpoint_survives_and_the_run_can_go_on(shop, tmp_path, monkeypatch):
    every = {"checkpoints": str(tmp_path / "checkpoints"), "checkpoint_minutes": 0.0}
    save = torch.save

    def full(value, file, *args, **kwargs):
        if "checkpoint-7" in str(file):
            Path(file).write_bytes(b"half of it")
            raise OSError(28, "No space left on device")
        save(value, file, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch, "save", full)
        with pytest.raises(OSError, match=r"No space left.*step 6 is whole.*Make room"):
            run(shop, tmp_path / "out", **every)
    assert not (tmp_path / "out").exists()
    (kept,) = (tmp_path / "checkpoints").glob("*/checkpoint-*")
    assert kept.name == "checkpoint-6"
    run(shop, tmp_path / "out", **every)
    run(shop, tmp_path / "whole")
    assert same_weights(tmp_path / "whole", tmp_path / "out")


@pytest.mark.parametrize("what", ["loss", "gradient's norm"])
def test_at_a_number_that_is_none_it_stops_by_step_and_batch_and_keeps_the_last_good_checkpoint(
    shop, tmp_path, monkeypatch, what
):
    compute = training.GraftTrainer.compute_loss

    def poisoned(self, model, inputs, **others):
        loss = compute(self, model, inputs, **others)
        if self.state.global_step != 7:  # the eighth step
            return loss
        if what == "gradient's norm":
            loss.register_hook(lambda gradient: gradient * float("inf"))
            return loss
        return loss * float("nan")

    monkeypatch.setattr(training.GraftTrainer, "compute_loss", poisoned)
    with pytest.raises(ValueError, match=rf"{what} became (nan|inf) at step 8 \(epoch 2, batch 3 of 5\)"):
        run(shop, tmp_path / "out", checkpoints=str(tmp_path / "checkpoints"), checkpoint_minutes=0.0)
    assert not (tmp_path / "out").exists()
    (kept,) = (tmp_path / "checkpoints").glob("*/checkpoint-*")
    assert kept.name == "checkpoint-7"
    assert all(w.isfinite().all() for w in load_file(kept / "model.safetensors").values())


@pytest.mark.parametrize("other", ["base model", "vocabulary", "processes", "mode"])
def test_a_checkpoint_made_for_something_else_is_refused(shop, tmp_path, other):
    """Each differs alone: rows of one vocabulary for another model, or of the same model for more codes."""
    catalog, vectors, ids = shop["catalog"], shop["item_embeddings"], shop["semantic_ids"]
    base, rows, more = (str(tmp_path / name) for name in ("base", "rows", "ids"))
    if other == "base model":
        model, tokenizer = load_base("tiny")
        model.lm_head.weight.data[3, 5] += 1
        model.save_pretrained(base)
        tokenizer.save_pretrained(base)
    if other == "vocabulary":
        quantize(vectors, more, levels=2, codebook_size=5, dedup_size=16, fit="lloyd")
        ids = more
    expand(ids, catalog, vectors, rows, base_model=base if other == "base model" else "tiny")
    run = {"processes": 1, "mode": "full"}
    elsewhere = {"processes": 1 + (other == "processes"), "mode": "lora" if other == "mode" else "full"}
    there = made_for(artifacts.load(rows, "token_rows/v1")) | elsewhere
    facts = made_for(artifacts.load(shop["token_rows"], "token_rows/v1")) | run
    assert [name for name in facts if facts[name] != there[name]] == [other]
    work = tmp_path / "work"
    (work / "checkpoint-5").mkdir(parents=True)
    (work / "checkpoint-5" / checkpoints.WHOLE).write_text(json.dumps(there))
    refused = f"made for {other} {there[other]}, but this run has {other} {facts[other]}: .*another checkpoints"
    with pytest.raises(ValueError, match=refused):
        checkpoints.Checkpoints(work, facts, 10.0).last()
    assert (work / "checkpoint-5").is_dir()
    assert checkpoints.Checkpoints(work, there, 10.0).last() == str(work / "checkpoint-5")


@pytest.fixture
def left(shop, tmp_path, monkeypatch):
    """The checkpoint that a fine-tuning and a grounding have left, each in the middle of an epoch."""
    every = {"checkpoints": str(tmp_path / "checkpoints"), "checkpoint_minutes": 0.0}
    with monkeypatch.context() as patch:
        break_off(patch, 13, KeyboardInterrupt())
        for stage in (run, rows):
            with pytest.raises(KeyboardInterrupt):
                stage(shop, tmp_path / "out", **every)
    return every


def rows(shop, out, **settings):
    settings = {"epochs": 2, "precision": "float32", "learning_rate": 1e-2} | settings
    return ground(**{name: shop[name] for name in INPUTS}, out=str(out), **settings)


@pytest.mark.parametrize(("stage", "name"), [(run, "finetune"), (rows, "ground")])
def test_a_run_that_starts_anew_says_how_the_checkpoint_of_another_differs(shop, tmp_path, left, capsys, stage, name):
    (other,) = (tmp_path / "checkpoints").glob(f"{name}-*/checkpoint-12")
    rows_of_others = str(tmp_path / "rows")
    expand(
        shop["semantic_ids"], shop["catalog"], shop["item_embeddings"], rows_of_others,
        base_model="tiny", initialization="mean",
    )  # fmt: skip
    digests = [artifacts.load(at, "token_rows/v1").digest[:12] for at in (shop["token_rows"], rows_of_others)]
    there = SETTINGS["learning_rate"] if stage is run else 1e-2
    capsys.readouterr()
    stage(shop | {"token_rows": rows_of_others}, tmp_path / "new", learning_rate=2e-3, epochs=1, **left)
    said = capsys.readouterr().err
    assert f"starting anew: the checkpoint {other} was made with " in said
    for part in (f"learning_rate {there} (here 0.002)", f"token_rows {digests[0]} (here {digests[1]})", "epochs"):
        assert part in said
    assert not any(part in said for part in ("catalog ", "batch_size", "resuming", "base model"))
    assert other.is_dir()  # its run may still be given again
    stage(shop, tmp_path / "out", **left)
    said = capsys.readouterr().err
    assert "resuming from the checkpoint at step 12" in said
    assert "starting anew" not in said


def test_the_folder_of_one_run_is_refused_as_the_place_of_all(shop, tmp_path, left):
    (mine,) = (tmp_path / "checkpoints").glob("finetune-*")
    for stage in (run, rows):
        with pytest.raises(ValueError, match=f"folder of one run's checkpoints: .* it \\({mine.parent}\\)"):
            stage(shop, tmp_path / "new", checkpoints=f"{mine}/")
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints"}
    with pytest.raises(ValueError, match=r"expected the folder above it \(s3://bucket/all\)"):
        run(shop, tmp_path / "new", checkpoints=f"s3://bucket/all/{mine.name}")
    of_a_pipelines_run = tmp_path / f"run-{mine.name.partition('-')[2]}"  # the name that a local run gives its place
    with checkpoints.working_directory(str(of_a_pipelines_run), mine.name, str(tmp_path / "new")) as place:
        assert place == of_a_pipelines_run / mine.name


def test_a_checkpoint_cut_short_is_removed_and_the_older_one_taken(tmp_path):
    for step in (5, 10):
        (tmp_path / f"checkpoint-{step}").mkdir()
    (tmp_path / "checkpoint-5" / checkpoints.WHOLE).write_text("{}")
    (tmp_path / "checkpoint-10" / "trainer_state.json").write_text("{}")
    assert checkpoints.Checkpoints(tmp_path, {}, 10.0).last() == str(tmp_path / "checkpoint-5")
    assert not (tmp_path / "checkpoint-10").exists()
