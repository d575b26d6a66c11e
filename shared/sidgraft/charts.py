"""Charts: line charts as inline SVG, drawn in the page's own colours, without a script."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from html import escape

from markupsafe import Markup

WIDTH, HEIGHT = 360, 220
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 12, 34  # margins around the plotting area
COLOURS = 8  # the style sheet defines --series-0 .. --series-7
MOST_POINTS = 300

Place = Callable[[float, float], tuple[float, float]]  # from the data's coordinates to the picture's


@dataclass(frozen=True)
class Series:
    """One line: its points in order of x, its colour by number, and the point to mark, if any."""

    name: str
    points: list[tuple[float, float]]
    colour: int = 0
    mark: tuple[float, float] | None = None


def line_chart(series: list[Series], *, x_label: str, y_label: str, from_zero: bool = False) -> Markup:
    """Draw lines over one pair of axes, y from zero if asked; a series' mark is a ring and a vertical rule.

    Of a line with more than 300 points, evenly spaced ones are drawn. Colours repeat after eight, then dashed.
    Returns empty markup where there is nothing to draw.
    """
    series = [s for s in series if s.points]
    if not series:
        return Markup("")
    xs = [x for s in series for x, _ in s.points]
    ys = [y for s in series for _, y in s.points] + ([0.0] if from_zero else [])
    x_ticks, y_ticks = ticks(min(xs), max(xs), 4), ticks(min(ys), max(ys), 4)
    x_range = (min(xs), max(xs)) if max(xs) > min(xs) else (x_ticks[0], x_ticks[-1])
    y_range = (min(y_ticks[0], *ys), max(y_ticks[-1], *ys))

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - x_range[0]) / (x_range[1] - x_range[0])
        up = (y - y_range[0]) / (y_range[1] - y_range[0])
        return LEFT + across * (WIDTH - LEFT - RIGHT), HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM)

    parts = [_axes(x_ticks, y_ticks, x_range, at, x_label)]
    parts += [_line(s, at) for s in series]
    parts += [_mark(s, at) for s in series if s.mark]
    label = escape(f"{y_label} against {x_label}: {', '.join(s.name for s in series)}")
    return Markup(
        f'<svg class="chart" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">{"".join(parts)}</svg>'
    )


def ticks(low: float, high: float, about: int) -> list[float]:
    """Return round numbers (1, 2 or 5 times a power of ten apart) from at most ``low`` to at least ``high``."""
    if high <= low:
        half = abs(low) / 2 or 0.5
        low, high = low - half, high + half
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [i * step for i in range(first, last + 1)]


def _axes(x_ticks: list[float], y_ticks: list[float], x_range: tuple[float, float], at: Place, x_label: str) -> str:
    bottom = HEIGHT - BOTTOM
    parts = []
    for y in y_ticks:
        _, row = at(x_range[0], y)
        parts.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{row:.1f}" y2="{row:.1f}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{row + 3.5:.1f}" text-anchor="end">{_tick(y)}</text>')
    for x in x_ticks:
        if x_range[0] <= x <= x_range[1]:
            column, _ = at(x, y_ticks[0])
            parts.append(f'<text x="{column:.1f}" y="{bottom + 14}" text-anchor="middle">{_tick(x)}</text>')
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 4}" text-anchor="middle">{escape(x_label)}</text>')
    parts.append(f'<line class="axis" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    return "".join(parts)


def _line(series: Series, at: Place) -> str:
    points = thin(series.points, MOST_POINTS)
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in points))
    style = f"stroke:var(--series-{series.colour % COLOURS})"
    if series.colour >= COLOURS:
        style += ";stroke-dasharray:5 3"
    line = f'<polyline points="{path}" style="{style}"><title>{escape(series.name)}</title></polyline>'
    if len(points) > 30:
        return line
    fill = f"fill:var(--series-{series.colour % COLOURS})"
    dots = (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.2" style="{fill}"/>' for x, y in (at(*p) for p in points))
    return line + "".join(dots)


def _mark(series: Series, at: Place) -> str:
    assert series.mark is not None
    x, y = at(*series.mark)
    stroke = f"stroke:var(--series-{series.colour % COLOURS})"
    return (
        f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" style="{stroke}"/>'
        f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="5" style="{stroke}">'
        f"<title>{escape(series.name)}: t* = {_tick(series.mark[0])}</title></circle>"
    )


def thin(points: list[tuple[float, float]], most: int) -> list[tuple[float, float]]:
    """Return at most ``most`` of the points, evenly spaced, the first and the last among them."""
    if len(points) <= most:
        return points
    return [points[round(i * (len(points) - 1) / (most - 1))] for i in range(most)]


def _tick(value: float) -> str:
    if value and abs(value) < 1e-3:
        return f"{value:.0e}"
    if abs(value) >= 10000:
        return f"{value / 1000:.4g}k"
    return f"{value:.4g}"
