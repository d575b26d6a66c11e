"""What a profile says of the pods that are not tasks of a pipeline: the nodes of a training and the import of a model.

    python -m pipelines compile [--profile NAME]

writes manifests/components/profiles/NAME/kustomization.yaml, a component of kustomize: an overlay that names it gives
these pods the profile's nodes, resources, account, secrets, variables and mounts.
"""

import textwrap
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from pipelines.placement import Profile, Resources
from sidgraft.trainjob import RUNTIME

FOLDER = Path("manifests") / "components" / "profiles"
NODE = "/spec/template/spec/replicatedJobs/0/template/spec/template/spec"  # in the TrainingRuntime of several-nodes
IMPORT, POD = "sidgraft-import-model", "/spec/template/spec"  # the job of manifests/import-model
LEAST_SHM = 2  # GiB

HEAD = """\
# The nodes of a training on several and the import of a model, as the profile {name} places the stages finetune and
# prepare. `python -m pipelines compile` makes this file from the profile: change that one.
apiVersion: kustomize.config.k8s.io/v1alpha1
kind: Component
patches:
"""


def file_of(profile: Profile) -> Path:
    """Return where the component of a profile lies, relative to the checkout."""
    return FOLDER / profile.name / "kustomization.yaml"


def component(profile: Profile) -> str:
    """Return the component of a profile. What an overlay does not have is not patched: kustomize passes it over."""
    node = profile.stages["finetune"]
    patches = (
        ("TrainingRuntime", RUNTIME, [*_resources(profile, node), *_pod(NODE, profile, node)]),
        ("Job", IMPORT, _pod(POD, profile, profile.stages["prepare"])),
    )
    text = HEAD.format(name=profile.name)
    for kind, name, operations in patches:
        text += f"  - target: {{kind: {kind}, name: {name}}}\n    patch: |-\n"
        text += textwrap.indent(yaml.safe_dump(operations, sort_keys=False, width=10_000), " " * 6)
    return text


def _resources(profile: Profile, node: Resources) -> list[Mapping[str, Any]]:
    sizes: dict[str, str] = {"cpu": str(node.cpu), "memory": f"{node.memory + node.shm}Gi"}
    if node.gpus:
        sizes[profile.resource] = str(node.gpus)
    return [
        _set(f"{NODE}/containers/0/resources", {"requests": sizes, "limits": dict(sizes)}),
        # Without GPUs a profile needs no shared memory; the pod has the volume all the same.
        _set(f"{NODE}/volumes/0/emptyDir/sizeLimit", f"{node.shm or LEAST_SHM}Gi"),
    ]


def _pod(pod: str, profile: Profile, stage: Resources) -> list[Mapping[str, Any]]:
    """Return what sets a pod's nodes, account and surroundings; what is empty is set, too, over another profile's.

    Mounts are added to what the pod has: one of two profiles in one overlay may have some. An account is set where the
    profile names one.
    """
    nodes = {**(profile.gpu if stage.gpus else profile.cpu), **stage.nodes}
    rules = [dict(rule) for rule in nodes.get("node_affinity", ())]
    required = {"nodeSelectorTerms": [{"matchExpressions": rules}]}
    operations = [
        _set(f"{pod}/nodeSelector", dict(nodes.get("node_selector", {}))),
        _set(f"{pod}/tolerations", [dict(rule) for rule in nodes.get("tolerations", ())]),
        _set(
            f"{pod}/affinity",
            {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": required}} if rules else {},
        ),
        _set(f"{pod}/containers/0/env", _variables(profile)),
    ]
    if profile.service_account:
        operations.append(_set(f"{pod}/serviceAccountName", profile.service_account))
    for mount in profile.mounts:
        name = mount.get("secret") or mount["config_map"]
        source = {"secret": {"secretName": name}} if "secret" in mount else {"configMap": {"name": name}}
        operations.append(_set(f"{pod}/volumes/-", {"name": name, **source}))
        there = {"name": name, "mountPath": mount["path"], "readOnly": True}
        operations.append(_set(f"{pod}/containers/0/volumeMounts/-", there))
    return operations


def _variables(profile: Profile) -> list[Mapping[str, Any]]:
    plain = [{"name": name, "value": value} for name, value in profile.env.items()]
    store = [_from_secret(key, profile.secret, key, optional=True) for key in profile.store_keys()]
    others = [
        _from_secret(name, secret, key)
        for secret, variables in profile.secrets.items()
        for name, key in variables.items()
    ]
    return [*store, *plain, *others]


def _from_secret(variable: str, secret: str, key: str, **more: bool) -> dict[str, Any]:
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": secret, "key": key, **more}}}


def _set(path: str, value: Any) -> Mapping[str, Any]:
    """An operation of a JSON patch that sets a value, whether or not one is there; `-` appends to a list."""
    return {"op": "add", "path": path, "value": value}
