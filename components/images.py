"""The container image of each stage: the one place where they are set.

The committed YAML carries the tag of the released version. A local run replaces the tag by a digest of the
code that the stage runs (`pipelines/fingerprints.py`), because KFP's cache knows code only by the image's name.
"""

from sidgraft import __version__

TAG = f"v{__version__}"

IMAGES = {
    "variants": "sidgraft/data",
    "prepare": "sidgraft/data",
    "embed": "sidgraft/gpu",
    "quantize": "sidgraft/cpu",
    "baselines": "sidgraft/gpu",
    "expand": "sidgraft/cpu",
    "ground": "sidgraft/gpu",
    "finetune": "sidgraft/gpu",
    "evaluate": "sidgraft/gpu",
    "diagnose": "sidgraft/cpu",
    "report": "sidgraft/data",
    "publish": "sidgraft/gpu",
    "watch": "sidgraft/cpu",
    "recommend": "sidgraft/gpu",
}


def image(stage: str) -> str:
    """Return the image reference of ``stage`` with the released tag."""
    return f"{IMAGES[stage]}:{TAG}"
