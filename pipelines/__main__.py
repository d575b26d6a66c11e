"""Run or compile the pipelines: python -m pipelines run --preset quickstart; python -m pipelines compile."""

import argparse
import sys
from pathlib import Path

import yaml

from pipelines.settings import PRESETS, SettingsError, preset_names, read_settings
from sidgraft.storage import StorageError

EXITS = (
    "exit status: 0 done; 3 done, but a variant of the study failed (the report shows it); 1 a stage failed;",
    "2 the command or a setting is wrong; 130 stopped by Ctrl-C",
)


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit status (2 where the command is wrong, see `run_locally` for the rest)."""
    arguments = _parser().parse_args(argv)
    try:
        return {"run": _run, "compile": _compile}[arguments.command](arguments)
    except (SettingsError, StorageError) as error:
        print(f"python -m pipelines {arguments.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m pipelines", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    run = commands.add_parser(
        "run",
        help="run a pipeline on this machine",
        description="Run a pipeline on this machine. Finished stages are reused when it is run again, unless"
        " their inputs, arguments or code changed.",
        epilog=_presets(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    run.add_argument("--preset", required=True, metavar="NAME", help="a preset below, or a YAML file like them")
    run.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="assignments",
        help="change one input of the pipeline; repeat it for more",
    )
    run.add_argument("--root", type=Path, metavar="DIR", help="where everything goes; the default is runs/NAME")
    commands.add_parser("compile", help="write the YAML of all pipelines and components")
    return parser


def _presets() -> str:
    lines = ["presets:"]
    for name in preset_names():
        content = yaml.safe_load((PRESETS / f"{name}.yaml").read_text(encoding="utf-8"))
        lines.append(f"  {name:<18} {content['description']}")
    return "\n".join([*lines, "", *EXITS])


def _run(arguments: argparse.Namespace) -> int:
    settings = read_settings(arguments.preset, arguments.assignments)
    from pipelines.console import Console
    from pipelines.local import run_locally

    console = Console()
    return run_locally(settings, arguments.root or Path("runs") / Path(arguments.preset).stem, console)


def _compile(_: argparse.Namespace) -> int:
    from pipelines.build import compile_all

    changed = compile_all()
    for path in changed:
        print(f"wrote {path}")
    if not changed:
        print("all YAML files are up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
