"""A small shop, made on the spot: 24 items bought one after the other in a ring, and everything up to its rows."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from sidgraft import artifacts
from sidgraft.stages.baselines import baselines
from sidgraft.stages.embed import embed
from sidgraft.stages.evaluate import evaluate
from sidgraft.stages.expand import expand
from sidgraft.stages.finetune import finetune
from sidgraft.stages.quantize import quantize

ITEMS = 24
USERS = 40
KINDS = ("Soap", "Comb", "Towel", "Brush")


def write_catalog(out: Path) -> str:
    rows = [
        {
            "item_id": f"i{i:02d}",
            "text": f"{KINDS[i % 4]} number {i} > Bath",
            "title": f"{KINDS[i % 4]} number {i}",
            "brand": None,
            "category": ["Bath", KINDS[i % 4]],
            "price": 1.0 + i,
            "description": None,
        }
        for i in range(ITEMS)
    ]
    with artifacts.create(out, "catalog/v1", stage="prepare", arguments={}) as draft:
        draft.write_table(
            "catalog.parquet", pa.Table.from_pylist(rows, artifacts.SCHEMAS["catalog/v1"]["catalog.parquet"])
        )
    return str(out)


def write_interactions(out: Path) -> str:
    """Each user walks the ring of items from a start of her own: the next item follows from the last."""
    rng = np.random.default_rng(0)
    rows = []
    for user in range(USERS):
        length = int(rng.integers(4, 9))
        items = [f"i{(user * 5 + step) % ITEMS:02d}" for step in range(length)]
        rows.append(
            {
                "user_id": f"u{user:02d}",
                "item_ids": items,
                "train_length": length - 2,
                "valid_position": length - 2,
                "test_position": length - 1,
            }
        )
    schema = artifacts.SCHEMAS["interactions/v1"]["interactions.parquet"]
    with artifacts.create(out, "interactions/v1", stage="prepare", arguments={}) as draft:
        draft.write_table("interactions.parquet", pa.Table.from_pylist(rows, schema))
    return str(out)


def _to_rows(made: dict[str, str]) -> None:
    """Embed, quantize and expand the catalog, each to its place in ``made``."""
    embed(made["catalog"], made["item_embeddings"], encoder="hashing", dtype="float32")
    quantize(made["item_embeddings"], made["semantic_ids"], levels=2, codebook_size=4, dedup_size=16, fit="lloyd")
    expand(
        made["semantic_ids"], made["catalog"], made["item_embeddings"], made["token_rows"],
        base_model="tiny", initialization="centroid",
    )  # fmt: skip


@pytest.fixture(scope="session")
def to_rows():
    """`_to_rows`, for tests with a shop of their own."""
    return _to_rows


@pytest.fixture(scope="session")
def shop(tmp_path_factory):
    """Directories of the artifacts up to the new rows: what ground, finetune and evaluate start from."""
    root = tmp_path_factory.mktemp("shop")
    made = {name: str(root / name) for name in ("item_embeddings", "semantic_ids", "token_rows")}
    made["catalog"] = write_catalog(root / "catalog")
    made["interactions"] = write_interactions(root / "interactions")
    _to_rows(made)
    made["baselines"] = str(root / "baselines")
    baselines(made["interactions"], made["catalog"], made["item_embeddings"], made["baselines"], sasrec_epochs=2)
    return made


def _train_and_judge(shop, root: Path, **settings) -> dict[str, str]:
    """A model fine-tuned on the shop and evaluated: what publish takes, by its parameters' names."""
    made = {name: str(root / name) for name in ("model", "recommendations", "metrics")}
    settings = {"learning_rate": 5e-3, "batch_size": 8, "patience": 99, "precision": "float32"} | settings
    inputs = {name: shop[name] for name in ("token_rows", "catalog", "semantic_ids", "interactions")}
    finetune(**inputs, out=made["model"], **settings)
    inputs = {name: shop[name] for name in ("semantic_ids", "interactions", "catalog", "baselines")}
    evaluate(
        model=made["model"], **inputs, out_recommendations=made["recommendations"], out_metrics=made["metrics"],
        precision="float32", bootstrap=100, ks="5,10",
    )  # fmt: skip
    return made | {name: shop[name] for name in ("semantic_ids", "interactions", "catalog")}


@pytest.fixture(scope="session")
def good(shop, tmp_path_factory):
    """A model that has learnt the ring."""
    return _train_and_judge(shop, tmp_path_factory.mktemp("good"), epochs=25)


@pytest.fixture(scope="session")
def bad(shop, tmp_path_factory):
    """A model that has learnt next to nothing."""
    return _train_and_judge(shop, tmp_path_factory.mktemp("bad"), epochs=1, learning_rate=1e-6)


@pytest.fixture(scope="session")
def train_and_judge():
    """`_train_and_judge`, for tests with a shop of their own."""
    return _train_and_judge
