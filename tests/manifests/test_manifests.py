"""Every overlay builds, is valid by Kubernetes' schemas, and keeps the policy: least rights, no secret, no way in."""

import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from pipelines.placement import LABEL

MANIFESTS = Path(__file__).parents[2] / "manifests"
OVERLAYS = sorted(folder.name for folder in (MANIFESTS / "overlays").iterdir())

pytestmark = pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl builds the overlays and is not installed")


@cache
def built(overlay):
    command = ["kubectl", "kustomize", str(MANIFESTS / "overlays" / overlay)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "deprecated" not in shown.stderr
    return tuple(yaml.safe_load_all(shown.stdout))


def of_kind(overlay, kind):
    return [resource for resource in built(overlay) if resource["kind"] == kind]


def test_the_overlays_are_there():
    assert OVERLAYS == ["h100", "kind", "openshift"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_valid_by_the_schemas_of_kubernetes(overlay):
    for resource in built(overlay):
        kubernetes_validate.validate(resource, kubernetes_validate.latest_version(), strict=True)


def test_the_validation_can_fail():
    wrong = {**of_kind("kind", "ServiceAccount")[0], "automountServiceAccountTokn": False}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, kubernetes_validate.latest_version(), strict=True)


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
def test_roles_name_what_they_may_and_touch_no_secret(overlay):
    roles = of_kind(overlay, "Role")
    assert roles
    for rule in (rule for role in roles for rule in role["rules"]):
        assert rule["apiGroups"] == ["pipelines.kubeflow.org"]
        assert "*" not in [*rule["resources"], *rule["verbs"]]
        assert not {"escalate", "bind", "impersonate", "update", "patch"} & set(rule["verbs"])
    assert all(account["automountServiceAccountToken"] is False for account in of_kind(overlay, "ServiceAccount"))


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_nobody_reaches_a_stage_and_a_stage_reaches_what_is_named(overlay):
    policies = {p["metadata"]["name"]: p["spec"] for p in of_kind(overlay, "NetworkPolicy")}
    assert all(p["podSelector"] == {"matchLabels": {LABEL[0]: LABEL[1]}} for p in policies.values())
    deny = policies["sidgraft-default-deny"]
    assert set(deny["policyTypes"]) == {"Ingress", "Egress"}
    assert not [p for p in policies.values() if "ingress" in p]
    exits = [rule for p in policies.values() for rule in p.get("egress", [])]
    assert all(rule["to"] and rule["ports"] for rule in exits)
    ports = {port["port"] for rule in exits for port in rule["ports"]}
    dns = 5353 if overlay == "openshift" else 53
    assert ports == {dns, 443, 6443, 8080, 8333, 8887, 8888, 9000}
    anywhere = [to["ipBlock"] for rule in exits for to in rule["to"] if "ipBlock" in to]
    assert all("169.254.169.254/32" in block["except"] for block in anywhere)  # a cloud's credentials of the node


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_no_secret_is_written_down(overlay):
    assert not of_kind(overlay, "Secret")
    text = "".join(file.read_text(encoding="utf-8") for file in MANIFESTS.rglob("*.yaml"))
    assert not re.search(r"stringData|AKIA[0-9A-Z]{16}|-----BEGIN|secretGenerator", text)


def test_the_quota_counts_the_gpus_that_profiles_ask_for():
    (quota,) = of_kind("h100", "ResourceQuota")
    assert set(quota["spec"]["hard"]) == {"requests.nvidia.com/gpu"}
