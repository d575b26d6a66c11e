"""Semantic IDs of several quantizers in one report: as quality.json has them, joined to the variants."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from report_artifacts import shared_data, variant_artifacts

from sidgraft import artifacts, id_quality
from sidgraft.artifacts import SCHEMAS, Artifact
from sidgraft.stages.report import report


def semantic_ids(root: Path, items: list[str], codebook_size: int, levels: int, error: float) -> Artifact:
    """Semantic IDs with figures of which none equals another."""
    quality: dict[str, Any] = {
        "relative_squared_error": error,
        "collision_rate": error / 2,
        "largest_bucket": levels + 1,
        "neighbours_kept": 1 - error,
        "levels": [
            {"codes": codebook_size, "mse": error / n, "utilisation": 1 / n, "perplexity": codebook_size / n}
            | {"prefix_neighbours": error / 10 / n, "of_no_use_here": 0}
            for n in range(1, levels + 1)
        ],
        "definitions": {"collision_rate": "share of items"},
    }
    arguments = {"levels": levels, "codebook_size": codebook_size}
    with artifacts.create(root, "semantic_ids/v1", stage="quantize", arguments=arguments) as draft:
        codes = [[n % codebook_size] * levels + [0] for n in range(len(items))]
        schema = SCHEMAS["semantic_ids/v1"]["semantic_ids.parquet"]
        draft.write_table("semantic_ids.parquet", pa.table({"item_id": items, "codes": codes}).cast(schema))
        draft.write_json("quantizer.json", {})
        draft.write_json("quality.json", quality)
        (draft.path / "codebooks.safetensors").write_bytes(b"")
    return artifacts.load(root, "semantic_ids/v1")


def judged(root: Path, *which: tuple[str, int]) -> tuple[dict[str, Artifact], dict[str, Artifact]]:
    """Write a report of runs (variant, seed), whose IDs are those of the variant's first letter; the first's are given.

    Returns the IDs by letter and the shared data.
    """
    shared = shared_data(root)
    items = shared["catalog"].read_table("catalog.parquet")["item_id"].to_pylist()
    ids = {"k": semantic_ids(root / "k", items, 16, 3, 0.25), "l": semantic_ids(root / "l", items, 32, 2, 0.75)}
    paths = []
    for name, seed in which:
        of = ids[name[0]]
        record = {id_quality.RECORD: id_quality.recorded(of)}
        paths.append(variant_artifacts(root, shared | {"ids": of}, name, seed, 0.06, metadata=record))
    lists = [list(column) for column in zip(*paths, strict=True)]
    given = str(root / which[0][0][0])
    report(*lists, str(root / "catalog"), str(root / "interactions"), given, str(root / "out"))
    return ids, shared


def test_each_variant_has_the_figures_of_its_own_ids(tmp_path: Path) -> None:
    ids, _ = judged(tmp_path, ("k-centroid", 0), ("k-centroid", 1), ("k-mean", 0), ("l-<b>centroid", 0))
    table = pq.read_table(tmp_path / "out" / "quantizers.parquet")
    assert table.schema == id_quality.COLUMNS
    rows = table.to_pylist()
    assert {(r["variant"], r["seed"], r["semantic_ids"]) for r in rows} == {
        ("k-centroid", 0, ids["k"].digest), ("k-centroid", 1, ids["k"].digest), ("k-mean", 0, ids["k"].digest),
        ("l-<b>centroid", 0, ids["l"].digest),
    }  # fmt: skip
    found = {(r["variant"], r["seed"], r["level"], r["figure"]): r["value"] for r in rows}
    assert len(found) == len(rows) == 3 * (4 + 3 * 5) + (4 + 2 * 5)
    for (name, _, level, figure), value in found.items():
        quality = ids[name[0]].read_json("quality.json")
        assert value == (quality[figure] if level is None else quality["levels"][level - 1][figure])
    with (tmp_path / "out" / "quantizers.csv").open(newline="", encoding="utf-8") as stream:
        read = list(csv.DictReader(stream))
    assert [float(row["value"]) for row in read] == [row["value"] for row in rows]
    assert {row["level"] for row in read} == {"", "1", "2", "3"}

    html = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    shown = html[html.index("Quality of the Semantic IDs of each variant") :]
    shown = re.sub(r"\s*<[^b/][^>]*>|</[^b][^>]*>", "|", shown[: shown.index("In detail")])
    text = re.sub(r"[|\s]+", " ", shown)
    assert "<bdi>k-centroid</bdi>, <bdi>k-mean</bdi> 16 × 16 × 16 0.2500 0.1250 4 0.7500 1.000, 0.500, 0.333" in text
    assert "<bdi>l-&lt;b&gt;centroid</bdi> 32 × 32 0.7500 0.3750 3 0.2500 1.000, 0.500 32.0, 16.0" in text
    assert "Judged with others: <bdi>l-&lt;b&gt;centroid</bdi>." in html
    assert "Made from other data" not in html  # catalog and interactions are the same


def test_a_single_quantizer_needs_no_table_to_compare_it_in(tmp_path: Path) -> None:
    judged(tmp_path, ("k-centroid", 0), ("k-mean", 0))
    assert pq.read_table(tmp_path / "out" / "quantizers.parquet").num_rows == 2 * (4 + 3 * 5)
    html = (tmp_path / "out" / "index.html").read_text(encoding="utf-8")
    assert "Quality of the Semantic IDs of each variant" not in html
    assert "Judged with others" not in html


def test_only_what_is_shown_or_written_is_recorded(tmp_path: Path) -> None:
    of = semantic_ids(tmp_path / "k", ["a", "b"], 16, 2, 0.25)
    known = of.read_json("quality.json")
    del known["definitions"]
    for level in known["levels"]:
        del level["of_no_use_here"]
    assert id_quality.recorded(of) == {"digest": of.digest} | known


def test_ids_without_figures_and_metrics_without_a_record_are_left_out(tmp_path: Path) -> None:
    shared = shared_data(tmp_path)
    assert id_quality.recorded(shared["ids"]) == {"digest": shared["ids"].digest}
    paths = variant_artifacts(tmp_path, shared, "old", 0, 0.06)
    data = [str(tmp_path / name) for name in ("catalog", "interactions", "ids")]
    report(*([path] for path in paths), *data, str(tmp_path / "out"))
    assert pq.read_table(tmp_path / "out" / "quantizers.parquet").num_rows == 0
    header = (tmp_path / "out" / "quantizers.csv").read_text()
    assert header == ",".join(id_quality.COLUMNS.names) + "\n"


def test_data_that_a_variant_was_not_made_from_is_said_to_be_another_s(tmp_path: Path) -> None:
    judged(tmp_path, ("k-full", 0))
    shared = shared_data(tmp_path)
    table = shared["interactions"].read_table("interactions.parquet")
    with artifacts.create(tmp_path / "cut", "interactions/v1", stage="prepare", arguments={"text": "title"}) as draft:
        draft.write_table("interactions.parquet", table)
    ids = artifacts.load(tmp_path / "k", "semantic_ids/v1")
    paths = variant_artifacts(tmp_path, shared | {"ids": ids}, "k-full", 0, 0.06)
    data = [str(tmp_path / name) for name in ("catalog", "cut", "k")]
    report(*([path] for path in paths), *data, str(tmp_path / "second"))
    html = (tmp_path / "second" / "index.html").read_text(encoding="utf-8")
    assert "Made from other data: <bdi>k-full</bdi>; the settings below say what differs." in html
