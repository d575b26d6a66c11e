"""The smoke pipeline with its catalog, interactions and base model in a real object store."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from sidgraft import catalog, models, samples, storage

pytestmark = [pytest.mark.s3, pytest.mark.slow]

CHECKOUT = Path(__file__).parents[2]


def run(root, *assignments):
    settings = [part for assignment in assignments for part in ("--set", assignment)]
    command = [sys.executable, "-m", "pipelines", "run", "--preset", "smoke", "--root", str(root), *settings]
    return subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=600)


def test_the_whole_pipeline_takes_its_inputs_from_the_store(store, tmp_path):
    files = [tmp_path / "items.parquet", tmp_path / "bought.parquet"]
    for file, table in zip(files, samples.read("sample:complete-journey"), strict=True):
        pq.write_table(table, file)
        storage.upload(file, f"{store.place}/{file.name}")
    for part in models.load_base("tiny"):
        part.save_pretrained(tmp_path / "model")
    storage.upload(tmp_path / "model", f"{store.place}/model")
    inputs = [
        f"catalog={store.place}/items.parquet",
        f"interactions={store.place}/bought.parquet",
        f"expand_base_model={store.place}/model",
    ]
    done = run(tmp_path / "run", *inputs)
    assert done.returncode == 0, done.stdout + done.stderr
    assert pq.read_table(tmp_path / "run" / "report" / "metrics.parquet").num_rows > 0
    parameters = json.loads((tmp_path / "run" / "parameters.json").read_text())
    assert parameters["prepare_source_digest"] == catalog.source_digest(*map(str, files))

    gone = run(tmp_path / "run", *inputs, f"catalog={store.place}/gone.parquet")
    assert gone.returncode == 2
    assert "gone.parquet does not exist in the store: correct the URI" in gone.stderr
