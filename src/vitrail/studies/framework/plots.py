"""The figures of the studies: lines over a grid with error bars over seeds, and dots by name. One colour a family.

    lines = [Line(name="ViT", family="ViT", points=[Point(x=0.1, y=spread), ...])]
    plot([Panel(lines=lines, along="images", up="test accuracy [%]", log=True)])

Bars reach one standard deviation over the seeds to either side; a single seed has none. Heights are shares and drawn in
per cent, unless a panel says otherwise. matplotlib (the extra `figures`) is loaded when something is drawn.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from vitrail.inspection.figures import style_axes
from vitrail.report.figure_style import LIGHT, WIDTH, Theme, blank, legible, styled
from vitrail.studies.framework.results import Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Stroke: TypeAlias = Literal["solid", "dashed", "dotted", "none"]
HIGH: Final = 3.7  # inches of a row of panels
ROW: Final = 0.3  # inches of a name with its dot
# Families that have a colour of their own in every study; others take what is left, in their order.
FAMILIES: Final[Mapping[str, str]] = {"ViT": "cobalt", "BiT": "ruby", "hybrid": "leaf", "slim ViT": "sky"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """A place along the axis and what was found there; `name` is written next to it."""

    x: float
    y: Spread
    name: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """Points that belong together. The colour is the family's; `stroke="none"` leaves them unjoined, `hollow` is for a
    second line of the same family, and one without a name is not in the key."""

    name: str
    points: Sequence[Point]
    family: str = ""
    stroke: Stroke = "solid"
    hollow: bool = False
    dots: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """Lines over one pair of axes. `log` and `log_up` make them logarithmic; `ticks` are the places to be named below,
    each with its text."""

    lines: Sequence[Line]
    along: str
    up: str
    title: str = ""
    log: bool = False
    log_up: bool = False
    ticks: Mapping[float, str] | None = None
    scale: float = 100.0  # shares to per cent


@dataclass(frozen=True, kw_only=True, slots=True)
class Dot:
    """A name with its value over seeds; none leaves its row empty."""

    name: str
    value: Spread | None
    family: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dots:
    """Names under each other, with a value each."""

    dots: Sequence[Dot]
    along: str
    title: str = ""
    scale: float = 100.0


def plot(panels: Sequence[Panel], theme: Theme = LIGHT) -> "Figure":
    """Panels side by side, up to two in a row, under one key."""
    across = min(len(panels), 2)
    down = -(-len(panels) // across)
    with styled(theme):
        drawn = blank(HIGH * down + 0.3, WIDTH if across > 1 else WIDTH * 0.72)
        axes: Any = drawn.subplots(down, across, squeeze=False)
        shades = colours((line.family or line.name for panel in panels for line in panel.lines), theme)
        for at, panel in enumerate(panels):
            draw(axes[at // across, at % across], panel, shades, theme)
        for at in range(len(panels), down * across):
            axes[at // across, at % across].set_visible(False)
        key(drawn, theme)
    return drawn


def dotted(groups: Sequence[Dots], theme: Theme = LIGHT) -> "Figure":
    """Values by name, best seen when they are close: groups side by side share their names where these are the same."""
    most = max(len(group.dots) for group in groups)
    shared = len({tuple(dot.name for dot in group.dots) for group in groups}) == 1
    with styled(theme):
        drawn = blank(0.95 + ROW * most, WIDTH)
        axes: Any = drawn.subplots(1, len(groups), squeeze=False, sharey=shared)
        shades = colours((dot.family or dot.name for group in groups for dot in group.dots if dot.name), theme)
        for at, group in enumerate(groups):
            column(axes[0, at], group, shades, theme, named=not shared or at == 0)
    return drawn


def draw(axes: "Axes", panel: Panel, shades: Mapping[str, str], theme: Theme) -> None:
    style_axes(axes, panel.along, panel.up)
    axes.set_title(legible(panel.title, 60), loc="left", pad=8)
    for line in panel.lines:
        stroke(axes, line, shades[line.family or line.name], panel.scale, theme)
    axes.margins(x=0.08, y=0.12)
    for axis, log in ((axes.xaxis, panel.log), (axes.yaxis, panel.log_up)):
        if log:
            logarithmic(axes, axis)
    if panel.ticks:
        axes.set_xticks(list(panel.ticks), [legible(text, 20) for text in panel.ticks.values()])


def logarithmic(axes: "Axes", axis: Any) -> None:
    """With numbers as people write them, and enough of them where the axis is short."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    (axes.set_xscale if axis is axes.xaxis else axes.set_yscale)("log")
    low, high = axis.get_view_interval()
    axis.set_minor_locator(NullLocator())
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 200 else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1000 else f"{value:g}"))


def stroke(axes: "Axes", line: Line, colour: str, scale: float, theme: Theme) -> None:
    points = sorted(line.points, key=lambda point: point.x)
    if not points:
        return
    heights = [scale * point.y.mean for point in points]
    bars = [scale * (point.y.deviation or 0.0) for point in points]
    axes.errorbar(
        [point.x for point in points], heights,
        yerr=bars if any(bars) else None,
        color=colour,
        linestyle=line.stroke if line.stroke != "none" else "",
        linewidth=1.6,
        marker="o" if line.dots else "",
        markersize=5,
        markerfacecolor=theme.paper if line.hollow else colour,
        elinewidth=1.1,
        capsize=2.5,
        label=legible(line.name, 40) if line.name else "_",
    )  # fmt: skip
    for point, height in zip(points, heights, strict=True):
        if point.name:
            axes.annotate(
                legible(point.name, 24), (point.x, height), xytext=(4, -10), textcoords="offset points",
                fontsize=7, color=theme.quiet,
            )  # fmt: skip


def column(axes: "Axes", group: Dots, shades: Mapping[str, str], theme: Theme, *, named: bool) -> None:
    """Dots under each other, the first one on top; each seed is a small one above."""
    style_axes(axes, group.along, "")
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", linewidth=0.8)
    axes.set_title(legible(group.title, 60), loc="left", pad=8)
    places = range(len(group.dots))
    for place, dot in zip(places, group.dots, strict=True):
        if dot.value is None:
            continue
        colour = shades[dot.family or dot.name]
        seeds = [group.scale * value for value in dot.value.values]
        if len(seeds) > 1:
            axes.plot(seeds, [place - 0.25] * len(seeds), linestyle="", marker="o", markersize=2.2, color=colour)
        axes.errorbar(
            group.scale * dot.value.mean, place, xerr=group.scale * (dot.value.deviation or 0.0) or None,
            color=colour, marker="o", markersize=6.5, elinewidth=1.6, capsize=0,
        )  # fmt: skip
    axes.set_yticks(list(places), [legible(dot.name, 44) for dot in group.dots])
    axes.tick_params(axis="y", labelleft=named, labelcolor=theme.ink)
    axes.set_ylim(max(len(group.dots), 1) - 0.5, -0.5)
    axes.margins(x=0.08)


def key(drawn: "Figure", theme: Theme) -> None:
    """One for all panels, above them; a name that several have stands once."""
    found: dict[str, Any] = {}
    for axes in drawn.axes:
        handles, names = axes.get_legend_handles_labels()
        found |= {name: handle for name, handle in zip(names, handles, strict=True) if name not in found}
    if found:
        across = -(-len(found) // (1 if len(found) <= 5 else 2))
        order = sorted(range(len(found)), key=lambda at: (at % across, at))  # a key is filled column by column
        names, handles = list(found), list(found.values())
        drawn.legend(
            [handles[at] for at in order], [names[at] for at in order], loc="outside upper left", ncols=across,
            fontsize=8, labelcolor=theme.quiet, handlelength=2.2, columnspacing=1.6,
        )  # fmt: skip


def colours(families: Iterable[str], theme: Theme) -> dict[str, str]:
    """A colour for each: the known ones their own, the others those that are left, again and again."""
    names = list(dict.fromkeys(families))
    own: dict[str, str] = {name: getattr(theme, FAMILIES[name]) for name in names if name in FAMILIES}
    left = [colour for colour in theme.glass if colour not in own.values()] or list(theme.glass)
    others = [name for name in names if name not in own]
    return own | {name: left[at % len(left)] for at, name in enumerate(others)}
