"""The script of the CronJob that starts retraining, against a fake server that checks what it asks."""

import importlib.util
from pathlib import Path

import fake_kfp
import pytest

FILE = Path(__file__).parents[2] / "manifests" / "base" / "catalog_watch.py"


@pytest.fixture
def start(monkeypatch, tmp_path):
    """Run the script against a server with the pipeline in two versions; returns the function and the server."""
    (tmp_path / "token").write_text("right\n")
    monkeypatch.setenv("KF_PIPELINES_SA_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("HOME", str(tmp_path))  # the client keeps a context there
    monkeypatch.setenv("NAMESPACE", "shop")
    monkeypatch.setenv("SERVICE_ACCOUNT", "sidgraft-runner")
    spec = importlib.util.spec_from_file_location("catalog_watch", FILE)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    fake = fake_kfp.Fake(token="right")
    fake.pipelines["sidgraft-retrain"] = "p0"
    fake.versions["p0"] = [("old", b""), ("new", b"")]
    with fake_kfp.serving(fake) as address:
        monkeypatch.setenv("KFP_HOST", address)

        def run(text="catalog: s3://shop/items.parquet\nwatch_force: full\n"):
            (tmp_path / "parameters.yaml").write_text(text)
            return script.main(tmp_path / "parameters.yaml")

        yield run, fake


def test_it_starts_the_newest_version_once_until_that_run_has_ended(start):
    run, fake = start
    assert run() == "Started the run r0 of new."
    made = fake.runs["r0"]
    reference = made.pipeline_version_reference
    assert (reference.pipeline_id, reference.pipeline_version_id) == ("p0", "v-new")
    assert made.runtime_config.parameters == {"catalog": "s3://shop/items.parquet", "watch_force": "full"}
    assert made.experiment_id == fake.experiments["sidgraft-retrain"]
    assert made.service_account == "sidgraft-runner"
    for state in ("PENDING", "RUNNING", "PAUSED"):
        fake.states[-1] = state
        assert run() == "The run r0 is under way: no other is started."
    for number, state in enumerate(("SUCCEEDED", "FAILED", "CANCELED"), 1):
        fake.states[-1] = state
        assert run() == f"Started the run r{number} of new."


def test_the_runs_may_have_the_account_of_kubeflow_pipelines(start, monkeypatch):
    run, fake = start
    monkeypatch.setenv("SERVICE_ACCOUNT", "")
    run()
    assert fake.runs["r0"].service_account is None


@pytest.mark.parametrize("many", [False, True])
def test_the_namespace_is_named_where_there_are_many_users(start, many):
    run, fake = start
    fake.multi_user = many
    run()
    assert fake.namespaces == ["shop" if many else ""]


def test_what_is_missing_is_told(start):
    run, fake = start
    with pytest.raises(SystemExit, match="catalog still names BUCKET: set it in the ConfigMap"):
        run("catalog: s3://BUCKET/items.parquet\n")
    assert not fake.asked
    del fake.pipelines["sidgraft-retrain"]
    with pytest.raises(SystemExit, match="there is no pipeline sidgraft-retrain: upload it first"):
        run()
    assert not fake.runs
