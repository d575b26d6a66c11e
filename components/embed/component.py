"""The KFP component of the stage embed: the stage's signature, and a body that calls it. No logic."""

from kfp.dsl import Dataset, Input, Output, component

from components import images
from components.describe import described_by


@component(base_image=images.image("embed"), install_kfp_package=False)
@described_by("embed")
def embed(
    catalog: Input[Dataset],
    out: Output[Dataset],
    encoder: str = "Qwen/Qwen3-Embedding-0.6B",
    max_tokens: int = 256,
    batch_tokens: int = 8192,
    dtype: str = "bfloat16",
    embeddings: str = "",
    embeddings_item_id: str = "item_id",
    embeddings_column: str = "embedding",
    embeddings_digest: str = "",
    trust_remote_code: bool = False,
):
    arguments = dict(locals())
    from sidgraft.stages.embed import embed as stage
    from sidgraft.tasks import run_task

    run_task(stage, arguments, kinds={"out": "item_embeddings/v1"})
