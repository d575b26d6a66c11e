"""Several nodes for real: a stand-in for Kubeflow Trainer starts the job's command with torchrun once a node.

The nodes have nothing in common but the object store: each has a cache of its own. The variables are those that
Trainer's torch policy sets.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import fake_kubernetes
import kubernetes
import numpy as np
import pytest
import torch
import yaml
from safetensors.torch import load_file
from test_trainjob import MANIFEST, RUN, WORKFLOW

from sidgraft import storage, trainjob
from sidgraft.stages.finetune import finetune

pytestmark = [pytest.mark.s3, pytest.mark.slow]

INPUTS = ("token_rows", "catalog", "semantic_ids", "interactions")
SETTINGS = {"epochs": 2, "patience": 2, "learning_rate": 5e-3, "batch_size": 7, "precision": "float32"}


@pytest.fixture
def cluster(monkeypatch, tmp_path, store):
    """A Kubernetes whose jobs run as processes of this machine."""
    (role,) = (d for d in yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8")) if d["kind"] == "Role")
    fake = fake_kubernetes.Fake(role["rules"])
    fake.add_pod("task-1", {trainjob.RUN: RUN}, owner=[WORKFLOW])

    def play(job):
        name, trainer = job["metadata"]["name"], job["spec"]["trainer"]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        nodes = []
        for number in range(trainer["numNodes"]):
            env = os.environ | {
                "PET_NNODES": str(trainer["numNodes"]), "PET_NPROC_PER_NODE": str(trainer.get("numProcPerNode", 1)),
                "PET_NODE_RANK": str(number), "PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port),
                "XDG_CACHE_HOME": str(tmp_path / f"node-{number}"), "OMP_NUM_THREADS": "1",
                "TORCH_EXTENSIONS_DIR": str(Path.home() / ".cache" / "torch_extensions"),  # DeepSpeed compiles on CPUs
            } | {variable["name"]: variable["value"] for variable in trainer["env"]}  # fmt: skip
            assert trainer["command"][0] == "torchrun"
            command = [sys.executable, "-m", "torch.distributed.run", *trainer["command"][1:]]
            with (tmp_path / f"node-{number}.log").open("w") as log:  # a pipe that nobody reads would stop them
                nodes.append(subprocess.Popen(command, env=env, stdout=log, stderr=log))
        while fake.kill_at and all(node.poll() is None for node in nodes):
            if any(fake.kill_at in uri for uri in storage.list_uris(store.place)):
                break
            time.sleep(0.05)
        for node in nodes:
            if fake.kill_at:
                node.kill()  # its processes end with it
            node.wait(timeout=400)
        logs = [(tmp_path / f"node-{number}.log").read_text() for number in range(len(nodes))]
        if any(node.returncode for node in nodes):
            fake.fail(name, "a node failed", logs[0])
        else:
            fake.set_status(name, fake_kubernetes.status("Complete", "done"))

    fake.play, fake.kill_at = play, ""
    monkeypatch.setenv(trainjob.POD, "task-1")
    monkeypatch.setattr(trainjob, "SERVICE_ACCOUNT", tmp_path)
    (tmp_path / "namespace").write_text(fake_kubernetes.NAMESPACE)
    with fake_kubernetes.serving(fake) as address:
        configuration = kubernetes.client.Configuration(host=address)
        monkeypatch.setattr(kubernetes.client.Configuration, "_default", configuration)
        monkeypatch.setattr(kubernetes.config, "load_incluster_config", lambda: None)
        yield fake


def check_same_training(tmp_path):
    """The curve and the weights of one process, alone, are those of the nodes, spread."""
    logs = [json.loads((tmp_path / run / "training.json").read_text())["log"] for run in ("alone", "spread")]
    assert [row.get("step") for row in logs[0]] == [row.get("step") for row in logs[1]]
    for figure in ("loss", "recall@5"):
        one, two = ([row[figure] for row in log if figure in row] for log in logs)
        np.testing.assert_allclose(two, one, rtol=1e-4, err_msg=figure)
    weights = [load_file(tmp_path / run / "model.safetensors") for run in ("alone", "spread")]
    for name, tensor in weights[0].items():
        torch.testing.assert_close(weights[1][name], tensor, rtol=0, atol=1e-4, msg=name)


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_two_nodes_give_the_curve_and_the_weights_of_one_process(cluster, store, shop, tmp_path, strategy):
    if strategy != "ddp":
        pytest.importorskip("deepspeed")
    inputs = {name: shop[name] for name in INPUTS}
    place = f"{store.place}/checkpoints"
    alone = finetune(**inputs, out=str(tmp_path / "alone"), **SETTINGS)
    spread = finetune(**inputs, out=str(tmp_path / "spread"), strategy=strategy, nodes=2, checkpoints=place, **SETTINGS)
    assert {key: alone[key] for key in ("users", "steps", "t_star")} == {
        k: spread[k] for k in ("users", "steps", "t_star")
    }
    check_same_training(tmp_path)
    assert len(cluster.deleted) == 1
    assert storage.list_uris(place) == []  # neither what was handed over nor checkpoints


@pytest.mark.parametrize("strategy", ["ddp", "zero2"])
def test_nodes_that_were_killed_go_on_from_the_last_checkpoint_when_the_task_is_tried_again(
    cluster, store, shop, tmp_path, strategy
):
    """Each node holds a part of a checkpoint (of ZeRO-2 the optimizer's state) and loses it with its cache."""
    if strategy != "ddp":
        pytest.importorskip("deepspeed")
    inputs = {name: shop[name] for name in INPUTS}
    finetune(**inputs, out=str(tmp_path / "alone"), **SETTINGS)
    spread = {"strategy": strategy, "nodes": 2, "checkpoints": f"{store.place}/checkpoints", "checkpoint_minutes": 0.0}
    cluster.kill_at = "/checkpoint-8/whole.json"
    with pytest.raises(RuntimeError, match="a node failed"):
        finetune(**inputs, out=str(tmp_path / "spread"), **spread, **SETTINGS)
    for number in (0, 1):
        shutil.rmtree(tmp_path / f"node-{number}")
    cluster.kill_at = ""
    finetune(**inputs, out=str(tmp_path / "spread"), **spread, **SETTINGS)
    assert "resuming from the checkpoint at step" in (tmp_path / "node-0.log").read_text()
    check_same_training(tmp_path)
    assert storage.list_uris(store.place) == []


def test_a_node_that_refuses_its_input_is_quoted(cluster, store, shop, tmp_path):
    inputs = {name: shop[name] for name in INPUTS}
    wrong = {"mode": "lora", "lora_rank": 8, "rows_epoch": 7}  # the rows were kept at no epoch: seen when they load
    with pytest.raises(ValueError, match=r"^(?!.*Traceback).*epoch"):
        finetune(
            **inputs,
            out=str(tmp_path / "out"),
            strategy="ddp",
            nodes=2,
            checkpoints=f"{store.place}/c",
            **SETTINGS | wrong,
        )
    assert not (tmp_path / "out").exists()
