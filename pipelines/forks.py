"""The stages of a local run as forks of one process that has imported what they need.

A process a stage spends five seconds or more on importing torch and transformers, ten times in a run. Here one
process does so, and every stage is a fork of it: its own memory, environment and end, as before.
"""

import atexit
import multiprocessing
import os
import signal
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from kfp.dsl import executor_main
from kfp.local import subprocess_task_handler

from sidgraft.tasks import ENDED_BY

GPUS = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/kfd"))  # NVIDIA's, in Windows' Linux, AMD's
PRELOADED = "pipelines.preloaded"
OF_A_SHELL = 128  # and the signal, where it ended the command of a shell
PEOPLES = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}  # by which somebody ends the run

Run = Callable[..., int | None]


def use_forks() -> None:
    """Let kfp.local run the tasks of its SubprocessRunner as forks from now on.

    Where there is a GPU it starts new processes as it always did: a library that asks for the GPU while it is imported
    makes it unusable in every fork.
    """
    new_processes = subprocess_task_handler.run_local_subprocess
    run = new_processes if any(gpu.exists() for gpu in GPUS) else forks()
    subprocess_task_handler.run_local_subprocess = telling_what_was_killed(run)


def forks() -> Run:
    """Return what runs a task's command as a fork and gives its exit status; minus the signal that ended it."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])

    def run_local_subprocess(full_command: list[str], env_vars: dict[str, str] | None = None) -> int | None:
        process = context.Process(target=execute, args=(full_command, env_vars or {}))
        process.start()
        process.join()
        return process.exitcode

    return run_local_subprocess


def telling_what_was_killed(run: Run) -> Run:
    """Let a task that a signal has ended, as the system does where memory runs out, begin anew only to tell so.

    A process that is killed can say nothing itself, nor mark its outputs as failed for the rest of a study.
    """

    def run_local_subprocess(full_command: list[str], env_vars: dict[str, str] | None = None) -> int | None:
        status = run(full_command=full_command, env_vars=env_vars)
        number = -status if status and status < 0 else (status or 0) - OF_A_SHELL
        if number not in set(signal.Signals) - PEOPLES:
            return status
        return run(full_command=full_command, env_vars=(env_vars or {}) | {ENDED_BY: signal.Signals(number).name})

    return run_local_subprocess


def execute(full_command: list[str], env_vars: dict[str, str]) -> None:
    """Do what the command of a KFP Python component does: sh -ec SCRIPT SOURCE ARGUMENTS, where SCRIPT saves SOURCE as
    a module and runs KFP's executor on it."""
    _, _, _, source, *arguments = full_command
    os.environ.update(env_vars)
    with tempfile.TemporaryDirectory() as folder:
        module = Path(folder) / "ephemeral_component.py"
        module.write_text(source, encoding="utf-8")
        sys.argv = [executor_main.__file__, "--component_module_path", str(module), *arguments]
        try:
            executor_main.executor_main()
        finally:
            atexit._run_exitfuncs()  # multiprocessing leaves them out; trackers of experiments finish their runs there
