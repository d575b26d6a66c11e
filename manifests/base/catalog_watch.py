"""Start the uploaded pipeline sidgraft-retrain, unless its last run is under way. Run by the CronJob catalog-watch.

    python catalog_watch.py PARAMETERS.yaml

The pipeline looks at the catalog itself: a run that finds nothing to train ends after that. KFP_HOST is the address of
Kubeflow Pipelines, NAMESPACE that of the runs, which counts where the cluster has many users, SERVICE_ACCOUNT who the
runs are (empty for the account of Kubeflow Pipelines). The token is that of the watch's own account, from the file that
KFP's client looks for.
"""

import os
import sys
from pathlib import Path

import yaml
from kfp import Client
from kfp.client import ServiceAccountTokenVolumeCredentials

PIPELINE = EXPERIMENT = "sidgraft-retrain"
ENDED = ("SUCCEEDED", "FAILED", "CANCELED", "SKIPPED")


def main(parameters: Path) -> str:
    """Start a run of the newest version; return what was done, in a sentence."""
    given = yaml.safe_load(parameters.read_text(encoding="utf-8"))
    unset = [key for key, value in given.items() if str(value).startswith("s3://BUCKET/")]
    if unset:
        sys.exit(f"catalog-watch: {unset[0]} still names BUCKET: set it in the ConfigMap that holds {parameters.name}.")
    client = Client(host=os.environ["KFP_HOST"], credentials=ServiceAccountTokenVolumeCredentials())
    pipeline = client.get_pipeline_id(PIPELINE)
    if pipeline is None:
        sys.exit(f"catalog-watch: there is no pipeline {PIPELINE}: upload it first, python -m pipelines upload.")
    versions = client.list_pipeline_versions(pipeline, page_size=1, sort_by="created_at desc").pipeline_versions
    namespace = os.environ["NAMESPACE"] if client.get_kfp_healthz().multi_user else None
    experiment = client.create_experiment(EXPERIMENT, namespace=namespace).experiment_id
    runs = client.list_runs(experiment_id=experiment, page_size=1, sort_by="created_at desc").runs
    if runs and runs[0].state not in ENDED:
        return f"The run {runs[0].run_id} is under way: no other is started."
    run = client.run_pipeline(
        experiment,
        PIPELINE,
        params=given,
        pipeline_id=pipeline,
        version_id=versions[0].pipeline_version_id,
        service_account=os.environ["SERVICE_ACCOUNT"] or None,
    )
    return f"Started the run {run.run_id} of {versions[0].display_name}."


if __name__ == "__main__":
    print(main(Path(sys.argv[1])))
