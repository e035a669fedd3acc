"""D.3: the class token next to mean pooling, each with its own learning-rate sweep.

The rate is selected on a part of the training split, and the test accuracy at that rate is reported.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from vitrail.models.vit_config import ViTConfig, vit_config
from vitrail.recipes.table3 import vit_b16_jft
from vitrail.studies.base_runs import build_cpu_run, build_gpu_run, build_paper_run, with_dev
from vitrail.studies.definition import Findings, JudgedClaim, ResultTable, Scale, seed_cells
from vitrail.studies.plots import Panel, SeedLine, plot_lines
from vitrail.studies.statistics import (
    NOTHING,
    VALUE_NAMES,
    WATCHED,
    WIDE_MARGIN,
    SeedGroup,
    Verdict,
    choose_value,
    compare,
    find_spread,
    format_percent,
    group_by_seed,
    select_on_dev,
)
from vitrail.train.config import Run
from vitrail.train.grid.plan import Cell, CellOutcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure


HEADS: Final = {"token": "class token", "mean": "mean pooling"}
SIMILAR: Final = 0.01  # a share: the reading of the paper's "similarly well"
# What Figure 9's three curves show; it prints no numbers.
FIGURE_9: Final = {
    ("token", 8e-4): "the reference",
    ("mean", 8e-4): "far below the token",
    ("mean", 3e-4): "as good as the token",
}


def with_head(model: ViTConfig, head: str) -> ViTConfig:
    """The network with a class token, or without one and its patches averaged into one linear layer."""
    if head == "token":
        return replace(model, pool="token", class_token=True)
    return replace(model, pool="mean", class_token=False, head="linear")


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


def cells(scale: Scale, source: str) -> Sequence[Cell]:
    return tuple(iter_cells(*build_base(scale, source)))


def iter_cells(base: Run, rates: Sequence[float], seeds: int) -> Iterator[Cell]:
    for head in HEADS:
        model = with_head(vit_config(base.model), head)
        for rate in rates:
            run = replace(base, name=f"head {head} {rate:g}", model=model, optim=replace(base.optim, lr=rate))
            yield from seed_cells(f"{head}-lr{rate:g}", {"head": head, "lr": rate}, run, seeds)


def analyse(outcomes: Sequence[CellOutcome]) -> Findings:
    groups, value = group_by_seed(outcomes), choose_value(outcomes)
    best = {head: group for head in HEADS if (group := select_on_dev(groups, value, head=head)) is not None}
    parts = [f"{HEADS[head]} {format_percent(best[head].spread(value))} % at {best[head].at['lr']:g}" for head in best]
    summary = f"{VALUE_NAMES[value]}, each at the learning rate that is best on the dev split: {', '.join(parts)}."
    return Findings(
        table=build_table(groups, best, value),
        figure=partial(draw_figure, groups, value),
        summary=summary if len(best) == len(HEADS) else "",
        paper="D.3: pooling does as well as the class token, but at another learning rate.",
        claims=compare_with_paper(groups, best, value) if len(best) == len(HEADS) else (),
    )


def compare_with_paper(groups: Sequence[SeedGroup], best: Mapping[str, SeedGroup], value: str) -> list[JudgedClaim]:
    """Whether both heads do equally well, and whether they prefer different rates."""
    token, mean = best["token"], best["mean"]
    gap = compare(mean.spread(value), token.spread(value))
    assert gap is not None
    verdict = Verdict.UNDECIDED
    if gap.margin is not None and not gap.is_open:
        verdict = Verdict.PARTLY if abs(gap.difference) <= SIMILAR else Verdict.DISAGREES
    elif gap.margin is not None and gap.margin <= WIDE_MARGIN:
        verdict = Verdict.AGREES
    rates = tuple(group.at["lr"] for group in (token, mean))
    if rates[0] == rates[1]:
        other = JudgedClaim(f"both have the same best rate, {rates[0]:g}", Verdict.DISAGREES)
    else:
        gain = compare(mean.spread(value), find_spread(groups, value, head="mean", lr=rates[0]))
        gains = "" if gain is None else f"; at its own rather than the token's, pooling gains {gain}"
        other = JudgedClaim(f"the best rates differ, {rates[0]:g} and {rates[1]:g}{gains}", Verdict.AGREES)
    return [JudgedClaim(f"pooling minus the token is {gap}, {gap.reading}", verdict), other]


def build_table(groups: Sequence[SeedGroup], best: Mapping[str, SeedGroup], value: str) -> ResultTable:
    rows: list[tuple[str, ...]] = []
    for group in groups:
        head, rate = str(group.at["head"]), float(group.at["lr"])
        scores = (format_percent(group.spread(name)) for name in (WATCHED, value))
        selected = "yes" if group is best.get(head) else ""
        rows.append((HEADS[head], f"{rate:g}", *scores, selected, FIGURE_9.get((head, rate), NOTHING)))
    columns = ("head", "learning rate", f"{VALUE_NAMES[WATCHED]} [%]", f"{VALUE_NAMES[value]} [%]", "selected on dev")
    return ResultTable(columns=(*columns, "paper, Figure 9 (5-shot)"), rows=tuple(rows))


def draw_figure(groups: Sequence[SeedGroup], value: str) -> "Figure":
    lines = [
        SeedLine(
            name=name, points=[(float(one.at["lr"]), one.spread(value)) for one in groups if one.at["head"] == head]
        )
        for head, name in HEADS.items()
    ]
    rates = {float(group.at["lr"]): f"{group.at['lr']:g}" for group in groups}
    return plot_lines(
        [Panel(lines=lines, along="learning rate", up=f"{VALUE_NAMES[value]} [%]", log=True, ticks=rates)]
    )
