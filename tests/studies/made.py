"""Outcomes as a study's own cells would have them, with values that a test gives."""

from collections.abc import Callable, Mapping, Sequence

from vitrail.studies.framework.definition import Findings, Scale, Study, grid
from vitrail.train.grid.plan import Cell, CellOutcome, Coordinate

Values = Callable[[Mapping[str, Coordinate]], Mapping[str, float]]
NOISE = (-0.002, 0.001, 0.001)  # by seed


def noisy(value: float, at: Mapping[str, Coordinate]) -> float:
    """A value as seeds would scatter it."""
    return value + NOISE[int(at["seed"]) % len(NOISE)]


def outcomes(study: Study, scale: Scale, values: Values, *, failed: Sequence[str] = ()) -> list[CellOutcome]:
    """Every cell of the grid with its values; those whose name begins with one of `failed` have none."""
    return [outcome(cell, values, failed) for cell in grid(study, scale)]


def outcome(cell: Cell, values: Values, failed: Sequence[str]) -> CellOutcome:
    if any(cell.name.startswith(name) for name in failed):
        return CellOutcome(cell=cell.name, at=cell.at, fault="the loss is not finite")
    return CellOutcome(cell=cell.name, at=cell.at, values=values(cell.at))


def check_grids(study: Study) -> None:
    """At every scale, cells with names of their own and runs that hold together; `grid` and `Run` refuse others. No
    data are opened."""
    for scale in ("tiny", "small", "paper"):
        cells = grid(study, scale)
        assert len(cells) > 1
        assert all(cell.run.model is not None for cell in cells)
        assert len({tuple(cell.at.items()) for cell in cells}) == len(cells)
        assert all(cell.run.seed == cell.at["seed"] for cell in cells)
    for cell in grid(study, "small", "fashion-mnist"):
        assert cell.run.data.source == "fashion-mnist"


def check_findings(study: Study, scale: Scale, values: Values) -> Findings:
    """With all outcomes, with some missing, with all failed and with none there is a table, a figure and a sentence."""
    every = outcomes(study, scale, values)
    whole = study.conclude(every)
    nothing = [CellOutcome(cell=one.cell, at=one.at, fault="out of memory") for one in every]
    parts = [every[at::step] for step in (2, 3) for at in range(step)]
    for some in (every, nothing, [], every[:1], *parts):
        found = study.conclude(some)
        assert found.sentence.endswith(".")
        assert found.beside.endswith(".")
        assert all(len(row) == len(found.table.columns) for row in found.table.rows)
        assert "nan" not in f"{found.sentence} {found.beside} {found.table}"
        found.figure()
    assert f"{len(nothing)} of {len(nothing)} cells failed" in study.conclude(nothing).sentence
    return whole
