"""Decode recommendations under the trie of the catalog and measure them. Run: sidgraft evaluate --help."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from sidgraft import artifacts, baselines, checks, metrics
from sidgraft.attention import use_packed_attention
from sidgraft.beam import decode
from sidgraft.embeddings import vectors_array
from sidgraft.histories import training_counts
from sidgraft.models import load_model
from sidgraft.progress import say
from sidgraft.prompts import NextItem
from sidgraft.sequences import check_same_items, read_sequences
from sidgraft.sids import codes_array
from sidgraft.training import DTYPES
from sidgraft.trie import build_trie


def evaluate(
    model: str,
    semantic_ids: str,
    interactions: str,
    catalog: str,
    item_embeddings: str,
    out_recommendations: str,
    out_metrics: str,
    *,
    split: str = "test",
    ks: str = "5,10,20,50,100",
    beams: int = 10,
    score: str = "exact",
    users: int = 0,
    exclude_history: bool = False,
    batch_tokens: int = 8192,
    precision: str = "bfloat16",
    bootstrap: int = 1000,
    variant: str = "",
    seed: int = 0,
) -> dict[str, Any]:
    """Recommend for every user by trie-constrained beam search and compare with the baselines.

    Args:
        model: Directory of the model artifact.
        semantic_ids: Directory of the semantic_ids artifact.
        interactions: Directory of the interactions artifact.
        catalog: Directory of the catalog artifact.
        item_embeddings: Directory of the item_embeddings artifact, for the nearest-neighbour baseline.
        out_recommendations: Directory to write the recommendations artifact to.
        out_metrics: Directory to write the metrics artifact to.
        split: test or valid: which target is predicted, from the history before it.
        ks: Cut-offs, comma-separated; those above the number of beams are left out.
        beams: Beams of the search.
        score: exact (log-softmax over the whole vocabulary) or restricted (over the valid children).
        users: Evaluate a sample of this many users, the same in every run on the same data; 0 takes all.
        exclude_history: Leave the items of the history out, for the model and the baselines alike.
        batch_tokens: Prompt tokens in a decoding batch.
        precision: bfloat16 or float32.
        bootstrap: Bootstrap samples over users for the 95 % intervals.
        variant: Name of this variant in the tables.
        seed: Seed of the run, shown in the tables; also draws the bootstrap.
    """
    checks.one_of("split", split, ("test", "valid"))
    checks.one_of("score", score, ("exact", "restricted"))
    dtype = DTYPES[checks.one_of("precision", precision, DTYPES)]
    checks.positive(beams=beams, batch_tokens=batch_tokens)
    checks.not_negative(users=users, bootstrap=bootstrap)
    cut_offs = _cut_offs(ks, beams)
    settings = {
        "split": split,
        "ks": ks,
        "beams": beams,
        "score": score,
        "users": users,
        "exclude_history": exclude_history,
        "batch_tokens": batch_tokens,
        "precision": precision,
        "bootstrap": bootstrap,
        "variant": variant,
        "seed": seed,
    }
    inputs = {
        "model": artifacts.load(model, "model/v1"),
        "semantic_ids": artifacts.load(semantic_ids, "semantic_ids/v1"),
        "interactions": artifacts.load(interactions, "interactions/v1"),
        "catalog": artifacts.load(catalog, "catalog/v1"),
        "item_embeddings": artifacts.load(item_embeddings, "item_embeddings/v1"),
    }
    items = inputs["semantic_ids"].read_table("semantic_ids.parquet")
    vectors = inputs["item_embeddings"].read_table("embeddings.parquet")
    check_same_items(inputs["catalog"].read_table("catalog.parquet", ["item_id"]), items)
    check_same_items(vectors, items)
    item_ids = items["item_id"].to_pylist()
    sequences = read_sequences(inputs["interactions"], item_ids)
    count_N = training_counts(inputs["interactions"].read_table("interactions.parquet"), item_ids)

    chosen = sequences.users_with(split, users)
    if not len(chosen):
        raise ValueError(f"no user has a {split} target: give longer histories, or another split.")
    histories = [sequences.history(user, split) for user in chosen]
    target_U = np.asarray([sequences.target(user, split) for user in chosen])
    excluded = [np.unique(h) if exclude_history else h[:0] for h in histories]
    width = beams + max(map(len, excluded))  # so that enough are left when the excluded are taken out

    language_model, tokenizer, vocabulary = load_model(inputs["model"], dtype)
    language_model.eval()
    use_packed_attention(language_model)
    codes_NL = codes_array(items)
    tokens_NS = vocabulary.item_tokens(codes_NL)
    prompts = NextItem(tokenizer, vocabulary, _max_length(inputs["model"]))
    found = decode(
        language_model,
        build_trie(codes_NL),
        vocabulary,
        [prompts.prompt(tokens_NS[history]) for history in histories],
        beams=width,
        score=score,
        batch_tokens=batch_tokens,
        targets=target_U,
        what="evaluate",
    )
    recommended = {
        "model": _leave_out(found.items_UG, found.scores_UG, excluded, beams),
        "popularity": baselines.popularity(count_N, excluded, beams),
        "neighbours": baselines.neighbours(vectors_array(vectors), histories, excluded, beams),
    }

    member = metrics.slices(count_N, target_U)
    rows = []
    for name, (items_UG, _) in recommended.items():
        figures = metrics.metric_rows(
            metrics.ranks(items_UG, target_U),
            found.kept_UL if name == "model" else None,
            member,
            cut_offs,
            beams=width,
            bootstrap=bootstrap,
            seed=seed,
        )
        rows += [(variant, seed, name, *figure) for figure in figures]
    user_ids = [sequences.user_ids[user] for user in chosen]
    summary = (
        _summary(rows, cut_offs) | {"users": len(chosen)} | {f"{k}_users": int(v.sum()) for k, v in member.items()}
    )
    trained = inputs["model"].metadata
    summary |= {key: trained[key] for key in ("t_star", "best_epoch") if key in trained}
    with artifacts.create(
        out_recommendations, "recommendations/v1", stage="evaluate", arguments=settings, inputs=inputs
    ) as draft:
        draft.write_table("recommendations.parquet", _recommendations(recommended, user_ids, target_U, item_ids))
        draft.metadata.update(users=len(chosen), variant=variant, seed=seed)
        draft.seal()  # before the metrics, so that a failure in either leaves neither
        with artifacts.create(out_metrics, "metrics/v1", stage="evaluate", arguments=settings, inputs=inputs) as draft:
            schema = artifacts.SCHEMAS["metrics/v1"]["metrics.parquet"]
            columns = zip(*rows, strict=True)
            draft.write_table(
                "metrics.parquet", pa.table([pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema)
            )
            draft.metadata.update(
                summary | {"split": split, "beams": beams, "score": score, "variant": variant, "seed": seed}
            )
    return summary


def _cut_offs(ks: str, beams: int) -> list[int]:
    wanted = checks.whole_numbers("ks", ks)
    usable = [k for k in wanted if 0 < k <= beams]
    if not usable:
        raise ValueError(f"ks is {ks!r}, but there are {beams} beams: give a cut-off of at most that, or more beams.")
    if usable != wanted:
        left_out = ", ".join(str(k) for k in wanted if k not in usable)
        say(f"evaluate: with {beams} beams the cut-offs {left_out} are left out; give more beams for them.")
    return usable


def _max_length(model: artifacts.Artifact) -> int:
    """The length that the model was trained with."""
    return int(model.arguments["max_length"])


def _leave_out(
    items_UG: np.ndarray, scores_UG: np.ndarray, excluded: list[np.ndarray], beams: int
) -> tuple[np.ndarray, np.ndarray]:
    """Take excluded items out and move the others up; keep ``beams`` places."""
    is_out_UG = np.stack([np.isin(row, out) for row, out in zip(items_UG, excluded, strict=True)])
    order_UG = np.argsort(is_out_UG, axis=1, kind="stable")[:, :beams]
    is_out_UG = np.take_along_axis(is_out_UG, order_UG, axis=1)
    items = np.where(is_out_UG, -1, np.take_along_axis(items_UG, order_UG, axis=1))
    return items, np.where(is_out_UG, -np.inf, np.take_along_axis(scores_UG, order_UG, axis=1))


def _recommendations(
    recommended: dict[str, tuple[np.ndarray, np.ndarray]],
    user_ids: list[str],
    target_U: np.ndarray,
    item_ids: list[str],
) -> pa.Table:
    names = np.asarray(item_ids, dtype=object)
    columns: dict[str, list[Any]] = {name: [] for name in ("recommender", "user_id", "target_id", "item_ids", "scores")}
    for recommender, (items_UG, scores_UG) in recommended.items():
        columns["recommender"] += [recommender] * len(user_ids)
        columns["user_id"] += user_ids
        columns["target_id"] += list(names[target_U])
        columns["item_ids"] += [list(names[row[row >= 0]]) for row in items_UG]
        columns["scores"] += [scores[row >= 0] for row, scores in zip(items_UG, scores_UG, strict=True)]
    schema = artifacts.SCHEMAS["recommendations/v1"]["recommendations.parquet"]
    return pa.table([pa.array(columns[f.name], f.type) for f in schema], schema)


def _summary(rows: list[tuple[Any, ...]], cut_offs: list[int]) -> dict[str, Any]:
    """Recall and NDCG over all users at 10, or at the nearest cut-off, for each recommender."""
    k_shown = min(cut_offs, key=lambda k: abs(k - 10))
    return {
        f"{recommender}_{metric}@{k}": value
        for _, _, recommender, name, metric, k, value, _, _ in rows
        if name == "all" and metric in ("recall", "ndcg") and k == k_shown
    }
