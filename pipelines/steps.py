"""The stages that the graphs share: the data once (train, study), then one variant, and the report (retrain, too)."""

from typing import Any

from kfp import dsl

from components.baselines.component import baselines
from components.diagnose.component import diagnose
from components.embed.component import embed
from components.evaluate.component import evaluate
from components.expand.component import expand
from components.finetune.component import finetune
from components.ground.component import ground
from components.prepare.component import prepare
from components.quantize.component import quantize
from components.report.component import report
from pipelines.inputs import ENCODED, JUDGED, Inputs

# What all variants share: item texts, histories, vectors, Semantic IDs and the baselines' recommendations.
Shared = dict[str, Any]

# What the report reads of each variant.
REPORTED = ("metrics", "recommendations", "diagnostics")


def shared_steps(inputs: Inputs) -> Shared:
    """Prepare the data, embed the items, give them Semantic IDs and recommend by the baselines."""
    data = prepare(**inputs.of("prepare"))
    catalog = data.outputs["out_catalog"]
    vectors = embed(catalog=catalog, **inputs.of("embed")).outputs["out"]
    ids = quantize(item_embeddings=vectors, **inputs.of("quantize")).outputs["out"]
    return shared_outputs(inputs, data, vectors, ids)


def shared_outputs(inputs: Inputs, data: Any, vectors: Any, ids: Any) -> Shared:
    """Recommend by the baselines, and gather what all variants share."""
    catalog, interactions = data.outputs["out_catalog"], data.outputs["out_interactions"]
    return {
        "catalog": catalog,
        "interactions": interactions,
        "item_embeddings": vectors,
        "semantic_ids": ids,
        "baselines": baseline_step(inputs, interactions, catalog, vectors),
    }


def baseline_step(inputs: Inputs, interactions: Any, catalog: Any, vectors: Any) -> Any:
    """Recommend by the baselines to the users that `evaluate` judges, with the encoder that `embed` used."""
    given = {name: inputs[f"evaluate_{name}"] for name in JUDGED} | {n: inputs[f"embed_{n}"] for n in ENCODED}
    return baselines(
        interactions=interactions, catalog=catalog, item_embeddings=vectors, **inputs.of("baselines", **given)
    ).outputs["out"]


def variant_steps(
    inputs: Inputs,
    shared: Shared,
    *,
    seed: Any,
    variant: Any,
    keep_going: Any,
    start: Any,
    expand_with: dict,
    ground_with: dict,
    finetune_with: dict,
) -> dict[str, Any]:
    """Graft, ground, fine-tune, judge and diagnose one variant; return its model, and what the report reads of it.

    ``start`` stands for ``keep_going`` in expand and ground, whose tasks are reused where variants share them: a
    cache knows a task by its arguments.
    """
    begin = {"seed": seed, "keep_going": start}
    common = {"seed": seed, "keep_going": keep_going}
    catalog, interactions = shared["catalog"], shared["interactions"]
    embeddings, ids = shared["item_embeddings"], shared["semantic_ids"]

    rows = expand(
        semantic_ids=ids,
        catalog=catalog,
        item_embeddings=embeddings,
        **inputs.of("expand", **expand_with, **begin),
    ).outputs["out"]
    grounded = ground(
        token_rows=rows,
        catalog=catalog,
        semantic_ids=ids,
        interactions=interactions,
        **inputs.of("ground", **ground_with, **begin),
    ).outputs["out"]
    model = finetune(
        token_rows=grounded,
        catalog=catalog,
        semantic_ids=ids,
        interactions=interactions,
        **inputs.of("finetune", **finetune_with, **common),
    ).outputs["out"]
    judged = evaluate(
        model=model,
        semantic_ids=ids,
        interactions=interactions,
        catalog=catalog,
        baselines=shared["baselines"],
        **inputs.of("evaluate", variant=variant, **common),
    )
    diagnosed = diagnose(
        initial_rows=rows,
        grounded_rows=grounded,
        model=model,
        semantic_ids=ids,
        catalog=catalog,
        interactions=interactions,
        **inputs.of("diagnose", variant=variant, **common),
    )
    return {
        "model": model,
        "metrics": judged.outputs["out_metrics"],
        "recommendations": judged.outputs["out_recommendations"],
        "diagnostics": diagnosed.outputs["out"],
    }


def report_step(inputs: Inputs, shared: Shared, variants: dict[str, Any]) -> Any:
    """Write one report over all iterations of the loop that made ``variants``."""
    return report(
        **{name: dsl.Collected(variants[name]) for name in REPORTED},
        catalog=shared["catalog"],
        interactions=shared["interactions"],
        semantic_ids=shared["semantic_ids"],
        **inputs.of("report"),
    ).outputs["out"]
