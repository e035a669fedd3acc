"""The figures of the studies: lines over a grid with error bars over seeds, and dots by name. One colour per family.

    lines = [Line(name="ViT", points=[(0.1, spread), ...])]
    plot_lines([Panel(lines=lines, along="images", up="test accuracy [%]", log=True)])

Error bars are one standard deviation over the seeds; a single seed has none. Values are shares and drawn in per cent
unless a panel says otherwise. matplotlib (the extra `figures`) is loaded when something is drawn.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from vitrail.inspection.figures import style_axes
from vitrail.report.figure_style import LIGHT, WIDTH, Theme, make_legible, new_figure, use_theme
from vitrail.studies.statistics import Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


Stroke: TypeAlias = Literal["solid", "dashed", "dotted", "none"]
PANEL_HEIGHT: Final = 3.7  # inches
ROW_HEIGHT: Final = 0.3
# Families with the same colour in every study; others take the remaining colours in their order.
FAMILIES: Final[Mapping[str, str]] = {"ViT": "cobalt", "BiT": "ruby", "hybrid": "leaf", "slim ViT": "sky"}


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedLine:
    """Points (x, value over seeds) of one family; None values are skipped. `stroke="none"` leaves them unconnected,
    `hollow` is for a second line of the same family, and a line without a name is not in the legend."""

    name: str
    points: Sequence[tuple[float, Spread | None]]
    family: str = ""
    stroke: Stroke = "solid"
    hollow: bool = False
    dots: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class Panel:
    """Lines over one pair of axes. `log` and `log_up` make them logarithmic; `ticks` are labelled places below."""

    lines: Sequence[SeedLine]
    along: str
    up: str
    title: str = ""
    log: bool = False
    log_up: bool = False
    ticks: Mapping[float, str] | None = None
    scale: float = 100.0  # shares to per cent


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedDot:
    """A name with its value over seeds; None leaves its row empty."""

    name: str
    value: Spread | None
    family: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class DotColumn:
    """One row per name."""

    dots: Sequence[SeedDot]
    along: str
    title: str = ""


def plot_lines(panels: Sequence[Panel], theme: Theme = LIGHT) -> "Figure":
    """Panels side by side, up to two per row, under one legend."""
    across = min(len(panels), 2)
    down = -(-len(panels) // across)
    with use_theme(theme):
        figure = new_figure(PANEL_HEIGHT * down + 0.3, WIDTH if across > 1 else WIDTH * 0.72)
        axes: Any = figure.subplots(down, across, squeeze=False)
        colours = pick_colours((line.family or line.name for panel in panels for line in panel.lines), theme)
        for place in axes.flat[len(panels) :]:
            place.set_visible(False)
        for place, panel in zip(axes.flat, panels, strict=False):
            draw_panel(place, panel, colours, theme)
        add_legend(figure, theme)
    return figure


def plot_dots(groups: Sequence[DotColumn], theme: Theme = LIGHT) -> "Figure":
    """Values by name, for values that are close; groups side by side share their names where these are the same."""
    most = max(len(group.dots) for group in groups)
    shared = len({tuple(dot.name for dot in group.dots) for group in groups}) == 1
    with use_theme(theme):
        figure = new_figure(0.95 + ROW_HEIGHT * most, WIDTH)
        axes: Any = figure.subplots(1, len(groups), squeeze=False, sharey=shared)
        colours = pick_colours((dot.family or dot.name for group in groups for dot in group.dots if dot.name), theme)
        for at, group in enumerate(groups):
            draw_dots(axes[0, at], group, colours, theme, labelled=not shared or at == 0)
    return figure


def draw_panel(axes: "Axes", panel: Panel, colours: Mapping[str, str], theme: Theme) -> None:
    style_axes(axes, panel.along, panel.up)
    axes.set_title(make_legible(panel.title, 60), loc="left", pad=8)
    for line in panel.lines:
        points = sorted(((x, y) for x, y in line.points if y is not None), key=lambda point: point[0])
        bars, colour = [panel.scale * (y.deviation or 0.0) for _, y in points], colours[line.family or line.name]
        if points:
            axes.errorbar(
                [x for x, _ in points],
                [panel.scale * y.mean for _, y in points],
                yerr=bars if any(bars) else None,
                color=colour,
                linestyle=line.stroke if line.stroke != "none" else "",
                linewidth=1.6,
                elinewidth=1.1,
                marker="o" if line.dots else "",
                markersize=5,
                markerfacecolor=theme.paper if line.hollow else colour,
                capsize=2.5,
                label=make_legible(line.name, 40) if line.name else "_",
            )
    axes.margins(x=0.08, y=0.12)
    if panel.log:
        axes.set_xscale("log")
        label_log_axis(axes.xaxis)
    if panel.log_up:
        axes.set_yscale("log")
        label_log_axis(axes.yaxis)
    if panel.ticks:
        axes.set_xticks(list(panel.ticks), [make_legible(text, 20) for text in panel.ticks.values()])


def label_log_axis(axis: Any) -> None:
    """With plain numbers, and enough of them if the axis is short."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    low, high = axis.get_view_interval()
    axis.set_minor_locator(NullLocator())
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 200 else (1.0,)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1000 else f"{value:g}"))


def draw_dots(axes: "Axes", group: DotColumn, colours: Mapping[str, str], theme: Theme, *, labelled: bool) -> None:
    """The first name on top; each seed is a small dot above the mean."""
    style_axes(axes, group.along, "")
    axes.grid(axis="y", visible=False)
    axes.grid(axis="x", linewidth=0.8)
    axes.set_title(make_legible(group.title, 60), loc="left", pad=8)
    for row, dot in enumerate(group.dots):
        if dot.value is None:
            continue
        colour = colours[dot.family or dot.name]
        if dot.value.count > 1:
            seeds = [100 * value for value in dot.value.values]
            axes.plot(seeds, [row - 0.25] * len(seeds), linestyle="", marker="o", markersize=2.2, color=colour)
        axes.errorbar(
            100 * dot.value.mean,
            row,
            xerr=100 * (dot.value.deviation or 0.0) or None,
            color=colour,
            marker="o",
            markersize=6.5,
            elinewidth=1.6,
            capsize=0,
        )
    axes.set_yticks(range(len(group.dots)), [make_legible(dot.name, 44) for dot in group.dots])
    axes.tick_params(axis="y", labelleft=labelled, labelcolor=theme.ink)
    axes.set_ylim(max(len(group.dots), 1) - 0.5, -0.5)
    axes.margins(x=0.08)


def add_legend(figure: "Figure", theme: Theme) -> None:
    """One for all panels, above them; a name that several panels have appears once."""
    found: dict[str, Any] = {}
    for axes in figure.axes:
        handles, names = axes.get_legend_handles_labels()
        found |= {name: handle for name, handle in zip(names, handles, strict=True) if name not in found}
    if found:
        across = -(-len(found) // (1 if len(found) <= 5 else 2))
        names = [name for column in range(across) for name in list(found)[column::across]]
        figure.legend(
            [found[name] for name in names],
            names,
            loc="outside upper left",
            ncols=across,
            fontsize=8,
            labelcolor=theme.quiet,
            handlelength=2.2,
            columnspacing=1.6,
        )


def pick_colours(families: Iterable[str], theme: Theme) -> dict[str, str]:
    """A colour per family: known families have their own, others share the rest."""
    names = list(dict.fromkeys(families))
    own: dict[str, str] = {name: getattr(theme, FAMILIES[name]) for name in names if name in FAMILIES}
    rest = [colour for colour in theme.glass if colour not in own.values()] or list(theme.glass)
    others = [name for name in names if name not in own]
    return own | {name: rest[at % len(rest)] for at, name in enumerate(others)}
