"""Run the pipelines here or on a cluster: python -m pipelines run --preset quickstart; python -m pipelines --help."""

import argparse
import sys
from dataclasses import replace
from pathlib import Path

import yaml

from components.images import REGISTRY, RegistryError, registry
from pipelines.cluster import ClusterError, schedule, submit, upload
from pipelines.placement import Profile, ProfileError, profile_names, read_profile
from pipelines.settings import PRESETS, SettingsError, preset_names, read_settings
from sidgraft.storage import StorageError

EXITS = (
    "exit status: 0 done; 3 done, but a variant of the study failed, or the gate refused the model (the report and the",
    "decision say why); 1 a stage failed; 2 the command or a setting is wrong; 130 stopped by Ctrl-C",
)


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns the exit status (2 where the command is wrong, see `run_locally` for the rest)."""
    arguments = _parser().parse_args(argv)
    try:
        return COMMANDS[arguments.command](arguments)
    except ClusterError as error:
        print(f"python -m pipelines {arguments.command}: {error}", file=sys.stderr)
        return 1
    except (SettingsError, ProfileError, StorageError, RegistryError) as error:
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
    _takes_settings(run)
    run.add_argument(
        "--runner",
        choices=("subprocess", "docker"),
        default="subprocess",
        help="subprocess (the default): stages are processes of this machine. docker: each is a container, on the CPU,"
        " without network and without rights of root; make images first",
    )
    run.add_argument("--root", type=Path, metavar="DIR", help="where everything goes; the default is runs/NAME")
    compile_ = commands.add_parser("compile", help="write the YAML of all pipelines, components and profiles")
    compile_.add_argument(
        "--profile",
        metavar="NAME",
        help="of this profile alone: a name, or a YAML file like them, for which components are written, too",
    )
    submit_ = commands.add_parser("submit", help="start a run on a cluster")
    schedule_ = commands.add_parser("schedule", help="run a pipeline on a cluster again and again, by the clock")
    upload_ = commands.add_parser("upload", help="upload all pipelines to a cluster, for its forms")
    for command in (submit_, schedule_, upload_):
        command.add_argument(
            "--host", required=True, metavar="URL", help="Kubeflow Pipelines; its token is read from KFP_TOKEN"
        )
        command.add_argument("--profile", default="h100", metavar="NAME", help="where the stages run; default h100")
        command.add_argument("--namespace", default="", metavar="NAME", help="yours, where the cluster has many users")
    for command in (submit_, schedule_):
        _takes_settings(command)
        command.add_argument(
            "--experiment", default="", metavar="NAME", help="one that exists; the default is sidgraft"
        )
        command.add_argument("--run-name", default="", metavar="NAME", help="the default is the preset's name")
        command.add_argument(
            "--service-account",
            metavar="NAME",
            help="who the run is in Kubernetes; the default is the profile's, '' the one of Kubeflow Pipelines",
        )
    schedule_.add_argument(
        "--cron",
        required=True,
        metavar="FIELDS",
        help="six fields, seconds first, as '0 0 3 * * *' for 03:00 every day",
    )
    return parser


def _takes_settings(command: argparse.ArgumentParser) -> None:
    command.add_argument("--preset", required=True, metavar="NAME", help="a preset, or a YAML file like them")
    command.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        dest="assignments",
        help="change one input of the pipeline; repeat it for more",
    )


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
    root = arguments.root or Path("runs") / Path(arguments.preset).stem
    return run_locally(settings, root, console, arguments.runner)


def _compile(arguments: argparse.Namespace) -> int:
    from pipelines.build import compile_all, placed_targets, write, write_nodes

    if arguments.profile:
        if arguments.profile not in profile_names():  # those have the released images
            _tell_of_registry(read_profile(arguments.profile))
        changed = write(placed_targets(arguments.profile)) + write_nodes([arguments.profile])
    else:
        changed = compile_all()
    for path in changed:
        print(f"wrote {path}")
    if not changed:
        print("all YAML files are up to date")
    return 0


def _submit(arguments: argparse.Namespace) -> int:
    settings = read_settings(arguments.preset, arguments.assignments)
    page = submit(arguments.host, settings, _profile(arguments), **_where(arguments))
    print(f"Run: {page}")
    return 0


def _schedule(arguments: argparse.Namespace) -> int:
    settings = read_settings(arguments.preset, arguments.assignments)
    profile = _profile(arguments)
    print(f"Schedule: {schedule(arguments.host, settings, profile, cron=arguments.cron, **_where(arguments))}")
    return 0


def _upload(arguments: argparse.Namespace) -> int:
    for page in upload(arguments.host, _profile(arguments), namespace=arguments.namespace):
        print(f"Pipeline: {page}")
    return 0


def _profile(arguments: argparse.Namespace) -> Profile:
    """Read the profile and what is said beside it."""
    profile = read_profile(arguments.profile)
    if getattr(arguments, "service_account", None) is not None:
        profile = replace(profile, service_account=arguments.service_account)
    _tell_of_registry(profile)
    return profile


def _tell_of_registry(profile: Profile) -> None:
    """Tell where images are looked for that only this machine has."""
    if not registry() and not profile.images:
        print(
            f"{REGISTRY} is not set: images have no registry, so the nodes must hold them already: one that does not"
            " asks Docker Hub, where their name is free for anyone to take (images/README.md).",
            file=sys.stderr,
        )


def _where(arguments: argparse.Namespace) -> dict[str, str]:
    return {name: getattr(arguments, name) for name in ("namespace", "experiment", "run_name")}


COMMANDS = {"run": _run, "compile": _compile, "submit": _submit, "upload": _upload, "schedule": _schedule}


if __name__ == "__main__":
    sys.exit(main())
