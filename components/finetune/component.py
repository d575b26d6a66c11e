"""The KFP component of the stage finetune: the stage's signature, and a body that calls it. No logic."""

from kfp.dsl import Artifact, Dataset, Input, Model, Output, component

from components import images
from components.describe import described_by


@component(base_image=images.image("finetune"), install_kfp_package=False)
@described_by("finetune")
def finetune(
    token_rows: Input[Artifact],
    catalog: Input[Dataset],
    semantic_ids: Input[Dataset],
    interactions: Input[Dataset],
    out: Output[Model],
    rows_epoch: int = -1,
    tasks: str = "next-item",
    grounding: str = "none",
    grounding_epochs: int = 1,
    epochs: int = 12,
    learning_rate: float = 1e-05,
    weight_decay: float = 0.01,
    warmup: float = 0.1,
    batch_size: int = 16,
    max_length: int = 1024,
    tokens_at_once: int = 16384,
    patience: int = 5,
    validation_users: int = 0,
    validation_beams: int = 10,
    precision: str = "bfloat16",
    gradient_checkpointing: bool = False,
    seed: int = 0,
    mode: str = "full",
    lora_rank: int = 8,
    lora_alpha: float = 32.0,
    lora_dropout: float = 0.05,
    strategy: str = "none",
    processes: int = 0,
    nodes: int = 1,
    checkpoints: str = "",
    checkpoint_minutes: float = 10.0,
    report_to: str = "none",
    keep_going: str = "",
):
    arguments = dict(locals())
    from sidgraft.stages.finetune import finetune as stage
    from sidgraft.tasks import run_task

    run_task(stage, arguments, kinds={"out": "model/v1"}, keep_going=keep_going)
