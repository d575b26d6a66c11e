"""The KFP component of the stage extend: the stage's signature, and a body that calls it. No logic."""

from kfp.dsl import Dataset, Input, Output, component

from components import images
from components.describe import described_by


@component(base_image=images.image("extend"), install_kfp_package=False)
@described_by("extend")
def extend(
    catalog: Input[Dataset],
    item_embeddings: Input[Dataset],
    previous: str,
    out: Output[Dataset],
):
    arguments = dict(locals())
    from sidgraft.stages.extend import extend as stage
    from sidgraft.tasks import run_task

    run_task(stage, arguments, kinds={"out": "semantic_ids/v1"})
