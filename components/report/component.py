"""The KFP component of the stage report: the stage's signature, and a body that calls it. No logic."""

from kfp.dsl import HTML, Artifact, Dataset, Input, Output, component

from components import images
from components.describe import described_by


@component(base_image=images.image("report"), install_kfp_package=False)
@described_by("report")
def report(
    metrics: Input[list[Artifact]],
    recommendations: Input[list[Artifact]],
    diagnostics: Input[list[Artifact]],
    catalog: Input[Dataset],
    interactions: Input[Dataset],
    semantic_ids: Input[Dataset],
    out: Output[Artifact],
    ui_page: Output[HTML],
    title: str = "sidgraft",
    examples: int = 10,
    reference: str = "",
):
    arguments = dict(locals())
    from pathlib import Path

    from sidgraft.stages.report import report as stage
    from sidgraft.tasks import run_task, show_page

    run_task(stage, arguments, kinds={"out": "report/v1"})
    show_page(ui_page, Path(out.path) / "index.html")
