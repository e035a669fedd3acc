"""Figures of the studies: what is drawn is what was found."""

from typing import Any

import pytest

from vitrail.report.figure_style import DARK, LIGHT, encode_figure
from vitrail.studies.plots import DotColumn, Panel, SeedDot, SeedLine, pick_colours, plot_dots, plot_lines
from vitrail.studies.statistics import Spread

LINE = SeedLine(
    name="ViT, first",
    family="ViT",
    points=[(10, Spread((0.5, 0.7))), (1, Spread((0.2, 0.4))), (100, Spread((0.9,)))],
)


def bars_of(axes: Any) -> list[list[float]]:
    return [[float(at) for at in segment[:, 1]] for bar in axes.containers for segment in bar[2][0].get_segments()]


def test_heights_and_bars_are_those_of_the_seeds() -> None:
    axes = plot_lines([Panel(lines=[LINE], along="x", up="y", log=True)]).axes[0]
    line = axes.containers[0][0]
    assert line.get_xdata().tolist() == [1, 10, 100]
    assert line.get_ydata().tolist() == pytest.approx([30, 60, 90])
    deviation = 100 * 0.1 * 2**0.5
    assert bars_of(axes)[0] == pytest.approx([30 - deviation, 30 + deviation])
    assert bars_of(axes)[2] == pytest.approx([90, 90])
    assert axes.get_xscale() == "log"


def test_a_single_seed_has_no_bars() -> None:
    single = SeedLine(name="a", points=[(1, Spread((0.5,))), (2, Spread((0.6,)))])
    assert plot_lines([Panel(lines=[single], along="x", up="y")]).axes[0].containers[0][2] == ()


def test_panels_share_one_key() -> None:
    figure = plot_lines([Panel(lines=[LINE], along="x", up="y"), Panel(lines=[LINE], along="x", up="z")])
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["ViT, first"]
    assert all(axes.get_legend() is None for axes in figure.axes)


def test_ticks_are_named() -> None:
    axes = plot_lines([Panel(lines=[LINE], along="x", up="y", log=True, ticks={1.0: "1 %", 100.0: "all"})]).axes[0]
    assert [text.get_text() for text in axes.get_xticklabels()] == ["1 %", "all"]


def test_nothing_to_draw_is_an_empty_figure() -> None:
    assert encode_figure(plot_lines([Panel(lines=[], along="x", up="y")]), LIGHT, "png")
    assert encode_figure(
        plot_lines([Panel(lines=[SeedLine(name="a", points=[])], along="x", up="y", log=True)]), LIGHT, "png"
    )
    assert encode_figure(plot_dots([DotColumn(dots=[], along="x")]), LIGHT, "png")


def test_dots_stand_under_each_other_in_their_order() -> None:
    dots = [
        SeedDot(name="none", value=Spread((0.5, 0.6))),
        SeedDot(name="learned", value=None),
        SeedDot(name="c", value=Spread((0.7,))),
    ]
    axes = plot_dots([DotColumn(dots=dots, along="x")]).axes[0]
    assert [text.get_text() for text in axes.get_yticklabels()] == ["none", "learned", "c"]
    places = [(float(bar[0].get_xdata()[0]), float(bar[0].get_ydata()[0])) for bar in axes.containers]
    assert places == [(pytest.approx(55.0), 0.0), (pytest.approx(70.0), 2.0)]
    low, high = axes.get_ylim()
    assert low > high  # the first on top


def test_a_family_has_one_colour_everywhere() -> None:
    for theme in (LIGHT, DARK):
        shades = pick_colours(["other", "BiT", "ViT", "another", "ViT"], theme)
        assert (shades["ViT"], shades["BiT"]) == (theme.cobalt, theme.ruby)
        assert len(set(shades.values())) == 4
    many = pick_colours([str(at) for at in range(20)], LIGHT)
    assert len(many) == 20
