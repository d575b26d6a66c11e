"""The pipeline study: variants of initialization and grounding over seeds, on the same data, in one report.

python -m pipelines run --preset study-quickstart
"""

from kfp import dsl

from components.variants.component import variants
from pipelines.inputs import SEEDED, Inputs, pipeline_inputs, takes
from pipelines.steps import report_step, shared_steps, variant_steps
from sidgraft.signatures import Parameter

INPUTS = pipeline_inputs(
    own=[
        Parameter(
            "variants",
            "list[str]",
            ["gaussian", "centroid"],
            "Variants to compare, each INITIALIZATION[+CORPUS[@EPOCH][+unfrozen]][+TASKS], such as gaussian+gti,"
            " centroid+cpt@4, mean+gti+unfrozen or mean+lc-rec: how the new rows start (see expand), the corpus they"
            " are grounded on (see ground; none where it is left out), after which epoch of that they are taken (the"
            " last where it is left out; one grounding serves all), whether all weights are then trained on it, too"
            " (for grounding_epochs of finetune), and the tasks of fine-tuning (see finetune; next-item where they are"
            " left out).",
        ),
        Parameter("seeds", "list[int]", [0], "Seeds; every variant is trained once with each."),
    ],
    set_by_pipeline=dict.fromkeys(SEEDED, ("seed", "variant"))
    | {
        "expand": ("seed", "initialization"),
        "ground": ("seed", "corpus", "keep_epochs"),
        "finetune": ("seed", "tasks", "rows_epoch", "grounding"),
    },
)


@dsl.pipeline(name="sidgraft-study")
@takes(INPUTS)
def study(inputs: Inputs) -> dsl.Artifact:
    """Compare initializations and grounding corpora over seeds; a variant that fails does not lose the others."""
    plan = variants(variants=inputs["variants"], seeds=inputs["seeds"])
    shared = shared_steps(inputs)
    with dsl.ParallelFor(plan.output) as one:
        outputs = variant_steps(
            inputs,
            shared,
            seed=one.seed,
            variant=one.variant,
            keep_going=one.label,
            start=one.start,
            expand_with={"initialization": one.initialization},
            ground_with={"corpus": one.corpus, "keep_epochs": one.keep_epochs},
            finetune_with={"tasks": one.tasks, "rows_epoch": one.rows_epoch, "grounding": one.grounding},
        )
    return report_step(inputs, shared, outputs)
