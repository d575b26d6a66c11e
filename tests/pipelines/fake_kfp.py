"""A server that speaks the calls of Kubeflow Pipelines we use, and refuses what its own models do not know."""

import itertools
import json
import re
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import kfp_server_api
import loopback

API = "/apis/v2beta1"


def checked(body, model):
    """Return the body as the model of kfp-server-api; keys that the model lacks are an error, as in the real server."""
    kind = getattr(kfp_server_api, model)
    unknown = set(body) - set(kind.attribute_map.values())
    if unknown:
        raise ValueError(f"{model} has no {sorted(unknown)}")
    for name, attribute in kind.attribute_map.items():
        inner = kind.openapi_types[name]
        if isinstance(body.get(attribute), dict) and hasattr(kfp_server_api, inner):
            checked(body[attribute], inner)
    return kfp_server_api.ApiClient().deserialize(SimpleNamespace(data=json.dumps(body)), model)


class Fake:
    """What the server knows and what it was asked.

    Experiments and pipelines are known by (namespace, name); the namespace is empty for what all users share, and for
    everything where there is one user, as in the real server.
    """

    def __init__(self, token="", multi_user=False):
        self.token, self.multi_user = token, multi_user
        self.experiments, self.pipelines, self.versions, self.runs, self.schedules = {}, {}, {}, {}, {}
        self.states, self.numbers = [], itertools.count()
        self.created = {}  # run -> when it was made, where that is not now
        self.asked = []
        self.descriptions = []  # of what was uploaded, pipelines and versions
        self.accounts = None  # the service accounts that runs may have; None for any
        self.allowed = None  # the namespaces that the token may work in; None for any

    def answer(self, method, path, query, body, content_type):
        """Return (status, answer)."""
        call = (method, path.removeprefix(API))
        match call:
            case ("GET", "/healthz"):
                return 200, {"multi_user": self.multi_user}
            case ("GET", "/experiments"):
                return self.found("experiment_id", self.experiments, query, self.owner(query))
            case ("POST", "/experiments"):
                made = checked(body, "V2beta1Experiment")
                return self.made("experiment_id", self.experiments, self.owner({"namespace": [made.namespace]}), made)
            case ("POST", "/runs"):
                run = checked(body, "V2beta1Run")
                if refusal := self.refused(run.service_account):
                    return refusal
                self.runs[f"r{len(self.runs)}"] = run
                self.states.append("RUNNING")
                return 200, {"run_id": f"r{len(self.runs) - 1}"}
            case ("GET", "/runs"):
                assert query["sort_by"] == ["created_at desc"]
                now = datetime.now(UTC)
                found = [
                    {"run_id": f"r{n}", "state": state, "created_at": self.created.get(f"r{n}", now).isoformat()}
                    for n, state in enumerate(self.states)
                ]
                return 200, {"runs": found[::-1][: int(query["page_size"][0])]}
            case ("GET", "/recurringruns"):
                found = [
                    {"recurring_run_id": name, "display_name": self.schedules[name].display_name}
                    for name in sorted(self.schedules)
                    if self.schedules[name].experiment_id == query["experiment_id"][0]
                ]
                return 200, paged("recurringRuns", found, query, most=1)
            case ("POST", "/recurringruns"):
                schedule = checked(body, "V2beta1RecurringRun")
                if refusal := self.refused(schedule.service_account):
                    return refusal
                name = f"s{next(self.numbers)}"
                self.schedules[name] = schedule
                return 200, {"recurring_run_id": name}
            case ("GET", "/pipelines"):
                return self.found("pipeline_id", self.pipelines, query, self.place(query))
            case ("POST", "/pipelines/upload"):
                assert content_type.startswith("multipart/form-data")
                made = SimpleNamespace(display_name=query["name"][0])
                self.descriptions.append(query["description"][0])
                return self.made("pipeline_id", self.pipelines, self.place(query), made)
            case ("POST", "/pipelines/upload_version"):
                versions = self.versions.setdefault(query["pipelineid"][0], [])
                if query["name"][0] in dict(versions):
                    return 409, {"message": f"The version {query['name'][0]} already exists"}
                versions.append((query["name"][0], body))
                self.descriptions.append(query["description"][0])
                return 200, {"pipeline_id": query["pipelineid"][0], "pipeline_version_id": "v"}
        if delete := re.fullmatch(r"/recurringruns/(\w+)", call[1]):
            assert method == "DELETE"
            del self.schedules[delete[1]]
            return 200, {}
        if versions := re.fullmatch(r"/pipelines/(\w+)/versions", call[1]):
            found = [
                {"display_name": name, "pipeline_version_id": f"v-{name}"}
                for name, _ in self.versions.get(versions[1], [])
            ]
            found = found[::-1] if query.get("sort_by") == ["created_at desc"] else found
            return 200, paged("pipeline_versions", found, query, most=2)
        return 404, {"message": f"no such call: {method} {path}"}

    def refused(self, account):
        """The answer to a run whose service account is not on the list of those allowed; None where it may have it."""
        if self.accounts is None or not account or account in self.accounts:
            return None
        return 403, {"message": f"service account {account} is not in the list of allowed service accounts"}

    def place(self, query):
        """The namespace that is asked for; where there is one user, none is looked at."""
        return query.get("namespace", [""])[0] if self.multi_user else ""

    def owner(self, query):
        """The namespace of an experiment: named where there are many users, and there alone."""
        namespace = query.get("namespace", [""])[0] or ""
        if bool(namespace) != self.multi_user:
            raise ValueError(f"an experiment in the namespace {namespace!r}, with multi_user={self.multi_user}")
        return namespace

    def found(self, key, known, query, namespace):
        """What is known by the name in the filter, in this namespace alone."""
        if self.allowed is not None and namespace and namespace not in self.allowed:
            return 403, {"message": f"User 'system:serviceaccount:shop:watcher' is not authorized in {namespace}"}
        (wanted,) = json.loads(query["filter"][0])["predicates"]
        assert (wanted["key"], wanted["operation"] in (1, "EQUALS")) == ("display_name", True)
        at = (namespace, wanted["stringValue"])
        return 200, {f"{key.removesuffix('_id')}s": [{key: known[at]}] if at in known else []}

    def made(self, key, known, namespace, thing):
        """Make what is not there yet; a second of one name in one namespace is refused."""
        at = (namespace, thing.display_name)
        if at in known:
            return 409, {"message": f"The name {thing.display_name} already exists in the namespace {namespace!r}"}
        known[at] = f"{key[0]}{len(known)}"
        return 200, {key: known[at], "display_name": thing.display_name}


def paged(key, found, query, most):
    """A page of what was found, of at most so many: a server has more than fit on one."""
    at = int(query.get("page_token", ["0"])[0] or 0)
    end = at + min(most, int(query["page_size"][0]))
    return {key: found[at:end], "next_page_token": str(end) if end < len(found) else ""}


def serving(fake, tls=None):
    """Serve a Fake on loopback; gives its address. An answer that is bytes is a page."""

    class Handler(BaseHTTPRequestHandler):
        def handle_any(self):
            url = urlsplit(self.path)
            raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            kind = self.headers.get("Content-Type") or ""
            fake.asked.append((self.command, url.path))
            if fake.token and self.headers.get("authorization") != f"Bearer {fake.token}":
                status, answer = 401, {"message": "who are you?"}
            else:
                body = json.loads(raw) if raw and "json" in kind else raw
                try:
                    status, answer = fake.answer(self.command, url.path, parse_qs(url.query), body, kind)
                except ValueError as error:
                    status, answer = 400, {"message": str(error)}
            page = isinstance(answer, bytes)
            text = answer if page else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/html" if page else "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_DELETE = handle_any

        def log_message(self, *_):
            pass

    return loopback.serving(Handler, tls)
