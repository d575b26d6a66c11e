"""The KFP component of the stage evaluate: the stage's signature, and a body that calls it. No logic."""

from kfp.dsl import Artifact, Dataset, Input, Metrics, Model, Output, component

from components import images
from components.describe import described_by


@component(base_image=images.image("evaluate"), install_kfp_package=False)
@described_by("evaluate")
def evaluate(
    model: Input[Model],
    semantic_ids: Input[Dataset],
    interactions: Input[Dataset],
    catalog: Input[Dataset],
    baselines: Input[Dataset],
    out_recommendations: Output[Dataset],
    out_metrics: Output[Artifact],
    ui_metrics: Output[Metrics],
    split: str = "test",
    ks: str = "5,10,20,50,100",
    beams: int = 10,
    score: str = "exact",
    users: int = 0,
    exclude_history: bool = False,
    batch_tokens: int = 8192,
    precision: str = "bfloat16",
    bootstrap: int = 1000,
    variant: str = "",
    seed: int = 0,
    keep_going: str = "",
):
    arguments = dict(locals())
    from sidgraft.stages.evaluate import evaluate as stage
    from sidgraft.tasks import run_task, show_metrics

    summary = run_task(
        stage,
        arguments,
        kinds={"out_recommendations": "recommendations/v1", "out_metrics": "metrics/v1"},
        keep_going=keep_going,
    )
    show_metrics(ui_metrics, summary)
