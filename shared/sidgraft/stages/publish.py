"""Publish a model as a versioned bundle, behind a quality gate. Run: sidgraft publish --help."""

from __future__ import annotations

import hashlib
import shutil
from collections import Counter
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from sidgraft import artifacts, baselines, checks, storage
from sidgraft.artifacts import Artifact
from sidgraft.bundles import (
    COMPARED,
    KIND,
    OWN_VECTORS,
    Bundle,
    catalog_digest,
    clear_refusal,
    item_digests,
    latest_version,
    new_version,
    open_bundle,
    point_to,
    publishing,
    refuse,
    version_uri,
    write_items,
)
from sidgraft.catalog import category_level, item_categories
from sidgraft.gate import METRICS, Check, figure, invalid_lists, table, write_decision
from sidgraft.histories import training_counts
from sidgraft.model_card import model_card
from sidgraft.models import BaseModel
from sidgraft.precisions import DTYPES
from sidgraft.progress import say
from sidgraft.queries import has_queries
from sidgraft.sequences import check_same_items
from sidgraft.serving import Recommender
from sidgraft.sids import SidVocabulary, codes_array, token_texts


def publish(
    model: str,
    semantic_ids: str,
    interactions: str,
    catalog: str,
    recommendations: str,
    metrics: str,
    bundles: str,
    out: str,
    *,
    metric: str = "ndcg",
    k: int = 10,
    tolerance: float = 0.02,
    popularity_floor: float = 1.0,
    max_collision_rise: float = 0.1,
) -> dict[str, Any]:
    """Judge a model against the published one, and publish it as an immutable version when the gate holds.

    A refusal is written to refused.json beside latest.json, so that `watch` does not ask for the same training again.

    Args:
        model: Directory of the model artifact.
        semantic_ids: Directory of the semantic_ids artifact.
        interactions: Directory of the interactions artifact that the model was evaluated on.
        catalog: Directory of the catalog artifact.
        recommendations: Directory of the recommendations artifact that evaluate wrote for this model.
        metrics: Directory of the metrics artifact that evaluate wrote for this model.
        bundles: Folder of all published versions, local or s3://, with the pointer latest.json.
        out: Directory to write the decision artifact to.
        metric: ndcg or recall, the quality that the gate compares.
        k: Cut-off of that metric, at most the beams of the evaluation.
        tolerance: Share by which the metric may fall below that of the latest bundle, which is evaluated again on the
            same users; items that it does not know count as misses.
        popularity_floor: Least metric, in multiples of what recommending the most popular items reaches; 0 asks for
            nothing.
        max_collision_rise: How far the share of items that share their semantic codes with another may lie above that
            of the latest bundle. An ordinary increment raises it by at most 0.08, see watch; a first bundle is held to
            quantize's max_collision_rate alone.
    """
    checks.one_of("metric", metric, METRICS)
    checks.positive(k=k)
    checks.not_negative(tolerance=tolerance, popularity_floor=popularity_floor, max_collision_rise=max_collision_rise)
    settings = {
        "metric": metric,
        "k": k,
        "tolerance": tolerance,
        "popularity_floor": popularity_floor,
        "max_collision_rise": max_collision_rise,
    }
    inputs = {
        "model": artifacts.load(model, "model/v1"),
        "semantic_ids": artifacts.load(semantic_ids, "semantic_ids/v1"),
        "interactions": artifacts.load(interactions, "interactions/v1"),
        "catalog": artifacts.load(catalog, "catalog/v1"),
        "recommendations": artifacts.load(recommendations, "recommendations/v1"),
        "metrics": artifacts.load(metrics, "metrics/v1"),
    }
    if has_queries(inputs["interactions"]):
        raise ValueError(
            "the model was trained on queries, but a bundle serves histories of items: use the model artifact itself."
        )
    _check_evaluated(inputs, k)
    item_ids = inputs["semantic_ids"].read_table("semantic_ids.parquet")["item_id"].to_pylist()
    users, targets, found = _evaluated(inputs["recommendations"])
    value = figure(found, targets, metric, k)
    popular = figure(_popular(inputs, users, item_ids, k), targets, metric, k)
    kept = [
        Check("wrong tokens of Semantic IDs", _wrong_tokens(inputs), most=0),
        Check("invalid recommendation lists", invalid_lists(found, set(item_ids)), most=0),
        Check(f"{metric}@{k} (popularity {popular:.4f})", value, least=popularity_floor * popular),
    ]
    version = _version(inputs)
    with publishing(bundles):
        while True:
            previous, compared = latest_version(bundles), []
            if previous and previous != version:
                latest = open_bundle(bundles, previous)
                before = figure(_recommended_by(latest, inputs, users), targets, metric, k)
                compared = [
                    Check(f"{metric}@{k} ({previous}: {before:.4f})", value, least=(1 - tolerance) * before),
                    _collisions(latest, inputs, max_collision_rise),
                ]
            failed = [check.sentence() for check in kept + compared if not check.passed]
            if not failed:
                _write_bundle(bundles, version, inputs)
            if latest_version(bundles) == previous:  # else another publisher was quicker: judge against its version
                break
        if failed:
            rows = inputs["catalog"].read_table("catalog.parquet", columns=list(COMPARED))
            digest = catalog_digest(item_digests(rows))
            refuse(bundles, catalog=digest, version=version, latest=previous, reasons=failed)
        else:
            if previous != version:
                point_to(bundles, version, previous)
            clear_refusal(bundles)
    kept += compared
    title = f"{version} is refused" if failed else f"{version} is published"
    say(f"publish: {title}" + (f": {failed[0]}" if failed else ""))
    decision = {
        "published": not failed,
        "version": version,
        "previous": previous,
        "reasons": failed or ["Every check of the gate is kept."],
        "checks": [vars(check) | {"passed": check.passed} for check in kept],
    }
    with artifacts.create(out, "decision/v1", stage="publish", arguments=settings, inputs=inputs) as draft:
        write_decision(draft, title, decision, table(kept))
        draft.metadata.update(published=not failed, version=version, previous=previous, value=value, popularity=popular)
        return {f"{metric}@{k}" if name == "value" else name: fact for name, fact in draft.metadata.items()}


def _check_evaluated(inputs: dict[str, Artifact], k: int) -> None:
    """Raise ValueError unless recommendations and metrics are those of this very model, on these very users."""
    for name in ("recommendations", "metrics"):
        judged = inputs[name].lineage[inputs[name].digest]["inputs"]
        for part in ("model", "semantic_ids", "interactions", "catalog"):
            if judged.get(part) != inputs[part].digest:
                raise ValueError(
                    f"the {name} were made from another {part} than the one given: run `sidgraft evaluate` on the"
                    " artifacts that are to be published."
                )
    beams = inputs["recommendations"].arguments["beams"]
    if k > beams:
        raise ValueError(f"k is {k}, but the model was evaluated with {beams} beams: give at most that.")
    check_same_items(
        inputs["catalog"].read_table("catalog.parquet", ["item_id"]),
        inputs["semantic_ids"].read_table("semantic_ids.parquet"),
    )


def _evaluated(recommendations: Artifact) -> tuple[list[str], list[str], list[list[str]]]:
    """The users, targets and recommended items of the model."""
    rows = recommendations.read_table("recommendations.parquet").to_pylist()
    rows = [row for row in rows if row["recommender"] == "model"]
    return tuple([row[name] for row in rows] for name in ("user_id", "target_id", "item_ids"))  # type: ignore[return-value]


def _histories(inputs: dict[str, Artifact], users: list[str]) -> list[list[str]]:
    """What each user had chosen before the target that evaluate predicted."""
    position = f"{inputs['recommendations'].arguments['split']}_position"
    columns = ["user_id", "item_ids", position]
    rows = inputs["interactions"].read_table("interactions.parquet", columns).to_pylist()
    before = {row["user_id"]: row["item_ids"][: row[position]] for row in rows if row[position] is not None}
    return [before[user] for user in users]


def _popular(inputs: dict[str, Artifact], users: list[str], item_ids: list[str], k: int) -> list[list[str]]:
    """The most popular items for each user, with the history left out where the evaluation left it out."""
    counts_N = training_counts(inputs["interactions"].read_table("interactions.parquet"), item_ids)
    row_of = {item: row for row, item in enumerate(item_ids)}
    excluded = [np.zeros(0, dtype=np.int64) for _ in users]
    if inputs["recommendations"].arguments["exclude_history"]:
        excluded = [np.unique([row_of[item] for item in history]) for history in _histories(inputs, users)]
    items_UG, _ = baselines.popularity(counts_N, excluded, k)
    return [[item_ids[row] for row in line if row >= 0] for line in items_UG]


def _recommended_by(bundle: Bundle, inputs: dict[str, Artifact], users: list[str]) -> list[list[str]]:
    """What the latest bundle recommends to the same users, in the same way, among the items that are offered now."""
    evaluation = inputs["recommendations"].arguments
    offered = set(inputs["catalog"].read_table("catalog.parquet", ["item_id"])["item_id"].to_pylist())
    known = bundle.part("semantic_ids").read_table("semantic_ids.parquet")["item_id"].to_pylist()
    if offered.isdisjoint(known):
        return [[] for _ in users]
    dtype = DTYPES[evaluation["precision"]]
    recommender = Recommender.load(bundle.part("model"), bundle.part("semantic_ids"), dtype, offered=offered)
    return recommender.recommend(
        _histories(inputs, users),
        items=evaluation["beams"],
        beams=evaluation["beams"],
        score=evaluation["score"],
        exclude_history=evaluation["exclude_history"],
        batch_tokens=evaluation["batch_tokens"],
    ).item_ids


def _collisions(latest: Bundle, inputs: dict[str, Artifact], max_rise: float) -> Check:
    """The collision rate, held to that of the latest bundle."""
    before, now = (part.metadata["collision_rate"] for part in (latest.bundle, inputs["semantic_ids"]))
    return Check(f"collision rate ({latest.version}: {before:.4f})", now, most=before + max_rise)


def _wrong_tokens(inputs: dict[str, Artifact]) -> int:
    """How many code tokens the model's own tokenizer and vocabulary do not map as the Semantic IDs need them."""
    vocabulary = SidVocabulary.load(inputs["model"].path)
    sizes = inputs["semantic_ids"].read_json("quantizer.json")["sizes"]
    codes_NL = codes_array(inputs["semantic_ids"].read_table("semantic_ids.parquet"))
    if list(vocabulary.sizes) != list(sizes):
        return abs(sum(vocabulary.sizes) - sum(sizes)) or len(sizes)
    trust = BaseModel.load(inputs["model"].path).trust_remote_code
    tokenizer = AutoTokenizer.from_pretrained(inputs["model"].path, trust_remote_code=trust)
    texts = token_texts(sizes)
    found = tokenizer.convert_ids_to_tokens(list(range(vocabulary.first_id, vocabulary.first_id + len(texts))))
    beyond = int((codes_NL >= np.asarray(sizes)).sum())
    return beyond + sum(a != b for a, b in zip(texts, found, strict=True))


def _version(inputs: dict[str, Artifact]) -> str:
    """A name for the content: publishing the same again finds the same version."""
    text = " ".join(inputs[name].digest for name in ("model", "semantic_ids", "metrics", "catalog"))
    return "v-" + hashlib.sha256(text.encode()).hexdigest()[:12]


def _write_bundle(bundles: str, version: str, inputs: dict[str, Artifact]) -> None:
    """Write a version that is not there yet."""
    if storage.exists(version_uri(bundles, version)):
        open_bundle(bundles, version)  # says when it is damaged
        return
    catalog = inputs["catalog"].read_table("catalog.parquet", columns=list(COMPARED))
    items, level = item_digests(catalog), category_level(catalog) or 0
    categories = Counter(category or "" for category in item_categories(catalog, level))
    parts = {name: inputs[name] for name in ("model", "semantic_ids", "metrics")}
    ids = parts["semantic_ids"]
    embedded = next((e["arguments"] for e in ids.lineage.values() if e["stage"] == "embed"), {})
    base = BaseModel.load(parts["model"].path)
    facts = {
        "items": items.num_rows,
        "catalog_digest": catalog_digest(items),
        "base_model": base.origin[0],
        "base_weights_digest": base.digest,
        "encoder": embedded.get("encoder", OWN_VECTORS),
        "code_sizes": str(ids.read_json("quantizer.json")["sizes"]),
        "collision_rate": ids.metadata["collision_rate"],
        "goes_on_from": base.previous,
    }
    facts |= {name: ids.metadata[name] for name in ("relative_squared_error",) if name in ids.metadata}
    with (
        new_version(bundles, version) as place,
        artifacts.create(place, KIND, stage="publish", arguments={"version": version}, inputs=parts) as draft,
    ):
        for name, part in parts.items():
            shutil.copytree(part.path, draft.path / name)
        write_items(draft, items)
        counts = dict(sorted(categories.items()))
        draft.write_json("catalog.json", {"digest": facts["catalog_digest"], "level": level, "categories": counts})
        (draft.path / "README.md").write_text(model_card(version, parts, facts), encoding="utf-8")
        draft.metadata.update(facts)
