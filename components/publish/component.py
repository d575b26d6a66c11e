"""The KFP component of the stage publish: the stage's signature, and a body that calls it. No logic."""

from kfp.dsl import Artifact, Dataset, Input, Markdown, Model, Output, component

from components import images
from components.describe import described_by


@component(base_image=images.image("publish"), install_kfp_package=False)
@described_by("publish")
def publish(
    model: Input[Model],
    semantic_ids: Input[Dataset],
    interactions: Input[Dataset],
    catalog: Input[Dataset],
    recommendations: Input[Dataset],
    metrics: Input[Artifact],
    bundles: str,
    out: Output[Artifact],
    ui_decision: Output[Markdown],
    metric: str = "ndcg",
    k: int = 10,
    tolerance: float = 0.02,
    popularity_floor: float = 1.0,
    max_collision_rise: float = 0.1,
):
    arguments = dict(locals())
    from pathlib import Path

    from sidgraft.stages.publish import publish as stage
    from sidgraft.tasks import run_task, show_page

    run_task(stage, arguments, kinds={"out": "decision/v1"})
    show_page(ui_decision, Path(out.path) / "decision.md")
