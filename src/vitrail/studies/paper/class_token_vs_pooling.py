"""D.3: the class token next to mean pooling, each with its own learning-rate sweep.

The rate is selected on a part of the training split, and the test accuracy at that rate is reported.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from vitrail.models.vit_config import vit_config
from vitrail.recipes.table3 import vit_b16_jft
from vitrail.studies import statistics as stats
from vitrail.studies.base_runs import build_cpu_run, build_gpu_run, build_paper_run, with_dev
from vitrail.studies.definition import Findings, JudgedClaim, ResultTable, Scale, seed_cells
from vitrail.studies.plots import Panel, SeedLine
from vitrail.studies.statistics import NOTHING, VALUE_NAMES, WATCHED, SeedGroup, Verdict
from vitrail.train.config import Run
from vitrail.train.grid.plan import Cell, CellOutcome

HEADS: Final = {"token": "class token", "mean": "mean pooling"}
SIMILAR: Final = 0.01  # a share: the reading of the paper's "similarly well"
# What Figure 9's three curves show; it prints no numbers.
FIGURE_9: Final = {
    ("token", 8e-4): "the reference",
    ("mean", 8e-4): "far below the token",
    ("mean", 3e-4): "as good as the token",
}


def build_base(scale: Scale, source: str) -> tuple[Run, tuple[float, ...], int]:
    """The run that all cells derive from, the learning rates, and the number of seeds.

    At the paper's scale the rates are those of Figure 9, tried for both heads. The paper does not name the ViT; 8e-4
    over 7 epochs is Table 3's ViT-B on JFT-300M. A thousandth of JFT is held out for selection, which the paper does
    not mention."""
    if scale == "tiny":
        return with_dev(build_cpu_run(source, steps=150), 0.2), (1e-3, 3e-3, 1e-2), 2
    if scale == "small":
        return with_dev(build_gpu_run(source, steps=3000), 0.1), (1e-4, 3e-4, 1e-3, 3e-3), 3
    return with_dev(build_paper_run(vit_b16_jft(), source), 0.001), (3e-4, 8e-4), 1


def cells(scale: Scale, source: str) -> Iterator[Cell]:
    """With a class token, or without one and the patches averaged into one linear layer."""
    base, rates, seeds = build_base(scale, source)
    vit = vit_config(base.model)
    models = {
        "token": replace(vit, pool="token", class_token=True),
        "mean": replace(vit, pool="mean", class_token=False, head="linear"),
    }
    for head, model in models.items():
        for rate in rates:
            run = replace(base, name=f"head {head} {rate:g}", model=model, optim=replace(base.optim, lr=rate))
            yield from seed_cells(f"{head}-lr{rate:g}", {"head": head, "lr": rate}, run, seeds)


def analyse(outcomes: Sequence[CellOutcome]) -> Findings:
    groups, value = stats.group_by_seed(outcomes), stats.choose_value(outcomes)
    best = {head: group for head in HEADS if (group := stats.select_on_dev(groups, value, head=head)) is not None}
    parts = [f"{HEADS[at]} {stats.format_spread(one.spread(value))} % at {one.at['lr']:g}" for at, one in best.items()]
    summary = f"{VALUE_NAMES[value]}, each at the learning rate that is best on the dev split: {', '.join(parts)}."
    points = {
        head: [(float(one.at["lr"]), one.spread(value)) for one in groups if one.at["head"] == head] for head in HEADS
    }
    lines = [SeedLine(name=name, points=points[head]) for head, name in HEADS.items()]
    rates = {float(group.at["lr"]): f"{group.at['lr']:g}" for group in groups}
    return Findings(
        table=build_table(groups, best, value),
        panels=[Panel(lines=lines, along="learning rate", up=f"{VALUE_NAMES[value]} [%]", log=True, ticks=rates)],
        summary=summary if len(best) == len(HEADS) else "",
        paper="D.3: pooling does as well as the class token, but at another learning rate.",
        claims=compare_with_paper(groups, best, value) if len(best) == len(HEADS) else (),
    )


def compare_with_paper(groups: Sequence[SeedGroup], best: Mapping[str, SeedGroup], value: str) -> list[JudgedClaim]:
    """Whether both heads do equally well, and whether they prefer different rates."""
    token, mean = best["token"], best["mean"]
    gap = stats.compare(mean.spread(value), token.spread(value))
    assert gap is not None
    verdict = Verdict.UNDECIDED
    if gap.margin is not None and not gap.is_open:
        verdict = Verdict.PARTLY if abs(gap.difference) <= SIMILAR else Verdict.DISAGREES
    elif gap.margin is not None and gap.margin <= stats.WIDE_MARGIN:
        verdict = Verdict.AGREES
    rates = tuple(group.at["lr"] for group in (token, mean))
    if rates[0] == rates[1]:
        other = JudgedClaim(f"both have the same best rate, {rates[0]:g}", Verdict.DISAGREES)
    else:
        gain = stats.compare(mean.spread(value), stats.find_spread(groups, value, head="mean", lr=rates[0]))
        gains = "" if gain is None else f"; at its own rather than the token's, pooling gains {gain}"
        other = JudgedClaim(f"the best rates differ, {rates[0]:g} and {rates[1]:g}{gains}", Verdict.AGREES)
    return [JudgedClaim(f"pooling minus the token is {gap}, {gap.reading}", verdict), other]


def build_table(groups: Sequence[SeedGroup], best: Mapping[str, SeedGroup], value: str) -> ResultTable:
    rows = [
        (
            HEADS[str(group.at["head"])],
            f"{group.at['lr']:g}",
            *(stats.format_spread(group.spread(name)) for name in (WATCHED, value)),
            "yes" if group is best.get(str(group.at["head"])) else "",
            FIGURE_9.get((str(group.at["head"]), float(group.at["lr"])), NOTHING),
        )
        for group in groups
    ]
    columns = ("head", "learning rate", f"{VALUE_NAMES[WATCHED]} [%]", f"{VALUE_NAMES[value]} [%]", "selected on dev")
    return ResultTable((*columns, "paper, Figure 9 (5-shot)"), rows)
