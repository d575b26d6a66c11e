"""The part of a component's README that follows from the code: python -m pipelines compile writes it anew."""

from pathlib import Path

from components.describe import EXTRAS
from components.images import IMAGES
from pipelines.placement import read_profile
from sidgraft.signatures import STAGES, signature

HEADING = "## Inputs, outputs, resources"
PROFILE = "h100"  # whose resources the READMEs show


def readme(component: str, text: str) -> str:
    """Return the README of a component with the section under HEADING as the code has it now."""
    before, _, rest = text.partition(f"{HEADING}\n")
    _, _, after = rest.partition("\n## ")
    parts = [before.rstrip(), "", HEADING, "", *_places(component), *_resources(component)]
    return "\n".join([*parts, *(["", f"## {after.rstrip()}"] if after else [])]) + "\n"


def _places(component: str) -> list[str]:
    """The artifacts and files that a stage reads and writes, as a table; its settings are in component.yaml."""
    if component not in STAGES:
        return []
    rows = [(p.name, p.text) for p in signature(component).parameters if p.required]
    rows += [(name, EXTRAS[name]) for name in EXTRAS if name.startswith("ui_") and f"{name}:" in _source(component)]
    told = [f"| `{name}` | {'out' if name.startswith(('out', 'ui_')) else 'in'} | {text} |" for name, text in rows]
    return ["| name | | |", "|---|---|---|", *told, ""]


def _resources(component: str) -> list[str]:
    has = read_profile(PROFILE).stages[component]
    parts = [f"{has.cpu} cores", f"{has.memory} GiB of memory"]
    parts += [f"{has.gpus} GPU{'s' if has.gpus > 1 else ''}", f"{has.shm} GiB of shared memory"] if has.gpus else []
    return [
        f"Image `{IMAGES[component]}` (`components/images.py`). On the profile `{PROFILE}`: {', '.join(parts)},",
        f"at most {has.timeout // 3600} h a try.",
        "",
        "`component.yaml` says REGISTRY in the place of a registry, so that no cluster can start it as it is. With",
        "SIDGRAFT_REGISTRY set, `python -m pipelines compile --profile mine.yaml` writes `component.mine.yaml` beside",
        "it, with the image of this code in yours. A component cannot say where it runs: in a pipeline of yours,",
        f'`place({component}(...), read_profile("mine.yaml"))` of `pipelines.placement` gives its task what the',
        "profile says: resources, node, shared memory, time, retries, secret of the object store, security context.",
        "docs/operations.md shows such a pipeline.",
    ]


def _source(component: str) -> str:
    file = Path(__file__).resolve().parents[1] / "components" / component / "component.py"
    return file.read_text(encoding="utf-8")
