"""Recommend with what every model is measured against. Run: sidgraft baselines --help."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sidgraft import artifacts, checks, encoders, metrics, recommendations, sasrec
from sidgraft.baselines import Recommended, best, co_occurrence, nearest, neighbours, popularity, query_neighbours
from sidgraft.devices import device
from sidgraft.embeddings import vectors_array
from sidgraft.histories import training_counts
from sidgraft.precisions import DTYPES
from sidgraft.progress import Progress, say
from sidgraft.queries import Queries, read_queries
from sidgraft.sequences import Sequences, check_same_items, read_sequences


def baselines(
    interactions: str,
    catalog: str,
    item_embeddings: str,
    out: str,
    *,
    split: str = "test",
    users: int = 0,
    exclude_history: bool = False,
    encoder: str = "",
    trust_remote_code: bool = False,
    depth: int = 200,
    sasrec_epochs: int = 100,
    sasrec_patience: int = 10,
    sasrec_width: int = 64,
    sasrec_layers: int = 2,
    sasrec_heads: int = 2,
    sasrec_dropout: float = 0.2,
    sasrec_learning_rate: float = 1e-3,
    sasrec_batch_size: int = 32,
    sasrec_max_length: int = 50,
    seed: int = 0,
) -> dict[str, Any]:
    """Recommend by popularity, embedding neighbours, co-occurrence and a trained SASRec, for every model's tables.

    For queries: by popularity among the training judgements, by the items nearest to the query in the encoder's space,
    and by the candidates of the nearest training queries.

    Args:
        interactions: Directory of the interactions artifact.
        catalog: Directory of the catalog artifact.
        item_embeddings: Directory of the item_embeddings artifact, for the embedding neighbours.
        out: Directory to write the recommendations artifact to.
        split: test or valid: which target is predicted, from the history before it.
        users: Recommend to a sample of this many users, or queries, the same in every run on the same data; 0 takes
            all.
        exclude_history: Leave the items of the history out.
        encoder: The encoder that embed made the vectors with, to encode queries by (see embed); read for queries alone.
            Empty leaves the two baselines out that need it.
        trust_remote_code: Let the encoder's repository run its own code. Off unless you trust it.
        depth: Items recommended to a user: at least the largest cut-off that evaluate is to use.
        sasrec_epochs: Most passes of SASRec over the users; 0 leaves SASRec out.
        sasrec_patience: Stop SASRec after this many epochs without a better validation NDCG@10.
        sasrec_width: Width of SASRec's states and item vectors.
        sasrec_layers: Layers of SASRec.
        sasrec_heads: Attention heads of SASRec; they share its width.
        sasrec_dropout: Dropout of SASRec.
        sasrec_learning_rate: Learning rate of SASRec's AdamW.
        sasrec_batch_size: Users in a step of SASRec.
        sasrec_max_length: Latest items of a history that SASRec sees.
        seed: Seed of SASRec's weights, data order and dropout.
    """
    settings = {
        name: value
        for name, value in locals().items()
        if name not in ("interactions", "catalog", "item_embeddings", "out", "encoder", "trust_remote_code")
    }
    _check(settings)
    inputs = {
        "interactions": artifacts.load(interactions, "interactions/v1"),
        "catalog": artifacts.load(catalog, "catalog/v1"),
        "item_embeddings": artifacts.load(item_embeddings, "item_embeddings/v1"),
    }
    items = inputs["catalog"].read_table("catalog.parquet", ["item_id"])
    vectors = inputs["item_embeddings"].read_table("embeddings.parquet")
    check_same_items(items, vectors)
    item_ids, vectors_Nd = items["item_id"].to_pylist(), vectors_array(vectors)
    most = min(depth, len(item_ids))
    queries = read_queries(inputs["interactions"], item_ids)
    if queries is None:
        found = _for_histories(inputs["interactions"], item_ids, vectors_Nd, most, settings)
    else:
        chosen = queries.of(split, users)
        vectors_Qd = _encoded(queries.texts, inputs["item_embeddings"], encoder, trust_remote_code)
        settings["encoder"] = "" if vectors_Qd is None else inputs["item_embeddings"].arguments["encoder"]
        found = _for_queries(queries, chosen, vectors_Qd, vectors_Nd, most)
    table = recommendations.to_table(found.recommended, found.ids, found.target_U, item_ids)
    with artifacts.create(out, "recommendations/v1", stage="baselines", arguments=settings, inputs=inputs) as draft:
        draft.write_table("recommendations.parquet", table)
        if found.sasrec:
            draft.write_json("sasrec.json", found.sasrec)
        draft.metadata.update(users=len(found.ids), depth=most, recommenders=list(found.recommended))
    best_epoch = {"sasrec_best_epoch": found.sasrec["best_epoch"]} if found.sasrec else {}
    return {"users": len(found.ids), "depth": most, **found.shown, **best_epoch}


def _check(settings: dict[str, Any]) -> None:
    """Refuse what nothing can be computed with, before anything is read."""
    checks.one_of("split", settings["split"], ("test", "valid"))
    above = ("patience", "width", "layers", "heads", "learning_rate", "batch_size", "max_length")
    checks.positive(depth=settings["depth"], **{f"sasrec_{name}": settings[f"sasrec_{name}"] for name in above})
    from_zero = ("users", "sasrec_epochs", "sasrec_dropout")
    checks.not_negative(**{name: settings[name] for name in from_zero})
    dropout, width, heads = (settings[f"sasrec_{name}"] for name in ("dropout", "width", "heads"))
    if dropout >= 1 or width % heads:
        raise ValueError(
            f"sasrec_dropout is {dropout}, expected less than 1; sasrec_width is {width}, expected a"
            f" multiple of sasrec_heads, {heads}."
        )


@dataclass(frozen=True)
class _Found:
    """What each baseline recommends to whom, and the figure that is shown of it."""

    ids: list[str]  # of users, or of queries in their place
    target_U: np.ndarray
    recommended: dict[str, Recommended]
    shown: dict[str, float]
    sasrec: dict[str, Any]  # how its training went; empty where there was none


def _for_histories(
    interactions: artifacts.Artifact, item_ids: list[str], vectors_Nd: np.ndarray, most: int, settings: dict[str, Any]
) -> _Found:
    """The next item of a history: by popularity, embedding neighbours, co-occurrence and SASRec."""
    sequences = read_sequences(interactions, item_ids)
    count_N = training_counts(interactions.read_table("interactions.parquet"), item_ids)
    chosen, histories, target_U = sequences.judged(settings["split"], settings["users"])
    excluded = [np.unique(h) if settings["exclude_history"] else h[:0] for h in histories]
    recommended = {
        "popularity": popularity(count_N, excluded, most),
        "neighbours": neighbours(vectors_Nd, histories, excluded, most),
        "co-occurrence": co_occurrence(sequences.training(), count_N, histories, excluded, most),
    }
    facts: dict[str, Any] = {}
    if settings["sasrec_epochs"]:
        model, facts = _trained_sasrec(sequences, len(item_ids), settings)
        recommended["sasrec"] = _by_sasrec(model, histories, excluded, most)
    shown = {
        f"{name}_recall@10": float(metrics.recall_at(metrics.ranks(items_UG, target_U), 10).mean())
        for name, (items_UG, _) in recommended.items()
    }
    return _Found([sequences.user_ids[user] for user in chosen], target_U, recommended, shown, facts)


def _for_queries(
    queries: Queries, chosen: np.ndarray, vectors_Qd: np.ndarray | None, vectors_Nd: np.ndarray, most: int
) -> _Found:
    """Items that fit the queries ``chosen``; by the baselines that need vectors of queries where there are some."""
    query_P, item_P = queries.training_pairs()
    gain_N = np.bincount(item_P, minlength=len(vectors_Nd))
    recommended = {"popularity": popularity(gain_N, [query_P[:0]] * len(chosen), most)}
    if vectors_Qd is not None:
        trained = queries.of("train")
        recommended["neighbours"] = nearest(vectors_Nd, vectors_Qd[chosen], most)
        recommended["query-neighbours"] = query_neighbours(
            vectors_Qd[trained], np.searchsorted(trained, query_P), item_P, gain_N, vectors_Qd[chosen], most
        )
    shown = {
        f"{name}_precision_strict@10": float(queries.metrics(chosen, items_QG, [10])["precision_strict", 10].mean())
        for name, (items_QG, _) in recommended.items()
    }
    return _Found([queries.ids[query] for query in chosen], queries.best(chosen), recommended, shown, {})


def _encoded(texts: list[str], embeddings: artifacts.Artifact, encoder: str, trust: bool) -> np.ndarray | None:
    """The texts in the items' space [Q, d]; None, and a sentence, where no encoder is there that made the vectors."""
    made = embeddings.arguments
    if not encoder or "encoder" not in made:
        why = "encoder is empty" if "encoder" in made else "the vectors are the user's own, of no encoder known here"
        say(f"baselines: {why}: neighbours and query-neighbours are left out.")
        return None
    name = Path(encoder).name if Path(encoder).is_dir() else encoder
    if name != made["encoder"]:
        raise ValueError(f"encoder is {name}, but the vectors were made by {made['encoder']}: give the same to both.")
    loaded = encoders.load(
        encoder,
        max_tokens=made["max_tokens"],
        batch_tokens=made["batch_tokens"],
        dtype=DTYPES[made["dtype"]],
        trust_remote_code=trust,
    )
    with Progress("encode queries", len(texts), "queries") as progress:
        vectors_Qd, _ = loaded.encode(texts, progress.update)
    encoders.check_finite(vectors_Qd, texts)
    return vectors_Qd


def _trained_sasrec(sequences: Sequences, items: int, settings: dict[str, Any]) -> tuple[sasrec.SASRec, dict[str, Any]]:
    """A SASRec and how its training went; validated by the users who have such a target, if any."""
    training = sequences.training()
    seen: list[np.ndarray] = []
    wanted_U = np.zeros(0, dtype=np.int64)
    if len(sequences.users_with("valid")):
        _, seen, wanted_U = sequences.judged("valid")
    say(f"SASRec: training on {sum(len(part) > 1 for part in training)} users, {len(wanted_U)} to validate")
    options = {name.removeprefix("sasrec_"): value for name, value in settings.items() if name.startswith("sasrec_")}
    return sasrec.fit(training, seen, wanted_U, items, **options, seed=settings["seed"], device=device())


def _by_sasrec(model: sasrec.SASRec, histories: list[np.ndarray], excluded: list[np.ndarray], most: int) -> Recommended:
    items_UG = np.full((len(histories), most), -1)
    scores_UG = np.full((len(histories), most), -np.inf, dtype=np.float32)
    for group in sasrec.score_batches(histories, len(model.items.weight)):
        scores_UN = sasrec.scores(model, [histories[u] for u in group]).cpu().numpy()
        items_UG[group], scores_UG[group] = best(scores_UN, [excluded[u] for u in group], most)
    return items_UG, scores_UG
