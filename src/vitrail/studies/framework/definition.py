"""What a study is: a grid of cells for each scale, and what its outcomes say."""

import re
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from vitrail.core.errors import ConfigError
from vitrail.train.grid.plan import Cell, CellOutcome, Coordinate

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Scale: TypeAlias = Literal["tiny", "small", "paper"]

SEED: Final = "seed"  # the place in the grid that only repeats


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """Rows of text under a heading each; the paper's printed value has a column of its own where there is one."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """What came out: a table, a figure in a theme (made when asked for: it needs matplotlib), one sentence, and how
    that agrees with the paper, plainly."""

    table: Table
    figure: Callable[[], "Figure"]
    sentence: str
    beside: str  # the paper's finding, and whether this one agrees


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """`cells` gives the grid of a scale on a source ("" for the scale's own); `conclude` reads outcomes, of which some
    may have failed or, while the study runs, be missing."""

    name: str
    title: str
    anchor: str  # of the paper: "Figures 3 and 4", "Table 8", "D.3"
    cells: Callable[[Scale, str], Sequence[Cell]]
    conclude: Callable[[Sequence[CellOutcome]], Findings]


def grid(study: Study, scale: Scale, data: str = "", *, seeds: int = 0) -> tuple[Cell, ...]:
    """The cells of a scale; with `seeds`, each as often as that, whatever the study has them."""
    cells = tuple(study.cells(scale, data))
    cells = repeated(cells, seeds) if seeds else cells
    check(study.name, cells)
    return cells


def check(name: str, cells: Sequence[Cell]) -> None:
    """Refuses a grid whose cells could not each have a folder, or wait for each other."""
    known: set[str] = set()
    for cell in cells:
        if not re.fullmatch(r"\w[\w.-]*", cell.name, re.ASCII):
            raise ConfigError(f"{name}: the cell {cell.name!r} names a folder: letters, digits, '-', '_' and '.' alone")
        if cell.name in known:
            raise ConfigError(f"{name}: two cells are called {cell.name}")
        known.add(cell.name)
    after = {cell.name: cell.after for cell in cells}
    for cell in cells:
        seen, at = {cell.name}, cell.after
        while at:
            if at not in after or at in seen:
                what = "is not a cell of the grid" if at not in after else "comes after it in turn"
                raise ConfigError(f"{name}: the cell {cell.name} comes after {at}, which {what}")
            seen.add(at)
            at = after[at]


def repeated(cells: Sequence[Cell], count: int) -> tuple[Cell, ...]:
    """Each cell with the seeds 0 to `count` - 1: of those that the grid has some are left out, or more like the first
    of them are made. What the grid repeats less often than the rest, as weights that others start from, is not repeated
    more often either."""
    groups: dict[tuple[tuple[str, Coordinate], ...], dict[int, Cell]] = {}
    for cell in cells:
        group = groups.setdefault(tuple((axis, value) for axis, value in cell.at.items() if axis != SEED), {})
        seed = int(cell.at.get(SEED, 0))
        if seed in group:
            raise ConfigError(f"the cells {group[seed].name} and {cell.name} stand at the same place")
        group[seed] = cell
    most = max(map(len, groups.values()), default=0)
    fixed = [group for group in groups.values() if len(group) < most or any(SEED not in c.at for c in group.values())]
    names = {cell.name for group in fixed for cell in group.values()}
    kept: list[Cell] = []
    for group in groups.values():
        seeds = sorted(group) if group in fixed else range(count)
        first = group[min(group)]
        kept += [group[seed] if seed in group else reseeded(first, seed, names) for seed in seeds if seed < count]
    return tuple(kept)


def reseeded(cell: Cell, seed: int, fixed: Container[str]) -> Cell:
    """The cell with another seed, under a name that tells it, after the cell of that seed or one of those that have no
    other."""
    before = int(cell.at[SEED])

    def named(name: str) -> str:
        other, changed = re.subn(rf"(?<!\d){before}$", str(seed), name)
        return other if changed else f"{name}-{seed}"

    data = cell.run.data
    if data.part < 1:  # a seed draws its part of the images
        data = replace(data, part_seed=data.part_seed - before + seed)
    return replace(
        cell,
        name=named(cell.name),
        at={**cell.at, SEED: seed},
        run=replace(cell.run, seed=cell.run.seed - before + seed, data=data),
        after=cell.after if not cell.after or cell.after in fixed else named(cell.after),
    )
