"""Results of variants side by side: lines of figures, tables, means over seeds, paired tests, the verdict.

A *line* is one row of a table: one recommender of one variant and seed, with its cells, a dict from
(slice, metric, k) to (value, low, high). Baselines that are equal for all variants of a seed are one line.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from sidgraft.artifacts import Artifact
from sidgraft.charts import COLOURS, Series, line_chart
from sidgraft.display import joined, rate

Key = tuple[str, str, int]
Cell = tuple[float | None, float | None, float | None]

MODEL = "model"
METRIC_NAMES = {
    "recall": "Recall",
    "ndcg": "NDCG",
    "precision_strict": "Strict precision",
    "precision_lenient": "Lenient precision",
    "composite_ndcg": "Composite NDCG",
}
STEPS = ("t_star", "best_epoch")  # figures of a run's fine-tuning
RATIO = "head/tail"  # a slice that is a ratio of two: no higher is better
SLICES = ("all", "cold", "head", "tail", RATIO)
INCONCLUSIVE = "inconclusive"
SWEPT = 3  # cut-offs that make a curve

SUMMARY = pa.schema(
    [
        ("variant", pa.string()),  # empty for a baseline that all variants share
        ("recommender", pa.string()),
        ("slice", pa.string()),
        ("metric", pa.string()),  # of a model t_star and best_epoch, too: the best step (from 0) and its epoch
        ("k", pa.int32()),  # null for t_star and best_epoch
        ("mean", pa.float64()),
        ("sd", pa.float64()),  # n - 1; null for a single run
        ("seeds", pa.int32()),  # runs with a figure; a baseline that all seeds share is one run
        # of a model over the reference variant: 100 (x / r - 1) of means over the seeds that both have; else null
        ("gain_percent", pa.float64()),
    ]
)


@dataclass
class Variant:
    """One variant and seed as given to the report; a part that failed is None and named in ``failures``."""

    name: str
    seed: int
    metrics: Artifact | None = None
    recommendations: Artifact | None = None
    diagnostics: Artifact | None = None
    cells: dict[str, dict[Key, Cell]] = field(default_factory=dict)  # by recommender, from the metrics
    geometry: dict[str, Any] = field(default_factory=dict)  # the content of diagnostics.json
    failures: list[tuple[str, str]] = field(default_factory=list)  # (stage, its own error)
    label: str = ""


@dataclass(frozen=True)
class Line:
    """One row of a table; ``seed`` is None where the row stands for several seeds."""

    name: str
    recommender: str
    seed: int | None
    cells: dict[Key, Any]

    def value(self, key: Key) -> float | None:
        """The figure itself, without its interval or standard deviation."""
        return self.cells[key][0] if key in self.cells else None


def label(variants: list[Variant]) -> None:
    """Give every variant the label it has all over the page: its name, and its seed where there are several."""
    several = _several_seeds([v for v in variants if v.metrics is not None])
    for v in variants:
        known = v.metrics is not None or v.diagnostics is not None
        v.label = f"{v.name}, seed {v.seed}" if several and known else v.name


def lines(variants: list[Variant]) -> list[Line]:
    """Return all lines: the models in the given order, then each baseline once a seed.

    A baseline that differs between the variants of a seed (other users, say) has a line for each difference.
    """
    result = [Line(v.name, MODEL, v.seed, v.cells[MODEL]) for v in variants if MODEL in v.cells]
    for recommender in recommenders(variants)[1:]:
        seen: dict[tuple[int, str], Line] = {}
        for v in variants:
            cells = v.cells.get(recommender)
            if cells is not None:
                same = json.dumps(sorted((list(key), cell) for key, cell in cells.items()))
                seen.setdefault((v.seed, same), Line(v.name, recommender, v.seed, cells))
        seeds = [seed for seed, _ in seen]
        result += [
            Line(line.name if seeds.count(seed) > 1 else "", recommender, seed, line.cells)
            for (seed, _), line in seen.items()
        ]
    return result


def recommenders(variants: list[Variant]) -> list[str]:
    """Return the recommenders' names, the model first."""
    return list(dict.fromkeys([MODEL, *(name for v in variants for name in v.cells)]))


def aggregate(all_lines: list[Line]) -> list[Line]:
    """Return a line for each variant and baseline with cells (mean, standard deviation, number of seeds).

    The standard deviation (n - 1) is None for a single seed; undefined values count in neither. A baseline that all
    seeds share is one run, not several.
    """
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in all_lines:
        groups.setdefault((line.name, line.recommender), []).append(line)
    result = []
    for (name, recommender), members in groups.items():
        cells: dict[Key, Any] = {}
        for key in dict.fromkeys(key for line in members for key in line.cells):
            values = [v for line in members if (v := line.value(key)) is not None]
            if recommender != MODEL and len(set(values)) == 1:
                values = values[:1]
            mean = statistics.fmean(values) if values else None
            sd = statistics.stdev(values) if len(values) > 1 else None
            cells[key] = (mean, sd, len(values))
        result.append(Line(name, recommender, None, cells))
    return result


def summary(variants: list[Variant], reference: str = "") -> list[dict[str, Any]]:
    """Return a row of SUMMARY for every figure of every variant and baseline, over the seeds, t* among them."""
    gains = gains_by_key(variants, reference)
    steps = {(v.name, v.seed): step_cells(v) for v in variants}
    each = [
        replace(line, cells=line.cells | steps[line.name, line.seed or 0]) if line.recommender == MODEL else line
        for line in lines(variants)
    ]
    return [
        {
            "variant": line.name, "recommender": line.recommender, "slice": part, "metric": metric, "k": k or None,
            "mean": mean, "sd": sd, "seeds": seeds,
            "gain_percent": gains.get(line.name, {}).get((part, metric, k)) if line.recommender == MODEL else None,
        }
        for line in aggregate(each)
        for (part, metric, k), (mean, sd, seeds) in sorted(line.cells.items())
    ]  # fmt: skip


def headline(variants: list[Variant]) -> str:
    """Return the metric that stands for all: recall, or strict precision where queries have graded candidates."""
    graded = any(metric == "precision_strict" for v in variants for _, metric, _ in v.cells.get(MODEL, {}))
    return "precision_strict" if graded else "recall"


def headline_k(variants: list[Variant]) -> int:
    """Return the k that stands for all: 10, or the nearest to it that every model line has."""
    wanted = ("all", headline(variants))
    ks = [{k for s, m, k in v.cells.get(MODEL, {}) if (s, m) == wanted} for v in variants]
    common = set.intersection(*ks) if ks else set()
    return min(common, key=lambda k: (abs(k - 10), k), default=10)


def metric_tables(variants: list[Variant], k: int) -> list[dict[str, Any]]:
    """Return the tables of all users and of the slices: over the seeds first where there are several."""
    if not variants:
        return []
    each = lines(variants)
    keys = {key for line in each for key in line.cells if not _of_decoding(key)}
    metrics = _ordered({m for _, m, _ in keys}, tuple(METRIC_NAMES))
    slices = _ordered({s for s, _, _ in keys}, SLICES)
    overall = [(METRIC_NAMES.get(m, m), sorted(key for key in keys if key[:2] == ("all", m))) for m in metrics]
    sliced = [(_slice_name(s, variants), [(s, m, k) for m in metrics if (s, m, k) in keys]) for s in slices]
    who = "users" if headline(variants) == "recall" else "queries"
    both = [(f"All {who}", overall, _at_k)]
    both += [(f"Slices at k = {k}", sliced, _metric)] if slices != ["all"] else []
    if not _several_seeds(variants):
        return [table(name, each, groups, heading) for name, groups, heading in both]
    over = aggregate(each)
    return [
        table(f"{name}, {how}", rows, groups, heading, aggregated=rows is over)
        for how, rows in (("mean over the seeds", over), ("seed by seed", each))
        for name, groups, heading in both
    ]


def _slice_name(part: str, variants: list[Variant]) -> str:
    """The slice, and its number of users where all variants have the same."""
    users = {v.metrics.metadata.get("users" if part == "all" else f"{part}_users") for v in variants if v.metrics}
    found = users.pop() if len(users) == 1 else None
    return part.capitalize() if found is None else f"{part.capitalize()} ({found:,} users)"


def _ordered(names: set[str], first: tuple[str, ...]) -> list[str]:
    return [name for name in first if name in names] + sorted(names - set(first))


def _several_seeds(variants: list[Variant]) -> bool:
    return len({v.seed for v in variants}) > 1


def _at_k(key: Key) -> str:
    return f"@{key[2]}"


def level_tables(variants: list[Variant]) -> list[dict[str, Any]]:
    """Return how often the beams hold the right prefix, and where they lose it by slice; over the seeds first.

    Models only. Where the prefix is lost, a row's figures of one slice add up to 1, those that are found included.
    """
    each = [line for line in lines(variants) if line.recommender == MODEL]
    keys = {key for line in each for key in line.cells if _of_decoding(key)}
    levels = sorted((k for k in keys if k[1].startswith("level_") and k[0] == "all"), key=lambda k: (k[2], _level(k)))
    beams = sorted({key[2] for key in levels})
    held = [(f"{n} beams", [key for key in levels if key[2] == n]) for n in beams]
    lost = []
    for part in _ordered({s for s, m, _ in keys if m.startswith("lost_")}, SLICES):
        for n in beams:
            found = sorted((k for k in keys if k[1].startswith("lost_") and (k[0], k[2]) == (part, n)), key=_level)
            name = _slice_name(part, variants) if len(beams) == 1 else f"{part.capitalize()}, {n} beams"
            if found:
                lost.append((name, [*found, (part, f"level_{_level(found[-1])}", n)]))
    both = [("Right prefix among the beams", held, _level_name)] if held else []
    both += [("First level without the right prefix", lost, _lost_name)] if lost else []
    if not _several_seeds(variants):
        return [table(name, each, groups, heading) for name, groups, heading in both]
    over = aggregate(each)
    return [
        table(f"{name}, {how}", rows, groups, heading, aggregated=rows is over)
        for how, rows in (("mean over the seeds", over), ("seed by seed", each))
        for name, groups, heading in both
    ]


def _of_decoding(key: Key) -> bool:
    return key[1].startswith(("level_", "lost_"))


def _level(key: Key) -> int:
    return int(key[1].rpartition("_")[2])


def _level_name(key: Key) -> str:
    return f"Level {_level(key)}"


def _lost_name(key: Key) -> str:
    return _level_name(key) if key[1].startswith("lost_") else "Found"


def sweep(variants: list[Variant]) -> dict[str, Any] | None:
    """Return charts of the metrics against k, a line a recommender (mean over the seeds), and their legend.

    Baselines that differ between variants have a line each. None where fewer than three cut-offs were measured.
    """
    over = aggregate(lines(variants))
    charts = []
    for metric in METRIC_NAMES:
        series = []
        for number, line in enumerate(over):
            points = [(float(k), line.value((s, m, k))) for s, m, k in sorted(line.cells) if (s, m) == ("all", metric)]
            name = line.name if line.recommender == MODEL else " ".join(filter(None, (line.recommender, line.name)))
            series.append(Series(name, [(k, value) for k, value in points if value is not None], number))
        if any(len(one.points) >= SWEPT for one in series):
            title = f"{METRIC_NAMES[metric]}@k"
            charts.append((title, line_chart(series, x_label="k", y_label=title, from_zero=True)))
            legend = [(one.name, one.colour % COLOURS, one.colour >= COLOURS) for one in series]
    return {"charts": charts, "legend": legend} if charts else None


def _metric(key: Key) -> str:
    return METRIC_NAMES.get(key[1], key[1])


def table(
    name: str,
    rows: list[Line],
    groups: list[tuple[str, list[Key]]],
    heading: Callable[[Key], str],
    *,
    aggregated: bool = False,
) -> dict[str, Any]:
    """Return a table for the template: grouped columns, and rows whose best figures are marked."""
    groups = [(group, keys) for group, keys in groups if keys]
    keys = [key for _, members in groups for key in members]
    best = {
        key: 0.0
        if key[0] == RATIO or key[1].startswith("lost_")
        else max((v for line in rows if (v := line.value(key)) is not None), default=0.0)
        for key in keys
    }
    body = []
    for line in rows:
        cells = [(*line.cells.get(key, (None, None, None)), _is_best(line.value(key), best[key], rows)) for key in keys]
        named = [dict(zip(("value", "low", "high", "best"), cell, strict=True)) for cell in cells]
        body.append({"line": line, "cells": named})
    return {
        "name": name,
        "groups": [(group, len(members)) for group, members in groups],
        "headings": [heading(key) for key in keys],
        "starts": [key == members[0] for _, members in groups for key in members],
        "rows": body,
        "seeds": len({line.seed for line in rows}) > 1,
        "aggregated": aggregated,
        "baselines": any(line.recommender != MODEL for line in rows),
    }


def _is_best(value: float | None, best: float, rows: list[Line]) -> bool:
    """Whether the figure as printed is the highest of several."""
    return bool(len(rows) > 1 and best and rate(value) == rate(best))


def verdict(variants: list[Variant], k: int, compared: list[dict[str, Any]]) -> tuple[str, list[str]]:
    """Return what came out, in plain words, and the other variants that are not above every baseline.

    The best variant by the mean over its seeds, the variants that it cannot be told from, its `headline` metric beside
    the baselines', and whether it beats them; ``compared`` are the rows of `comparisons`, none where it could not be
    tested.
    """
    metric = headline(variants)
    key = ("all", metric, k)
    over = [line for line in aggregate(lines(variants)) if line.value(key) is not None]
    models = {line.name: line.value(key) or 0.0 for line in over if line.recommender == MODEL}
    baselines: dict[str, float] = {}
    for line in over:
        if line.recommender != MODEL:
            baselines[line.recommender] = max(line.value(key) or 0.0, baselines.get(line.recommender, 0.0))
    if not models:
        return "Nothing was measured: there is nothing to compare.", []
    best = max(models, key=lambda name: models[name])
    text = best if len(models) == 1 else f"{best} is the best of {len(models)} variants"
    if unsure := _not_told_from(best, key, compared):
        text += f", but its lead over {joined(unsure)} is inconclusive"
    text += f": {METRIC_NAMES[metric]}@{k} {rate(models[best], 3)}{_spread(best, variants, key)}"
    text += "".join(f"{', ' if i else '; '}{b} {rate(value, 3)}" for i, (b, value) in enumerate(baselines.items()))
    tested = {
        row["against"]: row
        for row in compared
        if (row["variant"], row["slice"], row["metric"], row["k"], row["baseline"]) == (best, *key, True)
    }
    text += ". " + _judgement(models[best], baselines, tested)
    highest = max(baselines.values(), default=-1.0)
    below = [f"{name} ({rate(value, 3)})" for name, value in models.items() if name != best and value <= highest]
    return text, below


def _not_told_from(name: str, key: Key, compared: list[dict[str, Any]]) -> list[str]:
    """The other variants whose difference to this one is inconclusive; a pair is tested once, either way round."""
    pairs = [
        (row["variant"], row["against"])
        for row in compared
        if not row["baseline"] and row["conclusion"] == INCONCLUSIVE and (row["slice"], row["metric"], row["k"]) == key
    ]
    return [other for pair in pairs if name in pair for other in pair if other != name]


def _spread(name: str, variants: list[Variant], key: Key) -> str:
    cells = [v.cells[MODEL][key] for v in variants if v.name == name and v.cells[MODEL][key][0] is not None]
    if len(cells) > 1:
        sd = statistics.stdev(value for value, _, _ in cells if value is not None)
        return f" (mean of {len(cells)} seeds, sd {rate(sd, 3)})"
    _, low, high = cells[0]
    return "" if low is None or high is None else f" [{rate(low, 3)}, {rate(high, 3)}]"


def relative_gains(variants: list[Variant], reference: str, k: int) -> list[dict[str, Any]]:
    """Return tables of each model's figures relative to the variant ``reference``, in percent: 100 (x / r - 1).

    One over all users, with the best step t* where it is known, and one of the slices at ``k`` where there are any. x
    and r are means over the seeds that both variants have; None where the figure of the reference is zero or missing.
    No table where the reference was not measured.
    """
    gains = gains_by_key(variants, reference)
    keys = {key for by_key in gains.values() for key in by_key if not _of_decoding(key)}
    metrics = _ordered({metric for _, metric, _ in keys if metric not in STEPS}, tuple(METRIC_NAMES))
    overall = [(METRIC_NAMES.get(m, m), sorted(key for key in keys if key[:2] == ("all", m))) for m in metrics]
    overall += [("Steps", [key for key in keys if key[1] == "t_star"])]
    slices = _ordered({part for part, _, _ in keys} - {"all", RATIO}, SLICES)
    sliced = [(_slice_name(s, variants), [(s, m, k) for m in metrics if (s, m, k) in keys]) for s in slices]
    tables = []
    for which, groups, heading in (("all", overall, _at_k), (f"slices at k = {k}", sliced, _metric)):
        groups = [(name, members) for name, members in groups if members]
        ordered = [key for _, members in groups for key in members]
        if ordered:
            rows = [
                (name, len(_common_seeds(variants, name, reference)), [by_key.get(key) for key in ordered])
                for name, by_key in gains.items()
            ]
            groups = [(name, len(members)) for name, members in groups]
            headings = ["t*" if key[1] == "t_star" else heading(key) for key in ordered]
            tables.append({"name": which, "groups": groups, "headings": headings, "rows": rows})
    return tables


def gains_by_key(variants: list[Variant], reference: str) -> dict[str, dict[Key, float | None]]:
    """Return, by variant, how far each of its figures is above that of ``reference``, in percent: see `relative_gains`.

    Nothing where the reference was not measured, or is empty.
    """
    measured: dict[str, dict[int, dict[Key, Cell]]] = {}
    for v in variants:
        if MODEL in v.cells:
            measured.setdefault(v.name, {})[v.seed] = v.cells[MODEL] | step_cells(v)
    if reference not in measured:
        return {}
    gains: dict[str, dict[Key, float | None]] = {}
    for name, by_seed in measured.items():
        seeds = _common_seeds(variants, name, reference)
        keys = dict.fromkeys(key for cells in by_seed.values() for key in cells)
        gains[name] = {
            key: _gain(*[[of[s].get(key) for s in seeds] for of in (by_seed, measured[reference])]) for key in keys
        }
    return gains


def _common_seeds(variants: list[Variant], name: str, reference: str) -> list[int]:
    ours, theirs = ({v.seed for v in variants if v.name == n and MODEL in v.cells} for n in (name, reference))
    return sorted(ours & theirs)


def _gain(cells: list[Cell | None], reference: list[Cell | None]) -> float | None:
    pairs = [
        (x[0], r[0]) for x, r in zip(cells, reference, strict=True) if x and r and x[0] is not None and r[0] is not None
    ]
    base = sum(r for _, r in pairs)
    return 100 * (sum(x for x, _ in pairs) / base - 1) if base else None


def step_cells(variant: Variant) -> dict[Key, Cell]:
    """t* and its epoch as figures over all users at k = 0, where fine-tuning told them to evaluate."""
    told = variant.metrics.metadata if variant.metrics is not None else {}
    return {("all", name, 0): (float(told[name]), None, None) for name in STEPS if told.get(name) is not None}


def best_steps(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the rows of `summary` for t*, where several seeds or a reference make one of them more than a run's."""
    steps = [row for row in rows if row["metric"] == "t_star"]
    return steps if any(row["seeds"] > 1 or row["gain_percent"] is not None for row in steps) else []


def _judgement(value: float, baselines: dict[str, float], tested: dict[str, dict[str, Any]]) -> str:
    if not baselines:
        return "No baseline was measured beside it."
    below = [b for b, v in baselines.items() if v > value]
    level = [b for b, v in baselines.items() if v == value]
    undecided = [b for b, row in tested.items() if row["conclusion"] == INCONCLUSIVE]
    if below:
        open_ = _with_detectable([b for b in below if b in undecided], tested)
        unsure = f", but the difference to {joined(open_)} is inconclusive" if open_ else ""
        return f"The model is below the {_baselines(below)}{unsure}."
    if level:
        return f"The model is no better than the {_baselines(level)}."
    open_ = _with_detectable([b for b in baselines if b in undecided], tested)
    if open_:
        return f"The model is above its baselines, but its lead over {joined(open_)} is inconclusive."
    above = "both baselines" if len(baselines) == 2 else f"the {_baselines(list(baselines))}"
    return f"The model is above {above}" + (
        ", by more than chance explains." if baselines.keys() <= tested.keys() else "."
    )


def _with_detectable(names: list[str], tested: dict[str, dict[str, Any]]) -> list[str]:
    """Each baseline with the difference to it that the users at hand would have shown."""
    return [f"{name} (detectable {rate(tested[name]['detectable'], 3)})" for name in names]


def _baselines(names: list[str]) -> str:
    return f"{joined(names)} baseline{'s' if len(names) > 1 else ''}"


def interval_rows(variants: list[Variant], k: int) -> list[dict[str, Any]]:
    """Return a row for each variant and baseline: its `headline` metric and intervals on a common scale in percent."""
    key = ("all", headline(variants), k)
    groups: dict[tuple[str, str], list[Cell]] = {}
    for line in lines(variants):
        if line.value(key) is not None:
            groups.setdefault((line.name, line.recommender), []).append(line.cells[key])
    top = max((x for cells in groups.values() for cell in cells for x in cell if x is not None), default=0.0) or 1.0
    order = list(dict.fromkeys(v.name for v in variants))
    rows = []
    for (name, recommender), cells in groups.items():
        mean = statistics.fmean(value for value, _, _ in cells if value is not None)
        marks = [
            {
                "at": 100 * value / top,
                "from": 100 * (value if low is None else low) / top,
                "width": 100 * ((value if high is None else high) - (value if low is None else low)) / top,
            }
            for value, low, high in cells
            if value is not None
        ]
        colour = order.index(name) % COLOURS if recommender == MODEL else None
        rows.append({"name": name, "recommender": recommender, "mean": mean, "marks": marks, "colour": colour})
    return rows
