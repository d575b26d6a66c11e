"""The pipeline of docs/operations.md that recommends from time to time: what is compiled, and how it is scheduled."""

import re

import fake_kfp
import pytest
import yaml
from kfp import components

from components import images
from pipelines import build
from pipelines.placement import PROFILES, SECRET_KEYS

PAGE = (build.ROOT / "docs/operations.md").read_text(encoding="utf-8")
LISTS, SCHEDULE = re.findall(r"^```python\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


@pytest.fixture
def lists(tmp_path, monkeypatch):
    """Run the page's code where the component has been compiled for a profile and a registry of one's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SIDGRAFT_REGISTRY", "host.example/team")
    monkeypatch.setattr(build, "ROOT", tmp_path)
    (tmp_path / "mine.yaml").write_text((PROFILES / "h100.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    monkeypatch.setattr(build, "PIPELINES", ())
    monkeypatch.setattr(build, "COMPONENTS", ("recommend",))
    assert len(build.write(build.placed_targets("mine.yaml"))) == 1
    exec(LISTS, {})
    return tmp_path / "lists.yaml"


def test_the_task_of_a_loaded_component_gets_what_the_profile_says_of_its_stage(lists):
    spec, platform = yaml.safe_load_all(lists.read_text(encoding="utf-8"))
    container = spec["deploymentSpec"]["executors"]["exec-recommend"]["container"]
    assert container["image"] == f"host.example/team/sidgraft/gpu:{images.code_tag('sidgraft/gpu')}"
    accelerator = container["resources"]["accelerator"]
    assert (accelerator["resourceType"], accelerator["resourceCount"]) == ("nvidia.com/gpu", "1")
    assert container["resources"]["resourceMemoryLimit"] == "64Gi"  # 48Gi of memory and 16Gi of shm
    task = spec["root"]["dag"]["tasks"]["recommend"]
    assert task["retryPolicy"]["maxRetryCount"] == 2
    assert not task["cachingOptions"].get("enableCache")
    (got,) = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"].values()
    (shm,) = got["emptyDirMounts"]
    assert (shm["mountPath"], shm["medium"], shm["sizeLimit"]) == ("/dev/shm", "Memory", "16Gi")
    (toleration,) = got["tolerations"]
    assert (toleration["key"], toleration["effect"]) == ("nvidia.com/gpu", "NoSchedule")
    assert got["nodeSelector"]["labels"] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    assert got["securityContext"] == {"runAsNonRoot": True}
    (secret,) = got["secretAsEnv"]
    assert secret["secretName"] == "sidgraft-object-store"
    assert {key["envVar"] for key in secret["keyToEnv"]} == set(SECRET_KEYS)
    assert got["podMetadata"]["labels"] == {"app.kubernetes.io/part-of": "sidgraft"}
    assert int(got["activeDeadlineSeconds"]) == 12 * 3600


def test_the_page_schedules_it_as_the_server_takes_it(lists, monkeypatch):
    monkeypatch.setenv("KFP_TOKEN", "right")
    monkeypatch.setenv("HOME", str(lists.parent))  # the client keeps a context there
    fake = fake_kfp.Fake(token="right", multi_user=True)
    with fake_kfp.serving(fake) as address:
        exec(SCHEDULE.replace("https://HOST", address), {})
    (made,) = fake.schedules.values()
    assert made.experiment_id == fake.experiments["NS", "shop-recommend"]
    assert (made.max_concurrency, made.no_catchup, made.mode) == ("1", True, "ENABLE")
    assert made.service_account == "sidgraft-runner"
    assert made.pipeline_spec["pipeline_spec"]["pipelineInfo"]["name"] == "shop-recommend"
    inputs = made.pipeline_spec["pipeline_spec"]["root"]["inputDefinitions"]["parameters"]
    given = set(made.runtime_config.parameters)
    assert {name for name, entry in inputs.items() if not entry.get("isOptional")} <= given <= set(inputs)


def test_the_pipeline_is_short(lists):
    assert len(components.load_component_from_file(str(lists)).component_spec.inputs) == 4
    assert len([line for line in LISTS.splitlines() if line.strip()]) <= 10
