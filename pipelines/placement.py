"""Where the stages run on a cluster: read a profile (pipelines/profiles/*.yaml) and apply it to a pipeline.

    python -m pipelines compile --profile NAME

A profile is a mapping of: `description`; `images` (full references of images of one's own in place of those of this
code, by `data`, `cpu`, `gpu`); `checkpoints` (a folder on s3:// for those of ground and finetune, empty for none);
`secret` (the Kubernetes secret with the object store's credentials, empty for none); `env` (variables of every pod: a
store's path style, a proxy, the address of a tracking server); `secrets` (variables whose values lie in other secrets:
secret -> variable -> its key there); `mounts` (a list of a `secret` or `config_map` and the `path` of a folder where
its keys are files); `service_account` (who the runs are that `submit` and `schedule` start, empty for the account of
Kubeflow Pipelines); `queue` and `priority` (Kueue's queue and priority class, empty for none); `gpu` (what a stage with
GPUs gets: `resource`, `node_selector`, `node_affinity`, `tolerations`); `cpu` (the last three for the stages without);
`defaults` (resources of every stage) and `stages` (what a stage has otherwise: resources, and `queue`, `priority`,
`node_selector`, `node_affinity` or `tolerations` in place of those above). It is applied when a pipeline is compiled,
to the pods of manifests/ by pipelines/nodes.py, and by `place` to a task in a pipeline of one's own; the local runner
knows none of it.
"""

import difflib
import inspect
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from kfp import dsl, kubernetes
from kfp.dsl import pipeline_context

from components.images import IMAGES, image

PROFILES = Path(__file__).parent / "profiles"

KEYS = (
    "description", "images", "checkpoints", "secret", "env", "secrets", "mounts", "service_account",
    "queue", "priority", "gpu", "cpu", "defaults", "stages",
)  # fmt: skip
NODE_KEYS = ("node_selector", "node_affinity", "tolerations")
GPU_KEYS = ("resource", *NODE_KEYS)
QUEUE_KEYS = ("queue", "priority")
TOLERATION_KEYS = ("key", "operator", "value", "effect")
MOUNT_KEYS = ("secret", "config_map", "path")
AFFINITY_KEYS = ("key", "operator", "values")
RESOURCE_KEYS = ("cpu", "memory", "gpus", "shm", "timeout", "retries", "backoff", "cache")

QUANTITY = re.compile(r"^[1-9][0-9]*Gi$")
DURATION = re.compile(r"^[1-9][0-9]*[smh]$")
SECONDS = {"s": 1, "m": 60, "h": 3600}
PENDING = 7 * 24 * 3600  # seconds that a try may wait for its node or in a queue, and that no other try then lacks
MOST_RETRIES = 10  # the pauses between tries double, and the tenth of 30 s is four hours

# How fine-tuning uses the GPUs of one pod where it has several and nothing else is said.
STRATEGY = "zero2"
CHECKPOINTED = ("ground", "finetune")

# On every pod of a stage: the network policy in manifests/ goes by it.
LABEL = ("app.kubernetes.io/part-of", "sidgraft")

# Read from the secret where it has them. A store that needs none has no such secret, nor has a cluster that gives
# service accounts a role at the store, which sidgraft.storage takes up where there are no keys.
SECRET_KEYS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ENDPOINT_URL", "AWS_REGION")

VARIABLE = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
# Names that say that the value is a secret; those that end in one of PLACES say where one lies.
SECRET_NAME = re.compile(r"(^|_)(API)?(KEY|TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?)(_|$)", re.I)
PLACES = ("_FILE", "_PATH", "_DIR", "_URI", "_URL")
PASSWORD_IN_URL = re.compile(r"://[^/@\s]*:[^/@\s]*@")
PROXIES = ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")

# KFP names the volume after what it holds; the others are those of manifests/ and of `place`.
VOLUME = re.compile(r"^(?!(shm|cache|tmp)$)[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")
TAKEN_PATHS = ("", "/tmp", "/cache", "/dev/shm")  # of the root and the same volumes

REFERENCE = re.compile(r"^[a-z0-9][\w.:/-]*?(:[\w][\w.-]{0,127}|@sha256:[0-9a-f]{64})$")


class ProfileError(ValueError):
    """A profile is wrong; the message says what was found and what was expected."""


@dataclass(frozen=True)
class Resources:
    """What one stage gets. ``memory`` is the process's own; the pod's limit also holds ``shm``, which counts as memory.

    Memory in Gi, cpu in cores, timeout and backoff in seconds.
    """

    cpu: int
    memory: int
    timeout: int
    retries: int
    backoff: int
    gpus: int = 0
    shm: int = 0
    cache: bool = True
    queue: str = ""
    priority: str = ""
    nodes: Mapping[str, Any] = field(default_factory=dict)  # of NODE_KEYS those that are the stage's own


@dataclass(frozen=True)
class Profile:
    """A profile, read and checked: the resources of every stage, and how stages find their nodes.

    ``gpu`` and ``cpu`` hold what is set of NODE_KEYS for the stages with and without GPUs.
    """

    name: str
    stages: Mapping[str, Resources]
    images: Mapping[str, str] = field(default_factory=dict)
    checkpoints: str = ""
    secret: str = ""
    env: Mapping[str, str] = field(default_factory=dict)
    secrets: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # secret -> variable -> key in it
    mounts: Sequence[Mapping[str, str]] = ()  # each with secret or config_map, and path
    service_account: str = ""
    resource: str = ""
    gpu: Mapping[str, Any] = field(default_factory=dict)
    cpu: Mapping[str, Any] = field(default_factory=dict)

    def image(self, stage: str) -> str | None:
        """Return the image that the profile sets for a stage; None where it keeps ours."""
        return self.images.get(IMAGES[stage].rpartition("/")[2])

    def store_keys(self) -> list[str]:
        """Return the variables that come from ``secret``: SECRET_KEYS but for those that are said otherwise."""
        said = {*self.env, *(name for variables in self.secrets.values() for name in variables)}
        return [key for key in SECRET_KEYS if key not in said] if self.secret else []


def profile_names() -> list[str]:
    """Return the names of all profiles."""
    return sorted(file.stem for file in PROFILES.glob("*.yaml"))


def read_profile(name: str) -> Profile:
    """Read a profile by name, or a YAML file of the same form.

    Raises ProfileError for unknown profiles and keys (with the nearest right one) and for values that do not fit.
    """
    file = Path(name) if name.endswith((".yaml", ".yml")) else PROFILES / f"{name}.yaml"
    if not file.is_file():
        raise ProfileError(
            f"there is no profile {name!r}; the profiles are {', '.join(profile_names())}."
            + _near(name, profile_names())
        )
    if file.stem in profile_names() and file.resolve() != (PROFILES / f"{file.stem}.yaml").resolve():
        raise ProfileError(f"{file} has the name of a profile of sidgraft's, whose YAML it would replace: rename it.")
    content = yaml.safe_load(file.read_text(encoding="utf-8"))
    where = f"profile {file.stem}"
    content = _mapping(content, KEYS, where)
    gpu = _mapping(content.get("gpu"), GPU_KEYS, f"{where}: gpu")
    gpu_nodes = _nodes(gpu, f"{where}: gpu")
    stages = _stages(content, where)
    for stage, resources in stages.items():
        found = {**gpu_nodes, **resources.nodes}
        if resources.gpus and not (gpu.get("resource") and (found.get("node_selector") or found.get("node_affinity"))):
            raise ProfileError(
                f"{where}: {stage} has GPUs, so gpu must say their resource (nvidia.com/gpu) and a node_selector or"
                " node_affinity."
            )
    checkpoints = content.get("checkpoints") or ""
    if checkpoints and not str(checkpoints).startswith("s3://"):
        raise ProfileError(
            f"{where}: checkpoints is {checkpoints!r}, expected a folder that outlives a pod, s3://BUCKET/FOLDER; empty"
            " for none."
        )
    return Profile(
        name=file.stem,
        checkpoints=checkpoints.rstrip("/"),
        stages=stages,
        images=_images(content, where),
        secret=content.get("secret") or "",
        env=_env(content, where),
        secrets=_secrets(content, where),
        mounts=_mounts(content, where),
        service_account=content.get("service_account") or "",
        resource=gpu.get("resource", ""),
        gpu=gpu_nodes,
        cpu=_nodes(_mapping(content.get("cpu"), NODE_KEYS, f"{where}: cpu"), f"{where}: cpu"),
    )


def for_parameters(profile: Profile, parameters: Mapping[str, Any]) -> Profile:
    """Return the profile as a run with these parameters needs it.

    Fine-tuning on several nodes is a job beside the task that starts it, which then needs no GPU itself, nor the nodes
    that finetune asks for. Raises ProfileError where a setting leaves GPUs idle.
    """
    gpus = profile.stages["finetune"].gpus
    if gpus > 1 and parameters.get("finetune_strategy") == "none":
        raise ProfileError(
            f"finetune_strategy is none, which trains on one GPU, and the profile {profile.name} gives {gpus} to"
            " finetune: leave the setting out, or take a profile of your own with finetune: {gpus: 1, ...}."
        )
    if parameters.get("finetune_nodes", 1) <= 1:
        return profile
    own = profile.stages["finetune"]
    light = replace(own, cpu=min(own.cpu, 2), memory=min(own.memory, 16), gpus=0, shm=0, nodes={})
    return replace(profile, stages={**profile.stages, "finetune": light})


def placed(pipeline: Any, profile: Profile, images: Mapping[str, str] | None = None) -> Any:
    """Return the pipeline made anew, with every task placed as the profile says.

    ``images`` are those of the stages where it is not the released ones.
    """
    graph = pipeline.pipeline_func
    chosen = {stage: profile.image(stage) or (images or {}).get(stage) or image(stage) for stage in IMAGES}

    def function(*channels: Any) -> Any:
        output = graph(*channels)
        made = pipeline_context.Pipeline.get_default_pipeline()
        assert made is not None  # the decorator below makes one around this function
        for task in made.tasks.values():
            task.set_container_image(chosen[task.component_spec.name])
            place(task, profile)
        return output

    own = _defaults(profile, chosen)
    signature = inspect.signature(graph)
    inputs = [p.replace(default=own.get(name, p.default)) for name, p in signature.parameters.items()]
    function.__name__ = graph.__name__
    function.__doc__ = graph.__doc__
    function.__signature__ = signature.replace(parameters=inputs)  # type: ignore[attr-defined]
    return dsl.pipeline(name=pipeline.name)(function)


def _defaults(profile: Profile, images: Mapping[str, str]) -> dict[str, Any]:
    """Return the inputs of a pipeline whose default is another on this profile.

    Several GPUs are trained on by several processes. Checkpoints lie in a folder named by the code: no other code goes
    on from them.
    """
    own: dict[str, Any] = {}
    if profile.stages["finetune"].gpus > 1:
        own["finetune_strategy"] = STRATEGY
    if profile.stages["ground"].gpus > 1:
        own["ground_processes"] = 0  # one for every visible GPU
    if profile.checkpoints:
        for stage in CHECKPOINTED:
            own[f"{stage}_checkpoints"] = f"{profile.checkpoints}/{images[stage].rpartition(':')[2]}"
    return own


def place(task: dsl.PipelineTask, profile: Profile) -> None:
    """Give the task of a component of sidgraft what the profile says of its stage, inside of a pipeline.

    That is all but the image: resources, node, shared memory, time, retries, caching, queue, the secret of the object
    store and the security context. A component's YAML can say none of it; who the run is (`service_account`) is said
    where it is started. Raises ProfileError for a task of another component.
    """
    stage = task.component_spec.name
    if stage not in profile.stages:
        raise ProfileError(
            f"profile {profile.name} says nothing of the component {stage!r}; it places those of sidgraft:"
            f" {', '.join(profile.stages)}."
        )
    resources = profile.stages[stage]
    memory = f"{resources.memory + resources.shm}Gi"
    task.set_cpu_request(str(resources.cpu)).set_cpu_limit(str(resources.cpu))
    task.set_memory_request(memory).set_memory_limit(memory)
    task.set_retry(
        num_retries=resources.retries,
        backoff_duration=f"{resources.backoff}s",
        backoff_factor=2.0,
        backoff_max_duration=f"{_all_tries(resources)}s",
    )
    task.set_caching_options(resources.cache and bool(task._task_spec.enable_caching))  # a graph may have said no
    kubernetes.set_timeout(task, resources.timeout)
    # The images' user is a number, so the kubelet can check it; OpenShift sets another one. The backend forbids
    # privilege escalation and drops all capabilities by itself, and takes no such field.
    kubernetes.set_security_context(task, run_as_non_root=True)
    kubernetes.add_pod_label(task, *LABEL)
    if keys := profile.store_keys():
        kubernetes.use_secret_as_env(task, profile.secret, {key: key for key in keys}, optional=True)
    for name, value in profile.env.items():
        task.set_env_variable(name, value)
    for secret, variables in profile.secrets.items():
        kubernetes.use_secret_as_env(task, secret, {key: name for name, key in variables.items()})
    for mount in profile.mounts:
        if "secret" in mount:
            kubernetes.use_secret_as_volume(task, mount["secret"], mount["path"])
        else:
            kubernetes.use_config_map_as_volume(task, mount["config_map"], mount["path"])
    if resources.queue:
        kubernetes.add_pod_label(task, "kueue.x-k8s.io/queue-name", resources.queue)
    if resources.priority:
        kubernetes.add_pod_label(task, "kueue.x-k8s.io/priority-class", resources.priority)
    if resources.shm:
        kubernetes.empty_dir_mount(task, "shm", "/dev/shm", medium="Memory", size_limit=f"{resources.shm}Gi")
    if resources.gpus:
        task.set_accelerator_type(profile.resource).set_accelerator_limit(resources.gpus)
    nodes = {**(profile.gpu if resources.gpus else profile.cpu), **resources.nodes}
    for key, value in nodes.get("node_selector", {}).items():
        kubernetes.add_node_selector(task, key, value)
    if nodes.get("node_affinity"):
        kubernetes.add_node_affinity(task, match_expressions=[dict(rule) for rule in nodes["node_affinity"]])
    for toleration in nodes.get("tolerations", ()):
        kubernetes.add_toleration(task, **toleration)


def _all_tries(resources: Resources) -> int:
    """Return the seconds from the start of a task's first try after which Argo begins no other: room for all of them.

    What KFP calls the longest backoff is that limit (Argo's ``backoff.maxDuration``), so it must not end the tries
    before ``retries`` does. A pod's ``timeout`` begins on its node, the limit before that.
    """
    tries = (resources.retries + 1) * (PENDING + resources.timeout)
    return tries + resources.backoff * (2**resources.retries - 1)  # the pauses double


def _stages(content: Mapping[str, Any], where: str) -> dict[str, Resources]:
    defaults = _mapping(content.get("defaults"), RESOURCE_KEYS, f"{where}: defaults")
    given = _mapping(content.get("stages"), tuple(IMAGES), f"{where}: stages")
    queue = _queue(content, where)
    stages = {}
    for stage in IMAGES:
        here = f"{where}: {stage}"
        own = _mapping(given.get(stage), (*RESOURCE_KEYS, *QUEUE_KEYS, *NODE_KEYS), here)
        resources = _resources(defaults | own, here)
        stages[stage] = replace(resources, nodes=_nodes(own, here), **_queue(queue | own, here))
    return stages


def _queue(values: Mapping[str, Any], where: str) -> dict[str, str]:
    queue = _texts({key: values.get(key) or "" for key in QUEUE_KEYS}, where)
    if queue["priority"] and not queue["queue"]:
        raise ProfileError(
            f"{where}: priority is Kueue's and needs a queue; Kubeflow Pipelines sets no priority of a pod itself."
        )
    return queue


def _nodes(values: Mapping[str, Any], where: str) -> dict[str, Any]:
    """Return those of NODE_KEYS that are given, checked; an empty one is given too, and asks for nothing."""
    read = {
        "node_selector": lambda value: _texts(value, f"{where}: node_selector"),
        "node_affinity": lambda value: _rules(value, AFFINITY_KEYS, f"{where}: node_affinity"),
        "tolerations": lambda value: _rules(value, TOLERATION_KEYS, f"{where}: tolerations"),
    }
    return {key: check(values[key]) for key, check in read.items() if key in values}


def _resources(values: Mapping[str, Any], where: str) -> Resources:
    missing = [key for key in ("cpu", "memory", "timeout", "retries", "backoff") if key not in values]
    if missing:
        raise ProfileError(f"{where}: {missing[0]} is not set; give it here or under defaults.")
    counts = {key: _count(values, key, where, least) for key, least in (("cpu", 1), ("retries", 1), ("gpus", 0))}
    if counts["retries"] > MOST_RETRIES:
        raise ProfileError(
            f"{where}: retries is {counts['retries']}, expected at most {MOST_RETRIES}: the pauses between tries"
            " double."
        )
    resources = Resources(
        cpu=counts["cpu"],
        memory=_gibibytes(values, "memory", where),
        timeout=_seconds(values, "timeout", where),
        retries=counts["retries"],
        backoff=_seconds(values, "backoff", where),
        gpus=counts["gpus"],
        shm=_gibibytes(values, "shm", where) if values.get("shm") else 0,
        cache=values.get("cache", True),
    )
    if not isinstance(resources.cache, bool):
        raise ProfileError(f"{where}: cache is {resources.cache!r}, expected true or false.")
    if resources.gpus and not resources.shm:
        raise ProfileError(
            f"{where} has GPUs and no shm; NCCL and data loaders need more than the 64 MB of a container:"
            " set shm, such as 16Gi."
        )
    return resources


def _images(content: Mapping[str, Any], where: str) -> dict[str, str]:
    names = tuple(dict.fromkeys(name.rpartition("/")[2] for name in IMAGES.values()))
    images = _texts(_mapping(content.get("images"), names, f"{where}: images"), f"{where}: images")
    for name, reference in images.items():
        if not REFERENCE.match(reference) or reference.endswith(":latest"):
            raise ProfileError(
                f"{where}: images: {name} is {reference!r}, expected a reference with a tag or digest that never"
                " changes, not latest: the cache knows code by it. Give REGISTRY/sidgraft/"
                f"{name}:TAG as `make images` names it, or ...@sha256:DIGEST."
            )
    return images


def _env(content: Mapping[str, Any], where: str) -> dict[str, str]:
    """Return the plain variables of every pod. They stand in the compiled pipeline for all to read: no secrets."""
    env = _variables(content.get("env"), f"{where}: env")
    for name, text in env.items():
        if (SECRET_NAME.search(name) and not name.upper().endswith(PLACES)) or PASSWORD_IN_URL.search(text):
            raise ProfileError(
                f"{where}: env: {name} looks like a secret, and who reads the pipeline would read it. Put the value"
                f" into a secret of Kubernetes and name that: secrets: {{SECRET: {{{name}: KEY}}}}."
            )
    return env


def _secrets(content: Mapping[str, Any], where: str) -> dict[str, dict[str, str]]:
    """Return the variables that come from secrets, by secret; none is set twice, no proxy without exceptions."""
    here = f"{where}: secrets"
    value = content.get("secrets") or {}
    if not isinstance(value, dict):
        raise ProfileError(f"{here} is {value!r}, expected {{SECRET: {{VARIABLE: KEY}}}}.")
    secrets = {str(secret): _variables(variables, f"{here}: {secret}") for secret, variables in value.items()}
    names = [*(content.get("env") or {}), *(name for variables in secrets.values() for name in variables)]
    if twice := [name for name in names if names.count(name) > 1]:
        raise ProfileError(f"{where} sets {twice[0]} twice, in env and secrets; set it once.")
    upper = {name.upper() for name in names}
    if upper.intersection(PROXIES) and "NO_PROXY" not in upper:
        raise ProfileError(
            f"{where} sets a proxy and no NO_PROXY; Kubeflow Pipelines' own part of a pod would look for the"
            " cluster behind the proxy. Give the addresses inside: env: {NO_PROXY:"
            " '.kubeflow,.svc,.cluster.local,10.0.0.0/8'}."
        )
    for secret, variables in secrets.items():
        if len(set(variables.values())) < len(variables):  # KFP keeps one variable a key
            raise ProfileError(f"{here}: {secret} gives one key to two variables; give each a key of its own.")
    return secrets


def _variables(value: Any, where: str) -> dict[str, str]:
    variables = _texts(value, where)
    for name in variables:
        if not VARIABLE.match(str(name)):
            raise ProfileError(f"{where} has {name!r}, expected the name of an environment variable.")
    return variables


def _mounts(content: Mapping[str, Any], where: str) -> tuple[Mapping[str, str], ...]:
    here = f"{where}: mounts"
    mounts = tuple(_texts(mount, here) for mount in _rules(content.get("mounts"), MOUNT_KEYS, here))
    for mount in mounts:
        if mount.keys() not in ({"secret", "path"}, {"config_map", "path"}) or not VOLUME.match(_mounted(mount)):
            raise ProfileError(
                f"{here} has {mount!r}, expected a secret or a config_map, by a name of small letters, digits and"
                " hyphens (shm, cache and tmp are taken), and the path of a folder: {secret: NAME, path: /etc/NAME}."
            )
        if not mount["path"].startswith("/") or mount["path"].rstrip("/") in TAKEN_PATHS:
            raise ProfileError(
                f"{here}: {_mounted(mount)}: path is {mount['path']!r}, expected a folder of its own, such as"
                f" /etc/{_mounted(mount)}."
            )
    for given in ([_mounted(mount) for mount in mounts], [mount["path"].rstrip("/") for mount in mounts]):
        if twice := [one for one in given if given.count(one) > 1]:
            raise ProfileError(f"{here} has {twice[0]} twice; give each name and each path once.")
    folder = (content.get("env") or {}).get("AWS_SHARED_CREDENTIALS_FILE", "").rstrip("/")
    for mount in mounts:
        if mount["path"].rstrip("/") == folder:  # sidgraft would read it; the Go SDK of AWS in KFP's launcher breaks
            raise ProfileError(
                f"{where}: env: AWS_SHARED_CREDENTIALS_FILE is the folder {folder}; Kubeflow Pipelines' own part of a"
                f" pod reads it, too, and takes a file of profiles alone. Name that, {folder}/FILE, or give the keys as"
                f" variables: secrets: {{{_mounted(mount)}: {{AWS_ACCESS_KEY_ID: KEY, AWS_SECRET_ACCESS_KEY: KEY}}}}."
            )
    return mounts


def _mounted(mount: Mapping[str, str]) -> str:
    return mount.get("secret") or mount.get("config_map") or ""


def _rules(value: Any, keys: tuple[str, ...], where: str) -> tuple[Mapping[str, Any], ...]:
    rules = value or []
    if not isinstance(rules, list):
        raise ProfileError(f"{where} is {rules!r}, expected a list.")
    return tuple(_mapping(rule, keys, where) for rule in rules)


def _mapping(value: Any, keys: tuple[str, ...], where: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ProfileError(f"{where} is {value!r}, expected a mapping of {', '.join(keys)}.")
    for key in value:
        if key not in keys:
            raise ProfileError(
                f"{where} has the unknown key {key!r}; expected {', '.join(keys)}.{_near(str(key), keys)}"
            )
    return value


def _texts(value: Any, where: str) -> dict[str, str]:
    if value is None:
        return {}
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise ProfileError(f"{where} is {value!r}, expected a mapping of texts (quote numbers and true).")
    return value


def _count(values: Mapping[str, Any], key: str, where: str, least: int) -> int:
    value = values.get(key, 0)
    if type(value) is not int or value < least:
        raise ProfileError(f"{where}: {key} is {value!r}, expected a whole number of at least {least}.")
    return value


def _gibibytes(values: Mapping[str, Any], key: str, where: str) -> int:
    value = values[key]
    if not isinstance(value, str) or not QUANTITY.match(value):
        raise ProfileError(f"{where}: {key} is {value!r}, expected whole Gi, such as 16Gi.")
    return int(value.removesuffix("Gi"))


def _seconds(values: Mapping[str, Any], key: str, where: str) -> int:
    value = values[key]
    if not isinstance(value, str) or not DURATION.match(value):
        raise ProfileError(f"{where}: {key} is {value!r}, expected seconds, minutes or hours, such as 90s, 30m or 12h.")
    return int(value[:-1]) * SECONDS[value[-1]]


def _near(name: str, known: Any) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" Did you mean {near[0]}?" if near else ""
