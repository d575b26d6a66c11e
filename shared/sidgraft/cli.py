"""The command line: `sidgraft STAGE --help`. Each command is made from the signature of its stage."""

from __future__ import annotations

import argparse
import difflib
import importlib
import json
import os
import re
import sys
import time
from pathlib import Path
from typing import Any, NoReturn

from sidgraft import __version__
from sidgraft.signatures import STAGES, Parameter, Signature, signature

TYPES = {"str": str, "int": int, "float": float}
METAVARS = {"str": "TEXT", "int": "N", "float": "X"}


def main(argv: list[str] | None = None) -> int:
    """Run one stage from the command line; returns the exit status.

    0: done. 1: the stage says why it cannot. 2: the command is wrong. 130: stopped by Ctrl-C.
    """
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if argv[0] in ("-V", "--version"):
        print(f"sidgraft {__version__}")
        return 0
    name, rest = argv[0], argv[1:]
    if name not in STAGES:
        near = difflib.get_close_matches(name, STAGES, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the stages are: {', '.join(STAGES)}."
        print(f"sidgraft: no stage is called {name!r}; {hint}", file=sys.stderr)
        return 2
    stage = signature(name)
    try:
        arguments = parse(stage, rest)
    except SystemExit as stop:  # argparse has printed the help or the error
        return int(stop.code or 0)
    return _run(name, arguments)


def parse(stage: Signature, argv: list[str]) -> dict[str, Any]:
    """Turn command-line arguments into the keyword arguments of ``stage``; leaves by SystemExit."""
    parser = _parser(stage)
    known, unknown = parser.parse_known_args(argv)
    if unknown:
        flags = [_flag(parameter.name) for parameter in stage.parameters]
        near = difflib.get_close_matches(unknown[0].partition("=")[0].replace("_", "-"), flags, n=1)
        parser.error(f"unknown argument {unknown[0]!r}" + (f"; did you mean {near[0]}?" if near else ""))
    missing = [_flag(p.name) for p in stage.parameters if p.required and not getattr(known, p.name)]
    if missing:
        parser.error(f"{', '.join(missing)} must be given")
    return vars(known)


def _usage() -> str:
    lines = [f"  {name:<10} {_lower_first(signature(name).sentence)}" for name in STAGES]
    return (
        "usage: sidgraft STAGE [options]\n\n" + "\n".join(lines) + "\n\n`sidgraft STAGE --help` shows its options."
        "\nAll stages in one go, from a checkout: python -m pipelines run --preset quickstart"
    )


def _lower_first(sentence: str) -> str:
    return sentence[0].lower() + sentence[1:].rstrip(".")


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n`{self.prog} --help` shows the options.\n")


def _parser(stage: Signature) -> argparse.ArgumentParser:
    parser = _Parser(
        prog=f"sidgraft {stage.name}",
        usage=" ".join(
            [
                f"sidgraft {stage.name}",
                *(f"{_flag(p.name)} {_place(stage, p)}" for p in stage.parameters if p.required),
                "[options]",
            ]
        ),
        description=stage.sentence,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=30, width=100),
        allow_abbrev=False,
    )
    required = parser.add_argument_group("inputs and outputs")
    options = parser.add_argument_group("settings")
    for parameter in stage.parameters:
        text = parameter.text.replace("%", "%%")
        if parameter.required:
            kind: dict[str, Any] = {"metavar": _place(stage, parameter)}
            if parameter.type == "list[str]":
                kind |= {"action": "extend", "type": _split}
                text += " Give the option once a directory, or the directories separated by commas."
            required.add_argument(_flag(parameter.name), dest=parameter.name, help=text, **kind)
        elif parameter.type == "bool":
            options.add_argument(
                _flag(parameter.name),
                dest=parameter.name,
                default=parameter.default,
                action=argparse.BooleanOptionalAction,
                help=text,
            )
        else:
            options.add_argument(
                _flag(parameter.name),
                dest=parameter.name,
                default=parameter.default,
                type=TYPES[parameter.type],
                metavar=METAVARS[parameter.type],
                help=f"{text} (default: {_shown(parameter.default)})",
            )
    return parser


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _place(stage: Signature, parameter: Parameter) -> str:
    return "DIR" if parameter.name in (*stage.artifacts, "bundles") else "FILE"


def _shown(default: Any) -> str:
    return "empty" if default == "" else str(default).replace("%", "%%")


def _split(text: str) -> list[str]:
    return [part for part in re.split(r",\s*", text) if part]


def _run(name: str, arguments: dict[str, Any]) -> int:
    try:
        stage = getattr(importlib.import_module(f"sidgraft.stages.{name}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").startswith("sidgraft"):
            raise
        print(
            f"sidgraft {name}: the package {error.name} is not installed; install sidgraft[train,figures].",
            file=sys.stderr,
        )
        return 1
    try:
        summary = stage(**arguments)
    except (ValueError, OSError) as error:
        print(f"sidgraft {name}: {error}", file=sys.stderr)
        _tell_torchrun(error)
        return 1
    except KeyboardInterrupt:
        print(f"\nsidgraft {name}: stopped; no artifact was written.", file=sys.stderr)
        return 130
    for key, value in summary.items():
        print(f"{key}: {value}")
    return 0


def _tell_torchrun(error: Exception) -> None:
    """Leave the message where the process that started this one under torchrun looks for it."""
    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        text = json.dumps({"message": str(error), "timestamp": int(time.time())})
        Path(os.environ["TORCHELASTIC_ERROR_FILE"]).write_text(text, encoding="utf-8")


def _end(status: int) -> NoReturn:
    """End the process. One of torchrun's ends without the interpreter's clean-up.

    Threads of process groups that still run then abort, now and then, a process whose work is done.
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


if __name__ == "__main__":
    _end(main())
