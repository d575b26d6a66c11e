"""Components: the same parameters as their stages, a description for each, and compiled YAML that is up to date."""

import importlib
import inspect

import pytest
import yaml
from kfp.dsl.types import type_annotations

from components import images
from components.describe import EXTRAS
from pipelines import build
from pipelines.placement import REFERENCE
from sidgraft.signatures import FILES, STAGES, signature

PYTHON_TYPES = {"str": str, "int": int, "float": float, "bool": bool}


def component(name):
    return getattr(importlib.import_module(f"components.{name}.component"), name)


@pytest.mark.parametrize("stage", STAGES)
def test_parameters_are_those_of_the_stage(stage):
    # The oracle is the stage itself, imported, not the reader of signatures that the component uses.
    function = getattr(importlib.import_module(f"sidgraft.stages.{stage}"), stage)
    wanted = inspect.signature(function, eval_str=True).parameters
    found = inspect.signature(component(stage).python_func).parameters
    assert [name for name in found if name not in EXTRAS] == list(wanted)
    for name, parameter in wanted.items():
        annotation, default = found[name].annotation, found[name].default
        if parameter.default is inspect.Parameter.empty and name not in FILES.get(stage, ()):
            assert default is inspect.Parameter.empty
            assert type_annotations.is_Input_Output_artifact_annotation(annotation), name
            is_output = type_annotations.is_artifact_wrapped_in_Output(annotation)
            assert is_output == name.startswith("out"), name
            is_list = type_annotations.is_list_of_artifacts(annotation.__origin__)
            assert is_list == (parameter.annotation == list[str]), name
        else:
            assert annotation is parameter.annotation, name
            assert default == parameter.default, name


@pytest.mark.parametrize("stage", STAGES)
def test_the_signature_reader_agrees_with_python(stage):
    function = getattr(importlib.import_module(f"sidgraft.stages.{stage}"), stage)
    wanted = inspect.signature(function, eval_str=True).parameters
    read = signature(stage)
    assert [p.name for p in read.parameters] == list(wanted)
    for parameter in read.parameters:
        python = wanted[parameter.name]
        assert parameter.required == (python.default is inspect.Parameter.empty)
        assert parameter.required or parameter.default == python.default
        assert PYTHON_TYPES.get(parameter.type, list[str]) == python.annotation
    assert read.docstring == inspect.getdoc(function)


@pytest.mark.parametrize("stage", [*STAGES, "variants"])
def test_every_input_and_output_has_a_description(stage):
    (spec,) = (c for n, c in compiled(stage)["components"].items() if n == f"comp-{stage}")
    for side in ("inputDefinitions", "outputDefinitions"):
        for group in spec.get(side, {}).values():
            for name, entry in group.items():
                assert entry.get("description") or name == "Output", f"{stage}.{name}"


@pytest.mark.parametrize("stage", STAGES)
def test_descriptions_are_the_words_of_the_docstring(stage):
    texts = {p.name: p.text for p in signature(stage).parameters}
    assert all(texts.values())
    for group in compiled(stage)["components"][f"comp-{stage}"]["inputDefinitions"].values():
        for name, entry in group.items():
            assert entry["description"] == (texts | EXTRAS)[name]


@pytest.mark.parametrize("path", build.targets(), ids=str)
def test_committed_yaml_is_what_the_code_compiles_to(path):
    committed = (build.ROOT / path).read_text(encoding="utf-8")
    assert committed == build.compiled(build.targets()[path]), "run: python -m pipelines compile"


@pytest.mark.parametrize("stage", [*STAGES, "variants"])
def test_images_carry_the_released_version_and_nothing_is_installed_at_start(stage):
    (executor,) = compiled(stage)["deploymentSpec"]["executors"].values()
    assert executor["container"]["image"] == f"REGISTRY/{images.IMAGES[stage]}:v0.1.0" == images.image(stage)
    assert not REFERENCE.match(executor["container"]["image"])  # until it has a registry, no node asks anyone for it
    assert REFERENCE.match(executor["container"]["image"].replace("REGISTRY", "host.example:5000/team"))
    assert "pip install" not in " ".join(executor["container"]["command"])


def compiled(stage):
    return yaml.safe_load((build.ROOT / "components" / stage / "component.yaml").read_text(encoding="utf-8"))
