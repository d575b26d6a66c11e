"""Artifacts: contracts kept, damage seen, nothing half-finished, digests that name content and nothing else."""

import json
import os
import signal
import subprocess
import sys

import pyarrow as pa
import pytest

from sidgraft import artifacts
from sidgraft.artifacts import MANIFEST, SCHEMAS, ArtifactError, FailedArtifactError

TABLES = [(kind, name) for kind, files in SCHEMAS.items() for name in files]


def sample_value(kind):
    """One value of a contract's type."""
    if pa.types.is_fixed_size_list(kind):
        return [0.5]
    if pa.types.is_list(kind):
        return [sample_value(kind.value_type)]
    return "a" if pa.types.is_string(kind) else 1


def columns(schema):
    return {f.name: pa.array([sample_value(f.type)] * 2, f.type) for f in schema}


def write(out, kind, table=None, *, stage="test", arguments=None, inputs=None, metadata=None, **facts):
    """Write an artifact of any kind with its required files; ``table`` replaces its first table."""
    with artifacts.create(out, kind, stage=stage, arguments=arguments or {}, inputs=inputs) as draft:
        for name in artifacts.REQUIRED.get(kind, ()):
            (draft.path / name).parent.mkdir(exist_ok=True)
            (draft.path / name).write_bytes(b"{}")
        for name, schema in SCHEMAS[kind].items():
            draft.write_table(name, pa.table(columns(schema)) if table is None else table)
        draft.metadata.update(metadata or {})
        draft.facts.update(facts)
    return artifacts.load(out, kind)


def catalog(out, title="a", **options):
    found = columns(SCHEMAS["catalog/v1"]["catalog.parquet"]) | {"title": pa.array([title] * 2)}
    return write(out, "catalog/v1", pa.table(found), **options)


# -------------------------------------------------------------------------------------------------- the contracts


@pytest.mark.parametrize("kind", SCHEMAS)
def test_every_kind_is_written_and_read(tmp_path, kind):
    artifact = write(tmp_path / "a", kind)
    assert (artifact.kind, artifact.stage) == (kind, "test")
    for name, schema in SCHEMAS[kind].items():
        assert artifact.read_table(name).column_names == schema.names
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(("kind", "file"), TABLES)
def test_every_column_of_every_contract_is_held_to_it(tmp_path, kind, file):
    schema = SCHEMAS[kind][file]
    good = columns(schema)
    cases = [(good | {"more": pa.array([1, 2])}, r"columns are .*'more'")]
    for column in schema:
        cases.append(({n: c for n, c in good.items() if n != column.name}, "columns are"))
        cases.append((good | {column.name: pa.array([True, False])}, f"column {column.name} is bool, expected"))
        if not column.nullable:
            holes = pa.array([sample_value(column.type), None], column.type)
            cases.append((good | {column.name: holes}, f"column {column.name} has nulls"))
    for found, message in cases:
        with pytest.raises(ArtifactError, match=message):
            write(tmp_path / "a", kind, pa.table(found))
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("found", "right"),
    [
        (pa.list_(pa.float16(), 3), True),
        (pa.list_(pa.float32(), 3), True),
        (pa.list_(pa.float64(), 3), False),
        (pa.list_(pa.float32()), False),
    ],
)
def test_vectors_are_of_fixed_width_in_two_precisions(tmp_path, found, right):
    table = pa.table({"item_id": ["a"], "embedding": pa.array([[0, 1, 2]], pa.list_(pa.int64())).cast(found)})
    if right:
        write(tmp_path / "a", "item_embeddings/v1", table)
    else:
        with pytest.raises(ArtifactError, match="expected fixed_size_list<float16 or float32>"):
            write(tmp_path / "a", "item_embeddings/v1", table)


@pytest.mark.parametrize("kind", [k for k in SCHEMAS if artifacts.REQUIRED.get(k) or SCHEMAS[k]])
def test_an_empty_artifact_lacks_its_files(tmp_path, kind):
    with (
        pytest.raises(ArtifactError, match="it lacks"),
        artifacts.create(tmp_path / "a", kind, stage="s", arguments={}),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_undefined_figures_are_refused(tmp_path):
    for options in ({"metadata": {"loss": float("nan")}}, {"loss": float("nan")}, {"arguments": {"a": float("inf")}}):
        with pytest.raises(ValueError, match="JSON compliant"):
            write(tmp_path / "a", "diagnostics/v1", **options)
        assert list(tmp_path.iterdir()) == []


# -------------------------------------------------------------------------------------------------------- damage


def flip(file):
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize(
    "damage", [flip, lambda f: f.write_bytes(f.read_bytes()[:-1]), lambda f: f.unlink()], ids=["byte", "cut", "gone"]
)
@pytest.mark.parametrize("name", ["semantic_ids.parquet", "codebooks.safetensors", "quantizer.json"])
def test_damage_to_any_file_is_seen(tmp_path, damage, name):
    write(tmp_path / "a", "semantic_ids/v1")
    damage(tmp_path / "a" / name)
    with pytest.raises(ArtifactError, match=rf"{name} is missing or differs.*sidgraft quantize"):
        artifacts.load(tmp_path / "a", "semantic_ids/v1")


def test_what_is_no_artifact_of_that_kind(tmp_path):
    catalog(tmp_path / "a")
    with pytest.raises(ArtifactError, match=r"holds catalog/v1, expected model/v1.*sidgraft finetune"):
        artifacts.load(tmp_path / "a", "model/v1")
    with pytest.raises(ArtifactError, match="does not exist"):
        artifacts.load(tmp_path / "b", "catalog/v1")
    (tmp_path / "a" / MANIFEST).write_text("{")
    with pytest.raises(ArtifactError, match="is not JSON"):
        artifacts.load(tmp_path / "a", "catalog/v1")
    (tmp_path / "a" / MANIFEST).write_text("[]")
    with pytest.raises(ArtifactError, match="names no kind"):
        artifacts.load(tmp_path / "a", "catalog/v1")
    (tmp_path / "a" / MANIFEST).unlink()
    with pytest.raises(ArtifactError, match=f"has no {MANIFEST}"):
        artifacts.load(tmp_path / "a", "catalog/v1")


def test_a_failure_is_loaded_as_what_it_was(tmp_path):
    catalog(tmp_path / "a")
    artifacts.record_failure(tmp_path / "a", "catalog/v1", stage="prepare", error="no rows", variant="mean")
    for kind in ("catalog/v1", "metrics/v1"):
        with pytest.raises(FailedArtifactError, match="stage prepare failed: no rows") as caught:
            artifacts.load(tmp_path / "a", kind)
        assert (caught.value.stage, caught.value.error, caught.value.variant) == ("prepare", "no rows", "mean")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]
    assert catalog(tmp_path / "a").kind == "catalog/v1"  # a later run takes its place


# -------------------------------------------------------------------------------------- finished or not there at all


def test_an_older_artifact_is_replaced_or_kept_whole(tmp_path):
    first = catalog(tmp_path / "a", "old")
    with pytest.raises(TypeError, match="not JSON serializable"):
        catalog(tmp_path / "a", "new", metadata={"no": object()})
    assert artifacts.load(tmp_path / "a", "catalog/v1") == first
    second = catalog(tmp_path / "a", "new")
    assert second.read_table("catalog.parquet")["title"].to_pylist() == ["new"] * 2
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_killed_stage_leaves_nothing_that_looks_finished(tmp_path):
    code = f"""
import os, signal
from sidgraft import artifacts
with artifacts.create({str(tmp_path / "a")!r}, "diagnostics/v1", stage="s", arguments={{}}) as draft:
    draft.write_json("diagnostics.json", {{}})
    draft.seal()
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == -signal.SIGKILL
    assert all(p.name.startswith(".a.") and p.name.endswith(".partial") for p in tmp_path.iterdir())
    with pytest.raises(ArtifactError, match="does not exist"):
        artifacts.load(tmp_path / "a", "diagnostics/v1")
    assert write(tmp_path / "a", "diagnostics/v1").kind == "diagnostics/v1"


def test_what_a_kill_set_aside_is_removed_and_in_nobodys_way(tmp_path):
    stale = [tmp_path / f".a.{pid}.old" for pid in (os.getpid(), 1)]  # in a container the id is often the same
    kept = [tmp_path / name for name in (".b.1.old", ".a.b.1.old", ".a.old", "a.1.old")]
    for old in stale + kept:
        old.mkdir()
        (old / "file").write_text("x")
    catalog(tmp_path / "a")
    catalog(tmp_path / "a")
    artifacts.record_failure(tmp_path / "a", "catalog/v1", stage="s", error="e")
    assert {p.name for p in tmp_path.iterdir()} == {"a", *(p.name for p in kept)}


@pytest.mark.parametrize("broken", ["first", "second", "outer contract", "inner contract"])
def test_of_two_nested_artifacts_neither_is_finished_where_one_fails(tmp_path, broken):
    with pytest.raises((ArtifactError, OSError)):  # noqa: PT012, SIM117
        with artifacts.create(tmp_path / "a", "diagnostics/v1", stage="s", arguments={}) as outer:
            if broken != "outer contract":
                outer.write_json("diagnostics.json", {})
            if broken == "first":
                raise OSError
            made = outer.seal()
            with artifacts.create(
                tmp_path / "b", "diagnostics/v1", stage="s", arguments={}, inputs={"a": made}
            ) as inner:
                if broken == "second":
                    raise OSError
                if broken != "inner contract":
                    inner.write_json("diagnostics.json", {})
    assert list(tmp_path.iterdir()) == []


def test_a_sealed_draft_is_the_artifact_that_is_loaded_later(tmp_path):
    with artifacts.create(tmp_path / "a", "diagnostics/v1", stage="s", arguments={"x": 1}) as draft:
        draft.write_json("diagnostics.json", {})
        draft.metadata["n"] = 3
        sealed = draft.seal()
    assert artifacts.load(tmp_path / "a", "diagnostics/v1") == sealed


# ------------------------------------------------------------------------------------------------------- digests


def test_the_digest_names_content_settings_and_inputs_and_nothing_else(tmp_path, monkeypatch):
    first = catalog(tmp_path / "a")
    other = [
        catalog(tmp_path / "b", "b"),
        catalog(tmp_path / "c", arguments={"seed": 1}),
        catalog(tmp_path / "d", stage="other"),
        catalog(tmp_path / "e", inputs={"catalog": first}),
    ]
    assert len({first.digest, *(a.digest for a in other)}) == 5
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(artifacts, "_versions", lambda: {"python": "9.9", "torch": "0.1"})
    elsewhere = catalog("deep/er/place", source="elsewhere")
    assert elsewhere.digest == first.digest
    assert elsewhere.lineage != first.lineage  # which does tell of versions and facts


def test_versions_and_facts_go_down_the_lineage(tmp_path):
    first = catalog(tmp_path / "a", source_digest="abc")
    last = write(tmp_path / "b", "diagnostics/v1", inputs={"catalog": first})
    assert last.lineage[first.digest]["facts"] == {"source_digest": "abc"}
    for entry in last.lineage.values():
        assert entry["versions"]["pyarrow"] == pa.__version__
    manifest = json.loads((tmp_path / "b" / MANIFEST).read_text())
    assert manifest["versions"] == last.lineage[last.digest]["versions"]


def test_only_what_is_imported_has_a_version(tmp_path):
    code = "from sidgraft import artifacts; print(*artifacts._versions())"
    found = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert {"python", "pyarrow"} <= set(found)
    assert not {"torch", "transformers", "scikit-learn"} & set(found)
