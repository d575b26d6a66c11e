"""Plots: every figure is drawn from ordinary and from degenerate data."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from sidgraft import geometry, plots

STAGES = ("initialization", "grounding", "fine-tuning")
HOSTILE = ["$\\frac{1}{$", "a\nb\x00c", "x" * 500, "<b>&amp;</b>", "🧴 صابون", "", None, "Plain"]


@pytest.fixture
def rows() -> dict[str, np.ndarray]:
    """Rows of 24 codes: all alike, scattered, and spread along an axis."""
    rng = np.random.default_rng(0)
    scattered = rng.normal(size=(24, 8)) + 1
    return dict(zip(STAGES, (np.ones((24, 8)), scattered, scattered + np.arange(24)[:, None]), strict=True))


def _draw_all(folder: Path, rows: dict[str, np.ndarray]) -> None:
    vectors, totals = rows["grounding"] * 2, np.arange(24.0) ** 2
    categories = (HOSTILE * 3)[:24]
    cosines = {name: geometry.cosine_matrix(x, x) for name, x in rows.items()}
    order, bounds = plots.category_order(categories)
    grouped = {name: matrix[np.ix_(order, order)] for name, matrix in cosines.items()}
    plots.cosine_matrices(folder / "cosine.png", grouped, cosines, label="level 0", bounds=bounds, all_bounds=[8, 16])
    spectra = {name: geometry.singular_values(geometry.centred(x)).tolist() for name, x in rows.items()}
    plots.spectra(folder / "spectra.png", spectra, spectra, label="level 0")
    plots.rsa(
        folder / "rsa.png",
        {name: geometry.pair_cosines(x, vectors) for name, x in rows.items()},
        {name: geometry.rsa(x, vectors) for name, x in rows.items()},
    )
    purities = dict(zip(STAGES, (None, 0.3, 0.9), strict=True))
    plots.purity(folder / "purity.png", purities, random=0.2, encoder=0.21, neighbours=10)
    plots.purity(folder / "purity_none.png", dict.fromkeys(STAGES), random=None, encoder=None, neighbours=10)
    r2 = {name: {"1": value, "3": value} for name, value in purities.items()}
    plots.alignment(folder / "alignment.png", r2, r2)
    planes = {name: geometry.principal_plane(rows[name]) for name in (STAGES[0], STAGES[2])}
    plots.row_map(folder / "map.png", planes, categories, totals)
    plots.row_map(folder / "map_none.png", planes, [None] * 24, np.zeros(24))
    plots.code_popularity(folder / "popularity.png", totals, totals % 3, {1: 0.1, 2: None}, label="level-0")
    projections = {name: geometry.axis_projection(x, np.ones(8)) for name, x in rows.items()}
    correlations = {
        name: (geometry.pearson(p, totals), geometry.spearman(p, totals)) for name, p in projections.items()
    }
    plots.popularity_axis(folder / "axis.png", projections, totals, correlations)
    plots.text_cosines(folder / "text.png", cosines)


def test_every_figure_is_drawn(tmp_path, rows, recwarn):
    _draw_all(tmp_path, rows)
    files = sorted(tmp_path.iterdir())
    assert len(files) == 11
    for file in files:
        with Image.open(file) as image:
            assert image.format == "PNG"
            assert 900 < image.width < 1100
            low, high = image.convert("L").getextrema()
            assert (low < 100, high > 250) == (True, True)  # ink on white
    assert not [w for w in recwarn if issubclass(w.category, UserWarning)]


def test_equal_data_gives_equal_bytes(tmp_path, rows):
    planes = {name: rows[name][:, :2] for name in STAGES[1:]}
    for name in ("first.png", "second.png"):
        plots.row_map(tmp_path / name, planes, (HOSTILE * 3)[:24], np.arange(24.0))
    assert (tmp_path / "first.png").read_bytes() == (tmp_path / "second.png").read_bytes()


def test_category_order_puts_large_categories_first_and_none_last():
    order, ends = plots.category_order(["b", None, "a", "b", "c", None])
    assert order.tolist() == [0, 3, 2, 4, 1, 5]
    assert ends == [2, 3, 4]
    order, ends = plots.category_order([None, None])
    assert (order.tolist(), ends) == ([0, 1], [])


def test_category_colours_name_the_largest():
    names = [name for i, name in enumerate("abcdefghi") for _ in range(10 - i)]
    colours, legend = plots._category_colours([*names, None])
    assert list(legend) == [*"abcdefg", "other categories"]
    assert colours[0] == legend["a"]
    assert colours[-1] == plots.REST_COLOUR


def test_colour_range_ignores_panels_without_spread():
    flat, spread = np.ones((4, 4)), np.linspace(-0.5, 0.5, 16).reshape(4, 4)
    low, high = plots._colour_range([flat, spread])
    assert -0.5 < low < high < 0.5
    assert plots._colour_range([flat]) == (-1.0, 1.0)
