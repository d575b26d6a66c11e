"""Settings of a run: a preset, then --set key=value, checked against the pipeline's inputs."""

import difflib
import importlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from pipelines.build import PIPELINES
from sidgraft.signatures import STAGES, Parameter

PRESETS = Path(__file__).parent / "presets"


class SettingsError(ValueError):
    """A preset or a --set is wrong; the message says what was found and what was expected."""


@dataclass(frozen=True)
class Settings:
    """What to run: the pipeline's name and the values given for its inputs."""

    preset: str
    pipeline: str
    parameters: dict[str, Any]


def preset_names() -> list[str]:
    """Return the names of all presets."""
    return sorted(file.stem for file in PRESETS.glob("*.yaml"))


def pipeline_inputs_of(pipeline: str) -> dict[str, Parameter]:
    """Return the inputs of a pipeline by name."""
    return {parameter.name: parameter for parameter in importlib.import_module(f"pipelines.{pipeline}").INPUTS}


def read_settings(preset: str, assignments: Sequence[str]) -> Settings:
    """Read a preset by name, or a YAML file of the same form, and apply ``key=value`` assignments.

    A stage's setting may have a point after the stage: `finetune.nodes` is the input `finetune_nodes`.
    Raises SettingsError for unknown presets, unknown keys (with the nearest right one), wrong types, and inputs
    that still have no value.
    """
    content = _read_preset(preset)
    inputs = pipeline_inputs_of(content["pipeline"])
    values = {}
    for given, value in (content.get("parameters") or {}).items():
        key = _name(given)
        values[key] = _checked(inputs, key, value, f"preset {preset}")
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        if not equals:
            raise SettingsError(f"--set takes key=value, found {assignment!r}.")
        key = _name(key)
        parameter = _known(inputs, key, "--set")
        values[key] = _checked(inputs, key, _parsed(parameter, text), "--set")
    missing = [p for p in inputs.values() if p.required and p.name not in values]
    if missing:
        lines = [f"  --set {p.name}=...   {p.text}" for p in missing]
        raise SettingsError(f"preset {preset} needs you to say:\n" + "\n".join(lines))
    return Settings(preset, content["pipeline"], values)


def _read_preset(name: str) -> dict[str, Any]:
    file = Path(name) if name.endswith((".yaml", ".yml")) else PRESETS / f"{name}.yaml"
    if not file.is_file():
        near = difflib.get_close_matches(name, preset_names(), n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise SettingsError(f"there is no preset {name!r}; the presets are {', '.join(preset_names())}.{hint}")
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    if not isinstance(content, dict):
        raise SettingsError(f"{file} holds no mapping of pipeline, description and parameters.")
    unknown = set(content) - {"pipeline", "description", "parameters"}
    if unknown:
        raise SettingsError(f"{file} has the key {sorted(unknown)[0]!r}; expected pipeline, description, parameters.")
    if content.get("pipeline") not in PIPELINES:
        raise SettingsError(f"{file}: pipeline is {content.get('pipeline')!r}, expected one of {', '.join(PIPELINES)}.")
    return content


def _name(key: Any) -> str:
    """Return the name of the input that a key means."""
    stage, point, setting = str(key).partition(".")
    return f"{stage}_{setting}" if point and stage in STAGES else str(key)


def _known(inputs: Mapping[str, Parameter], key: str, where: str) -> Parameter:
    if key not in inputs:
        endings = [name for name in inputs if name.endswith(f"_{key}")]
        near = endings or difflib.get_close_matches(key, inputs, n=1)
        hint = f" Did you mean {' or '.join(near)}?" if near else ""
        raise SettingsError(f"{where}: the pipeline has no input {key!r}.{hint}")
    return inputs[key]


def _checked(inputs: Mapping[str, Parameter], key: str, value: Any, where: str) -> Any:
    """Return the value in the input's type; an int does for a float, nothing else is converted."""
    parameter = _known(inputs, key, where)
    kind = parameter.type
    if kind == "float" and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    fits = {
        "str": lambda v: isinstance(v, str),
        "bool": lambda v: isinstance(v, bool),
        "int": lambda v: isinstance(v, int) and not isinstance(v, bool),
        "float": lambda v: isinstance(v, float),
        "list[str]": lambda v: isinstance(v, list) and all(isinstance(x, str) for x in v),
        "list[int]": lambda v: isinstance(v, list) and all(type(x) is int for x in v),
    }[kind]
    if not fits(value):
        hint = ""
        if kind == "float" and isinstance(value, str) and "e" in value:
            hint = " YAML reads an exponent as a number only with a point: 1.0e-4."
        raise SettingsError(f"{where}: {key} is {value!r}, expected {kind}.{hint}")
    return value


def _parsed(parameter: Parameter, text: str) -> Any:
    """Turn the text of --set into the input's type; text that does not fit is left for the check to name."""
    kind = parameter.type
    try:
        if kind in ("int", "float"):
            return int(text) if kind == "int" else float(text)
        if kind == "bool":
            return {"true": True, "false": False}.get(text.lower(), text)
        if kind.startswith("list"):
            if text.startswith("["):
                return json.loads(text)
            parts = [part.strip() for part in text.split(",") if part.strip()]
            return [int(part) for part in parts] if kind == "list[int]" else parts
    except ValueError:
        return text
    return text
