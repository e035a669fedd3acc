"""Axes of charts: round ticks, number formats, and curves thinned to the resolution of a screen."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

ROUND: Final = (1.0, 2.0, 2.5, 5.0, 10.0)
DECADES_APART: Final = 30.0  # ratio of the largest to the smallest value above which an axis is logarithmic
MOST_POINTS: Final = 400


class Tick(NamedTuple):
    """A tick: its position on the axis, from 0 to 1, and its label."""

    at: float
    text: str


@dataclass(frozen=True, slots=True)
class Axis:
    """An axis that maps `low` to 0 and `high` to 1."""

    low: float
    high: float
    log: bool = False
    percent: bool = False

    def place(self, values: Floats) -> Floats:
        """Positions of values on the axis; NaN for values that are not finite, or not positive on a logarithmic one."""
        with np.errstate(all="ignore"):
            if self.log:
                known = np.where((values > 0) & np.isfinite(values), values, np.nan)
                return (np.log(known) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
            return (np.where(np.isfinite(values), values, np.nan) - self.low) / (self.high - self.low)

    def ticks(self, about: int = 5) -> list[Tick]:
        values = log_steps(self.low, self.high, about) if self.log else round_steps(self.low, self.high, about)
        places = self.place(np.array(values)).tolist()
        said = [format_short(value) for value in values] if self.log else format_ticks(values, percent=self.percent)
        return [Tick(at, text) for at, text in zip(places, said, strict=True)]


def fit_axis(values: Iterable[Floats], *, log: bool | None = False, percent: bool = False, about: int = 5) -> Axis:
    """An axis that ends on round numbers and spans all values. With `log=None` it is logarithmic if all values are
    positive and span a large range."""
    every = np.concatenate([np.zeros(0), *values])
    every = every[np.isfinite(every)]
    positive = every[every > 0]
    if log is None:
        log = len(positive) > 1 and len(positive) == len(every) and positive.max() > DECADES_APART * positive.min()
    if log and len(positive):  # ends on a 1, 2 or 5, and spans at least a factor of two
        low, high = float(positive.min()), float(positive.max())
        wider = math.sqrt(2) if high < 2 * low else 1.0
        return Axis(round_to_125(low / wider, down=True), round_to_125(high * wider, down=False), log=True)
    if not len(every):
        return Axis(0.0, 1.0, percent=percent)
    low, high = float(every.min()), float(every.max())
    if low > 0 and low < 0.5 * high:
        low = 0.0  # close enough to zero to include it
    if high - low <= 1e-9 * max(abs(low), abs(high)):
        room = 0.1 * abs(high) or 1.0
        low, high = (low - room if low else 0.0), high + room
    if percent:
        low, high = max(low, 0.0), (min(high, 1.0) if high <= 1.0 else high)
    width = choose_spacing(low, high, about)
    low, high = math.floor(low / width + 1e-9) * width, math.ceil(high / width - 1e-9) * width
    return Axis(low, high, percent=percent)


def round_to_125(value: float, *, down: bool) -> float:
    """Rounds up or down to the next number that begins with 1, 2 or 5."""
    power = 10.0 ** math.floor(math.log10(value) + 1e-12)
    steps = [power * digit for digit in (1.0, 2.0, 5.0, 10.0)]
    if down:
        return max(step for step in steps if step <= value * (1 + 1e-9))
    return min(step for step in steps if step >= value * (1 - 1e-9))


def choose_spacing(low: float, high: float, about: int) -> float:
    """A round step that divides the range into about `about` parts."""
    rough = (high - low) / max(about, 1)
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * digit for digit in ROUND if power * digit >= rough * 0.999)


def round_steps(low: float, high: float, about: int) -> list[float]:
    """Evenly spaced round numbers from low to high."""
    width = choose_spacing(low, high, about)
    first, last = math.ceil(low / width - 1e-9), math.floor(high / width + 1e-9)
    return [at * width for at in range(first, last + 1)]


def log_steps(low: float, high: float, about: int) -> list[float]:
    """Ticks of a logarithmic axis: powers of ten; only every few if there are many, with steps between if few."""
    first, last = math.floor(math.log10(low) + 1e-9), math.ceil(math.log10(high) - 1e-9)
    every = max(1, math.ceil((last - first) / about))
    digits = (1, 2, 5) if high <= 50 * low else (1, 3) if high <= 2000 * low else (1,)
    found = [10.0**power * digit for power in range(first, last + 1, every) for digit in digits]
    return [value for value in found if low * (1 - 1e-9) <= value <= high * (1 + 1e-9)]


def format_ticks(values: Sequence[float], *, percent: bool = False) -> list[str]:
    """Labels of ticks in one style, with as few digits as they need."""
    if percent:
        return [f"{text}%" for text in format_plain([100 * value for value in values])]
    sizes = [abs(value) for value in values if value]
    is_plain = not sizes or (1e-2 <= max(sizes) < 1e4 and min(sizes) >= 1e-3)
    return format_plain(values) if is_plain else [format_short(value) for value in values]


def format_plain(values: Sequence[float]) -> list[str]:
    for digits in range(6):
        if all(abs(value - round(value, digits)) <= 1e-6 * max(abs(value), 1e-3) for value in values):
            return [f"{value + 0.0:,.{digits}f}" for value in values]
    return [format_short(value) for value in values]


def format_short(value: float) -> str:
    """Formats a number with about three digits: 12.3k, 1.28M, 0.0213, 3e-4."""
    if not math.isfinite(value):
        return "∞" if value == math.inf else "-∞" if value == -math.inf else "not a number"
    size = abs(value)
    for limit, unit, letter in ((9.995e11, 1e12, "T"), (9.995e8, 1e9, "G"), (9.995e5, 1e6, "M"), (9999.5, 1e3, "k")):
        if limit <= size < 9.995e14:
            return f"{trim_digits(value / unit)}{letter}"
    if 999.5 <= size < 9999.5:
        return f"{value:,.0f}"
    if not size or 1e-2 <= size < 999.5:
        return trim_digits(value)
    mantissa, _, power = f"{value:.1e}".partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(power)}"


def trim_digits(value: float) -> str:
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2 if abs(value) >= 0.9995 else 3
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def format_share(value: float) -> str:
    """Formats a share as a percentage: 97.42%; exactly 0% and 100% without decimals."""
    if not math.isfinite(value):
        return format_short(value)
    return f"{100 * value:.0f}%" if value in (0.0, 1.0) else f"{100 * value:.2f}%"


def thin_points(x: Floats, y: Floats, most: int = MOST_POINTS) -> tuple[Floats, Floats]:
    """Thins a curve to about `most` points: the lowest and highest of each interval, so that no spike is lost, and the
    first and last. An interval without finite values stays a gap."""
    if len(x) <= most:
        return x, y
    y = np.where(np.isfinite(y), y, np.nan)
    edges = np.linspace(0, len(x), max(1, (most - 2) // 2) + 1).astype(np.int64)
    kept = {0, len(x) - 1}
    for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        part = y[start:stop]
        known = np.isfinite(part).any()
        kept |= {start + int(np.nanargmin(part)), start + int(np.nanargmax(part))} if known else {start}
    order = np.array(sorted(kept))
    return x[order], y[order]


def smooth_values(y: Floats, span: int) -> Floats:
    """The moving average over up to `span` values, ignoring those that are not finite; gaps stay gaps."""
    if span < 2:
        return y
    known = np.isfinite(y)
    total = np.concatenate([[0.0], np.cumsum(np.where(known, y, 0.0))])
    count = np.concatenate([[0], np.cumsum(known)])
    at = np.arange(len(y))
    reach = np.minimum(np.minimum(at, len(y) - 1 - at), span // 2)  # symmetric, so that the ends do not lag
    low, high = at - reach, at + reach + 1
    with np.errstate(all="ignore"):
        mean = (total[high] - total[low]) / (count[high] - count[low])
    return np.where(known, mean, np.nan)
