"""Compile the pipelines and components to YAML, and adapt a pipeline to a local run."""

import copy
import importlib
import re
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import yaml
from kfp import compiler

from components.images import IMAGES, of_this_code
from pipelines import nodes
from pipelines.placement import placed, profile_names, read_profile
from pipelines.readmes import readme
from sidgraft.signatures import STAGES

ROOT = Path(__file__).resolve().parents[1]
COMPILED = Path("pipelines") / "compiled"
PIPELINES = ("train", "study", "retrain")
COMPONENTS = ("variants", *STAGES)


@cache
def targets() -> dict[Path, Any]:
    """Return every committed YAML file, relative to the checkout, with the pipeline or component it is made from."""
    files: dict[Path, Any] = {}
    for name in COMPONENTS:
        files[Path("components") / name / "component.yaml"] = load_component(name)
    for profile in profile_names():
        files |= placed_targets(profile)
    return files


def placed_targets(profile: str) -> dict[Path, Any]:
    """Return the YAML files of a profile, by name or file: every pipeline, placed as it says.

    A profile of one's own takes the images of this code, those that are committed the released ones. With it come the
    components, whose images are all that a profile can say of them.
    """
    place = read_profile(profile)
    if profile in profile_names():
        return {COMPILED / f"{name}.{place.name}.yaml": placed(load_pipeline(name), place) for name in PIPELINES}
    images = of_this_code()
    files = {COMPILED / f"{name}.{place.name}.yaml": placed(load_pipeline(name), place, images) for name in PIPELINES}
    for name in COMPONENTS:
        file = Path("components") / name / f"component.{place.name}.yaml"
        files[file] = with_image(load_component(name), place.image(name) or images[name])
    return files


def load_component(name: str) -> Any:
    """Return the component called ``name``."""
    return getattr(importlib.import_module(f"components.{name}.component"), name)


def with_image(component: Any, image: str) -> Any:
    """Return a copy of a component that runs in another image."""
    made = copy.deepcopy(component)
    made.component_spec.implementation.container.image = image
    return made


def load_pipeline(name: str) -> Any:
    """Return the pipeline called ``name``."""
    return getattr(importlib.import_module(f"pipelines.{name}"), name)


def compiled(target: Any) -> str:
    """Return the YAML text of a pipeline or component."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "compiled.yaml"
        compiler.Compiler().compile(target, str(file))
        return file.read_text(encoding="utf-8")


def compile_all() -> list[Path]:
    """Write every committed YAML file and what READMEs say of them; return what changed.

    Files of other profiles stay: they are the user's.
    """
    return write(targets()) + write_nodes(profile_names()) + write_readmes()


def write_nodes(profiles: list[str]) -> list[Path]:
    """Write the components of the manifests that profiles make, by name or file; return those that changed."""
    found = [read_profile(profile) for profile in profiles]
    return [nodes.file_of(profile) for profile in found if _written(nodes.file_of(profile), nodes.component(profile))]


def write_readmes() -> list[Path]:
    """Write what the components' READMEs say of the code; return those that changed."""
    changed = []
    for component in COMPONENTS:
        file = ROOT / "components" / component / "README.md"
        old = file.read_text(encoding="utf-8")
        if readme(component, old) != old:
            file.write_text(readme(component, old), encoding="utf-8")
            changed.append(file.relative_to(ROOT))
    return changed


def write(files: dict[Path, Any]) -> list[Path]:
    """Compile ``files`` (relative to the checkout) and write those that changed; return these."""
    return [path for path, target in files.items() if _written(path, compiled(target))]


def _written(path: Path, text: str) -> bool:
    """Write a file of the checkout where it says otherwise; returns whether it did."""
    file = ROOT / path
    if file.is_file() and file.read_text(encoding="utf-8") == text:
        return False
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return True


def stage_of(task: str) -> str:
    """Return the stage of a task or executor by its name: KFP numbers those that a graph has more than once."""
    return re.sub(r"-\d+$", "", task.removeprefix("exec-"))


def for_local_run(pipeline: str, tags: dict[str, str]) -> str:
    """Return the YAML of ``pipeline`` as one machine runs it: image tags by stage, and one variant at a time.

    prepare is reused: a local run gives it the digest of the files.
    """
    spec = yaml.safe_load(compiled(load_pipeline(pipeline)))
    for name, executor in spec["deploymentSpec"]["executors"].items():
        stage = stage_of(name)
        executor["container"]["image"] = f"{IMAGES[stage]}:{tags[stage]}"
    for task in spec["root"]["dag"]["tasks"].values():
        if "parameterIterator" in task:
            task["iteratorPolicy"] = {"parallelismLimit": 1}
    spec["root"]["dag"]["tasks"]["prepare"]["cachingOptions"] = {"enableCache": True}
    return yaml.safe_dump(spec, sort_keys=True, allow_unicode=True)
