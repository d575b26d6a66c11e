"""The KFP component of the stage baselines: the stage's signature, and a body that calls it. No logic."""

from kfp.dsl import Dataset, Input, Metrics, Output, component

from components import images
from components.describe import described_by


@component(base_image=images.image("baselines"), install_kfp_package=False)
@described_by("baselines")
def baselines(
    interactions: Input[Dataset],
    catalog: Input[Dataset],
    item_embeddings: Input[Dataset],
    out: Output[Dataset],
    ui_metrics: Output[Metrics],
    split: str = "test",
    users: int = 0,
    exclude_history: bool = False,
    encoder: str = "",
    trust_remote_code: bool = False,
    depth: int = 200,
    sasrec_epochs: int = 100,
    sasrec_patience: int = 10,
    sasrec_width: int = 64,
    sasrec_layers: int = 2,
    sasrec_heads: int = 2,
    sasrec_dropout: float = 0.2,
    sasrec_learning_rate: float = 1e-3,
    sasrec_batch_size: int = 32,
    sasrec_max_length: int = 50,
    seed: int = 0,
):
    arguments = dict(locals())
    from sidgraft.stages.baselines import baselines as stage
    from sidgraft.tasks import run_task, show_metrics

    summary = run_task(stage, arguments, kinds={"out": "recommendations/v1"})
    show_metrics(ui_metrics, summary)
