"""The script of the CronJob that starts retraining, against a fake server that checks what it asks."""

import importlib.util
import os
import socket
import ssl
from datetime import UTC, datetime, timedelta
from pathlib import Path

import fake_kfp
import pytest
import trustme

FILE = Path(__file__).parents[2] / "manifests" / "base" / "catalog_watch.py"


@pytest.fixture
def script():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("catalog_watch", FILE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def start(monkeypatch, tmp_path, script):
    """Run the script against a server with the pipeline in two versions; returns the function and the server."""
    (tmp_path / "token").write_text("right\n")
    monkeypatch.setenv("KF_PIPELINES_SA_TOKEN_PATH", str(tmp_path / "token"))
    monkeypatch.setenv("HOME", str(tmp_path))  # the client keeps a context there
    monkeypatch.setenv("NAMESPACE", "shop")
    monkeypatch.setenv("SERVICE_ACCOUNT", "sidgraft-runner")
    fake = fake_kfp.Fake(token="right")
    fake.pipelines["", "sidgraft-retrain"] = "p0"
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
    assert made.experiment_id == fake.experiments["", "sidgraft-retrain"]
    assert made.service_account == "sidgraft-runner"
    for state in ("PENDING", "RUNNING", "PAUSED"):
        fake.states[-1] = state
        assert run().startswith(f"The run r0 is under way ({state}, made 0 h ago): no other is started.")
    for number, state in enumerate(("SUCCEEDED", "FAILED", "CANCELED"), 1):
        fake.states[-1] = state
        assert run() == f"Started the run r{number} of new."


@pytest.mark.parametrize(("hours", "told"), [(1.9, "1 h"), (47.9, "47 h"), (48.1, "2 days"), (239, "9 days")])
def test_a_run_that_never_ends_is_told_by_its_age_and_the_way_out(start, hours, told):
    run, fake = start
    run()
    fake.states[-1] = "PENDING"
    fake.created["r0"] = datetime.now(UTC) - timedelta(hours=hours)
    assert run() == (
        f"The run r0 is under way (PENDING, made {told} ago): no other is started. One that waits in vain holds back"
        " all that follow: terminate it in the UI."
    )
    assert list(fake.runs) == ["r0"]


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
    assert list(fake.experiments) == [("shop" if many else "", "sidgraft-retrain")]


def test_the_pipeline_of_the_namespace_comes_before_the_shared_one(start):
    run, fake = start
    fake.multi_user = True
    for place, pipeline in (("other", "p1"), ("shop", "p2")):
        fake.pipelines[place, "sidgraft-retrain"] = pipeline
        fake.versions[pipeline] = [(place, b"")]
    assert run() == "Started the run r0 of shop."
    fake.states[-1] = "SUCCEEDED"
    del fake.pipelines["shop", "sidgraft-retrain"]
    assert run() == "Started the run r1 of new."
    assert [sent.pipeline_version_reference.pipeline_id for sent in fake.runs.values()] == ["p2", "p0"]


@pytest.mark.parametrize(
    ("many", "message"),
    [
        (False, "there is no pipeline sidgraft-retrain: upload it, python -m pipelines upload."),
        (True, "in the namespace shop, and no shared one: upload it, python -m pipelines upload --namespace shop."),
    ],
)
def test_a_missing_pipeline_is_told(start, many, message):
    run, fake = start
    fake.multi_user = many
    fake.pipelines = {("other", "sidgraft-retrain"): "p0"} if many else {}
    assert told(run).endswith(message)
    assert not fake.runs


def test_a_pipeline_without_a_version_is_told(start):
    run, fake = start
    fake.versions.clear()
    assert "the pipeline sidgraft-retrain has no version: upload one" in told(run)
    assert not fake.experiments


def test_a_placeholder_is_told_before_the_server_is_asked(start):
    run, fake = start
    assert "catalog still names BUCKET: set it in the ConfigMap" in told(run, "catalog: s3://BUCKET/items.parquet\n")
    assert not fake.asked


def test_a_token_that_is_refused_is_told_and_asked_about_once(start):
    run, fake = start
    fake.token = "another"
    text = told(run)
    assert "does not know the token of this pod (HTTP 401: who are you?). Its audience" in text
    assert "right" not in text  # a token is no business of a log
    assert len(fake.asked) == 1


def test_a_missing_right_is_told(start):
    run, fake = start
    fake.multi_user, fake.allowed = True, []
    text = told(run)
    assert "(HTTP 403: User 'system:serviceaccount:shop:watcher' is not authorized in shop). Apply the Role" in text
    assert "in the namespace of the runs (shop)" in text


def test_a_service_account_that_runs_may_not_have_is_told(start):
    run, fake = start
    fake.accounts = ["pipeline-runner"]
    assert "lets no run have the service account sidgraft-runner (HTTP 403: service account sidgraft-" in told(run)


def test_another_answer_is_told_as_it_is(start, monkeypatch):
    run, fake = start
    monkeypatch.setattr(fake, "answer", lambda *_: (503, {"message": "the database is gone."}))
    assert "answered HTTP 503: the database is gone." in told(run)


def test_a_host_where_nothing_answers_is_told(start, monkeypatch):
    run, _ = start
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        monkeypatch.setenv("KFP_HOST", f"http://127.0.0.1:{free.getsockname()[1]}")
        text = told(run)
        assert f"nothing answers at {os.environ['KFP_HOST']} (" in text
        assert "Connection refused). Check KFP_HOST of the CronJob" in text


def test_a_host_that_keeps_silent_is_told(start, monkeypatch, script):
    """As behind a proxy whose server is gone; a network policy drops the connection itself, which ends likewise."""
    run, _ = start
    monkeypatch.setattr(script, "SECONDS", (0.1, 0.1))
    with socket.create_server(("127.0.0.1", 0)) as silent:
        monkeypatch.setenv("KFP_HOST", f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert "Read timed out" in told(run)


@pytest.mark.parametrize("page", [b"<!doctype html>", b"", b"null", b"[]", b'{"status": "ok"}'])
def test_a_page_in_place_of_an_answer_is_told(start, monkeypatch, page):
    run, fake = start
    monkeypatch.setattr(fake, "answer", lambda *_: (200, page))
    assert "answers, but not as the API of Kubeflow Pipelines. Set KFP_HOST of the CronJob" in told(run)


def test_an_authority_of_ones_own_is_trusted_when_it_is_named(start, monkeypatch, tmp_path):
    run, fake = start
    authority, tls = trustme.CA(), ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    authority.cert_pem.write_to_path(tmp_path / "own.pem")
    with fake_kfp.serving(fake, tls) as address:
        monkeypatch.setenv("KFP_HOST", address)
        for named in ("", str(tmp_path / "none.pem")):
            monkeypatch.setenv("SSL_CERT_FILE", named)
            text = told(run)
            assert f"no TLS with {address} (" in text
            assert "name the file in SSL_CERT_FILE of the CronJob" in text
        assert not fake.asked
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "own.pem"))
        assert run() == "Started the run r0 of new."


def test_a_missing_token_is_told(start, monkeypatch, tmp_path):
    run, fake = start
    monkeypatch.setenv("KF_PIPELINES_SA_TOKEN_PATH", str(tmp_path / "none"))
    assert "there is no token for Kubeflow Pipelines" in told(run)
    assert not fake.asked


def told(run, *given):
    """The sentence that the script ends with."""
    with pytest.raises(SystemExit) as ended:
        run(*given)
    text = str(ended.value.code)
    assert text.startswith("catalog-watch: ")
    assert "\n" not in text
    return text
