"""What the local run may reuse: outputs that are whole and hold no failure."""

import json

import pyarrow as pa
import pytest

from pipelines.worker import drop_lost_results, is_sound
from sidgraft import artifacts


@pytest.fixture
def output(tmp_path):
    path = tmp_path / "out"
    schema = artifacts.SCHEMAS["semantic_ids/v1"]["semantic_ids.parquet"]
    table = pa.Table.from_pylist([{"item_id": "a", "codes": [1]}], schema=schema)
    with artifacts.create(path, "semantic_ids/v1", stage="quantize", arguments={}) as draft:
        draft.write_table("semantic_ids.parquet", table)
        for name in artifacts.REQUIRED["semantic_ids/v1"]:
            (draft.path / name).write_text("content")
    return path


def test_a_finished_artifact_is_sound(output):
    assert is_sound(output)


def test_what_is_gone_cut_or_changed_is_not(output):
    file = output / "quantizer.json"
    file.write_text("changed")  # the same length
    assert not is_sound(output)
    file.write_text("longer than before")
    assert not is_sound(output)
    file.unlink()
    assert not is_sound(output)
    assert not is_sound(output.parent / "nowhere")


def test_an_artifact_that_was_only_touched_is_sound(output):
    (output / "quantizer.json").write_text("content")
    assert is_sound(output)


def test_a_failure_is_not_reused(tmp_path):
    artifacts.record_failure(tmp_path / "out", "model/v1", stage="finetune", error="x")
    assert not is_sound(tmp_path / "out")


def test_cache_entries_of_lost_outputs_are_dropped(output, tmp_path):
    cache = tmp_path / "cache"
    cache.mkdir()
    page = tmp_path / "page.html"
    page.write_text("x")
    good = {"out": {"uri": str(output)}, "ui_page": {"uri": str(page)}, "Output": [1]}
    bad = {"out": {"uri": str(tmp_path / "gone")}}
    for name, entry in (("good", good), ("bad", bad)):
        (cache / f"{name}.json").write_text(json.dumps(entry))
    drop_lost_results(cache)
    assert [file.name for file in cache.iterdir()] == ["good.json"]
