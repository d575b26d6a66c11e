"""The pipeline train: one variant, from files to a judged and explained model.

python -m pipelines run --preset quickstart
"""

from kfp import dsl

from pipelines.inputs import SEEDED, Inputs, pipeline_inputs, takes
from pipelines.steps import report_step, shared_steps, variant_steps
from sidgraft.signatures import Parameter

INPUTS = pipeline_inputs(
    own=[
        Parameter("variant", "str", "model", "Name of this variant in the tables."),
        Parameter("seed", "int", 0, "Seed of expand, ground, finetune, evaluate and diagnose."),
    ],
    set_by_pipeline=dict.fromkeys(SEEDED, ("seed", "variant")),
)


@dsl.pipeline(name="sidgraft-train")
@takes(INPUTS)
def train(inputs: Inputs) -> dsl.Artifact:
    """Graft Semantic IDs onto a language model, fine-tune it to recommend, compare with baselines, and report."""
    shared = shared_steps(inputs)
    # The report takes lists, and KFP makes a list of artifacts only by collecting a loop: a loop of one.
    with dsl.ParallelFor(["one"]):
        outputs = variant_steps(
            inputs,
            shared,
            seed=inputs["seed"],
            variant=inputs["variant"],
            keep_going="",
            start="",
            expand_with={},
            ground_with={},
            finetune_with={},
        )
    return report_step(inputs, shared, outputs)
