"""Charts show what they were given: places, ticks, gaps and extremes; and they stay inside the page's policy."""

import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from vitrail.core.errors import ConfigError
from vitrail.report.axis import (
    fit_axis,
    format_share,
    format_short,
    format_ticks,
    round_steps,
    smooth_values,
    thin_points,
)
from vitrail.report.charts import Charts, LineChart, Series, move_apart, to_svg_path
from vitrail.report.confusion_matrix import ConfusionSection
from vitrail.report.page import Section, render_page
from vitrail.report.sections import (
    DetailsSection,
    Facts,
    Galleries,
    Gallery,
    Shot,
    Status,
    Tile,
    Tiles,
    make_shot,
)

WICKED = '<script>alert("1")</script>"\' onerror=x {{ 7 * 7 }} &amp;'


def line(y: list[float], **more: object) -> Series:
    return Series(name="a", x=np.arange(len(y), dtype=np.float64), y=np.array(y), **more)


# Ticks and texts


@pytest.mark.parametrize(
    ("low", "high", "about", "expected"),
    [
        (0, 1, 5, [0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0, 2.3, 5, [0, 0.5, 1.0, 1.5, 2.0]),
        (0, 12345, 4, [0, 5000, 10000]),
        (-3, 3, 5, [-2, 0, 2]),
        (0.93, 0.985, 5, [0.94, 0.96, 0.98]),
    ],
)
def test_ticks_are_round_and_inside(low: float, high: float, about: int, expected: list[float]) -> None:
    assert round_steps(low, high, about) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([0, 0.5, 1.0], ["0.0", "0.5", "1.0"]),
        ([0, 500, 1000], ["0", "500", "1,000"]),
        ([0, 5000, 10000], ["0", "5,000", "10k"]),
        ([0, 2e-4, 4e-4], ["0", "2e-4", "4e-4"]),
        ([0, 2.5e6], ["0", "2.5M"]),
    ],
)
def test_ticks_are_written_in_one_style(values: list[float], expected: list[str]) -> None:
    assert format_ticks(values) == expected


def test_shares_are_written_in_per_cent() -> None:
    assert format_ticks([0, 0.2, 1.0], percent=True) == ["0%", "20%", "100%"]
    assert format_ticks([0.975, 0.98], percent=True) == ["97.5%", "98.0%"]
    assert (format_share(0.98339), format_share(1.0), format_share(0.0), format_share(0.99999)) == (
        "98.34%",
        "100%",
        "0%",
        "100.00%",
    )


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, "0"),
        (0.0312, "0.031"),
        (3e-4, "3e-4"),
        (1.25e-7, "1.2e-7"),
        (2.305, "2.31"),
        (41.26, "41.3"),
        (987.6, "988"),
        (999.7, "1,000"),
        (2472.3, "2,472"),
        (12345, "12.3k"),
        (999999, "1M"),
        (1.2812e6, "1.28M"),
        (3.03e8, "303M"),
        (1e15, "1e15"),
        (-0.5, "-0.5"),
        (math.inf, "∞"),
        (math.nan, "not a number"),
    ],
)
def test_numbers_are_short(value: float, expected: str) -> None:
    assert format_short(value) == expected


def test_an_axis_holds_all_values_and_ends_round() -> None:
    axis = fit_axis([np.array([0.3, 2.31]), np.array([math.nan, math.inf, 0.9])])
    assert (axis.low, axis.high) == (0.0, 2.5)
    narrow = fit_axis([np.array([0.931, 0.984])], percent=True)
    assert (narrow.low, narrow.high) == pytest.approx((0.92, 1.0))
    assert fit_axis([np.array([0.2, 1.0])], percent=True).high == 1.0


@pytest.mark.parametrize("values", [[], [math.nan], [0.0], [5.0, 5.0], [-2.0], [1e-30], [1e300, -1e300]])
def test_an_axis_can_be_made_of_anything(values: list[float]) -> None:
    for log in (False, True, None):
        axis = fit_axis([np.array(values)], log=log)
        assert axis.low < axis.high
        assert axis.ticks()
        known = [value for value in values if math.isfinite(value) and (not axis.log or value > 0)]
        assert all(-1e-9 <= place <= 1 + 1e-9 for place in axis.place(np.array(known)).tolist())


def test_a_logarithmic_axis_is_taken_where_it_shows_more() -> None:
    assert fit_axis([np.array([2.3, 0.01])], log=None).log
    assert not fit_axis([np.array([2.3, 0.9])], log=None).log
    assert not fit_axis([np.array([2.3, 0.01, -1.0])], log=None).log  # has no place for what is below zero
    axis = fit_axis([np.array([0.013, 2.3])], log=True)
    assert [tick.text for tick in axis.ticks()] == ["0.01", "0.03", "0.1", "0.3", "1", "3"]
    assert axis.place(np.array([0.01, 0.1, 1.0])).tolist() == pytest.approx(
        [0.0, 1 / math.log10(500), 2 / math.log10(500)]
    )
    assert math.isnan(axis.place(np.array([0.0]))[0])
    many = fit_axis([np.array([1e-9, 1e9])], log=True)
    assert 3 <= len(many.ticks()) <= 6


# Curves


def test_thinning_keeps_the_ends_and_every_spike() -> None:
    rng = np.random.default_rng(0)
    x, y = np.arange(30_000.0), rng.normal(size=30_000)
    y[17_123], y[4_001] = 99.0, -99.0
    few_x, few_y = thin_points(x, y)
    assert len(few_x) <= 400
    assert {0.0, 29_999.0, 17_123.0, 4_001.0} <= set(few_x.tolist())
    assert (np.diff(few_x) > 0).all()
    np.testing.assert_array_equal(few_y, y[few_x.astype(int)])


def test_thinning_leaves_short_curves_alone_and_long_gaps_open() -> None:
    x = np.arange(300.0)
    assert thin_points(x, x)[0] is x
    x, y = np.arange(10_000.0), np.ones(10_000)
    y[4000:6000] = math.nan
    few_x, few_y = thin_points(x, y)
    inside = few_y[(few_x >= 4000) & (few_x < 6000)]
    assert len(inside)
    assert np.isnan(inside).all()
    assert np.isfinite(few_y[few_x < 4000]).all()


def test_a_mean_does_not_move_a_straight_line_nor_reach_over_a_gap() -> None:
    straight = np.arange(100.0)
    np.testing.assert_allclose(smooth_values(straight, 9), straight)
    y = np.array([1.0, 3.0, math.nan, 3.0, 1.0])
    np.testing.assert_allclose(smooth_values(y, 3), [1.0, 2.0, math.nan, 2.0, 1.0])
    assert smooth_values(y, 1) is y


def test_a_path_goes_through_the_points_and_stops_at_gaps() -> None:
    x, y = np.array([0.0, 0.25, 0.5, 0.75, 1.0]), np.array([1.0, 0.5, math.nan, 0.25, 0.0])
    assert to_svg_path(x, y) == "M0 1000L250 500M750 250L1000 0"
    assert to_svg_path(x[:2], y[:2], closed=True) == "M0 1000L0 1000L250 500L250 1000Z"
    assert to_svg_path(x[:1], y[:1]) == "M0 1000h1"
    assert to_svg_path(x[2:3], y[2:3]) == ""


def test_a_chart_puts_values_where_they_belong() -> None:
    chart = LineChart(title="Loss", series=[line([2.0, 1.0, 0.0], dots=True)])
    assert (chart.up.low, chart.up.high) == (0.0, 2.0)
    (curve,) = chart.curves
    assert curve.line == "M0 0L500 500L1000 1000"
    assert [(dot.left, dot.top) for dot in curve.dots] == [(0, 0), (50, 50), (100, 100)]
    assert curve.dots[1].text == "step 1: 1"
    assert [(end.left, end.top, end.text) for end in chart.ends] == [(100.0, 208.0, "0")]
    assert [tick.at for tick in chart.left_ticks] == pytest.approx([100, 75, 50, 25, 0])


def test_the_axis_goes_on_to_the_end_of_the_run() -> None:
    chart = LineChart(title="Loss", series=[line([2.0, 1.0])], end=10.0)
    assert chart.across.high == 10.0
    assert chart.curves[0].line == "M0 0L100 1000"
    assert chart.ends[0].left == pytest.approx(10.0)


@pytest.mark.parametrize(("last", "expected"), [(1, ["0", "1"]), (9, ["0", "5"]), (12_000, ["0", "5,000", "10k"])])
def test_steps_are_counted_from_nought_in_whole_ones(last: float, expected: list[str]) -> None:
    chart = LineChart(title="Loss", series=[Series(name="a", x=np.array([last / 2, last]), y=np.array([2.0, 1.0]))])
    assert [tick.text for tick in chart.bottom_ticks] == expected
    assert chart.across.low == 0


def test_tinted_glass_stands_on_zero() -> None:
    assert LineChart(title="", series=[line([95.0, 100.0])]).up.low > 0
    tinted = LineChart(title="", series=[line([95.0, 100.0], area=True)])
    assert tinted.up.low == 0
    assert tinted.curves[0].area.endswith("L1000 1000Z")


def test_faint_curves_have_no_name_and_lie_behind() -> None:
    chart = LineChart(
        title="", series=[line([1.0, 2.0]), line([5.0, 0.0], faint=True), line([1.0, 1.0], colour="ruby")]
    )
    assert [curve.faint for curve in chart.curves] == [True, False, False]
    assert len(chart.ends) == len(chart.keys) == 2
    assert LineChart(title="", series=[line([1.0, 2.0])]).keys == []


def test_last_values_do_not_cover_each_other() -> None:
    assert move_apart([10, 12, 100], 15, 200) == [10, 25, 100]
    assert move_apart([190, 195, 199], 15, 200) == [170, 185, 200]
    assert move_apart([], 15, 200) == []
    chart = LineChart(title="", series=[line([0, 1.0 + at / 1000]) for at in range(4)])
    tops = [end.top for end in chart.ends]
    assert min(np.diff(tops)) == pytest.approx(15)
    assert [end.text for end in chart.ends] == ["1", "1", "1", "1"]


def test_nothing_to_draw_is_said() -> None:
    chart = LineChart(title="Loss", series=[line([math.nan, math.nan]), line([])])
    assert chart.thin == []
    assert "nothing yet" in render_page("a", [Charts(charts=[chart])])


# The confusion matrix


def matrix(classes: int) -> NDArray[np.int64]:
    counts = np.diag(np.full(classes, 10))
    counts[0, 1], counts[1, 0] = 3, 1
    return counts


def test_a_matrix_is_drawn_cell_by_cell() -> None:
    heat = ConfusionSection(counts=matrix(3), classes=("a", "b", "c"))
    assert heat.is_drawn
    assert {number.text for number in heat.numbers} == {"10", "3", "1"}
    assert len(heat.numbers) == 5
    assert sum(shade.path.count("M") for shade in heat.shades if shade.right) == 3
    assert sum(shade.path.count("M") for shade in heat.shades if not shade.right) == 2
    wrong = {shade.strength for shade in heat.shades if not shade.right}
    assert len(wrong) == 2
    assert max(wrong) < min(shade.strength for shade in heat.shades if shade.right)
    assert [(pair.truth, pair.said, pair.count) for pair in heat.pairs] == [("a", "b", 3), ("b", "a", 1)]
    assert heat.pairs[0].share == pytest.approx(3 / 13)
    assert [(one.name, one.right, one.count) for one in heat.hardest] == [("a", 10, 13), ("b", 10, 11)]


def test_a_cell_lies_in_the_row_of_its_true_class() -> None:
    counts = np.zeros((3, 3), np.int64)
    counts[2, 1] = 4
    heat = ConfusionSection(counts=counts, classes=("a", "b", "c"))
    (shade,) = heat.shades
    assert shade.path.startswith(f"M{heat.cell} {2 * heat.cell}h")
    assert (heat.numbers[0].x, heat.numbers[0].y) == (1.5 * heat.cell - 1, 2.5 * heat.cell - 1)


@pytest.mark.parametrize("classes", [1, 2, 10, 17, 41, 100, 101, 1000])
def test_any_number_of_classes_makes_a_page(classes: int) -> None:
    counts = matrix(classes) if classes > 1 else np.array([[3]])
    text = render_page(
        "a", [ConfusionSection(title="Confusion", counts=counts, classes=[f"class {at}" for at in range(classes)])]
    )
    assert ('role="img"' in text) == (classes <= 100)
    assert ("Most often confused" in text) == (classes > 1)
    assert len(text) < 200_000


def test_full_matrices_stay_small() -> None:
    counts = np.random.default_rng(0).integers(1, 9, (100, 100))
    assert len(render_page("a", [ConfusionSection(counts=counts, classes=[str(at) for at in range(100)])])) < 250_000


def test_names_must_fit_the_matrix() -> None:
    with pytest.raises(ConfigError, match="does not fit 2 classes"):
        ConfusionSection(counts=matrix(3), classes=("a", "b"))


# The page


class Elements(HTMLParser):
    """Tags with their attributes, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in {"meta", "img", "line", "path", "rect"}:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def everything(name: str) -> str:
    chart = LineChart(title=name, unit=name, along=name, note=name, series=[line([1, 2], dots=True), line([2, 1])])
    sections: list[Section] = [
        Status(state="running", text=name, lines=[name], asks=name, command=name, progress=0.5),
        Tiles(title=name, tiles=[Tile(value=name, label=name, note=name)]),
        Charts(title=name, charts=[chart], small=True),
        ConfusionSection(title=name, counts=matrix(2), classes=(name, name)),
        ConfusionSection(title=name, counts=matrix(2), classes=("a", "b")),
        Galleries(
            galleries=[
                Gallery(
                    title=name,
                    lead=name,
                    shots=[
                        make_shot(Image.new("L", (8, 8)), f"{name}\n{name}", mood="wrong"),
                        make_shot(np.zeros((4, 5, 3), np.uint8), name),
                        Shot(picture="", caption=name),
                    ],
                )
            ]
        ),
        Facts(title=name, rows=[(name, name)]),
        DetailsSection(title=name, hint=name, groups=[Facts(title=name, rows=[(name, name)])]),
    ]
    return render_page(name, sections)


def test_markup_in_names_is_shown_and_not_obeyed() -> None:
    plain, wicked = Elements(everything("plain")), Elements(everything(WICKED))
    assert [tag for tag, _ in plain.tags] == [tag for tag, _ in wicked.tags]
    assert {key for _, attrs in wicked.tags for key in attrs} == {key for _, attrs in plain.tags for key in attrs}
    assert sum(WICKED in text for text in wicked.text) >= 25


def test_charts_keep_to_the_policy_of_the_page() -> None:
    elements = Elements(everything("a"))
    assert not elements.open
    for tag, attrs in elements.tags:
        assert tag not in {"script", "link", "iframe", "object", "base", "form", "image", "use", "foreignobject"}
        assert not {key for key in attrs if key == "style" or key.startswith("on") or "href" in key}
        assert (attrs.get("src") or "data:").startswith("data:")
        assert "url(" not in "".join(value or "" for key, value in attrs.items() if key != "content")


def test_charts_are_sound_xml() -> None:
    text = render_page("a", [Charts(charts=[LineChart(title="a", series=[line([1, 2, 3], dots=True, area=True)])])])
    found = re.search(r'<div class="plot">(.*?)</div>', text, re.DOTALL)
    assert found is not None
    tree = ET.fromstring(found[1])
    assert len(tree.findall("circle")) == 3
    assert [child.get("class") for child in tree.findall("./svg/path")] == ["area cobalt", "line cobalt"]


def test_pictures_of_any_kind_become_shots() -> None:
    made = make_shot(np.zeros((8, 8), np.uint8), "7 → 9\n83%")
    assert (made.caption, made.note) == ("7 → 9", "83%")
    assert made.picture.startswith("data:image/jpeg;base64,")
    assert make_shot(None, "gone").picture == ""


def test_progress_stays_within_its_bar() -> None:
    assert [Status(state="running", progress=value).filled for value in (None, -1.0, 0.125, 2.0)] == [0, 0, 12.5, 100]
    assert "<rect" not in render_page("a", [Status(state="done")])
