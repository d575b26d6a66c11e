"""The comparison for a GPU, on a CPU with a two-layer model: packed into parts, put together again, judged."""

import importlib.util
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from sidgraft import artifacts
from sidgraft.variants import plan_variants

CHECKOUT = Path(__file__).parents[2]
SCRIPT = CHECKOUT / "benchmarks" / "gpu_results.sh"


def run(*arguments, **environment):
    return subprocess.run(
        [str(SCRIPT), *map(str, arguments)],
        env=os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""} | environment,
        capture_output=True,
        text=True,
    )


@pytest.fixture
def comparison():
    spec = importlib.util.spec_from_file_location("gpu_results", SCRIPT.with_suffix(".py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_stage_of_a_variant_takes_what_its_name_says(comparison, monkeypatch, tmp_path):
    """Whatever differs between entries of a plan reaches a stage."""
    taken = {}
    monkeypatch.setattr(comparison, "timed", lambda what, stage, **given: taken.setdefault(stage.__name__, given))
    names = ["mean+lc-rec", "centroid+cpt@2+unfrozen", "centroid+cpt@1"]
    for plan in plan_variants(names, [3]):
        taken.clear()
        parts = dict.fromkeys(("metrics", "recommendations", "diagnostics"), "x")
        shared = dict.fromkeys(("catalog", "interactions", "semantic_ids"), "y")
        comparison.one_variant(plan, shared, "v", "b", tmp_path, parts, comparison.SMOKE)
        given = {key: value for stage in ("expand", "ground", "finetune") for key, value in taken[stage].items()}
        differs = plan.keys() - {"variant", "label", "start"}  # names for people
        assert {key: given[key] for key in differs} == {key: plan[key] for key in differs}
        assert all(taken[stage]["seed"] == 3 for stage in ("expand", "ground", "finetune", "evaluate", "diagnose"))


@pytest.mark.parametrize("error", [OSError("disk full"), KeyError("code"), AssertionError()])
def test_whatever_fails_in_a_variant_is_shown_as_failed_in_the_report(comparison, monkeypatch, tmp_path, error):
    def fail(*_):
        raise error

    reported = {}
    monkeypatch.setattr(comparison, "one_variant", fail)
    monkeypatch.setattr(
        comparison, "report", lambda **given: reported.update(given) or {"verdict": "", "failed": 5, "variants": 5}
    )
    comparison.compare(tmp_path / "inputs", str(tmp_path / "out"), smoke=True)
    for kind in ("metrics", "recommendations", "diagnostics"):
        assert len(reported[kind]) == len(comparison.VARIANTS)
        for place, name in zip(reported[kind], comparison.VARIANTS, strict=True):
            with pytest.raises(artifacts.FailedArtifactError) as told:
                artifacts.load(place, f"{kind}/v1")
            assert told.value.variant == name
            assert (str(error).strip("'") or type(error).__name__) in str(told.value)


@pytest.mark.slow
def test_the_smoke_run_writes_a_studys_report(tmp_path):
    made = tmp_path / "made"
    done = run("--cpu-smoke", MADE=str(made))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "on a CPU" in (made / "smoke" / "run.log").read_text()
    with tarfile.open(made / "smoke" / "report.tar.gz") as archive:
        archive.extractall(tmp_path, filter="data")
    metrics = pq.read_table(tmp_path / "report" / "metrics.parquet").to_pylist()
    assert {row["variant"] for row in metrics} == {
        "mean", "gaussian", "centroid", "centroid-shuffled", "gaussian+gti",
    }  # fmt: skip
    compared = pq.read_table(tmp_path / "report" / "comparisons.parquet").to_pylist()
    assert {"gaussian", "sasrec", "popularity"} <= {row["against"] for row in compared}


def test_a_damaged_part_stops_the_run_before_it_begins(tmp_path):
    (tmp_path / "part-00").write_bytes(b"cut off")
    (tmp_path / "SHA256SUMS").write_text("0" * 64 + "  part-00\n")
    stopped = run("run", tmp_path / "out", PARTS=str(tmp_path))
    assert stopped.returncode == 1
    assert "a part is missing or damaged" in stopped.stderr
    assert not (tmp_path / "out").exists()


def test_without_a_step_it_says_how_it_is_used():
    told = run()
    assert told.returncode == 2
    assert "gpu_results.sh pack BEAUTY" in told.stderr
