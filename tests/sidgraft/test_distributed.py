"""Several processes, for real: the curves, the rows and the bits of one process; and how they fail."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from test_training import make, some_samples

from sidgraft import distributed
from sidgraft.prompts import Sample
from sidgraft.stages.finetune import finetune
from sidgraft.stages.ground import ground
from sidgraft.training import GraftTrainer, arguments, pack, pack_step, supervise

INPUTS = ("token_rows", "catalog", "semantic_ids", "interactions")
# Six steps an epoch; the last has 5 samples, which two processes share unequally.
SETTINGS = {"epochs": 2, "patience": 2, "learning_rate": 5e-3, "batch_size": 7, "precision": "float32"}


def run(shop, out, **settings):
    return finetune(**{name: shop[name] for name in INPUTS}, out=str(out), **(SETTINGS | settings))


@pytest.fixture(scope="module")
def alone(shop, tmp_path_factory):
    out = tmp_path_factory.mktemp("alone") / "model"
    run(shop, out)
    return out


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "tokens"), [("ddp", 0), ("ddp", 150), ("zero1", 0), ("zero2", 0), ("zero3", 150)])
def test_two_processes_give_the_curve_and_the_weights_of_one(shop, alone, tmp_path, strategy, tokens):
    """With 150 tokens at once the two have different numbers of parts in a step; ZeRO makes none."""
    if strategy != "ddp":
        pytest.importorskip("deepspeed")
    run(shop, tmp_path / "model", strategy=strategy, processes=2, tokens_at_once=tokens)
    same_curve_and_weights(alone, tmp_path / "model", ("loss", "grad_norm", "recall@5", "learning_rate"))
    assert not list(tmp_path.glob(".*"))


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ddp", "zero2", "zero3"])
def test_two_processes_in_bfloat16_give_the_curve_of_one(shop, alone, tmp_path, strategy):
    """As close as the products' eight bits allow, and with other bits than float32's: autocast is on in the processes.

    At a fifth of the learning rate, as one rounding more or less grows to 2 % of a later loss at SETTINGS' own.
    """
    if strategy != "ddp":
        pytest.importorskip("deepspeed")
    for name, spread in (("one", {}), ("two", {"strategy": strategy, "processes": 2})):
        run(shop, tmp_path / name, precision="bfloat16", learning_rate=1e-3, **spread)
    one, two, in_float32 = (losses(folder) for folder in (tmp_path / "one", tmp_path / "two", alone))
    np.testing.assert_allclose(two, one, rtol=1e-3)
    for found in (one, two):  # the first loss is of the same weights in all three
        assert 1e-6 < abs(found[0] / in_float32[0] - 1) < 1e-3


def losses(model):
    log = json.loads((model / "training.json").read_text())["log"]
    return np.array([row["loss"] for row in log if "loss" in row])


def same_curve_and_weights(one, two, figures, weights="model.safetensors"):
    logs = [json.loads((folder / "training.json").read_text())["log"] for folder in (one, two)]
    assert [row.get("step") for row in logs[0]] == [row.get("step") for row in logs[1]]
    for figure in figures:
        curves = [[row[figure] for row in log if figure in row] for log in logs]
        assert curves[0]
        np.testing.assert_allclose(curves[1], curves[0], rtol=1e-4, err_msg=figure)
    tensors = [load_file(folder / weights) for folder in (one, two)]
    assert tensors[0].keys() == tensors[1].keys()
    for name, tensor in tensors[0].items():
        torch.testing.assert_close(tensors[1][name], tensor, rtol=0, atol=1e-4, msg=name)


@pytest.mark.slow
def test_two_processes_over_four_bit_weights_give_the_curve_and_the_weights_of_one(shop, tmp_path):
    pytest.importorskip("bitsandbytes")
    given = {"mode": "qlora", "lora_dropout": 0.0}  # dropout draws other masks in each process
    for name, spread in (("one", {}), ("two", {"strategy": "ddp", "processes": 2})):
        summary = run(shop, tmp_path / name, **given, **spread)
        assert summary["mode"] == "qlora"
    same_curve_and_weights(tmp_path / "one", tmp_path / "two", ("loss", "grad_norm", "recall@5"))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "mode"), [("ddp", "lora"), ("ddp", "qlora"), ("zero2", "full"), ("zero3", "lora")]
)
def test_two_processes_killed_in_the_middle_of_an_epoch_go_on_to_the_same_bits(shop, tmp_path, strategy, mode):
    if strategy != "ddp":
        pytest.importorskip("deepspeed")
    if mode == "qlora":
        pytest.importorskip("bitsandbytes")
    # Two thirds of the steps come after the kill, so that on a busy machine, too, it comes before the end.
    many = {"mode": mode, "strategy": strategy, "processes": 2, "epochs": 4, "patience": 4}
    run(shop, tmp_path / "whole", **many)
    every = many | {"checkpoints": str(tmp_path / "checkpoints"), "checkpoint_minutes": 0.0}
    inputs = {name: shop[name] for name in INPUTS} | {"out": str(tmp_path / "out")}
    kill_at_a_checkpoint("finetune", SETTINGS | inputs | every, step=8)
    assert not (tmp_path / "out").exists()
    run(shop, tmp_path / "out", **every)
    same_bits(tmp_path / "whole", tmp_path / "out")


def kill_at_a_checkpoint(stage, arguments, *, step):
    """Start a stage, kill it alone by SIGKILL once it has a checkpoint of a step or later; its processes end, too."""
    code = f"from sidgraft.stages.{stage} import {stage}\n{stage}(**{arguments!r})"
    process = subprocess.Popen([sys.executable, "-c", code])
    deadline = time.monotonic() + 300

    def newest():  # one that is seen late may be gone already, replaced by a newer one
        whole = Path(arguments["checkpoints"]).glob("*/checkpoint-*/whole.json")
        return max((int(file.parent.name.removeprefix("checkpoint-")) for file in whole), default=0)

    while newest() < step:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.005)
    workers = children(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert len(workers) == 2
    deadline = time.monotonic() + 60
    while any(Path(f"/proc/{worker}").exists() for worker in workers) and time.monotonic() < deadline:
        time.sleep(0.01)  # they end with it: none goes on writing checkpoints


def same_bits(one, two, weights="model.safetensors"):
    tensors = [load_file(folder / weights) for folder in (one, two)]
    assert all(torch.equal(tensors[0][name], tensors[1][name]) for name in tensors[0])
    logs = [json.loads((folder / "training.json").read_text())["log"] for folder in (one, two)]
    assert logs[0] == logs[1]


# Of ground: 21 steps an epoch, the last of 4 sequences; the two processes have different numbers of parts in a step.
GROUNDING = {"epochs": 2, "learning_rate": 1e-3, "batch_size": 7, "precision": "float32", "tokens_at_once": 300}


def run_ground(shop, out, **settings):
    return ground(**{name: shop[name] for name in INPUTS}, out=str(out), **(GROUNDING | settings))


@pytest.mark.slow
@pytest.mark.parametrize("corpus", ["gti", "cpt"])
def test_two_processes_ground_to_the_curve_and_the_rows_of_one(shop, tmp_path, corpus):
    figures = {}
    for name, processes in (("one", 1), ("two", 2)):
        figures[name] = run_ground(shop, tmp_path / name, corpus=corpus, keep_epochs="0,1", processes=processes)
    for figure, value in figures["one"].items():
        assert figures["two"][figure] == (pytest.approx(value, rel=1e-4) if "loss" in figure else value)
    for rows in ("rows.safetensors", "rows-epoch-0.safetensors", "rows-epoch-1.safetensors"):
        same_curve_and_weights(tmp_path / "one", tmp_path / "two", ("loss", "grad_norm", "learning_rate"), rows)
    moved = load_file(tmp_path / "two" / "rows.safetensors")["rows"]
    assert (moved - load_file(Path(shop["token_rows"]) / "rows.safetensors")["rows"]).abs().max() > 1e-2
    assert not list(tmp_path.glob(".*"))


@pytest.mark.slow
def test_two_processes_of_ground_that_were_killed_go_on_to_the_same_bits(shop, tmp_path):
    many = {"processes": 2, "epochs": 3, "keep_epochs": "1,3"}
    run_ground(shop, tmp_path / "whole", **many)
    every = many | {"checkpoints": str(tmp_path / "checkpoints"), "checkpoint_minutes": 0.0}
    inputs = {name: shop[name] for name in INPUTS} | {"out": str(tmp_path / "out")}
    kill_at_a_checkpoint("ground", GROUNDING | inputs | every, step=24)
    assert not (tmp_path / "out").exists()
    run_ground(shop, tmp_path / "out", **every)
    for rows in ("rows.safetensors", "rows-epoch-1.safetensors", "rows-epoch-3.safetensors"):
        same_bits(tmp_path / "whole", tmp_path / "out", rows)
    assert not list((tmp_path / "checkpoints").glob("*/*"))


def children(pid):
    """The processes that a process has started, from Linux's /proc."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    return [child for child, parent in parents.items() if parent == pid]


@pytest.mark.slow
def test_what_a_process_refuses_is_told_by_the_stage(shop, tmp_path):
    with pytest.raises(ValueError, match="max_length is 3"):
        run(shop, tmp_path / "model", strategy="ddp", processes=2, max_length=3)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("given", [None, "3"])
def test_processes_share_the_threads_and_leave_the_environment_as_it_was(tmp_path, monkeypatch, given):
    torchrun = "torch.distributed.run.run"
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if given:
        monkeypatch.setenv("OMP_NUM_THREADS", given)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 9)
    before, seen = dict(os.environ), []

    def run(options):
        seen.append((options.nproc_per_node, os.environ["OMP_NUM_THREADS"]))
        os.environ["SET_BY_TORCHRUN"] = "1"
        if len(seen) > 1:
            raise RuntimeError("no such luck")

    monkeypatch.setattr(torchrun, run)
    distributed.launch("finetune", {}, 4)
    with pytest.raises(RuntimeError, match="luck"):
        distributed.launch("finetune", {}, 16)
    assert seen == [("4", given or "2"), ("16", given or "1")]
    assert dict(os.environ) == before


@pytest.mark.parametrize("tokens", [0, 10])
@pytest.mark.parametrize("world", [1, 2, 4, 5])
def test_the_shares_average_to_the_gradient_of_the_whole_batch(tmp_path, world, tokens):
    """Five processes have more than the three samples; shares and their parts have unequal numbers of targets."""
    model, vocabulary, _ = make()
    samples = some_samples(vocabulary, lengths=(7, 3, 12, 5)[: 4 if world < 5 else 3])
    supervise(model)
    trainer = GraftTrainer(model=model, args=arguments(tmp_path, checkpoints=False, batch_size=4, seed=0))
    losses, gradients = [], []
    shares = [pack_step(samples, rank=r, world=world, tokens_at_once=tokens)["parts"] for r in range(world)]
    assert (max(map(len, shares)) > 1) == (tokens > 0 and world < 4)
    for parts in [[pack(samples)], *shares]:
        model.zero_grad()
        losses.append(0.0)
        for part in parts:
            loss = trainer.compute_loss(model, part)
            loss.backward()
            losses[-1] += loss.item()
        gradients.append(model.get_input_embeddings().weight.grad.clone())
    assert np.mean(losses[1:]) == pytest.approx(losses[0], rel=1e-6)
    torch.testing.assert_close(torch.stack(gradients[1:]).mean(0), gradients[0], rtol=1e-4, atol=1e-7)


def test_a_share_holds_every_nth_sample_once():
    samples = [Sample(np.array([5, i]), np.array([False, True])) for i in range(7)]
    shares = [pack_step(samples, rank=r, world=2)["parts"] for r in (0, 1)]
    assert [[part["targets"].tolist() for part in parts] for parts in shares] == [[[0, 2, 4, 6]], [[1, 3, 5]]]
    parts = pack_step(samples, rank=0, world=2, tokens_at_once=6)["parts"]
    assert [part["targets"].tolist() for part in parts] == [[0, 2, 4], [6]]
    assert [part["weight"] for part in parts] == [6 / 7, 2 / 7]


def test_one_strategy_for_one_process_and_others_for_many():
    with pytest.raises(ValueError, match="strategy is none, but 4 processes"):
        distributed.check("none", 4)
    distributed.check("none", 1)


def test_without_deepspeed_the_message_says_what_to_do(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(ValueError, match=r"sidgraft\[deepspeed\].*strategy=ddp"):
        distributed.check("zero2", 2)


def test_no_number_of_processes_stands_for_the_visible_gpus(monkeypatch):
    for gpus, expected in ((0, 1), (1, 1), (8, 8)):
        monkeypatch.setattr(torch.cuda, "device_count", lambda gpus=gpus: gpus)
        assert (distributed.on_this_machine(0), distributed.on_this_machine(2)) == (expected, 2)


def test_more_processes_than_gpus_are_refused_before_one_starts(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    started = []
    monkeypatch.setattr("torch.distributed.run.run", started.append)
    with pytest.raises(ValueError, match=r"processes=3, expected at most 2, one for every GPU.*processes=0"):
        distributed.launch("finetune", {}, 3)
    assert started == []
    for processes in (0, 1, 2):
        distributed.launch("finetune", {}, processes)
    assert len(started) == 3


def test_only_torchrun_makes_a_process_one_of_many(monkeypatch):
    assert (distributed.rank(), distributed.world(), distributed.is_launched()) == (0, 1, False)
    monkeypatch.setattr(os, "environ", {"TORCHELASTIC_RUN_ID": "x", "RANK": "3", "WORLD_SIZE": "8"})
    assert (distributed.rank(), distributed.world(), distributed.is_launched()) == (3, 8, True)


@pytest.mark.slow
def test_deepspeed_compiles_nothing_on_a_cpu(tmp_path):
    """The images have no compiler. In a process of its own: DeepSpeed looks once at what it could compile."""
    pytest.importorskip("deepspeed")
    code = (
        "from sidgraft import distributed\n"
        "distributed.join()\n"
        "distributed.check('zero2', 2)\n"
        "from deepspeed.comm.torch import build_shm_op\n"
        "print('built', build_shm_op())\n"
    )
    launched = {"TORCHELASTIC_RUN_ID": "1", "WORLD_SIZE": "2", "RANK": "0", "PATH": os.defpath}
    environment = os.environ | launched | {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert "built None" in done.stdout, done.stderr
    assert list(tmp_path.iterdir()) == []
