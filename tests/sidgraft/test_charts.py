"""Line charts: ticks, positions, marks, escaping."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from sidgraft.charts import BOTTOM, HEIGHT, LEFT, RIGHT, TOP, WIDTH, Series, line_chart, thin, ticks


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 8, [0, 2, 4, 6, 8]), (0.012, 0.058, [0, 0.02, 0.04, 0.06]), (-1, 1, [-1, -0.5, 0, 0.5, 1])],
)
def test_ticks(low: float, high: float, expected: list[float]) -> None:
    assert ticks(low, high, 4) == pytest.approx(expected)


@pytest.mark.parametrize("value", [0.0, 5.0, -2.0])
def test_ticks_of_one_value_surround_it(value: float) -> None:
    found = ticks(value, value, 4)
    assert found[0] <= value <= found[-1]
    assert len(set(found)) > 1


def test_points_are_where_the_axes_say() -> None:
    svg = line_chart([Series("loss", [(0, 0), (50, 4), (100, 8)])], x_label="step", y_label="loss")
    root = ElementTree.fromstring(svg)
    points = [tuple(map(float, p.split(","))) for p in root.find("polyline").attrib["points"].split()]  # type: ignore
    middle = ((LEFT + WIDTH - RIGHT) / 2, (TOP + HEIGHT - BOTTOM) / 2)
    assert points == [(LEFT, HEIGHT - BOTTOM), middle, (WIDTH - RIGHT, TOP)]


def test_mark_and_names() -> None:
    svg = line_chart([Series('<b>"x"', [(0, 1), (9, 2)], 1, (9, 2))], x_label="step", y_label="loss")
    root = ElementTree.fromstring(svg)
    assert root.find("circle[@class='mark']/title").text == '<b>"x": t* = 9'  # type: ignore[union-attr]
    assert "<b>" not in svg


def test_nothing_to_draw() -> None:
    assert line_chart([Series("none", [])], x_label="step", y_label="loss") == ""
    one = line_chart([Series("one", [(3, 3)])], x_label="step", y_label="loss")
    assert not re.search("nan|inf", one)


def test_thin_keeps_both_ends() -> None:
    points = [(float(i), 0.0) for i in range(1001)]
    kept = thin(points, 300)
    assert len(kept) == 300
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    assert thin(points[:300], 300) == points[:300]
