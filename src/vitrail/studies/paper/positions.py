"""D.4, Table 8: no positions, learned ones in one and two dimensions at three places, and relative ones."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from vitrail.core.paper_tables import TABLE_8
from vitrail.core.text import join_words
from vitrail.models.vit_config import vit_config
from vitrail.recipes.table3 import vit_b16_jft
from vitrail.studies import statistics as stats
from vitrail.studies.base_runs import build_cpu_run, build_gpu_run, build_paper_run
from vitrail.studies.definition import Findings, JudgedClaim, ResultTable, Scale, seed_cells
from vitrail.studies.plots import DotColumn, SeedDot
from vitrail.studies.statistics import FEWSHOT, NOTHING, VALUE_NAMES, WIDE_MARGIN, SeedGroup, Spread, Verdict
from vitrail.train.config import Run, Scoring
from vitrail.train.grid.plan import Cell, CellOutcome

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
    run = replace(run, evaluation=Scoring(every=run.steps, fewshot=run.data.source))
    return run, 2 if scale == "tiny" else 3


def cells(scale: Scale, source: str) -> Iterator[Cell]:
    base, seeds = build_base(scale, source)
    for kind, place in TABLE_8:
        model = replace(vit_config(base.model), position=kind, placement=None if kind in UNPLACED else place)
        run = replace(base, name=f"positions {kind} {place}", model=model)
        yield from seed_cells(f"{kind}-{place}", {"positions": kind, "placed": place}, run, seeds)


def format_kind(kind: str, place: str) -> str:
    return KINDS[kind] if kind in UNPLACED else f"{KINDS[kind]} ({PLACES[place]})"


def analyse(outcomes: Sequence[CellOutcome]) -> Findings:
    groups = stats.group_by_seed(outcomes)
    value = "accuracy" if any("accuracy" in one.values for one in outcomes) else FEWSHOT
    known = {(kind, place): stats.find_spread(groups, value, positions=kind, placed=place) for kind, place in TABLE_8}
    spreads = {format_kind(*at): spread for at, spread in known.items() if spread is not None}
    none = spreads.pop("none", None)
    ours = [SeedDot(name=format_kind(*at), value=spread, family=KINDS[at[0]]) for at, spread in known.items()]
    theirs = [replace(dot, value=Spread((share,))) for dot, share in zip(ours, TABLE_8.values(), strict=True)]
    return Findings(
        table=build_table(groups),
        panels=[
            DotColumn(dots=ours, along=f"{VALUE_NAMES[value]} [%]", title="here"),
            DotColumn(dots=theirs, along="ImageNet 5-shot accuracy [%]", title="the paper, Table 8"),
        ],
        summary=summarise(none, spreads, value) if none and spreads else "",
        paper="Table 8: without positions accuracy is 2.6 to 2.9 points lower than with any other kind, and the seven "
        "others lie within 0.35 points of each other.",
        claims=[judge_none(none, spreads), judge_others(none, spreads)] if none and spreads else (),
    )


def summarise(none: Spread, others: Mapping[str, Spread], value: str) -> str:
    """What dropping positions costs, and how far apart the kinds of positions are."""
    together = Spread(tuple(each for spread in others.values() for each in spread.values))
    gap = stats.compare(together, none, [*others.values(), none])
    best, worst, points = find_extremes(others)
    among = f"; the {len(others)} kinds lie within {points:.1f} points, from {worst} to {best}"
    margin = "" if gap.margin is None else f" ± {100 * gap.margin:.1f}"
    return (
        f"Dropping positions {'costs' if gap.difference > 0 else 'gains'} {100 * abs(gap.difference):.1f}{margin} "
        f"points of {VALUE_NAMES[value]} against the mean of the others ({stats.format_spread(none)} %)"
        f"{among if len(others) > 1 else ''}."
    )


def judge_none(none: Spread, others: Mapping[str, Spread]) -> JudgedClaim:
    """Whether no positions are worse than every kind, beyond the spread over seeds."""
    gaps = {name: stats.compare(spread, none, [*others.values(), none]) for name, spread in others.items()}
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
    chance = stats.permutation_test(list(others.values()))
    if chance is None:
        return JudgedClaim("too few seeds to compare the others with each other", Verdict.UNDECIDED)
    best, worst, points = find_extremes(others)
    often = f"{chance:.0%}" if chance >= 0.01 else "less than 1%"
    detail = f"{points:.1f} points between {worst} and {best}; shuffled seeds lie as far apart {often} of the time"
    margin = stats.compare(others[best], others[worst], [*others.values(), none]).margin or 0.0
    if chance < CHANCE:
        return JudgedClaim(f"the others differ by more than the spread over seeds, {detail}", Verdict.DISAGREES)
    if margin > WIDE_MARGIN:
        return JudgedClaim(f"the seeds spread too widely to tell the others apart, {detail}", Verdict.UNDECIDED)
    return JudgedClaim(f"differences among the others are within the spread over seeds, {detail}", Verdict.AGREES)


def find_extremes(others: Mapping[str, Spread]) -> tuple[str, str, float]:
    """The best, the worst, and the points between them."""
    best, worst = (pick(others, key=lambda name: others[name].mean) for pick in (max, min))
    return best, worst, 100 * (others[best].mean - others[worst].mean)


def build_table(groups: Sequence[SeedGroup]) -> ResultTable:
    rows: list[tuple[str, ...]] = []
    for (kind, place), printed in TABLE_8.items():
        group = stats.find_group(groups, positions=kind, placed=place)
        values = (None if group is None else group.spread(value) for value in ("accuracy", FEWSHOT))
        count = NOTHING if group is None else str(len(group.outcomes))
        where = NOTHING if kind in UNPLACED else PLACES[place]
        rows.append((KINDS[kind], where, *map(stats.format_spread, values), count, f"{100 * printed:.2f}"))
    columns = ("positions", "where they enter", "test accuracy [%]", "5-shot accuracy [%]", "seeds")
    return ResultTable((*columns, "paper: ViT-B/16, ImageNet 5-shot [%]"), rows)
