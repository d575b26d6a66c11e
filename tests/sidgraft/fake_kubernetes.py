"""A Kubernetes API server that speaks the calls of the TrainJob launcher, with the rights of a Role, and a Trainer.

Jobs are checked against the models of Kubeflow Trainer's own API package. What the controller makes of a job is a
script: `fake.play(job)` is called in a thread of its own when one is created.
"""

import json
import re
import threading
from http.server import BaseHTTPRequestHandler
from urllib.parse import parse_qs, urlsplit

import loopback
from kubeflow_trainer_api import models

NAMESPACE = "team"
TRAINER = f"/apis/trainer.kubeflow.org/v1alpha1/namespaces/{NAMESPACE}"
CORE = f"/api/v1/namespaces/{NAMESPACE}"


def checked(body, model):
    """Raise ValueError for a key that the model of the API does not know, or a value that it does not take."""
    kind = getattr(models, model)
    kept = kind.from_dict(json.loads(json.dumps(body))).to_dict()

    def lost(given, kept, where):
        if isinstance(given, dict):
            for key, value in given.items():
                if not isinstance(kept, dict) or key not in kept:
                    raise ValueError(f"{model} has no {where}{key}")
                lost(value, kept[key], f"{where}{key}.")
        elif isinstance(given, list):
            for a, b in zip(given, kept, strict=True):
                lost(a, b, where)

    lost(body, kept, "")
    return body


def status(kind, message, **more):
    """A condition of a job that has come true."""
    condition = {"type": kind, "status": "True", "reason": kind, "message": message}
    return {"conditions": [condition | {"lastTransitionTime": "2026-01-01T00:00:00Z"}], **more}


class Fake:
    """What the server holds, and what it was asked."""

    def __init__(self, rules):
        self.rules = rules  # of the Role: [{"apiGroups", "resources", "verbs"}]
        self.jobs, self.pods, self.logs, self.runtimes = {}, {}, {}, {"sidgraft-finetune"}
        self.asked, self.deleted = [], []
        self.leaving = 0.0  # seconds that the pods of a removed job take to end
        self.at_work, self.met = set(), []  # jobs that have pods; those that were made while such of their name had
        self.play = lambda job: None
        self.watches_cut = 0  # so many watches break off at once, in the middle of a line
        self.silent = 0  # so many requests are answered 503
        self.version = 1
        self.changed = threading.Condition()
        self.history = []  # (version, type, job)

    def put(self, job, kind="MODIFIED"):
        """Keep a job and tell the watches."""
        with self.changed:
            self.version += 1
            job = json.loads(json.dumps(job))
            job["metadata"]["resourceVersion"] = str(self.version)
            if kind == "DELETED":
                self.jobs.pop(job["metadata"]["name"], None)
            else:
                self.jobs[job["metadata"]["name"]] = job
            self.history.append((self.version, kind, job))
            self.changed.notify_all()

    def set_status(self, name, value):
        """What the controller says of a job; one that is gone meanwhile is left so."""
        if name in self.jobs:
            self.put(self.jobs[name] | {"status": value})

    def remove(self, name, foreground):
        """Remove a job and its pods, which takes a while; in the foreground the job is seen until they are gone."""
        job = self.jobs[name]
        if foreground:
            leaving = job["metadata"] | {"deletionTimestamp": "2026-01-01T00:00:00Z"}
            self.put(job | {"metadata": leaving})
        else:
            self.put(job, "DELETED")

        def gone():
            self.at_work.discard(name)
            if foreground:
                self.put(job, "DELETED")

        threading.Timer(self.leaving, gone).start() if self.leaving else gone()

    def fail(self, name, message, log):
        """Let the job's first node fail, with what it printed."""
        ended = {"exitCode": 1, "finishedAt": "2026-01-01T00:00:00Z"}
        self.add_pod(f"{name}-node-0-0-x", {"jobset.sigs.k8s.io/jobset-name": name}, terminated=ended)
        self.logs[f"{name}-node-0-0-x"] = log
        self.set_status(name, status("Failed", message))

    def add_pod(self, name, labels, image="reg/sidgraft/gpu:v1", owner=None, terminated=None):
        """A pod with one container."""
        state = {"terminated": terminated} if terminated else {"running": {}}
        container = "node" if terminated else "main"
        status = {"name": container, "state": state, "image": image, "imageID": "", "ready": False, "restartCount": 0}
        self.pods[name] = {
            "metadata": {"name": name, "uid": f"uid-{name}", "labels": labels, "ownerReferences": owner or []},
            "spec": {"containers": [{"name": "sidecar", "image": "other"}, {"name": container, "image": image}]},
            "status": {"containerStatuses": [status]},
        }

    def allowed(self, verb, group, resource):
        """Whether the Role gives a right."""
        return any(
            group in rule["apiGroups"] and resource in rule["resources"] and verb in rule["verbs"]
            for rule in self.rules
        )


def _call(method, path, query):
    """Return (verb, group, resource, name) of a request, as Kubernetes' authorizer reads it."""
    if match := re.fullmatch(rf"{TRAINER}/(\w+)(?:/([\w-]+))?", path):
        group, resource, name = "trainer.kubeflow.org", match[1], match[2]
    elif match := re.fullmatch(rf"{CORE}/pods(?:/([\w-]+))?(/log)?", path):
        group, resource, name = "", "pods/log" if match[2] else "pods", match[1]
    else:
        raise AssertionError(f"an unknown call: {method} {path}")
    verbs = {"POST": "create", "DELETE": "delete", "GET": "get" if name else "list"}
    return ("watch" if query.get("watch") == ["True"] else verbs[method]), group, resource, name


def serving(fake):
    """Serve a Fake on loopback; gives its address."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def answer(self, code, body):
            text = body.encode() if isinstance(body, str) else json.dumps(body).encode()
            self.send_response(code)
            self.send_header("Content-Type", "text/plain" if isinstance(body, str) else "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        def refuse(self, code, message):
            self.answer(code, {"kind": "Status", "status": "Failure", "message": message, "code": code})

        def handle_any(self):
            url = urlsplit(self.path)
            query = parse_qs(url.query)
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            verb, group, resource, name = _call(self.command, url.path, query)
            if fake.silent:
                fake.silent -= 1
                return self.refuse(503, "apiserver is shutting down")
            fake.asked.append((verb, group, resource))
            if not fake.allowed(verb, group, resource):
                what = f"{resource}.{group}" if group else resource
                return self.refuse(403, f'{what} is forbidden: User "runner" cannot {verb} resource "{resource}"')
            match verb, resource:
                case "get", "trainingruntimes":
                    known = name in fake.runtimes
                    return self.answer(200, {}) if known else self.refuse(404, f'"{name}" not found')
                case "create", "trainjobs":
                    return self.create(json.loads(raw))
                case "watch", "trainjobs":
                    try:
                        return self.watch(query)
                    except OSError:  # the launcher has seen what it wants, and hung up
                        self.close_connection = True
                        return None
                case "list", "pods":
                    key, _, value = query["labelSelector"][0].partition("=")
                    found = [p for p in fake.pods.values() if p["metadata"]["labels"].get(key) == value]
                    return self.answer(200, {"kind": "PodList", "apiVersion": "v1", "metadata": {}, "items": found})
                case "get", "pods/log":
                    assert query["container"] == ["node"]
                    return self.answer(200, fake.logs[name])
            held = fake.pods if resource == "pods" else fake.jobs
            if name not in held:
                return self.refuse(404, f'{resource} "{name}" not found')
            if verb == "delete":
                fake.deleted.append(name)
                fake.remove(name, foreground=query.get("propagationPolicy") == ["Foreground"])
                return self.answer(200, {})
            return self.answer(200, held[name])

        def create(self, job):
            name = job["metadata"]["name"]
            if name in fake.jobs:
                return self.refuse(409, f'trainjobs.trainer.kubeflow.org "{name}" already exists')
            try:
                checked(job, "TrainerV1alpha1TrainJob")
            except ValueError as error:
                return self.refuse(400, str(error))
            if name in fake.at_work:
                fake.met.append(name)
            fake.at_work.add(name)
            fake.put(job, "ADDED")
            self.answer(201, fake.jobs[name])
            threading.Thread(target=fake.play, args=(job,), daemon=True).start()
            return None

        def watch(self, query):
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            wanted = query["fieldSelector"][0].removeprefix("metadata.name=")
            seen = int(query["resourceVersion"][0])
            if fake.watches_cut:
                fake.watches_cut -= 1
                self.wfile.write(b'20\r\n{"type": "MODI')
                self.close_connection = True
                return
            for _ in range(100):
                with fake.changed:
                    fake.changed.wait(0.1 if fake.version == seen else 0)
                    news = [h for h in fake.history if h[0] > seen and h[2]["metadata"]["name"] == wanted]
                    seen = fake.version
                for _, kind, job in news:
                    line = json.dumps({"type": kind, "object": job}).encode() + b"\n"
                    self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")

        do_GET = do_POST = do_DELETE = handle_any

        def log_message(self, *_):
            pass

    return loopback.serving(Handler)
