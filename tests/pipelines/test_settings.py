"""Presets and --set: what is right is read in the input's type, what is wrong is told with the right key."""

import pytest

from pipelines.settings import SettingsError, preset_names, read_settings

GIVEN = ["catalog=a.jsonl", "interactions=b.jsonl"]


@pytest.mark.parametrize("name", preset_names())
def test_presets_are_valid(name):
    settings = read_settings(name, GIVEN)
    assert settings.parameters["catalog"] == "a.jsonl"


def test_the_presets_are_there():
    assert {"smoke", "quickstart", "quickstart-long", "study-quickstart", "beauty"} <= set(preset_names())


def test_beauty_asks_for_its_files():
    with pytest.raises(SettingsError) as error:
        read_settings("beauty", [])
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
        ("quantize_levels=four", "quantize_levels is 'four', expected int"),
        ("prepare_strict=maybe", "expected bool"),
        ("quantize_levels", "key=value"),
    ],
)
def test_a_wrong_set_is_told(assignment, message):
    with pytest.raises(SettingsError) as error:
        read_settings("smoke", [assignment])
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("pipeline: trains\n", "expected one of train, study"),
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
