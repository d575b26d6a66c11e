"""The command line: help, values in their types, short errors with the right word, exit status."""

import os
import signal
import subprocess
import sys

import pytest

from sidgraft import cli
from sidgraft.signatures import STAGES, signature


def test_help_lists_the_stages_and_loads_nothing_but_the_standard_library():
    """So it is there at once: what stages import takes seconds."""
    code = (
        "import sys; before = set(sys.modules); from sidgraft.cli import main; main(['--help']);"
        "loaded = {name.split('.')[0] for name in set(sys.modules) - before};"
        "print(sorted(loaded - sys.stdlib_module_names), file=sys.stderr)"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in shown.stdout.splitlines() if line.startswith("  ")] == list(STAGES)
    assert shown.stderr == "['sidgraft']\n"


@pytest.mark.parametrize("stage", STAGES)
def test_help_of_a_stage_names_every_parameter_with_dashes_and_loads_no_torch(stage):
    code = f"import sys; from sidgraft.cli import main; main(['{stage}', '--help']); sys.exit('torch' in sys.modules)"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    flags = {word.strip(",") for word in shown.split() if word.startswith("--")}
    assert not [flag for flag in flags if "_" in flag]
    assert {"--" + p.name.replace("_", "-") for p in signature(stage).parameters} <= flags


def test_values_arrive_in_their_types():
    arguments = ["--item-embeddings", "in", "--out=o", "--levels", "2", "--max-collision-rate", "0.5", "--fit", "lloyd"]
    given = cli.parse(signature("quantize"), arguments)
    assert (given["item_embeddings"], given["out"], given["levels"]) == ("in", "o", 2)
    assert given["max_collision_rate"] == 0.5
    assert given["codebook_size"] == 256


def test_switches_go_both_ways():
    required = ["--catalog=c", "--interactions=i", "--out-catalog=a", "--out-interactions=b"]
    assert cli.parse(signature("prepare"), [*required, "--strict"])["strict"] is True
    assert cli.parse(signature("prepare"), [*required, "--no-strict"])["strict"] is False
    assert cli.parse(signature("prepare"), required)["strict"] is False


def test_lists_are_given_by_repetition_or_commas():
    lists = ["--metrics", "a", "--metrics", "b", "--recommendations", "c,d", "--diagnostics", "e"]
    rest = ["--catalog=c", "--interactions=i", "--semantic-ids=s", "--out=o"]
    given = cli.parse(signature("report"), [*lists, *rest])
    assert given["metrics"] == ["a", "b"]
    assert given["recommendations"] == ["c", "d"]
    assert given["diagnostics"] == ["e"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["quantise"], "did you mean quantize?"),
        (["quantize", "--level", "3"], "did you mean --levels?"),
        (["prepare", "--item_id", "asin"], "did you mean --item-id?"),
        (["quantize", "--levels", "3"], "--item-embeddings, --out must be given"),
        (["quantize", "--levels", "three"], "invalid int value: 'three'"),
    ],
)
def test_a_wrong_command_is_told_in_few_words(arguments, message, capsys):
    assert cli.main(arguments) == 2
    printed = capsys.readouterr().err
    assert message in printed
    assert len(printed.splitlines()) <= 2


def test_an_error_of_a_stage_is_its_message_alone(tmp_path, capsys):
    status = cli.main(["quantize", "--item-embeddings", str(tmp_path / "none"), "--out", str(tmp_path / "out")])
    assert status == 1
    printed = capsys.readouterr().err
    assert printed.startswith("sidgraft quantize: ")
    assert "does not exist" in printed
    assert "Traceback" not in printed
    assert list(tmp_path.iterdir()) == []


def test_a_stopped_stage_says_what_is_left(monkeypatch, capsys):
    """Checkpoints may be there, so it must not say that nothing is."""
    import sidgraft.stages.embed

    def stop(**_):
        raise KeyboardInterrupt

    monkeypatch.setattr(sidgraft.stages.embed, "embed", stop)
    assert cli.main(["embed", "--catalog", "c", "--out", "o"]) == 130
    assert capsys.readouterr().err == "\nsidgraft embed: stopped; no artifact was written.\n"


def test_the_summary_is_printed(monkeypatch, capsys, tmp_path):
    import sidgraft.stages.embed

    monkeypatch.setattr(sidgraft.stages.embed, "embed", lambda **given: {"items": 3, "catalog": given["catalog"]})
    assert cli.main(["embed", "--catalog", "c", "--out", "o"]) == 0
    assert capsys.readouterr().out == "items: 3\ncatalog: c\n"


@pytest.mark.parametrize(("arguments", "status"), [(["--version"], 0), (["quantise"], 2)])
def test_a_process_of_torchrun_whose_clean_up_aborts_ends_with_its_own_status(tmp_path, arguments, status):
    (tmp_path / "sitecustomize.py").write_text("import atexit, os\natexit.register(os.abort)\n")
    command = [sys.executable, "-m", "sidgraft.cli", *arguments]
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    aborts = subprocess.run(command, env=environment, capture_output=True, text=True)
    ends = subprocess.run(command, env=environment | {"TORCHELASTIC_RUN_ID": "1"}, capture_output=True, text=True)
    assert (aborts.returncode, ends.returncode) == (-signal.SIGABRT, status)
    assert ends.stdout + ends.stderr == aborts.stdout + aborts.stderr != ""


def test_a_folder_of_bundles_is_shown_as_one(capsys):
    assert cli.main(["watch", "--help"]) == 0
    text = capsys.readouterr().out
    assert "--bundles DIR" in text
    assert "--bundles FILE" not in text
