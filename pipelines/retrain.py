"""The pipeline retrain: look at the catalog; where it has changed, train with it, judge, publish or refuse, report.

python -m pipelines run --preset smoke-retrain
"""

from typing import Any

from kfp import dsl

from components.embed.component import embed
from components.extend.component import extend
from components.prepare.component import prepare
from components.publish.component import publish
from components.quantize.component import quantize
from components.watch.component import watch
from pipelines.inputs import SEEDED, Inputs, pipeline_inputs, takes
from pipelines.steps import Shared, report_step, shared_outputs, variant_steps
from sidgraft.signatures import Parameter

STAGES = (
    "prepare", "embed", "watch", "quantize", "baselines", "expand", "ground", "finetune", "evaluate", "publish",
    "diagnose", "report",
)  # fmt: skip

INPUTS = pipeline_inputs(
    own=[
        Parameter("seed", "int", 0, "Seed of expand, ground, finetune, evaluate and diagnose."),
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
    set_by_pipeline=dict.fromkeys(SEEDED, ("seed", "variant"))
    | {"prepare": ("queries", "query_id", "query_fields", "grade")},  # a bundle serves histories
    stages=STAGES,
)


def train_and_publish(
    inputs: Inputs, shared: Shared, previous: Any, *, variant: str, ground_with: dict, finetune_with: dict
) -> None:
    """Train from the previous version or the base model; judge and diagnose; publish or refuse; report."""
    # A loop of one, as in train: the report takes lists.
    with dsl.ParallelFor(["one"]):
        outputs = variant_steps(
            inputs,
            shared,
            seed=inputs["seed"],
            variant=variant,
            keep_going="",
            start="",
            expand_with={"previous": previous},
            ground_with=ground_with,
            finetune_with=finetune_with,
        )
        publish(
            **{name: shared[name] for name in ("catalog", "interactions", "semantic_ids")},
            **{name: outputs[name] for name in ("model", "recommendations", "metrics")},
            **inputs.of("publish"),
        ).set_caching_options(False)
    report_step(inputs, shared, outputs)


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
    with dsl.If(decision == "incremental", name="incremental"):
        ids = extend(catalog=catalog, item_embeddings=vectors, previous=previous).outputs["out"]
        train_and_publish(
            inputs,
            shared_outputs(inputs, data, vectors, ids),
            previous,
            variant="increment",
            ground_with={"epochs": inputs["incremental_ground_epochs"]},
            finetune_with={"epochs": inputs["incremental_finetune_epochs"]},
        )
    with dsl.Elif(decision == "full", name="full"):
        ids = quantize(item_embeddings=vectors, **inputs.of("quantize", previous=previous)).outputs["out"]
        train_and_publish(
            inputs,
            shared_outputs(inputs, data, vectors, ids),
            previous,
            variant="full training",
            ground_with={},
            finetune_with={},
        )
    return seen.outputs["out"]
