"""The KFP component of the stage quantize: the stage's signature, and a body that calls it. No logic."""

from kfp.dsl import Dataset, Input, Output, component

from components import images
from components.describe import described_by


@component(base_image=images.image("quantize"), install_kfp_package=False)
@described_by("quantize")
def quantize(
    item_embeddings: Input[Dataset],
    out: Output[Dataset],
    levels: int = 3,
    codebook_size: int = 256,
    dedup_size: int = 256,
    fit: str = "minibatch",
    steps: int = 3000,
    batch_size: int = 2048,
    max_iterations: int = 100,
    dim: int = 0,
    reduction: str = "truncate",
    max_collision_rate: float = 1.0,
    min_utilisation: float = 0.0,
    seed: int = 0,
):
    arguments = dict(locals())
    from sidgraft.stages.quantize import quantize as stage
    from sidgraft.tasks import run_task

    run_task(stage, arguments, kinds={"out": "semantic_ids/v1"})
