"""D.4, Table 8: no positions, learned ones in one and two dimensions at three places, and relative ones."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from vitrail.core.paper_tables import TABLE_8
from vitrail.models.vit_config import ViTConfig, vit_config
from vitrail.recipes.table3 import vit_b16_jft
from vitrail.studies.framework.base_runs import for_card, for_cores, given
from vitrail.studies.framework.definition import Findings, Scale, Study, Table
from vitrail.studies.framework.plots import Dot, Dots, dotted
from vitrail.studies.framework.results import NOTHING, Group, Spread, by_chance, gap, group_at, groups, percent
from vitrail.studies.framework.verdicts import EXTENT, FEWSHOT, WORDS, listed, missing
from vitrail.train.config import Evaluation, Run
from vitrail.train.grid.plan import Cell, CellOutcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure


KINDS: Final = {"none": "none", "learned": "1-D learned", "learned2d": "2-D learned", "relative": "relative"}
PLACES: Final = {"stem": "stem", "every": "every layer", "shared": "every layer, shared"}
FEW: Final = 3  # more names than these are a number
CHANCE: Final = 0.05  # differences that shuffled seeds show this often are within their spread


def grid_of(scale: Scale, source: str) -> tuple[Run, int]:
    """The run that all cells derive from, and the number of seeds. The few-shot accuracy is Table 8's measure: of the
    source itself where it is small, of ImageNet at the paper's scale."""
    if scale == "paper":
        run = given(vit_b16_jft(), source)
        run = replace(run, data=replace(run.data, watch="none", test="none"))
        return replace(run, evaluation=Evaluation(fewshot="imagenet")), 1
    run = for_cores(source, steps=150) if scale == "tiny" else for_card(source, steps=5000)
    if scale == "small":
        run = replace(run, model=replace(vit_config(run.model), width=192, depth=6, mlp_width=384, heads=3))
    run = replace(run, evaluation=Evaluation(every=run.steps, fewshot=run.data.source))
    return run, 2 if scale == "tiny" else 3


def cells(scale: Scale, source: str) -> Sequence[Cell]:
    base, seeds = grid_of(scale, source)
    model = vit_config(base.model)
    return tuple(
        Cell(
            name=f"{kind}-{place}-seed{seed}",
            at={"positions": kind, "placed": place, "seed": seed},
            run=replace(base, name=f"positions {kind} {place}", model=with_positions(model, kind, place), seed=seed),
        )
        for kind, place in TABLE_8
        for seed in range(seeds)
    )


def with_positions(model: ViTConfig, kind: str, place: str) -> ViTConfig:
    """Relative positions are of every layer, whatever column of the table they stand in."""
    return replace(model, position=kind, placement=None if kind in ("none", "relative") else place)


def named(kind: str, place: str) -> str:
    return KINDS[kind] if kind in ("none", "relative") else f"{KINDS[kind]} ({PLACES[place]})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """What the cells say: the value that is read, and its spread for each way of the table that has one."""

    value: str
    none: Spread | None
    others: Mapping[str, Spread]

    @property
    def all(self) -> list[Spread]:
        return [*self.others.values(), *([self.none] if self.none else [])]


def conclude(outcomes: Sequence[CellOutcome]) -> Findings:
    found = groups(outcomes)
    value = "accuracy" if any("accuracy" in one.values for one in outcomes) else FEWSHOT
    spreads = {way: spread_at(found, way, value) for way in TABLE_8}
    others = {named(*way): spread for way, spread in spreads.items() if spread is not None and way[0] != "none"}
    facts = Found(value=value, none=spreads["none", "stem"], others=others)
    return Findings(
        table=table(found),
        figure=lambda: figure(found, value),
        sentence=sentence(facts) + missing(outcomes),
        beside=beside(facts),
    )


def group_of(found: Sequence[Group], way: tuple[str, str]) -> Group | None:
    return group_at(found, {"positions": way[0], "placed": way[1]})


def spread_at(found: Sequence[Group], way: tuple[str, str], value: str) -> Spread | None:
    group = group_of(found, way)
    return None if group is None else group.spread(value)


def table(found: Sequence[Group]) -> Table:
    rows: list[tuple[str, ...]] = []
    for way, printed in TABLE_8.items():
        group = group_of(found, way)
        values = (spread_at(found, way, "accuracy"), spread_at(found, way, FEWSHOT))
        count = str(len(group.outcomes)) if group is not None else NOTHING
        place = NOTHING if way[0] in ("none", "relative") else PLACES[way[1]]
        rows.append((KINDS[way[0]], place, *map(percent, values), count, f"{100 * printed:.2f}"))
    columns = (
        *("positions", "where they enter", "test accuracy [%]", "5-shot accuracy [%]", "seeds"),
        "paper: ViT-B/16, ImageNet 5-shot [%]",
    )
    return Table(columns=columns, rows=tuple(rows))


def figure(found: Sequence[Group], value: str) -> "Figure":
    """Ours next to Table 8."""
    ours = [Dot(name=named(*way), value=spread_at(found, way, value), family=KINDS[way[0]]) for way in TABLE_8]
    theirs = [Dot(name=named(*way), value=Spread((printed,)), family=KINDS[way[0]]) for way, printed in TABLE_8.items()]
    return dotted(
        [
            Dots(dots=ours, along=f"{WORDS[value]} [%]", title="here"),
            Dots(dots=theirs, along="ImageNet 5-shot accuracy [%]", title="the paper, Table 8"),
        ]
    )


def sentence(facts: Found) -> str:
    """What dropping positions costs, and how far the ways of giving them lie apart."""
    if facts.none is None or not facts.others:
        return "Too few cells are done to compare a network without positions with one that has them."
    together = gap(mean_of(facts.others), facts.none, facts.all)
    best, worst = extremes(facts.others)
    apart = 100 * (facts.others[best].mean - facts.others[worst].mean)
    among = (
        f"; the {len(facts.others)} ways of giving them lie within {apart:.1f} points, from {worst} to {best}"
        if len(facts.others) > 1
        else ""
    )
    verb = "costs" if together.difference > 0 else "gains"
    margin = "" if together.margin is None else f" ± {100 * together.margin:.1f}"
    points = f"{100 * abs(together.difference):.1f}{margin} points of {WORDS[facts.value]}"
    return f"Leaving positions out {verb} {points} against the mean of the others ({percent(facts.none)} %){among}."


def beside(facts: Found) -> str:
    paper = (
        "In Table 8 leaving positions out costs 2.6 to 2.9 points against every other way, and the seven others lie "
        "within 0.35 points of each other."
    )
    if facts.none is None or not facts.others:
        return f"{paper} Here there are too few cells to say."
    if gap(mean_of(facts.others), facts.none, facts.all).margin is None:
        return f"{paper} Here there is one seed each, so that nothing is decided."
    return f"{paper} Here: {worst_of_all(facts)}; {close_together(facts)}."


def worst_of_all(facts: Found) -> str:
    """Whether none is below every other way beyond the spread over seeds."""
    assert facts.none is not None
    gaps = {name: gap(spread, facts.none, facts.all) for name, spread in facts.others.items()}
    unsure = [name for name, one in gaps.items() if not one.above]
    if not unsure:
        return "agrees, none is below every other way, beyond the spread over seeds"
    if all(one.difference > 0 for one in gaps.values()):
        few = f"{listed(unsure)} {'is' if len(unsure) == 1 else 'are'}"
        few = few if len(unsure) < FEW else f"{len(unsure)} of the {len(gaps)} others are"
        return f"none has the lowest mean, as there, but {few} not above it beyond the spread over seeds"
    above = [name for name, one in gaps.items() if one.difference <= 0]
    return f"disagrees, none is not the worst: {listed(above)} did no better"


def close_together(facts: Found) -> str:
    """Whether the ways that give positions can be told apart."""
    chance = by_chance(list(facts.others.values()))
    if chance is None:
        return "too few others to compare with each other"
    best, worst = extremes(facts.others)
    apart = 100 * (facts.others[best].mean - facts.others[worst].mean)
    often = f"{chance:.0%}" if chance >= 0.01 else "less than 1%"
    said = (
        f"{apart:.1f} points between {worst} and {best}; seeds that are shuffled lie as far apart {often} of the time"
    )
    if chance >= CHANCE and (gap(facts.others[best], facts.others[worst], facts.all).margin or 0.0) > EXTENT:
        return f"the spread of seeds is too wide to tell the others apart or to call them close ({said})"
    if chance >= CHANCE:
        return f"agrees, differences among the others are within the spread of seeds ({said})"
    return f"disagrees, the others differ by more than the spread of seeds ({said})"


def mean_of(others: Mapping[str, Spread]) -> Spread:
    """All of them as one."""
    return Spread(tuple(value for spread in others.values() for value in spread.values))


def extremes(others: Mapping[str, Spread]) -> tuple[str, str]:
    """The best and the worst."""
    order = sorted(others, key=lambda name: others[name].mean)
    return order[-1], order[0]


STUDY: Final = Study(
    name="positions",
    title="Position embeddings",
    anchor="D.4, Table 8",
    cells=cells,
    conclude=conclude,
)
