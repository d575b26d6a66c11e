"""Fingerprints: a change of code, package or file changes the tags of the stages it reaches, and no others."""

import shutil
from pathlib import Path

import pytest

import sidgraft
from pipelines import fingerprints
from sidgraft.signatures import STAGES

LIBRARY = {
    "__init__.py": "",
    "stages/__init__.py": "",
    "tasks.py": "",
    "text.py": "import numpy",
    "vectors.py": "from sidgraft import text",
    "page.py": 'FOLDER = "templates"',
    "templates/page.html": "<p>",
    "stages/one.py": "from sidgraft.vectors import scale",
    "stages/two.py": "def two():\n    from sidgraft import text",
    "stages/three.py": "import sidgraft.page",
}


@pytest.fixture
def library(tmp_path, monkeypatch):
    for name, text in LIBRARY.items():
        file = tmp_path / "sidgraft" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    monkeypatch.setattr(fingerprints, "LIBRARY", tmp_path / "sidgraft")
    return tmp_path / "sidgraft"


def digests():
    names = ("one", "two", "three")
    return {name: fingerprints.code_digest((f"sidgraft.stages.{name}", "sidgraft.tasks")) for name in names}


@pytest.mark.parametrize(
    ("changed", "reached"),
    [
        ("stages/one.py", {"one"}),
        ("vectors.py", {"one"}),
        ("text.py", {"one", "two"}),  # through vectors, and through an import inside a function
        ("templates/page.html", {"three"}),
        ("tasks.py", {"one", "two", "three"}),
        ("__init__.py", {"one", "two", "three"}),
    ],
)
def test_a_change_reaches_the_stages_that_import_it(library, changed, reached):
    before = digests()
    with (library / changed).open("a") as file:
        file.write("\n# changed")
    after = digests()
    assert {name for name in before if before[name] != after[name]} == reached


SHIPPED = Path(sidgraft.__file__).parent
DATA = [f for f in sorted(SHIPPED.rglob("*")) if f.is_file() and f.suffix not in (".py", ".pyc")]


@pytest.mark.parametrize("name", [str(file.relative_to(SHIPPED)) for file in DATA])
def test_a_data_file_of_the_library_reaches_the_stage_that_reads_it(tmp_path, monkeypatch, name):
    """All data files are templates of the report; a file of another folder needs its own line here."""
    copy = tmp_path / "sidgraft"
    shutil.copytree(SHIPPED, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(fingerprints, "LIBRARY", copy)
    before = fingerprints.image_tags({})
    with (copy / name).open("a") as file:
        file.write("\n")
    after = fingerprints.image_tags({})
    assert {stage for stage in before if before[stage] != after[stage]} == {"report"}


def test_the_report_has_templates_and_every_stage_a_tag():
    assert {file.parent.name for file in DATA} == {"templates"}
    assert set(fingerprints.image_tags({})) == {*STAGES, "variants"}


def test_another_version_of_a_package_reaches_the_stages_that_import_it(library, monkeypatch):
    before = digests()
    monkeypatch.setattr(fingerprints, "_version", lambda package: "999")
    after = digests()
    assert {name for name in before if before[name] != after[name]} == {"one", "two"}


def test_tags_change_with_local_models_and_only_for_the_stage_that_reads_them(tmp_path):
    model = tmp_path / "model"
    model.mkdir()
    (model / "weights").write_text("1")
    parameters = {"embed_encoder": "hashing", "expand_base_model": str(model)}
    before = fingerprints.image_tags(parameters)
    assert fingerprints.image_tags(parameters) == before
    (model / "weights").write_text("2")
    after = fingerprints.image_tags(parameters)
    assert {stage for stage in before if before[stage] != after[stage]} == {"expand"}


def test_a_copy_has_the_same_digest_and_a_renamed_file_another(tmp_path):
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    (first / "weights").write_text("1")
    shutil.copytree(first, second)
    assert fingerprints.path_digest(first) == fingerprints.path_digest(second)
    (second / "weights").rename(second / "others")
    assert fingerprints.path_digest(first) != fingerprints.path_digest(second)


def test_references_that_are_no_files_have_no_digest():
    assert fingerprints.reference_digest("Qwen/Qwen3-0.6B") == ""
    assert fingerprints.reference_digest("tiny") == ""
    assert fingerprints.reference_digest("wheel:no_such_package") == ""
    assert len(fingerprints.reference_digest("wheel:numpy")) == 64
