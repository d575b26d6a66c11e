"""The Docker runner without an engine: what it says, and what it would ask one for."""

import json
import os
from types import SimpleNamespace

import pytest

from pipelines import containers


def test_no_engine_is_a_sentence_that_says_what_to_do(run, standin_library, tmp_path):
    env = os.environ | {"PYTHONPATH": str(standin_library), "DOCKER_HOST": f"unix://{tmp_path}/nowhere"}
    refused = run("--preset", "smoke", "--runner", "docker", "--root", tmp_path, env=env)
    assert refused.returncode == 2
    assert "no Docker engine answers" in refused.stderr
    assert "leave out --runner docker" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_bundles_in_a_store_are_refused_because_containers_have_no_network(run, tmp_path):
    where = ("--root", tmp_path / "run", "--set", "bundles=s3://shop/bundles")
    refused = run("--preset", "smoke-retrain", "--runner", "docker", *where)
    assert refused.returncode == 2
    assert "containers of --runner docker have no network: give a folder of this machine" in refused.stderr


def test_retraining_may_write_to_the_bundles_too(tmp_path, monkeypatch):
    """The engine is a stand-in that keeps what it is asked for."""
    asked = {}

    def start(image, command, **options):
        asked.update(options, image=image)
        raise InterruptedError

    engine = SimpleNamespace(
        images=SimpleNamespace(get=lambda name: name), containers=SimpleNamespace(run=start), close=lambda: None
    )
    monkeypatch.setattr(containers, "engine", lambda: engine)
    monkeypatch.chdir(tmp_path)
    catalog, bundles, root = tmp_path / "items.jsonl", tmp_path / "shop" / "bundles", tmp_path / "run"
    catalog.write_text("{}\n")
    root.mkdir()
    given = {"catalog": str(catalog), "interactions": "sample:complete-journey", "bundles": "shop/bundles"}
    assert containers.prepare(root, given) == given | {"bundles": str(bundles)}
    assert (bundles / "versions").is_dir()
    user = containers.IMAGE_USER if os.getuid() == 0 else os.getuid()
    assert (bundles.stat().st_uid, (bundles / "versions").stat().st_uid) == (user, user)

    plan = containers.Containers(**json.loads((root / containers.PLAN).read_text()))
    with pytest.raises(InterruptedError):
        containers.run_container(plan, engine, "sidgraft/cpu:run-1", ["true"], {"x": {"bind": "x", "mode": "rw"}})
    assert asked["image"] == containers.built("sidgraft/cpu", containers.registry())
    modes = {volume["bind"]: volume["mode"] for volume in asked["volumes"].values()}
    written = {str(root / "artifacts"), str(root / "checkpoints"), "/cache", str(bundles)}
    assert modes == dict.fromkeys(written, "rw") | {str(catalog): "ro"}
