"""What the pipeline adds to its stages' own work. Run: python benchmarks/pipeline.py [--quick] [--json].

The preset quickstart for 200 users (with --quick the preset smoke) by `python -m pipelines run`, against the same
stages called one after the other in this process, their imports not counted. Beside what the run adds stand (not with
--quick) the imports that it may consist of, each timed in new processes: of the command, of the worker with kfp, and of
all stages, in one process and in one each. And the bytes of all artifacts before fine-tuning, against a pipeline whose
expand and ground hand on the whole checkpoint.
"""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from measure import bandwidth_roof, options, report

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pipelines.inputs import ENCODED, JUDGED  # noqa: E402
from pipelines.settings import read_settings  # noqa: E402
from sidgraft.signatures import TRAINING, signature  # noqa: E402

# Where each stage's artifacts lie, by the name of its parameter.
OUTPUTS = {
    "prepare": {"out_catalog": "catalog", "out_interactions": "interactions"},
    "embed": {"out": "item_embeddings"},
    "quantize": {"out": "semantic_ids"},
    "baselines": {"out": "baselines"},
    "expand": {"out": "initial_rows"},
    "ground": {"out": "grounded_rows"},
    "finetune": {"out": "model"},
    "evaluate": {"out_recommendations": "recommendations", "out_metrics": "metrics"},
    "diagnose": {"out": "diagnostics"},
    "report": {"out": "report"},
}
TOKEN_ROWS = {"ground": "initial_rows", "finetune": "grounded_rows"}
# Settings of other stages that the graph also gives to baselines, so that they judge the same users alike.
SHARED = dict.fromkeys(JUDGED, "evaluate") | dict.fromkeys(ENCODED, "embed")
BEFORE = (
    "catalog", "interactions", "item_embeddings", "semantic_ids", "baselines", "initial_rows", "grounded_rows",
)  # fmt: skip


def main() -> None:
    args = options(__doc__)
    preset, changes = ("smoke", []) if args.quick else ("quickstart", ["prepare_max_users=200"])
    parameters = read_settings(preset, changes).parameters
    stages = {name: getattr(importlib.import_module(f"sidgraft.stages.{name}"), name) for name in TRAINING}
    with tempfile.TemporaryDirectory() as folder:
        artifacts = Path(folder) / "artifacts"
        seconds = {name: timed(lambda n=name: stages[n](**arguments(n, parameters, artifacts))) for name in TRAINING}
        command = [sys.executable, "-m", "pipelines", "run", "--preset", preset, "--root", str(Path(folder) / "run")]
        for change in changes:
            command += ["--set", change]
        wall = timed(lambda: subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL))
        ours = sum(size(artifacts / name) for name in BEFORE)
        checkpoint = sum(file.stat().st_size for file in (artifacts / "model").rglob("*.safetensors"))
        wrote = {path.name for path in artifacts.iterdir()} == {n for out in OUTPUTS.values() for n in out.values()}
        (found,) = (Path(folder) / "run" / "artifacts").rglob("out_recommendations/recommendations.parquet")
        same = pq.read_table(found).equals(pq.read_table(artifacts / "recommendations" / "recommendations.parquet"))
    compute = sum(seconds.values())
    added = {"what the run adds": wall - compute} | ({} if args.quick else imports())
    alone = {f"{name}, alone": value for name, value in seconds.items()}
    report(
        args,
        "pipeline",
        {
            "the stages' own work, times 1.15": (1.15 * compute / wall, 1),
            "whole checkpoints handed on, in bytes": ((ours + 2 * checkpoint) / ours, 20),
        },
        equal={"all stages wrote their artifacts": wrote, "same recommendations": same},
        roof={"seconds to read those bytes at memory speed": ours / bandwidth_roof()},
        seconds=alone | {"all, alone": compute, "pipeline": wall} | added,
        about=f"preset {preset} {' '.join(changes)}".strip(),
    )


def arguments(stage: str, parameters: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A stage's arguments: directories by name, settings of the preset under the stage's prefix."""
    outputs, known = OUTPUTS[stage], {p.name: p for p in signature(stage).parameters}
    found: dict[str, Any] = {}
    for name, parameter in known.items():
        owner = SHARED.get(name, stage) if stage == "baselines" else stage
        given = f"{owner}_{name}"
        if stage == "prepare" and name in ("catalog", "interactions"):
            found[name] = parameters[name]
        elif parameter.required:
            place = str(folder / outputs.get(name, TOKEN_ROWS.get(stage, name) if name == "token_rows" else name))
            found[name] = [place] if parameter.type == "list[str]" else place
        elif given in parameters:
            found[name] = parameters[given]
        elif name == "variant" and "variant" in parameters:
            found[name] = parameters["variant"]
    return found


def imports() -> dict[str, float]:
    """Seconds of the imports that a run may consist of, each in new processes."""
    stages = [f"sidgraft.stages.{name}" for name in TRAINING]
    return {
        "import of the command": timed(lambda: new_process("pipelines.__main__")),
        "import of the worker": timed(lambda: new_process("pipelines.worker")),
        "import of all stages in one process": timed(lambda: new_process(*stages)),
        "imports of the stages, a process each": sum(timed(lambda m=m: new_process(m)) for m in stages),
    }


def new_process(*modules: str) -> None:
    """Import modules in a process of their own."""
    subprocess.run([sys.executable, "-c", f"import {', '.join(modules)}"], cwd=ROOT, check=True)


def timed(run: Any) -> float:
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def size(folder: Path) -> int:
    return sum(os.path.getsize(file) for file in folder.rglob("*") if file.is_file())


if __name__ == "__main__":
    main()
