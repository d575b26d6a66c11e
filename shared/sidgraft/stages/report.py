"""Write one self-contained HTML page and the tables of one or many variants. Run: sidgraft report --help."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from sidgraft import artifacts, comparisons, curves, id_quality, page, results
from sidgraft.artifacts import Artifact, ArtifactError, FailedArtifactError
from sidgraft.checks import one_of
from sidgraft.histories import training_counts
from sidgraft.metrics import slices
from sidgraft.page import MODEL, Variant
from sidgraft.queries import has_queries

COLUMNS = artifacts.SCHEMAS["metrics/v1"]["metrics.parquet"]


def report(
    metrics: list[str],
    recommendations: list[str],
    diagnostics: list[str],
    catalog: str,
    interactions: str,
    semantic_ids: str,
    out: str,
    *,
    title: str = "sidgraft",
    examples: int = 10,
    reference: str = "",
) -> dict[str, Any]:
    """Join the variants' metrics and diagnostics into index.html and tables.

    Each table is a CSV and a Parquet file: metrics has a row for each figure of each run, summary the mean and standard
    deviation over the seeds, of the best step t* too, and the gain over the reference, comparisons the paired tests of
    every variant with the baselines and the other variants over all users and over each slice, curves the loss and the
    validation figures at each optimizer step, with t*, the metric by epochs of grounding, and the training of an
    RQ-VAE, quantizers the quality of the Semantic IDs that each variant was judged with. Runs that differ before the
    variants (texts, encoder, quantizer) can be joined; of their data and IDs the page details those that are given.

    Args:
        metrics: Directories of the metrics artifacts, one a variant. One that holds a failure is shown as failed.
        recommendations: Directories of the recommendations artifacts, in the same order.
        diagnostics: Directories of the diagnostics artifacts, in the same order.
        catalog: Directory of the catalog artifact.
        interactions: Directory of the interactions artifact.
        semantic_ids: Directory of the semantic_ids artifact, for the details of the quantizer.
        out: Directory to write the report to.
        title: Title of the page.
        examples: Example users to show, with history, recommendations and target.
        reference: Variant over which the relative gains of all variants are shown, and with which they are compared as
            the first; empty shows no gains.
    """
    _check_lengths(metrics, recommendations, diagnostics)
    data = artifacts.load(catalog, "catalog/v1")
    histories = artifacts.load(interactions, "interactions/v1")
    codes = artifacts.load(semantic_ids, "semantic_ids/v1")
    variants = [
        _open(number, *paths) for number, paths in enumerate(zip(metrics, recommendations, diagnostics, strict=True), 1)
    ]
    rows = _all_rows(variants)
    if reference and not any(v.failures for v in variants):  # a study whose reference failed still has its report
        one_of("reference", reference, dict.fromkeys(v.name for v in variants))
    measured = [v for v in variants if v.metrics is not None]
    summary = results.summary(measured, reference)
    if has_queries(histories):
        compared, on_slices = comparisons.compare(measured, reference, histories.read_table("judgements.parquet")), ""
    else:
        parts, on_slices = comparisons.slices_to_test(measured, _slices(data, histories), histories)
        compared = comparisons.compare(measured, reference, slices=parts)
    html, verdict = page.render(
        variants, data, histories, codes, summary, compared, on_slices, title, examples, reference
    )

    inputs = {"catalog": data, "interactions": histories, "semantic_ids": codes}
    for number, variant in enumerate(variants, 1):
        inputs |= {f"{part.kind.split('/')[0]}_{number}": part for part in _parts(variant)}
    arguments = {"title": title, "examples": examples, "reference": reference}
    with artifacts.create(out, "report/v1", stage="report", arguments=arguments, inputs=inputs) as draft:
        (draft.path / "index.html").write_text(html, encoding="utf-8")
        for name, schema, table in (
            ("metrics", COLUMNS, rows),
            ("summary", results.SUMMARY, summary),
            ("comparisons", comparisons.COLUMNS, compared),
            ("curves", curves.COLUMNS, curves.rows(variants, codes)),
            ("quantizers", id_quality.COLUMNS, id_quality.rows(measured)),
        ):
            draft.write_table(f"{name}.parquet", pa.Table.from_pylist(table, schema=schema))
            _write_csv(draft.path / f"{name}.csv", schema.names, table)
        draft.metadata |= {
            "variants": len(variants),
            "failed": sum(bool(v.failures) for v in variants),
            "rows": len(rows),
            "html_bytes": len(html.encode()),
            "verdict": verdict,
        }
    return dict(draft.metadata)


def _slices(catalog: Artifact, interactions: Artifact) -> dict[str, frozenset[str]]:
    """The items that make a user, by the target, one of the slices cold, head and tail."""
    items = catalog.read_table("catalog.parquet", ["item_id"])["item_id"].to_pylist()
    count_N = training_counts(interactions.read_table("interactions.parquet"), items)
    parts = slices(count_N, np.arange(len(items)))
    return {
        part: frozenset(item for item, is_in in zip(items, is_in_N.tolist(), strict=True) if is_in)
        for part, is_in_N in parts.items()
        if part != comparisons.ALL
    }


def _check_lengths(metrics: list[str], recommendations: list[str], diagnostics: list[str]) -> None:
    lengths = {"metrics": len(metrics), "recommendations": len(recommendations), "diagnostics": len(diagnostics)}
    if not metrics or len(set(lengths.values())) > 1:
        found = ", ".join(f"{n} {name}" for name, n in lengths.items())
        raise ValueError(f"found {found}: expected one of each a variant, in the same order, at least one variant.")


def _open(number: int, metrics: str, recommendations: str, diagnostics: str) -> Variant:
    """Load the three artifacts of a variant; the ones that stand for a failure are noted."""
    variant = Variant(name=f"variant {number}", seed=0)
    failures: dict[tuple[str, str], None] = {}  # a stage that failed has often left its mark in all three
    for path, kind in ((metrics, "metrics"), (recommendations, "recommendations"), (diagnostics, "diagnostics")):
        try:
            setattr(variant, kind, artifacts.load(path, f"{kind}/v1"))
        except FailedArtifactError as failure:
            failures[failure.stage, failure.error] = None
            variant.name = failure.variant or variant.name
    variant.failures = list(failures)
    _check_same_model(number, variant)
    _read(number, variant)
    return variant


def _parts(variant: Variant) -> list[Artifact]:
    return [part for part in (variant.metrics, variant.recommendations, variant.diagnostics) if part is not None]


def _check_same_model(number: int, variant: Variant) -> None:
    models = {}
    for part in _parts(variant):
        model = part.lineage[part.digest]["inputs"].get("model")
        if model is not None:
            models[part.kind] = model
    if len(set(models.values())) > 1:
        raise ArtifactError(
            f"{' and '.join(models)} number {number} were made from different models:"
            " give the three lists in the same order of variants."
        )


def _read(number: int, variant: Variant) -> None:
    """Take the variant's figures, name and seed from its metrics; without metrics, the latter from its diagnostics."""
    if variant.diagnostics is not None:
        variant.geometry = variant.diagnostics.read_json("diagnostics.json")
    if variant.metrics is None:
        variant.name = variant.geometry.get("variant") or variant.name
        variant.seed = variant.geometry.get("seed") or 0
        return
    rows = variant.metrics.read_table("metrics.parquet").to_pylist()
    who = {(row["variant"], row["seed"]) for row in rows}
    if len(who) != 1 or not any(row["recommender"] == MODEL for row in rows):
        raise ArtifactError(
            f"metrics number {number} ({variant.metrics.path}) hold {len(who)} variants and"
            f" {sum(row['recommender'] == MODEL for row in rows)} rows of the model, expected one variant with rows"
            " of the model: run `sidgraft evaluate` again."
        )
    name, variant.seed = who.pop()
    variant.name = name or variant.name
    for row in rows:
        cells = variant.cells.setdefault(row["recommender"], {})
        cells[row["slice"], row["metric"], row["k"]] = (row["value"], row["low"], row["high"])


def _all_rows(variants: list[Variant]) -> list[dict[str, Any]]:
    """Return the rows of all metrics in a fixed order; raise when two metrics are the same variant and seed."""
    seen: dict[tuple[str, int], int] = {}
    rows: list[dict[str, Any]] = []
    for number, variant in enumerate(variants, 1):
        if variant.metrics is None:
            continue
        first = seen.setdefault((variant.name, variant.seed), number)
        if first != number:
            raise ArtifactError(
                f"metrics {first} and {number} are both variant {variant.name!r}, seed {variant.seed}:"
                " give each variant a name of its own by `sidgraft evaluate --variant`."
            )
        rows += variant.metrics.read_table("metrics.parquet").to_pylist()
    return sorted(rows, key=lambda row: [row[name] for name in COLUMNS.names[:6]])


def _write_csv(path: Path, names: list[str], rows: list[dict[str, Any]]) -> None:
    """Write the rows; an undefined value is empty, a float has all its digits."""
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
