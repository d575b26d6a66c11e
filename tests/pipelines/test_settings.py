"""Presets and --set: what is right is read in the input's type, what is wrong is told with the right key."""

import json
import re
import shlex
from pathlib import Path

import pytest

from pipelines.__main__ import _parser
from pipelines.build import PIPELINES
from pipelines.inputs import FIRST
from pipelines.local import complete
from pipelines.settings import PRESETS, SettingsError, pipeline_inputs_of, preset_names, read_settings
from sidgraft.signatures import STAGES, signature

CHECKOUT = Path(__file__).parents[2]

GIVEN = ["catalog=a.jsonl", "interactions=b.jsonl"]


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_valid(name):
    settings = read_settings(name, GIVEN)
    assert settings.parameters["catalog"] == "a.jsonl"


def test_the_presets_are_there():
    expected = {"smoke", "quickstart", "quickstart-long", "study-quickstart"}
    assert expected | {"own", "beauty", "beauty-core", "study-beauty"} <= set(preset_names())


def documented(file):
    """Return the arguments of each `python -m pipelines run` command that a file shows."""
    text = re.sub(r"\\\n#?", " ", file.read_text(encoding="utf-8"))  # a command that goes on in the next line
    commands = re.findall(r"python -m pipelines (run --[^\n`|;\"]*)", text)
    return [shlex.split(command) for command in commands if not re.search(r"NAME|\.\.\.", command)]


@pytest.mark.parametrize("name", preset_names())
def test_the_commands_of_a_presets_header_are_whole_and_valid(name):
    commands = documented(PRESETS / f"{name}.yaml")
    assert commands
    for command in commands:
        arguments = _parser().parse_args(command)
        assert arguments.preset == name
        read_settings(arguments.preset, arguments.assignments)


@pytest.mark.parametrize("name", preset_names())
def test_every_set_in_a_presets_header_is_valid(name):
    """Also those in prose, outside of a whole command."""
    for assignment in re.findall(r"--set (\w+=[^\s.]+)", (PRESETS / f"{name}.yaml").read_text(encoding="utf-8")):
        read_settings(name, [*GIVEN, assignment])


SHOWN = [CHECKOUT / "Makefile", *CHECKOUT.glob("*.md"), *(CHECKOUT / "docs").rglob("*.md")]
SHOWN += [
    f for d in ("components", "pipelines", "shared") for f in (CHECKOUT / d).rglob("*") if f.suffix in (".md", ".py")
]
PLACES = sorted(str(file.relative_to(CHECKOUT)) for file in SHOWN if documented(file))


@pytest.mark.parametrize("place", PLACES)
def test_commands_elsewhere_are_valid(place):
    for command in documented(CHECKOUT / place):
        arguments = _parser().parse_args(command)
        read_settings(arguments.preset, arguments.assignments)


def test_commands_are_found_where_people_look():
    assert {"README.md", "Makefile", "pipelines/study.py", "shared/sidgraft/cli.py"} <= set(PLACES)


def differing(first, second):
    a, b = (read_settings(name, GIVEN).parameters for name in (first, second))
    return {key for key in {*a, *b} if a.get(key) != b.get(key)}


def test_the_long_quickstart_is_the_quickstart_with_more_training():
    assert differing("quickstart", "quickstart-long") == {
        "prepare_max_users", "finetune_epochs", "finetune_learning_rate", "finetune_batch_size",
        "finetune_validation_users", "evaluate_users", "report_title",
    }  # fmt: skip


def test_the_study_of_the_quickstart_has_its_data_model_and_training():
    loop = {"variant", "variants", "seeds", "expand_initialization", "ground_corpus"}
    assert differing("quickstart", "study-quickstart") <= loop | {"ground_epochs", "report_title"}


def test_the_study_of_beauty_trains_as_that_of_the_quickstart():
    """So that the two differ in their data, the size of its codebooks and what little data needs."""
    first, second = (read_settings(name, GIVEN).parameters for name in ("study-quickstart", "study-beauty"))
    same = {key for key in first if key.startswith(("expand_", "finetune_", "embed_"))} | {"variants", "seeds"}
    assert {key: first[key] for key in same} == {key: second[key] for key in same}
    assert {key for key in second if key.startswith("finetune_")} <= same


def test_the_training_on_the_dense_cut_of_beauty_is_one_of_its_studys():
    loop = {"variant", "variants", "seeds", "expand_initialization", "ground_corpus"}
    assert differing("beauty-core", "study-beauty") <= loop | {"ground_epochs", "report_title", "report_reference"}


def test_own_cuts_nothing_from_the_users_files_and_needs_no_download():
    given = read_settings("own", GIVEN).parameters
    prepare = {f"prepare_{p.name}": p.default for p in signature("prepare").parameters if not p.required}
    assert not [key for key in prepare if key in given]
    assert prepare["prepare_max_users"] == prepare["prepare_max_items"] == 0  # 0: all
    assert given["embed_encoder"].startswith("wheel:")
    assert given["expand_base_model"].startswith("wheel:")


def test_beauty_states_the_published_grounding():
    """The values of GTI on public data, whatever the defaults of the stage are."""
    given = read_settings("beauty", GIVEN).parameters
    stated = {key: given.get(key) for key in ("ground_learning_rate", "ground_batch_size", "ground_epochs")}
    assert stated == {"ground_learning_rate": 1e-3, "ground_batch_size": 16, "ground_epochs": 10.0}


@pytest.mark.parametrize("name", ["beauty", "beauty-core", "study-beauty", "own"])
def test_presets_for_users_files_ask_for_them(name):
    with pytest.raises(SettingsError) as error:
        read_settings(name, [])
    assert "--set catalog=" in str(error.value)
    assert "--set interactions=" in str(error.value)


@pytest.mark.parametrize(
    ("assignment", "key", "value"),
    [
        ("quantize_levels=4", "quantize_levels", 4),
        ("finetune_learning_rate=1e-5", "finetune_learning_rate", 1e-5),
        ("ground_epochs=2", "ground_epochs", 2.0),
        ("prepare_strict=True", "prepare_strict", True),
        ("report_title=a=b, c", "report_title", "a=b, c"),
        ("prepare_interaction_item_id=", "prepare_interaction_item_id", ""),
    ],
)
def test_set_reads_the_type_of_the_input(assignment, key, value):
    found = read_settings("smoke", [assignment]).parameters[key]
    assert found == value
    assert type(found) is type(value)


def test_set_reads_lists():
    given = read_settings("study-quickstart", ["variants=mean, gaussian+gti", "seeds=[3,4]"]).parameters
    assert given["variants"] == ["mean", "gaussian+gti"]
    assert given["seeds"] == [3, 4]


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("quantise_levels=4", "Did you mean quantize_levels?"),
        ("levels=4", "Did you mean quantize_levels?"),
        ("base_model=x", "Did you mean expand_base_model?"),
        ("finetune.node=2", "Did you mean finetune_nodes?"),
        ("sidgraft.nodes=2", "no input 'sidgraft.nodes'"),
        ("quantize_levels=four", "quantize_levels is 'four', expected int"),
        ("prepare_strict=maybe", "expected bool"),
        ("quantize_levels", "key=value"),
    ],
)
def test_a_wrong_set_is_told(assignment, message):
    with pytest.raises(SettingsError) as error:
        read_settings("smoke", [assignment])
    assert message in str(error.value)


@pytest.mark.parametrize("preset", ["smoke", "smoke-retrain", "study-quickstart"])
def test_a_setting_may_have_a_point_after_its_stage(preset):
    inputs = pipeline_inputs_of(read_settings(preset, []).pipeline)
    of_stages = [(s, p) for s in STAGES for p in signature(s).parameters if f"{s}_{p.name}" in inputs]
    assert len(of_stages) > 50
    values = {"int": 2, "float": 2.0, "bool": True, "str": "two", "list[int]": [2], "list[str]": ["two"]}
    for stage, parameter in of_stages:
        value = values[parameter.type]
        text = json.dumps(value) if parameter.type != "str" else value
        found = read_settings(preset, [f"{stage}.{parameter.name}={text}"]).parameters
        assert found == read_settings(preset, []).parameters | {f"{stage}_{parameter.name}": value}


def test_a_preset_may_have_the_point_too(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("pipeline: train\nparameters: {finetune.nodes: 2, evaluate.beams: 4}\n")
    found = read_settings(str(file), [*GIVEN, "finetune.nodes=3"]).parameters
    assert (found["finetune_nodes"], found["evaluate_beams"]) == (3, 4)


def test_the_fields_that_are_filled_in_first_are_fields_of_the_forms():
    text = (CHECKOUT / "docs/operations.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"## The form: what to fill in first\n.*?\n## ", text, re.DOTALL)
    fields = set(re.findall(r"`([a-z_]+)`", "".join(re.findall(r"^\| (`.*?) \|", table, re.MULTILINE))))
    assert {"catalog", "interactions", "expand_base_model"} <= fields
    assert fields <= pipeline_inputs_of("train").keys()
    assert fields <= set(FIRST)
    rows = [re.findall(r"`([a-z_]+)`", row) for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)]
    places = [[FIRST.index(name) for name in row] for row in rows]
    assert [min(row) for row in places] == sorted(min(row) for row in places)
    required = {name for p in PIPELINES for name, parameter in pipeline_inputs_of(p).items() if parameter.required}
    assert required <= set(re.findall(r"`([a-z_]+)`", table))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pipeline: trains\n", "expected one of train, study, retrain"),
        ("pipeline: train\nparameter: {}\n", "has the key 'parameter'"),
        ("pipeline: train\nparameters: {finetune_epoch: 3}\n", "Did you mean finetune_epochs?"),
        ("pipeline: train\nparameters: {finetune_epochs: 1.5}\n", "finetune_epochs is 1.5, expected int"),
        ("pipeline: train\nparameters: {finetune_learning_rate: 1e-4}\n", "1.0e-4"),
        ("pipeline: study\nparameters: {seeds: [a]}\n", "expected list[int]"),
        ("- 1\n", "no mapping"),
    ],
)
def test_a_wrong_preset_file_is_told(tmp_path, text, message):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(SettingsError) as error:
        read_settings(str(file), GIVEN)
    assert message in str(error.value)


def test_an_unknown_preset_is_told():
    with pytest.raises(SettingsError, match="Did you mean smoke"):
        read_settings("smok", [])


def test_the_place_of_the_bundles_is_made_absolute_where_it_is_on_this_machine(tmp_path, monkeypatch):
    """The stages run elsewhere than the command, and a later run, from another folder, must find the same."""
    monkeypatch.chdir(tmp_path)
    tags = dict.fromkeys(("ground", "finetune"), "run-1")
    for given, expected in (("mine/bundles", str(tmp_path / "mine/bundles")), ("s3://shop/b", "s3://shop/b")):
        found = complete(read_settings("smoke-retrain", [f"bundles={given}"]), tmp_path, tags)
        assert found["bundles"] == expected
