"""The KFP component of the stage expand: the stage's signature, and a body that calls it. No logic."""

from kfp.dsl import Artifact, Dataset, Input, Output, component

from components import images
from components.describe import described_by


@component(base_image=images.image("expand"), install_kfp_package=False)
@described_by("expand")
def expand(
    semantic_ids: Input[Dataset],
    catalog: Input[Dataset],
    item_embeddings: Input[Dataset],
    out: Output[Artifact],
    base_model: str = "Qwen/Qwen3-0.6B",
    base_revision: str = "",
    initialization: str = "centroid",
    scale: str = "none",
    seed: int = 0,
    trust_remote_code: bool = False,
    previous: str = "",
    keep_going: str = "",
):
    arguments = dict(locals())
    from sidgraft.stages.expand import expand as stage
    from sidgraft.tasks import run_task

    run_task(stage, arguments, kinds={"out": "token_rows/v1"}, keep_going=keep_going)
