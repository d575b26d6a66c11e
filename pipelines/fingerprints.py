"""Fingerprints of what a stage's result depends on beside its arguments: its code, its packages, files it reads.

KFP's cache knows code by the image's name and inputs by their paths. A local run therefore puts the fingerprint of a
stage into its image tag: a change of code runs the stages again that import it, and no others.
"""

import ast
import hashlib
import importlib.metadata
import importlib.util
import sys
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import sidgraft
from sidgraft import storage
from sidgraft.signatures import STAGES

LIBRARY = Path(sidgraft.__file__).parent

# The modules that a component's body imports itself, beside its stage.
FACE = ("sidgraft.tasks",)


def image_tags(parameters: dict[str, object], environments: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return an image tag for each stage of a pipeline run with these parameters.

    ``environments`` are digests of what the stages' containers hold, where they run in containers.
    """
    encoder = reference_digest(str(parameters.get("embed_encoder", "")))
    outside = {
        "embed": [encoder],
        "baselines": [encoder],
        "expand": [reference_digest(str(parameters.get("expand_base_model", "")))],
    }
    tags = {}
    for stage in STAGES:
        parts = [code_digest((f"sidgraft.stages.{stage}", *FACE)), *outside.get(stage, [])]
        tags[stage] = _tag(parts)
    tags["variants"] = _tag([code_digest(("sidgraft.variants",))])
    return {stage: _tag([tag, environments[stage]]) if environments else tag for stage, tag in tags.items()}


def code_digest(modules: tuple[str, ...]) -> str:
    """Digest the source of library modules, of all library modules they import, and their packages' versions.

    Data files of the library (templates) count where a module names their folder.
    """
    files, packages = _reach(modules)
    text = "".join(file.read_text(encoding="utf-8") for file in files)
    data = [
        file
        for file in sorted(LIBRARY.rglob("*"))
        if file.is_file() and file.suffix not in (".py", ".pyc") and f'"{file.parent.name}' in text
    ]
    hashed = hashlib.sha256()
    for file in (*files, *data):
        hashed.update(f"{file.relative_to(LIBRARY)}\n".encode())
        hashed.update(file.read_bytes())
    for package in packages:
        hashed.update(f"{package} {_version(package)}\n".encode())
    return hashed.hexdigest()


def reference_digest(reference: str) -> str:
    """Digest what a model reference stands for: a file or directory, here or in a store, or a wheel; else empty.

    A model hub's name is left to the revision that the user gives.
    """
    if reference.startswith("wheel:"):
        return _wheel_digest(reference.removeprefix("wheel:"))
    if storage.is_remote(reference):
        return storage.fingerprint(reference)
    path = Path(reference)
    return path_digest(path) if reference and path.exists() else ""


def path_digest(path: Path) -> str:
    """Digest a file, or all files of a directory with their names."""
    hashed = hashlib.sha256()
    for file in [path] if path.is_file() else sorted(p for p in path.rglob("*") if p.is_file()):
        hashed.update(f"{file.relative_to(path)}\n".encode())
        with file.open("rb") as stream:
            hashed.update(hashlib.file_digest(stream, "sha256").digest())
    return hashed.hexdigest()


def _tag(parts: list[str]) -> str:
    return "run-" + hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _reach(modules: tuple[str, ...]) -> tuple[list[Path], list[str]]:
    """Return the files of all library modules reached by imports, anywhere in the code, and the other packages."""
    waiting, seen, packages = ["sidgraft", *modules], {}, set()
    while waiting:
        module = waiting.pop()
        file = _file(module)
        if module in seen or file is None:
            continue
        seen[module] = file
        for name in imports(file):
            if name.split(".")[0] == "sidgraft":
                waiting += [name, name.rpartition(".")[0]]
            elif name.split(".")[0] not in sys.stdlib_module_names:
                packages.add(name.split(".")[0])
    return sorted(seen.values()), sorted(packages)


def imports(file: Path) -> list[str]:
    """Return the dotted names that a source file imports; `from a import b` gives a.b, which may be a module or not."""
    names = []
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names += [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
    return names


def _file(module: str) -> Path | None:
    """Return the file of a library module, or None where the name is a function or class in one."""
    place = LIBRARY.joinpath(*module.split(".")[1:])
    candidates = (place / "__init__.py", place.with_suffix(".py"))
    return next((file for file in candidates if file.is_file()), None)


@cache
def _distributions() -> dict[str, list[str]]:
    return dict(importlib.metadata.packages_distributions())


def _version(package: str) -> str:
    names = _distributions().get(package, [])
    return ",".join(sorted(importlib.metadata.version(name) for name in set(names)))


def _wheel_digest(package: str) -> str:
    """Digest an installed wheel by its RECORD, which holds the digest of each of its files."""
    names = _distributions().get(package, [])
    records = [importlib.metadata.distribution(name).read_text("RECORD") or "" for name in sorted(set(names))]
    return hashlib.sha256("\n".join(records).encode()).hexdigest() if records else ""
