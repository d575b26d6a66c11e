"""The READMEs of the components: what they say of the code is so, and the pipeline of each runs, by itself, for real.

The pipelines run one after the other, and what one writes is handed to the next: a small chain of all components.
"""

import ast
import builtins
import importlib.util
import inspect
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from kfp import local

from components import images
from pipelines import build, readmes
from pipelines.placement import read_profile

# Small values for the parameters that the pipelines have beside addresses of artifacts.
SMALL = {
    "catalog": "sample:complete-journey", "interactions": "sample:complete-journey", "max_users": 60, "max_items": 60,
    "encoder": "hashing", "levels": 2, "codebook_size": 8, "sasrec_epochs": 1, "base_model": "tiny", "max_steps": 2,
    "epochs": 1, "beams": 10, "tolerance": 1.0, "items": 3,
}  # fmt: skip

# Every component after those whose outputs it takes, and what its outputs are to the later ones.
CHAIN = (
    "prepare", "embed", "quantize", "baselines", "expand", "ground", "finetune", "evaluate", "diagnose", "report",
    "publish", "watch", "extend", "recommend", "variants",
)  # fmt: skip
WRITES = {
    "prepare": {"out_catalog": "catalog", "out_interactions": "interactions"}, "embed": {"out": "item_embeddings"},
    "quantize": {"out": "semantic_ids"}, "baselines": {"out": "baselines"}, "expand": {"out": "token_rows"},
    "ground": {"out": "grounded_rows"}, "finetune": {"out": "model"}, "diagnose": {"out": "diagnostics"},
    "evaluate": {"out_recommendations": "recommendations", "out_metrics": "metrics"}, "report": {"out": "report"},
    "publish": {"out": "decision"}, "watch": {"out": "decision"}, "extend": {"out": "extended"},
    "recommend": {"out": "lists"}, "variants": {},
}  # fmt: skip


def text(component):
    return (build.ROOT / "components" / component / "README.md").read_text(encoding="utf-8")


def pipeline_of(component):
    """The code of a README; as long as it says."""
    (code,) = re.findall(r"^```python\n(.*?)^```$", text(component), re.MULTILINE | re.DOTALL)
    return code


@pytest.mark.parametrize("component", build.COMPONENTS)
def test_the_readme_says_what_the_code_says(component):
    assert readmes.readme(component, text(component)) == text(component), "run: python -m pipelines compile"
    has = read_profile("h100").stages[component]
    shown = text(component)
    assert f"{has.cpu} cores, {has.memory} GiB of memory" in shown
    assert (f"{has.gpus} GPU" in shown) == bool(has.gpus)
    assert f"Image `{images.IMAGES[component]}`" in shown


@pytest.mark.parametrize("component", build.COMPONENTS)
def test_the_pipeline_is_short_and_takes_the_component_from_its_yaml(component):
    code = pipeline_of(component)
    assert f'load_component_from_file("components/{component}/component.yaml")' in code
    assert len([node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.stmt)]) <= 12  # lines, unwrapped


@pytest.mark.slow
def test_the_pipeline_of_each_runs_alone(tmp_path, monkeypatch):
    monkeypatch.chdir(build.ROOT)
    # kfp's local runner indents what is printed by putting its own print in place; tasks that run side by side may
    # leave it there, and then all later tests of this process would print indented.
    monkeypatch.setattr(builtins, "print", print)
    assert set(CHAIN) == set(build.COMPONENTS)
    histories = tmp_path / "histories.parquet"
    made = SMALL | {"bundles": str(tmp_path / "bundles"), "histories": str(histories)}
    for component in CHAIN:
        file = tmp_path / f"{component}_alone.py"
        file.write_text(pipeline_of(component), encoding="utf-8")
        spec = importlib.util.spec_from_file_location(file.stem, file)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        root = tmp_path / component
        local.init(local.SubprocessRunner(use_venv=False), pipeline_root=str(root), raise_on_error=True)
        wanted = inspect.signature(module.alone.pipeline_func).parameters
        given = {name: made[name] for name in wanted if name in made}
        assert set(wanted) - set(given) <= {"strategy", "corpus", "names", "seeds"}  # these have defaults that do
        module.alone(**given)
        found = {manifest.parent.name: manifest.parent for manifest in root.rglob("artifact.json")}
        assert set(found) == set(WRITES[component]), component
        made |= {name: str(found[output]) for output, name in WRITES[component].items()}
        if component == "expand":
            made["initial_rows"] = made["token_rows"]
        if component == "evaluate":
            made["variants"] = [{name: made[name] for name in ("metrics", "recommendations")}]
            users = pq.read_table(f"{made['interactions']}/interactions.parquet", columns=["user_id", "item_ids"])
            pq.write_table(users.slice(0, 3), histories)
        if component == "publish":
            (version,) = (tmp_path / "bundles" / "versions").iterdir()
            made["previous"] = str(version)
        if component == "diagnose":
            made["variants"][0]["diagnostics"] = made["diagnostics"]
    lists = pq.read_table(next((tmp_path / "recommend").rglob("*.parquet")))
    assert isinstance(lists, pa.Table)
    assert len(lists) == 3
