"""The KFP component of the stage diagnose: the stage's signature, and a body that calls it. No logic."""

from kfp.dsl import Artifact, Dataset, Input, Model, Output, component

from components import images
from components.describe import described_by


@component(base_image=images.image("diagnose"), install_kfp_package=False)
@described_by("diagnose")
def diagnose(
    initial_rows: Input[Artifact],
    grounded_rows: Input[Artifact],
    model: Input[Model],
    semantic_ids: Input[Dataset],
    catalog: Input[Dataset],
    interactions: Input[Dataset],
    out: Output[Artifact],
    level: int = 0,
    neighbours: int = 10,
    text_rows: int = 256,
    variant: str = "",
    seed: int = 0,
    keep_going: str = "",
):
    arguments = dict(locals())
    from sidgraft.stages.diagnose import diagnose as stage
    from sidgraft.tasks import run_task

    run_task(stage, arguments, kinds={"out": "diagnostics/v1"}, keep_going=keep_going)
