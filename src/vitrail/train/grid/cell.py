"""One run of a grid: where it stands, what is trained, and what came of it."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from vitrail.core.errors import VitrailError
from vitrail.train.config import Run, RunRequest
from vitrail.train.pictures import Pictures

Place: TypeAlias = str | int | float


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A cell of the grid. `at` is where it stands: {"positions": "learned", "placed": "stem", "seed": 0}. With `after`
    it starts from the last weights of the cell of that name, which then comes first (3.2), and may leave its network to
    them."""

    name: str  # of its folder, too
    at: Mapping[str, Place]
    run: RunRequest
    after: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """A cell that needs no more work. Values are by name, whatever the grid's job reads from the finished run. A cell
    that failed has none, and a `fault` in words; `exploded` says that its numbers were no longer finite, `missing` that
    its images are not there."""

    cell: str
    at: Mapping[str, Place]
    values: Mapping[str, float] = field(default_factory=dict[str, float])
    fault: str = ""
    exploded: bool = False
    missing: bool = False


class Unavailable(VitrailError):
    """The images of a cell are not there: it is skipped, not failed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prepared:
    """A cell ready to be trained: its run with everything in place, its images, and what its folder keeps of how it was
    asked for. Without images the run's own are opened."""

    run: Run
    pictures: Pictures | None = None
    command: Mapping[str, Any] = field(default_factory=dict[str, Any])


class Job(Protocol):
    """What a grid does with each of its cells. It travels to other processes: plain data that can be pickled."""

    def prepare(self, cell: Cell) -> Prepared:
        """Raises Unavailable where the cell is to be skipped."""
        ...

    def read(self, cell: Cell, folder: Path) -> Mapping[str, float]:
        """The values of a cell whose run is done, from its folder."""
        ...
