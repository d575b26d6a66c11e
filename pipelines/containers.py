"""Run each stage of a local run in a container, by KFP's Docker runner: the option runner of the command run.

Containers have no network, no rights of root and a read-only root; they write under the run's folder, to /tmp and, in
retraining, to the folder of the bundles alone. They see the files of this machine that the run's parameters name,
read-only and under the same path. Stages that would run on GPUs in a cluster run in the CPU image here.
"""

import codecs
import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import docker
from docker.errors import DockerException, NotFound
from kfp import local
from kfp.local import docker_task_handler

from components.images import IMAGES, built, recipe_digest, registry
from pipelines.inputs import USER_FILES
from pipelines.settings import SettingsError
from sidgraft import storage

LABEL = "sidgraft.root"  # on a container: the folder of its run
PLAN = "containers.json"  # the file under the run's folder that tells the worker how to make the containers

# The user of the images; where root starts the run, that is who the containers are.
IMAGE_USER = 10001

MODELS = ("embed_encoder", "expand_base_model")  # parameters that may be a directory, or a name of something else


@dataclass(frozen=True)
class Containers:
    """How the containers of one run are made; handed to the worker as a file."""

    root: str
    images: dict[str, str]  # the name of an image in the pipeline -> the built image that stands for it, with its tag
    inputs: list[str]  # files and folders that the containers may read
    outputs: list[str]  # folders beside the run's own that they may write to
    user: str


def prepare(root: Path, parameters: dict[str, Any]) -> dict[str, Any]:
    """Look for the engine and the images, make the folders that containers write to, write PLAN under ``root``.

    Returns the parameters with the paths of files as the containers see them. Raises SettingsError that says what
    to do where there is no engine or no image of this code, and where bundles are in a store.
    """
    bundles = parameters.get("bundles", "")
    if storage.is_remote(bundles):
        raise SettingsError(
            f"bundles is {bundles!r}, but the containers of --runner docker have no network: give a folder of this"
            " machine, or leave out --runner docker."
        )
    images = {IMAGES[stage]: built(local_image(stage), registry()) for stage in IMAGES}
    client = engine()
    missing = sorted(image for image in set(images.values()) if not _has(client, image))
    client.close()
    if missing:
        names = " ".join(image.rpartition(":")[0].rpartition("/")[2] for image in missing)
        raise SettingsError(
            f"the Docker engine has no image {' and no image '.join(missing)}, which this code needs."
            f' Build it: make images IMAGES="{names}".'
        )
    uid = os.getuid() or IMAGE_USER
    for folder in ("artifacts", "checkpoints", "home"):
        _writable(root / folder)
    parameters, inputs = _visible(parameters)
    outputs = []
    if bundles:
        place = Path(bundles).resolve()
        for folder in (place, place / "versions"):
            _writable(folder)
        parameters, outputs = parameters | {"bundles": str(place)}, [str(place)]
    plan = Containers(str(root), images, inputs, outputs, f"{uid}:{os.getgid()}")
    (root / PLAN).write_text(json.dumps(asdict(plan), indent=1) + "\n", encoding="utf-8")
    return parameters


def local_image(stage: str) -> str:
    """Return the name of the image that runs ``stage`` here: the CPU image in place of the GPU image."""
    return {"sidgraft/gpu": "sidgraft/cpu"}.get(IMAGES[stage], IMAGES[stage])


def environments() -> dict[str, str]:
    """Return for each stage a digest of what its container has beside the library, for the image tags of a run."""
    return {stage: recipe_digest(local_image(stage)) for stage in IMAGES}


def runner(root: Path) -> local.DockerRunner:
    """Return KFP's Docker runner for the PLAN under ``root``, with its function that runs a container replaced."""
    containers = Containers(**json.loads((root / PLAN).read_text(encoding="utf-8")))
    docker_task_handler.run_docker_container = partial(run_container, containers)
    return local.DockerRunner(
        user=containers.user,
        network_mode="none",
        read_only=True,
        tmpfs={"/tmp": "mode=1777"},
        shm_size="1g",
        cap_drop=["ALL"],
        security_opt=["no-new-privileges"],
        labels={LABEL: containers.root},
    )


def run_container(
    containers: Containers,
    client: docker.DockerClient,
    image: str,
    command: list[str],
    volumes: dict[str, Any],
    **options: Any,
) -> int:
    """Run one container, print what it prints, and return its exit status.

    In place of ``kfp.local.docker_task_handler.run_docker_container``, which lets the engine remove the container and
    then takes one that it cannot find for one that succeeded. The tag of ``image`` is the fingerprint that KFP's
    cache needs; which image that is, the engine knows by the tag it was built with.
    """
    (mode,) = {volume["mode"] for volume in volumes.values()}  # KFP adds what SELinux needs
    root = Path(containers.root)
    volumes = {
        str(root / "artifacts"): {"bind": str(root / "artifacts"), "mode": mode},
        str(root / "checkpoints"): {"bind": str(root / "checkpoints"), "mode": mode},
        str(root / "home"): {"bind": "/cache", "mode": mode},
        **{path: {"bind": path, "mode": mode} for path in containers.outputs},
        **{path: {"bind": path, "mode": mode.replace("rw", "ro")} for path in containers.inputs},
    }
    name = image.rpartition(":")[0]
    container = client.containers.run(containers.images[name], command, detach=True, volumes=volumes, **options)
    try:
        for text in _decoded(container.logs(stream=True, follow=True)):
            print(text, end="", flush=True)
        status = container.wait()["StatusCode"]
        container.reload()
        if container.attrs["State"]["OOMKilled"]:
            print("MemoryError: the container needed more memory than the machine has", flush=True)
        return status
    finally:
        _remove(container)


def remove_containers(root: Path) -> None:
    """End and remove the containers of the run under ``root``: they do not end with the process that started them."""
    client = engine()
    for container in client.containers.list(all=True, filters={"label": f"{LABEL}={root}"}):
        _remove(container)
    client.close()


def engine() -> docker.DockerClient:
    """Return a client of the Docker engine; raises SettingsError where there is none."""
    try:
        client = docker.from_env()
        client.ping()
    except DockerException as error:
        raise SettingsError(
            f"no Docker engine answers ({error}). Start it, or point DOCKER_HOST to one, or leave out --runner docker."
        ) from error
    return client


def _writable(folder: Path) -> None:
    """Make a folder that the containers' user may write to."""
    folder.mkdir(parents=True, exist_ok=True)
    if os.getuid() == 0:
        os.chown(folder, IMAGE_USER, 0)


def _has(client: docker.DockerClient, image: str) -> bool:
    try:
        client.images.get(image)
    except NotFound:
        return False
    return True


def _visible(parameters: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the parameters with the paths that exist here made absolute, and these paths."""
    paths = {
        key: str(Path(value).resolve())
        for key, value in parameters.items()
        if isinstance(value, str) and value and Path(value).exists() and _is_path(key, value)
    }
    return parameters | paths, sorted(set(paths.values()))


def _is_path(key: str, value: str) -> bool:
    """The files of the user are paths; a model may be one; of the rest only what cannot be anything else."""
    if key == "bundles" or key.endswith("_checkpoints"):
        return False  # written to
    return key in (*USER_FILES, *MODELS) or Path(value).is_absolute()


def _decoded(chunks: Iterator[bytes]) -> Iterator[str]:
    """Decode a stream that is cut anywhere, also inside a character."""
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    for chunk in chunks:
        yield decoder.decode(chunk)


def _remove(container: Any) -> None:
    try:
        container.remove(force=True)
    except DockerException as error:
        if "removal" not in str(error) and not isinstance(error, NotFound):  # somebody else is removing it
            raise
