"""Decode recommendations under the trie of the catalog and measure them. Run: sidgraft evaluate --help."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from sidgraft import artifacts, checks, id_quality, metrics, recommendations
from sidgraft.attention import use_packed_attention
from sidgraft.beam import SCORES, Decoded, decode
from sidgraft.histories import training_counts
from sidgraft.memory import keep_freed_memory
from sidgraft.models import load_model
from sidgraft.precisions import DTYPES
from sidgraft.progress import say
from sidgraft.prompts import NextItem, QueryItem
from sidgraft.queries import Queries, read_queries
from sidgraft.sequences import check_same_items, read_sequences
from sidgraft.sids import SidVocabulary, codes_array
from sidgraft.trie import build_trie

# Settings that the baselines were made with and that must be those of the model.
MUST_AGREE = ("split", "users", "exclude_history")

Figure = tuple[str, str, int, float | None, float | None, float | None]  # slice, metric, k, value, low, high


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
        batch_tokens: Prompt tokens in a decoding batch; one that the memory does not hold is halved.
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
    checks.one_of("score", score, SCORES)
    checks.one_of("precision", precision, DTYPES)
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
        task = _histories(inputs["interactions"], item_ids, settings)
    else:
        _check_queries(inputs, exclude_history)
        task = _queries(queries, settings)
    found = _decoded(inputs["model"], task, codes_array(items), settings)
    recommended = {"model": (found.items_UG, found.scores_UG)}
    table = inputs["baselines"].read_table("recommendations.parquet")
    for name, (items_UG, scores_UG) in recommendations.from_table(table, item_ids).items():
        recommended[name] = (items_UG[:, :beams], scores_UG[:, :beams])

    rows = []
    for name, (items_UG, _) in recommended.items():
        figures = task.figures(items_UG, found.kept_UL if name == "model" else None, cut_offs, beams)
        rows += [(variant, seed, name, *figure) for figure in figures]
    summary = _summary(rows, cut_offs) | {"users": len(task.ids)}
    summary |= {f"{part}_users": int(is_in_U.sum()) for part, is_in_U in task.member.items()}
    trained = inputs["model"].metadata
    summary |= {key: trained[key] for key in ("t_star", "best_epoch") if key in trained}
    made: dict[str, Any] = {"stage": "evaluate", "arguments": settings, "inputs": inputs}
    with artifacts.create(out_recommendations, "recommendations/v1", **made) as draft:
        table = recommendations.to_table(recommended, task.ids, task.target_U, item_ids)
        draft.write_table("recommendations.parquet", table)
        draft.metadata.update(users=len(task.ids), variant=variant, seed=seed)
        draft.seal()  # before the metrics, so that a failure in either leaves neither
        with artifacts.create(out_metrics, "metrics/v1", **made) as draft:
            draft.write_table("metrics.parquet", _metrics_table(rows))
            draft.metadata.update(
                summary | {"split": split, "beams": beams, "score": score, "variant": variant, "seed": seed}
            )
            draft.metadata[id_quality.RECORD] = id_quality.recorded(inputs["semantic_ids"])
    return summary


@dataclass(frozen=True)
class _Task:
    """Whom to recommend to, what fits them, how they are put to the model, and how the answers are measured."""

    ids: list[str]
    histories: list[np.ndarray]
    target_U: np.ndarray  # the item that fits; of a query, the best of those that do
    member: dict[str, np.ndarray]  # who belongs to each slice
    prompts: Callable[[Any, SidVocabulary, int, np.ndarray], list[np.ndarray]]  # see `_decoded`
    # Takes items [U, G], whether the beams held the target (None: not told), cut-offs and beams; returns the rows of
    # `metrics.mean_rows`.
    figures: Callable[[np.ndarray, np.ndarray | None, list[int], int], list[Figure]]


def _histories(interactions: artifacts.Artifact, item_ids: list[str], settings: dict[str, Any]) -> _Task:
    """The next item of a history."""
    sequences = read_sequences(interactions, item_ids)
    chosen, histories, target_U = sequences.judged(settings["split"], settings["users"])
    count_N = training_counts(interactions.read_table("interactions.parquet"), item_ids)
    member = metrics.slices(count_N, target_U)
    sampled = {name: settings[name] for name in ("bootstrap", "seed")}

    def prompts(tokenizer: Any, vocabulary: SidVocabulary, max_length: int, tokens_NS: np.ndarray) -> list[np.ndarray]:
        next_item = NextItem(tokenizer, vocabulary, max_length)
        return [next_item.prompt(tokens_NS[history]) for history in histories]

    def figures(items_UG: np.ndarray, kept_UL: np.ndarray | None, ks: list[int], beams: int) -> list[Figure]:
        rank_U = metrics.ranks(items_UG, target_U)
        return metrics.metric_rows(rank_U, kept_UL, member, ks, beams=beams, **sampled)

    return _Task([sequences.user_ids[user] for user in chosen], histories, target_U, member, prompts, figures)


def _queries(queries: Queries, settings: dict[str, Any]) -> _Task:
    """Items that fit a query. It has several, so no level is told at which the search loses the right one."""
    chosen = queries.of(settings["split"], settings["users"])
    member = {"all": np.ones(len(chosen), dtype=bool)}
    sampled = {name: settings[name] for name in ("bootstrap", "seed")}

    def prompts(tokenizer: Any, vocabulary: SidVocabulary, max_length: int, _: np.ndarray) -> list[np.ndarray]:
        fitting = QueryItem(tokenizer, vocabulary, max_length)
        return [fitting.prompt(text) for text in fitting.texts([queries.prompts[query] for query in chosen])]

    def figures(items_UG: np.ndarray, _: np.ndarray | None, ks: list[int], beams: int) -> list[Figure]:
        columns = [(metric, k, values) for (metric, k), values in queries.metrics(chosen, items_UG, ks).items()]
        return metrics.mean_rows(columns, member, **sampled)

    ids, none = [queries.ids[query] for query in chosen], [np.zeros(0, np.int64)] * len(chosen)
    return _Task(ids, none, queries.best(chosen), member, prompts, figures)


def _decoded(model: artifacts.Artifact, task: _Task, codes_NL: np.ndarray, settings: dict[str, Any]) -> Decoded:
    """What the search finds, prompts as long as those that the model was trained with."""
    language_model, tokenizer, vocabulary = load_model(model, DTYPES[settings["precision"]])
    language_model.eval()
    use_packed_attention(language_model)
    keep_freed_memory()
    max_length, tokens_NS = int(model.arguments["max_length"]), vocabulary.item_tokens(codes_NL)
    return decode(
        language_model,
        build_trie(codes_NL),
        vocabulary,
        task.prompts(tokenizer, vocabulary, max_length, tokens_NS),
        beams=settings["beams"],
        score=settings["score"],
        batch_tokens=settings["batch_tokens"],
        targets=task.target_U,
        excluded=task.histories if settings["exclude_history"] else None,
        what="evaluate",
    )


def _metrics_table(rows: list[tuple[Any, ...]]) -> pa.Table:
    schema = artifacts.SCHEMAS["metrics/v1"]["metrics.parquet"]
    columns = zip(*rows, strict=True)
    return pa.table([pa.array(c, f.type) for c, f in zip(columns, schema, strict=True)], schema)


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


def _summary(rows: list[tuple[Any, ...]], cut_offs: list[int]) -> dict[str, Any]:
    """Recall and NDCG, or precision and NDCG, over all at 10 or at the nearest cut-off, for each recommender."""
    k_shown = min(cut_offs, key=lambda k: abs(k - 10))
    return {
        f"{recommender}_{metric}@{k}": value
        for _, _, recommender, name, metric, k, value, _, _ in rows
        if name == "all" and not metric.startswith(("level_", "lost_")) and k == k_shown
    }
