"""Hand a pipeline to Kubeflow Pipelines on a cluster: python -m pipelines submit|upload|schedule --host URL.

Its images are those that `make images` builds from this code (components/images.py).

The token is read from KFP_TOKEN, never from the command line, where other users of the machine would see it. Where the
host's certificate is signed by an authority of one's own, SSL_CERT_FILE names the file of that authority's certificate.
"""

import hashlib
import json
import os
import socket
import ssl
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import kfp_server_api
import urllib3
from kfp import Client

from components.images import TAG, of_this_code
from pipelines.build import PIPELINES, compiled, load_pipeline
from pipelines.inputs import USER_FILES
from pipelines.placement import STRATEGY, Profile, for_parameters, placed
from pipelines.settings import Settings, SettingsError
from sidgraft import samples, storage
from sidgraft.catalog import source_digest
from sidgraft.tables import file_digest

TOKEN = "KFP_TOKEN"
AUTHORITIES = "SSL_CERT_FILE"  # as for the object store (sidgraft.storage); the client alone knows the public ones
EXPERIMENT = "sidgraft"  # where no other is named; made when it is missing
SECONDS_TO_CONNECT = 10.0


class ClusterError(RuntimeError):
    """The cluster did not do what it was asked; the message says why and what to do."""


def submit(
    host: str, settings: Settings, profile: Profile, *, namespace: str = "", experiment: str = "", run_name: str = ""
) -> str:
    """Start a run and return the address of its page."""
    _reachable_by_pods(settings)
    settings = _with_digests(settings)
    settings, profile = _fitted(settings, profile)
    with _client(host, namespace, profile.service_account) as client, _package(settings.pipeline, profile) as package:
        run = client.run_pipeline(
            experiment_id=_given(host, _experiment(client, experiment, namespace), "experiment_id"),
            job_name=run_name or settings.preset,
            pipeline_package_path=package,
            params=settings.parameters,
            service_account=profile.service_account or None,
        )
        return f"{client._get_url_prefix()}/#/runs/details/{_given(host, run, 'run_id')}"


def schedule(
    host: str,
    settings: Settings,
    profile: Profile,
    *,
    cron: str,
    namespace: str = "",
    experiment: str = "",
    run_name: str = "",
) -> str:
    """Run the pipeline by the clock of the server, one at a time, with no run for a time that was missed.

    Every run reads the data anew, as what an address holds then is not known now. ``cron`` has six fields, seconds
    first. A schedule of the same name is replaced. Returns the address of its page.
    """
    if len(cron.split()) != 6:
        raise SettingsError(
            f"--cron is {cron!r}, expected six fields, seconds first: '0 0 3 * * *' is every day at three, by the"
            " server's clock."
        )
    _reachable_by_pods(settings)
    settings, profile = _fitted(settings, profile)
    anew = {"prepare": replace(profile.stages["prepare"], cache=False)}
    profile = replace(profile, stages={**profile.stages, **anew})
    name = run_name or settings.preset
    with _client(host, namespace, profile.service_account) as client, _package(settings.pipeline, profile) as package:
        place = _given(host, _experiment(client, experiment, namespace), "experiment_id")
        old = _schedules(client, name, place)
        new = client.create_recurring_run(
            experiment_id=place,
            job_name=name,
            cron_expression=cron,
            max_concurrency=1,
            no_catchup=True,
            params=settings.parameters,
            pipeline_package_path=package,
            service_account=profile.service_account or None,
        )
        made = _given(host, new, "recurring_run_id")  # before the old ones go
        for schedule_id in old:
            client.delete_recurring_run(schedule_id)
        return f"{client._get_url_prefix()}/#/recurringrun/details/{made}"


def upload(host: str, profile: Profile, *, namespace: str = "") -> list[str]:
    """Upload every pipeline, or a version where one of its name is there; return the addresses of their pages.

    A version is named by release, profile and content: what is there already is left alone. Where the cluster has many
    users, those of ``namespace`` see what is uploaded there, and all see what is uploaded without one.
    """
    pages = []
    with _client(host, namespace) as client:
        for pipeline in PIPELINES:
            with _package(pipeline, profile) as package:
                name, text = load_pipeline(pipeline).name, load_pipeline(pipeline).description
                digest = hashlib.sha256(Path(package).read_bytes()).hexdigest()[:8]
                pipeline_id = _pipeline(client, name, namespace)
                if pipeline_id is None:
                    uploaded = client.upload_pipeline(package, name, text, namespace or None)
                    pipeline_id = _given(host, uploaded, "pipeline_id")
                version = f"{TAG}-{profile.name}-{digest}"
                if version not in _versions(client, pipeline_id):
                    uploaded = client.upload_pipeline_version(
                        package, version, pipeline_id=pipeline_id, description=text
                    )
                    _given(host, uploaded, "pipeline_version_id")
            pages.append(f"{client._get_url_prefix()}/#/pipelines/details/{pipeline_id}")
    return pages


@contextmanager
def _package(pipeline: str, profile: Profile) -> Iterator[str]:
    """The compiled pipeline as a file, which is how the client takes it."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / f"{pipeline}.yaml"
        file.write_text(compiled(placed(load_pipeline(pipeline), profile, of_this_code())), encoding="utf-8")
        yield str(file)


@contextmanager
def _client(host: str, namespace: str, account: str = "") -> Iterator[Any]:
    """A client for the host whose errors are told in a sentence, and that prints nothing by itself.

    ``account`` is the service account that a run is to have, empty for the server's own.
    """
    authorities = _authorities()
    _connect(host)
    try:
        with warnings.catch_warnings(), redirect_stdout(StringIO()):
            warnings.simplefilter("ignore")
            _healthy(host, authorities)
            yield Client(
                host=host,
                existing_token=os.environ.get(TOKEN),
                namespace=namespace or "kubeflow",
                ssl_ca_cert=authorities,
            )
    except kfp_server_api.ApiException as error:
        raise ClusterError(_told(host, error, account)) from error
    except urllib3.exceptions.HTTPError as error:
        raise ClusterError(_broken(host, error)) from error


def _authorities() -> str | None:
    """Return the file of those whose certificates are trusted; None for the public ones."""
    file = os.environ.get(AUTHORITIES)
    if file:
        try:
            ssl.create_default_context(cafile=file)
        except OSError as error:  # of ssl, too: a file that holds something else
            raise SettingsError(
                f"{AUTHORITIES} is {file!r}, expected a file of certificates in PEM ({error})."
            ) from error
    return file or None


def _connect(host: str) -> None:
    parts = urlsplit(host)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise SettingsError(f"--host is {host!r}, expected the address of Kubeflow Pipelines, such as https://HOST.")
    try:
        port = parts.port or {"http": 80, "https": 443}[parts.scheme]
        socket.create_connection((parts.hostname, port), SECONDS_TO_CONNECT).close()
    except OSError as error:
        raise ClusterError(
            f"nothing answers at {host} ({error.strerror or error}). Check the address, or make a way to it:"
            " kubectl port-forward -n kubeflow svc/ml-pipeline-ui 8080:80, then --host http://localhost:8080."
        ) from error


def _healthy(host: str, authorities: str | None) -> None:
    """Ask once: the client itself would ask a server that refuses it five times, and log every try."""
    configuration = kfp_server_api.Configuration(host=host.rstrip("/"))
    configuration.ssl_ca_cert = authorities
    token = os.environ.get(TOKEN)
    if token:
        configuration.api_key["authorization"] = token
        configuration.api_key_prefix["authorization"] = "Bearer"
    with kfp_server_api.ApiClient(configuration) as client:
        _given(host, kfp_server_api.HealthzServiceApi(client).healthz_service_get_healthz(), "multi_user")


def _given(host: str, answer: Any, name: str) -> Any:
    """Return what an answer of Kubeflow Pipelines always has: the client reads any page as an answer without it."""
    value = getattr(answer, name, None)
    if value is None:
        token = f"a {TOKEN} that is valid" if os.environ.get(TOKEN) else TOKEN
        raise ClusterError(
            f"{host} answers, but not as Kubeflow Pipelines (there is no {name} in it). Where that is a login page, set"
            f" {token}; where it is the page of Kubeflow, give the address that ends in /pipeline; where it is Kubeflow"
            " Pipelines, its API server is not ready: try again."
        )
    return value


def _broken(host: str, error: urllib3.exceptions.HTTPError) -> str:
    """Why there is no answer: most often a certificate, which the client wraps twice."""
    reason = getattr(error, "reason", None)
    cause = reason.args[0] if isinstance(reason, urllib3.exceptions.SSLError) else None
    if isinstance(cause, ssl.SSLCertVerificationError):
        return (
            f"the certificate of {host} is not trusted ({cause.verify_message}). Where an authority of your own has"
            f" signed it, set {AUTHORITIES} to the file of that authority's certificate."
        )
    return f"{host} broke off the connection ({error}). Check --host and try again."


def _told(host: str, error: kfp_server_api.ApiException, account: str) -> str:
    if account and account in _message(error):
        return (
            f"{host} lets no run have the service account {account} (HTTP {error.status}: {_message(error)}). Have it"
            " allowed, as docs/operations.md says, or give --service-account '' for the one of Kubeflow Pipelines."
        )
    if error.status in (401, 403):
        given = (
            "the token in KFP_TOKEN" if os.environ.get(TOKEN) else "a request without a token (KFP_TOKEN is not set)"
        )
        return (
            f"{host} refuses {given} (HTTP {error.status}: {_message(error)}). Set KFP_TOKEN to a token that may do"
            " this; where the cluster has many users, in the namespace given by --namespace."
        )
    return f"{host} answered HTTP {error.status}: {_message(error)}."


def _message(error: kfp_server_api.ApiException) -> str:
    """Return what the server says of an error: its JSON has a message."""
    try:
        return str(json.loads(error.body or "")["message"]).rstrip(".")
    except (ValueError, KeyError, TypeError):
        return str(error.reason)


def _experiment(client: Any, name: str, namespace: str) -> Any:
    """Return the experiment, of our own where none is named; only that one is made when it is missing."""
    if not name:
        return client.create_experiment(EXPERIMENT, namespace=namespace or None)
    try:
        return client.get_experiment(experiment_name=name, namespace=namespace or None)
    except ValueError as error:
        where = f" in the namespace {namespace}" if namespace else ""
        raise ClusterError(
            f"there is no experiment {name!r}{where}. Make it in the user interface, or leave out --experiment to use"
            f" {EXPERIMENT!r}."
        ) from error


def _pipeline(client: Any, name: str, namespace: str) -> str | None:
    """Return the id of the pipeline in the namespace, of the shared one where none is named.

    The client's own `get_pipeline_id` sees shared pipelines only.
    """
    wanted = {"predicates": [{"operation": "EQUALS", "key": "display_name", "stringValue": name}]}
    found = client.list_pipelines(namespace=namespace or None, filter=json.dumps(wanted)).pipelines
    return found[0].pipeline_id if found else None


def _schedules(client: Any, name: str, experiment: str) -> list[str]:
    answers = _pages(
        lambda token: client.list_recurring_runs(experiment_id=experiment, page_token=token, page_size=100)
    )
    return [r.recurring_run_id for answer in answers for r in answer.recurring_runs or () if r.display_name == name]


def _versions(client: Any, pipeline_id: str) -> set[str]:
    answers = _pages(lambda token: client.list_pipeline_versions(pipeline_id, page_token=token, page_size=100))
    return {version.display_name for answer in answers for version in answer.pipeline_versions or ()}


def _pages(ask: Callable[[str], Any]) -> Iterator[Any]:
    token = ""
    while True:
        answer = ask(token)
        yield answer
        token = answer.next_page_token or ""
        if not token:
            return


def _reachable_by_pods(settings: Settings) -> None:
    """Refuse files and bundles of this machine: a pod would look for them in its own container."""
    for key in (*USER_FILES, "bundles"):
        value = settings.parameters.get(key, "")
        if value and (Path(value).exists() or (key == "bundles" and not storage.is_remote(value))):
            raise SettingsError(
                f"{key} is {value!r}, on this machine, which no pod can read. Copy it to the object store and"
                f" give --set {key}=s3://BUCKET/KEY."
            )


def _fitted(settings: Settings, profile: Profile) -> tuple[Settings, Profile]:
    """Fit the two to each other: several nodes share the work, and the task that starts them needs no GPU."""
    parameters = dict(settings.parameters)
    if parameters.get("finetune_nodes", 1) > 1:
        parameters.setdefault("finetune_strategy", STRATEGY)
    return replace(settings, parameters=parameters), for_parameters(profile, parameters)


def _with_digests(settings: Settings) -> Settings:
    """Add digests of the user's files, by which KFP's cache tells new data at an old address; those given stay.

    A file that carries its digest is not read for it (docs/storage.md).
    """
    given = settings.parameters
    found = {}
    files = [given[name] for name in ("catalog", "interactions", "queries") if given.get(name)]
    try:
        if all(storage.is_remote(file) or samples.is_sample(file) for file in files):
            found["prepare_source_digest"] = given.get("prepare_source_digest") or source_digest(*files)
        vectors = given.get("embed_embeddings", "")
        if storage.is_remote(vectors):
            found["embed_embeddings_digest"] = given.get("embed_embeddings_digest") or file_digest(vectors)
    except ValueError as error:
        raise SettingsError(
            f"{error} This machine reads the store to tell new data from old; where it cannot, give --set"
            " prepare_source_digest=VERSION, any text that changes with the data (embed_embeddings_digest for"
            " embeddings of your own)."
        ) from error
    return replace(settings, parameters=given | found)
