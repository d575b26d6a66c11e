"""The compiled pipelines: inputs with descriptions, an unlimited loop on a cluster, one variant at a time locally."""

import re

import pytest
import yaml

from components.images import IMAGES
from pipelines import build, retrain
from pipelines.inputs import ENCODED, JUDGED
from pipelines.settings import pipeline_inputs_of
from sidgraft.signatures import FILES, TRAINING, signature
from sidgraft.variants import plan_variants

VARIANTS = ("train", "study")  # the pipelines that train in a loop


def spec(name):
    return next(yaml.safe_load_all(text(name)))  # what Kubernetes gets is a second document


def text(name):
    return (build.ROOT / build.COMPILED / f"{name}.cpu.yaml").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", build.PIPELINES)
def test_every_input_shows_a_description(name):
    inputs = spec(name)["root"]["inputDefinitions"]["parameters"]
    assert set(inputs) == set(pipeline_inputs_of(name))
    assert [key for key, entry in inputs.items() if not entry.get("description")] == []


@pytest.mark.parametrize("name", build.PIPELINES)
def test_every_setting_of_every_stage_is_an_input_or_set_by_the_graph(name):
    inputs = pipeline_inputs_of(name)
    by_graph = {"seed", "variant"}
    by_loop = (
        {
            "expand_initialization",
            "ground_corpus",
            "ground_keep_epochs",
            "finetune_tasks",
            "finetune_rows_epoch",
            "finetune_grounding",
        }
        if name == "study"
        else set()
    )
    for stage in retrain.STAGES if name == "retrain" else TRAINING:
        for parameter in signature(stage).parameters:
            key = f"{stage}_{parameter.name}"
            if parameter.required or key in by_loop or parameter.name == "previous":
                assert key not in inputs
            elif parameter.name in FILES.get(stage, ()) and name != "retrain":
                assert inputs[parameter.name].default == parameter.default
            elif key in inputs:
                assert inputs[key].default == parameter.default
            elif stage == "baselines":
                assert parameter.name in (*JUDGED, *ENCODED)  # given the value of evaluate's or embed's input
            elif stage == "prepare":  # a published bundle serves histories
                assert name == "retrain"
                assert parameter.name in ("queries", "query_id", "query_fields", "grade")
            else:
                assert parameter.name in by_graph
                assert stage in ("expand", "ground", "finetune", "evaluate", "diagnose")


@pytest.mark.parametrize("name", VARIANTS)
def test_baselines_judge_the_users_of_evaluate(name):
    given = spec(name)["root"]["dag"]["tasks"]["baselines"]["inputs"]["parameters"]
    found = {key: given[key]["componentInputParameter"] for key in JUDGED}
    assert found == {key: f"evaluate_{key}" for key in JUDGED}


@pytest.mark.parametrize("name", build.PIPELINES)
def test_each_stage_gets_each_of_its_inputs_from_the_form(name):
    """An input that reaches no task would be a form field without effect."""
    for key in pipeline_inputs_of(name):
        assert f"componentInputParameter: {key}\n" in text(name), key


def test_the_study_tells_its_variants_from_the_rest():
    tasks = spec("study")["components"]["comp-for-loop-1"]["dag"]["tasks"]
    assert set(tasks) == {"expand", "ground", "finetune", "evaluate", "diagnose"}
    for stage, task in tasks.items():
        parameters = task["inputs"]["parameters"]
        label = "start" if stage in ("expand", "ground") else "label"  # the same arguments where variants share them
        assert parameters["keep_going"]["parameterExpressionSelector"].endswith(f'["{label}"]')
        assert parameters["seed"]["parameterExpressionSelector"].endswith('["seed"]')


def test_the_study_hands_each_variant_all_that_its_name_says():
    tasks = spec("study")["components"]["comp-for-loop-1"]["dag"]["tasks"]
    given = {
        re.search(r'\["(.+)"\]$', value["parameterExpressionSelector"])[1]
        for task in tasks.values()
        for value in task["inputs"]["parameters"].values()
        if "parameterExpressionSelector" in value
    }
    assert given == set(plan_variants(["mean"], [0])[0])
    parameters = tasks["finetune"]["inputs"]["parameters"]
    for name in ("grounding", "tasks", "rows_epoch"):
        assert parameters[name]["parameterExpressionSelector"].endswith(f'["{name}"]')


def test_train_lets_errors_end_the_run():
    tasks = spec("train")["components"]["comp-for-loop-2"]["dag"]["tasks"]
    for task in tasks.values():
        assert task["inputs"]["parameters"]["keep_going"] == {"runtimeValue": {"constant": ""}}


@pytest.mark.parametrize("name", VARIANTS)
def test_a_cluster_runs_variants_at_once_and_one_machine_one_by_one(name):
    tags = dict.fromkeys(build.COMPONENTS, "run-1")
    local = yaml.safe_load(build.for_local_run(name, tags))
    for where, limit in ((spec(name), None), (local, {"parallelismLimit": 1})):
        loops = [t for t in where["root"]["dag"]["tasks"].values() if "parameterIterator" in t]
        assert [loop.get("iteratorPolicy") for loop in loops] == [limit]
    images = [e["container"]["image"] for e in local["deploymentSpec"]["executors"].values()]
    assert {image.rpartition(":")[0] for image in images} <= set(IMAGES.values())  # what the Docker runner looks up
    assert all(image.endswith(":run-1") for image in images)


def test_retraining_branches_on_the_decision_and_goes_on_from_the_version_that_was_looked_at():
    components, root = spec("retrain")["components"], spec("retrain")["root"]["dag"]["tasks"]
    assert root.keys() == {"prepare", "embed", "watch", "condition-branches-1"}
    looked = {
        f"pipelinechannel--watch-{name}": {"taskOutputParameter": {"outputParameterKey": name, "producerTask": "watch"}}
        for name in ("decision", "bundle")
    }
    given = root["condition-branches-1"]["inputs"]["parameters"]
    assert {key: given[key] for key in looked} == looked
    branches = components["comp-condition-branches-1"]["dag"]["tasks"].values()
    conditions = {task["taskInfo"]["name"]: task for task in branches}
    for name, first, prefix, variant in (
        ("incremental", "extend", "incremental_", "increment"),
        ("full", "quantize", "", "full training"),
    ):
        condition = conditions.pop(name)
        assert condition["triggerPolicy"]["condition"].endswith(f"--watch-decision'] == '{name}'")
        outer = components[condition["componentRef"]["name"]]["dag"]["tasks"]
        (loop,) = (task for task in outer if "parameterIterator" in outer[task])
        inside = components[outer[loop]["componentRef"]["name"]]["dag"]
        around = {build.stage_of(n): task for n, task in outer.items() if n != loop}
        trained = {build.stage_of(n): task for n, task in inside["tasks"].items()}
        assert around.keys() == {first, "baselines", "report"}
        assert trained.keys() == {"expand", "ground", "finetune", "evaluate", "diagnose", "publish"}
        bundle = {"componentInputParameter": "pipelinechannel--watch-bundle"}
        for task in (around[first], trained["expand"]):
            assert task["inputs"]["parameters"]["previous"] == bundle
        for stage in ("ground", "finetune"):
            epochs = {"componentInputParameter": f"pipelinechannel--{prefix}{stage}_epochs"}
            assert trained[stage]["inputs"]["parameters"]["epochs"] == epochs
        for stage in ("evaluate", "diagnose"):
            assert constant(trained[stage], "variant") == variant
        assert not trained.pop("publish")["cachingOptions"].get("enableCache")
        assert {constant(task, "keep_going") for task in trained.values()} == {""}, "an error ends the run"
        for part, maker in (("metrics", "evaluate"), ("recommendations", "evaluate"), ("diagnostics", "diagnose")):
            given = around["report"]["inputs"]["artifacts"][part]["taskOutputArtifact"]
            assert given["producerTask"] == loop
            (made,) = inside["outputs"]["artifacts"][given["outputArtifactKey"]]["artifactSelectors"]
            assert build.stage_of(made["producerSubtask"]) == maker
    assert not conditions


def constant(task, parameter):
    return task["inputs"]["parameters"][parameter]["runtimeValue"]["constant"]


def test_retraining_reads_what_changes_anew_but_for_files_whose_digest_a_local_run_knows():
    local = yaml.safe_load(build.for_local_run("retrain", dict.fromkeys(build.COMPONENTS, "run-1")))
    for where, cached in ((spec("retrain"), {"embed"}), (local, {"embed", "prepare"})):
        found = where["root"]["dag"]["tasks"].items()
        assert {name for name, task in found if task.get("cachingOptions", {}).get("enableCache")} == cached
    images = [e["container"]["image"] for e in local["deploymentSpec"]["executors"].values()]
    assert {image.rpartition(":")[0] for image in images} <= set(IMAGES.values())  # what the Docker runner looks up
    assert all(image.endswith(":run-1") for image in images)
