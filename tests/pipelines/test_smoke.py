"""The smoke pipeline with the real stages: killed in finetune and run again, reused, failing, poisoned."""

import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest

pytestmark = pytest.mark.slow

CHECKOUT = Path(__file__).parents[2]
COMMAND = [sys.executable, "-m", "pipelines", "run", "--preset"]

# Enough steps that a checkpoint is written well before the end.
EPOCHS = ("--set", "finetune_epochs=3", "--set", "finetune_patience=3")


def run(preset, root, *arguments):
    return subprocess.run(
        [*COMMAND, preset, "--root", str(root), *arguments],
        cwd=CHECKOUT,
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.fixture(scope="module")
def killed_and_run_again(tmp_path_factory):
    """A root whose first run was killed after a checkpoint of finetune, and the output of the second."""
    root = tmp_path_factory.mktemp("smoke")
    first = subprocess.Popen(
        [*COMMAND, "smoke", "--root", str(root), *EPOCHS],
        cwd=CHECKOUT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    deadline = time.monotonic() + 400
    while not list(root.glob("checkpoints/*/finetune-*/checkpoint-*/trainer_state.json")):
        assert first.poll() is None, first.communicate()[0]
        assert time.monotonic() < deadline, "no checkpoint was written"
        time.sleep(0.1)
    first.send_signal(signal.SIGKILL)
    first.communicate(timeout=120)
    assert not list(root.glob("artifacts/*/*/finetune/out/artifact.json")), "finetune had ended before the kill"
    return root, run("smoke", root, *EPOCHS)


def recommendations(root):
    """Return the recommendations of the latest run under root, as rows."""
    found = root.glob("artifacts/*/*/evaluate/out_recommendations/recommendations.parquet")
    return pq.read_table(max(found, key=lambda file: file.stat().st_mtime)).to_pylist()


def written(root):
    """When each file of an artifact was written."""
    return {file: file.stat().st_mtime_ns for file in root.glob("artifacts/**/*") if file.is_file()}


def test_a_killed_run_goes_on_from_its_checkpoint_and_finishes(killed_and_run_again):
    root, again = killed_and_run_again
    assert again.returncode == 0, again.stdout + again.stderr
    assert re.search(r"ground +reused", again.stdout)
    assert not re.search(r"finetune +reused", again.stdout)
    log = max(root.glob("logs/*.log")).read_text()
    assert "resuming from the checkpoint" in log
    assert "Recall@10" in again.stdout
    page = (root / "report" / "index.html").read_text(encoding="utf-8")
    assert "<html" in page
    assert pq.read_table(root / "report" / "metrics.parquet").num_rows > 0
    assert not list(root.glob("checkpoints/*/*")), "checkpoints are removed when their stage is done"


def test_everything_is_reused_when_nothing_changed(killed_and_run_again):
    root, _ = killed_and_run_again
    before = written(root)
    third = run("smoke", root, *EPOCHS)
    assert third.returncode == 0, third.stdout + third.stderr
    assert len(re.findall(r" reused$", third.stdout, re.MULTILINE)) == 10
    assert written(root) == before


def test_the_result_is_that_of_a_run_that_was_never_killed(killed_and_run_again):
    root, _ = killed_and_run_again
    resumed = recommendations(root)
    whole = run("smoke", root, *EPOCHS, "--set", "finetune_checkpoints=")  # other arguments: finetune runs anew
    assert whole.returncode == 0, whole.stdout + whole.stderr
    assert re.search(r"ground +reused", whole.stdout)
    assert not re.search(r"finetune +reused", whole.stdout)
    assert len(list(root.glob("artifacts/*/*/evaluate/out_recommendations"))) == 2
    assert recommendations(root) == resumed


def test_a_stage_that_fails_says_why_and_where_the_log_is(tmp_path):
    failed = run("smoke", tmp_path, "--set", "prepare_item_id=asin")
    assert failed.returncode == 1
    *_, log = failed.stdout.strip().splitlines()
    assert "The stage prepare failed: " in failed.stdout
    assert "asin" in failed.stdout
    assert "logs" in log
    assert "Traceback" not in failed.stdout + failed.stderr


def test_items_are_found_for_queries_with_graded_candidates(tmp_path):
    done = run("smoke-retrieval", tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"strict@10 +lenient@10 +NDCG@10", done.stdout)
    metrics = pq.read_table(tmp_path / "report" / "metrics.parquet").to_pylist()
    assert {row["metric"] for row in metrics} == {"precision_strict", "precision_lenient", "composite_ndcg"}
    assert {row["recommender"] for row in metrics} == {"model", "popularity", "neighbours", "query-neighbours"}


def test_a_poisoned_variant_is_shown_as_failed_in_the_report(tmp_path):
    """A learning rate of 1e30 makes grounding diverge; the variant without grounding does not read it."""
    text = (CHECKOUT / "pipelines" / "presets" / "smoke.yaml").read_text(encoding="utf-8")
    kept = [line for line in text.splitlines() if not re.match(r"  (variant|ground_corpus):", line)]
    study = "\n".join(kept).replace("pipeline: train", "pipeline: study")
    preset = tmp_path / "poisoned.yaml"
    preset.write_text(study + "\n  variants: [centroid, mean+gti]\n  ground_learning_rate: 1.0e+30\n")

    partly = run(str(preset), tmp_path / "root")
    assert partly.returncode == 3, partly.stdout + partly.stderr
    assert re.search(r"ground \(mean\+gti\) +FAILED: the (loss|gradient's norm) became", partly.stdout)
    assert re.search(r"evaluate \(centroid\) +model recall", partly.stdout)
    page = (tmp_path / "root" / "report" / "index.html").read_text(encoding="utf-8")
    assert "mean+gti" in page
    assert re.search("the (loss|gradient(&#39;|')s norm) became", page)
    variants = set(pq.read_table(tmp_path / "root" / "report" / "metrics.parquet")["variant"].to_pylist())
    assert variants == {"centroid"}
