"""The wheel, installed in an empty environment that has its base dependencies and nothing else."""

import importlib.metadata
import json
import os
import re
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", str(folder)]
    subprocess.run([*command, str(source(tmp_path_factory.mktemp("source")))], check=True)
    (file,) = folder.glob("sidgraft-*.whl")
    return file


def source(folder):
    """Copy what git would give a clone, so that building leaves nothing in the checkout."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.run(listed, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """An environment with the wheel and links to its base dependencies, and theirs; returns its bin folder."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=False, symlinks=True)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-deps", "--no-index"]
    subprocess.run([*pip, str(wheel)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("METADATA"))
        needed = re.findall(r"^Requires-Dist: (.*)$", archive.read(name).decode(), re.MULTILINE)
    for distribution in closure(needed):
        for top in {file.parts[0] for file in distribution.files or () if file.parts[0] not in ("..", "__pycache__")}:
            if not (site / top).exists():
                (site / top).symlink_to(distribution.locate_file(top))
    return folder / "bin"


def closure(requirements):
    """Return the installed distributions that the requirements, without extras, need."""
    found, waiting = {}, list(requirements)
    while waiting:
        requirement = Requirement(waiting.pop())
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if wanted and requirement.name not in found:
            found[requirement.name] = importlib.metadata.distribution(requirement.name)
            waiting += found[requirement.name].requires or []
    return found.values()


def run(environment, *command):
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    return subprocess.run(
        [str(environment / command[0]), *command[1:]], capture_output=True, text=True, cwd="/", env=env, check=True
    ).stdout


def test_it_holds_the_library_alone(wheel):
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.split("/")[0] for name in archive.namelist()}
        names = archive.namelist()
    assert {top for top in tops if not top.endswith(".dist-info")} == {"sidgraft"}
    shipped = {name for name in names if name.startswith("sidgraft/")}
    library = ROOT / "shared" / "sidgraft"
    files = (file for file in library.rglob("*") if file.is_file() and "__pycache__" not in file.parts)
    assert shipped == {f"sidgraft/{file.relative_to(library)}" for file in files}


def test_it_imports_and_shows_help(environment):
    place = run(environment, "python", "-c", "import sidgraft; print(sidgraft.__file__)")
    assert Path(place.strip()).is_relative_to(environment.parent)
    assert "finetune" in run(environment, "sidgraft", "--help")
    assert "--learning-rate" in run(environment, "sidgraft", "finetune", "--help")
    assert run(environment, "sidgraft", "--version") == "sidgraft 0.1.0\n"


def test_base_dependencies_are_enough_to_prepare_and_to_import_report(environment, tmp_path):
    items = [{"item_id": f"i{n}", "title": f"item {n}", "categories": ["a", "b"]} for n in range(6)]
    users = [{"user_id": f"u{n}", "items": [f"i{(n + k) % 6}" for k in range(4)]} for n in range(4)]
    for name, rows in (("items", items), ("users", users)):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = ["--catalog", str(tmp_path / "items.jsonl"), "--interactions", str(tmp_path / "users.jsonl")]
    outputs = ["--out-catalog", str(tmp_path / "c"), "--out-interactions", str(tmp_path / "i")]
    assert "items: 6" in run(environment, "sidgraft", "prepare", *files, *outputs)
    run(environment, "python", "-c", "import sidgraft.stages.report")
