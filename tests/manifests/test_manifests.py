"""Every overlay builds, is valid by the schemas of Kubernetes and Kubeflow Trainer, and keeps the policy.

Least rights, no secret, no way in, and pods as Pod Security `restricted` wants them.
"""

import ipaddress
import re
import shutil
import subprocess
import sys
import sysconfig
import textwrap
from functools import cache
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from kubeflow_trainer_api import models

from components import images
from pipelines.placement import LABEL, PLACES, SECRET_KEYS, SECRET_NAME, profile_names, read_profile

MANIFESTS = Path(__file__).parents[2] / "manifests"
OVERLAYS = sorted(folder.name for folder in (MANIFESTS / "overlays").iterdir())
KUBECTL = Path(sysconfig.get_path("scripts")) / "kubectl"
OURS = "trainer.kubeflow.org/v1alpha1"  # the only kinds here that are not Kubernetes' own


BUILT = [*OVERLAYS, "../import-model"]  # everything that is applied
SEVERAL_NODES = ["h100", "openshift"]  # with Kubeflow Trainer in the cluster


def kustomized(folder):
    shown = subprocess.run([str(KUBECTL), "kustomize", str(folder)], capture_output=True, text=True, check=True)
    assert "deprecated" not in shown.stderr
    return tuple(yaml.safe_load_all(shown.stdout))


@cache
def built(overlay):
    return kustomized(MANIFESTS / "overlays" / overlay)


def of_kind(overlay, kind):
    return [resource for resource in built(overlay) if resource["kind"] == kind]


def test_the_overlays_are_there():
    assert OVERLAYS == ["h100", "kind", "openshift"]


@pytest.mark.parametrize("overlay", BUILT)
def test_valid_by_the_schemas_of_kubernetes(overlay):
    for resource in built(overlay):
        if resource["apiVersion"] != OURS:
            kubernetes_validate.validate(resource, kubernetes_validate.latest_version(), strict=True)


def valid_runtime(runtime):
    """Raise where the models of Kubeflow Trainer's API do not know a key or refuse a value, or Kubernetes the pod."""
    kept = models.TrainerV1alpha1TrainingRuntime.from_dict(runtime).to_dict()
    assert kept == runtime, "a key that the API does not know was dropped"
    pod = pods_of_runtime(runtime)
    shown = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "node", **pod["metadata"]}, "spec": pod["spec"]}
    kubernetes_validate.validate(shown, kubernetes_validate.latest_version(), strict=True)


def pods_of_runtime(runtime):
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    return job["template"]["spec"]["template"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_what_kubeflow_trainer_must_be_there_for_comes_by_the_component_of_several_nodes_alone(overlay):
    of_trainer = [resource["kind"] for resource in built(overlay) if resource["apiVersion"] == OURS]
    assert of_trainer == (["TrainingRuntime"] if overlay in SEVERAL_NODES else [])
    named = {r["metadata"]["name"] for r in built(overlay)}
    assert ("sidgraft-trainjobs" in named) == (overlay in SEVERAL_NODES)


def own_overlay(folder, text):
    """What an overlay of one's own makes, in a copy of the manifests."""
    own = folder / "manifests" / "overlays" / "own"
    shutil.copytree(MANIFESTS, folder / "manifests")
    own.mkdir()
    (own / "kustomization.yaml").write_text(text, encoding="utf-8")
    return kustomized(own)


@pytest.mark.parametrize("overlay", SEVERAL_NODES)
def test_without_the_component_of_several_nodes_all_else_stays(overlay, tmp_path):
    text = (MANIFESTS / "overlays" / overlay / "kustomization.yaml").read_text(encoding="utf-8")
    left = "".join(line for line in text.splitlines(keepends=True) if "components/several-nodes" not in line)
    assert left != text
    shutil.copytree(MANIFESTS, tmp_path / "manifests")
    (tmp_path / "manifests" / "overlays" / overlay / "kustomization.yaml").write_text(left, encoding="utf-8")
    made = kustomized(tmp_path / "manifests" / "overlays" / overlay)
    gone = [resource for resource in built(overlay) if resource not in made]
    assert {r["kind"] for r in gone} == {"TrainingRuntime", "Role", "RoleBinding"}
    assert len(gone) == 3
    assert len(made) == len(built(overlay)) - 3


def test_an_overlay_of_ones_own_has_several_nodes_on_a_small_cluster(tmp_path):
    names = "several-nodes", "images", "profiles/cpu"
    made = own_overlay(
        tmp_path, f"resources: [../kind]\ncomponents: [{', '.join(f'../../components/{name}' for name in names)}]\n"
    )
    (runtime,) = (resource for resource in made if resource["kind"] == "TrainingRuntime")
    valid_runtime(runtime)
    spec = pods_of_runtime(runtime)["spec"]
    assert set(spec["containers"][0]["resources"]["limits"]) == {"cpu", "memory"}
    assert (spec["nodeSelector"], spec["tolerations"]) == ({}, [])


@pytest.mark.parametrize("overlay", SEVERAL_NODES)
def test_the_training_runtime_is_valid_by_the_models_of_kubeflow_trainer(overlay):
    (runtime,) = of_kind(overlay, "TrainingRuntime")
    valid_runtime(runtime)
    (job,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    assert job["name"] == "node"  # Trainer knows its step and container by these names
    assert job["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert [c["name"] for c in pods_of_runtime(runtime)["spec"]["containers"]] == ["node"]
    assert job["template"]["spec"]["backoffLimit"] == 0
    longest = max(read_profile(name).stages["finetune"].timeout for name in profile_names())
    assert longest < job["template"]["spec"]["activeDeadlineSeconds"] <= 7 * 24 * 3600  # a job that lost its task ends
    assert runtime["spec"]["mlPolicy"]["torch"] == {}


@pytest.mark.parametrize(("old", "new"), [("mlPolicy", "mlPolice"), ("backoffLimit", "backofLimit"), ("env", "envs")])
def test_the_validation_can_fail(old, new):
    wrong = {**of_kind("kind", "ServiceAccount")[0], "automountServiceAccountTokn": False}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, kubernetes_validate.latest_version(), strict=True)
    (runtime,) = of_kind("h100", "TrainingRuntime")
    text = yaml.safe_dump(runtime).replace(f"{old}:", f"{new}:")
    with pytest.raises((AssertionError, ValueError, kubernetes_validate.ValidationError)):
        valid_runtime(yaml.safe_load(text))


def templates(value):
    """Every template of a pod in a manifest, however deep."""
    if isinstance(value, dict):
        if "containers" in value.get("spec", ()):
            yield value
        value = value.values()
    if isinstance(value, list) or not isinstance(value, str | int | float | None):
        for inner in value:
            yield from templates(inner)


def pods(value):
    """Every specification of a pod in a manifest."""
    return (template["spec"] for template in templates(value))


def jobs(value):
    """Every specification of a job in a manifest: what has a template of a pod."""
    if isinstance(value, dict):
        if "containers" in value.get("template", {}).get("spec", ()):
            yield value
        value = value.values()
    if isinstance(value, list) or not isinstance(value, str | int | float | None):
        for inner in value:
            yield from jobs(inner)


@pytest.mark.parametrize("overlay", BUILT)
def test_every_job_has_an_end_and_says_how_often_it_is_tried_again(overlay):
    found = [(resource["kind"], job) for resource in built(overlay) for job in jobs(resource)]
    tries = {"CronJob": 2, "Job": 3, "TrainingRuntime": 0}  # the task is what tries a training again
    assert {kind for kind, _ in found} <= set(tries)
    assert len(found) == sum(1 for resource in built(overlay) for _ in pods(resource)) > 0
    for kind, job in found:
        assert job["backoffLimit"] == tries[kind]
        assert 0 < job["activeDeadlineSeconds"] <= 7 * 24 * 3600
        assert job["template"]["spec"]["restartPolicy"] == "Never"  # its log stays


def written_secrets(container):
    """The variables of a container whose name says that they are secret, and whose value stands there."""
    names = [entry["name"] for entry in container.get("env", []) if "value" in entry]
    return [name for name in names if SECRET_NAME.search(name) and not name.upper().endswith(PLACES)]


@pytest.mark.parametrize("name", ["AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "HF_TOKEN", "X_PASSWORD"])
def test_a_secret_that_is_written_down_is_found(name):
    (job,) = of_kind("kind", "CronJob")
    (container,) = next(pods(job))["containers"]
    assert not written_secrets(container)
    assert written_secrets({**container, "env": [*container["env"], {"name": name, "value": "x"}]}) == [name]
    by_reference = {"name": name, "valueFrom": {"secretKeyRef": {"name": "hub", "key": "token"}}}
    assert not written_secrets({"env": [by_reference, {"name": f"{name}_FILE", "value": "/etc/x"}]})


def shared_memory(pod):
    return [v["emptyDir"] for v in pod.get("volumes", []) if v.get("emptyDir", {}).get("medium") == "Memory"]


@pytest.mark.parametrize("overlay", BUILT)
def test_shared_memory_is_where_gpus_are_and_counts_against_the_limit(overlay):
    for pod in (pod for resource in built(overlay) for pod in pods(resource)):
        limits = [container["resources"]["limits"] for container in pod["containers"]]
        has_gpus = any(not key.startswith(("cpu", "memory")) for limit in limits for key in limit)
        assert shared_memory(pod) or not has_gpus
        for shm in shared_memory(pod):
            (limit,) = limits
            assert int(limit["memory"].removesuffix("Gi")) > int(shm["sizeLimit"].removesuffix("Gi"))


@pytest.mark.parametrize("overlay", BUILT)
def test_no_pod_gets_a_sidecar_where_the_namespace_asks_for_one(overlay):
    found = [template["metadata"]["labels"] for resource in built(overlay) for template in templates(resource)]
    assert found
    assert {labels.get("sidecar.istio.io/inject") for labels in found} == {"false"}  # Istio's own label


@pytest.mark.parametrize("overlay", BUILT)
def test_every_pod_is_restricted_has_limits_a_lasting_image_and_no_secret_in_it(overlay):
    found = [pod for resource in built(overlay) for pod in pods(resource)]
    assert found
    for pod in found:
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostNetwork", "hostPID", "hostIPC"} & set(pod)
        assert pod.get("automountServiceAccountToken") is False or pod.get("serviceAccountName")
        assert all({"emptyDir", "configMap", "secret", "projected"} & set(volume) for volume in pod.get("volumes", []))
        for container in [*pod["containers"], *pod.get("initContainers", [])]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert set(container["resources"]["limits"]) >= {"cpu", "memory"}
            assert container["resources"]["requests"] == container["resources"]["limits"]
            name, _, tag = container["image"].rpartition(":")
            assert f"/{name}".endswith(tuple(f"/{ours}" for ours in images.IMAGES.values()))
            assert tag not in ("", "latest")  # one that stays
            assert not written_secrets(container)
            home = {e.get("value") for e in container.get("env", []) if e["name"] == "HOME"} or {"/cache"}
            assert {m["mountPath"] for m in container["volumeMounts"]} >= {"/tmp", *home}  # the root is read-only


@pytest.fixture(scope="module")
def with_images(tmp_path_factory):
    """A checkout in which `make manifests` has been run: its folder, and what the command printed."""
    checkout = tmp_path_factory.mktemp("checkout")
    for folder in ("images", "manifests", "shared"):
        kept_out = shutil.ignore_patterns("__pycache__", "*.whl", "*.egg-info")
        shutil.copytree(MANIFESTS.parent / folder, checkout / folder, ignore=kept_out)
    for file in ("Makefile", "pyproject.toml", "components/__init__.py", "components/images.py"):
        (checkout / file).parent.mkdir(exist_ok=True)
        shutil.copy(MANIFESTS.parent / file, checkout / file)
    command = ["make", "--silent", f"PYTHON={sys.executable}", "REGISTRY=host.example:5000/team", "manifests"]
    for _ in range(2):  # the second time over what the first has written
        shown = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=True)
    return checkout, shown.stdout.split()


@pytest.mark.parametrize("overlay", BUILT)
def test_make_manifests_sets_the_image_of_every_pod_to_that_of_this_code_in_the_registry(overlay, with_images):
    checkout, printed = with_images
    names = sorted(set(images.IMAGES.values()))
    expected = {name: f"host.example:5000/team/{name}:{images.code_tag(name)}" for name in names}
    assert printed == list(expected.values())
    resources = kustomized(checkout / "manifests" / "overlays" / overlay)
    found = {(r["kind"], c["image"]) for r in resources for pod in pods(r) for c in pod["containers"]}
    if overlay == "../import-model":
        assert found == {("Job", expected["sidgraft/cpu"])}
    else:
        nodes = {("TrainingRuntime", expected["sidgraft/gpu"])} if overlay in SEVERAL_NODES else set()
        assert found == {("CronJob", expected["sidgraft/data"])} | nodes


def test_an_overlay_of_ones_own_has_the_images_too(with_images):
    checkout, printed = with_images
    own = checkout / "manifests" / "overlays" / "own"
    own.mkdir()
    (own / "kustomization.yaml").write_text("resources: [../h100]\n")
    found = {c["image"] for r in kustomized(own) for pod in pods(r) for c in pod["containers"]}
    assert found == {image for image in printed if "/cpu:" not in image}


@pytest.mark.parametrize("overlay", SEVERAL_NODES)
def test_a_training_pod_has_shared_memory_the_stores_credentials_and_the_labels_of_its_policies(overlay):
    (runtime,) = of_kind(overlay, "TrainingRuntime")
    pod = pods_of_runtime(runtime)
    spec, (container,) = pod["spec"], pod["spec"]["containers"]
    assert pod["metadata"]["labels"][LABEL[0]] == LABEL[1]  # the network policies go by it
    assert spec["automountServiceAccountToken"] is False  # a node asks the cluster for nothing
    assert spec["serviceAccountName"] == read_profile("eks").service_account  # whose role at the store it needs
    refs = [entry["valueFrom"]["secretKeyRef"] for entry in container["env"]]
    assert {(r["name"], r["key"], r["optional"]) for r in refs} == {
        ("sidgraft-object-store", key, True) for key in SECRET_KEYS
    }
    mounts = {m["mountPath"]: m["name"] for m in container["volumeMounts"]}
    (shm,) = (v["emptyDir"] for v in spec["volumes"] if v["name"] == mounts["/dev/shm"])
    assert shm["medium"] == "Memory"
    resources = container["resources"]
    assert int(resources["limits"]["memory"].removesuffix("Gi")) > int(shm["sizeLimit"].removesuffix("Gi"))
    assert resources["limits"]["nvidia.com/gpu"] == "8"  # of pipelines/profiles/h100.yaml, said here once more
    assert spec["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    assert spec["tolerations"] == [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_runs_have_an_account_of_their_own_with_the_rights_of_a_task_and_to_start_jobs(overlay):
    (runner,) = {read_profile(name).service_account for name in profile_names()}
    (account,) = (a for a in of_kind(overlay, "ServiceAccount") if a["metadata"]["name"] == runner)
    assert account["automountServiceAccountToken"] is True  # KFP's launcher asks for its configuration
    bound = {
        binding["roleRef"]["name"]: [subject["name"] for subject in binding["subjects"]]
        for binding in of_kind(overlay, "RoleBinding")
    }
    to_start_jobs = {"sidgraft-trainjobs"} if overlay in SEVERAL_NODES else set()
    assert {role for role, names in bound.items() if runner in names} == {"sidgraft-runner"} | to_start_jobs
    assert all(bound[role] == [runner] for role in {"sidgraft-runner"} | to_start_jobs)
    (role,) = (r for r in of_kind(overlay, "Role") if r["metadata"]["name"] == "sidgraft-runner")
    rights = {
        (resource, verb, *rule.get("resourceNames", []))
        for rule in role["rules"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
    look = ("get", "list", "watch")
    assert rights == {
        *(("workflowtaskresults", verb) for verb in ("create", "patch")),
        *(("workflowtasksets", verb) for verb in look),
        *(("workflowtasksets/status", verb) for verb in ("get", "patch")),
        *(("pods", verb) for verb in look),
        *(("configmaps", verb, "kfp-launcher") for verb in look),
        ("secrets", "get", "mlpipeline-minio-artifact"),
    }


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_who_starts_runs_may_give_them_that_account_and_no_other(overlay):
    for name in ("sidgraft-submitter", "sidgraft-watcher"):
        (role,) = (r for r in of_kind(overlay, "Role") if r["metadata"]["name"] == name)
        (rule,) = (rule for rule in role["rules"] if "serviceaccounts" in rule["resources"])
        assert rule == {
            "apiGroups": [""],
            "resources": ["serviceaccounts"],
            "resourceNames": ["sidgraft-runner"],
            "verbs": ["use"],
        }


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_everything_lies_in_one_namespace_and_nothing_is_cluster_wide(overlay):
    (namespace,) = of_kind(overlay, "Namespace")
    for resource in built(overlay):
        if resource["kind"] != "Namespace":
            assert resource["metadata"]["namespace"] == namespace["metadata"]["name"]
        assert not resource["kind"].startswith("Cluster")
    for binding in of_kind(overlay, "RoleBinding"):
        assert {s["namespace"] for s in binding["subjects"]} == {namespace["metadata"]["name"]}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_pod_security_is_warned_of_and_audited_and_enforced_where_kubeflow_itself_does_not_live(overlay):
    labels = of_kind(overlay, "Namespace")[0]["metadata"]["labels"]
    assert {labels[f"pod-security.kubernetes.io/{mode}"] for mode in ("warn", "audit")} == {"restricted"}
    assert labels.get("pod-security.kubernetes.io/enforce") == (None if overlay == "kind" else "baseline")


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_an_overlay_of_ones_own_can_enforce_restricted(overlay, tmp_path):
    made = own_overlay(tmp_path, f"resources: [../{overlay}]\ncomponents: [../../components/restricted]\n")
    (namespace,) = (resource for resource in made if resource["kind"] == "Namespace")
    levels = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn", "audit")}
    assert namespace["metadata"]["labels"] == levels


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_roles_name_what_they_may_and_touch_no_secret_but_that_of_kfps_own_store(overlay):
    roles = of_kind(overlay, "Role")
    assert roles
    for rule in (rule for role in roles for rule in role["rules"]):
        assert set(rule["apiGroups"]) <= {"pipelines.kubeflow.org", "trainer.kubeflow.org", "argoproj.io", ""}
        if "secrets" in rule["resources"]:
            assert (rule["resourceNames"], rule["verbs"]) == (["mlpipeline-minio-artifact"], ["get"])
        assert "*" not in [*rule["resources"], *rule["verbs"]]
        assert not {"escalate", "bind", "impersonate", "update"} & set(rule["verbs"])
        if "patch" in rule["verbs"]:
            assert set(rule["resources"]) <= {"workflowtaskresults", "workflowtasksets/status"}
    accounts = {a["metadata"]["name"]: a["automountServiceAccountToken"] for a in of_kind(overlay, "ServiceAccount")}
    assert [name for name, mounted in accounts.items() if mounted] == ["sidgraft-runner"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_agent_of_pod_identities_is_the_only_thing_reached_by_plain_http(overlay):
    addresses = [{"ipBlock": {"cidr": cidr}} for cidr in ("169.254.170.23/32", "fd00:ec2::23/128")]
    agent = {"to": addresses, "ports": [{"protocol": "TCP", "port": 80}]}
    exits = [rule for policy in of_kind(overlay, "NetworkPolicy") for rule in policy["spec"].get("egress", [])]
    assert [rule for rule in exits if 80 in [port["port"] for port in rule.get("ports", [])]] == [agent]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_nobody_reaches_a_stage_and_a_stage_reaches_what_is_named(overlay):
    policies = {p["metadata"]["name"]: p["spec"] for p in of_kind(overlay, "NetworkPolicy")}
    nodes = {"matchLabels": {LABEL[0]: LABEL[1], "app.kubernetes.io/component": "training"}}
    among = policies.pop("sidgraft-training")
    assert among["podSelector"] == nodes
    assert among["ingress"] == [{"from": [{"podSelector": nodes}]}]
    assert among["egress"] == [{"to": [{"podSelector": nodes}]}]
    for runtime in of_kind(overlay, "TrainingRuntime"):
        assert nodes["matchLabels"].items() <= pods_of_runtime(runtime)["metadata"]["labels"].items()
    assert all(p["podSelector"] == {"matchLabels": {LABEL[0]: LABEL[1]}} for p in policies.values())
    deny = policies["sidgraft-default-deny"]
    assert set(deny["policyTypes"]) == {"Ingress", "Egress"}
    assert not [p for p in policies.values() if "ingress" in p]
    exits = [rule for p in policies.values() for rule in p.get("egress", [])]
    assert all(rule["to"] and rule["ports"] for rule in exits)
    ports = {port["port"] for rule in exits for port in rule["ports"]}
    dns = 5353 if overlay == "openshift" else 53
    assert ports == {dns, 80, 443, 6443, 8080, 8333, 8887, 8888, 9000}


METADATA = ["169.254.169.254", "fd00:ec2::254", "fd20:ce::254"]  # where a cloud hands out the credentials of a node


def ports_to(overlay, address):
    """The ports on which the pods of the stages reach an address outside of the cluster."""
    found = set()
    for policy in of_kind(overlay, "NetworkPolicy"):
        for rule in policy["spec"].get("egress", []):
            for block in (to["ipBlock"] for to in rule["to"] if "ipBlock" in to):
                open_to, *closed = map(ipaddress.ip_network, [block["cidr"], *block.get("except", [])])
                assert all(one[0] in open_to and one[-1] in open_to for one in closed)  # or the API refuses it
                if any(ipaddress.ip_address(address) in one for one in closed):
                    continue
                if ipaddress.ip_address(address) in open_to:
                    found |= {(port["protocol"], port["port"]) for port in rule["ports"]}
    return found


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_a_stage_reaches_the_world_by_https_and_nothing_that_hands_out_the_credentials_of_its_node(overlay):
    for outside in ("192.0.2.7", "2001:db8::7"):
        assert ports_to(overlay, outside) == {("TCP", 443), ("TCP", 6443)}
    names = set() if overlay == "openshift" else {("UDP", 53), ("TCP", 53)}  # where Cloud DNS of GKE answers, too
    assert [ports_to(overlay, address) for address in METADATA] == [names, set(), set()]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_names_are_asked_for_at_the_clusters_dns_and_at_the_cache_on_the_node_where_kubernetes_has_one(overlay):
    (policy,) = (p for p in of_kind(overlay, "NetworkPolicy") if p["metadata"]["name"] == "sidgraft-dns")
    (rule,) = policy["spec"]["egress"]
    on_openshift = overlay == "openshift"  # its DNS listens on each node as a pod
    port = 5353 if on_openshift else 53
    assert {(p["protocol"], p["port"]) for p in rule["ports"]} == {("UDP", port), ("TCP", port)}
    service, *without_pods = rule["to"]
    namespace = "openshift-dns" if on_openshift else "kube-system"
    assert service == {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}}}
    addresses = [] if on_openshift else ["169.254.20.10/32", "169.254.169.254/32"]
    assert without_pods == [{"ipBlock": {"cidr": address}} for address in addresses]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_secret_is_written_down(overlay):
    assert not of_kind(overlay, "Secret")
    text = "".join(file.read_text(encoding="utf-8") for file in MANIFESTS.rglob("*.yaml"))
    assert not re.search(r"stringData|AKIA[0-9A-Z]{16}|-----BEGIN|secretGenerator", text)


def test_the_import_of_a_model_has_an_end_and_the_labels_of_its_policies():
    (job,) = of_kind("../import-model", "Job")
    assert job["spec"]["activeDeadlineSeconds"] > 0
    assert job["spec"]["backoffLimit"] > 0
    assert job["spec"]["template"]["metadata"]["labels"][LABEL[0]] == LABEL[1]
    assert job["spec"]["template"]["spec"]["serviceAccountName"] == read_profile("eks").service_account
    assert job["spec"]["template"]["spec"]["automountServiceAccountToken"] is False
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    assert command[:3] == ["python", "-m", "sidgraft.fetch"]


def test_the_quota_is_what_a_training_on_the_runtimes_nodes_takes_each_as_large_as_a_task_of_the_profile():
    (quota,) = of_kind("h100", "ResourceQuota")
    profile = read_profile("h100")
    nodes = of_kind("h100", "TrainingRuntime")[0]["spec"]["mlPolicy"]["numNodes"]
    largest = max(stage.gpus for stage in profile.stages.values())
    assert quota["spec"]["hard"] == {f"requests.{profile.resource}": str(nodes * largest)}


PAGE = (MANIFESTS.parent / "docs" / "operations.md").read_text(encoding="utf-8")


def yaml_of_the_page(start):
    """The one block of YAML in docs/operations.md that begins so."""
    blocks = [
        textwrap.dedent(block) for block in re.findall(r"^ *```yaml\n(.*?)^ *```$", PAGE, re.MULTILINE | re.DOTALL)
    ]
    (found,) = (block for block in blocks if block.startswith(start))
    return found


@pytest.mark.parametrize("overlay", SEVERAL_NODES)
def test_the_profile_of_the_page_makes_the_namespace_of_the_overlay(overlay):
    profile = yaml.safe_load(yaml_of_the_page("apiVersion: kubeflow.org"))
    (namespace,) = of_kind(overlay, "Namespace")
    assert (profile["kind"], profile["metadata"]) == ("Profile", {"name": namespace["metadata"]["name"]})
    assert set(profile["spec"]["owner"]) == {"kind", "name"}


def test_the_overlay_of_the_page_opens_the_way_to_kubeflow_pipelines_beside_the_runs(tmp_path):
    made = own_overlay(tmp_path, yaml_of_the_page("namespace: PROJECT"))
    assert {r["metadata"].get("namespace", r["metadata"]["name"]) for r in made} == {"PROJECT"}
    policies = {r["metadata"]["name"]: r for r in made if r["kind"] == "NetworkPolicy"}
    (rule,) = policies["sidgraft-kubeflow-pipelines"]["spec"]["egress"]
    assert rule["to"] == [{"podSelector": {}}]  # every pod of the namespace, and of no other
    before = {p["metadata"]["name"]: p for p in of_kind("openshift", "NetworkPolicy")}
    assert rule["ports"] == before["sidgraft-kubeflow-pipelines"]["spec"]["egress"][0]["ports"]
    changed = {name for name, policy in policies.items() if policy["spec"] != before[name]["spec"]}
    assert changed == {"sidgraft-kubeflow-pipelines"}
