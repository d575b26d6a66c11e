"""Profiles: what is compiled in for each stage, the policy every committed pipeline keeps, and wrong profiles."""

import re
from functools import cache

import pytest
import yaml
from kfp import dsl

from components import images
from pipelines.__main__ import main
from pipelines.build import COMPILED, PIPELINES, ROOT, compiled, load_pipeline, stage_of
from pipelines.inputs import FIRST
from pipelines.placement import (
    PROFILES,
    SECRET_KEYS,
    ProfileError,
    for_parameters,
    place,
    placed,
    profile_names,
    read_profile,
)
from sidgraft.signatures import STAGES

FILES = sorted((ROOT / COMPILED).glob("*.yaml"))
GPU_STAGES = {
    "embed",
    "baselines",
    "ground",
    "finetune",
    "evaluate",
    "publish",
}  # they hold a model that computes; said here once more

SELECTORS = {  # label and a value of each provider's own documentation
    "h100": ("nvidia.com/gpu.product", "NVIDIA-H100-80GB-HBM3"),
    "gke": ("cloud.google.com/gke-accelerator", "nvidia-h100-80gb"),
    "eks": ("node.kubernetes.io/instance-type", "p5.48xlarge"),
    "aks": ("node.kubernetes.io/instance-type", "Standard_ND96isr_H100_v5"),
}


@cache
def documents(file):
    """Return the specification of a compiled pipeline and what Kubernetes gets beside it."""
    return tuple(yaml.load_all(file.read_text(encoding="utf-8"), Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader)))


def executors(file):
    """Return executor -> (container, what Kubernetes gets) of a compiled pipeline."""
    spec, platform = documents(file)
    kubernetes = platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    containers = spec["deploymentSpec"]["executors"]
    return {name.removeprefix("exec-"): (e["container"], kubernetes[name]) for name, e in containers.items()}


def tasks(file):
    """Return name -> task of a compiled pipeline, those inside loops and branches included."""
    spec = documents(file)[0]
    dags = [spec["root"]["dag"], *(c["dag"] for c in spec["components"].values() if "dag" in c)]
    found = {name: task for dag in dags for name, task in dag["tasks"].items()}
    return {name: task for name, task in found.items() if not name.startswith(("for-loop", "condition"))}


def gibibytes(text):
    return int(re.fullmatch(r"(\d+)Gi", text)[1])


def seconds(text):
    return int(re.fullmatch(r"(\d+)s", text)[1])


def every_try(policy, timeout):
    """Return the seconds that the tries and the pauses between them may last, tried one by one as Argo does.

    Argo tries no more when so much time has gone since the start of the first try (`backoff.maxDuration`).
    """
    gone, pause = timeout, seconds(policy["backoffDuration"])
    for _ in range(int(policy["maxRetryCount"])):
        gone, pause = gone + pause + timeout, pause * policy["backoffFactor"]
    return gone


def test_every_pipeline_is_committed_for_every_profile_and_nothing_else_is():
    assert {f.name for f in FILES} == {f"{p}.{profile}.yaml" for p in PIPELINES for profile in profile_names()}


@pytest.mark.parametrize("profile", SELECTORS)
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_gpu_stages_find_their_node_and_the_others_ask_for_none(pipeline, profile):
    label, value = SELECTORS[profile]
    found = executors(ROOT / COMPILED / f"{pipeline}.{profile}.yaml")
    assert set(map(stage_of, found)) >= GPU_STAGES - (set() if pipeline == "retrain" else {"publish"})
    for name, (container, kubernetes) in found.items():
        stage = stage_of(name)
        accelerator = container["resources"].get("accelerator")
        if stage not in GPU_STAGES:
            assert accelerator is None, stage
            assert not {"nodeSelector", "nodeAffinity", "tolerations", "emptyDirMounts"} & set(kubernetes), stage
            continue
        assert accelerator["resourceType"] == "nvidia.com/gpu"
        assert int(accelerator["resourceCount"]) == read_profile(profile).stages[stage].gpus > 0
        labels = {k: [v] for k, v in kubernetes.get("nodeSelector", {}).get("labels", {}).items()}
        for term in kubernetes.get("nodeAffinity", []):
            assert "weight" not in term  # required, not preferred
            labels |= {rule["key"]: rule["values"] for rule in term["matchExpressions"] if rule["operator"] == "In"}
        assert value in labels[label], stage
        assert any(
            t["key"] in ("nvidia.com/gpu", "sku") and t["effect"] == "NoSchedule" for t in kubernetes["tolerations"]
        )


@pytest.mark.parametrize("profile", profile_names())
@pytest.mark.parametrize("pipeline", PIPELINES)
def test_fine_tuning_uses_every_gpu_that_its_pod_has(pipeline, profile):
    gpus = read_profile(profile).stages["finetune"].gpus
    assert gpus == (0 if profile == "cpu" else 8)  # nodes with H100s have eight; said here once more
    inputs = documents(ROOT / COMPILED / f"{pipeline}.{profile}.yaml")[0]["root"]["inputDefinitions"]["parameters"]
    assert inputs["finetune_strategy"]["defaultValue"] == ("zero2" if gpus > 1 else "none")
    assert inputs["finetune_processes"]["defaultValue"] == 0  # one for every visible GPU


def test_a_proxy_and_its_exceptions_may_come_from_two_places(tmp_path):
    own = "env: {NO_PROXY: .svc}\nsecrets: {hub: {HTTPS_PROXY: token}}"
    assert read_profile(profile(tmp_path, 'queue: ""', own)).env == {"NO_PROXY": ".svc"}


def test_a_profile_of_ones_own_does_not_take_the_name_of_another(tmp_path):
    file = tmp_path / "h100.yaml"
    file.write_text((PROFILES / "h100.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(ProfileError, match=r"has the name of a profile of sidgraft's.*rename it"):
        read_profile(str(file))


@pytest.mark.parametrize("gpus", [1, 4])
def test_grounding_uses_every_gpu_that_its_pod_has(tmp_path, gpus):
    wanted = f"ground: {{cpu: 8, memory: 64Gi, gpus: {gpus},"
    own = read_profile(profile(tmp_path, "ground: {cpu: 8, memory: 64Gi, gpus: 1,", wanted))
    spec = next(yaml.safe_load_all(compiled(placed(load_pipeline("train"), own))))
    inputs = spec["root"]["inputDefinitions"]["parameters"]
    assert inputs["ground_processes"]["defaultValue"] == (0 if gpus > 1 else 1)


def test_the_cpu_profile_asks_for_no_gpu():
    for container, kubernetes in executors(ROOT / COMPILED / "train.cpu.yaml").values():
        assert "accelerator" not in container["resources"]
        assert not {"nodeSelector", "nodeAffinity", "tolerations"} & set(kubernetes)


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.name)
def test_policy_of_every_executor(file):
    own = {load: read_profile(load) for load in profile_names()}[file.name.split(".")[1]]
    for name, (container, kubernetes) in executors(file).items():
        stage = stage_of(name)
        assert kubernetes["securityContext"] == {"runAsNonRoot": True}, stage
        assert not {"privileged", "hostPath", "hostNetwork", "capabilities"} & set(kubernetes), stage
        resources = container["resources"]
        for kind in ("Cpu", "Memory"):
            assert resources[f"resource{kind}Limit"] == resources[f"resource{kind}Request"] != "", stage
        assert re.search(r":v\d+\.\d+\.\d+$", container["image"]), stage  # a tag that stays, never latest
        assert int(kubernetes["activeDeadlineSeconds"]) >= 3600, stage
        mounts = {m["mountPath"]: m for m in kubernetes.get("emptyDirMounts", [])}
        assert ("/dev/shm" in mounts) == ("accelerator" in resources), stage
        if "/dev/shm" in mounts:
            shm = mounts["/dev/shm"]
            assert shm["medium"] == "Memory"
            assert gibibytes(resources["resourceMemoryLimit"]) == gibibytes(shm["sizeLimit"]) + own.stages[stage].memory
        assert kubernetes["podMetadata"]["labels"]["app.kubernetes.io/part-of"] == "sidgraft", stage
        assert "env" not in container, stage  # secrets come by reference alone
        (secret,) = kubernetes["secretAsEnv"]
        assert (secret["secretName"], secret["optional"]) == ("sidgraft-object-store", True), stage
        assert {(key["secretKey"], key["envVar"]) for key in secret["keyToEnv"]} == {(key, key) for key in SECRET_KEYS}


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.name)
def test_every_task_is_tried_again_with_growing_pauses(file):
    found = tasks(file)
    kubernetes = {name: beside for name, (_, beside) in executors(file).items()}
    assert len(set(STAGES) & set(found)) >= 5
    for stage, task in found.items():
        policy = task["retryPolicy"]
        assert policy["maxRetryCount"] >= 1, stage
        assert policy["backoffFactor"] == 2.0, stage
        assert policy["backoffDuration"] in ("30s", "60s"), stage
        timeout = int(kubernetes[stage]["activeDeadlineSeconds"])
        assert seconds(policy["backoffMaxDuration"]) >= every_try(policy, timeout), stage
        is_cached = not (file.name.startswith("retrain.") and stage_of(stage) in ("prepare", "watch", "publish"))
        assert task["cachingOptions"] == ({"enableCache": True} if is_cached else {}), stage


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.name)
def test_no_secret_literal(file):
    text = file.read_text(encoding="utf-8")
    assert not re.search(
        r"AKIA[0-9A-Z]{16}|-----BEGIN|password\s*[:=]\s*\S|secret_?key\s*[:=]\s*['\"]\w{8}", text, re.I
    )


def test_the_description_names_what_is_filled_in_first_and_every_name_is_an_input():
    told = {}
    for pipeline in PIPELINES:
        spec = documents(ROOT / COMPILED / f"{pipeline}.h100.yaml")[0]
        names = re.search(r"Fill in first: (.*)\. The rest", spec["pipelineInfo"]["description"])[1].split(", ")
        assert set(names) <= spec["root"]["inputDefinitions"]["parameters"].keys()
        told[pipeline] = names
    assert set().union(*told.values()) == set(FIRST)
    assert told["train"][:3] == ["catalog", "interactions", "prepare_item_id"]
    assert ("bundles" in told["retrain"], "variants" in told["study"]) == (True, True)


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.name)
def test_the_form_describes_every_input_and_only_files_have_no_default(file):
    spec = documents(file)[0]
    inputs = spec["root"]["inputDefinitions"]["parameters"]
    assert all(entry.get("description") for entry in inputs.values())
    places = {"catalog", "interactions"} | ({"bundles"} if file.name.startswith("retrain.") else set())
    assert {name for name, entry in inputs.items() if not entry.get("isOptional")} == places
    own = {*places, "queries", "variant", "seed", "variants", "seeds"}
    assert all(name in own or name.removeprefix("incremental_").split("_")[0] in STAGES for name in inputs)
    assert all(entry.get("defaultValue") is not True for name, entry in inputs.items() if "trust_remote" in name)


def profile(tmp_path, old="", new="", base="h100"):
    text = (PROFILES / f"{base}.yaml").read_text(encoding="utf-8")
    assert old in text
    file = tmp_path / "mine.yaml"
    file.write_text(text.replace(old, new, 1) if old else f"{text}\n{new}", encoding="utf-8")
    return str(file)


def test_a_profile_of_ones_own_sets_queue_priority_images_and_caching(tmp_path, monkeypatch):
    monkeypatch.setattr("pipelines.build.ROOT", tmp_path)
    monkeypatch.setenv("SIDGRAFT_REGISTRY", "host/team")
    file = profile(tmp_path, 'queue: ""\npriority: ""', "queue: gpus\npriority: low\nimages: {cpu: reg:5000/a/cpu:v3}")
    text = (tmp_path / "mine.yaml").read_text().replace("report: {memory: 16Gi}", "report: {cache: false, retries: 5}")
    (tmp_path / "mine.yaml").write_text(text)
    assert main(["compile", "--profile", file]) == 0
    compiled = tmp_path / COMPILED / "train.mine.yaml"
    found = executors(compiled)
    assert found["quantize"][0]["image"] == "reg:5000/a/cpu:v3"
    assert found["finetune"][0]["image"] == f"host/team/{images.IMAGES['finetune']}:{images.code_tag('sidgraft/gpu')}"
    labels = {
        "app.kubernetes.io/part-of": "sidgraft",
        "kueue.x-k8s.io/queue-name": "gpus",
        "kueue.x-k8s.io/priority-class": "low",
    }
    assert all(kubernetes["podMetadata"]["labels"] == labels for _, kubernetes in found.values())
    for component, image in (("quantize", "reg:5000/a/cpu:v3"), ("recommend", found["finetune"][0]["image"])):
        own = yaml.safe_load((tmp_path / f"components/{component}/component.mine.yaml").read_text())
        ours = yaml.safe_load((ROOT / f"components/{component}/component.yaml").read_text())
        ours["deploymentSpec"]["executors"][f"exec-{component}"]["container"]["image"] = image
        assert own == ours
    report = tasks(compiled)["report"]
    assert not report["cachingOptions"].get("enableCache")
    assert report["retryPolicy"]["maxRetryCount"] == 5


def placements(read):
    """Return task -> (labels of its node, keys that are tolerated, queue, priority), of the pipeline train."""
    text = compiled(placed(load_pipeline("train"), read))
    _, platform = yaml.load_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    found = {}
    for name, kubernetes in platform["platforms"]["kubernetes"]["deploymentSpec"]["executors"].items():
        labels = kubernetes["podMetadata"]["labels"]
        found[stage_of(name)] = (
            kubernetes.get("nodeSelector", {}).get("labels", {}),
            [toleration["key"] for toleration in kubernetes.get("tolerations", [])],
            labels.get("kueue.x-k8s.io/queue-name"),
            labels.get("kueue.x-k8s.io/priority-class"),
        )
    return found


def test_a_stage_has_nodes_and_a_queue_of_its_own_and_those_without_gpus_have_theirs(tmp_path):
    batch = "[{key: batch, operator: Exists, effect: NoSchedule}]"
    file = profile(
        tmp_path,
        'queue: ""\npriority: ""',
        f"queue: all\npriority: low\ncpu: {{node_selector: {{pool: cpus}}, tolerations: {batch}}}",
    )
    text = (tmp_path / "mine.yaml").read_text()
    for old, new in {
        "evaluate: {": "evaluate: {queue: small, node_selector: {nvidia.com/gpu.product: NVIDIA-L40S}, ",
        "quantize: {": "quantize: {node_selector: {pool: large}, tolerations: [], ",
        "report: {": 'report: {queue: "", priority: "", ',
        "finetune: {": "finetune: {priority: high, tolerations: [{key: dear, operator: Exists}], ",
    }.items():
        assert text.count(f"\n  {old}") == 1
        text = text.replace(f"\n  {old}", f"\n  {new}")
    (tmp_path / "mine.yaml").write_text(text)
    h100 = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    assert placements(read_profile(file)) == {
        "prepare": ({"pool": "cpus"}, ["batch"], "all", "low"),
        "embed": (h100, ["nvidia.com/gpu"], "all", "low"),
        "quantize": ({"pool": "large"}, [], "all", "low"),
        "baselines": (h100, ["nvidia.com/gpu"], "all", "low"),
        "expand": ({"pool": "cpus"}, ["batch"], "all", "low"),
        "ground": (h100, ["nvidia.com/gpu"], "all", "low"),
        "finetune": (h100, ["dear"], "all", "high"),
        "evaluate": ({"nvidia.com/gpu.product": "NVIDIA-L40S"}, ["nvidia.com/gpu"], "small", "low"),
        "diagnose": ({"pool": "cpus"}, ["batch"], "all", "low"),
        "report": ({"pool": "cpus"}, ["batch"], None, None),
    }
    several = for_parameters(read_profile(file), {"finetune_nodes": 2})
    assert placements(several)["finetune"] == ({"pool": "cpus"}, ["batch"], "all", "high")  # it waits for its nodes


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            "  quantize: {",
            "  quantize: {node_selectors: {a: b}, ",
            "quantize has.*'node_selectors'.*mean node_selector?",
        ),
        (
            "  quantize: {",
            "  quantize: {node_selector: {a: 1}, ",
            "quantize: node_selector.*expected a mapping of texts",
        ),
        ("  quantize: {", "  quantize: {tolerations: {key: a}, ", "quantize: tolerations is .*expected a list"),
        ("  quantize: {", "  quantize: {tolerations: [{kay: a}], ", "'kay'.*Did you mean key?"),
        ("  quantize: {", "  quantize: {priority: high, ", "quantize: priority is Kueue's and needs a queue"),
        ("  quantize: {", "  quantize: {queue: 3, ", "mine: quantize is .*expected a mapping of texts"),
        ("  evaluate: {", "  evaluate: {node_selector: {}, ", "evaluate has GPUs, so gpu must say"),
        ("\nqueue:", "\ncpu: {tolerations: [], resource: a}\nqueue:", "cpu has the unknown key 'resource'"),
        ("tolerations:", "toleration:", "unknown key 'toleration'.*Did you mean tolerations?"),
        ("stages:", "stage:", "unknown key 'stage'.*Did you mean stages?"),
        ("  quantize:", "  quantise:", "unknown key 'quantise'.*Did you mean quantize?"),
        ("memory: 8Gi", "memmory: 8Gi", "Did you mean memory?"),
        ("memory: 8Gi", "memory: 8G", "expected whole Gi"),
        ("timeout: 2h", "timeout: 7200", "such as 90s, 30m or 12h"),
        ("cpu: 2\n", "cpu: two\n", "cpu is 'two', expected a whole number"),
        ("shm: 16Gi, ", "", "embed has GPUs and no shm"),
        ("  resource: nvidia.com/gpu\n", "", "must say their resource"),
        ('priority: ""', "priority: high", "needs a queue"),
        ("gpus: 1", "gpus: -1", "gpus is -1"),
        ("retries: 2", "retries: 0", "retries is 0, expected a whole number of at least 1"),
        ("retries: 2", "retries: 11", "retries is 11, expected at most 10: the pauses between tries double"),
        ('queue: ""', "images: {gpu: registry/team/gpu}", "expected a reference with a tag"),
        ('queue: ""', "images: {gpu: 'registry:5000/team/gpu'}", "expected a reference with a tag"),
        ('queue: ""', "images: {gpu: 'registry/team/gpu:latest'}", "not latest"),
        ('queue: ""', "checkpoints: /checkpoints", "expected a folder that outlives a pod, s3://BUCKET/FOLDER"),
        ('queue: ""', "env: {HF_TOKEN: abc}", "HF_TOKEN looks like a secret.*secrets: {SECRET: {HF_TOKEN: KEY}}"),
        ('queue: ""', "env: {AWS_ACCESS_KEY_ID: a}", "looks like a secret"),
        ('queue: ""', "env: {wandb_api_key: a}", "looks like a secret"),
        ('queue: ""', "env: {WANDB_APIKEY: a}", "looks like a secret"),
        ('queue: ""', "env: {HTTPS_PROXY: 'http://me:word@proxy:3128', NO_PROXY: .svc}", "PROXY looks like a secret"),
        ('queue: ""', "env: {https_proxy: 'http://proxy:3128'}", "sets a proxy and no NO_PROXY"),
        ('queue: ""', "secrets: {hub: {HTTPS_PROXY: token}}", "sets a proxy and no NO_PROXY"),
        ('queue: ""', "env: {A-B: c}", "'A-B', expected the name of an environment variable"),
        ('queue: ""', "env: {A: 1}", "env is .*quote numbers"),
        ('queue: ""', "env: [A]", "env is .*expected a mapping of texts"),
        ('queue: ""', "secrets: [hub]", "secrets is .*expected {SECRET: {VARIABLE: KEY}}"),
        ('queue: ""', "secrets: {hub: token}", "secrets: hub is 'token', expected a mapping"),
        ('queue: ""', "env: {A: b}\nsecrets: {hub: {A: token}}", "sets A twice"),
        ('queue: ""', "secrets: {hub: {A: token}, club: {A: token}}", "sets A twice"),
        ('queue: ""', "secrets: {hub: {A: token, B: token}}", "hub gives one key to two variables"),
        ('queue: ""', "mounts: [{secrets: a, path: /etc/a}]", "'secrets'.*Did you mean secret?"),
        ('queue: ""', "mounts: [{secret: a}]", "expected a secret or a config_map.*the path of a folder"),
        ('queue: ""', "mounts: [{secret: a, config_map: b, path: /etc/a}]", "expected a secret or a config_map"),
        ('queue: ""', "mounts: [{secret: A.b, path: /etc/a}]", "a name of small letters"),
        ('queue: ""', "mounts: [{secret: shm, path: /etc/a}]", "shm, cache and tmp are taken"),
        ('queue: ""', "mounts: [{secret: a, path: etc/a}]", "path is 'etc/a', expected a folder of its own"),
        ('queue: ""', "mounts: [{secret: a, path: /cache/}]", "path is '/cache/', expected a folder of its own"),
        ('queue: ""', "mounts: [{secret: a, path: /a}, {config_map: a, path: /b}]", "has a twice"),
        ('queue: ""', "mounts: [{secret: a, path: /a}, {config_map: b, path: /a/}]", "has /a twice"),
        (
            'queue: ""',
            "env: {AWS_SHARED_CREDENTIALS_FILE: /a}\nmounts: [{secret: a, path: /a/}]",
            "is the folder /a; .*takes a file of profiles alone. Name that, /a/FILE",
        ),
        ("tolerations: [", "tolerations: {a: [", "."),
    ],
)
def test_a_wrong_profile_is_told(tmp_path, old, new, message):
    file = profile(tmp_path, old, new)
    if message == ".":
        (tmp_path / "mine.yaml").write_text("- 1\n")
        message = "expected a mapping"
    with pytest.raises(ProfileError, match=message):
        read_profile(file)


@pytest.mark.parametrize(
    "name",
    ["AWS_SHARED_CREDENTIALS_FILE", "AWS_WEB_IDENTITY_TOKEN_FILE", "TOKENIZERS_PARALLELISM", "MLFLOW_TRACKING_URI"],
)
def test_the_name_of_a_place_or_a_setting_is_no_secret(tmp_path, name):
    read = read_profile(profile(tmp_path, 'queue: ""', f"env: {{{name}: /a}}"))
    assert read.env == {name: "/a"}


def test_the_surroundings_that_the_documentation_shows_are_those_of_a_profile(tmp_path):
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"## Private CA.*?```yaml\n(.*?)```", text, re.DOTALL)
    read = read_profile(profile(tmp_path, "secret: sidgraft-object-store\n", shown))
    assert read.env["AWS_CA_BUNDLE"].rpartition("/")[0] in {mount["path"] for mount in read.mounts}
    assert set(read.secrets) == {"hub", "tracking"}


def test_checkpoints_of_a_profile_are_the_forms_default_in_a_folder_of_this_code(tmp_path, monkeypatch):
    monkeypatch.setattr("pipelines.build.ROOT", tmp_path)
    file = profile(tmp_path, 'queue: ""', "checkpoints: s3://shop/checkpoints/")
    assert main(["compile", "--profile", file]) == 0
    inputs = documents(tmp_path / COMPILED / "study.mine.yaml")[0]["root"]["inputDefinitions"]["parameters"]
    place = f"s3://shop/checkpoints/{images.code_tag('sidgraft/gpu')}"
    assert {inputs[f"{stage}_checkpoints"]["defaultValue"] for stage in ("ground", "finetune")} == {place}


@pytest.mark.parametrize("wrong", ["https://host/team", "host/team/gpu:v1", "host:5000/team:v1", "Host Team"])
def test_a_registry_with_a_scheme_or_a_tag_is_told(tmp_path, monkeypatch, capsys, wrong):
    monkeypatch.setenv("SIDGRAFT_REGISTRY", wrong)
    assert main(["compile", "--profile", profile(tmp_path)]) == 2
    assert f"SIDGRAFT_REGISTRY is {wrong!r}, expected a registry and the path in it" in capsys.readouterr().err


def test_an_unknown_profile_is_told(capsys):
    assert main(["compile", "--profile", "h10"]) == 2
    assert "Did you mean h100?" in capsys.readouterr().err


def test_place_tells_what_is_no_component_of_ours(tmp_path):
    @dsl.component
    def mine():
        pass

    def graph():
        place(mine(), read_profile("cpu"))

    with pytest.raises(ProfileError, match="profile cpu says nothing of the component 'mine'; it places those of sid"):
        dsl.pipeline(graph)


def test_a_profile_leaves_the_pipeline_that_others_use_as_it_was():
    before = load_pipeline("train").pipeline_spec
    assert "retryPolicy" not in str(before.root.dag.tasks["prepare"])
