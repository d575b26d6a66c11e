"""The KFP component of the stage prepare: the stage's signature, and a body that calls it. No logic."""

from kfp.dsl import Dataset, Output, component

from components import images
from components.describe import described_by


@component(base_image=images.image("prepare"), install_kfp_package=False)
@described_by("prepare")
def prepare(
    catalog: str,
    interactions: str,
    out_catalog: Output[Dataset],
    out_interactions: Output[Dataset],
    queries: str = "",
    item_id: str = "item_id",
    text: str = "title,brand,categories,price",
    title: str = "title",
    brand: str = "brand",
    categories: str = "categories",
    price: str = "price",
    description: str = "description",
    user_id: str = "user_id",
    interaction_item_id: str = "",
    items: str = "items",
    timestamp: str = "timestamp",
    query_id: str = "query_id",
    query_fields: str = "text",
    grade: str = "grade",
    split: str = "leave-one-out",
    max_history: int = 21,
    k_core: int = 0,
    max_users: int = 0,
    max_items: int = 0,
    text_quality: str = "full",
    strict: bool = False,
    seed: int = 0,
    source_digest: str = "",
):
    arguments = dict(locals())
    from sidgraft.stages.prepare import prepare as stage
    from sidgraft.tasks import run_task

    run_task(stage, arguments, kinds={"out_catalog": "catalog/v1", "out_interactions": "interactions/v1"})
