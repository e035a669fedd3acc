"""D.3: the class token next to mean pooling, each with a learning-rate sweep of its own.

The rate is chosen on a part of the training split, and the test accuracy of that rate is what is reported.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from vitrail.models.vit_config import ViTConfig, vit_config
from vitrail.recipes.table3 import vit_b16_jft
from vitrail.studies.framework.base_runs import for_card, for_cores, given, with_dev
from vitrail.studies.framework.definition import Findings, Scale, Study, Table
from vitrail.studies.framework.plots import Line, Panel, Point, plot
from vitrail.studies.framework.results import NOTHING, Group, group_at, groups, percent
from vitrail.studies.framework.verdicts import EXTENT, WATCHED, WORDS, apart, in_words, measure, missing, selected
from vitrail.train.config import Evaluation, Run
from vitrail.train.grid.plan import Cell, CellOutcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure


HEADS: Final = {"token": "class token", "mean": "mean pooling"}
SIMILAR: Final = 0.01  # a share: what "similarly well" is held to mean
# What Figure 9 shows of the three curves that it has; it prints no numbers.
PAPER: Final = {
    ("token", 8e-4): "the reference",
    ("mean", 8e-4): "far below the token",
    ("mean", 3e-4): "as good as the token",
}


def with_head(model: ViTConfig, head: str) -> ViTConfig:
    """The network with a class token, or without one and its patches averaged into one linear layer."""
    if head == "token":
        return replace(model, pool="token", class_token=True)
    return replace(model, pool="mean", class_token=False, head="linear")


def grid_of(scale: Scale, source: str) -> tuple[Run, tuple[float, ...], int]:
    """The run that all cells derive from, the learning rates, and the number of seeds.

    At the paper's scale the rates are those of Figure 9, tried for both heads. Which ViT it was is not said; 8e-4 over
    7 epochs is Table 3's ViT-B on JFT-300M. A thousandth of JFT is held out here to choose by, which the paper does not
    tell of."""
    if scale == "tiny":
        return with_dev(for_cores(source, steps=150), 0.2), (1e-3, 3e-3, 1e-2), 2
    if scale == "small":
        return with_dev(for_card(source, steps=3000), 0.1), (1e-4, 3e-4, 1e-3, 3e-3), 3
    run = replace(vit_b16_jft(), evaluation=Evaluation(fewshot="imagenet"))
    return with_dev(given(run, source), 0.001), (3e-4, 8e-4), 1


def cells(scale: Scale, source: str) -> Sequence[Cell]:
    base, rates, seeds = grid_of(scale, source)
    model = vit_config(base.model)
    return tuple(
        Cell(
            name=f"{head}-lr{rate:g}-seed{seed}",
            at={"head": head, "lr": rate, "seed": seed},
            run=replace(
                base,
                name=f"head {head} {rate:g}",
                model=with_head(model, head),
                optim=replace(base.optim, lr=rate),
                seed=seed,
            ),
        )
        for head in HEADS
        for rate in rates
        for seed in range(seeds)
    )


def conclude(outcomes: Sequence[CellOutcome]) -> Findings:
    found, value = groups(outcomes), measure(outcomes)
    best = {head: selected(found, {"head": head}, value) for head in HEADS}
    return Findings(
        table=table(found, best, value),
        figure=partial(figure, found, value),
        sentence=sentence(best, value) + missing(outcomes),
        beside=beside(found, best, value),
    )


def table(found: Sequence[Group], best: dict[str, Group | None], value: str) -> Table:
    rows = tuple(
        (
            HEADS[str(group.at["head"])],
            f"{group.at['lr']:g}",
            percent(group.spread(WATCHED)),
            percent(group.spread(value)),
            "yes" if group is best[str(group.at["head"])] else "",
            PAPER.get((str(group.at["head"]), float(group.at["lr"])), NOTHING),
        )
        for group in found
    )
    columns = ("head", "learning rate", f"{WORDS[WATCHED]} [%]", f"{WORDS[value]} [%]", "chosen on dev")
    return Table(columns=(*columns, "paper, Figure 9 (5-shot)"), rows=rows)


def sentence(best: dict[str, Group | None], value: str) -> str:
    for head, group in best.items():
        if group is None:
            return f"No cell with {HEADS[head]} has finished, so that nothing can be compared yet."
    parts = [
        f"{HEADS[head]} {percent(group.spread(value))} % at {group.at['lr']:g}"
        for head, group in best.items()
        if group is not None
    ]
    return f"{WORDS[value].capitalize()}, each at the learning rate that is best on the dev split: {', '.join(parts)}."


def beside(found: Sequence[Group], best: dict[str, Group | None], value: str) -> str:
    said = "D.3: pooling does as well as the class token, but at another learning rate."
    token, mean = best["token"], best["mean"]
    if token is None or mean is None:
        return f"{said} Not decided here: cells are missing."
    between = apart(mean.spread(value), token.spread(value))
    assert between is not None
    less = f"pooling less the token is {between}"
    if between.margin is None:
        verdict = f"Here {less}, {in_words(between)}."
    elif between.open and between.margin <= EXTENT:
        verdict = f"Here too: {less}, {in_words(between)}."
    elif between.open:
        verdict = f"Nothing here speaks against it: {less}, {in_words(between)}."
    elif abs(between.difference) <= SIMILAR:
        verdict = f"Here nearly so: {less}, {in_words(between)}, though not of more than a point."
    else:
        verdict = f"Not so here: {less}, {in_words(between)}."
    return f"{said} {verdict} {about_rates(found, token, mean, value)}"


def about_rates(found: Sequence[Group], token: Group, mean: Group, value: str) -> str:
    """Whether the heads want different rates, and what pooling would lose at the token's."""
    if token.at["lr"] == mean.at["lr"]:
        return f"Both have the same best rate here, {token.at['lr']:g}, unlike in the paper."
    there = group_at(found, {"head": "mean", "lr": token.at["lr"]})
    text = f"The best rates differ, as in the paper ({token.at['lr']:g} and {mean.at['lr']:g})"
    worse = None if there is None else there.spread(value)
    lost = apart(mean.spread(value), worse)
    if lost is None:
        return f"{text}."
    return f"{text}; at its own rather than the token's, pooling gains {lost}."


def figure(found: Sequence[Group], value: str) -> "Figure":
    lines: list[Line] = []
    for head, name in HEADS.items():
        points = [
            Point(x=float(group.at["lr"]), y=spread)
            for group in found
            if group.at["head"] == head and (spread := group.spread(value)) is not None
        ]
        lines.append(Line(name=name, points=points))
    rates = {float(group.at["lr"]): f"{group.at['lr']:g}" for group in found}
    return plot([Panel(lines=lines, along="learning rate", up=f"{WORDS[value]} [%]", log=True, ticks=rates)])


STUDY: Final = Study(
    name="head",
    title="The class token and mean pooling, each at its own learning rate",
    anchor="D.3",
    cells=cells,
    conclude=conclude,
)
