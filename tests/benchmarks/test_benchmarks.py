"""The benchmarks' own promises: results are rendered, not copied; the GPU script runs; growth is fitted right."""

import argparse
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load(name, monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    spec = importlib.util.spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def record(name, ratio):
    return {
        "name": name, "ratios": {"a peer": [ratio, 2]}, "equal": {"same": True}, "roof": {"share": 0.51234},
        "about": "a size", "command": f"python benchmarks/{name}.py --json", "machine": "2 cores", "threads": 2,
    }  # fmt: skip


def test_every_benchmark_is_there_and_is_run_by_all(monkeypatch):
    every = load("all", monkeypatch)
    assert [name for name in every.NAMES if not (BENCHMARKS / f"{name}.py").is_file()] == []


def test_the_page_shows_what_was_recorded_and_names_what_was_not(monkeypatch):
    every = load("all", monkeypatch)
    page = (BENCHMARKS / "RESULTS.md").read_text(encoding="utf-8")
    assert every.with_table(page, every.read_records()) == page
    shown = every.with_table(page, [record("decode", 3.25), record("quantize", 1.5)])
    assert "| decode | a peer | 3.25 | 2 | yes |" in shown
    assert "| quantize | a peer | 1.5 | 2 | no |" in shown
    assert "share 0.5123" in shown
    assert "Not measured on a quiet machine yet: constraint, ground" in shown
    assert shown.partition(every.END)[2] == page.partition(every.END)[2]


def test_quick_and_busy_runs_are_not_recorded(monkeypatch, tmp_path, capsys):
    every = load("all", monkeypatch)
    for name in ("RECORDS", "PAGE"):
        monkeypatch.setattr(every, name, tmp_path / name)
    every.PAGE.write_text(f"{every.BEGIN}\n{every.END}\n", encoding="utf-8")
    line = json.dumps({k: v for k, v in record("decode", 3.0).items() if k not in ("command", "machine")})
    done = subprocess.CompletedProcess([], 0, stdout=f"a table\n{line}\n")
    monkeypatch.setattr(every.subprocess, "run", lambda *_, **__: done)
    for arguments, busy, kept in ((["--quick"], 0.0, False), ([], 0.5, False), ([], 0.01, True)):
        monkeypatch.setattr(every, "used_by_others", lambda busy=busy: busy)
        monkeypatch.setattr(sys, "argv", ["all.py", *arguments, "decode"])
        assert every.main() == 0
        assert every.RECORDS.exists() == kept
    assert "| decode | a peer | 3 | 2 | yes |" in every.PAGE.read_text(encoding="utf-8")


def test_a_benchmark_whose_answers_differ_has_no_result(monkeypatch, capsys):
    measure = load("measure", monkeypatch)
    args = argparse.Namespace(json=True, quick=True)
    settings = {"roof": {"share": 0.5}, "seconds": {"sidgraft": 1.0, "a peer": 3.0}, "about": "a size"}
    measure.report(args, "decode", {"a peer": (3.0, 2)}, equal={"same": True, "cosine": 0.9}, **settings)
    line = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert {"name", "ratio", "goal", "ratios", "equal", "roof"} <= line.keys()
    assert (line["ratio"], line["goal"], line["ratios"]) == (3.0, 2, {"a peer": [3.0, 2]})
    with pytest.raises(SystemExit, match="decode: not the same as the peer: same"):
        measure.report(args, "decode", {"a peer": (3.0, 2)}, equal={"same": False, "cosine": 0.9}, **settings)
    assert capsys.readouterr().out == ""


def test_the_exponent_of_growth_is_that_of_the_two_largest_sizes(monkeypatch):
    growth = load("growth", monkeypatch)
    rows = [{"items": n, "seconds": 5 + 1e-6 * n**1.5, "megabytes": 0.5} for n in (10**4, 10**7, 10**8)]
    assert growth.exponent(rows, "seconds") == pytest.approx(1.5, abs=1e-3)
    assert growth.exponent(rows, "megabytes") == 0.0


@pytest.mark.skipif(sys.platform != "linux", reason="peaks are read from /proc")
def test_growth_counts_what_a_part_holds_at_most_and_not_what_its_inputs_held(tmp_path):
    """In a process of its own, as the benchmark's parts: another test's freed memory would be used again."""
    program = """
import json, pathlib, growth

def part(items, folder):
    inputs = bytearray(b"1") * (items << 20)
    del inputs
    return lambda: len(bytearray(b"1") * (40 << 20)), {"fact": 1}

print(json.dumps(growth.measure(part, 200, pathlib.Path())))
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(BENCHMARKS), *sys.path])}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True)
    found = json.loads(done.stdout)
    assert found["fact"] == 1
    assert 38 <= found["megabytes"] < 60


def test_growth_is_drawn_from_what_is_recorded_alone(monkeypatch, tmp_path):
    every = load("all", monkeypatch)
    for name in ("RECORDS", "PAGE", "PLOT"):
        monkeypatch.setattr(every, name, tmp_path / {"PLOT": "growth.svg"}.get(name, name))
    every.PAGE.write_text(f"{every.BEGIN}\n{every.END}\n", encoding="utf-8")
    sizes = [
        {"stage": stage, "items": n, "seconds": n**power / 1e4, "megabytes": 7.0}
        for stage, power in (("embed", 1.0), ("quantize", 1.25))
        for n in (10**4, 10**5)
    ]
    line = json.dumps(record("growth", 0.95) | {"sizes": sizes})
    done = subprocess.CompletedProcess([], 0, stdout=f"a table\n{line}\n")
    monkeypatch.setattr(every.subprocess, "run", lambda *_, **__: done)
    monkeypatch.setattr(every, "used_by_others", lambda: 0.0)
    for arguments in (["--quick"], []):
        monkeypatch.setattr(sys, "argv", ["all.py", *arguments, "growth"])
        assert not every.PLOT.exists()
        assert every.main() == 0
    drawn = every.PLOT.read_text(encoding="utf-8")
    assert all(f"<!-- {label} -->" in drawn for label in ("embed: N^1.00", "quantize: N^1.25", "quantize: N^0.00"))
    assert "](growth.svg)" in every.PAGE.read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_gpu_script_runs_in_its_tiny_form_without_a_gpu(tmp_path):
    environment = os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""}
    script = [str(BENCHMARKS / "gpu_speed.sh"), str(tmp_path / "results.jsonl")]
    subprocess.run(script, env=environment, check=True, cwd=tmp_path, stdout=subprocess.PIPE)
    rows = [json.loads(line) for line in (tmp_path / "results.jsonl").read_text().splitlines()]
    assert [row["name"] for row in rows] == ["decoding", "grounding", "fine_tuning"]
    assert all("CPU" in row["card"] for row in rows)
    assert rows[0]["beams_shared"] == 1.0
    assert rows[1]["first_loss_difference"] < 0.1
    assert rows[2]["tokens_per_second"] > 0
