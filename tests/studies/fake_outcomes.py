"""Outcomes as a study's own cells would have them, with values that a test gives."""

import functools
from collections.abc import Callable, Mapping, Sequence

from vitrail.studies.definition import Findings, Scale, Study
from vitrail.studies.statistics import Verdict
from vitrail.train.grid.plan import Cell, CellOutcome, Coordinate

Values = Callable[[Mapping[str, Coordinate]], Mapping[str, float]]
NOISE = (-0.002, 0.001, 0.001)  # by seed
A, P, D, U = Verdict.AGREES, Verdict.PARTLY, Verdict.DISAGREES, Verdict.UNDECIDED


def noisy(value: float, at: Mapping[str, Coordinate]) -> float:
    """A value with the scatter of seeds."""
    return value + NOISE[int(at["seed"]) % len(NOISE)]


@functools.cache
def grid(study: Study, scale: Scale) -> tuple[Cell, ...]:
    """The cells of a study; making them takes a while, and they are the same every time."""
    return tuple(study.grid(scale))


def outcomes(study: Study, scale: Scale, values: Values, *, failed: Sequence[str] = ()) -> list[CellOutcome]:
    """Every cell of the grid with its values; those whose name begins with one of `failed` have none."""
    return [
        CellOutcome(cell=cell.name, at=cell.at, fault="the loss is not finite")
        if cell.name.startswith(tuple(failed))
        else CellOutcome(cell=cell.name, at=cell.at, values=values(cell.at))
        for cell in grid(study, scale)
    ]


def judge(study: Study, scale: Scale, values: Values, *, failed: Sequence[str] = (), seeds: int = 9) -> list[Verdict]:
    """The verdicts on the paper's claims."""
    every = [one for one in outcomes(study, scale, values, failed=failed) if int(one.at["seed"]) < seeds]
    return [claim.verdict for claim in study.findings(every).claims]


def check_grids(study: Study) -> None:
    """At every scale, cells with unique names and places and valid runs. No data are opened."""
    for scale in ("tiny", "small", "paper"):
        cells = study.grid(scale)
        assert len(cells) > 1
        assert len({tuple(cell.at.items()) for cell in cells}) == len(cells)
        assert all(cell.run.seed == cell.at["seed"] for cell in cells)
    for cell in study.grid("small", "fashion-mnist"):
        assert cell.run.data.source == "fashion-mnist"


def check_findings(study: Study, scale: Scale, values: Values) -> Findings:
    """With all outcomes, with some missing, with all failed and with none there is a table, a figure and a summary."""
    every = outcomes(study, scale, values)
    nothing = [CellOutcome(cell=one.cell, at=one.at, fault="out of memory") for one in every]
    for some in (nothing, [], every[:1], every[::2], every[1::3]):
        found = study.findings(some)
        assert found.summary.endswith(".")
        assert found.comparison.endswith(".")
        assert all(len(row) == len(found.table.columns) for row in found.table.rows)
        assert "nan" not in f"{found.summary} {found.comparison} {found.table}"
    study.findings([]).figure()
    assert study.findings(nothing).verdict == U
    assert f"{len(nothing)} of {len(nothing)} cells failed" in study.findings(nothing).summary
    complete = study.findings(every)
    complete.figure()
    return complete
