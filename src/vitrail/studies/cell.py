"""One training of a study: where it stands in the grid, what is trained, and what came of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from vitrail.train.config import Run

Place: TypeAlias = str | int | float
Scale: TypeAlias = Literal["tiny", "small", "paper"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A cell of the grid. `at` is where it stands: {"positions": "learned", "placed": "stem", "seed": 0}. With `after`
    it starts from the last weights of the cell of that name, which then comes first (3.2)."""

    name: str  # of its folder, too: letters, digits, "-", "_" and "." alone
    at: Mapping[str, Place]
    run: Run
    after: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """A finished cell. Values are by name: "accuracy" (of the split for the end, or else of the watched one, a share),
    "watch" (of the watched split, to choose by), "fewshot-5" (a share), "exaflops", "device_hours", "images"; whatever
    the run recorded of these, and nothing else. A cell that failed has none, and a `fault` in words."""

    cell: str
    at: Mapping[str, Place]
    values: Mapping[str, float] = field(default_factory=dict[str, float])
    fault: str = ""
