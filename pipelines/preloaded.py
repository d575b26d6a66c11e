"""What the forks of a local run find imported, because this module is.

A package that cannot be imported is left to the stage that needs it.
"""

import contextlib
import sys
from importlib import import_module

from sidgraft.signatures import TRAINING

MODULES = (
    *(f"sidgraft.stages.{stage}" for stage in TRAINING),
    "pipelines.worker",
)  # the last is what a fork begins with
WHEN_THEY_RUN = ("sentence_transformers", "sklearn.cluster", "transformers.models.llama.modeling_llama")

for module in MODULES:
    with contextlib.suppress(Exception):
        import_module(module)
if "torch" in sys.modules:  # without it no stage that needs these can run
    for module in WHEN_THEY_RUN:
        with contextlib.suppress(Exception):
            import_module(module)
