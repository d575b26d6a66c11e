"""Direction of knowledge: who may import whom, read from the source of every file."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from sidgraft.signatures import STAGES

ROOT = Path(__file__).parents[1]
LIBRARY = ROOT / "shared" / "sidgraft"


def imports(file):
    """Return the dotted names that a file imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative import"
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return names


def starting_with(names, *packages):
    return sorted(n for n in names if any(n == p or n.startswith(f"{p}.") for p in packages))


def test_the_library_knows_neither_kfp_nor_what_is_built_on_it():
    for file in LIBRARY.rglob("*.py"):
        assert starting_with(imports(file), "kfp", "components", "pipelines") == [], file


def test_a_stage_is_imported_by_no_other_module_of_the_library():
    for file in LIBRARY.rglob("*.py"):
        assert starting_with(imports(file), "sidgraft.stages") == [], file


def test_only_the_command_line_is_above_the_stages():
    for file in LIBRARY.rglob("*.py"):
        assert starting_with(imports(file), "sidgraft.cli") == [], file


def test_components_call_stages_inside_their_bodies_and_know_no_pipeline():
    for file in (ROOT / "components").rglob("*.py"):
        assert starting_with(imports(file), "pipelines") == [], file
        top = {
            name
            for node in ast.parse(file.read_text(encoding="utf-8")).body
            if isinstance(node, ast.ImportFrom) and node.module
            for name in (node.module, *(f"{node.module}.{alias.name}" for alias in node.names))
        }
        assert starting_with(top, "sidgraft.stages") == [], file


def test_pipelines_know_components_and_no_stage():
    for file in (ROOT / "pipelines").rglob("*.py"):
        assert starting_with(imports(file), "sidgraft.stages") == [], file


def test_every_stage_has_one_public_function_of_its_name():
    for stage in STAGES:
        tree = ast.parse((LIBRARY / "stages" / f"{stage}.py").read_text(encoding="utf-8"))
        functions = [n.name for n in tree.body if isinstance(n, ast.FunctionDef | ast.ClassDef)]
        assert [name for name in functions if not name.startswith("_")] == [stage]
    files = {file.stem for file in (LIBRARY / "stages").glob("*.py")} - {"__init__"}
    assert files == set(STAGES)


def test_stages_that_only_read_a_model_load_no_trainer():
    """It takes as long to import as torch."""
    code = (
        "import sys, sidgraft.stages.evaluate, sidgraft.stages.recommend, sidgraft.stages.publish\n"
        "print([m for m in ('transformers.trainer', 'peft', 'deepspeed') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


@pytest.mark.parametrize("stage", ["baselines", "embed", "quantize"])
def test_stages_without_a_language_model_load_no_transformers(stage):
    """It takes longer to import than torch; encoders that need it import it when they are loaded."""
    code = f"import sys, sidgraft.stages.{stage}\nprint([m for m in ('transformers',) if m in sys.modules])"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"


@pytest.mark.parametrize("stage", ["prepare", "report"])
def test_the_data_image_needs_no_torch(stage):
    code = (
        f"import sys, sidgraft.stages.{stage}, sidgraft.tasks, sidgraft.variants\n"
        "print([m for m in ('torch', 'transformers', 'sklearn', 'matplotlib', 'kfp') if m in sys.modules])"
    )
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.strip() == "[]"
