"""submit, schedule and upload against a fake server that checks requests by the models of kfp-server-api."""

import os
import socket
import ssl
from types import SimpleNamespace

import fake_kfp
import pytest
import trustme

from components import images
from pipelines.__main__ import main
from pipelines.build import PIPELINES

FILES = ["--set", "catalog=s3://shop/items.jsonl", "--set", "interactions=s3://shop/users.jsonl"]
VERSION = ["--set", "prepare_source_digest=v1"]  # so that the store is not asked


@pytest.fixture(autouse=True)
def _registry(monkeypatch):
    monkeypatch.setenv("SIDGRAFT_REGISTRY", "host.example/team")


@pytest.fixture
def fake():
    return fake_kfp.Fake(token="right")


@pytest.fixture
def host(fake, monkeypatch, tmp_path):
    monkeypatch.setenv("KFP_TOKEN", "right")
    monkeypatch.setenv("HOME", str(tmp_path))  # the client keeps a context there
    with fake_kfp.serving(fake) as address:
        yield address


def submit(host, *more, command="submit"):
    return main([command, "--host", host, "--preset", "own", "--profile", "cpu", *FILES, *VERSION, *more])


def test_submit_starts_a_run_and_prints_its_page(fake, host, capsys):
    assert submit(host, "--set", "finetune_epochs=3", "--run-name", "monday") == 0
    run = fake.runs["r0"]
    assert run.display_name == "monday"
    assert run.experiment_id == fake.experiments["", "sidgraft"]
    assert run.runtime_config.parameters["finetune_epochs"] == 3
    assert run.runtime_config.parameters["catalog"] == "s3://shop/items.jsonl"
    assert run.pipeline_spec["pipeline_spec"]["pipelineInfo"]["name"] == "sidgraft-train"
    executors = run.pipeline_spec["platform_spec"]["platforms"]["kubernetes"]["deploymentSpec"]["executors"]
    assert executors["exec-finetune"]["securityContext"] == {"runAsNonRoot": True}
    assert capsys.readouterr().out == f"Run: {host}/#/runs/details/r0\n"


def test_the_images_of_a_run_are_those_of_this_code_from_the_one_registry(fake, host):
    assert submit(host) == 0
    assert submit(host, "--cron", "0 0 3 * * *", command="schedule") == 0
    for sent in (fake.runs["r0"], fake.schedules["s0"]):
        executors = sent.pipeline_spec["pipeline_spec"]["deploymentSpec"]["executors"]
        for stage, name in images.IMAGES.items():
            if f"exec-{stage}" in executors:
                image = executors[f"exec-{stage}"]["container"]["image"]
                assert image == f"host.example/team/{name}:{images.code_tag(name)}"


def test_a_run_is_given_the_digest_of_its_data_and_a_schedule_reads_them_anew(fake, host, monkeypatch):
    monkeypatch.setattr("pipelines.cluster.source_digest", lambda *files: f"digest of {files}")
    again = ["--set", "prepare_source_digest="]
    assert submit(host, *again) == 0
    given = fake.runs["r0"].runtime_config.parameters
    assert given["prepare_source_digest"] == "digest of ('s3://shop/items.jsonl', 's3://shop/users.jsonl')"
    assert submit(host, *again, "--cron", "0 0 3 * * *", command="schedule") == 0
    for sent, cached in ((fake.runs["r0"], True), (fake.schedules["s0"], False)):
        tasks = sent.pipeline_spec["pipeline_spec"]["root"]["dag"]["tasks"]
        assert tasks["prepare"]["cachingOptions"].get("enableCache", False) is cached
        assert tasks["quantize"]["cachingOptions"]["enableCache"]
    assert not fake.schedules["s0"].runtime_config.parameters.get("prepare_source_digest")


def test_a_store_that_this_machine_cannot_read_is_told(fake, host, monkeypatch, capsys):
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    assert submit(host, "--set", "prepare_source_digest=") == 2
    text = told(capsys)
    assert "there are no credentials" in text
    assert "--set prepare_source_digest=VERSION" in text
    assert not fake.asked


def test_a_missing_registry_is_said(fake, host, monkeypatch, capsys):
    monkeypatch.delenv("SIDGRAFT_REGISTRY")
    assert submit(host) == 0
    assert "SIDGRAFT_REGISTRY is not set: images have no registry" in told(capsys)


def test_one_process_on_several_gpus_is_told(fake, host, capsys):
    assert submit(host, "--profile", "h100", "--set", "finetune_strategy=none") == 2
    assert "the profile h100 gives 8 to finetune" in told(capsys)
    assert not fake.asked


def test_the_task_that_starts_several_nodes_asks_for_no_gpu(fake, host):
    nodes = ["--set", "finetune_nodes=2"]
    for more in ([], nodes):
        assert submit(host, *more, "--profile", "h100") == 0
    for run, gpus in ((fake.runs["r0"], True), (fake.runs["r1"], False)):
        executors = run.pipeline_spec["pipeline_spec"]["deploymentSpec"]["executors"]
        asked = {name: "accelerator" in e["container"]["resources"] for name, e in executors.items()}
        assert asked["exec-finetune"] is gpus
        assert asked["exec-ground"]
    parameters = fake.runs["r1"].runtime_config.parameters
    assert (parameters["finetune_nodes"], parameters["finetune_strategy"]) == (2, "zero2")


def test_runs_have_the_service_account_of_the_profile_unless_another_is_named(fake, host):
    for command, more in (("submit", []), ("schedule", ["--cron", "0 0 3 * * *"])):
        for account in ([], ["--service-account", "another"], ["--service-account", ""]):
            assert submit(host, *more, "--run-name", str(account), *account, command=command) == 0
    for made in (fake.runs, fake.schedules):
        assert [sent.service_account for sent in made.values()] == ["sidgraft-runner", "another", None]


def test_a_service_account_that_runs_may_not_have_is_told(fake, host, capsys):
    fake.accounts = ["pipeline-runner"]
    for command, more in (("submit", []), ("schedule", ["--cron", "0 0 3 * * *"])):
        assert submit(host, *more, command=command) == 1
        text = told(capsys)
        assert "lets no run have the service account sidgraft-runner (HTTP 403: service account sidgraft-ru" in text
        assert "or give --service-account ''" in text
    assert not fake.runs
    assert not fake.schedules
    assert submit(host, "--service-account", "") == 0


def test_submit_into_an_experiment_that_exists(fake, host):
    fake.experiments["", "tests"] = "e7"
    assert submit(host, "--experiment", "tests") == 0
    assert fake.runs["r0"].experiment_id == "e7"
    assert set(fake.experiments) == {("", "tests")}


def test_schedule_is_never_two_at_once_makes_nothing_up_and_replaces_its_namesake(fake, host, capsys):
    assert submit(host, "--cron", "0 0 3 * * *", "--run-name", "another", command="schedule") == 0
    assert submit(host, "--cron", "0 0 3 * * *", command="schedule") == 0
    assert submit(host, "--cron", "0 30 4 * * *", command="schedule") == 0
    assert sorted(fake.schedules) == ["s0", "s2"]
    new = fake.schedules["s2"]
    assert new.trigger.cron_schedule.cron == "0 30 4 * * *"
    assert (new.max_concurrency, new.no_catchup, new.mode) == ("1", True, "ENABLE")
    assert f"Schedule: {host}/#/recurringrun/details/s2" in capsys.readouterr().out


def test_retraining_can_be_scheduled(fake, host, tmp_path):
    preset = tmp_path / "nightly.yaml"
    preset.write_text("pipeline: retrain\nparameters: {watch_max_changed_share: 0.1}\n")
    where = ["--host", host, "--preset", str(preset), "--profile", "cpu", *FILES, "--set", "bundles=s3://shop/bundles"]
    assert main(["schedule", *where, "--cron", "0 0 3 * * *", "--run-name", "nightly"]) == 0
    (made,) = fake.schedules.values()
    assert made.display_name == "nightly"
    assert (made.max_concurrency, made.no_catchup) == ("1", True)
    given = made.runtime_config.parameters
    assert given["bundles"] == "s3://shop/bundles"
    assert given["watch_max_changed_share"] == 0.1
    assert made.pipeline_spec["pipeline_spec"]["pipelineInfo"]["name"] == "sidgraft-retrain"
    assert main(["schedule", *where[:-1], f"bundles={tmp_path}", "--cron", "0 0 3 * * *"]) == 2


def test_upload_adds_a_version_once(fake, host, capsys):
    for _ in range(2):
        assert main(["upload", "--host", host, "--profile", "cpu"]) == 0
    assert {("", "sidgraft-train"), ("", "sidgraft-study")} <= set(fake.pipelines)
    assert len(fake.pipelines) == len(PIPELINES)
    for versions in fake.versions.values():
        ((name, body),) = versions
        assert name.startswith("v0.1.0-cpu-")
        assert b"pipelineInfo" in body
    assert "#/pipelines/details/p0" in capsys.readouterr().out
    assert len(fake.descriptions) == 2 * len(PIPELINES)
    assert all("\nFill in first: catalog, interactions, " in text for text in fake.descriptions)


@pytest.fixture
def upload(host, monkeypatch):
    """Upload one pipeline, which is quicker than all."""
    monkeypatch.setattr("pipelines.cluster.PIPELINES", ("retrain",))
    return lambda *more: main(["upload", "--host", host, "--profile", "cpu", *more])


def test_each_namespace_has_a_pipeline_of_its_own_beside_the_shared_one(fake, upload):
    fake.multi_user = True
    for namespace in ("shop", "", "other", "shop"):
        assert upload("--namespace", namespace) == 0
    assert sorted(fake.pipelines) == [(namespace, "sidgraft-retrain") for namespace in ("", "other", "shop")]
    assert [len(versions) for versions in fake.versions.values()] == [1, 1, 1]


def test_a_namespace_means_nothing_to_the_pipelines_of_a_server_for_one_user(fake, upload):
    for namespace in ("", "shop"):
        assert upload("--namespace", namespace) == 0
    assert list(fake.pipelines) == [("", "sidgraft-retrain")]


def test_a_version_is_found_behind_others(fake, upload):
    """The server shows two of them on a page."""
    assert upload() == 0
    fake.versions["p0"][:0] = [(f"old-{n}", b"") for n in range(4)]
    assert upload() == 0
    assert len(fake.versions["p0"]) == 5


def test_a_namespace_that_one_may_not_work_in_is_told(fake, upload, capsys):
    fake.multi_user, fake.allowed = True, ["shop"]
    assert upload("--namespace", "other") == 1
    assert "(HTTP 403: User 'system:serviceaccount:shop:watcher' is not authorized in other)" in told(capsys)
    assert not fake.pipelines


def test_runs_and_schedules_of_many_users_are_in_an_experiment_of_their_namespace(fake, host, capsys):
    fake.multi_user = True
    for namespace in ("shop", "other", "shop"):
        assert submit(host, "--namespace", namespace, "--cron", "0 0 3 * * *", command="schedule") == 0
    assert submit(host, "--namespace", "shop") == 0
    shop, other = fake.experiments["shop", "sidgraft"], fake.experiments["other", "sidgraft"]
    assert len(fake.experiments) == 2
    assert {name: sent.experiment_id for name, sent in fake.schedules.items()} == {"s1": other, "s2": shop}
    assert fake.runs["r0"].experiment_id == shop
    assert submit(host, "--namespace", "shop", "--experiment", "tests") == 1
    assert "there is no experiment 'tests' in the namespace shop" in told(capsys)


def test_a_host_where_nothing_answers_is_told(capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{free.getsockname()[1]}"
        assert submit(address) == 1
    assert f"nothing answers at {address}" in told(capsys)


@pytest.mark.parametrize(("token", "message"), [("wrong", "the token in KFP_TOKEN"), ("", "KFP_TOKEN is not set")])
def test_a_bad_token_is_told(fake, host, monkeypatch, capsys, token, message):
    monkeypatch.setenv("KFP_TOKEN", token)
    assert submit(host) == 1
    text = told(capsys)
    assert message in text
    assert "wrong" not in text  # a token is no business of a log
    assert not fake.runs


PAGE = b"<!doctype html><title>Log in</title>"


@pytest.mark.parametrize(("token", "message"), [("right", "a KFP_TOKEN that is valid"), ("", "set KFP_TOKEN;")])
def test_a_page_in_place_of_an_answer_is_told(fake, host, monkeypatch, capsys, token, message):
    """As a login page before the cluster, or the page of Kubeflow at every address it does not know."""
    monkeypatch.setenv("KFP_TOKEN", token)
    fake.token = token
    for page, command, more in ((PAGE, "submit", []), (b"null", "schedule", ["--cron", "0 0 3 * * *"])):
        monkeypatch.setattr(fake, "answer", lambda *_, page=page: (200, page))
        assert submit(host, *more, command=command) == 1
        text = told(capsys)
        assert f"{host} answers, but not as Kubeflow Pipelines" in text
        assert message in text
        assert "the address that ends in /pipeline" in text
    assert main(["upload", "--host", host, "--profile", "cpu"]) == 1
    assert "not as Kubeflow Pipelines" in told(capsys)
    assert len(fake.asked) == 3


@pytest.mark.parametrize("call", ["/experiments", "/runs", "/recurringruns", "/pipelines/upload", "/upload_version"])
def test_what_is_made_has_an_id_or_is_told(fake, host, monkeypatch, capsys, call):
    """As behind a proxy that lets the question for its health pass, and shows its page to the rest."""
    monkeypatch.setattr("pipelines.cluster.PIPELINES", ("retrain",))
    fake.schedules["old"] = SimpleNamespace(display_name="own", experiment_id="e0")
    answer = fake.answer

    def behind_a_proxy(method, path, *rest):
        return (200, PAGE) if method == "POST" and path.endswith(call) else answer(method, path, *rest)

    monkeypatch.setattr(fake, "answer", behind_a_proxy)
    if "upload" in call:
        assert main(["upload", "--host", host, "--profile", "cpu"]) == 1
    elif call == "/recurringruns":
        assert submit(host, "--cron", "0 0 3 * * *", command="schedule") == 1
    else:
        assert submit(host) == 1
    assert "not as Kubeflow Pipelines (there is no " in told(capsys)
    assert not fake.runs
    assert list(fake.schedules) == ["old"]  # a schedule goes when the one in its place is there


@pytest.fixture
def authority(fake, host):
    """A certificate authority that no one knows, and the address of a server whose certificate is signed by it."""
    authority = trustme.CA()
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    authority.issue_cert("127.0.0.1").configure_cert(tls)
    with fake_kfp.serving(fake, tls) as address:
        yield authority, address


def test_an_authority_of_ones_own_is_trusted_when_it_is_named(fake, authority, monkeypatch, tmp_path, capsys):
    own, address = authority
    own.cert_pem.write_to_path(tmp_path / "own.pem")
    monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "own.pem"))
    assert submit(address) == 0
    assert capsys.readouterr().out == f"Run: {address}/#/runs/details/r0\n"
    monkeypatch.setattr("pipelines.cluster.PIPELINES", ("retrain",))
    assert main(["upload", "--host", address, "--profile", "cpu"]) == 0


@pytest.mark.parametrize("named", ["none", "another"])
def test_a_certificate_that_is_not_trusted_is_told(fake, authority, monkeypatch, tmp_path, capsys, named):
    _, address = authority
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    if named == "another":
        trustme.CA().cert_pem.write_to_path(tmp_path / "another.pem")
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / "another.pem"))
    assert submit(address) == 1
    text = told(capsys)
    assert f"the certificate of {address} is not trusted (" in text
    assert "set SSL_CERT_FILE to the file" in text
    assert not fake.asked


def test_a_file_that_holds_no_certificate_is_told(fake, host, monkeypatch, tmp_path, capsys):
    for name in ("none.pem", "text.pem"):
        (tmp_path / "text.pem").write_text("no certificate\n")
        monkeypatch.setenv("SSL_CERT_FILE", str(tmp_path / name))
        assert submit(host) == 2
        assert f"SSL_CERT_FILE is '{tmp_path / name}', expected a file of certificates in PEM" in told(capsys)
    assert not fake.asked


def test_an_unknown_experiment_is_told(fake, host, capsys):
    assert submit(host, "--experiment", "tset") == 1
    assert "there is no experiment 'tset'" in told(capsys)
    assert not fake.runs
    assert not fake.experiments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "finetune_epoch=3"], "Did you mean finetune_epochs?"),
        (["--profile", "gk"], "Did you mean gke?"),
        (["--set", f"catalog={__file__}"], "on this machine, which no pod can read"),
    ],
)
def test_what_is_wrong_is_told_before_the_server_is_asked(fake, host, capsys, arguments, message):
    assert submit(host, *arguments) == 2
    assert message in told(capsys)
    assert not fake.asked


def test_a_cron_of_five_fields_is_told(fake, host, capsys):
    assert submit(host, "--cron", "0 3 * * *", command="schedule") == 2
    assert "expected six fields, seconds first" in told(capsys)
    assert not fake.asked


def test_an_address_without_a_scheme_is_told(capsys):
    assert submit("localhost:8080") == 2
    assert "expected the address of Kubeflow Pipelines" in told(capsys)


def test_the_fake_refuses_what_the_models_do_not_know():
    with pytest.raises(ValueError, match="has no"):
        fake_kfp.checked({"display_name": "a", "name": "a"}, "V2beta1Run")
    with pytest.raises(ValueError, match="V2beta1RuntimeConfig has no"):
        fake_kfp.checked({"runtime_config": {"params": {}}}, "V2beta1Run")


def told(capsys):
    text = capsys.readouterr().err
    assert text.count("\n") == 1, "one sentence, no traceback"
    return text
