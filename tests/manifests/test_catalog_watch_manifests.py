"""The CronJob that starts retraining: restricted, one at a time, with a token and rights for that alone."""

import pytest
import yaml
from test_manifests import OVERLAYS, of_kind

from components import images
from pipelines import retrain
from pipelines.placement import LABEL


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_catalog_watch_is_one_at_a_time_restricted_and_reads_what_is_there(overlay):
    (job,) = of_kind(overlay, "CronJob")
    spec = job["spec"]
    assert spec["suspend"] is True  # until the parameters name a bucket of one's own
    assert spec["concurrencyPolicy"] == "Forbid"
    assert spec["startingDeadlineSeconds"] <= 3600
    work = spec["jobTemplate"]["spec"]
    assert work["activeDeadlineSeconds"] > 0
    assert work["template"]["metadata"]["labels"][LABEL[0]] == LABEL[1]
    pod = work["template"]["spec"]
    assert pod["securityContext"] == {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
    (container,) = pod["containers"]
    assert container["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert f"/{container['image'].rpartition(':')[0]}".endswith(f"/{images.IMAGES['prepare']}")
    assert container["resources"]["limits"] == container["resources"]["requests"]
    maps = {m["metadata"]["name"]: m["data"] for m in of_kind(overlay, "ConfigMap")}
    volumes = {volume["name"]: volume for volume in pod["volumes"]}
    mounts = {mount["mountPath"]: volumes[mount["name"]] for mount in container["volumeMounts"]}
    for path in container["command"][1:]:
        folder, _, name = path.rpartition("/")
        assert name in maps[mounts[folder]["configMap"]["name"]]
    parameters = yaml.safe_load(maps["sidgraft-retrain"]["parameters.yaml"])
    needed = {p.name for p in retrain.INPUTS if p.required}
    assert needed <= parameters.keys() <= {p.name for p in retrain.INPUTS}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_the_watcher_has_a_token_for_kubeflow_pipelines_alone_and_rights_to_start_runs(overlay):
    (job,) = of_kind(overlay, "CronJob")
    pod = job["spec"]["jobTemplate"]["spec"]["template"]["spec"]
    assert pod["automountServiceAccountToken"] is False
    tokens = [s["serviceAccountToken"] for v in pod["volumes"] for s in v.get("projected", {}).get("sources", [])]
    assert [token["audience"] for token in tokens] == ["pipelines.kubeflow.org"]
    (binding,) = (
        b for b in of_kind(overlay, "RoleBinding") if pod["serviceAccountName"] in {s["name"] for s in b["subjects"]}
    )
    (role,) = (r for r in of_kind(overlay, "Role") if r["metadata"]["name"] == binding["roleRef"]["name"])
    *starts, account = role["rules"]
    rights = {(resource, verb) for rule in starts for resource in rule["resources"] for verb in rule["verbs"]}
    assert {resource for resource, verb in rights if verb not in ("get", "list")} == {"runs", "experiments"}
    assert {verb for _, verb in rights} == {"create", "get", "list"}
    given = {entry["name"]: entry.get("value") for entry in pod["containers"][0]["env"]}
    assert account["resourceNames"] == [given["SERVICE_ACCOUNT"]]
    assert account["resourceNames"][0] in {a["metadata"]["name"] for a in of_kind(overlay, "ServiceAccount")}
