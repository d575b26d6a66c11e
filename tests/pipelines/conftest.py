"""Fixtures of the pipeline tests: a library with stand-in stages, and a function that runs the command with it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import standin

CHECKOUT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def standin_library(tmp_path_factory):
    """A folder for PYTHONPATH whose sidgraft has stand-in stages."""
    folder = tmp_path_factory.mktemp("standin")
    standin.write(folder)
    return folder


@pytest.fixture
def run(standin_library):
    """Run `python -m pipelines run` with stand-in stages; returns the finished process with its output."""

    def start(*arguments, standin="", **options):
        command = [sys.executable, "-m", "pipelines", "run", *map(str, arguments)]
        env = os.environ | {"PYTHONPATH": str(standin_library), "STANDIN": standin}
        options = {"cwd": CHECKOUT, "env": env, "text": True, **options}
        if options.pop("wait", True):
            return subprocess.run(command, capture_output=True, timeout=120, **options)
        return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)

    return start
