"""What the forks of a local run find imported, because this module is.

A package that cannot be imported is left to the stage that needs it.
"""

import contextlib
from importlib import import_module

from sidgraft.signatures import TRAINING

# The stages, what they import only when they run, and what a fork needs to begin.
MODULES = (
    *(f"sidgraft.stages.{stage}" for stage in TRAINING),
    "sentence_transformers",
    "sklearn.cluster",
    "transformers.models.llama.modeling_llama",
    "pipelines.worker",
)

for module in MODULES:
    with contextlib.suppress(Exception):
        import_module(module)
