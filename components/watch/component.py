"""The KFP component of the stage watch: the stage's signature, and a body that calls it. No logic.

Its output parameters are the decision, none, incremental or full, for a `dsl.If`, and the version to go on from.
"""

from typing import NamedTuple

from kfp.dsl import Artifact, Dataset, Input, Markdown, Output, component

from components import images
from components.describe import described_by


@component(base_image=images.image("watch"), install_kfp_package=False)
@described_by("watch")
def watch(
    catalog: Input[Dataset],
    item_embeddings: Input[Dataset],
    bundles: str,
    out: Output[Artifact],
    ui_decision: Output[Markdown],
    max_changed_share: float = 0.2,
    max_error_ratio: float = 2.0,
    max_collision_rise: float = 0.1,
    max_category_shift: float = 0.1,
    force: str = "none",
) -> NamedTuple("Decided", [("decision", str), ("bundle", str)]):  # type: ignore[valid-type]
    arguments = dict(locals())
    from pathlib import Path

    from sidgraft.stages.watch import watch as stage
    from sidgraft.tasks import run_task, show_page

    summary = run_task(stage, arguments, kinds={"out": "decision/v1"})
    show_page(ui_decision, Path(out.path) / "decision.md")
    return summary["decision"], summary["bundle"]
