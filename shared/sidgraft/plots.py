"""Figures of the diagnostics as PNG: one function a figure, one style, drawn with Agg and without a display.

A figure is 6 to 6.4 inches wide, so that its 9-point text reads well at 600 pixels; colours are those of Okabe and Ito.
`stages` are always given in order, as a dict from the stage's name to its data.

Shapes: K rows or codes · S singular values · M text rows.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, MaxNLocator, NullFormatter
from PIL import Image

# The stages in grey, blue and vermillion; categories in what is left, so that no colour means two things.
STAGE_COLOURS = ("#8A8F98", "#0072B2", "#D55E00")
CATEGORY_COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#332288")
REST_COLOUR = "#B9BDC4"
INK, FAINT = "#24292F", "#D8DBE0"
STYLE: dict[Any, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "axes.edgecolor": "#8A8F98",
    "xtick.color": "#57606A",
    "ytick.color": "#57606A",
    "axes.linewidth": 0.8,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": FAINT,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.8,
}


def cosine_matrices(
    path: Path,
    stages: Mapping[str, np.ndarray],
    all_stages: Mapping[str, np.ndarray],
    *,
    label: str,
    bounds: Sequence[int],
    all_bounds: Sequence[int],
) -> None:
    """Draw the matrices [K, K] of one level, and below those of all levels; ``bounds`` are where blocks end."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 4.5), layout="constrained")
        axes = figure.subplots(2, len(stages))
        for line, (matrices, lines) in enumerate(((stages, bounds), (all_stages, all_bounds))):
            low, high = _colour_range(list(matrices.values()))
            for axis, (name, matrix) in zip(axes[line], matrices.items(), strict=True):
                axis.imshow(matrix, cmap="YlGnBu", vmin=low, vmax=high)
                for bound in lines:
                    axis.axhline(bound - 0.5, color=INK, linewidth=0.35)
                    axis.axvline(bound - 0.5, color=INK, linewidth=0.35)
                axis.set(xticks=[], yticks=[], title=name if line == 0 else "")
                axis.spines[:].set_visible(False)
            axes[line][0].set_ylabel(label if line == 0 else "all semantic levels")
            bar = figure.colorbar(
                axes[line][0].images[0], ax=axes[line], shrink=0.85, pad=0.02, aspect=18, extend="both"
            )
            bar.locator = MaxNLocator(5)
        _save(figure, path)


def spectra(
    path: Path, stages: Mapping[str, Sequence[float]], all_stages: Mapping[str, Sequence[float]], *, label: str
) -> None:
    """Draw singular values [S] on a log axis: of the level's centred rows, and of all semantic rows, uncentred."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.2, 2.9), layout="constrained")
        axes = figure.subplots(1, 2)
        titles = (f"{label}, centred", "all semantic levels, uncentred")
        for axis, title, spectrums in zip(axes, titles, (stages, all_stages), strict=True):
            for (name, values), colour in zip(spectrums.items(), STAGE_COLOURS, strict=False):
                positive = np.array([v for v in values if v > 1e-6 * values[0]])  # the rest is rounding
                text = name if len(positive) else f"{name} (all zero)"
                axis.plot(np.arange(1, len(positive) + 1), positive, color=colour, label=text)
            axis.set(title=title, xlabel="index", yscale="log")
            decades = np.log10(np.divide(*axis.get_ylim()[::-1]))
            axis.yaxis.set_major_locator(LogLocator(subs=(1.0,) if decades > 2 else (1.0, 2.0, 5.0)))
            axis.yaxis.set_major_formatter("{x:g}")
            axis.yaxis.set_minor_formatter(NullFormatter())
            axis.grid(axis="y")
        axes[0].set_ylabel("singular value")
        _legend_below(figure, axes[0])
        _save(figure, path)


def rsa(
    path: Path,
    stages: Mapping[str, tuple[np.ndarray, np.ndarray]],
    correlations: Mapping[str, tuple[float | None, float | None]],
) -> None:
    """Draw the cosines of row pairs against those of codebook pairs, and write Pearson r and Spearman rho above."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 2.7), layout="constrained")
        axes = figure.subplots(1, len(stages))
        for axis, (name, (of_rows, of_vectors)) in zip(axes, stages.items(), strict=True):
            r, rho = correlations[name]
            axis.set_title(f"{name}\nr {_number(r)}   ρ {_number(rho)}")
            axis.set_xlabel("cosine in the codebook")
            if r is None:
                _note(axis, "all rows alike")
                continue
            middle, half = of_rows.mean(), max(np.ptp(of_rows) / 2, 0.02)  # rows nearly alike must look it
            low, high = (min(of_rows.min(), middle - half), max(of_rows.max(), middle + half))
            extent = (of_vectors.min(), of_vectors.max(), low, high)
            axis.hexbin(
                of_vectors, of_rows, gridsize=32, bins="log", mincnt=1, cmap="Blues", linewidths=0.1, extent=extent
            )
            axis.locator_params(nbins=4)
        axes[0].set_ylabel("cosine of the rows")
        _save(figure, path)


def purity(
    path: Path, stages: Mapping[str, float | None], *, random: float | None, encoder: float | None, neighbours: int
) -> None:
    """Draw neighbourhood purity by stage, with random neighbours and the encoder's space as lines."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.0, 2.9), layout="constrained")
        axis = figure.subplots()
        for place, ((name, value), colour) in enumerate(zip(stages.items(), STAGE_COLOURS, strict=False)):
            axis.bar(place, value or 0.0, width=0.55, color=colour, label=name)
            _value_above(axis, place, value)
        upper_first = (encoder or 0.0) >= (random or 0.0)  # one label stands above its line, one below
        lines = ((encoder, "-", "codebook vectors", upper_first), (random, "--", "random neighbours", not upper_first))
        for value, style, text, above in lines:
            if value is not None:
                axis.axhline(value, color=INK, linewidth=1.1, linestyle=style)
                axis.annotate(
                    f"{text} {value:.2f}",
                    (1.0, value),
                    xycoords=("axes fraction", "data"),
                    xytext=(4, 1 if above else -1),
                    textcoords="offset points",
                    ha="left",
                    va="bottom" if above else "top",
                    fontsize=8,
                )
        axis.set(ylim=(0, 1.05), ylabel=f"purity of {neighbours} neighbours")
        axis.set_xticks(range(len(stages)), list(stages))
        axis.tick_params(axis="x", length=0)
        axis.grid(axis="y")
        _save(figure, path)


def alignment(
    path: Path, popularity: Mapping[str, Mapping[str, float | None]], semantic: Mapping[str, Mapping[str, float | None]]
) -> None:
    """Draw R2_q by q and stage, popularity beside semantics; each maps a stage to a dict from q to R2."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.2, 2.9), layout="constrained")
        axes = figure.subplots(1, 2, sharey=True)
        for axis, title, panel in zip(axes, ("popularity", "categories"), (popularity, semantic), strict=True):
            depths = list(next(iter(panel.values())))
            for turn, ((name, values), colour) in enumerate(zip(panel.items(), STAGE_COLOURS, strict=False)):
                places = np.arange(len(depths)) + (turn - (len(panel) - 1) / 2) * 0.26
                axis.bar(places, [values[q] or 0.0 for q in depths], width=0.24, color=colour, label=name)
                for place, q in zip(places, depths, strict=True):
                    _value_above(axis, place, values[q], size=6.5)
            axis.set_xticks(range(len(depths)), [f"top {q}" for q in depths])
            axis.tick_params(axis="x", length=0)
            axis.set(title=title, ylim=(0, 1.08))
            axis.grid(axis="y")
        axes[0].set_ylabel("share explained, R²")
        _legend_below(figure, axes[0])
        _save(figure, path)


def row_map(
    path: Path, stages: Mapping[str, np.ndarray], categories: Sequence[str | None], popularity_K: np.ndarray
) -> None:
    """Draw rows on their two principal directions [K, 2]: colour is the category, area the popularity of the code."""
    colours, legend = _category_colours(categories)
    areas = 6 + 70 * popularity_K / max(popularity_K.max(), 1e-12)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.2, 3.6), layout="constrained")
        axes = figure.subplots(1, len(stages))
        for axis, (name, plane_K2) in zip(axes, stages.items(), strict=True):
            axis.set(title=name, xlabel="first principal direction")
            if not plane_K2.any():
                _note(axis, "all rows alike")
                continue
            order = np.argsort(-areas, kind="stable")  # small ones stay visible on top
            axis.scatter(
                *plane_K2[order].T,
                s=areas[order],
                c=[colours[k] for k in order],
                alpha=0.8,
                edgecolors="white",
                linewidths=0.4,
            )
            axis.locator_params(nbins=4)
            axis.grid()
        axes[0].set_ylabel("second principal direction")
        handles = [axes[0].scatter([], [], s=30, c=colour, label=_clean(name)) for name, colour in legend.items()]
        if handles:
            figure.legend(handles=handles, loc="outside lower center", ncols=3, columnspacing=1.2, handletextpad=0.3)
        _save(figure, path)


def code_popularity(
    path: Path, totals_K: np.ndarray, items_K: np.ndarray, explained: Mapping[int, float | None], *, label: str
) -> None:
    """Draw, over codes sorted by value, log(1 + n_k) and log(1 + n_k / items), and EV_rho beside (Centroid, fig. 9)."""
    filled = items_K > 0
    curves = {
        "training targets\nper code": np.log1p(totals_K),
        "training targets\nper item of a code": np.log1p(totals_K[filled] / items_K[filled]),
    }
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 2.9), layout="constrained")
        axes = figure.subplots(1, 3)
        for axis, (title, values), ylabel in zip(
            axes, curves.items(), ("log(1 + n)", "log(1 + n / items)"), strict=False
        ):
            axis.plot(np.arange(1, len(values) + 1), np.sort(values)[::-1], color=STAGE_COLOURS[1])
            axis.fill_between(
                np.arange(1, len(values) + 1), np.sort(values)[::-1], color=STAGE_COLOURS[1], alpha=0.12, linewidth=0
            )
            axis.set(title=title, xlabel=f"{label} codes, sorted", ylabel=ylabel)
            axis.set_ylim(bottom=0)
            axis.grid(axis="y")
        axes[2].bar(range(len(explained)), [v or 0.0 for v in explained.values()], width=0.55, color=STAGE_COLOURS[1])
        for place, value in enumerate(explained.values()):
            _value_above(axes[2], place, value)
        axes[2].set_xticks(range(len(explained)), [str(rho) for rho in explained])
        axes[2].set(title="item popularity explained\nby a SID prefix", xlabel="codes in the prefix", ylabel="EV")
        axes[2].set_ylim(0, 1.08)
        axes[2].grid(axis="y")
        _save(figure, path)


def popularity_axis(
    path: Path,
    stages: Mapping[str, np.ndarray],
    totals_K: np.ndarray,
    correlations: Mapping[str, tuple[float | None, float | None]],
) -> None:
    """Draw each row's projection on the popularity axis [K] against its code's training targets, with r and rho."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.4, 2.7), layout="constrained")
        axes = figure.subplots(1, len(stages))
        for axis, (name, projection_K), colour in zip(axes, stages.items(), STAGE_COLOURS, strict=False):
            r, rho = correlations[name]
            axis.set(title=f"{name}\nr {_number(r)}   ρ {_number(rho)}", xlabel="training targets, n")
            if r is None:
                _note(axis, "all rows alike")
                continue
            axis.scatter(totals_K, projection_K, s=9, color=colour, alpha=0.65, edgecolors="none")
            axis.set_xscale("symlog", linthresh=10)
            axis.xaxis.set_major_formatter("{x:g}")
            axis.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
            axis.locator_params(axis="y", nbins=4)
            axis.grid()
        axes[0].set_ylabel("projection on the axis")
        _save(figure, path)


def text_cosines(path: Path, stages: Mapping[str, np.ndarray]) -> None:
    """Draw the distribution of the cosines of new rows with text rows, one outline a stage; matrices are [K, M]."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.0, 2.8), layout="constrained")
        axis = figure.subplots()
        values = [np.asarray(matrix, np.float64).ravel() for matrix in stages.values()]
        edges = np.linspace(min(v.min() for v in values) - 0.01, max(v.max() for v in values) + 0.01, 81)
        for name, cosines, colour in zip(stages, values, STAGE_COLOURS, strict=False):
            heights = np.histogram(cosines, edges)[0] / len(cosines)
            axis.stairs(heights, edges, color=colour, label=name, linewidth=1.6)
            axis.stairs(heights, edges, color=colour, fill=True, alpha=0.12)
        axis.set(xlabel="cosine of a new row with a text row", ylabel="share of pairs")
        axis.set_ylim(bottom=0)
        axis.grid(axis="y")
        _legend_below(figure, axis)
        _save(figure, path)


def category_order(categories: Sequence[str | None]) -> tuple[np.ndarray, list[int]]:
    """Order codes so that those of a category stand together: the order [K], and where each block but the last ends.

    Large categories come first, ties alphabetical, codes without a category last.
    """
    sizes = Counter(c for c in categories if c is not None)
    key = {c: (-n, c) for c, n in sizes.items()}
    order = sorted(range(len(categories)), key=lambda k: (categories[k] is None, key.get(categories[k] or "", (0, ""))))
    ends = [i for i, (a, b) in enumerate(pairwise(order), 1) if categories[a] != categories[b]]
    return np.array(order, dtype=np.int64), ends


def _category_colours(categories: Sequence[str | None]) -> tuple[list[str], dict[str, str]]:
    """A colour for each code, and the legend: the largest categories by name, the rest in grey."""
    sizes = Counter(c for c in categories if c is not None)
    largest = sorted(sizes, key=lambda c: (-sizes[c], c))[: len(CATEGORY_COLOURS)]
    legend: dict[str, str] = dict(zip(largest, CATEGORY_COLOURS, strict=False))
    colours = [legend.get(c or "", REST_COLOUR) for c in categories]
    if sizes and REST_COLOUR in colours:
        legend["other categories" if len(sizes) > len(largest) else "no category"] = REST_COLOUR
    return colours, legend


def _colour_range(matrices: list[np.ndarray]) -> tuple[float, float]:
    """One scale for all panels: the middle 99 % of the cosines off the diagonal, over the panels with any spread.

    Panels in which all rows are alike would stretch it until the others lose their contrast; they saturate.
    """
    off_diagonal = [m[~np.eye(len(m), dtype=bool)] for m in matrices if len(m) > 1]
    spread = [v for v in off_diagonal if np.ptp(v) > 1e-3]
    if not spread:
        return -1.0, 1.0
    return min(float(np.quantile(v, 0.005)) for v in spread), max(float(np.quantile(v, 0.995)) for v in spread)


def _value_above(axis: Any, place: float, value: float | None, size: float = 8) -> None:
    """Write a bar's value above it, or that there is none; on white, so that a line behind does not cross it."""
    text = "n/a" if value is None else f"{value:.2f}"
    axis.annotate(
        text,
        (place, value or 0.0),
        xytext=(0, 3),
        textcoords="offset points",
        ha="center",
        fontsize=size,
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.2, "alpha": 0.8},
        zorder=5,
    )


def _note(axis: Any, text: str) -> None:
    axis.text(0.5, 0.5, text, transform=axis.transAxes, ha="center", va="center", color="#57606A")
    axis.set(xticks=[], yticks=[])


def _legend_below(figure: Figure, axis: Any) -> None:
    handles, labels = axis.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)


def _number(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.2f}".replace("-", "−")


def _clean(text: str, longest: int = 26) -> str:
    """A name on one line: no control characters, cut with an ellipsis, dollar signs not read as mathematics."""
    line = " ".join("".join(c if c.isprintable() else " " for c in text).split())
    return (line if len(line) <= longest else line[: longest - 1] + "…").replace("$", r"\$")


def _save(figure: Figure, path: Path) -> None:
    """Write a PNG of 64 colours (a quarter of the size), without a date, so that equal data gives equal bytes."""
    canvas = FigureCanvasAgg(figure)
    figure.set_dpi(160)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")  # drawn as a box
        canvas.draw()
    image = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    image.quantize(64, dither=Image.Dither.NONE).save(path, optimize=True)
