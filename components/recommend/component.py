"""The KFP component of the stage recommend: the stage's signature, and a body that calls it. No logic."""

from kfp.dsl import Dataset, Output, component

from components import images
from components.describe import described_by


@component(base_image=images.image("recommend"), install_kfp_package=False)
@described_by("recommend")
def recommend(
    bundles: str,
    histories: str,
    out: Output[Dataset],
    version: str = "",
    offered: str = "",
    delisted: str = "",
    items: int = 10,
    beams: int = 20,
    score: str = "exact",
    exclude_history: bool = False,
    users_at_once: int = 4096,
    batch_tokens: int = 8192,
    precision: str = "bfloat16",
):
    arguments = dict(locals())
    from sidgraft.stages.recommend import recommend as stage
    from sidgraft.tasks import run_task

    run_task(stage, arguments, kinds={"out": "user_recommendations/v1"})
