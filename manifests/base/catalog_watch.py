"""Start the uploaded pipeline sidgraft-retrain, unless its last run is under way. Run by the CronJob catalog-watch.

    python catalog_watch.py PARAMETERS.yaml

The pipeline looks at the catalog itself: a run that finds nothing to train ends after that. KFP_HOST is the address of
Kubeflow Pipelines, NAMESPACE that of the runs, which counts where the cluster has many users, SERVICE_ACCOUNT who the
runs are (empty for the account of Kubeflow Pipelines), SSL_CERT_FILE, where it is set, the file of the authority that
signed the certificate of KFP_HOST. The token is that of the watch's own account, from the file that KFP's client looks
for.
"""

import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import kfp_server_api
import urllib3
import yaml
from kfp import Client
from kfp.client import ServiceAccountTokenVolumeCredentials

PIPELINE = EXPERIMENT = "sidgraft-retrain"
ENDED = ("SUCCEEDED", "FAILED", "CANCELED", "SKIPPED")
SECONDS = (10.0, 20.0)  # to connect and to answer, of each of four tries


def main(parameters: Path) -> str:
    """Start a run of the newest version; return what was done, in a sentence."""
    given = yaml.safe_load(parameters.read_text(encoding="utf-8"))
    unset = [key for key, value in given.items() if str(value).startswith("s3://BUCKET/")]
    if unset:
        sys.exit(f"catalog-watch: {unset[0]} still names BUCKET: set it in the ConfigMap that holds {parameters.name}.")
    host = os.environ["KFP_HOST"].rstrip("/")
    try:
        return start(host, given, os.environ["NAMESPACE"], os.environ["SERVICE_ACCOUNT"])
    except kfp_server_api.ApiException as error:
        sys.exit(f"catalog-watch: {told(host, error)}")
    except (urllib3.exceptions.HTTPError, TimeoutError) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, urllib3.exceptions.SSLError):
            why = getattr(reason.args[0], "verify_message", reason)
            sys.exit(
                f"catalog-watch: no TLS with {host} ({why}). Where an authority of your own has signed its certificate,"
                " mount that authority's and name the file in SSL_CERT_FILE of the CronJob (docs/operations.md)."
            )
        sys.exit(
            f"catalog-watch: nothing answers at {host} ({reason}). Check KFP_HOST of the CronJob, that Kubeflow"
            " Pipelines runs, and that the network policies let this pod reach it"
            " (manifests/base/network-policies.yaml)."
        )
    except OSError as error:
        sys.exit(
            f"catalog-watch: there is no token for Kubeflow Pipelines ({error}). Mount one as the volume token of"
            " manifests/base/catalog-watch.yaml does."
        )


def start(host: str, given: dict[str, Any], namespace: str, account: str) -> str:
    """Start a run, in the namespace where the cluster has many users."""
    credentials = ServiceAccountTokenVolumeCredentials()
    namespace = namespace if has_many_users(host, credentials) else ""
    client: Any = Client(
        host=host,
        credentials=credentials,
        namespace=namespace or "kubeflow",
        ssl_ca_cert=os.environ.get("SSL_CERT_FILE") or None,
    )
    pipeline = pipeline_id(client, namespace)
    versions = client.list_pipeline_versions(pipeline, page_size=1, sort_by="created_at desc").pipeline_versions
    if not versions:
        sys.exit(f"catalog-watch: the pipeline {PIPELINE} has no version: upload one, python -m pipelines upload.")
    experiment = client.create_experiment(EXPERIMENT, namespace=namespace or None).experiment_id
    runs = client.list_runs(experiment_id=experiment, page_size=1, sort_by="created_at desc").runs
    if runs and runs[0].state not in ENDED:
        return (
            f"The run {runs[0].run_id} is under way ({runs[0].state}, made {age(runs[0].created_at)} ago): no other is"
            " started. One that waits in vain holds back all that follow: terminate it in the UI."
        )
    run = client.run_pipeline(
        experiment,
        PIPELINE,
        params=given,
        pipeline_id=pipeline,
        version_id=versions[0].pipeline_version_id,
        service_account=account or None,
    )
    return f"Started the run {run.run_id} of {versions[0].display_name}."


def age(since: datetime) -> str:
    """How long ago it was, in whole hours, or days where there are two or more."""
    hours = int((datetime.now(UTC) - since).total_seconds() // 3600)
    return f"{hours} h" if hours < 48 else f"{hours // 24} days"


def has_many_users(host: str, credentials: ServiceAccountTokenVolumeCredentials) -> bool:
    """Ask whether runs belong to namespaces, and once: the client would ask five times, and log every refusal."""
    configuration = kfp_server_api.Configuration(host=host)
    configuration.ssl_ca_cert = os.environ.get("SSL_CERT_FILE") or None
    configuration.api_key["authorization"] = "set by the hook"
    configuration.api_key_prefix["authorization"] = "Bearer"
    configuration.refresh_api_key_hook = credentials.refresh_api_key_hook
    with kfp_server_api.ApiClient(configuration) as api:
        health: Any = kfp_server_api.HealthzServiceApi(api)
        many = getattr(health.healthz_service_get_healthz(_request_timeout=SECONDS), "multi_user", None)
    if many is None:  # the client reads any page as an answer without fields
        sys.exit(
            f"catalog-watch: {host} answers, but not as the API of Kubeflow Pipelines. Set KFP_HOST of the CronJob to"
            " its service, http://ml-pipeline.NAMESPACE:8888, which no login page and no other server stands before."
        )
    return many


def pipeline_id(client: Any, namespace: str) -> str:
    """Return the id of the namespace's own pipeline, or of the shared one; the client would look for that alone."""
    wanted = {"predicates": [{"operation": "EQUALS", "key": "display_name", "stringValue": PIPELINE}]}
    for place in (namespace, "") if namespace else ("",):
        found = client.list_pipelines(namespace=place or None, filter=json.dumps(wanted)).pipelines
        if found:
            return found[0].pipeline_id
    where = f" in the namespace {namespace}, and no shared one" if namespace else ""
    more = f" --namespace {namespace}" if namespace else ""
    sys.exit(f"catalog-watch: there is no pipeline {PIPELINE}{where}: upload it, python -m pipelines upload{more}.")


def told(host: str, error: kfp_server_api.ApiException) -> str:
    """What the server refused, and what to do."""
    if not error.status:  # no answer at all, such as of a certificate that is not trusted
        return f"no connection to {host} ({error.reason}). Check KFP_HOST of the CronJob."
    try:
        message = str(json.loads(error.body or "")["message"]).rstrip(".")
    except (ValueError, KeyError, TypeError):  # a proxy before the server has words of its own
        message = str(error.body or error.reason).strip()[:300]
    account = os.environ["SERVICE_ACCOUNT"]
    if account and account in message:
        return (
            f"{host} lets no run have the service account {account} (HTTP {error.status}: {message}). Have it allowed,"
            " as docs/operations.md says, or set SERVICE_ACCOUNT of the CronJob to '' for that of Kubeflow Pipelines."
        )
    if error.status == 401:
        return (
            f"{host} does not know the token of this pod (HTTP 401: {message}). Its audience, in the volume token of"
            " the CronJob, must be the one that Kubeflow Pipelines takes: pipelines.kubeflow.org."
        )
    if error.status == 403:
        return (
            f"{host} does not let the account of this pod do it (HTTP 403: {message}). Apply the Role and RoleBinding"
            " sidgraft-watcher of manifests/base/catalog-watch.yaml in the namespace of the runs"
            f" ({os.environ['NAMESPACE']})."
        )
    return f"{host} answered HTTP {error.status}: {message}."


if __name__ == "__main__":
    print(main(Path(sys.argv[1])))
