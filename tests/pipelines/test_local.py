"""The local run with stand-in stages: what is reused, what a person reads, and how it ends."""

import os
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest
import standin

pytestmark = pytest.mark.slow

TRAIN = ("prepare", "embed", "baselines", "quantize", "expand", "ground", "finetune", "diagnose", "evaluate", "report")


def stages(output):
    """Return [(stage, 'reused' or what it did)] in order of the console's lines."""
    return re.findall(r"^ {2}[ \d:]{7} {2}(\w+(?: \([^)]*\))?) +(\S.*)$", output, re.MULTILINE)


def ran(output):
    """Return the stages that were not reused. KFP runs diagnose and evaluate in any order."""
    return {name for name, text in stages(output) if text != "reused"}


def test_a_second_run_reuses_everything_and_a_third_what_still_stands(run, tmp_path):
    root = tmp_path / "root"
    first = run("--preset", "smoke", "--root", root)
    assert first.returncode == 0, first.stdout + first.stderr
    assert ran(first.stdout) == set(TRAIN)
    assert "popularity" in first.stdout
    for name in ("index.html", "metrics.csv", "summary.csv", "comparisons.parquet", "curves.csv", "quantizers.csv"):
        assert (root / "report" / name).is_file()
        assert not (root / "report" / name).is_symlink()

    second = run("--preset", "smoke", "--root", root)
    assert second.returncode == 0
    assert dict(stages(second.stdout)) == dict.fromkeys(TRAIN, "reused")

    changed = run("--preset", "smoke", "--root", root, "--set", "evaluate_beams=5")
    assert ran(changed.stdout) == {"evaluate", "report"}

    (table,) = root.glob("artifacts/*/quantize/out/semantic_ids.parquet")
    table.write_bytes(table.read_bytes() + b"x")
    damaged = run("--preset", "smoke", "--root", root)
    assert damaged.returncode == 0
    assert ran(damaged.stdout) == set(TRAIN[TRAIN.index("quantize") :])


def test_changed_code_of_a_stage_runs_it_and_what_follows_again(run, tmp_path):
    library, root = tmp_path / "library", tmp_path / "root"
    standin.write(library)
    env = os.environ | {"PYTHONPATH": str(library)}
    assert run("--preset", "smoke", "--root", root, env=env).returncode == 0
    with (library / "sidgraft/stages/finetune.py").open("a") as file:
        file.write("\n# another version\n")
    again = run("--preset", "smoke", "--root", root, env=env)
    assert ran(again.stdout) == {"finetune", "diagnose", "evaluate", "report"}


def test_changed_content_behind_a_path_runs_prepare_again(run, tmp_path):
    catalog, log, root = tmp_path / "c.jsonl", tmp_path / "i.jsonl", tmp_path / "root"
    catalog.write_text('{"item_id": "a"}\n')
    log.write_text('{"user_id": "u", "items": ["a"]}\n')
    files = ("--set", f"catalog={catalog}", "--set", f"interactions={log}")
    assert run("--preset", "smoke", "--root", root, *files).returncode == 0
    assert ran(run("--preset", "smoke", "--root", root, *files).stdout) == set()
    catalog.write_text('{"item_id": "b"}\n')
    assert ran(run("--preset", "smoke", "--root", root, *files).stdout) == set(TRAIN)


def test_a_failing_stage_is_named_with_its_own_error_and_the_log(run, tmp_path):
    failed = run("--preset", "smoke", "--root", tmp_path, standin="fail:quantize")
    assert failed.returncode == 1
    *_, error, log = failed.stdout.strip().splitlines()
    assert error == "The stage quantize failed: quantize does not like this"
    assert "Traceback" not in failed.stdout + failed.stderr
    (file,) = tmp_path.glob("logs/*.log")
    assert str(file) in log
    assert "Traceback" in file.read_text()
    again = run("--preset", "smoke", "--root", tmp_path)
    assert again.returncode == 0
    assert ran(again.stdout) == set(TRAIN[TRAIN.index("quantize") :])


def test_a_killed_stage_is_named_too(run, tmp_path):
    failed = run("--preset", "smoke", "--root", tmp_path, standin="kill:finetune")
    assert failed.returncode == 1
    assert "The stage finetune failed: SIGKILL has ended the process." in failed.stdout
    assert "memory runs out" in failed.stdout


@pytest.mark.parametrize(
    ("how", "error"),
    [("fail", "ground does not like this"), ("kill", "SIGKILL has ended the process. The system does so")],
)
def test_a_failed_variant_does_not_lose_the_others(run, tmp_path, how, error):
    arguments = ("--preset", "study-quickstart", "--root", tmp_path, "--set", "variants=gaussian,centroid+gti")
    partly = run(*arguments, standin=f"{how}:ground:gti")
    assert partly.returncode == 3, partly.stdout + partly.stderr
    lines = dict(stages(partly.stdout))
    assert lines["ground (centroid+gti)"].startswith(f"FAILED: {error}")
    assert lines["evaluate (centroid+gti)"].startswith("skipped")
    assert lines["evaluate (gaussian)"] == "done"
    assert f"The stage ground (centroid+gti) failed: {error}" in partly.stdout
    assert (tmp_path / "report" / "index.html").is_file()

    whole = run(*arguments)  # a failure is not reused
    assert whole.returncode == 0
    assert [n for n in ran(whole.stdout) if "gaussian" in n] == []
    assert "ground (centroid+gti)" in ran(whole.stdout)

    more = run(*arguments, "--set", "seeds=0,1")  # a further seed leaves the first one's results alone
    assert [n for n in ran(more.stdout) if "seed 0" in n] == []
    assert "evaluate (gaussian, seed 1)" in ran(more.stdout)


def test_an_interrupted_study_goes_on_with_the_variant_it_was_at(run, tmp_path):
    arguments = ("--preset", "study-quickstart", "--root", tmp_path, "--set", "variants=gaussian,centroid+gti,mean")
    process = run(*arguments, standin="slow:ground:gti", wait=False)
    wait_for(lambda: any("slow work" in log.read_text() for log in tmp_path.glob("logs/*.log")))
    group = group_of_run(tmp_path)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    wait_for(lambda: not alive_in(group))
    assert not (tmp_path / "report").exists()

    again = run(*arguments)
    assert again.returncode == 0, again.stdout + again.stderr
    assert [n for n in ran(again.stdout) if "gaussian" in n or "(" not in n] == ["report"]
    of_one = {"expand", "ground", "finetune", "evaluate", "diagnose"}
    assert {n for n in ran(again.stdout) if "mean" in n} == {f"{stage} (mean)" for stage in of_one}
    assert {n for n in ran(again.stdout) if "gti" in n} == {f"{stage} (centroid+gti)" for stage in of_one - {"expand"}}


def test_depths_of_one_corpus_are_taken_from_one_grounding(run, tmp_path):
    variants = ("--set", "variants=centroid+cpt@0,centroid+cpt@4,centroid+cpt+lc-rec,mean+cpt@1")
    study = run("--preset", "study-quickstart", "--root", tmp_path, *variants)
    assert study.returncode == 0, study.stdout + study.stderr
    lines = dict(stages(study.stdout))
    for stage in ("expand", "ground"):
        found = {name: text == "reused" for name, text in lines.items() if name.startswith(stage)}
        assert list(found.values()) == [False, True, True, False]
    assert [text for name, text in lines.items() if name.startswith("finetune")] == ["done"] * 4
    assert len(list(tmp_path.glob("artifacts/*/*/ground/out/artifact.json"))) == 2

    failed = run("--preset", "study-quickstart", "--root", tmp_path / "failed", *variants, standin="fail:ground:0,4")
    assert failed.returncode == 3
    lines = dict(stages(failed.stdout))
    assert lines["evaluate (mean+cpt@1)"] == "done"
    assert all(lines[f"evaluate (centroid+cpt{n})"].startswith("skipped") for n in ("@0", "@4", "+lc-rec"))
    assert [text for name, text in lines.items() if "FAILED" in text] == ["FAILED: ground does not like this"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_the_running_stage_ends_with_the_command(run, tmp_path, number):
    process = run("--preset", "smoke", "--root", tmp_path, standin="slow:finetune", wait=False)
    wait_for(lambda: any("slow work" in log.read_text() for log in tmp_path.glob("logs/*.log")))
    group = group_of_run(tmp_path)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    wait_for(lambda: not alive_in(group))
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert output.strip().splitlines()[-1].startswith("Stopped in finetune. Run the same command again")
        assert "Traceback" not in output
    again = run("--preset", "smoke", "--root", tmp_path)
    assert again.returncode == 0
    assert ran(again.stdout) == set(TRAIN[TRAIN.index("finetune") :])
    assert list(tmp_path.rglob("*.partial")) == []


def test_two_runs_do_not_write_to_one_root(run, tmp_path):
    process = run("--preset", "smoke", "--root", tmp_path, standin="slow:finetune", wait=False)
    try:
        wait_for(lambda: list(tmp_path.glob("logs/*.log")))
        second = run("--preset", "smoke", "--root", tmp_path)
        assert second.returncode == 2
        assert "another run" in second.stderr
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)


def test_a_mistake_is_told_before_anything_runs(run, tmp_path):
    typo = run("--preset", "smoke", "--root", tmp_path, "--set", "quantise_levels=4")
    assert typo.returncode == 2
    assert "Did you mean quantize_levels?" in typo.stderr
    absent = run("--preset", "smoke", "--root", tmp_path, "--set", "catalog=nowhere.jsonl")
    assert absent.returncode == 2
    assert "nowhere.jsonl" in absent.stderr
    study = run("--preset", "study-quickstart", "--root", tmp_path, "--set", "variants=centroyd")
    assert study.returncode == 2
    assert "Did you mean centroid?" in study.stderr


def wait_for(condition, seconds=60):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.2)


def processes() -> list[tuple[int, int, int, str]]:
    """Return (process, parent, group, command) of all that live."""
    found = subprocess.run(["ps", "-eo", "pid=,ppid=,pgid=,args=", "ww"], capture_output=True, text=True, check=True)
    rows = [line.split(maxsplit=3) for line in found.stdout.splitlines()]
    return [(int(pid), int(parent), int(group), command) for pid, parent, group, command in rows]


def group_of_run(root: Path) -> int:
    """Return the group of the processes of the run under this root, in which exactly one stage is at work: a fork."""
    alive = processes()
    (group,) = {group for _, _, group, command in alive if "pipelines.worker" in command and str(root) in command}
    servers = {pid for pid, _, of, command in alive if of == group and "multiprocessing.forkserver" in command}
    assert len([pid for pid, parent, _, _ in alive if parent in servers]) == 1
    return group


def alive_in(group: int) -> list[str]:
    return [command for _, _, of, command in processes() if of == group]
