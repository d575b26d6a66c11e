"""The pipeline retrain: look at the catalog; where it has changed, train with it, judge, and publish or refuse.

python -m pipelines run --preset smoke-retrain
"""

from typing import Any

from kfp import dsl

from components.embed.component import embed
from components.evaluate.component import evaluate
from components.expand.component import expand
from components.extend.component import extend
from components.finetune.component import finetune
from components.ground.component import ground
from components.prepare.component import prepare
from components.publish.component import publish
from components.quantize.component import quantize
from components.watch.component import watch
from pipelines.inputs import Inputs, pipeline_inputs, takes
from pipelines.steps import baseline_step
from sidgraft.signatures import Parameter

STAGES = (
    "prepare", "embed", "watch", "quantize", "baselines", "expand", "ground", "finetune", "evaluate", "publish",
)  # fmt: skip

INPUTS = pipeline_inputs(
    own=[
        Parameter("seed", "int", 0, "Seed of expand, ground, finetune and evaluate."),
        Parameter(
            "incremental_ground_epochs",
            "float",
            1.0,
            "Epochs of ground in an increment, which goes on from rows that are grounded already; ground_epochs are"
            " those of a full training.",
        ),
        Parameter(
            "incremental_finetune_epochs",
            "int",
            2,
            "Epochs of finetune in an increment, which goes on from the published model; finetune_epochs are those of"
            " a full training.",
        ),
    ],
    set_by_pipeline=dict.fromkeys(("expand", "ground", "finetune", "evaluate"), ("seed", "variant"))
    | {"prepare": ("queries", "query_id", "query_fields", "grade")},  # a bundle serves histories
    stages=STAGES,
)


def train_and_publish(
    inputs: Inputs, shared: dict[str, Any], vectors: Any, previous: Any, *, ground_with: dict, finetune_with: dict
) -> None:
    """Expand, ground and fine-tune from the previous version or the base model; judge; publish or refuse."""
    seed = inputs["seed"]
    recommended = baseline_step(inputs, shared["interactions"], shared["catalog"], vectors)
    rows = expand(
        semantic_ids=shared["semantic_ids"],
        catalog=shared["catalog"],
        item_embeddings=vectors,
        **inputs.of("expand", seed=seed, previous=previous),
    ).outputs["out"]
    grounded = ground(token_rows=rows, **shared, **inputs.of("ground", seed=seed, **ground_with)).outputs["out"]
    model = finetune(token_rows=grounded, **shared, **inputs.of("finetune", seed=seed, **finetune_with)).outputs["out"]
    found = evaluate(model=model, **shared, baselines=recommended, **inputs.of("evaluate", seed=seed))
    publish(
        model=model,
        **shared,
        recommendations=found.outputs["out_recommendations"],
        metrics=found.outputs["out_metrics"],
        **inputs.of("publish"),
    ).set_caching_options(False)


@dsl.pipeline(name="sidgraft-retrain")
@takes(INPUTS)
def retrain(inputs: Inputs) -> dsl.Artifact:
    """Train again where the catalog has changed: nothing, an increment or all items; publish behind the gate."""
    # What prepare, watch and publish read lies behind addresses whose content changes: never from the cache.
    data = prepare(**inputs.of("prepare")).set_caching_options(False)
    catalog = data.outputs["out_catalog"]
    vectors = embed(catalog=catalog, **inputs.of("embed")).outputs["out"]
    seen = watch(catalog=catalog, item_embeddings=vectors, **inputs.of("watch")).set_caching_options(False)
    decision, previous = seen.outputs["decision"], seen.outputs["bundle"]
    shared = {"catalog": catalog, "interactions": data.outputs["out_interactions"]}
    with dsl.If(decision == "incremental", name="incremental"):
        ids = extend(catalog=catalog, item_embeddings=vectors, previous=previous).outputs["out"]
        train_and_publish(
            inputs,
            shared | {"semantic_ids": ids},
            vectors,
            previous,
            ground_with={"epochs": inputs["incremental_ground_epochs"]},
            finetune_with={"epochs": inputs["incremental_finetune_epochs"]},
        )
    with dsl.Elif(decision == "full", name="full"):
        ids = quantize(item_embeddings=vectors, **inputs.of("quantize", previous=previous)).outputs["out"]
        train_and_publish(inputs, shared | {"semantic_ids": ids}, vectors, previous, ground_with={}, finetune_with={})
    return seen.outputs["out"]
