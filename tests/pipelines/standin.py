"""A copy of the library whose stages write the smallest valid artifacts at once: for tests of the run itself.

Put the folder first in PYTHONPATH. The environment variable STANDIN says how a stage misbehaves:
`fail:STAGE` or `fail:STAGE:VALUE` (raise when a parameter has that value), `kill:STAGE`, `slow:STAGE`.
"""

import ast
import shutil
from pathlib import Path

import sidgraft
from sidgraft.signatures import TRAINING

STANDIN = """
import os, signal, time
import pyarrow as pa
from sidgraft import artifacts
from sidgraft.progress import Progress

WRITES = {
    "prepare": {"out_catalog": "catalog/v1", "out_interactions": "interactions/v1"},
    "embed": {"out": "item_embeddings/v1"}, "quantize": {"out": "semantic_ids/v1"},
    "baselines": {"out": "recommendations/v1"},
    "expand": {"out": "token_rows/v1"}, "ground": {"out": "token_rows/v1"}, "finetune": {"out": "model/v1"},
    "evaluate": {"out_recommendations": "recommendations/v1", "out_metrics": "metrics/v1"},
    "diagnose": {"out": "diagnostics/v1"}, "report": {"out": "report/v1"},
}
KINDS = {
    "catalog": "catalog/v1", "interactions": "interactions/v1", "item_embeddings": "item_embeddings/v1",
    "semantic_ids": "semantic_ids/v1", "token_rows": "token_rows/v1", "initial_rows": "token_rows/v1",
    "grounded_rows": "token_rows/v1", "model": "model/v1",
    "baselines": "recommendations/v1",
}


def run(stage, given):
    how, _, rest = os.environ.get("STANDIN", "").partition(":")
    target, _, value = rest.partition(":")
    inputs = {}
    for name, kind in KINDS.items():
        if stage != "prepare" and name in given:
            inputs[name] = artifacts.load(given[name], kind)
    if stage == target and (not value or value in map(str, given.values())
                            or any(value in map(str, a.arguments.values()) for a in inputs.values())):
        if how == "fail":
            raise ValueError(f"{stage} does not like this")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "slow":
            with Progress("slow work", 600, "steps") as progress:
                for _ in range(600):
                    time.sleep(0.1)
                    progress.update()
    settings = {k: v for k, v in given.items() if isinstance(v, (int, float, str)) and "/" not in str(v)}
    for name, kind in WRITES[stage].items():
        with artifacts.create(given[name], kind, stage=stage, arguments=settings, inputs=inputs) as draft:
            schemas = dict(artifacts.SCHEMAS[kind])
            if stage == "report":
                schemas["metrics.parquet"] = artifacts.SCHEMAS["metrics/v1"]["metrics.parquet"]
            for file, schema in schemas.items():
                draft.write_table(file, table(schema, given))
            for file in artifacts.REQUIRED.get(kind, ()):
                if file not in schemas:
                    (draft.path / file).write_text(f"{stage} {sorted(settings.items())}")
    return {"items": 3, "rate": 0.25}


def table(schema, given):
    rows = []
    recommenders = ["model", "popularity", "neighbours", "co-occurrence", "sasrec"]
    recommenders = recommenders if "recommender" in schema.names else [""]
    for recommender in recommenders:
        row = {}
        for field in schema:
            if pa.types.is_fixed_size_list(field.type):
                row[field.name] = [0.5]
            elif pa.types.is_list(field.type):
                row[field.name] = []
            elif field.type == pa.string():
                row[field.name] = "a"
            else:
                row[field.name] = 1
        known = {"recommender": recommender, "metric": "recall", "slice": "all", "k": 10, "value": 0.125,
                 "variant": given.get("variant") or "model"}
        rows.append({k: known.get(k, v) for k, v in row.items()})
    return pa.Table.from_pylist(rows, schema=schema)
"""


def write(folder: Path) -> None:
    """Write the package `sidgraft` with stand-in stages into ``folder``."""
    package = folder / "sidgraft"
    shutil.copytree(Path(sidgraft.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    (package / "standin.py").write_text(STANDIN)
    for stage in TRAINING:
        file = package / "stages" / f"{stage}.py"
        tree = ast.parse(file.read_text(encoding="utf-8"))
        function = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == stage)
        body = ast.parse(f"given = dict(locals())\nfrom sidgraft import standin\nreturn standin.run({stage!r}, given)")
        function.body = [function.body[0], *body.body]
        header = ast.parse("from __future__ import annotations\nfrom typing import Any")
        file.write_text(ast.unparse(ast.Module([*header.body, function], [])))
