"""A server that speaks the calls of Kubeflow Pipelines we use, and refuses what its own models do not know."""

import json
import re
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
    """What the server knows and what it was asked."""

    def __init__(self, token=""):
        self.token = token
        self.experiments, self.pipelines, self.versions, self.runs, self.schedules = {}, {}, {}, {}, {}
        self.states, self.multi_user, self.namespaces = [], False, []
        self.asked = []
        self.accounts = None  # the service accounts that runs may have; None for any

    def answer(self, method, path, query, body, content_type):
        """Return (status, answer)."""
        call = (method, path.removeprefix(API))
        match call:
            case ("GET", "/healthz"):
                return 200, {"multi_user": self.multi_user}
            case ("GET", "/experiments"):
                wanted = json.loads(query["filter"][0])["predicates"][0] if "filter" in query else {}
                name = wanted.get("stringValue") or wanted.get("string_value")
                found = [{"experiment_id": i, "display_name": n} for n, i in self.experiments.items() if n == name]
                return 200, {"experiments": found}
            case ("POST", "/experiments"):
                name = checked(body, "V2beta1Experiment").display_name
                self.namespaces.append(body.get("namespace"))
                self.experiments[name] = f"e{len(self.experiments)}"
                return 200, {"experiment_id": self.experiments[name], "display_name": name}
            case ("POST", "/runs"):
                run = checked(body, "V2beta1Run")
                if refusal := self.refused(run.service_account):
                    return refusal
                self.runs[f"r{len(self.runs)}"] = run
                self.states.append("RUNNING")
                return 200, {"run_id": f"r{len(self.runs) - 1}"}
            case ("GET", "/runs"):
                assert query["sort_by"] == ["created_at desc"]
                found = [{"run_id": f"r{n}", "state": state} for n, state in enumerate(self.states)]
                return 200, {"runs": found[::-1][: int(query["page_size"][0])]}
            case ("GET", "/recurringruns"):
                return 200, self.page(query)
            case ("POST", "/recurringruns"):
                name = f"s{len(self.schedules)}"
                schedule = checked(body, "V2beta1RecurringRun")
                if refusal := self.refused(schedule.service_account):
                    return refusal
                self.schedules[name] = schedule
                return 200, {"recurring_run_id": name}
            case ("GET", "/pipelines"):
                name = json.loads(query["filter"][0])["predicates"][0]["stringValue"]
                return 200, {"pipelines": [{"pipeline_id": i} for n, i in self.pipelines.items() if n == name]}
            case ("POST", "/pipelines/upload"):
                assert content_type.startswith("multipart/form-data")
                self.pipelines[query["name"][0]] = f"p{len(self.pipelines)}"
                return 200, {"pipeline_id": self.pipelines[query["name"][0]]}
            case ("POST", "/pipelines/upload_version"):
                self.versions.setdefault(query["pipelineid"][0], []).append((query["name"][0], body))
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
            return 200, {"pipeline_versions": found}
        return 404, {"message": f"no such call: {method} {path}"}

    def refused(self, account):
        """The answer to a run whose service account is not on the list of those allowed; None where it may have it."""
        if self.accounts is None or not account or account in self.accounts:
            return None
        return 403, {"message": f"service account {account} is not in the list of allowed service accounts"}

    def page(self, query):
        """One schedule a page, as a server with more than fit on one."""
        at = int(query.get("page_token", ["0"])[0] or 0)
        names = sorted(self.schedules)
        shown = [
            {"recurring_run_id": name, "display_name": self.schedules[name].display_name} for name in names[at : at + 1]
        ]
        return {"recurringRuns": shown, "next_page_token": str(at + 1) if at + 1 < len(names) else ""}


def serving(fake):
    """Serve a Fake on loopback; gives its address."""

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
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_POST = do_DELETE = handle_any

        def log_message(self, *_):
            pass

    return loopback.serving(Handler)
