"""The launcher of several nodes against an API server of our own, which grants the Role of the manifests alone."""

import os
import shutil
import signal
import threading
import time
from pathlib import Path

import fake_kubernetes
import kubernetes
import pytest
import yaml

from sidgraft import lease, trainjob

MANIFEST = Path(__file__).parents[2] / "manifests" / "components" / "several-nodes" / "training.yaml"
RUN = "4d1c5e2a-9a53-4b7e-b7d1-6a1f9a6d6f10"
WORKFLOW = {"apiVersion": "argoproj.io/v1alpha1", "kind": "Workflow", "name": "sidgraft-train-x", "uid": "w-1"}
COMMAND = ["torchrun", "-m", "sidgraft.cli", "finetune", "--strategy=zero2"]
NAME = "finetune-4d1c5e2a-abc"
SIGN = "s3://shop/checkpoints/finetune-4d1c5e2a-abc/waited-for"


def role():
    (found,) = (d for d in yaml.safe_load_all(MANIFEST.read_text(encoding="utf-8")) if d["kind"] == "Role")
    return found["rules"]


@pytest.fixture
def fake(monkeypatch, tmp_path):
    """A cluster, seen from the pod of a task."""
    fake = fake_kubernetes.Fake(role())
    fake.add_pod("task-1", {trainjob.RUN: RUN, trainjob.QUEUE_LABELS[0]: "gpus", "other": "x"}, owner=[WORKFLOW])
    monkeypatch.setenv(trainjob.POD, "task-1")
    monkeypatch.setattr(trainjob, "SERVICE_ACCOUNT", tmp_path)
    monkeypatch.setattr(trainjob, "WAITS", (0.02,) * 8)
    (tmp_path / "namespace").write_text(fake_kubernetes.NAMESPACE)
    with fake_kubernetes.serving(fake) as address:
        configuration = kubernetes.client.Configuration(host=address)
        configuration.retries = 0
        monkeypatch.setattr(kubernetes.client.Configuration, "_default", configuration)
        monkeypatch.setattr(kubernetes.config, "load_incluster_config", lambda: None)
        yield fake


def run(nodes=2, processes=0, command=COMMAND, name=NAME):
    task = trainjob._this_task(nodes)
    trainjob.run_job(task, name, "finetune", command, sign=SIGN, nodes=nodes, processes=processes)


def succeed(fake):
    def play(job):
        fake.set_status(job["metadata"]["name"], {"jobsStatus": [jobs_status(ready=0)]})
        fake.set_status(job["metadata"]["name"], {"jobsStatus": [jobs_status(ready=1)]})
        fake.set_status(job["metadata"]["name"], fake_kubernetes.status("Complete", "done"))

    fake.play = play


def jobs_status(ready):
    return {"name": "node", "active": 1, "ready": ready, "failed": 0, "succeeded": 0, "suspended": 0}


def test_the_job_is_small_and_takes_over_image_queue_run_and_owner(fake):
    succeed(fake)
    run(nodes=3, processes=4)
    (created,) = (job for _, kind, job in fake.history if kind == "ADDED")
    assert created["spec"] == {
        "runtimeRef": {
            "apiGroup": "trainer.kubeflow.org", "kind": "TrainingRuntime", "name": "sidgraft-finetune"
        },
        "trainer": {
            "image": "reg/sidgraft/gpu:v1", "command": COMMAND, "numNodes": 3, "numProcPerNode": 4,
            "env": [{"name": "SIDGRAFT_LEASE", "value": SIGN}],
        },
    }  # fmt: skip
    meta = created["metadata"]
    assert meta["ownerReferences"] == [WORKFLOW]
    part_of = "app.kubernetes.io/part-of"
    assert meta["labels"] == {part_of: "sidgraft", "pipeline/runid": RUN, "kueue.x-k8s.io/queue-name": "gpus"}
    assert fake.deleted == [NAME]  # its pods hold nothing when it is done


def test_the_role_of_the_manifests_has_the_verbs_that_are_used_and_no_other(fake):
    def play(job):
        while ("watch", "trainer.kubeflow.org", "trainjobs") not in fake.asked:
            time.sleep(0.01)
        fake.fail(NAME, "a node failed", "Traceback\nboom")

    fake.play = play
    with pytest.raises(RuntimeError):
        run()
    given = {(v, g, r) for rule in role() for g in rule["apiGroups"] for r in rule["resources"] for v in rule["verbs"]}
    assert set(fake.asked) == given


def test_a_failed_job_tells_the_stages_own_sentence(fake):
    log = "loading\nsidgraft finetune: no user has a validation target: give longer histories.\nTraceback\nChildFailed"
    fake.play = lambda job: fake.fail(NAME, "jobset failed", log)
    with pytest.raises(ValueError, match=r"^no user has a validation target: give longer histories\.$"):
        run()
    assert fake.deleted == [NAME]  # so that a try after it makes a new one


def test_a_failed_job_without_a_sentence_tells_its_condition_and_the_end_of_its_log(fake):
    log = "\n".join(f"line {i}" for i in range(100)) + "\nCUDA out of memory"
    fake.play = lambda job: fake.fail(NAME, "jobset failed due to one or more job failures", log)
    with pytest.raises(RuntimeError, match="jobset failed due to one or more job failures") as caught:
        run()
    assert str(caught.value).endswith("line 99\nCUDA out of memory")
    assert "line 81\n" in str(caught.value)
    assert "line 80\n" not in str(caught.value)


def test_a_failed_job_whose_pods_are_gone_tells_its_condition(fake):
    fake.play = lambda job: fake.set_status(NAME, fake_kubernetes.status("Failed", "DeadlineExceeded"))
    with pytest.raises(RuntimeError, match=r"failed: DeadlineExceeded; it left no log"):
        run()


def test_watches_that_break_off_and_an_api_server_that_is_away_are_outlived(fake):
    fake.watches_cut = 3

    def play(job):
        while fake.watches_cut:
            time.sleep(0.01)
        fake.silent = 20  # more than the tries of a call that is not the wait
        while fake.silent:
            time.sleep(0.01)
        fake.set_status(NAME, fake_kubernetes.status("Complete", "done"))

    fake.play = play
    run()
    assert fake.asked.count(("watch", "trainer.kubeflow.org", "trainjobs")) >= 3


def test_an_api_server_that_does_not_answer_at_first_is_told(fake):
    fake.silent = 1000
    with pytest.raises(RuntimeError, match=r"gives no answer .*network policy"):
        run()


def test_a_second_try_waits_for_the_job_of_the_first(fake, capsys):
    lost = threading.Event()

    def play(job):
        lost.wait(10)
        fake.set_status(NAME, fake_kubernetes.status("Complete", "done"))

    fake.play = play
    first = trainjob._this_task(2)
    job = trainjob._job(first, NAME, COMMAND, SIGN, 2, 0)
    jobs = trainjob._Jobs(kubernetes.client.CustomObjectsApi(first.api), first.namespace)
    jobs.attach(job)  # and the first try is gone, without a word
    fake.add_pod("task-2", fake.pods["task-1"]["metadata"]["labels"], owner=[WORKFLOW])
    os.environ[trainjob.POD] = "task-2"
    threading.Timer(0.3, lost.set).start()
    run()
    assert [kind for _, kind, _ in fake.history].count("ADDED") == 1
    assert "an earlier try of this task has made it" in capsys.readouterr().err


@pytest.mark.parametrize("changed", [{"command": [*COMMAND, "--epochs=2"]}, {"nodes": 4}])
def test_a_job_of_the_same_name_with_other_settings_is_told_and_left_alone(fake, changed):
    task = trainjob._this_task(2)
    trainjob._Jobs(kubernetes.client.CustomObjectsApi(task.api), task.namespace).attach(
        trainjob._job(task, NAME, COMMAND, SIGN, 2, 0)
    )
    with pytest.raises(ValueError, match=f"there is a TrainJob {NAME} in team, made with other settings"):
        run(**changed)
    assert not fake.deleted


def test_a_job_that_is_on_its_way_out_is_waited_for(fake):
    task = trainjob._this_task(2)
    old = trainjob._job(task, NAME, COMMAND, SIGN, 2, 0)
    old["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    fake.put(old)
    succeed(fake)
    threading.Timer(0.3, lambda: fake.put(old, "DELETED")).start()
    run()
    assert "ADDED" in [kind for _, kind, _ in fake.history]


def test_a_try_at_once_after_a_failed_job_does_not_meet_its_pods(fake, capsys):
    fake.leaving = 0.3
    fake.play = lambda job: fake.fail(NAME, "a node failed", "boom")
    with pytest.raises(RuntimeError, match="boom"):
        run()
    succeed(fake)
    run()
    assert (fake.deleted, fake.met) == ([NAME, NAME], [])
    assert capsys.readouterr().err.count("waiting until its pods are gone") == 1


def test_a_job_that_somebody_removes_is_told(fake):
    fake.play = lambda job: fake.put(fake.jobs[NAME], "DELETED")
    with pytest.raises(RuntimeError, match="was removed by somebody else"):
        run()


def test_being_asked_to_end_removes_the_job(fake):
    fake.play = lambda job: os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit) as stopped:
        run()
    assert stopped.value.code == 143
    assert fake.deleted == [NAME]


@pytest.mark.parametrize("verb", ["create", "get", "watch", "list", "log"])
def test_a_right_that_is_missing_is_told_with_the_role_that_gives_it(fake, verb):
    rules = [{**rule, "verbs": [v for v in rule["verbs"] if v != verb]} for rule in role()]
    fake.rules = rules if verb != "log" else [r for r in rules if r["resources"] != ["pods/log"]]
    fake.play = lambda job: verb == "watch" or fake.fail(NAME, "failed", "boom")
    with pytest.raises(ValueError, match=r"cannot .* resource .*role sidgraft-trainjobs of manifests/components"):
        run()


def test_a_namespace_without_the_runtime_is_told(fake):
    fake.runtimes.clear()
    with pytest.raises(ValueError, match=r"no TrainingRuntime sidgraft-finetune in the namespace team.*kubectl apply"):
        run()


def test_what_trainer_refuses_is_told(fake):
    task = trainjob._this_task(2)
    with pytest.raises(ValueError, match=r"is refused: .*numNodes"):
        trainjob.run_job(task, NAME, "finetune", COMMAND, sign=SIGN, nodes="two", processes=0)


def test_outside_of_a_cluster_it_is_told_what_to_do(monkeypatch):
    monkeypatch.delenv(trainjob.POD, raising=False)
    with pytest.raises(ValueError, match=r"no task of Kubeflow Pipelines.*torchrun"):
        trainjob._this_task(2)
    monkeypatch.setenv(trainjob.POD, "task-1")  # as on a machine that is no pod
    with pytest.raises(ValueError, match="no task of Kubeflow Pipelines"):
        trainjob._this_task(2)


def test_the_fake_refuses_what_the_api_does_not_know():
    job = {"metadata": {"name": "a"}, "spec": {"runtimeRef": {"name": "r"}, "trainer": {"numNode": 2}}}
    with pytest.raises(ValueError, match=r"no spec\.trainer\.numNode"):
        fake_kubernetes.checked(job, "TrainerV1alpha1TrainJob")


class Store:
    """`s3://` as folders, in place of the store: what the launcher puts where."""

    def __init__(self, root):
        self.root = root

    def place(self, uri):
        return self.root / uri.removeprefix("s3://") if uri.startswith("s3://") else Path(uri)

    def is_remote(self, uri):
        return uri.startswith("s3://")

    def exists(self, uri):
        return self.place(uri).exists()

    def upload(self, path, uri):
        shutil.copytree(path, self.place(uri))

    def download(self, uri, path):
        shutil.copytree(self.place(uri), path)

    def delete(self, uri):
        shutil.rmtree(self.place(uri))

    def write_text(self, uri, text):
        self.place(uri).parent.mkdir(parents=True, exist_ok=True)
        self.place(uri).write_text(text)


@pytest.fixture
def store(monkeypatch, tmp_path):
    store = Store(tmp_path / "store")
    monkeypatch.setattr(trainjob, "storage", store)
    monkeypatch.setattr(lease, "storage", store)
    return store


def launch(tmp_path, **changed):
    (tmp_path / "rows").mkdir(exist_ok=True)
    (tmp_path / "rows" / "f").write_text("rows")
    given = {"inputs": {"token_rows": str(tmp_path / "rows"), "catalog": "s3://shop/catalog"}}
    given |= {"settings": {"strategy": "zero2", "gradient_checkpointing": True}, "out": str(tmp_path / "out")}
    given |= {"digest": "0123456789abcdef", "nodes": 2, "processes": 0, "checkpoints": "s3://shop/checkpoints/"}
    trainjob.launch("finetune", **given | changed)


def test_inputs_go_through_the_store_and_the_result_comes_back(fake, store, tmp_path):
    place = "s3://shop/checkpoints/finetune-4d1c5e2a-01234567"

    def play(job):
        assert (store.place(f"{place}/token_rows") / "f").read_text() == "rows"
        (sign,) = job["spec"]["trainer"]["env"]
        assert store.place(sign["value"]).read_text()  # before a node looks for it
        store.place(f"{place}/out").mkdir()
        (store.place(f"{place}/out") / "m").write_text("model")
        fake.set_status(job["metadata"]["name"], fake_kubernetes.status("Complete", "done"))

    fake.play = play
    launch(tmp_path)
    (created,) = (job for _, kind, job in fake.history if kind == "ADDED")
    assert created["spec"]["trainer"]["command"] == [
        "torchrun", "-m", "sidgraft.cli", "finetune", f"--token-rows={place}/token_rows", "--catalog=s3://shop/catalog",
        "--strategy=zero2", "--gradient-checkpointing", f"--out={place}/out", "--checkpoints=s3://shop/checkpoints/",
    ]  # fmt: skip
    assert (tmp_path / "out" / "m").read_text() == "model"
    assert not store.exists(place)


def test_a_result_that_is_there_already_is_fetched_without_a_job(fake, store, tmp_path):
    there = store.place("s3://shop/checkpoints/finetune-4d1c5e2a-01234567/out")
    there.mkdir(parents=True)
    (there / "m").write_text("model")
    launch(tmp_path)
    assert (tmp_path / "out" / "m").read_text() == "model"
    assert not fake.history


@pytest.mark.parametrize("checkpoints", ["", "/checkpoints"])
def test_nodes_need_a_place_that_all_of_them_see(fake, tmp_path, checkpoints):
    with pytest.raises(ValueError, match=r"nodes is 2, and checkpoints is .*s3://BUCKET/FOLDER"):
        launch(tmp_path, checkpoints=checkpoints)
    assert not fake.asked
