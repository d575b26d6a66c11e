"""The Docker runner where no engine answers."""

import os


def test_no_engine_is_a_sentence_that_says_what_to_do(run, standin_library, tmp_path):
    env = os.environ | {"PYTHONPATH": str(standin_library), "DOCKER_HOST": f"unix://{tmp_path}/nowhere"}
    refused = run("--preset", "smoke", "--runner", "docker", "--root", tmp_path, env=env)
    assert refused.returncode == 2
    assert "no Docker engine answers" in refused.stderr
    assert "leave out --runner docker" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_retraining_is_refused_where_containers_could_not_write_its_bundles(run, tmp_path):
    refused = run("--preset", "smoke-retrain", "--runner", "docker", "--root", tmp_path / "run")
    assert refused.returncode == 2
    assert "leave out --runner docker" in refused.stderr
    assert not (tmp_path / "run").exists()
