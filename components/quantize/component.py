"""The KFP component of the stage quantize: the stage's signature, and a body that calls it. No logic."""

from kfp.dsl import Dataset, Input, Output, component

from components import images
from components.describe import described_by


@component(base_image=images.image("quantize"), install_kfp_package=False)
@described_by("quantize")
def quantize(
    item_embeddings: Input[Dataset],
    out: Output[Dataset],
    method: str = "residual-kmeans",
    levels: int = 3,
    codebook_size: int = 256,
    codebook_sizes: str = "",
    dedup_size: int = 256,
    fit: str = "minibatch",
    steps: int = 3000,
    batch_size: int = 2048,
    max_iterations: int = 100,
    dim: int = 0,
    reduction: str = "truncate",
    code_dim: int = 32,
    hidden: str = "1024,512,256",
    dropout: float = 0.1,
    learning_rate: float = 0.001,
    commitment: float = 0.25,
    diversity: float = 0.01,
    epochs: int = 20000,
    patience: int = 10,
    tolerance: float = 0.005,
    max_collision_rate: float = 1.0,
    min_utilisation: float = 0.0,
    seed: int = 0,
    previous: str = "",
):
    arguments = dict(locals())
    from sidgraft.stages.quantize import quantize as stage
    from sidgraft.tasks import run_task

    run_task(stage, arguments, kinds={"out": "semantic_ids/v1"})
