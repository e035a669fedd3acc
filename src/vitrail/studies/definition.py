"""The definition of a study: a grid of cells for each scale, and an analysis of their outcomes."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

from vitrail.core.errors import ConfigError
from vitrail.core.text import join_words
from vitrail.studies.plots import DotColumn, Panel, plot_dots, plot_lines
from vitrail.studies.statistics import NOTHING, SEED, Gap, Verdict
from vitrail.train.config import RunRequest
from vitrail.train.grid.plan import Cell, CellOutcome, Coordinate

if TYPE_CHECKING:
    from matplotlib.figure import Figure


Scale: TypeAlias = Literal["tiny", "small", "paper"]


@dataclass(frozen=True, slots=True)
class ResultTable:
    """Rows of text under column names; the paper's printed values have columns of their own."""

    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class JudgedClaim:
    """One of the paper's claims, as judged by the results here."""

    text: str
    verdict: Verdict


def judge_gaps(gaps: Iterable[tuple[str, Gap | None]], *, upward: bool = True) -> list[JudgedClaim]:
    """Judges the claims that differences have the paper's sign; differences that could not be measured are left out."""
    known = [(f"{text} {gap}{f', {gap.reading}' if gap.is_open else ''}", gap) for text, gap in gaps if gap is not None]
    return [JudgedClaim(text, gap.judge(upward=upward)) for text, gap in known]


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """The result of a study: a table, the panels of a figure, a summary in one sentence, what the paper states, and
    each of its claims as judged here."""

    table: ResultTable
    panels: Sequence[Panel] | Sequence[DotColumn]
    summary: str
    paper: str
    claims: Sequence[JudgedClaim]

    def figure(self) -> "Figure":
        """Drawn on demand, since it needs matplotlib."""
        dots = [panel for panel in self.panels if isinstance(panel, DotColumn)]
        return plot_dots(dots) if dots else plot_lines([one for one in self.panels if isinstance(one, Panel)])

    @property
    def verdict(self) -> Verdict:
        """Over all claims."""
        verdicts = {claim.verdict for claim in self.claims}
        if len(verdicts) == 1:
            return verdicts.pop()
        if verdicts == {Verdict.DISAGREES, Verdict.UNDECIDED}:
            return Verdict.DISAGREES
        return Verdict.PARTLY if verdicts else Verdict.UNDECIDED

    @property
    def comparison(self) -> str:
        """What the paper states, and how it compares with the results here."""
        claims = "; ".join(f"{claim.text} ({claim.verdict.value})" for claim in self.claims)
        return f"{self.paper} Here: {claims or 'too few cells have finished to decide anything'}."


@dataclass(frozen=True, kw_only=True, slots=True)
class Study:
    """`cells` gives the grid of a scale on a source ("" for the scale's own); `analyse` reads outcomes, of which some
    may have failed or, while the study runs, be missing."""

    name: str
    title: str
    anchor: str  # in the paper: "Figures 3 and 4", "Table 8", "D.3"
    cells: Callable[[Scale, str], Iterable[Cell]]
    analyse: Callable[[Sequence[CellOutcome]], Findings]

    def grid(self, scale: Scale, data: str = "", *, seeds: int = 0) -> tuple[Cell, ...]:
        """The cells of a scale, with `seeds` instead of the study's own number of seeds if given."""
        cells = tuple(self.cells(scale, data))
        cells = repeat_seeds(cells, seeds) if seeds else cells
        check_grid(self.name, cells)
        return cells

    def findings(self, outcomes: Sequence[CellOutcome]) -> Findings:
        """The analysis without empty columns (at a small scale the paper has no such network), with a remark on cells
        that failed."""
        found = self.analyse(outcomes)
        columns, rows = found.table.columns, found.table.rows
        used = [at for at in range(len(columns)) if not rows or any(row[at] != NOTHING for row in rows)]
        table = ResultTable(tuple(columns[at] for at in used), tuple(tuple(row[at] for at in used) for row in rows))
        summary = found.summary or "Too few cells have finished for a comparison."
        if failed := [one.cell for one in outcomes if one.fault]:
            names = join_words(failed, limit=3)
            summary += f" {len(failed)} of {len(outcomes)} cells failed ({names}) and are not counted."
        return replace(found, table=table, summary=f"{summary[0].upper()}{summary[1:]}")


def seed_cells(name: str, at: Mapping[str, Coordinate], run: RunRequest, seeds: int, after: str = "") -> Iterator[Cell]:
    """A run repeated with the seeds 0, 1, ..."""
    for seed in range(seeds):
        yield Cell(name=f"{name}-seed{seed}", at={**at, SEED: seed}, run=replace(run, seed=seed), after=after)


def check_grid(name: str, cells: Sequence[Cell]) -> None:
    """Raises ConfigError if cells cannot each have a folder of their own, or wait for each other."""
    after: dict[str, str] = {}
    for cell in cells:
        if not re.fullmatch(r"\w[\w.-]*", cell.name, re.ASCII):
            raise ConfigError(f"{name}: cell {cell.name!r} must be a folder name of letters, digits, '-', '_' and '.'")
        if cell.name in after:
            raise ConfigError(f"{name}: two cells are called {cell.name}")
        after[cell.name] = cell.after
    for cell in cells:
        seen, at = {cell.name}, cell.after
        while at:
            if at not in after or at in seen:
                what = "is not a cell of the grid" if at not in after else "waits for it in turn"
                raise ConfigError(f"{name}: the cell {cell.name} comes after {at}, which {what}")
            seen.add(at)
            at = after[at]


def repeat_seeds(cells: Sequence[Cell], count: int) -> tuple[Cell, ...]:
    """Each cell with the seeds 0 to `count` - 1: surplus seeds are dropped, missing ones derived from the first.

    Cells that the grid repeats less often than the rest, such as weights that others start from, keep their seeds."""
    groups: dict[tuple[tuple[str, Coordinate], ...], dict[int, Cell]] = {}
    for cell in cells:
        group = groups.setdefault(tuple((axis, value) for axis, value in cell.at.items() if axis != SEED), {})
        seed = int(cell.at.get(SEED, 0))
        if seed in group:
            raise ConfigError(f"the cells {group[seed].name} and {cell.name} are at the same place of the grid")
        group[seed] = cell
    most = max(map(len, groups.values()), default=0)
    fixed = [group for group in groups.values() if len(group) < most or any(SEED not in c.at for c in group.values())]
    names = {cell.name for group in fixed for cell in group.values()}
    out: list[Cell] = []
    for group in groups.values():
        seeds = sorted(group) if group in fixed else range(count)
        first = group[min(group)]
        out += [group[seed] if seed in group else with_seed(first, seed, names) for seed in seeds if seed < count]
    return tuple(out)


def with_seed(cell: Cell, seed: int, fixed: Collection[str]) -> Cell:
    """The cell with another seed, and its name with that seed; it comes after the cell of the same seed, or after one
    of the `fixed` cells."""
    before, data = int(cell.at[SEED]), cell.run.data

    def rename(name: str) -> str:
        other, changed = re.subn(rf"(?<!\d){before}$", str(seed), name)
        return other if changed else f"{name}-{seed}"

    if data.part < 1:  # a seed draws its own part of the images
        data = replace(data, part_seed=data.part_seed - before + seed)
    return replace(
        cell,
        name=rename(cell.name),
        at={**cell.at, SEED: seed},
        run=replace(cell.run, seed=cell.run.seed - before + seed, data=data),
        after=cell.after if not cell.after or cell.after in fixed else rename(cell.after),
    )
