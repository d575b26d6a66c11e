"""Quantize item embeddings into unique Semantic IDs. Run: sidgraft quantize --help.

Shapes: N items · L semantic levels · D width of the embeddings · d of what is quantized · K codes of a level ·
B items of a batch · M items that neighbours are looked for among · C width of an RQ-VAE's codes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from safetensors.numpy import save_file

from sidgraft import artifacts, continuity, quality, quantizers, residual, rqvae
from sidgraft.bundles import Bundle, open_version
from sidgraft.checks import not_negative, one_of, positive, widths
from sidgraft.continuity import Issued
from sidgraft.devices import device
from sidgraft.embeddings import in_item_order
from sidgraft.quantizers import Quantizer
from sidgraft.vectors import Vectors, sample_rows

FITS = {  # by method
    "residual-kmeans": ("minibatch", "balanced", "lloyd", "sampled"),
    "rq-vae": ("minibatch", "balanced"),
}
REDUCTIONS = ("truncate", "pca")
RQ_VAE = (  # settings of its fit alone
    "code_dim", "hidden", "dropout", "learning_rate", "commitment", "diversity", "batch_size", "epochs", "patience",
    "tolerance",
)  # fmt: skip


def quantize(
    item_embeddings: str,
    out: str,
    *,
    method: str = "residual-kmeans",
    levels: int = 3,
    codebook_size: int = 256,
    codebook_sizes: str = "",
    dedup_size: int = 256,
    fit: str = "minibatch",
    steps: int = 3000,
    batch_size: int = 2048,
    max_iterations: int = 100,
    dim: int = 0,
    reduction: str = "truncate",
    code_dim: int = 32,
    hidden: str = "1024,512,256",
    dropout: float = 0.1,
    learning_rate: float = 0.001,
    commitment: float = 0.25,
    diversity: float = 0.01,
    epochs: int = 20000,
    patience: int = 10,
    tolerance: float = 0.005,
    max_collision_rate: float = 1.0,
    min_utilisation: float = 0.0,
    seed: int = 0,
    previous: str = "",
) -> dict[str, Any]:
    """Quantize the embeddings by residual k-means or an RQ-VAE and give every item a unique Semantic ID.

    The embeddings are read in batches. With fit=sampled memory holds 256 vectors a code, whatever the catalog, and
    under 200 bytes an item for ids, codes and figures; the other fits hold all vectors once as float32, an RQ-VAE up to
    four times. PCA is fitted to, and neighbours are looked for among, at most 50,000 items, drawn by the seed. An
    RQ-VAE trains on the GPU where there is one; codes are computed on the CPU, exactly.

    Args:
        item_embeddings: Directory of the item_embeddings artifact.
        out: Directory to write the semantic_ids artifact to.
        method: residual-kmeans or rq-vae.
        levels: Semantic levels L; one deduplication level is added after them.
        codebook_size: Codes per level, K.
        codebook_sizes: Codes of each level, such as 512,256,256, in place of levels and codebook_size; empty
            takes those.
        dedup_size: Codes of the deduplication level: the most items that may share all L codes.
        fit: minibatch (3000 steps of 2048, the Amazon setting), lloyd (full batch to convergence; not for rq-vae),
            sampled (full batches of a sample that grows to 256 vectors a code: the quickest; not for rq-vae) or
            balanced (mini-batches, assigned to the codes in equal shares by Sinkhorn-Knopp).
        steps: Steps of mini-batch k-means per level.
        batch_size: Vectors in one of these steps, and in a step of the RQ-VAE.
        max_iterations: Upper limit on the iterations of lloyd per level, and of sampled per sample.
        dim: Reduce the vectors to at most this many dimensions first, so that centroids fit the language
            model's width; 0 keeps them as they are.
        reduction: truncate (the first dimensions, all where there are fewer: for Matryoshka encoders) or pca
            (for all others).
        code_dim: Width of the RQ-VAE's codes.
        hidden: Widths of the RQ-VAE's hidden layers, from the vectors to the codes; the decoder mirrors them.
        dropout: Dropout after each hidden layer of the RQ-VAE.
        learning_rate: Learning rate of the RQ-VAE (Adam).
        commitment: Weight of the RQ-VAE's commitment loss.
        diversity: Weight of the RQ-VAE's diversity loss, which is least where a batch uses all codes equally.
        epochs: Upper limit on the RQ-VAE's epochs.
        patience: Stop the RQ-VAE after so many measurements (one in 100 steps, or in an epoch where that is more)
            without a better error on held-out items.
        tolerance: Relative improvement of that error that counts as better.
        max_collision_rate: Fail when a larger share of items shares its L codes with another item.
        min_utilisation: Fail when a level uses a smaller share of its codes.
        seed: Seed of the start and of the mini-batches.
        previous: A published version, such as BUNDLES/versions/v-0123456789ab (local or s3://), whose codes lend their
            numbers to the new ones that hold most of the same items, so that tokens keep their meaning; empty for none.
    """
    arguments = {name: value for name, value in locals().items() if name not in ("item_embeddings", "out", "previous")}
    one_of("fit", fit, FITS[one_of("method", method, FITS)])
    one_of("reduction", reduction, REDUCTIONS)
    positive(
        levels=levels,
        codebook_size=codebook_size,
        dedup_size=dedup_size,
        steps=steps,
        batch_size=batch_size,
        max_iterations=max_iterations,
        code_dim=code_dim,
        learning_rate=learning_rate,
        epochs=epochs,
        patience=patience,
    )
    not_negative(dropout=dropout, commitment=commitment, diversity=diversity, tolerance=tolerance)
    sizes = widths("codebook_sizes", codebook_sizes) if codebook_sizes else [codebook_size] * levels
    layers = widths("hidden", hidden)
    if dropout >= 1:
        raise ValueError(f"dropout={dropout}, expected less than 1.")
    last = _last(previous, sizes) if previous else None
    arguments["previous"] = last.version if last else ""
    embeddings = artifacts.load(item_embeddings, "item_embeddings/v1")
    # Everything is computed in item_id order, so that the order of the input does not change any code.
    item_ids, rows_N, vectors = in_item_order(embeddings)
    _check(item_ids, vectors, dim, reduction)

    width = min(dim or vectors.width, vectors.width)
    mean_D, components_Dd = None, None
    if dim and reduction == "pca":
        pca_rows = sample_rows(vectors.items, quantizers.PCA_ITEMS, seed)
        mean_D, components_Dd = quantizers.fit_pca(vectors.take(pca_rows), dim)
    reduced = vectors.changed(partial(quantizers.reduce, dim=width, mean_D=mean_D, components_Dd=components_Dd), width)
    settings: dict[str, Any]
    if method == "residual-kmeans":
        settings = {"fit": fit, "steps": steps, "batch_size": batch_size, "max_iterations": max_iterations}
        codebooks, codes_NL, lengths_NL = residual.fit_residual(reduced, sizes, **settings, seed=seed)
        mean_lengths, curves = lengths_NL.mean(axis=0), {}
        quantizer = Quantizer(codebooks, [*sizes, dedup_size], mean_D, components_Dd, mean_lengths=mean_lengths)
    else:
        settings = {"balanced": fit == "balanced"} | {name: arguments[name] for name in RQ_VAE} | {"hidden": layers}
        reduced_Nd = reduced.take(np.arange(reduced.items))
        network, curves = rqvae.fit(reduced_Nd, sizes, **settings, seed=seed, device=device())
        codes_NL, lengths_NM = network.encode(reduced_Nd)
        lengths_NL = rqvae.relative_lengths(lengths_NM)
        codebooks = [book_KC.detach().numpy() for book_KC in network.codebooks]
        means, counts = quantizers.item_means(reduced_Nd, codes_NL, sizes)
        quantizer = Quantizer(codebooks, [*sizes, dedup_size], mean_D, components_Dd, network, means, counts)

    goes_on: dict[str, Any] = {}
    if last:
        numbers, goes_on = _numbers(last, item_ids.to_pylist(), codes_NL, sizes)
        quantizer = quantizer.renumbered(numbers)
        codes_NL = np.stack([number_K[codes_NL[:, level]] for level, number_K in enumerate(numbers)], axis=1)
    codes = quantizers.deduplicate(codes_NL, dedup_size)
    at_fit = _errors(reduced, quantizer, codes_NL)
    kept = _neighbours_kept(vectors, quantizer, codes_NL, seed)
    figures = quality.quality(codes, lengths_NL, quantizer.sizes, at_fit["relative_squared_error"], kept)
    at_fit["collision_rate"] = figures["collision_rate"]
    quality.check_quality(figures, max_collision_rate, min_utilisation)

    summary = quality.summary(figures, items=len(item_ids), dim=width)
    for level, kept_K in enumerate(goes_on.get("kept", [])):
        summary[f"kept_codes_level_{level}"] = sum(kept_K)
    with artifacts.create(
        out,
        "semantic_ids/v1",
        stage="quantize",
        arguments=arguments,
        inputs={"item_embeddings": embeddings},
    ) as draft:
        draft.write_table("semantic_ids.parquet", _table(item_ids.take(rows_N), codes[rows_N]))
        save_file(quantizer.tensors(), draft.path / quantizers.CODEBOOKS)
        draft.write_json(
            quantizers.DESCRIPTION,
            _description(method, quantizer, vectors.width, reduction, {**settings, "seed": seed}, at_fit),
        )
        draft.write_json("quality.json", figures | {"definitions": quality.DEFINITIONS})
        if curves:
            draft.write_json("training.json", curves)
        if last:
            draft.write_json(continuity.FILE, goes_on)
        draft.metadata.update(summary)
    return summary


def _last(previous: str, sizes: list[int]) -> Bundle:
    """The version to go on from. Raises ValueError where its semantic levels are others."""
    bundle = open_version(previous)
    found = bundle.part("semantic_ids").read_json(quantizers.DESCRIPTION)["sizes"][:-1]
    if found != sizes:
        raise ValueError(
            f"{bundle.version} has the codes {found} in its semantic levels, these settings ask for {sizes}: give"
            " quantize the same levels and codebook sizes, or go on from no version (previous empty; retrain with"
            " watch_force=anew)."
        )
    return bundle


def _numbers(
    last: Bundle, item_ids: list[str], codes_NL: np.ndarray, sizes: list[int]
) -> tuple[list[np.ndarray], dict[str, Any]]:
    """For each level the numbers [K] of the new codes, and what `continuity.FILE` says of them, by these numbers."""
    current = Issued.read(last.part("semantic_ids")).current()
    rows = [row for row, item in enumerate(item_ids) if item in current]
    old_NL = np.asarray([current[item_ids[row]] for row in rows], np.int64).reshape(len(rows), len(sizes) + 1)
    numbers, overlaps = [], []
    for level, size in enumerate(sizes):
        number_K, overlap_K = continuity.matched(old_NL[:, level], codes_NL[rows, level], size)
        numbers.append(number_K)
        overlaps.append(overlap_K[np.argsort(number_K)])
    kept = [(overlap_K >= continuity.LEAST_OVERLAP).tolist() for overlap_K in overlaps]
    rounded = [overlap_K.round(6).tolist() for overlap_K in overlaps]
    return numbers, {"version": last.version, "kept": kept, "overlap": rounded}


def _check(item_ids: pa.Array, vectors: Vectors, dim: int, reduction: str) -> None:
    """Raise ValueError for repeated ids, more components than there are dimensions, and vectors that are not finite."""
    if len(item_ids) == 0:
        raise ValueError("item_embeddings has no items: run `sidgraft embed` on a catalog that has some.")
    repeated = len(item_ids) - pc.count_distinct(item_ids).as_py()
    if repeated:
        raise ValueError(f"item_embeddings repeats {repeated} item_ids: give every item one row.")
    if dim < 0:
        raise ValueError(f"dim={dim}, expected 0 (keep all) or more.")
    if reduction == "pca" and dim > vectors.width:
        raise ValueError(
            f"dim={dim}, expected 0 (keep all) up to {vectors.width}, the width of the embeddings, with reduction=pca."
        )
    bad = np.concatenate([rows_B[~np.isfinite(batch_BD).all(axis=1)] for rows_B, batch_BD in vectors.batches()])
    if len(bad):
        raise ValueError(
            f"{len(bad)} embeddings hold NaN or infinity, such as that of item {item_ids[int(bad.min())].as_py()!r}:"
            " embed these items again."
        )


def _errors(reduced: Vectors, quantizer: Quantizer, codes_NL: np.ndarray) -> dict[str, float]:
    """`quality.relative_squared_error` and `quality.first_code_error` in one pass, summed in item_id order."""
    errors_N2 = np.empty((reduced.items, 2))
    for rows_B, reduced_Bd in reduced.batches():
        codes_BL = codes_NL[rows_B]
        errors_N2[rows_B, 0] = quality.squared_errors(reduced_Bd, quantizer.decode(codes_BL))
        errors_N2[rows_B, 1] = quality.squared_errors(reduced_Bd, quantizer.centroids[0][codes_BL[:, 0]])
    relative, first = errors_N2.mean(axis=0).tolist()
    return {"relative_squared_error": relative, "first_code_error": first}


def _neighbours_kept(
    vectors: Vectors, quantizer: Quantizer, codes_NL: np.ndarray, seed: int
) -> tuple[float, list[float]]:
    """`quality.neighbours_kept`, of which only the vectors that it looks among are read."""
    rows_M = quality.among(vectors.items, seed)
    vectors_MD, codes_ML = vectors.take(rows_M), codes_NL[rows_M]
    decoded_Md = quantizer.decode(codes_ML)
    return quality.neighbours_kept(vectors_MD, quantizer.reduced(vectors_MD), decoded_Md, codes_ML, seed)


def _table(item_ids: pa.Array, codes: np.ndarray) -> pa.Table:
    offsets = pa.array(np.arange(len(codes) + 1, dtype=np.int32) * codes.shape[1], pa.int32())
    lists = pa.ListArray.from_arrays(offsets, pa.array(codes.astype(np.int32).ravel()))
    return pa.table({"item_id": item_ids, "codes": lists})


def _description(
    method: str,
    quantizer: Quantizer,
    input_dim: int,
    reduction: str,
    settings: dict[str, Any],
    at_fit: dict[str, float],
) -> dict[str, Any]:
    return {
        "method": method,
        "levels": len(quantizer.codebooks),
        "sizes": quantizer.sizes,
        "input_dim": input_dim,
        "dim": quantizer.dim,
        "reduction": reduction if quantizer.dim < input_dim or quantizer.mean_D is not None else "none",
        "settings": settings,
        "at_fit": at_fit,
    }
