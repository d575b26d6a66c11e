"""The container images: which stage runs in which, and what they are called. The one place where this is set.

An image's full name is REGISTRY/sidgraft/cpu:TAG. The registry is SIDGRAFT_REGISTRY, and nothing else: it is read when
images are built, when the Docker runner looks for them, and when a pipeline is submitted, scheduled, uploaded, or
compiled for a profile of one's own; images of this machine alone have none. The tag changes with the code (`code_tag`),
because KFP's cache knows code only by the image's name. The committed YAML carries the tag of the released version and
REGISTRY itself in the place of a registry.

This module needs nothing installed: `images/build.py` uses it before there is an environment.
"""

import hashlib
import os
import re
from pathlib import Path

from sidgraft import __version__

CHECKOUT = Path(__file__).resolve().parents[1]

TAG = f"v{__version__}"

REGISTRY = "SIDGRAFT_REGISTRY"
PLACE = re.compile(r"[a-z0-9.-]+(:[0-9]+)?(/[a-z0-9._-]+)*")

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
    "extend": "sidgraft/cpu",
    "recommend": "sidgraft/gpu",
}


class RegistryError(ValueError):
    """The registry is set to something else; the message says what was found and what was expected."""


def image(stage: str) -> str:
    """Return the image of ``stage`` with the released tag and no registry yet: a name that no node can pull.

    Without REGISTRY it would be one of Docker Hub, where the name is free for anyone to take.
    """
    return f"REGISTRY/{IMAGES[stage]}:{TAG}"


def registry() -> str:
    """Return where images are pushed to and pulled from, such as ``host/team``; empty for this machine alone.

    Raises RegistryError where it is none: the name and the tag of an image are put behind it.
    """
    place = os.environ.get(REGISTRY, "").rstrip("/")
    if place and not PLACE.fullmatch(place):
        raise RegistryError(
            f"{REGISTRY} is {place!r}, expected a registry and the path in it without a scheme, an image or a tag, such"
            " as registry.example:5000/team."
        )
    return place


def built(name: str, registry: str) -> str:
    """Return the full name under which ``make images`` builds the image ``name`` (sidgraft/cpu) from this code."""
    return "/".join(part for part in (registry, f"{name}:{code_tag(name)}") if part)


def of_this_code() -> dict[str, str]:
    """Return for each stage the image that ``make images`` builds from this code for the registry."""
    return {stage: built(name, registry()) for stage, name in IMAGES.items()}


def code_tag(name: str) -> str:
    """Return the tag of the image ``name`` as this checkout makes it: the version and a digest of what goes into it."""
    sources = [*_files(CHECKOUT / "shared" / "sidgraft"), CHECKOUT / "pyproject.toml", *recipe(name)]
    return f"{TAG}-{_digest(sources)[:12]}"


def recipe(name: str) -> list[Path]:
    """Return the files that make an image beside the library: its Dockerfile and its lock file."""
    return _files(CHECKOUT / "images" / name.rpartition("/")[2])


def recipe_digest(name: str) -> str:
    """Digest what makes an image beside the library, so that other packages run its stages again."""
    return _digest(recipe(name))


def _files(folder: Path) -> list[Path]:
    return sorted(file for file in folder.rglob("*") if file.is_file() and file.suffix != ".pyc")


def _digest(files: list[Path]) -> str:
    hashed = hashlib.sha256()
    for file in files:
        content = hashlib.sha256(file.read_bytes()).hexdigest()
        hashed.update(f"{file.relative_to(CHECKOUT)} {content}\n".encode())
    return hashed.hexdigest()
