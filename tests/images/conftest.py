"""A Docker engine and the images of this code, made here where root can make them; elsewhere the tests skip.

Under .ci/run they skip only where no engine can start: with an engine, images that cannot be made are a failure.
"""

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from components.images import built, registry

ROOT = Path(__file__).parents[2]
ENGINE = Path(__file__).with_name("engine.sh")
BASE = "sidgraft-base:bookworm"

# Layers are kept between runs: the one with the packages takes minutes.
KEPT = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sidgraft-tests" / "engine"

REQUIRED = "SIDGRAFT_IMAGES_REQUIRED"  # set by .ci/run


def lacking(reason):
    """Skip the test, or fail it where CI relies on it."""
    (pytest.fail if os.environ.get(REQUIRED) else pytest.skip)(reason)


def command(*arguments, **options):
    return subprocess.run([*map(str, arguments)], cwd=ROOT, capture_output=True, text=True, **options)


@pytest.fixture(scope="session")
def engine():
    """The Docker engine that answers, another's, or one started here, ours; DOCKER_HOST names it."""
    import docker

    try:
        docker.from_env().ping()
    except docker.errors.DockerException:
        if os.getuid() != 0 or not shutil.which("dockerd"):
            pytest.skip("no Docker engine answers, and to start one takes root and dockerd (Debian's docker.io)")
        started = command(ENGINE, "start", KEPT)
        if started.returncode:
            pytest.skip(f"no Docker engine can start here: {started.stderr[-500:]}")
        os.environ["DOCKER_HOST"] = started.stdout.strip()
        yield "ours"
        del os.environ["DOCKER_HOST"]
        command(ENGINE, "stop", KEPT, check=True)
        return
    yield "another's"


@pytest.fixture(scope="session")
def images(engine):
    """The names of the images data and cpu as this code makes them, in the engine."""
    import docker

    client = docker.from_env()
    names = [built(f"sidgraft/{name}", registry()) for name in ("data", "cpu")]
    there = {tag for image in client.images.list() for tag in image.tags}
    if not set(names) <= there:
        if os.getuid() != 0 or not shutil.which("mmdebstrap"):
            lacking(
                "an engine answers, but this code's images are not in it, and to make them here takes root and Debian's"
                ' mmdebstrap: install it, or make images IMAGES="data cpu" first'
            )
        steps = (
            ("make", "wheels", f"PYTHON={sys.executable}"),
            (ENGINE, "base", BASE),
            (sys.executable, "images/build.py", "data", "cpu", "--base-image", BASE, "--", "--network=none"),
        )
        began = int(time.time())
        for step in steps:
            done = command(*step, env=os.environ | {"PIP_NO_INDEX": "1"} if step is steps[2] else None)
            assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
        if engine == "ours":
            drop_images_of_other_code(client, names, began)
    return names


def drop_images_of_other_code(client, names, began):
    """Remove the images that earlier code left, gigabytes each, and the layers that only they use."""
    for image in client.images.list():
        if image.tags and not {BASE, *names} & set(image.tags):
            client.images.remove(image.id, force=True)
    client.images.prune({"dangling": True, "until": str(began)})
