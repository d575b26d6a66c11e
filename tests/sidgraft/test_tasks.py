"""A stage as a pipeline's task: its summary is reported, a failed variant is marked and handed on."""

import json
from dataclasses import dataclass, field

import pytest

from sidgraft import artifacts, tasks
from sidgraft.signatures import signature


@dataclass
class Place:
    path: str
    metadata: dict = field(default_factory=dict)


def ground(token_rows, out, **settings):
    """Stands in for the stage of that name."""
    source = artifacts.load(token_rows, "token_rows/v1")
    if settings["corpus"] == "bad":
        raise ValueError("the corpus is bad")
    if settings["corpus"] == "surprise":
        raise KeyError("x")
    if settings["corpus"] == "nothing":
        return {}
    write_rows(out, inputs={"token_rows": source})
    return {"steps": 3, "loss": float("nan"), "note": "x", "none": None}


def write_rows(out, inputs=None):
    with artifacts.create(out, "token_rows/v1", stage="ground", arguments={}, inputs=inputs) as draft:
        for name in artifacts.REQUIRED["token_rows/v1"]:
            (draft.path / name).write_text("x")


@pytest.fixture
def parameters(tmp_path):
    write_rows(tmp_path / "rows")
    places = {name: Place(str(tmp_path / name)) for name in ("catalog", "semantic_ids", "interactions", "out")}
    settings = {p.name: p.default for p in signature("ground").parameters if not p.required}
    return {"token_rows": Place(str(tmp_path / "rows")), **places, **settings}


def run(parameters, corpus="gti", keep_going=""):
    given = parameters | {"corpus": corpus, "keep_going": keep_going}
    return tasks.run_task(ground, given, kinds={"out": "token_rows/v1"}, keep_going=keep_going)


def events(capsys):
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith(tasks.EVENT)]
    return [json.loads(line.removeprefix(tasks.EVENT)) for line in lines]


def test_the_summary_is_announced_with_where_it_lies_and_becomes_metadata(parameters, capsys, tmp_path):
    run(parameters)
    (done,) = events(capsys)
    assert done["event"] == "done"
    assert done["summary"] == {"steps": 3, "note": "x"}  # what JSON cannot hold is left out
    assert done["outputs"] == [str(tmp_path / "out")]
    assert parameters["out"].metadata == {"steps": 3, "note": "x"}


def test_an_error_is_announced_and_raised(parameters, capsys, tmp_path):
    with pytest.raises(ValueError, match="the corpus is bad"):
        run(parameters, "bad")
    assert events(capsys) == [{"event": "failed", "stage": "ground", "error": "the corpus is bad", "kept": False}]
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("corpus", "message"), [("bad", "the corpus is bad"), ("surprise", "KeyError: 'x'")])
def test_the_error_of_a_variant_is_marked_and_handed_on(parameters, capsys, tmp_path, corpus, message):
    assert run(parameters, corpus, keep_going="mean, seed 0") == {}
    (failed,) = events(capsys)
    assert (failed["event"], failed["error"], failed["kept"]) == ("failed", message, True)

    after = parameters | {"token_rows": parameters["out"], "out": Place(str(tmp_path / "next"))}
    assert run(after, keep_going="mean@1, seed 0") == {}  # a variant that shares the failed stage
    assert [event["event"] for event in events(capsys)] == ["skipped"]
    with pytest.raises(artifacts.FailedArtifactError) as mark:
        artifacts.load(tmp_path / "next", "token_rows/v1")
    assert (mark.value.stage, mark.value.error, mark.value.variant) == ("ground", message, "mean@1, seed 0")

    with pytest.raises(artifacts.FailedArtifactError):  # outside a study, a failure stays an error
        run(after)


@pytest.mark.parametrize(("signal", "why"), [("SIGKILL", "memory runs out"), ("SIGSEGV", "process.")])
def test_what_a_signal_has_ended_is_marked_without_a_second_try(parameters, capsys, tmp_path, monkeypatch, signal, why):
    monkeypatch.setenv(tasks.ENDED_BY, signal)
    assert run(parameters, keep_going="mean, seed 0") == {}
    (failed,) = events(capsys)
    assert failed["error"].startswith(f"{signal} has ended the process.")
    assert failed["error"].endswith(f"{why}." if signal == "SIGKILL" else why)
    with pytest.raises(artifacts.FailedArtifactError):
        artifacts.load(tmp_path / "out", "token_rows/v1")
    with pytest.raises(ChildProcessError, match=signal):
        run(parameters)


def test_a_stage_that_writes_nothing_has_failed(parameters, capsys):
    with pytest.raises(RuntimeError, match="ended without writing out"):
        run(parameters, "nothing")


def test_metrics_for_the_user_interface_are_numbers_in_metadata_and_a_file(tmp_path):
    place = Place(str(tmp_path / "ui_metrics"))
    tasks.show_metrics(place, {"recall": 0.5, "users": 3, "name": "x", "nan": float("nan"), "flag": True})
    assert place.metadata == {"recall": 0.5, "users": 3}
    assert json.loads((tmp_path / "ui_metrics").read_text()) == place.metadata
