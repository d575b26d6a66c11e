"""The stages of a local run as forks of one process that has imported what they need.

A process a stage spends five seconds or more on importing torch and transformers, ten times in a run. Here one
process does so, and every stage is a fork of it: its own memory, environment and end, as before.
"""

import atexit
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path

from kfp.dsl import executor_main
from kfp.local import subprocess_task_handler

GPUS = (Path("/dev/nvidiactl"), Path("/dev/dxg"), Path("/dev/kfd"))  # NVIDIA's, in Windows' Linux, AMD's
PRELOADED = "pipelines.preloaded"


def use_forks() -> None:
    """Let kfp.local run the tasks of its SubprocessRunner as forks from now on.

    Where there is a GPU it starts new processes as it always did: a library that asks for the GPU while it is imported
    makes it unusable in every fork.
    """
    if any(gpu.exists() for gpu in GPUS):
        return
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([PRELOADED])

    def run_local_subprocess(full_command: list[str], env_vars: dict[str, str] | None = None) -> int | None:
        process = context.Process(target=execute, args=(full_command, env_vars or {}))
        process.start()
        process.join()
        return process.exitcode

    subprocess_task_handler.run_local_subprocess = run_local_subprocess


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
