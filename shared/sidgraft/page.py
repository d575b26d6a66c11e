"""The report's page: what `templates/report.html` shows, gathered from the variants and the shared artifacts."""

# pyright: reportAttributeAccessIssue=false
# pyarrow.compute makes its functions at import, where a type checker cannot see them.

from __future__ import annotations

import base64
import mimetypes
import statistics
from collections.abc import Iterable
from typing import Any

import jinja2
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from sidgraft import comparisons, curves, display, id_quality, provenance, results
from sidgraft.artifacts import Artifact
from sidgraft.charts import COLOURS, Series, line_chart
from sidgraft.display import short
from sidgraft.queries import has_queries
from sidgraft.results import MODEL, Variant

INITIALIZATION, FINE_TUNING = "initialization", "fine-tuning"
STATES = (INITIALIZATION, "grounding", FINE_TUNING)
MEASURES = {
    "effective_rank": "Effective rank",
    "effective_rank_all": "Effective rank, all levels",
    "rank": "Rank",
    "sigma_geo": "σ geo",
    "mean_cosine": "Mean cosine",
    "mean_cosine_all": "Mean cosine, all levels",
    "mean_cosine_text": "Mean cosine with text rows",
    "rsa_pearson": "RSA, Pearson r",
    "rsa_pearson_all": "RSA, Pearson r, all levels",
    "rsa_spearman": "RSA, Spearman ρ",
    "rsa_spearman_all": "RSA, Spearman ρ, all levels",
    "purity": "Purity",
    "purity_random": "Purity, random neighbours",
    "purity_encoder": "Purity, encoder space",
    "cosine_to_initialization": "Cosine with own start",
    "cosine_to_centroids": "Cosine with centroids",
    "popularity_axis_correlation": "Popularity axis, Pearson r",
    "popularity_axis_spearman": "Popularity axis, Spearman ρ",
}
COMPARED = ("effective_rank", "sigma_geo", "rsa_pearson", "purity", "r2 popularity 5", "r2 semantic 5")
HISTORY_SHOWN, ITEMS_SHOWN = 8, 5


def render(
    variants: list[Variant],
    catalog: Artifact,
    interactions: Artifact,
    semantic_ids: Artifact,
    summary: list[dict[str, Any]],
    compared: list[dict[str, Any]],
    on_slices: str,
    title: str,
    examples: int,
    reference: str,
) -> tuple[str, str]:
    """Return the page's HTML and its verdict, the one sentence at the top.

    ``summary`` is from `results`; ``compared``, and the remark ``on_slices`` below it, are from `comparisons`.
    """
    shared = (catalog, interactions, semantic_ids)
    results.label(variants)
    measured = [v for v in variants if v.metrics is not None]
    diagnosed = [v for v in variants if v.diagnostics is not None]
    k = results.headline_k(measured)
    asked = has_queries(interactions)
    chosen = spaced(measured, examples)
    verdict, below = results.verdict(measured, k, compared)
    if not measured:
        verdict = f"All {len(variants)} runs failed." if len(variants) > 1 else "The run failed."
    shown = {
        "title": title,
        "verdict": verdict,
        "below": below,
        "run": provenance.run_facts(variants, catalog),
        "notes": provenance.notes(variants),
        "runs": len(variants),
        "failed": [v for v in variants if v.failures],
        "k": k,
        "headline": results.METRIC_NAMES[results.headline(measured)],
        "units": "queries" if asked else "users",
        "significant": comparisons.SIGNIFICANT,
        "intervals": results.interval_rows(measured, k),
        "depths": depths(measured, k),
        "gains": results.relative_gains(measured, reference, k),
        "tables": results.metric_tables(measured, k),
        "pairs": comparisons.matrices(compared, k),
        "on_slices": on_slices,
        "levels": results.level_tables(measured),
        "sweep": results.sweep(measured),
        "reference": reference,
        "training": training(diagnosed),
        "steps": results.best_steps(summary),
        "compared": compared_measures(diagnosed),
        "diagnoses": [diagnosis(v) for v in diagnosed],
        "definitions": next((d for v in diagnosed if (d := v.geometry.get("definitions"))), {}),
        "examples": example_users(*chosen, catalog, interactions) if chosen and not asked else None,
        "queries": example_queries(*chosen, catalog, interactions) if chosen and asked else None,
        "data": data_facts(catalog, interactions),
        "other_data": provenance.made_from_others(measured, interactions),
        "quantizers": id_quality.side_by_side(measured),
        "other_ids": provenance.made_from_others(measured, semantic_ids),
        "ids": id_facts(semantic_ids),
        "id_definitions": id_definitions(semantic_ids),
        "id_curves": id_curves(semantic_ids),
        "explained": next((e for v in diagnosed if (e := v.geometry.get("explained_variance"))), {}),
        "settings": provenance.settings(variants, shared),
        "versions": provenance.versions(),
        "made_with": provenance.made_with(variants, shared),
        "digests": provenance.digests(variants, shared),
    }
    return environment().get_template("report.html").render(shown), verdict


def environment() -> jinja2.Environment:
    """The template environment: everything is escaped, an unknown name is an error."""
    env = jinja2.Environment(
        loader=jinja2.PackageLoader("sidgraft", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    for function in (
        display.block,
        display.figure,
        display.percent,
        display.p_text,
        display.rate,
        display.setting,
        display.short,
        display.show,
    ):
        env.filters[function.__name__] = function
    return env


def training(variants: list[Variant]) -> dict[str, Any]:
    """Return the three training charts, their legend, and each variant's best step."""
    names = list(dict.fromkeys(v.name for v in variants))  # one colour for all seeds
    lines: dict[str, list[Series]] = {"ground": [], "loss": [], "recall": []}
    best, graded = [], False
    for v in variants:
        rows, colour = curves.training(v), names.index(v.name)
        recalls = curves.points(rows, "finetune", *curves.DECIDING)
        kept = curves.points([row for row in rows if row["is_t_star"]], "finetune", *curves.DECIDING)
        lines["ground"].append(Series(v.label, curves.points(rows, "ground", "loss"), colour))
        lines["loss"].append(Series(v.label, curves.points(rows, "finetune", "loss"), colour))
        lines["recall"].append(Series(v.label, recalls, colour, kept[0] if kept else None))
        t_star, epoch = ((v.geometry.get("training") or {}).get(name) for name in ("t_star", "best_epoch"))
        top = max((y for _, y in recalls), default=None)
        best.append({"label": v.label, "t_star": t_star, "epoch": epoch, "recall": top})
        graded = graded or any(row["figure"] == "ndcg@5" for row in rows)
    step = "optimizer step"
    figure = "composite NDCG@5" if graded else "Recall@5"
    charts = [
        ("Grounding: loss", line_chart(lines["ground"], x_label=step, y_label="grounding loss")),
        ("Fine-tuning: loss", line_chart(lines["loss"], x_label=step, y_label="fine-tuning loss")),
        (
            f"Validation {figure}",
            line_chart(lines["recall"], x_label=step, y_label=f"validation {figure}", from_zero=True),
        ),
    ]
    legend = [(name, i % COLOURS, i >= COLOURS) for i, name in enumerate(names)]
    return {"charts": [c for c in charts if c[1]], "legend": legend, "best": best, "figure": figure}


def depths(variants: list[Variant], k: int) -> dict[str, Any]:
    """Return the chart of the headline metric against epochs of grounding, from variants such as centroid+cpt@4.

    And its legend.

    A curve joins the means over the seeds. Empty where no variant names an epoch.
    """
    by_name: dict[str, dict[float, list[float]]] = {}
    for row in curves.depths(variants, k):
        by_name.setdefault(row["variant"], {}).setdefault(row["epoch"], []).append(row["value"])
    lines = [
        Series(name, [(epoch, statistics.fmean(by_epoch[epoch])) for epoch in sorted(by_epoch)], i)
        for i, (name, by_epoch) in enumerate(by_name.items())
    ]
    y_label = f"{results.METRIC_NAMES[results.headline(variants)]}@{k}"
    chart = line_chart(lines, x_label="epochs of grounding", y_label=y_label, from_zero=True)
    return {"chart": chart, "legend": [(s.name, s.colour % COLOURS, s.colour >= COLOURS) for s in lines]}


def _nearest(points: list[tuple[float, float]], step: float | None) -> tuple[float, float] | None:
    return None if step is None else min(points, key=lambda point: abs(point[0] - step), default=None)


def _points(records: Iterable[dict[str, Any]], key: str) -> list[tuple[float, float]]:
    return [(r["step"], r[key]) for r in records if r.get("step") is not None and r.get(key) is not None]


def measures(stage: dict[str, Any] | None) -> dict[str, float | None]:
    """Return the scalar measures of one state of the rows, flat: R² by target and q."""
    stage = stage or {}
    flat: dict[str, float | None] = {key: stage.get(key) for key in MEASURES}
    for target, by_q in (stage.get("r2") or {}).items():
        flat |= {f"r2 {target} {q}": value for q, value in (by_q or {}).items()}
    return flat


def measure_name(key: str) -> str:
    """Return how a measure is called on the page."""
    if key.startswith("r2 "):
        _, target, q = key.split(" ")
        return f"R² {target}, q = {q}"
    return MEASURES[key]


def diagnosis(variant: Variant) -> dict[str, Any]:
    """Return one variant's measures before and after each stage, and its figures."""
    assert variant.diagnostics is not None
    stages = variant.geometry.get("stages") or {}
    states = [state for state in STATES if state in stages]
    by_state = {state: measures(stages[state]) for state in states}
    keys = dict.fromkeys(key for values in by_state.values() for key in values)
    rows = [(measure_name(key), [by_state[state].get(key) for state in states]) for key in keys]
    return {
        "label": variant.label,
        "level": variant.geometry.get("level"),
        "states": states,
        "rows": [row for row in rows if any(value is not None for value in row[1])],
        "figures": [_figure(variant.diagnostics, entry) for entry in variant.geometry.get("figures") or []],
    }


def _figure(diagnostics: Artifact, entry: dict[str, Any]) -> dict[str, str]:
    """Embed one figure as a data URI. The manifest's digests have vouched for the files of the artifact."""
    file = (diagnostics.path / entry["file"]).resolve()
    if not file.is_relative_to(diagnostics.path.resolve()) or not file.is_file():
        raise ValueError(
            f"diagnostics.json names the figure {entry['file']!r}, which {diagnostics.path} does not hold."
        )
    kind = mimetypes.guess_type(file.name)[0] or "image/png"
    data = base64.b64encode(file.read_bytes()).decode("ascii")
    return {
        "title": entry.get("title", file.stem),
        "caption": entry.get("caption", ""),
        "src": f"data:{kind};base64,{data}",
    }


def compared_measures(variants: list[Variant]) -> dict[str, Any] | None:
    """Return the main measures of all variants, means over the seeds, at the first and the last state.

    None for a single variant, whose own table says it all.
    """
    names = list(dict.fromkeys(v.name for v in variants))
    if len(variants) < 2:
        return None
    rows = []
    for name in names:
        stages = [v.geometry.get("stages") or {} for v in variants if v.name == name]
        first, last = ([measures(s.get(state)) for s in stages] for state in (INITIALIZATION, FINE_TUNING))
        rows.append((name, [(_mean(first, key), _mean(last, key)) for key in COMPARED]))
    return {"headings": [measure_name(key) for key in COMPARED], "rows": rows, "averaged": len(variants) > len(names)}


def _mean(by_seed: list[dict[str, float | None]], key: str) -> float | None:
    values = [value for measured in by_seed if (value := measured.get(key)) is not None]
    return statistics.fmean(values) if values else None


def spaced(measured: list[Variant], examples: int) -> tuple[Variant, list[dict[str, Any]], int] | None:
    """Return the best variant, evenly spaced rows of its recommendations and how many it has; None without any."""
    shown = [v for v in measured if v.recommendations is not None and MODEL in v.cells]
    if not shown or examples < 1:
        return None
    key = ("all", results.headline(shown), results.headline_k(shown))
    best = max(shown, key=lambda v: v.cells[MODEL].get(key, (None,))[0] or 0.0)
    assert best.recommendations is not None
    table = best.recommendations.read_table(
        "recommendations.parquet", ["recommender", "user_id", "target_id", "item_ids"]
    )
    rows = table.filter(pc.equal(table["recommender"], MODEL))
    if rows.num_rows == 0:
        return None
    places = np.linspace(0, rows.num_rows - 1, min(examples, rows.num_rows)).round().astype(int)
    return best, rows.take(pa.array(places)).to_pylist(), rows.num_rows


def example_users(
    best: Variant, chosen: list[dict[str, Any]], of: int, catalog: Artifact, interactions: Artifact
) -> dict[str, Any]:
    """Return users with what they saw, were recommended and bought; the first three arguments are from `spaced`."""
    assert best.recommendations is not None
    split = best.recommendations.metadata.get("split") or best.recommendations.arguments.get("split", "test")
    histories = _histories(interactions, [row["user_id"] for row in chosen], f"{split}_position")
    needed = {i for row in chosen for i in (row["target_id"], *row["item_ids"][:ITEMS_SHOWN])}
    names = _item_names(catalog, needed | {i for history in histories.values() for i in history[-HISTORY_SHOWN:]})
    users = [_example(row, histories.get(row["user_id"], []), names) for row in chosen]
    hits = sum(user["rank"] is not None and user["rank"] <= ITEMS_SHOWN for user in users)
    return {"label": best.label, "users": users, "of": of, "hits": hits}


def example_queries(
    best: Variant, chosen: list[dict[str, Any]], of: int, catalog: Artifact, interactions: Artifact
) -> dict[str, Any]:
    """Return queries with what was found and what is good; the first three arguments are from `spaced`."""
    ids = pa.array([row["user_id"] for row in chosen], pa.string())
    asked = interactions.read_table("queries.parquet", ["query_id", "prompt"])
    prompts = {row["query_id"]: row["prompt"] for row in asked.filter(pc.is_in(asked["query_id"], ids)).to_pylist()}
    judged = interactions.read_table("judgements.parquet")
    grades: dict[str, dict[str, int]] = {}
    for row in judged.filter(pc.is_in(judged["query_id"], ids)).to_pylist():
        grades.setdefault(row["query_id"], {})[row["item_id"]] = row["grade"]
    relevant = {query: [item for item, grade in judged.items() if grade] for query, judged in grades.items()}
    needed = {i for row in chosen for i in row["item_ids"][:ITEMS_SHOWN]}
    names = _item_names(catalog, needed | {i for items in relevant.values() for i in items[:ITEMS_SHOWN]})

    def item(query: str, item: str) -> dict[str, Any]:
        return {"name": names.get(item) or short(item), "grade": grades.get(query, {}).get(item)}

    queries = [
        {
            "query": short(row["user_id"], 40),
            "fields": [short(line, 300) for line in prompts.get(row["user_id"], "").split("\n")],
            "items": [item(row["user_id"], i) for i in row["item_ids"][:ITEMS_SHOWN]],
            "relevant": [item(row["user_id"], i) for i in relevant.get(row["user_id"], [])[:ITEMS_SHOWN]],
            "more": max(0, len(relevant.get(row["user_id"], [])) - ITEMS_SHOWN),
        }
        for row in chosen
    ]
    return {"label": best.label, "queries": queries, "of": of}


def _histories(interactions: Artifact, users: list[str], position: str) -> dict[str, list[str]]:
    table = interactions.read_table("interactions.parquet", ["user_id", "item_ids", position])
    rows = table.filter(pc.is_in(table["user_id"], value_set=pa.array(users, pa.string()))).to_pylist()
    return {row["user_id"]: row["item_ids"][: row[position]] for row in rows if row[position] is not None}


def _item_names(catalog: Artifact, items: set[str]) -> dict[str, str]:
    """Return a name for each item: its title, or its text or id where it has none."""
    table = catalog.read_table("catalog.parquet", ["item_id", "title", "text"])
    rows = table.filter(pc.is_in(table["item_id"], value_set=pa.array(sorted(items), pa.string()))).to_pylist()
    return {row["item_id"]: short(row["title"] or "") or short(row["text"]) or short(row["item_id"]) for row in rows}


def _example(row: dict[str, Any], history: list[str], names: dict[str, str]) -> dict[str, Any]:
    def name(item: str) -> str:
        return names.get(item) or short(item)

    target, items = row["target_id"], row["item_ids"]
    return {
        "user": short(row["user_id"], 40),
        "earlier": max(0, len(history) - HISTORY_SHOWN),
        "history": [name(item) for item in history[-HISTORY_SHOWN:]],
        "items": [{"name": name(i), "hit": i == target, "seen": i in history} for i in items[:ITEMS_SHOWN]],
        "target": name(target),
        "rank": items.index(target) + 1 if target in items else None,
        "listed": len(items),
    }


def data_facts(catalog: Artifact, interactions: Artifact) -> list[tuple[str, dict[str, Any]]]:
    """Return what is known of the data: the report that `prepare` wrote, else the artifacts' metadata."""
    parts = {"catalog": catalog.metadata, "interactions": interactions.metadata}
    if (catalog.path / "data_report.json").is_file():
        parts = catalog.read_json("data_report.json")
    return [(name, facts(part)) for name, part in parts.items()]


def id_facts(semantic_ids: Artifact) -> dict[str, Any]:
    """Return the quality of the Semantic IDs: the figures by level where the artifact has them as a file."""
    if (semantic_ids.path / "quality.json").is_file():
        quality = semantic_ids.read_json("quality.json")
        quality["levels"] = [{"level": n} | level for n, level in enumerate(quality["levels"], 1)]
        quality.pop("definitions", None)  # `id_definitions` shows them
        return facts({"items": semantic_ids.metadata.get("items")} | quality)
    return facts(semantic_ids.metadata)


def id_definitions(semantic_ids: Artifact) -> dict[str, str]:
    """Return what the figures of the Semantic IDs are."""
    if not (semantic_ids.path / "quality.json").is_file():
        return {}
    definitions = semantic_ids.read_json("quality.json").get("definitions", {})
    return {_words(name): text for name, text in definitions.items()}


def id_curves(semantic_ids: Artifact) -> dict[str, Any]:
    """Return the curves of a quantizer that was trained (RQ-VAE), error, collisions and use, and the levels' names."""
    if not (semantic_ids.path / curves.QUANTIZER).is_file():
        return {"charts": [], "levels": []}
    record = semantic_ids.read_json(curves.QUANTIZER)
    log, step = record["log"], "training step"
    errors = _points(log, "held_out_error")
    kept = _nearest(errors, record["best_step"])
    charts = [
        ("Held-out error", line_chart([Series("error", errors, 0, kept)], x_label=step, y_label="squared error")),
        (
            "Collision rate",
            line_chart(
                [Series("collisions", _points(log, "collision_rate"))], x_label=step, y_label="collision rate",
                from_zero=True,
            ),
        ),
    ]  # fmt: skip
    levels = [f"level {number}" for number in range(1, len(log[0]["utilisation"]) + 1)]
    for key in ("utilisation", "perplexity"):
        series = [
            Series(name, [(entry["step"], entry[key][level]) for entry in log], level)
            for level, name in enumerate(levels)
        ]
        charts.append(
            (f"{key.capitalize()} of each level", line_chart(series, x_label=step, y_label=key, from_zero=True))
        )
    return {"charts": charts, "levels": [(name, i % COLOURS, i >= COLOURS) for i, name in enumerate(levels)]}


def facts(entries: dict[str, Any]) -> dict[str, Any]:
    """Lay a dict of facts out: lists of dicts as tables, everything else as pairs of name and value."""
    are_rows = {
        k: isinstance(v, list) and bool(v) and all(isinstance(row, dict) for row in v) for k, v in entries.items()
    }
    pairs = [(_words(key), value) for key, value in entries.items() if not are_rows[key]]
    return {"pairs": pairs, "tables": [_fact_table(_words(key), entries[key]) for key in entries if are_rows[key]]}


def _fact_table(name: str, rows: list[dict[str, Any]]) -> dict[str, Any]:
    """A table of counted rows; a column is numeric when everything in it is."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    numeric = [all(isinstance(row.get(column), int | float | None) for row in rows) for column in columns]
    return {
        "name": name,
        "columns": list(zip(map(_words, columns), numeric, strict=True)),
        "rows": [[row.get(column) for column in columns] for row in rows],
    }


def _words(key: str) -> str:
    return str(key).replace("_", " ")
