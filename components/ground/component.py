"""The KFP component of the stage ground: the stage's signature, and a body that calls it. No logic."""

from kfp.dsl import Artifact, Dataset, Input, Output, component

from components import images
from components.describe import described_by


@component(base_image=images.image("ground"), install_kfp_package=False)
@described_by("ground")
def ground(
    token_rows: Input[Artifact],
    catalog: Input[Dataset],
    semantic_ids: Input[Dataset],
    interactions: Input[Dataset],
    out: Output[Artifact],
    corpus: str = "gti",
    epochs: float = 10.0,
    max_steps: int = 0,
    learning_rate: float = 0.001,
    batch_size: int = 16,
    max_length: int = 1024,
    tokens_at_once: int = 16384,
    keep_epochs: str = "",
    precision: str = "bfloat16",
    seed: int = 0,
    processes: int = 1,
    checkpoints: str = "",
    checkpoint_minutes: float = 10.0,
    report_to: str = "none",
    keep_going: str = "",
):
    arguments = dict(locals())
    from sidgraft.stages.ground import ground as stage
    from sidgraft.tasks import run_task

    run_task(stage, arguments, kinds={"out": "token_rows/v1"}, keep_going=keep_going)
