"""The pods of the manifests get from a profile what its tasks get: nodes, sizes, account, variables, mounts."""

import shutil

import pytest
import yaml
from test_manifests import MANIFESTS, kustomized, pods, pods_of_runtime, valid_runtime

from pipelines import build, nodes
from pipelines.__main__ import main
from pipelines.build import COMPILED, ROOT, load_pipeline
from pipelines.placement import PROFILES, SECRET_KEYS, placed, profile_names, read_profile

GPUS = "nvidia.com/gpu"
STORE = {(key, ("sidgraft-object-store", key, True)) for key in SECRET_KEYS}

SURROUNDINGS = """\
secret: store
env:
  AWS_S3_ADDRESSING_STYLE: path
  AWS_REGION: eu-1
  AWS_CA_BUNDLE: /etc/ca/ca.crt
  HTTPS_PROXY: http://proxy:3128
  NO_PROXY: .svc
secrets: {hub: {HF_TOKEN: token}, tracking: {WANDB_API_KEY: key, MLFLOW_TRACKING_PASSWORD: password}}
mounts:
  - {config_map: company-ca, path: /etc/ca}
  - {secret: store-files, path: /var/run/secrets/store}
"""
VARIABLES = {
    ("AWS_S3_ADDRESSING_STYLE", "path"),
    ("AWS_REGION", "eu-1"),
    ("HTTPS_PROXY", "http://proxy:3128"),
    ("NO_PROXY", ".svc"),
    ("AWS_CA_BUNDLE", "/etc/ca/ca.crt"),
    ("HF_TOKEN", ("hub", "token", False)),
    ("WANDB_API_KEY", ("tracking", "key", False)),
    ("MLFLOW_TRACKING_PASSWORD", ("tracking", "password", False)),
    *((key, ("store", key, True)) for key in SECRET_KEYS if key != "AWS_REGION"),
}
MOUNTS = {("/etc/ca", "configMap", "company-ca"), ("/var/run/secrets/store", "secret", "store-files")}


def variables(container):
    """Every variable of a container, with its value or (secret, key, optional)."""
    found = []
    for entry in container["env"]:
        reference = entry.get("valueFrom", {}).get("secretKeyRef")
        value = (reference["name"], reference["key"], reference.get("optional", False)) if reference else entry["value"]
        found.append((entry["name"], value))
    assert len(dict(found)) == len(found)  # the order of two of one name would decide
    return set(found)


def mounted(pod):
    """Every volume of a pod that is no empty folder: where it is, and what it holds."""
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    found = set()
    for mount in pod["containers"][0]["volumeMounts"]:
        volume = volumes[mount["name"]]
        if "emptyDir" not in volume:
            assert mount["readOnly"] is True
            kind = "secret" if "secret" in volume else "configMap"
            found.add((mount["mountPath"], kind, volume[kind].get("secretName") or volume[kind].get("name")))
    return found


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A copy of the manifests, in which profiles of one's own are compiled."""
    shutil.copytree(MANIFESTS, tmp_path / "manifests")
    monkeypatch.setattr("pipelines.build.ROOT", tmp_path)
    monkeypatch.setattr("pipelines.build.placed_targets", lambda profile: {})  # the pipelines take seconds
    return tmp_path


def of_own_overlay(checkout, profile):
    """The node of a training and the pod of the import, in overlays that put this profile over ours."""
    found = []
    for base in ("overlays/h100", "import-model"):
        own = checkout / "manifests" / "own" / base
        own.mkdir(parents=True)
        up = "../" * (2 + base.count("/"))
        text = f"resources: [{up}{base}]\ncomponents: [{up}components/profiles/{profile}]\n"
        (own / "kustomization.yaml").write_text(text)
        found += kustomized(own)
    (runtime,) = (resource for resource in found if resource["kind"] == "TrainingRuntime")
    valid_runtime(runtime)
    (job,) = (resource for resource in found if resource["kind"] == "Job")
    return pods_of_runtime(runtime)["spec"], next(pods(job))


def test_what_is_committed_is_what_the_profiles_make():
    made = {nodes.file_of(read_profile(name)): nodes.component(read_profile(name)) for name in profile_names()}
    there = {file.relative_to(ROOT) for file in (ROOT / nodes.FOLDER).rglob("*") if file.is_file()}
    assert there == set(made)
    for file, text in made.items():
        assert (ROOT / file).read_text(encoding="utf-8") == text, f"run python -m pipelines compile: {file}"


@pytest.mark.parametrize("name", profile_names())
def test_a_node_of_a_training_is_placed_as_the_task_finetune_of_the_same_profile(checkout, name):
    node, _ = of_own_overlay(checkout, name)
    spec, platform = yaml.load_all(
        (ROOT / COMPILED / f"train.{name}.yaml").read_text(encoding="utf-8"), Loader=yaml.CSafeLoader
    )
    task = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]["exec-finetune"]
    resources = spec["deploymentSpec"]["executors"]["exec-finetune"]["container"]["resources"]
    accelerator = resources.get("accelerator", {})
    (container,) = node["containers"]
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert container["resources"]["limits"] == {
        "cpu": resources["resourceCpuLimit"],
        "memory": resources["resourceMemoryLimit"],
        **({accelerator["resourceType"]: accelerator["resourceCount"]} if accelerator else {}),
    }
    assert node["nodeSelector"] == task.get("nodeSelector", {}).get("labels", {})
    assert node["tolerations"] == task.get("tolerations", [])
    terms = [{"matchExpressions": term["matchExpressions"]} for term in task.get("nodeAffinity", [])]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    assert node["affinity"] == ({"nodeAffinity": required} if terms else {})
    (shm,) = (volume["emptyDir"] for volume in node["volumes"] if volume["name"] == "shm")
    expected = [mount["sizeLimit"] for mount in task.get("emptyDirMounts", [])]
    assert [shm["sizeLimit"]] == (expected or ["2Gi"])
    assert variables(container) == STORE
    assert node["serviceAccountName"] == read_profile(name).service_account


def own_profile(folder, base="h100", more=SURROUNDINGS):
    text = (PROFILES / f"{base}.yaml").read_text(encoding="utf-8")
    assert "secret: sidgraft-object-store\n" in text
    file = folder / "mine.yaml"
    file.write_text(text.replace("secret: sidgraft-object-store\n", more), encoding="utf-8")
    return str(file)


def test_variables_secrets_and_mounts_of_a_profile_reach_every_task_and_every_pod_beside_them(checkout, capsys):
    file = own_profile(checkout)
    assert main(["compile", "--profile", file]) == 0
    assert "wrote manifests/components/profiles/mine/kustomization.yaml" in capsys.readouterr().out
    for pod in of_own_overlay(checkout, "mine"):
        assert variables(pod["containers"][0]) == VARIABLES
        assert mounted(pod) == MOUNTS
    for pipeline in build.PIPELINES:
        spec, platform = yaml.load_all(
            build.compiled(placed(load_pipeline(pipeline), read_profile(file))), Loader=yaml.CSafeLoader
        )
        executors = spec["deploymentSpec"]["executors"]
        kubernetes = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
        assert executors.keys() == kubernetes.keys()
        for name, task in kubernetes.items():
            found = {(entry["name"], entry["value"]) for entry in executors[name]["container"]["env"]}
            for secret in task["secretAsEnv"]:
                optional = secret.get("optional", False)
                keys = secret["keyToEnv"]
                found |= {(k["envVar"], (secret["secretName"], k["secretKey"], optional)) for k in keys}
            assert found == VARIABLES, name
            files = {(v["mountPath"], "secret", v["secretName"]) for v in task["secretAsVolume"]}
            maps = {(v["mountPath"], "configMap", v["configMapName"]) for v in task["configMapAsVolume"]}
            assert files | maps == MOUNTS, name
            assert not [v for v in (*task["secretAsVolume"], *task["configMapAsVolume"]) if v.get("optional")], name


def test_a_profile_without_a_secret_names_none(checkout):
    assert main(["compile", "--profile", own_profile(checkout, "cpu", 'secret: ""\n')]) == 0
    node, fetch = of_own_overlay(checkout, "mine")
    assert node["containers"][0]["env"] == fetch["containers"][0]["env"] == []
    limits = node["containers"][0]["resources"]["limits"]
    assert GPUS not in limits
    (shm,) = (volume["emptyDir"] for volume in node["volumes"] if volume["name"] == "shm")
    assert int(shm["sizeLimit"].removesuffix("Gi")) < int(
        limits["memory"].removesuffix("Gi")
    )  # nothing is left of the profile below
    assert node["nodeSelector"] == {}


def test_compiling_all_leaves_what_other_profiles_have_made(checkout, monkeypatch):
    monkeypatch.setattr("pipelines.build.targets", dict)
    monkeypatch.setattr("pipelines.build.write_readmes", list)
    assert main(["compile", "--profile", own_profile(checkout)]) == 0
    mine = checkout / "manifests" / "components" / "profiles" / "mine" / "kustomization.yaml"
    assert mine.is_file()
    assert main(["compile"]) == 0
    assert mine.is_file(), "an overlay of the user's names it"
    assert (checkout / nodes.file_of(read_profile("gke"))).is_file()
