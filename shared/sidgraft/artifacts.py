"""Artifacts: directories that stages exchange, each with an `artifact.json`, validated when written and read.

    with artifacts.create(out, "catalog/v1", stage="prepare", arguments={...}) as draft:
        draft.write_table("catalog.parquet", table)
        draft.metadata["items"] = table.num_rows

    catalog = artifacts.load(path, "catalog/v1")
    catalog.read_table("catalog.parquet"), catalog.metadata["items"], catalog.digest

A draft is a hidden directory beside `out` that is renamed when it is complete and valid, so a killed stage
leaves nothing that looks finished. A place may be `s3://bucket/key`: it is read through a checked local copy, and
written by an upload of the finished draft. `artifact.json` holds the kind, the arguments, the digest of every file, and
the lineage: the same for everything the artifact was made from, with the versions each of it was made with.
"""

from __future__ import annotations

import hashlib
import json
import platform
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

import sidgraft
from sidgraft import storage
from sidgraft.storage import MANIFEST


class ArtifactError(ValueError):
    """An artifact is missing, of another kind, damaged or not what its contract says."""


class FailedArtifactError(ArtifactError):
    """The artifact stands for a stage that failed; its message is that stage's own error."""

    def __init__(self, stage: str, error: str, variant: str = "") -> None:
        super().__init__(f"stage {stage} failed: {error}")
        self.stage, self.error, self.variant = stage, error, variant


def _fields(*fields: tuple[str, pa.DataType, bool]) -> pa.Schema:
    return pa.schema([pa.field(name, kind, nullable) for name, kind, nullable in fields])


STRINGS = pa.list_(pa.string())
VECTOR = pa.list_(pa.float32(), 1)  # stands for a fixed-size list of float16 or float32 of any width

# The contract: columns, types and whether they may be null. An extra column is an error, too.
SCHEMAS: dict[str, dict[str, pa.Schema]] = {
    "catalog/v1": {
        "catalog.parquet": _fields(
            ("item_id", pa.string(), False),
            ("text", pa.string(), False),
            ("title", pa.string(), True),
            ("brand", pa.string(), True),
            ("category", STRINGS, True),
            ("price", pa.float64(), True),
            ("description", pa.string(), True),
        )
    },
    # One row a user, items in time order. The training part is item_ids[:train_length]; a target at position p
    # has the history item_ids[:p]; a null position means that the user has no such target.
    "interactions/v1": {
        "interactions.parquet": _fields(
            ("user_id", pa.string(), False),
            ("item_ids", STRINGS, False),
            ("train_length", pa.int32(), False),
            ("valid_position", pa.int32(), True),
            ("test_position", pa.int32(), True),
        )
    },
    "item_embeddings/v1": {
        "embeddings.parquet": _fields(("item_id", pa.string(), False), ("embedding", VECTOR, False))
    },
    "semantic_ids/v1": {
        "semantic_ids.parquet": _fields(("item_id", pa.string(), False), ("codes", pa.list_(pa.int32()), False))
    },
    "token_rows/v1": {},
    "model/v1": {},
    "recommendations/v1": {
        "recommendations.parquet": _fields(
            ("recommender", pa.string(), False),
            ("user_id", pa.string(), False),
            ("target_id", pa.string(), False),
            ("item_ids", STRINGS, False),
            ("scores", pa.list_(pa.float32()), False),
        )
    },
    "metrics/v1": {
        "metrics.parquet": _fields(
            ("variant", pa.string(), False),
            ("seed", pa.int64(), False),
            ("recommender", pa.string(), False),
            ("slice", pa.string(), False),
            ("metric", pa.string(), False),
            ("k", pa.int32(), False),
            ("value", pa.float64(), True),
            ("low", pa.float64(), True),
            ("high", pa.float64(), True),
        )
    },
    "diagnostics/v1": {},
    "report/v1": {},
    # What was published: the model, semantic_ids and metrics artifacts whole, each in a folder of its own, and the
    # catalog they were made from, an item a row with the digest of its text.
    "bundle/v1": {"items.parquet": _fields(("item_id", pa.string(), False), ("text_digest", pa.string(), False))},
    "decision/v1": {},
    "user_recommendations/v1": {
        "recommendations.parquet": _fields(
            ("user_id", pa.string(), False), ("item_ids", STRINGS, False), ("scores", pa.list_(pa.float32()), False)
        )
    },
}

# Tables that an artifact may have or lack. Where interactions/v1 has its two, it comes from queries with graded
# candidates: interactions.parquet holds the training queries alone, as users whose training part are the relevant
# items, and every query stands here, with the split it belongs to (train, valid, test).
OPTIONAL: dict[str, dict[str, pa.Schema]] = {
    "interactions/v1": {
        "queries.parquet": _fields(
            ("query_id", pa.string(), False),
            ("text", pa.string(), False),  # the words of its fields, for an encoder
            ("prompt", pa.string(), False),  # the same with the fields' names, a line each
            ("split", pa.string(), False),
        ),
        "judgements.parquet": _fields(
            ("query_id", pa.string(), False), ("item_id", pa.string(), False), ("grade", pa.int32(), False)
        ),
    },
    # The items of items.parquet, in the same order, each with the digest of what training reads besides its text.
    "bundle/v1": {"fields.parquet": _fields(("item_id", pa.string(), False), ("fields_digest", pa.string(), False))},
}

# Files without a table contract that an artifact cannot do without.
REQUIRED: dict[str, tuple[str, ...]] = {
    "semantic_ids/v1": ("codebooks.safetensors", "quantizer.json"),
    "token_rows/v1": ("rows.safetensors", "sid_vocabulary.json", "base_model.json"),
    "model/v1": ("config.json", "sid_vocabulary.json"),
    "diagnostics/v1": ("diagnostics.json",),
    "report/v1": (
        "index.html",
        *(
            f"{table}.{kind}"
            for table in ("metrics", "summary", "comparisons", "curves", "quantizers")
            for kind in ("csv", "parquet")
        ),
    ),
    "bundle/v1": (
        "README.md",
        "catalog.json",
        *(f"{part}/{MANIFEST}" for part in ("model", "semantic_ids", "metrics")),
    ),
    "decision/v1": ("decision.json", "decision.md"),
}

MADE_BY = {
    "catalog/v1": "prepare",
    "interactions/v1": "prepare",
    "item_embeddings/v1": "embed",
    "semantic_ids/v1": "quantize",
    "token_rows/v1": "expand or ground",
    "model/v1": "finetune",
    "recommendations/v1": "evaluate",
    "metrics/v1": "evaluate",
    "diagnostics/v1": "diagnose",
    "report/v1": "report",
    "bundle/v1": "publish",
    "decision/v1": "publish or watch",
    "user_recommendations/v1": "recommend",
}


# Packages that compute results -> their modules: `artifact.json` names the versions of those that a stage used.
COMPUTING = {
    "numpy": "numpy",
    "pyarrow": "pyarrow",
    "torch": "torch",
    "transformers": "transformers",
    "accelerate": "accelerate",
    "sentence-transformers": "sentence_transformers",
    "scikit-learn": "sklearn",
}

# How to open a Parquet file that is read in batches: pages as they are needed. pyarrow's defaults would fetch whole
# columns first, which for vectors is the file.
IN_PARTS: dict[str, Any] = {"pre_buffer": False, "buffer_size": 1 << 20}
ROWS = 4096  # a batch in which a column is searched for nulls


@dataclass(frozen=True)
class Artifact:
    """A finished artifact on disk. ``digest`` names its content and everything it was made from."""

    path: Path
    kind: str
    stage: str
    digest: str
    arguments: dict[str, Any]
    metadata: dict[str, Any]
    lineage: dict[str, dict[str, Any]]

    def read_table(self, name: str, columns: list[str] | None = None) -> pa.Table:
        """Read one Parquet file of the artifact, memory-mapped."""
        return pq.read_table(self.path / name, columns=columns, memory_map=True)

    def read_batches(self, name: str, columns: list[str], rows: int) -> Iterator[pa.RecordBatch]:
        """Read one Parquet file of the artifact, ``rows`` rows at a time or fewer, never more of it than a batch."""
        with pq.ParquetFile(self.path / name, **IN_PARTS) as parquet:
            yield from parquet.iter_batches(rows, columns=columns)

    def read_json(self, name: str) -> Any:
        """Read one JSON file of the artifact."""
        return json.loads((self.path / name).read_text(encoding="utf-8"))


@dataclass
class Draft:
    """An artifact being written. Files go under ``path``; ``metadata`` is kept in the manifest.

    ``facts`` (scalars) tell where the content comes from, for those who look at an artifact made from this one:
    they go into the lineage, and not into the digest.
    """

    path: Path
    out: Path
    kind: str
    stage: str
    arguments: dict[str, Any]
    inputs: dict[str, Artifact]
    metadata: dict[str, Any] = field(default_factory=dict)
    facts: dict[str, Any] = field(default_factory=dict)
    sealed: Artifact | None = None

    def write_table(self, name: str, table: pa.Table) -> None:
        """Write a Parquet file; vectors are stored plain (no dictionary, no compression: five times faster)."""
        vectors = any(pa.types.is_fixed_size_list(f.type) for f in table.schema)
        options: dict[str, Any] = (
            {"use_dictionary": False, "compression": "none"} if vectors else {"compression": "zstd"}
        )
        pq.write_table(table, self.path / name, **options)

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file. NaN and infinity are refused: an undefined figure is null."""
        text = json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)
        (self.path / name).write_text(text + "\n", encoding="utf-8")

    def seal(self) -> Artifact:
        """Validate what was written and write the manifest; returns the artifact that will be at ``out``.

        `create` does so at its end. A stage that writes two artifacts calls it before it writes the second inside
        the first's body: so neither is finished where the other fails. Nothing may be written after it.
        """
        if self.sealed is None:
            _check_contract(self.path, self.kind)
            manifest = _manifest(self)
            _write_manifest(self.path, manifest)
            self.sealed = _artifact(self.out, manifest)
        return self.sealed


@contextmanager
def create(
    out: str | Path,
    kind: str,
    *,
    stage: str,
    arguments: Mapping[str, Any],
    inputs: Mapping[str, Artifact] | None = None,
) -> Iterator[Draft]:
    """Write an artifact: yield a draft, then validate it and move it to ``out`` in one rename, or upload it there.

    ``arguments`` are the stage's settings (no paths); ``inputs`` the artifacts it was made from, by name. When
    the body raises, nothing is left at ``out`` but what was there before. Raises ArtifactError when the files do
    not keep the contract of ``kind``.
    """
    place = _local_place(out)
    draft_path = storage.draft_directory(place)
    try:
        draft = Draft(draft_path, place, kind, stage, dict(arguments), dict(inputs or {}))
        yield draft
        draft.seal()
        _move(draft_path, place, out)
    finally:
        shutil.rmtree(draft_path, ignore_errors=True)


def load(path: str | Path, kind: str) -> Artifact:
    """Open an artifact and check it: kind, files, sizes, digests and columns.

    Raises FailedArtifactError for the mark that a failed stage left (see `record_failure`), and ArtifactError
    with what was found, what was expected and which stage to run for everything else; StorageError where a remote
    one is missing, incomplete or damaged.
    """
    path = storage.local(path)
    manifest = _read_manifest(path, kind)
    if "failed" in manifest:
        failed = manifest["failed"]
        raise FailedArtifactError(failed["stage"], failed["error"], failed.get("variant", ""))
    if _is_newer(manifest["kind"], kind):
        raise ArtifactError(
            f"{path} holds {manifest['kind']}, a newer format than the {kind} that sidgraft {sidgraft.__version__}"
            " reads: use the sidgraft that wrote it, or a newer one."
        )
    if manifest["kind"] != kind:
        raise ArtifactError(
            f"{path} holds {manifest['kind']}, expected {kind}: give the output of `sidgraft {MADE_BY[kind]}`."
        )
    for name, entry in manifest["files"].items():
        file = path / name
        if not file.is_file() or file.stat().st_size != entry["bytes"] or _sha256(file) != entry["sha256"]:
            raise ArtifactError(
                f"{file} is missing or differs from the digest in {MANIFEST}: the artifact is damaged."
                f" Run `sidgraft {MADE_BY[kind]}` again or copy it anew."
            )
    _check_contract(path, kind)
    return _artifact(path, manifest)


def _is_newer(found: Any, kind: str) -> bool:
    """Whether ``found`` is a later version of the same format, such as bundle/v2 for bundle/v1."""
    (name, _, version), (wanted, _, known) = str(found).partition("/v"), kind.partition("/v")
    return name == wanted and version.isdigit() and int(version) > int(known)


def _artifact(path: Path, manifest: dict[str, Any]) -> Artifact:
    return Artifact(
        path=path,
        kind=manifest["kind"],
        stage=manifest["stage"],
        digest=manifest["digest"],
        arguments=manifest["arguments"],
        metadata=manifest["metadata"],
        lineage=manifest["lineage"],
    )


def record_failure(out: str | Path, kind: str, *, stage: str, error: str, variant: str = "") -> None:
    """Leave a mark at ``out`` that the stage failed, for a report that shows failed variants by their name."""
    place = _local_place(out)
    draft_path = storage.draft_directory(place)
    failed = {"stage": stage, "error": error, "variant": variant}
    _write_manifest(draft_path, {"kind": kind, "failed": failed})
    _move(draft_path, place, out)


def _local_place(out: str | Path) -> Path:
    """Where the draft is made beside: ``out`` itself, or a folder of the cache for one that is uploaded."""
    return storage.cache_folder() / "drafts" / Path(out).name if storage.is_remote(out) else Path(out)


def _move(draft_path: Path, place: Path, out: str | Path) -> None:
    if storage.is_remote(out):
        storage.upload(draft_path, out)
        shutil.rmtree(draft_path, ignore_errors=True)
    else:
        storage.replace(draft_path, place)


def run_digest(arguments: Mapping[str, Any], inputs: Mapping[str, Artifact]) -> str:
    """A short name of a stage's run: the same arguments and inputs give the same, in any place and at any time."""
    body = {
        "sidgraft": sidgraft.__version__,
        "arguments": dict(arguments),
        "inputs": {name: artifact.digest for name, artifact in inputs.items()},
    }
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:16]


def run_facts(arguments: Mapping[str, Any], inputs: Mapping[str, Artifact]) -> dict[str, Any]:
    """What `run_digest` is made of, by name, for people: arguments by value, inputs by the start of their digest."""
    digests = {name: artifact.digest[:12] for name, artifact in inputs.items()}
    return {"sidgraft": sidgraft.__version__} | dict(arguments) | digests


def _read_manifest(path: Path, kind: str) -> dict[str, Any]:
    hint = f"expected the directory of a {kind} artifact: give the output of `sidgraft {MADE_BY[kind]}`."
    if not path.exists():
        raise ArtifactError(f"{path} does not exist; {hint}")
    if not (path / MANIFEST).is_file():
        raise ArtifactError(f"{path} has no {MANIFEST}; {hint}")
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ArtifactError(f"{path / MANIFEST} is not JSON ({error}); {hint}") from error
    if not isinstance(manifest, dict) or "kind" not in manifest:
        raise ArtifactError(f"{path / MANIFEST} names no kind; {hint}")
    return manifest


def _manifest(draft: Draft) -> dict[str, Any]:
    files = {
        str(file.relative_to(draft.path)): {"bytes": file.stat().st_size, "sha256": _sha256(file)}
        for file in sorted(draft.path.rglob("*"))
        if file.is_file()
    }
    body = {
        "kind": draft.kind,
        "stage": draft.stage,
        "sidgraft": sidgraft.__version__,
        "arguments": draft.arguments,
        "inputs": {name: artifact.digest for name, artifact in draft.inputs.items()},
        "files": files,
        "metadata": draft.metadata,
    }
    digest = hashlib.sha256(json.dumps(body, sort_keys=True, allow_nan=False).encode()).hexdigest()
    lineage: dict[str, dict[str, Any]] = {}
    for artifact in draft.inputs.values():
        lineage |= artifact.lineage
    about = {"versions": _versions(), "facts": draft.facts}  # not in the digest: the same result has the same name
    lineage[digest] = {k: body[k] for k in ("kind", "stage", "sidgraft", "arguments", "inputs")} | about
    return body | {"digest": digest, "versions": about["versions"], "lineage": lineage}


def _versions() -> dict[str, str]:
    """The versions of Python and of the packages in COMPUTING that this process has imported."""
    versions = {"python": platform.python_version()}
    for package, module in COMPUTING.items():
        if module in sys.modules:
            try:
                versions[package] = metadata.version(package)
            except metadata.PackageNotFoundError:  # built under another name, such as a vendor's wheel
                versions[package] = str(getattr(sys.modules[module], "__version__", "unknown"))
    return versions


def _write_manifest(directory: Path, manifest: dict[str, Any]) -> None:
    text = json.dumps(manifest, indent=1, ensure_ascii=False, allow_nan=False)
    (directory / MANIFEST).write_text(text + "\n", encoding="utf-8")


def _sha256(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _check_contract(path: Path, kind: str) -> None:
    if kind not in SCHEMAS:
        raise ArtifactError(f"unknown artifact kind {kind!r}; known: {', '.join(SCHEMAS)}")
    missing = [n for n in (*SCHEMAS[kind], *REQUIRED.get(kind, ())) if not (path / n).is_file()]
    if missing:
        raise ArtifactError(f"{path} is not a {kind} artifact: it lacks {', '.join(missing)}.")
    for name, schema in SCHEMAS[kind].items():
        _check_table(path / name, schema)
    for name, schema in OPTIONAL.get(kind, {}).items():
        if (path / name).is_file():
            _check_table(path / name, schema)


def _check_table(file: Path, expected: pa.Schema) -> None:
    """Compare names, types and nulls with the contract; nulls are read from the Parquet statistics."""
    parquet = pq.ParquetFile(file, **IN_PARTS)
    found = parquet.schema_arrow
    problems = []
    if found.names != expected.names:
        problems.append(f"columns are {found.names}, expected {expected.names}")
    else:
        for want in expected:
            have = found.field(want.name).type
            if not _same_type(have, want.type):
                problems.append(f"column {want.name} is {have}, expected {_type_name(want.type)}")
            elif not want.nullable and _has_nulls(parquet, want.name):
                problems.append(f"column {want.name} has nulls")
    if problems:
        raise ArtifactError(f"{file}: {'; '.join(problems)}.")


def _same_type(have: pa.DataType, want: pa.DataType) -> bool:
    if want == VECTOR:
        return pa.types.is_fixed_size_list(have) and have.value_type in (pa.float16(), pa.float32())
    if pa.types.is_list(want):
        return pa.types.is_list(have) and have.value_type == want.value_type
    return have == want


def _type_name(want: pa.DataType) -> str:
    return "fixed_size_list<float16 or float32>" if want == VECTOR else str(want)


def _has_nulls(parquet: pq.ParquetFile, column: str) -> bool:
    if parquet.schema_arrow.field(column).type in (pa.string(), pa.int32(), pa.int64(), pa.float64()):
        index = parquet.schema_arrow.names.index(column)
        groups = [parquet.metadata.row_group(g) for g in range(parquet.metadata.num_row_groups)]
        # Flat columns before this one occupy one Parquet column each only when none of them is a list of
        # structs, which no contract has.
        return any((s := g.column(index).statistics) is not None and (s.null_count or 0) > 0 for g in groups)
    return any(batch.column(0).null_count > 0 for batch in parquet.iter_batches(ROWS, columns=[column]))
