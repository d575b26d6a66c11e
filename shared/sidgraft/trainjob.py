"""Several nodes: run a stage as a TrainJob of Kubeflow Trainer 2, from a task of Kubeflow Pipelines.

The task hands over its inputs through the object store, creates the job, waits for it and fetches the result; it needs
no GPU itself. Every node runs the stage's own command under torchrun, which takes the number of nodes, its own number
and the first node's address from the variables that Trainer sets (PET_NNODES, …). What a node looks like (GPUs, shared
memory, rights, credentials) is in the TrainingRuntime of manifests/components/several-nodes. Needs the extra
`trainjob`.

The job is named from the run, so a task that is tried again finds it and waits on. It goes when it has ended, when the
task is asked to end, and with the run, whose workflow owns it. Where no task waits any longer, its nodes end by
themselves (sidgraft.lease).
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, NoReturn

from sidgraft import lease, storage
from sidgraft.distributed import flag
from sidgraft.progress import say

GROUP, VERSION, JOBS = "trainer.kubeflow.org", "v1alpha1", "trainjobs"
RUNTIME = "sidgraft-finetune"  # the TrainingRuntime in manifests/components/several-nodes
POD = "KFP_POD_NAME"  # Kubeflow Pipelines sets it in every task
RUN = "pipeline/runid"  # its label on every pod of a run
QUEUE_LABELS = ("kueue.x-k8s.io/queue-name", "kueue.x-k8s.io/priority-class")
DIGEST = "sidgraft/spec-digest"  # annotation: tells this job from another one of the same name

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
CONNECT_SECONDS, ANSWER_SECONDS = 10, 60
WATCH_SECONDS = 300  # then the server ends a watch, and the next one begins
WAITS = (1, 2, 4, 8, 16, 30, 30, 30)  # seconds between tries of a call that got no answer, two minutes in all
TIMES = {"_request_timeout": (CONNECT_SECONDS, ANSWER_SECONDS)}
LOG_LINES, SHOWN_LINES = 300, 20
ENDS = ("Complete", "Failed")  # conditions of a TrainJob


@dataclass(frozen=True)
class _Task:
    """The pod that this process runs in: what a job takes over from it."""

    api: Any  # kubernetes.client.ApiClient
    namespace: str
    run: str
    image: str
    labels: Mapping[str, str]
    owner: Mapping[str, str]  # the run's workflow


def launch(
    stage: str,
    inputs: Mapping[str, str],
    settings: Mapping[str, Any],
    out: str,
    *,
    digest: str,
    nodes: int,
    processes: int,
    checkpoints: str,
) -> None:
    """Run ``stage`` on ``nodes`` nodes and bring its artifact to ``out``.

    ``inputs`` are directories of artifacts by parameter, ``settings`` the other arguments of the command;
    ``digest`` tells this work from other work of the same run. ``processes`` is the number on each node, 0 one for
    every GPU. Inputs and result pass through a folder under ``checkpoints``, which is removed at the end; the nodes
    keep their checkpoints there, so that a job which failed goes on when the task is tried again. Raises ValueError
    with the stage's own message, or one that says what the cluster lacks; RuntimeError where the nodes gave no message.
    """
    if not storage.is_remote(checkpoints):
        raise ValueError(
            f"nodes is {nodes}, and checkpoints is {checkpoints!r}, expected a place in an object store that all nodes"
            " see: give checkpoints=s3://BUCKET/FOLDER."
        )
    task = _this_task(nodes)
    name = f"{stage}-{task.run[:8]}-{digest[:8]}"
    place = f"{checkpoints.rstrip('/')}/{name}"
    result = out if storage.is_remote(out) else f"{place}/{PurePosixPath(out).name}"
    if not storage.exists(result):
        handed = {parameter: _handed_over(path, f"{place}/{parameter}") for parameter, path in inputs.items()}
        arguments = handed | dict(settings) | {"out": result, "checkpoints": checkpoints}
        command = ["torchrun", "-m", "sidgraft.cli", stage, *(flag(key, value) for key, value in arguments.items())]
        sign = f"{place}/waited-for"
        with lease.renewed(sign):
            run_job(task, name, stage, command, sign=sign, nodes=nodes, processes=processes)
    if result != out:
        storage.download(result, out)
    storage.delete(place)


def run_job(
    task: _Task, name: str, stage: str, command: Sequence[str], *, sign: str, nodes: int, processes: int
) -> None:
    """Create the job, or find the one that an earlier try of this task has created; wait for it; remove it.

    It stays where this process dies without a word or loses the API server, so that the next try waits on. ``sign`` is
    the place where the nodes see that a task waits.
    """
    from kubernetes import client

    jobs = _Jobs(client.CustomObjectsApi(task.api), task.namespace)
    with _ended_when_asked(lambda: jobs.delete(name)):
        jobs.check_runtime()
        jobs.attach(_job(task, name, command, sign, nodes, processes))
        say(f"TrainJob {name} on {nodes} nodes; its pods: kubectl logs -n {task.namespace} -f -l {_pods_of(name)}")
        failure = jobs.wait(name)
        if failure is None:
            jobs.delete(name)
            return
        lines = _log_of_failed_pod(client.CoreV1Api(task.api), task.namespace, name)
        jobs.delete(name)  # the next try makes it anew
    told = [line for line in lines if line.startswith(f"sidgraft {stage}: ")]
    if told:
        raise ValueError(told[-1].removeprefix(f"sidgraft {stage}: "))
    shown = "\n".join(lines[-SHOWN_LINES:])
    raise RuntimeError(
        f"the TrainJob {name} failed: {failure}" + (f"; its log ends:\n{shown}" if lines else "; it left no log.")
    )


def _job(task: _Task, name: str, command: Sequence[str], sign: str, nodes: int, processes: int) -> dict[str, Any]:
    trainer: dict[str, Any] = {"image": task.image, "command": list(command), "numNodes": nodes}
    trainer["env"] = [{"name": lease.VARIABLE, "value": sign}]
    if processes:
        trainer["numProcPerNode"] = processes
    labels = {"app.kubernetes.io/part-of": "sidgraft", RUN: task.run}
    labels |= {key: task.labels[key] for key in QUEUE_LABELS if key in task.labels}
    spec = {"runtimeRef": {"apiGroup": GROUP, "kind": "TrainingRuntime", "name": RUNTIME}, "trainer": trainer}
    digest = hashlib.sha256(json.dumps([labels, spec], sort_keys=True).encode()).hexdigest()
    metadata = {"name": name, "labels": labels, "annotations": {DIGEST: digest}, "ownerReferences": [dict(task.owner)]}
    return {"apiVersion": f"{GROUP}/{VERSION}", "kind": "TrainJob", "metadata": metadata, "spec": spec}


class _Jobs:
    """The TrainJobs of one namespace: the calls that the launcher makes, each with patience and its own errors."""

    def __init__(self, api: Any, namespace: str) -> None:
        self.api, self.namespace = api, namespace
        self.where = (GROUP, VERSION, namespace, JOBS)

    def check_runtime(self) -> None:
        """Raise ValueError where the cluster has no Trainer, or the namespace not our runtime."""
        place = (GROUP, VERSION, self.namespace, "trainingruntimes", RUNTIME)
        if _asked(lambda: self.api.get_namespaced_custom_object(*place, **TIMES)) is None:
            raise ValueError(
                f"there is no TrainingRuntime {RUNTIME} in the namespace {self.namespace}: install Kubeflow Trainer 2,"
                " then run `kubectl apply -k` for an overlay that names manifests/components/several-nodes."
            )

    def attach(self, job: Mapping[str, Any]) -> None:
        """Create the job, unless the very same is there; one that is on its way out is waited for first."""
        from kubernetes.client import ApiException

        name, told = job["metadata"]["name"], False
        while True:
            try:
                if _asked(lambda: self.api.create_namespaced_custom_object(*self.where, dict(job), **TIMES)) is None:
                    raise ValueError("the cluster knows no TrainJob: install Kubeflow Trainer 2.")
                return
            except ApiException as error:
                if error.status != 409:
                    raise ValueError(f"the TrainJob {name} is refused: {_reason(error)}.") from error
            found = self.get(name)
            if found is None or "deletionTimestamp" in found["metadata"]:
                if found and not told:
                    told = True
                    say(f"an earlier TrainJob {name} is on its way out; waiting until its pods are gone")
                time.sleep(WAITS[0])
                continue
            if found["metadata"].get("annotations", {}).get(DIGEST) != job["metadata"]["annotations"][DIGEST]:
                raise ValueError(
                    f"there is a TrainJob {name} in {self.namespace}, made with other settings or another image than"
                    f" this task has: remove it (kubectl delete -n {self.namespace} trainjob {name}) and start the run"
                    " again."
                )
            say(f"TrainJob {name} is there already: an earlier try of this task has made it")
            return

    def wait(self, name: str) -> str | None:
        """Wait for the end of the job, however long it takes; returns None, or what is said of its failure."""
        shown = ""
        for job in self._seen(name):
            ended = {c["type"]: c for c in _conditions(job) if c["status"] == "True" and c["type"] in ENDS}
            if "Failed" in ended:
                return ended["Failed"].get("message") or ended["Failed"].get("reason") or "no reason is given"
            if ended:
                return None
            if (state := _state(job)) != shown:
                shown = state
                say(f"TrainJob {name}: {state}")
        return None

    def _seen(self, name: str) -> Iterator[Mapping[str, Any]]:
        """The job as it is now and after every change, without end.

        A watch that ends or breaks off is begun anew, from what the job is then. Raises RuntimeError when it is gone.
        """
        from kubernetes.client import ApiException
        from kubernetes.watch import Watch
        from urllib3.exceptions import HTTPError

        while True:
            job = self.get(name, for_ever=True)
            if job is None:
                raise RuntimeError(
                    f"the TrainJob {name} was removed by somebody else while this task waited for it: start the run"
                    " again."
                )
            yield job
            try:
                changes: Any = Watch().stream(
                    self.api.list_namespaced_custom_object,
                    *self.where,
                    field_selector=f"metadata.name={name}",
                    resource_version=job["metadata"]["resourceVersion"],
                    timeout_seconds=WATCH_SECONDS,
                    _request_timeout=(CONNECT_SECONDS, WATCH_SECONDS + ANSWER_SECONDS),
                )
                for change in changes:
                    if change["type"] == "DELETED":
                        break
                    yield change["object"]
            except ApiException as error:
                if error.status in (401, 403):
                    raise _refused(error) from error
            except HTTPError:
                pass
            time.sleep(WAITS[0])

    def get(self, name: str, *, for_ever: bool = False) -> Mapping[str, Any] | None:
        """The job; None where there is none."""
        return _asked(lambda: self.api.get_namespaced_custom_object(*self.where, name, **TIMES), for_ever=for_ever)

    def delete(self, name: str) -> None:
        """Remove the job with its pods; nothing happens where there is none.

        It is there, on its way out, until its pods are gone: another of its name would meet them.
        """
        way = {"propagation_policy": "Foreground", **TIMES}
        _asked(lambda: self.api.delete_namespaced_custom_object(*self.where, name, **way))


def _asked(call: Callable[[], Any], *, for_ever: bool = False) -> Any:
    """What the API server answers; None where it knows no such thing.

    Asks again where it does not answer or is overloaded, for two minutes or for ever. Raises ValueError that says
    which right is missing.
    """
    from kubernetes.client import ApiException
    from urllib3.exceptions import HTTPError

    tries = 0
    while True:
        try:
            return call()
        except ApiException as error:
            if error.status == 404:
                return None
            if error.status in (401, 403):
                raise _refused(error) from error
            if error.status != 429 and (error.status or 0) < 500:
                raise
            trouble: Exception = error
        except HTTPError as error:
            trouble = error
        if tries >= len(WAITS) and not for_ever:
            raise RuntimeError(
                f"the Kubernetes API gives no answer ({_reason(trouble)}): look at the network policy of the namespace,"
                " then start the run again."
            ) from trouble
        if tries == len(WAITS):
            say(f"the Kubernetes API gives no answer ({_reason(trouble)}); waiting for it")
        time.sleep(WAITS[min(tries, len(WAITS) - 1)])
        tries += 1


def _refused(error: Any) -> ValueError:
    said = _reason(error)
    if "admission webhook" in said:  # it speaks of the job, not of rights
        return ValueError(f"Kubeflow Trainer refuses the job: {said}.")
    return ValueError(
        f"the Kubernetes API refuses: {said}. The role sidgraft-trainjobs of manifests/components/several-nodes gives"
        " these rights: start the run with the service account that has it, sidgraft-runner, or bind it to the one that"
        " the run has."
    )


def _reason(error: Exception) -> str:
    """What the API server says of an error: its JSON has a message."""
    try:
        said = json.loads(error.body or "")["message"]  # type: ignore[attr-defined]
    except (AttributeError, ValueError, KeyError, TypeError):
        said = getattr(error, "reason", "") or error
    return " ".join(str(said).split()).rstrip(".")


def _conditions(job: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return job.get("status", {}).get("conditions", [])


def _state(job: Mapping[str, Any]) -> str:
    """What the job does, in words: its nodes start one after the other, and a queue may hold it back."""
    if any(c["type"] == "Suspended" and c["status"] == "True" for c in _conditions(job)):
        return "suspended, by a queue or by hand"
    nodes = sum(status.get("ready", 0) for status in job.get("status", {}).get("jobsStatus", []))
    return "its nodes are running" if nodes else "waiting for its nodes"


def _log_of_failed_pod(core: Any, namespace: str, name: str) -> list[str]:
    """The last lines of the pod that failed first, without colors; none where it is gone or never started."""

    def ended(pod: Any) -> Any:
        states = [status.state.terminated for status in pod.status.container_statuses or ()]
        return next((state for state in states if state and state.exit_code), None)

    found = _asked(lambda: core.list_namespaced_pod(namespace, label_selector=_pods_of(name), **TIMES))
    failed = sorted((p for p in found.items if ended(p)), key=lambda pod: str(ended(pod).finished_at))
    if not failed:
        return []
    pod = failed[0].metadata.name
    text = _asked(lambda: core.read_namespaced_pod_log(pod, namespace, container="node", tail_lines=LOG_LINES, **TIMES))
    return text.splitlines() if text else []


def _pods_of(name: str) -> str:
    return f"jobset.sigs.k8s.io/jobset-name={name}"


def _handed_over(path: str, place: str) -> str:
    """The place of an artifact that nodes can read; one that an earlier try has put there is not touched."""
    if storage.is_remote(path):
        return path
    if not storage.exists(place):
        storage.upload(path, place)
    return place


def _this_task(nodes: int) -> _Task:
    try:
        from kubernetes import client, config
    except ImportError as error:
        raise ValueError(
            f"nodes is {nodes}, which needs the Kubernetes client: run `pip install 'sidgraft[trainjob]'`."
        ) from error
    try:
        pod_name = os.environ[POD]
        config.load_incluster_config()
    except (KeyError, config.ConfigException) as error:
        raise ValueError(
            f"nodes is {nodes}, but this is no task of Kubeflow Pipelines, which alone can start others. On machines of"
            " your own start the command on each with torchrun, without nodes: docs/operations.md shows how."
        ) from error
    api = client.ApiClient()
    namespace = (SERVICE_ACCOUNT / "namespace").read_text(encoding="utf-8").strip()
    pod = _asked(lambda: client.CoreV1Api(api).read_namespaced_pod(pod_name, namespace, **TIMES))
    if pod is None:
        raise ValueError(f"there is no pod {pod_name} in the namespace {namespace}, which {POD} names.")
    labels = pod.metadata.labels or {}
    owners = [
        {"apiVersion": one.api_version, "kind": one.kind, "name": one.name, "uid": one.uid}
        for one in pod.metadata.owner_references or ()
    ]
    owner = owners[0] if owners else {"apiVersion": "v1", "kind": "Pod", "name": pod_name, "uid": pod.metadata.uid}
    run = labels.get(RUN) or owner["uid"]
    image = next(c.image for c in pod.spec.containers if c.name == "main")
    return _Task(api, namespace, run, image, labels, owner)


@contextmanager
def _ended_when_asked(clean_up: Callable[[], None]) -> Iterator[None]:
    """Within the body, being asked to end (SIGTERM, Ctrl-C) first runs ``clean_up``.

    Whether the run was stopped or this pod has to leave its node is not said; the first must not leave GPUs at work.
    Often there is no time for it: the pod's container ends with KFP's launcher, which the same signal ends at once.
    """

    def leave(*_: object) -> NoReturn:
        sys.exit(143)

    in_main = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, leave) if in_main else None
    try:
        yield
    except (SystemExit, KeyboardInterrupt):
        clean_up()
        raise
    finally:
        if in_main:
            signal.signal(signal.SIGTERM, before)
