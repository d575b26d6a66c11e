"""Decode recommendations under the trie of the catalog and measure them. Run: sidgraft evaluate --help."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa

from sidgraft import artifacts, checks, metrics, recommendations
from sidgraft.attention import use_packed_attention
from sidgraft.beam import decode
from sidgraft.histories import training_counts
from sidgraft.models import load_model
from sidgraft.precisions import DTYPES
from sidgraft.progress import say
from sidgraft.prompts import NextItem, QueryItem
from sidgraft.queries import read_queries
from sidgraft.sequences import check_same_items, read_sequences
from sidgraft.sids import codes_array
from sidgraft.trie import build_trie

# Settings that the baselines were made with and that must be those of the model.
MUST_AGREE = ("split", "users", "exclude_history")


def evaluate(
    model: str,
    semantic_ids: str,
    interactions: str,
    catalog: str,
    baselines: str,
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
    """Recommend for every user, or query, by trie-constrained beam search and measure it and the baselines alike.

    A user has one target: recall and NDCG, by its popularity. A query has graded candidates: Precision strict (good)
    and lenient (good and maybe) and composite NDCG (gains 2, 1, 0).

    Args:
        model: Directory of the model artifact.
        semantic_ids: Directory of the semantic_ids artifact.
        interactions: Directory of the interactions artifact.
        catalog: Directory of the catalog artifact.
        baselines: Directory of the recommendations of `sidgraft baselines` for the same split, users and exclusion.
        out_recommendations: Directory to write the recommendations artifact to.
        out_metrics: Directory to write the metrics artifact to.
        split: test or valid: which target is predicted, from the history before it.
        ks: Cut-offs, comma-separated; those above the number of beams are left out.
        beams: Beams of the search.
        score: exact (log-softmax over the whole vocabulary) or restricted (over the valid children).
        users: Evaluate a sample of this many users, or queries, the same in every run on the same data; 0 takes all.
        exclude_history: Leave the items of the history out; the baselines must have done the same.
        batch_tokens: Prompt tokens in a decoding batch.
        precision: bfloat16 or float32.
        bootstrap: Bootstrap samples over users for the 95 % intervals.
        variant: Name of this variant in the tables.
        seed: Seed of the run, shown in the tables; also draws the bootstrap.
    """
    settings = {
        name: value
        for name, value in locals().items()
        if name
        not in ("model", "semantic_ids", "interactions", "catalog", "baselines", "out_recommendations", "out_metrics")
    }
    checks.one_of("split", split, ("test", "valid"))
    checks.one_of("score", score, ("exact", "restricted"))
    dtype = DTYPES[checks.one_of("precision", precision, DTYPES)]
    checks.positive(beams=beams, batch_tokens=batch_tokens)
    checks.not_negative(users=users, bootstrap=bootstrap)
    cut_offs = _cut_offs(ks, beams)
    inputs = {
        "model": artifacts.load(model, "model/v1"),
        "semantic_ids": artifacts.load(semantic_ids, "semantic_ids/v1"),
        "interactions": artifacts.load(interactions, "interactions/v1"),
        "catalog": artifacts.load(catalog, "catalog/v1"),
        "baselines": artifacts.load(baselines, "recommendations/v1"),
    }
    _check_baselines(inputs["baselines"], inputs["interactions"], settings, cut_offs)
    items = inputs["semantic_ids"].read_table("semantic_ids.parquet")
    check_same_items(inputs["catalog"].read_table("catalog.parquet", ["item_id"]), items)
    item_ids = items["item_id"].to_pylist()
    queries = read_queries(inputs["interactions"], item_ids)
    if queries is None:
        sequences = read_sequences(inputs["interactions"], item_ids)
        chosen, histories, target_U = sequences.judged(split, users)
        ids = [sequences.user_ids[user] for user in chosen]
    else:
        _check_queries(inputs, exclude_history)
        chosen = queries.of(split, users)
        histories, target_U = [np.zeros(0, np.int64)] * len(chosen), queries.best(chosen)
        ids = [queries.ids[query] for query in chosen]
    excluded = [np.unique(h) if exclude_history else h[:0] for h in histories]
    width = beams + max(map(len, excluded))  # so that enough are left when the excluded are taken out

    language_model, tokenizer, vocabulary = load_model(inputs["model"], dtype)
    language_model.eval()
    use_packed_attention(language_model)
    codes_NL = codes_array(items)
    tokens_NS = vocabulary.item_tokens(codes_NL)
    if queries is None:
        next_item = NextItem(tokenizer, vocabulary, _max_length(inputs["model"]))
        prompts = [next_item.prompt(tokens_NS[history]) for history in histories]
    else:
        fitting = QueryItem(tokenizer, vocabulary, _max_length(inputs["model"]))
        prompts = [fitting.prompt(text) for text in fitting.texts([queries.prompts[query] for query in chosen])]
    found = decode(
        language_model,
        build_trie(codes_NL),
        vocabulary,
        prompts,
        beams=width,
        score=score,
        batch_tokens=batch_tokens,
        targets=target_U if queries is None else None,
        what="evaluate",
    )
    recommended = {
        "model": _leave_out(found.items_UG, found.scores_UG, excluded, beams),
    } | {
        name: (items_UG[:, :beams], scores_UG[:, :beams])
        for name, (items_UG, scores_UG) in recommendations.from_table(
            inputs["baselines"].read_table("recommendations.parquet"), item_ids
        ).items()
    }

    if queries is None:
        count_N = training_counts(inputs["interactions"].read_table("interactions.parquet"), item_ids)
        member = metrics.slices(count_N, target_U)
    else:
        member = {"all": np.ones(len(chosen), dtype=bool)}
    rows = []
    for name, (items_UG, _) in recommended.items():
        if queries is None:
            figures = metrics.metric_rows(
                metrics.ranks(items_UG, target_U),
                found.kept_UL if name == "model" else None,
                member,
                cut_offs,
                beams=width,
                bootstrap=bootstrap,
                seed=seed,
            )
        else:
            columns = [(m, k, v) for (m, k), v in queries.metrics(chosen, items_UG, cut_offs).items()]
            figures = metrics.mean_rows(columns, member, bootstrap=bootstrap, seed=seed)
        rows += [(variant, seed, name, *figure) for figure in figures]
    summary = (
        _summary(rows, cut_offs) | {"users": len(chosen)} | {f"{k}_users": int(v.sum()) for k, v in member.items()}
    )
    trained = inputs["model"].metadata
    summary |= {key: trained[key] for key in ("t_star", "best_epoch") if key in trained}
    table = recommendations.to_table(recommended, ids, target_U, item_ids)
    with artifacts.create(
        out_recommendations, "recommendations/v1", stage="evaluate", arguments=settings, inputs=inputs
    ) as draft:
        draft.write_table("recommendations.parquet", table)
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


def _check_baselines(
    baselines: artifacts.Artifact, interactions: artifacts.Artifact, settings: dict[str, Any], cut_offs: list[int]
) -> None:
    """Raise ValueError unless the baselines were made for the same users, as deep as the tables go."""
    if baselines.stage != "baselines":
        raise ValueError(f"{baselines.path} is the output of {baselines.stage}, expected that of `sidgraft baselines`.")
    differing = [name for name in MUST_AGREE if baselines.arguments[name] != settings[name]]
    if differing:
        made, wanted = (
            ", ".join(f"{name}={values[name]}" for name in differing) for values in (baselines.arguments, settings)
        )
        raise ValueError(f"the baselines were made with {made}, but evaluate has {wanted}: give both the same.")
    if baselines.lineage[baselines.digest]["inputs"]["interactions"] != interactions.digest:
        raise ValueError("the baselines were made from other interactions: run `sidgraft baselines` on these.")
    deep, wanted = baselines.arguments["depth"], max(cut_offs)
    if deep < wanted:
        raise ValueError(
            f"ks goes up to {wanted}, but the baselines hold {deep} items a user: run `sidgraft baselines` with"
            f" --depth {wanted}, or give smaller ks."
        )


def _check_queries(inputs: dict[str, artifacts.Artifact], exclude_history: bool) -> None:
    """Raise ValueError unless the model was trained on these queries, whose split alone keeps the test unseen."""
    if exclude_history:
        raise ValueError("exclude_history is set, but the interactions come from queries, which have no history.")
    made_from = inputs["model"].lineage[inputs["model"].digest]["inputs"]["interactions"]
    if made_from != inputs["interactions"].digest:
        raise ValueError(
            "the model was fine-tuned on other interactions, which may hold the queries to test: give those of one"
            " run of `sidgraft prepare`, or fine-tune on these."
        )


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


def _summary(rows: list[tuple[Any, ...]], cut_offs: list[int]) -> dict[str, Any]:
    """Recall and NDCG, or precision and NDCG, over all at 10 or at the nearest cut-off, for each recommender."""
    k_shown = min(cut_offs, key=lambda k: abs(k - 10))
    return {
        f"{recommender}_{metric}@{k}": value
        for _, _, recommender, name, metric, k, value, _, _ in rows
        if name == "all" and not metric.startswith(("level_", "lost_")) and k == k_shown
    }
