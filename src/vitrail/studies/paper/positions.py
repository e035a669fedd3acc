"""D.4, Table 8: no positions, learned ones in one and two dimensions at three places, and relative ones."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from vitrail.core.paper_tables import TABLE_8
from vitrail.core.text import join_words
from vitrail.models.vit_config import ViTConfig, vit_config
from vitrail.recipes.table3 import vit_b16_jft
from vitrail.studies.base_runs import build_cpu_run, build_gpu_run, build_paper_run
from vitrail.studies.definition import Findings, JudgedClaim, ResultTable, Scale, seed_cells
from vitrail.studies.plots import DotColumn, SeedDot, plot_dots
from vitrail.studies.statistics import (
    FEWSHOT,
    NOTHING,
    VALUE_NAMES,
    WIDE_MARGIN,
    SeedGroup,
    Spread,
    Verdict,
    compare,
    find_group,
    find_spread,
    format_percent,
    group_by_seed,
    permutation_test,
)
from vitrail.train.config import Evaluation, Run
from vitrail.train.grid.plan import Cell, CellOutcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure


KINDS: Final = {"none": "none", "learned": "1-D learned", "learned2d": "2-D learned", "relative": "relative"}
PLACES: Final = {"stem": "stem", "every": "every layer", "shared": "every layer, shared"}
UNPLACED: Final = ("none", "relative")  # whatever column of the table they are in
FEW: Final = 3  # names up to which a text lists them
CHANCE: Final = 0.05  # differences that shuffled seeds show this often are within their spread


def build_base(scale: Scale, source: str) -> tuple[Run, int]:
    """The run that all cells derive from, and the number of seeds. Table 8's measure is few-shot accuracy: here of the
    source itself if it is small, of ImageNet at the paper's scale."""
    if scale == "paper":
        run = build_paper_run(vit_b16_jft(), source)
        return replace(run, data=replace(run.data, watch="none", test="none")), 1
    run = build_cpu_run(source, steps=150) if scale == "tiny" else build_gpu_run(source, steps=5000)
    if scale == "small":
        run = replace(run, model=replace(vit_config(run.model), width=192, depth=6, mlp_width=384, heads=3))
    run = replace(run, evaluation=Evaluation(every=run.steps, fewshot=run.data.source))
    return run, 2 if scale == "tiny" else 3


def cells(scale: Scale, source: str) -> Sequence[Cell]:
    base, seeds = build_base(scale, source)
    model = vit_config(base.model)
    return tuple(
        cell
        for kind, place in TABLE_8
        for cell in seed_cells(
            f"{kind}-{place}",
            {"positions": kind, "placed": place},
            replace(base, name=f"positions {kind} {place}", model=with_positions(model, kind, place)),
            seeds,
        )
    )


def with_positions(model: ViTConfig, kind: str, place: str) -> ViTConfig:
    return replace(model, position=kind, placement=None if kind in UNPLACED else place)


def format_kind(kind: str, place: str) -> str:
    return KINDS[kind] if kind in UNPLACED else f"{KINDS[kind]} ({PLACES[place]})"


def analyse(outcomes: Sequence[CellOutcome]) -> Findings:
    groups = group_by_seed(outcomes)
    value = "accuracy" if any("accuracy" in one.values for one in outcomes) else FEWSHOT
    spreads = {
        format_kind(kind, place): spread
        for kind, place in TABLE_8
        if (spread := find_spread(groups, value, positions=kind, placed=place)) is not None
    }
    none = spreads.pop("none", None)
    return Findings(
        table=build_table(groups),
        figure=partial(draw_figure, groups, value),
        summary=summarise(none, spreads, value) if none and spreads else "",
        paper="Table 8: without positions accuracy is 2.6 to 2.9 points lower than with any other kind, and the seven "
        "others lie within 0.35 points of each other.",
        claims=[judge_none(none, spreads), judge_others(none, spreads)] if none and spreads else (),
    )


def summarise(none: Spread, others: Mapping[str, Spread], value: str) -> str:
    """What dropping positions costs, and how far apart the kinds of positions are."""
    together = Spread(tuple(each for spread in others.values() for each in spread.values))
    gap = compare(together, none, [*others.values(), none])
    best, worst = find_extremes(others)
    among = f"; the {len(others)} kinds lie within {measure_range(others):.1f} points, from {worst} to {best}"
    margin = "" if gap.margin is None else f" ± {100 * gap.margin:.1f}"
    points = f"{100 * abs(gap.difference):.1f}{margin} points of {VALUE_NAMES[value]}"
    return (
        f"Dropping positions {'costs' if gap.difference > 0 else 'gains'} {points} against the mean of the others "
        f"({format_percent(none)} %){among if len(others) > 1 else ''}."
    )


def judge_none(none: Spread, others: Mapping[str, Spread]) -> JudgedClaim:
    """Whether no positions are worse than every kind, beyond the spread over seeds."""
    gaps = {name: compare(spread, none, [*others.values(), none]) for name, spread in others.items()}
    unsure = [name for name, gap in gaps.items() if not gap.is_above]
    no_worse = [name for name, gap in gaps.items() if gap.difference <= 0]
    if not unsure:
        return JudgedClaim("none is below every other kind, beyond the spread over seeds", Verdict.AGREES)
    if all(gap.margin is None for gap in gaps.values()):
        return JudgedClaim("none against the others is a matter of one seed each", Verdict.UNDECIDED)
    if no_worse:
        return JudgedClaim(f"none is not the worst: {join_words(no_worse)} did no better", Verdict.DISAGREES)
    few = join_words(unsure) if len(unsure) < FEW else f"{len(unsure)} of the {len(gaps)} others"
    return JudgedClaim(f"none has the lowest mean, but not below {few} beyond the spread over seeds", Verdict.PARTLY)


def judge_others(none: Spread, others: Mapping[str, Spread]) -> JudgedClaim:
    """Whether the kinds of positions can be told apart."""
    chance = permutation_test(list(others.values()))
    if chance is None:
        return JudgedClaim("too few seeds to compare the others with each other", Verdict.UNDECIDED)
    best, worst = find_extremes(others)
    often = f"{chance:.0%}" if chance >= 0.01 else "less than 1%"
    detail = (
        f"{measure_range(others):.1f} points between {worst} and {best}; shuffled seeds lie as far apart {often} of "
        "the time"
    )
    margin = compare(others[best], others[worst], [*others.values(), none]).margin or 0.0
    if chance < CHANCE:
        return JudgedClaim(f"the others differ by more than the spread over seeds, {detail}", Verdict.DISAGREES)
    if margin > WIDE_MARGIN:
        return JudgedClaim(f"the seeds spread too widely to tell the others apart, {detail}", Verdict.UNDECIDED)
    return JudgedClaim(f"differences among the others are within the spread over seeds, {detail}", Verdict.AGREES)


def find_extremes(others: Mapping[str, Spread]) -> tuple[str, str]:
    """The best and the worst."""
    order = sorted(others, key=lambda name: others[name].mean)
    return order[-1], order[0]


def measure_range(others: Mapping[str, Spread]) -> float:
    """From the worst to the best, in points."""
    means = [spread.mean for spread in others.values()]
    return 100 * (max(means) - min(means))


def build_table(groups: Sequence[SeedGroup]) -> ResultTable:
    rows: list[tuple[str, ...]] = []
    for (kind, place), printed in TABLE_8.items():
        group = find_group(groups, positions=kind, placed=place)
        values = (None if group is None else group.spread(value) for value in ("accuracy", FEWSHOT))
        count = NOTHING if group is None else str(len(group.outcomes))
        where = NOTHING if kind in UNPLACED else PLACES[place]
        rows.append((KINDS[kind], where, *map(format_percent, values), count, f"{100 * printed:.2f}"))
    columns = ("positions", "where they enter", "test accuracy [%]", "5-shot accuracy [%]", "seeds")
    return ResultTable(columns=(*columns, "paper: ViT-B/16, ImageNet 5-shot [%]"), rows=tuple(rows))


def draw_figure(groups: Sequence[SeedGroup], value: str) -> "Figure":
    """Ours next to Table 8."""
    ours: list[SeedDot] = []
    theirs: list[SeedDot] = []
    for (kind, place), printed in TABLE_8.items():
        name, spread = format_kind(kind, place), find_spread(groups, value, positions=kind, placed=place)
        ours.append(SeedDot(name=name, value=spread, family=KINDS[kind]))
        theirs.append(SeedDot(name=name, value=Spread((printed,)), family=KINDS[kind]))
    return plot_dots(
        [
            DotColumn(dots=ours, along=f"{VALUE_NAMES[value]} [%]", title="here"),
            DotColumn(dots=theirs, along="ImageNet 5-shot accuracy [%]", title="the paper, Table 8"),
        ]
    )
