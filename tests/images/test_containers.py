"""The Docker runner on a real engine: what a container may do, how its failure shows, and the whole smoke pipeline."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = [pytest.mark.docker, pytest.mark.slow]

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "pipelines", "run", "--runner", "docker", "--preset", "smoke", "--root"]


def pipeline(root, *arguments):
    return subprocess.run([*COMMAND, str(root), *arguments], cwd=ROOT, capture_output=True, text=True, timeout=1200)


def containers_of(root):
    import docker

    from pipelines.containers import LABEL

    return docker.from_env().containers.list(all=True, filters={"label": f"{LABEL}={root}"})


@pytest.fixture
def task(images, tmp_path, monkeypatch):
    """Run a shell command as KFP's Docker runner runs a stage in the data image; returns its status."""
    from kfp import local
    from kfp.local import docker_task_handler

    from pipelines import containers

    original = docker_task_handler.run_docker_container
    monkeypatch.setattr(docker_task_handler, "run_docker_container", original)  # and back afterwards
    read = tmp_path / "catalog.jsonl"
    read.write_text("{}\n")
    containers.prepare(tmp_path, {"catalog": str(read)})
    runner = containers.runner(tmp_path)
    local.init(runner, pipeline_root=str(tmp_path / "artifacts"), workspace_root=str(tmp_path / "workspace"))

    def run(text):
        handler = docker_task_handler.DockerTaskHandler(
            image="sidgraft/data:run-0123456789abcdef",
            full_command=["sh", "-c", text],
            pipeline_root=str(tmp_path / "artifacts"),
            runner=runner,
        )
        return handler.run().name

    return run


def test_a_container_is_not_root_sees_no_network_and_writes_where_it_may_alone(task, tmp_path, capsys):
    assert task("id -u; ls /sys/class/net; grep CapEff /proc/self/status") == "SUCCESS"
    user, *rest = capsys.readouterr().out.split()
    assert int(user) > 0
    assert rest == ["lo", "CapEff:", "0000000000000000"]
    for place in ("/x", "/opt/venv/x", "/opt/sidgraft/x", tmp_path / "x", tmp_path / "catalog.jsonl"):
        assert task(f"echo y > {place}") == "FAILURE", place
    for place in (tmp_path / "artifacts", tmp_path / "checkpoints", "/cache", "/tmp"):
        assert task(f"echo y > {place}/x") == "SUCCESS", place
    assert task(f"cat {tmp_path}/catalog.jsonl") == "SUCCESS"
    assert (tmp_path / "artifacts" / "x").stat().st_uid > 0


@pytest.mark.parametrize("end", ["exit 3", "sh -c 'kill -9 $$'", "no-such-command"])
def test_a_container_that_fails_is_a_failure_and_its_log_is_kept(task, tmp_path, capsys, end):
    assert task(f"printf 'caf\\303\\251\\n'; {end}") == "FAILURE"
    assert "café" in capsys.readouterr().out
    assert containers_of(tmp_path) == []


def test_the_smoke_pipeline_runs_in_containers_and_is_reused(images, tmp_path):
    first = pipeline(tmp_path)
    assert first.returncode == 0, first.stdout + first.stderr
    assert "Recall@10" in first.stdout
    assert "<html" in (tmp_path / "report" / "index.html").read_text(encoding="utf-8")
    written = [file for file in (tmp_path / "artifacts").rglob("*") if file.is_file()]
    assert written
    assert all(file.stat().st_uid > 0 for file in written)
    assert containers_of(tmp_path) == []
    second = pipeline(tmp_path)
    stages = re.findall(r"^ {2}[ \d:]{7} {2}(\w+) +(\S.*)$", second.stdout, re.MULTILINE)
    assert {what for _, what in stages} == {"reused"}
    assert {"prepare", "finetune", "report"} <= {name for name, _ in stages}


def test_retraining_publishes_from_containers_and_then_finds_nothing_to_do(images, tmp_path):
    bundles = tmp_path / "shop" / "bundles"
    arguments = ("--preset", "smoke-retrain", "--set", f"bundles={bundles}")
    first = pipeline(tmp_path / "run", *arguments)
    assert first.returncode == 0, first.stdout + first.stderr
    assert re.search(r"publish: v-\w+ is published", first.stdout)
    (version,) = (bundles / "versions").iterdir()
    assert f'"{version.name}"' in (bundles / "latest.json").read_text(encoding="utf-8")
    assert version.stat().st_uid > 0
    second = pipeline(tmp_path / "run", *arguments)
    assert second.returncode == 0, second.stdout + second.stderr
    assert "watch: none." in second.stdout


def test_a_failing_stage_fails_the_run_with_its_own_error(images, tmp_path):
    failed = pipeline(tmp_path, "--set", "prepare_item_id=asin")
    assert failed.returncode == 1
    assert "The stage prepare failed: " in failed.stdout
    assert "no column 'asin'" in failed.stdout
    (log,) = tmp_path.glob("logs/*.log")
    assert "Traceback" in log.read_text(encoding="utf-8")
    assert "Traceback" not in failed.stdout + failed.stderr


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_running_container_ends_with_the_command(images, tmp_path, number):
    process = subprocess.Popen([*COMMAND, str(tmp_path)], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    wait_for(lambda: containers_of(tmp_path))
    process.send_signal(number)
    process.communicate(timeout=60)
    wait_for(lambda: not containers_of(tmp_path))


def test_an_image_that_is_not_there_is_told_before_anything_runs(images, tmp_path, monkeypatch):
    monkeypatch.setenv("SIDGRAFT_REGISTRY", "nowhere.example/team")
    refused = pipeline(tmp_path)
    assert refused.returncode == 2
    assert "nowhere.example/team/sidgraft/cpu:v" in refused.stderr
    assert 'make images IMAGES="cpu data"' in refused.stderr


def wait_for(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.2)
