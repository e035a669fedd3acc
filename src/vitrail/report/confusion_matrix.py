"""Draws a confusion matrix: correct predictions in blue on the diagonal, mistakes in red off it.

Below it are the classes that are recognised least often, and the most frequent mistakes.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from vitrail.core.errors import ConfigError
from vitrail.report.contact_sheet import RGB, blend, parse_colour, reads_white
from vitrail.report.page import Scheme, read_palette


@dataclass(frozen=True, slots=True)
class ClassCount:
    """A class, and how many of its images were recognised."""

    name: str
    right: int
    count: int

    @property
    def share(self) -> float:
        return self.right / self.count


@dataclass(frozen=True, slots=True)
class Confusion:
    """A mistake: how many images of one class were predicted as another."""

    truth: str
    said: str
    count: int
    share: float  # of the images of the true class


def rank_confusions(
    cells: NDArray[np.int64], totals: NDArray[np.int64], class_names: Sequence[str], most: int
) -> list[Confusion]:
    """Ranks mistakes by their number; ties by their share of the class. `cells` [C, 3] are rows of true class,
    predicted class and count; `totals` [K] are the images of each class."""
    wrong = cells[cells[:, 0] != cells[:, 1]]
    truth, said, count = wrong.T
    share = count / totals[truth]
    order = np.lexsort((said, truth, -share, -count))[:most]
    rows = zip(*(column[order].tolist() for column in (truth, said, count, share)), strict=True)
    return [Confusion(class_names[int(a)], class_names[int(b)], int(n), float(part)) for a, b, n, part in rows]


DRAWN: Final = 100  # most classes of a matrix that is drawn
NAMED: Final = 40  # most classes whose rows have names
COUNTED: Final = 16  # most classes whose cells show counts
LEVELS: Final = 12  # shades
LONGEST: Final = 18  # characters of a name, at most


class Shade(NamedTuple):
    """All cells of one colour: their path and their opacity."""

    right: bool
    strength: float
    path: str


class Letter(NamedTuple):
    x: float
    y: float
    text: str
    light: bool = False  # whether the text is white in the page's light theme
    dark: bool = False  # the same in its dark theme


def strength(level: int) -> float:
    """The opacity of a shade."""
    return round(0.08 + 0.92 * level / LEVELS, 2)


def blend_cell(scheme: Scheme, right: bool, level: int) -> RGB:
    """The colour of a cell, blended with the page."""
    palette = read_palette(scheme)
    glass, paper = parse_colour(palette["cobalt" if right else "ruby"]), parse_colour(palette["paper"])
    return blend(glass, paper, strength(level))


@dataclass(frozen=True, kw_only=True, eq=False)
class ConfusionSection:
    """A confusion matrix of counts [K, K], true classes as rows. Shades show shares of a row, so that rare classes are
    visible, on a square-root scale, so that a few mistakes are. Above 100 classes only the worst are listed."""

    counts: NDArray[np.int64]
    classes: Sequence[str]
    title: str = ""
    listed: int = 8
    template: str = field(default="confusion.html", init=False)

    def __post_init__(self) -> None:
        if self.counts.shape != (len(self.classes),) * 2:
            raise ConfigError(f"a confusion matrix of {self.counts.shape} does not fit {len(self.classes)} classes")

    @property
    def is_drawn(self) -> bool:
        return len(self.classes) <= DRAWN

    @property
    def cell(self) -> int:
        """The side of a cell in pixels."""
        known = len(self.classes)
        return 40 if known <= 10 else 32 if known <= COUNTED else 24 if known <= 24 else 17 if known <= NAMED else 6

    @property
    def has_names(self) -> bool:
        return len(self.classes) <= NAMED

    @cached_property
    def names(self) -> list[str]:
        return [name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…" for name in self.classes]

    @cached_property
    def length(self) -> int:
        """The width of the longest name, in pixels."""
        return round((13 if self.cell >= 24 else 11) * 0.56 * max((len(name) for name in self.names), default=1))

    @property
    def empty(self) -> str:
        """The grid of all cells, if they are few enough to be told apart; else empty."""
        return self.squares(np.argwhere(self.counts >= 0)) if self.has_names else ""

    @cached_property
    def levels(self) -> NDArray[np.int64]:
        """The shade of each cell, from 0 for an empty one."""
        shares = self.counts / np.maximum(self.counts.sum(1, keepdims=True), 1)
        return np.ceil(np.sqrt(shares) * LEVELS).astype(np.int64)

    @property
    def shades(self) -> list[Shade]:
        diagonal = np.eye(len(self.classes), dtype=np.bool_)
        return [
            Shade(right, strength(level), self.squares(np.argwhere(mine == level)))
            for right in (True, False)
            for mine in [np.where(diagonal == right, self.levels, 0)]
            for level in np.unique(mine[mine > 0]).tolist()
        ]

    def squares(self, places: NDArray[np.int64]) -> str:
        """An SVG path of cells, with a gap between them."""
        cell, side = self.cell, self.cell - (2 if self.cell >= 24 else 1)
        return "".join(f"M{column * cell} {row * cell}h{side}v{side}h-{side}z" for row, column in places.tolist())

    @property
    def numbers(self) -> list[Letter]:
        """The counts inside the cells."""
        if len(self.classes) > COUNTED:
            return []
        found: list[Letter] = []
        for row, column in np.argwhere(self.counts > 0).tolist():
            x, y = ((at + 0.5) * self.cell - 1 for at in (column, row))
            shade = row == column, int(self.levels[row, column])
            light, dark = (reads_white(blend_cell(scheme, *shade)) for scheme in get_args(Scheme))
            found.append(Letter(x, y, f"{self.counts[row, column]:,}", light, dark))
        return found

    @property
    def labels(self) -> list[Letter]:
        """The names of rows and columns, or every tenth number; x is the position along either side."""
        middle, numbers = (self.cell - 1) / 2, ((at, str(at)) for at in range(0, len(self.classes), 10))
        texts = enumerate(self.names) if self.has_names else numbers
        return [Letter(at * self.cell + middle, 0, text) for at, text in texts]

    @cached_property
    def wrong(self) -> int:
        return int(self.counts.sum() - np.trace(self.counts))

    @cached_property
    def hardest(self) -> list[ClassCount]:
        """The classes with the smallest share of correct predictions, among those with any mistakes."""
        totals, right = self.counts.sum(1), np.diagonal(self.counts)
        there = np.flatnonzero(right < totals)
        order = there[np.lexsort((there, -totals[there], right[there] / totals[there]))][: self.listed]
        return [ClassCount(self.classes[int(at)], int(right[at]), int(totals[at])) for at in order.tolist()]

    @cached_property
    def pairs(self) -> list[Confusion]:
        """The most frequent mistakes."""
        rows, columns = np.nonzero(self.counts)
        cells = np.stack([rows, columns, self.counts[rows, columns]], 1)
        return rank_confusions(cells, self.counts.sum(1), self.classes, self.listed)
