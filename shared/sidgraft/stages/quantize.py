"""Quantize item embeddings into unique Semantic IDs. Run: sidgraft quantize --help."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from safetensors.numpy import save_file

from sidgraft import artifacts, quantizers
from sidgraft.checks import one_of, positive


def quantize(
    item_embeddings: str,
    out: str,
    *,
    levels: int = 3,
    codebook_size: int = 256,
    dedup_size: int = 256,
    fit: str = "minibatch",
    steps: int = 3000,
    batch_size: int = 2048,
    max_iterations: int = 100,
    dim: int = 0,
    reduction: str = "truncate",
    max_collision_rate: float = 1.0,
    min_utilisation: float = 0.0,
    seed: int = 0,
) -> dict[str, Any]:
    """Quantize the embeddings by residual k-means and give every item a unique Semantic ID.

    Args:
        item_embeddings: Directory of the item_embeddings artifact.
        out: Directory to write the semantic_ids artifact to.
        levels: Semantic levels L; one deduplication level is added after them.
        codebook_size: Codes per level, K.
        dedup_size: Codes of the deduplication level: the most items that may share all L codes.
        fit: minibatch (3000 steps of 2048, the Amazon setting) or lloyd (full batch to convergence).
        steps: Steps of mini-batch k-means per level.
        batch_size: Vectors in one of these steps.
        max_iterations: Upper limit on Lloyd iterations per level.
        dim: Reduce the vectors to at most this many dimensions first, so that centroids fit the language
            model's width; 0 keeps them as they are.
        reduction: truncate (the first dimensions, all where there are fewer: for Matryoshka encoders) or pca
            (for all others).
        max_collision_rate: Fail when a larger share of items shares its L codes with another item.
        min_utilisation: Fail when a level uses a smaller share of its codes.
        seed: Seed of the k-means start and of the mini-batches.
    """
    arguments = {name: value for name, value in locals().items() if name not in ("item_embeddings", "out")}
    one_of("fit", fit, ("minibatch", "lloyd"))
    one_of("reduction", reduction, ("truncate", "pca"))
    positive(
        levels=levels,
        codebook_size=codebook_size,
        dedup_size=dedup_size,
        steps=steps,
        batch_size=batch_size,
        max_iterations=max_iterations,
    )
    embeddings = artifacts.load(item_embeddings, "item_embeddings/v1")
    table = embeddings.read_table("embeddings.parquet")
    # Everything is computed in item_id order, so that the order of the input does not change any code.
    order_N = pc.sort_indices(table["item_id"]).to_numpy()
    item_ids = table["item_id"].take(order_N).combine_chunks()
    vectors_ND = _vectors(table)
    if not np.array_equal(order_N, np.arange(len(order_N))):
        vectors_ND = vectors_ND[order_N]
    _check(item_ids, vectors_ND, dim, reduction)

    width = min(dim or vectors_ND.shape[1], vectors_ND.shape[1])
    mean_D, components_Dd = quantizers.fit_pca(vectors_ND, dim) if dim and reduction == "pca" else (None, None)
    reduced_Nd = quantizers.reduce(vectors_ND, width, mean_D, components_Dd)
    settings = {"fit": fit, "steps": steps, "batch_size": batch_size, "max_iterations": max_iterations, "seed": seed}
    codebooks, codes_NL, lengths_NL = quantizers.fit_residual(reduced_Nd, [codebook_size] * levels, **settings)
    quantizer = quantizers.Quantizer(codebooks, [codebook_size] * levels + [dedup_size], mean_D, components_Dd)

    codes = quantizers.deduplicate(codes_NL, dedup_size)
    figures = quantizers.quality(codes, lengths_NL, quantizer.sizes)
    quantizers.check_quality(figures, max_collision_rate, min_utilisation)
    figures["neighbour_preservation"] = quantizers.neighbour_preservation(vectors_ND, codes_NL, seed)

    summary = _summary(figures, items=len(item_ids), dim=width)
    in_input_order = np.empty_like(codes)
    in_input_order[order_N] = codes
    with artifacts.create(
        out,
        "semantic_ids/v1",
        stage="quantize",
        arguments=arguments,
        inputs={"item_embeddings": embeddings},
    ) as draft:
        draft.write_table("semantic_ids.parquet", _table(table["item_id"], in_input_order))
        save_file(quantizer.tensors(), draft.path / quantizers.CODEBOOKS)
        draft.write_json(quantizers.DESCRIPTION, _description(quantizer, vectors_ND.shape[1], reduction, settings))
        draft.write_json("quality.json", figures)
        draft.metadata.update(summary)
    return summary


def _vectors(table: pa.Table) -> np.ndarray:
    column = table["embedding"].combine_chunks()
    return column.flatten().to_numpy(zero_copy_only=False).reshape(len(column), -1)


def _check(item_ids: pa.Array, vectors_ND: np.ndarray, dim: int, reduction: str) -> None:
    """Raise ValueError for repeated ids, vectors that are not finite, and more components than there are dimensions."""
    if len(item_ids) == 0:
        raise ValueError("item_embeddings has no items: run `sidgraft embed` on a catalog that has some.")
    repeated = len(item_ids) - pc.count_distinct(item_ids).as_py()
    if repeated:
        raise ValueError(f"item_embeddings repeats {repeated} item_ids: give every item one row.")
    bad = np.flatnonzero(~np.isfinite(vectors_ND).all(axis=1))
    if len(bad):
        raise ValueError(
            f"{len(bad)} embeddings hold NaN or infinity, such as that of item {item_ids[int(bad[0])].as_py()!r}:"
            " embed these items again."
        )
    if dim < 0:
        raise ValueError(f"dim={dim}, expected 0 (keep all) or more.")
    if reduction == "pca" and dim > vectors_ND.shape[1]:
        raise ValueError(
            f"dim={dim}, expected 0 (keep all) up to {vectors_ND.shape[1]}, the width of the embeddings, with"
            " reduction=pca."
        )


def _table(item_ids: pa.ChunkedArray, codes: np.ndarray) -> pa.Table:
    offsets = pa.array(np.arange(len(codes) + 1, dtype=np.int32) * codes.shape[1], pa.int32())
    lists = pa.ListArray.from_arrays(offsets, pa.array(codes.astype(np.int32).ravel()))
    return pa.table({"item_id": item_ids, "codes": lists})


def _description(
    quantizer: quantizers.Quantizer, input_dim: int, reduction: str, settings: dict[str, Any]
) -> dict[str, Any]:
    return {
        "method": "residual-kmeans",
        "levels": len(quantizer.codebooks),
        "sizes": quantizer.sizes,
        "input_dim": input_dim,
        "dim": quantizer.dim,
        "reduction": reduction if quantizer.dim < input_dim or quantizer.mean_D is not None else "none",
        "settings": settings,
        "seed": settings["seed"],
    }


def _summary(figures: dict[str, Any], *, items: int, dim: int) -> dict[str, Any]:
    rows = figures["levels"]
    summary = {"items": items, "dim": dim, **{k: v for k, v in figures.items() if k != "levels"}}
    for name in ("mse", "utilisation", "perplexity"):
        summary |= {f"{name}_level_{level}": row[name] for level, row in enumerate(rows)}
    return {k: round(v, 6) if isinstance(v, float) else v for k, v in summary.items()}
