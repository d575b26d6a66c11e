"""The Dockerfiles and lock files: lint, rights, exact versions that the library takes; and the tags."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from components import images

ROOT = Path(__file__).parents[2]
NAMES = sorted({name.removeprefix("sidgraft/") for name in images.IMAGES.values()})
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MODELS = ("train", "lora", "figures", "tensorboard", "samples", "s3", "pipelines")
EXTRAS = {"data": ("s3", "pipelines"), "cpu": MODELS, "gpu": (*MODELS, "qlora", "deepspeed", "trainjob")}


def dockerfile(name):
    return (ROOT / "images" / name / "Dockerfile").read_text(encoding="utf-8")


def locked(name):
    """Return {package: requirement} of a lock file."""
    lines = (ROOT / "images" / name / "requirements.lock").read_text(encoding="utf-8").splitlines()
    found = [Requirement(line) for line in lines if line and not line.startswith("#")]
    return {canonicalize_name(requirement.name): requirement for requirement in found}


@pytest.mark.parametrize("name", NAMES)
def test_the_dockerfile_has_no_lint(name):
    hadolint = Path(sys.executable).with_name("hadolint")
    command = [str(hadolint), "--failure-threshold", "style", f"images/{name}/Dockerfile"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("name", NAMES)
def test_the_image_has_a_pinned_base_a_numeric_user_writable_caches_and_labels(name):
    text = dockerfile(name)
    (base,) = re.findall(r"^ARG BASE_IMAGE=(\S+)$", text, re.MULTILINE)
    assert re.fullmatch(r"python:3\.11\.\d+-slim-\w+", base)
    assert re.findall(r"^FROM (.*)$", text, re.MULTILINE) == ["${BASE_IMAGE} AS build", "${BASE_IMAGE}"]
    final = text[text.rindex("FROM ") :]
    (user,) = re.findall(r"^USER (\d+):", final, re.MULTILINE)
    assert int(user) > 0
    places = dict(re.findall(r"\b(HOME|HF_HOME|MPLCONFIGDIR|XDG_CACHE_HOME)=(\S+)", final))
    assert len(places) == 4
    assert all(place.startswith("/cache") for place in places.values())
    assert {"title", "description", "version", "licenses"} <= set(re.findall(r"image\.(\w+)=", final))


def test_the_gpu_image_finds_the_driver_of_gke_and_takes_no_gpu_that_was_not_given():
    environment = dockerfile("gpu")
    assert "LD_LIBRARY_PATH=/usr/local/nvidia/lib64 " in environment
    assert not re.search(r"^ *NVIDIA_VISIBLE_DEVICES=", environment, re.MULTILINE)


@pytest.mark.parametrize("name", NAMES)
def test_every_version_is_exact_and_one_that_the_library_takes(name):
    found = locked(name)
    assert found
    assert [r for r in found.values() if not re.fullmatch(r"==[^*,]+", str(r.specifier))] == []
    wanted = [*PROJECT["dependencies"]]
    for extra in EXTRAS[name]:
        wanted += PROJECT["optional-dependencies"][extra]
    for requirement in map(Requirement, wanted):
        (pin,) = found[canonicalize_name(requirement.name)].specifier
        assert requirement.specifier.contains(pin.version, prereleases=True), f"{requirement}: locked at {pin.version}"


def test_data_has_no_torch_cpu_no_cuda_and_gpu_the_same_versions():
    data, cpu, gpu = locked("data"), locked("cpu"), locked("gpu")
    assert "torch" not in data
    assert str(cpu["torch"].specifier).endswith("+cpu")
    assert not [package for package in cpu if package.startswith(("nvidia", "cuda", "triton"))]
    assert {"deepspeed", "bitsandbytes", "nvidia-nccl-cu13"} <= set(gpu)
    different = {package for package in cpu if cpu[package].specifier != gpu[package].specifier}
    assert different == {"torch"}
    assert str(cpu["torch"].specifier) == f"{gpu['torch'].specifier}+cpu"
    assert not [package for package in data if data[package].specifier != cpu[package].specifier]


def test_a_change_of_code_or_of_packages_changes_the_tag(tmp_path, monkeypatch):
    for folder in ("shared", "images"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("__pycache__", "*.whl"))
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    before = {name: images.code_tag(name) for name in set(images.IMAGES.values())}
    monkeypatch.setattr(images, "CHECKOUT", tmp_path)

    def changed():
        return {name for name, tag in before.items() if images.code_tag(name) != tag}

    assert changed() == set()
    with (tmp_path / "images/cpu/requirements.lock").open("a") as file:
        file.write("another==1.0\n")
    assert changed() == {"sidgraft/cpu"}
    recipe = tmp_path / "images/data/Dockerfile"
    other_base = re.sub(r"(?m)^ARG BASE_IMAGE=.*$", "ARG BASE_IMAGE=another:1", recipe.read_text())
    assert other_base != recipe.read_text()
    recipe.write_text(other_base)
    assert changed() == {"sidgraft/cpu", "sidgraft/data"}
    with (tmp_path / "shared/sidgraft/artifacts.py").open("a") as file:
        file.write("\n")
    assert changed() == set(before)


def test_the_registry_is_set_in_one_place(monkeypatch):
    monkeypatch.setenv("SIDGRAFT_REGISTRY", "host.example:5000/team/")
    assert images.built("sidgraft/cpu", images.registry()).startswith("host.example:5000/team/sidgraft/cpu:v")
    monkeypatch.delenv("SIDGRAFT_REGISTRY")
    assert images.built("sidgraft/cpu", images.registry()).startswith("sidgraft/cpu:v")
