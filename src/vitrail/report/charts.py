"""Line charts as inline SVG: no script, colours from the page's style, text of the same size on any screen.

    Charts(title="Curves", charts=[LineChart(title="Loss", series=[Series(name="train", x=steps, y=losses)])])

Positions are percentages of the plot, and only the curves are stretched, so a chart fills the available width while
text and line widths stay the same.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, Literal, NamedTuple, TypeAlias

import numpy as np

from vitrail.report import axis
from vitrail.report.axis import Axis, Floats, Tick, fit_axis, format_ticks, round_steps, thin_points

Colour: TypeAlias = Literal["cobalt", "ruby", "amber", "leaf", "violet", "sky"]

UNITS: Final = 1000  # side of the box that curves are drawn in
LETTER: Final = 15  # least distance between labels in pixels
DOTS: Final = 40  # most points that are marked one by one


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Series:
    """One curve. A faint one, such as the raw values of a mean, lies behind the others, without name and last value.
    With `area` the area below is filled."""

    name: str
    x: Floats
    y: Floats
    colour: Colour = "cobalt"
    faint: bool = False
    dots: bool = False
    area: bool = False


class Mark(NamedTuple):
    """A marked point with its text, in per cent from the left and the top; or the last value of a curve, written to the
    right of its end, in pixels from the top."""

    left: float
    top: float
    text: str
    colour: Colour


class Curve(NamedTuple):
    """A series as SVG paths."""

    colour: Colour
    faint: bool
    line: str
    area: str
    dots: list[Mark]


@dataclass(frozen=True, kw_only=True, eq=False)
class LineChart:
    """A chart. With `log=None` the axis is logarithmic if the values span a large range. `end` extends the x-axis past
    the last value."""

    title: str
    series: Sequence[Series]
    unit: str = ""
    along: str = "step"
    percent: bool = False
    log: bool | None = False
    end: float | None = None
    height: int = 208
    note: str = ""

    @cached_property
    def thin(self) -> list[Series]:
        """The series, thinned to the points that are drawn; empty series are skipped."""
        found: list[Series] = []
        for one in self.series:
            x, y = thin_points(np.asarray(one.x, np.float64), np.asarray(one.y, np.float64))
            if np.isfinite(y).any():
                found.append(replace(one, x=x, y=y))
        return found

    @cached_property
    def across(self) -> Axis:
        every = [one.x for one in self.thin]
        low = min([0.0, *(float(x.min()) for x in every)])  # steps count from 0
        high = max([float(x.max()) for x in every] + ([] if self.end is None else [self.end]), default=1.0)
        return Axis(low, high if high > low else low + 1.0)

    @cached_property
    def up(self) -> Axis:
        # A filled area shows an amount, so its axis includes zero.
        base = [np.zeros(1)] if any(one.area for one in self.thin) and not self.log else []
        values = [*base, *(one.y for one in self.thin)]
        return fit_axis(values, log=self.log, percent=self.percent, about=self.num_ticks)

    @property
    def num_ticks(self) -> int:
        return 5 if self.height > 160 else 3

    @property
    def bottom_ticks(self) -> list[Tick]:
        """Ticks of the x-axis, at whole steps only."""
        values = [value for value in round_steps(self.across.low, self.across.high, 4) if value == round(value)]
        places = (100 * self.across.place(np.array(values))).tolist()
        return [Tick(at, text) for at, text in zip(places, format_ticks(values), strict=True)]

    @property
    def left_ticks(self) -> list[Tick]:
        """Ticks of the y-axis, in per cent from the top."""
        return [Tick(100 - 100 * tick.at, tick.text) for tick in self.up.ticks(self.num_ticks)]

    @property
    def keys(self) -> list[Series]:
        """The series in the legend: none if there is only one, which the title names already."""
        named = [one for one in self.thin if not one.faint and one.name]
        return named if len(named) > 1 else []

    @property
    def curves(self) -> list[Curve]:
        found: list[Curve] = []
        for one in sorted(self.thin, key=lambda one: not one.faint):
            x, y = self.across.place(one.x), 1 - self.up.place(one.y)
            rows = zip(x.tolist(), y.tolist(), one.x.tolist(), one.y.tolist(), strict=True)
            dots = [
                Mark(100 * left, 100 * top, f"{self.along} {given:,.0f}: {self.format_value(value)}", one.colour)
                for left, top, given, value in rows
                if np.isfinite(top) and one.dots and len(x) <= DOTS
            ]
            area = to_svg_path(x, y, closed=True) if one.area else ""
            found.append(Curve(one.colour, one.faint, to_svg_path(x, y), area, dots))
        return found

    @property
    def ends(self) -> list[Mark]:
        """The labels with the last values, moved apart so that none overlap."""
        found: list[Mark] = []
        for one in self.thin:
            places = self.up.place(one.y)
            known = np.flatnonzero(np.isfinite(places))
            if not one.faint and len(known):
                at = known[-1:]
                left, top = 100 * float(self.across.place(one.x[at])[0]), self.height * (1 - float(places[at][0]))
                found.append(Mark(left, top, self.format_value(float(one.y[at][0])), one.colour))
        found.sort(key=lambda end: end.top)
        tops = move_apart([end.top for end in found], LETTER, self.height)
        last = max((end.left for end in found), default=100.0)  # in one column, clear of all curves
        return [end._replace(left=last, top=top) for top, end in zip(tops, found, strict=True)]

    def format_value(self, value: float) -> str:
        return axis.format_share(value) if self.percent else axis.format_short(value)

    @property
    def summary(self) -> str:
        """A description for screen readers."""
        parts = [
            f"{one.name or self.title} from {self.format_value(known[0])} to {self.format_value(known[-1])}"
            for one in self.thin
            if not one.faint and (known := one.y[np.isfinite(one.y)].tolist())
        ]
        return f"{self.title}: {'; '.join(parts) or 'nothing yet'}"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Charts:
    """Charts side by side, two in a row, or three if `small`. `notes` are shown below them, marked if `alarming`."""

    charts: Sequence[LineChart]
    title: str = ""
    small: bool = False
    notes: Sequence[str] = ()
    alarming: bool = False
    template: str = field(default="charts.html", init=False)


def to_svg_path(x: Floats, y: Floats, *, closed: bool = False) -> str:
    """A curve as the data of an SVG path, in whole units, with gaps at NaN. A single point becomes a short stroke."""
    pieces: list[list[str]] = [[]]
    for left, top in zip(x.tolist(), y.tolist(), strict=True):
        if math.isnan(left) or math.isnan(top):
            pieces.append([])
        elif (point := f"{round(UNITS * left)} {round(UNITS * top)}") not in pieces[-1][-1:]:
            pieces[-1].append(point)
    out: list[str] = []
    for piece in filter(None, pieces):
        body = "L".join(piece)
        if closed:
            first, last = (point.partition(" ")[0] for point in (piece[0], piece[-1]))
            out.append(f"M{first} {UNITS}L{body}L{last} {UNITS}Z")
        else:
            out.append(f"M{body}" if len(piece) > 1 else f"M{body}h1")
    return "".join(out)


def move_apart(tops: Sequence[float], least: float, room: float) -> list[float]:
    """Moves ascending positions at least `least` apart and, if possible, keeps them between 0 and `room`."""
    placed: list[float] = []
    for top in tops:
        placed.append(max(top, placed[-1] + least) if placed else top)
    for back, at in enumerate(reversed(range(len(placed)))):  # push back up from below
        placed[at] = min(placed[at], room - back * least)
    return placed
