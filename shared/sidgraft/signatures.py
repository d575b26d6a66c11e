"""Read a stage's signature and docstring without importing it: its command and component are made from them.

Importing a stage loads torch; reading its text does not. So `sidgraft finetune --help` is quick, and
pipelines compile where torch is not installed.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# The stages that make and judge a model, in the order of the graph, and those that put it to use and keep it up.
TRAINING = (
    "prepare", "embed", "quantize", "baselines", "expand", "ground", "finetune", "evaluate", "diagnose", "report",
)  # fmt: skip
SERVING = ("publish", "watch", "extend", "recommend")
STAGES = (*TRAINING, *SERVING)

# Places that the user names: files, the folder of the bundles, a version in it. Every other argument without a default
# is the directory of an artifact.
FILES = {
    "prepare": ("catalog", "interactions", "queries"),
    "publish": ("bundles",),
    "watch": ("bundles",),
    "extend": ("previous",),
    "recommend": ("bundles", "histories"),
}

REQUIRED: Any = object()  # the default of a parameter that has none


@dataclass(frozen=True)
class Parameter:
    """One parameter of a stage: ``type`` is str, int, float, bool or list[str]; ``text`` describes it."""

    name: str
    type: str
    default: Any
    text: str

    @property
    def required(self) -> bool:
        return self.default is REQUIRED


@dataclass(frozen=True)
class Signature:
    """What a stage says about itself: one sentence, its docstring as written, its parameters in order."""

    name: str
    sentence: str
    docstring: str
    parameters: tuple[Parameter, ...]

    @property
    def artifacts(self) -> tuple[str, ...]:
        """Names of the parameters that are directories of artifacts, inputs and outputs alike."""
        files = FILES.get(self.name, ())
        return tuple(p.name for p in self.parameters if p.required and p.name not in files)


def signature(stage: str) -> Signature:
    """Read the signature of ``stage``, the function of that name in ``sidgraft/stages/<stage>.py``."""
    file = Path(__file__).parent / "stages" / f"{stage}.py"
    tree = ast.parse(file.read_text(encoding="utf-8"))
    function = next(n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == stage)
    docstring = ast.get_docstring(function) or ""
    texts = argument_texts(docstring)
    arguments = function.args
    found = [
        *zip(arguments.args, [None] * len(arguments.args), strict=True),
        *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
    ]
    parameters = tuple(
        Parameter(
            name=argument.arg,
            type=ast.unparse(argument.annotation) if argument.annotation else "str",
            default=REQUIRED if default is None else ast.literal_eval(default),
            text=texts.get(argument.arg, ""),
        )
        for argument, default in found
    )
    return Signature(stage, docstring.partition("\n")[0], docstring, parameters)


def argument_texts(docstring: str) -> dict[str, str]:
    """Return the descriptions under ``Args:`` of a docstring, each joined to one line."""
    _, _, block = docstring.partition("Args:\n")
    texts: dict[str, str] = {}
    name = ""
    for line in block.splitlines():
        if line and not line.startswith(" "):
            break  # the next section, such as Returns:
        entry = re.match(r"    (\w+): (.*)", line)
        if entry:
            name = entry[1]
            texts[name] = entry[2].strip()
        elif name and line.strip():
            texts[name] += " " + line.strip()
    return texts
