"""Retraining with all that it reads in a real object store, and all that it publishes: train, look again, serve."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from sidgraft import bundles, catalog, models, samples, storage

pytestmark = [pytest.mark.s3, pytest.mark.slow]

CHECKOUT = Path(__file__).parents[2]


def start(*command):
    return subprocess.run([sys.executable, "-m", *command], cwd=CHECKOUT, capture_output=True, text=True, timeout=1200)


def run(root, *assignments):
    settings = [part for assignment in assignments for part in ("--set", assignment)]
    return start("pipelines", "run", "--preset", "smoke-retrain", "--root", str(root), *settings)


def test_a_catalog_in_the_store_becomes_a_bundle_in_the_store_that_serves(store, tmp_path):
    files = [tmp_path / "items.parquet", tmp_path / "bought.parquet"]
    for file, table in zip(files, samples.read("sample:complete-journey"), strict=True):
        pq.write_table(table, file)
        storage.upload(file, f"{store.place}/{file.name}")
    for part in models.load_base("tiny"):
        part.save_pretrained(tmp_path / "model")
    storage.upload(tmp_path / "model", f"{store.place}/model")
    place = f"{store.place}/bundles"
    inputs = [
        f"catalog={store.place}/items.parquet",
        f"interactions={store.place}/bought.parquet",
        f"expand_base_model={store.place}/model",
        f"bundles={place}",
        "prepare_max_users=60",
        "baselines_sasrec_epochs=1",
        "ground_max_steps=4",
    ]
    done = run(tmp_path / "run", *inputs)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "watch: full. Nothing is published yet." in done.stdout
    (report,) = re.findall(r"^Report: (.*)$", done.stdout, re.MULTILINE)
    assert pq.read_table((CHECKOUT / report).with_name("metrics.parquet")).num_rows > 0
    parameters = json.loads((tmp_path / "run" / "parameters.json").read_text())
    assert parameters["prepare_source_digest"] == catalog.source_digest(*map(str, files))
    version = bundles.latest_version(place)
    assert bundles.open_bundle(place).bundle.metadata["base_model"] == f"{store.place}/model"
    assert list((tmp_path / "run").rglob("latest.json")) == []  # it is in the store alone

    again = run(tmp_path / "run", *inputs)
    assert again.returncode == 0, again.stdout + again.stderr
    assert "watch: none. The catalog is the one that the published bundle was trained on." in again.stdout
    assert bundles.latest_version(place) == version

    gone = run(tmp_path / "run", *inputs, f"catalog={store.place}/gone.parquet")
    assert gone.returncode == 2
    assert "gone.parquet does not exist in the store: correct the URI" in gone.stderr

    known = bundles.open_bundle(place).items()["item_id"].to_pylist()
    histories = pa.table({"user_id": ["u"], "item_ids": pa.array([known[:3]], pa.list_(pa.string()))})
    pq.write_table(histories, tmp_path / "h.parquet")
    storage.upload(tmp_path / "h.parquet", f"{store.place}/h.parquet")
    options = {"bundles": place, "histories": f"{store.place}/h.parquet", "out": f"{store.place}/found"}
    command = [part for name, value in options.items() for part in (f"--{name}", value)]
    served = start("sidgraft.cli", "recommend", *command)
    assert served.returncode == 0, served.stdout + served.stderr
    storage.download(f"{store.place}/found", tmp_path / "found")
    (row,) = pq.read_table(tmp_path / "found" / "recommendations.parquet").to_pylist()
    assert (row["user_id"], len(set(row["item_ids"]))) == ("u", 10)
    assert set(row["item_ids"]) <= set(known)
