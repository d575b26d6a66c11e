"""Stages as forks: each has a fresh state, its own environment and exit status; KFP's own processes beside a GPU."""

import json
import os
from importlib.util import find_spec

import pytest
from kfp.local import subprocess_task_handler

from pipelines import forks, preloaded

SOURCE = """
import kfp
from kfp import dsl
from kfp.dsl import *

def task(place: str, what: str):
    import atexit, json, os, signal, fractions
    atexit.register(lambda: open(place + ".end", "w").close())
    seen = getattr(fractions, "seen", 0)
    fractions.seen = seen + 1
    with open(place, "w") as file:
        facts = {"pid": os.getpid(), "parent": os.getppid(), "seen": seen, "variable": os.environ.get("OF_THE_TASK")}
        facts["ended_by"] = os.environ.get("SIDGRAFT_ENDED_BY")
        json.dump(facts, file)
    if what == "raise":
        raise ValueError("no such column")
    if hasattr(signal, what) and "SIDGRAFT_ENDED_BY" not in os.environ:
        os.kill(os.getpid(), getattr(signal, what))
"""


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Run a task by KFP's runner and return its exit status and what it wrote."""
    monkeypatch.setattr(subprocess_task_handler, "run_local_subprocess", subprocess_task_handler.run_local_subprocess)
    monkeypatch.setattr(forks, "PRELOADED", "fractions")
    monkeypatch.setattr(forks, "GPUS", ())
    forks.use_forks()

    def run(what, **environment):
        place = tmp_path / "facts.json"
        values = {"place": str(place), "what": what}
        given = {"inputs": {"parameterValues": values}, "outputs": {"outputFile": str(tmp_path / "output.json")}}
        arguments = ["--executor_input", json.dumps(given), "--function_to_execute", "task"]
        command = ["sh", "-ec", "unused", SOURCE, *arguments]
        status = subprocess_task_handler.run_local_subprocess(full_command=command, env_vars=environment)
        return status, json.loads(place.read_text())

    return run


def test_tasks_share_a_parent_and_nothing_else(run):
    first, second = run("end", OF_THE_TASK="a"), run("end")
    assert first[0] == second[0] == 0
    assert first[1]["parent"] == second[1]["parent"] != os.getpid()
    assert first[1]["pid"] != second[1]["pid"]
    assert first[1]["seen"] == second[1]["seen"] == 0, "what a task leaves in a module must not reach the next"
    assert (first[1]["variable"], second[1]["variable"]) == ("a", None)
    assert "OF_THE_TASK" not in os.environ


@pytest.mark.parametrize(("what", "status"), [("raise", 1), ("SIGTERM", -15)])
def test_a_failed_task_fails(run, what, status):
    assert run(what)[0] == status
    assert run("end")[0] == 0, "and leaves the next alone"


@pytest.mark.parametrize("what", ["end", "raise"])
def test_what_was_to_be_done_at_exit_is_done(run, tmp_path, what):
    run(what)
    assert (tmp_path / "facts.json.end").exists()


def test_what_is_preloaded_exists():
    assert [name for name in (*preloaded.MODULES, *preloaded.WHEN_THEY_RUN) if find_spec(name) is None] == []


@pytest.mark.parametrize("name", ["SIGKILL", "SIGSEGV"])
def test_what_a_signal_has_ended_begins_anew_to_tell_so(run, name):
    status, facts = run(name)
    assert (status, facts["ended_by"]) == (0, name)
    assert run("end")[1]["ended_by"] is None, "and the next is not told"


def test_beside_a_gpu_stages_are_new_processes(monkeypatch, tmp_path):
    """A library that asks for the GPU while it is imported would make CUDA unusable in forks. KFP's own way is by a
    shell, whose status is 128 and the signal where that has ended its command."""
    calls = []

    def theirs(full_command, env_vars):
        calls.append((full_command, env_vars))
        return 128 + 9 if len(calls) == 1 else 0

    monkeypatch.setattr(subprocess_task_handler, "run_local_subprocess", theirs)
    monkeypatch.setattr(forks, "GPUS", (tmp_path / "none", tmp_path))
    forks.use_forks()
    assert subprocess_task_handler.run_local_subprocess(full_command=["sh"], env_vars={"A": "b"}) == 0
    assert calls == [(["sh"], {"A": "b"}), (["sh"], {"A": "b", "SIDGRAFT_ENDED_BY": "SIGKILL"})]
