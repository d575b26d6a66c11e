"""The tag of a release is given once: images/build.py against a client of Docker that keeps its images in files."""

import importlib.util
import os
import sys
from pathlib import Path

import pytest

from components.images import TAG, built

ROOT = Path(__file__).parents[2]
HOST = "host.example/team"
OF_THIS_CODE = built("sidgraft/data", HOST)
RELEASE = f"{HOST}/sidgraft/data:{TAG}"

# `docker build` makes the image that BUILDS names. One folder of files, a name each, is this machine, one the registry.
CLIENT = """#!{python}
import os, sys
from pathlib import Path
here, there = Path("{folder}/here"), Path("{folder}/registry")
file = lambda folder, name: folder / name.replace("/", "+")
call, name = sys.argv[1:-1], sys.argv[-1]
if call[0] == "build":
    file(here, call[call.index("--tag") + 1]).write_text(os.environ["BUILDS"])
elif call[0] == "tag":
    file(here, name).write_text(file(here, call[1]).read_text())
elif call[0] == "push":
    file(there, name).write_text(file(here, name).read_text())
elif call[:2] == ["image", "inspect"] and file(here, name).exists():
    print("sha256:" + file(here, name).read_text())
elif call[:2] == ["manifest", "inspect"] and name.endswith(os.environ.get("UNREADABLE", "?")):
    sys.exit("toomanyrequests: x509: certificate signed by unknown authority, no such host")
elif call[:2] == ["manifest", "inspect"] and file(there, name).exists():
    print('{{"config": "' + file(there, name).read_text() + '"}}')
else:
    sys.exit("no such image: " + name)
"""


@pytest.fixture
def docker(tmp_path, monkeypatch):
    """Build with the fake client, as `make images IMAGES=data RELEASE=1 PUSH=1`; `docker.tags` are those it has."""
    for folder in ("bin", "here", "registry"):
        (tmp_path / folder).mkdir()
    client = tmp_path / "bin" / "docker"
    client.write_text(CLIENT.format(python=sys.executable, folder=tmp_path))
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    spec = importlib.util.spec_from_file_location("build_images", ROOT / "images" / "build.py")
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the script adds to it
    spec.loader.exec_module(module)

    def start(image, *more, names=("data",)):
        monkeypatch.setenv("BUILDS", image)
        return module.main([*names, "--registry", HOST, "--release", *more])

    def tags(place):
        return {file.name.replace("+", "/"): file.read_text() for file in (tmp_path / place).iterdir()}

    start.tags, start.folder = tags, tmp_path
    return start


def test_a_release_is_tagged_and_pushed_and_again_without_harm(docker, capfd):
    for _ in range(2):
        assert docker("one", "--push") == 0
        assert capfd.readouterr().out.split() == [OF_THIS_CODE, RELEASE]
    assert docker.tags("here") == docker.tags("registry") == {OF_THIS_CODE: "one", RELEASE: "one"}


@pytest.mark.parametrize("push", [[], ["--push"]])
def test_a_release_that_this_machine_has_with_another_image_stays(docker, capfd, push):
    assert docker("one", *push) == 0
    capfd.readouterr()
    assert docker("two", *push) == 1
    told = capfd.readouterr()
    assert told.out.split() == [OF_THIS_CODE]
    assert f"{RELEASE} is another image on this machine already" in told.err
    assert f"docker rmi {RELEASE}" in told.err
    assert docker.tags("here")[RELEASE] == "one"
    assert docker.tags("registry").get(RELEASE) == ("one" if push else None)


def test_a_release_that_the_registry_has_with_another_image_stays(docker, capfd):
    """It was pushed from another machine."""
    file = docker.folder / "registry" / RELEASE.replace("/", "+")
    file.write_text("one")
    assert docker("two", "--push") == 1
    assert f"{RELEASE} is another image at the registry already" in capfd.readouterr().err
    assert docker.tags("registry") == {OF_THIS_CODE: "two", RELEASE: "one"}
    assert RELEASE not in docker.tags("here")


def test_one_image_that_is_out_does_not_keep_the_others_from_being_released(docker, capfd):
    assert docker("one", "--push") == 0
    assert docker("two", "--push", names=("data", "cpu")) == 1
    released = f"{HOST}/sidgraft/cpu:{TAG}"
    assert docker.tags("registry")[released] == "two"
    assert docker.tags("registry")[RELEASE] == "one"
    assert released in capfd.readouterr().out.split()


@pytest.mark.parametrize("unreadable", [OF_THIS_CODE, RELEASE])
def test_a_registry_that_does_not_say_what_it_has_gets_no_release(docker, capfd, monkeypatch, unreadable):
    monkeypatch.setenv("UNREADABLE", unreadable)
    assert docker("one", "--push") == 1
    assert f"docker push {RELEASE}" in capfd.readouterr().err
    assert docker.tags("registry") == {OF_THIS_CODE: "one"}
