"""The comparison for a GPU, on a CPU with a two-layer model: packed into parts, put together again, judged."""

import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).parents[2]
SCRIPT = CHECKOUT / "benchmarks" / "gpu_results.sh"


def run(*arguments, **environment):
    return subprocess.run(
        [str(SCRIPT), *map(str, arguments)],
        env=os.environ | {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": ""} | environment,
        capture_output=True,
        text=True,
    )


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
