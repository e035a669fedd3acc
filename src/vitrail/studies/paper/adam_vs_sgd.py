"""D.1, Table 7: ResNets trained with Adam and with SGD.

Each optimiser has its own sweep, selected on a part of the training split. On small data sets the networks are trained
and scored from scratch; at the paper's scale they are pre-trained on JFT-300M and fine-tuned on five data sets.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Final

from vitrail.core.paper_tables import AVERAGE_5
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.zoo import adapt_config, mini_bit
from vitrail.optim.config import Optim, Schedule
from vitrail.recipes.run_overrides import find_sweep_grid, with_image_size
from vitrail.recipes.table3 import bit_r50x1_jft, bit_r152x2_jft
from vitrail.studies.base_runs import build_cpu_run, build_gpu_run, with_dev, with_source
from vitrail.studies.definition import Findings, ResultTable, Scale, judge_gap, seed_cells
from vitrail.studies.paper.scaling import FINETUNINGS
from vitrail.studies.plots import DotColumn, SeedDot, plot_dots
from vitrail.studies.statistics import (
    NOTHING,
    Gap,
    SeedGroup,
    Spread,
    compare,
    format_percent,
    group_by_seed,
    select_on_dev,
)
from vitrail.train.config import Run
from vitrail.train.grid.plan import Cell, CellOutcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure


KINDS: Final = {"adam": "Adam", "sgd": "SGD"}
JFT: Final = "jft"
TABLE_7: Final[Mapping[tuple[str, str], Mapping[str, float]]] = {
    ("R50x1", "adam"): {"imagenet": 77.54, "cifar10": 97.67, "cifar100": 86.07, "pets": 91.11, "flowers102": 94.26},
    ("R50x1", "sgd"): {"imagenet": 78.24, "cifar10": 97.46, "cifar100": 85.17, "pets": 91.00, "flowers102": 92.06},
    ("R152x2", "adam"): {"imagenet": 84.97, "cifar10": 99.06, "cifar100": 92.05, "pets": 95.37, "flowers102": 98.62},
    ("R152x2", "sgd"): {"imagenet": 84.37, "cifar10": 99.07, "cifar100": 91.06, "pets": 94.79, "flowers102": 99.32},
}
# BiT's pre-training: 0.03 per batch of 256, divided by ten after 10, 23, 30 and 37 of 40 epochs. Its weight decay of
# 1e-4 goes through a momentum of 0.9, which sums to ten times as much; ours does not.
BIT: Final = Optim(kind="sgd", lr=0.03 * 4096 / 256, momentum=0.9, weight_decay=1e-3)
BIT_STEPS: Final = Schedule(decay="steps", warmup=5_000, milestones=(10 / 40, 23 / 40, 30 / 40, 37 / 40))
Pairs = Mapping[tuple[str, str], Mapping[str, SeedGroup | None]]  # (network, data) -> by optimiser


def cells(scale: Scale, source: str) -> Sequence[Cell]:
    if scale == "paper":
        return tuple(iter_paper_cells(source))
    if scale == "tiny":
        run = with_dev(replace(with_image_size(build_cpu_run(source, steps=80), 8), batch=32), 0.2)
        networks = {"R8": ResNetConfig(blocks=(1, 1), factor=0.25, root="3x3", groups=4, classes=10)}
        return tuple(iter_cells(run, networks, {"adam": (1e-3, 5e-3), "sgd": (0.03, 0.1)}, 2))
    networks = {name: mini_bit(name) for name in ("mini-R14", "mini-R26")}
    rates = {"adam": (3e-4, 1e-3, 3e-3), "sgd": (0.03, 0.1, 0.3)}
    return tuple(iter_cells(with_dev(build_gpu_run(source, steps=2000), 0.1), networks, rates, 3))


def iter_cells(
    run: Run, networks: Mapping[str, ResNetConfig], rates: Mapping[str, Sequence[float]], seeds: int
) -> Iterator[Cell]:
    """Adam as the recipe has it, and SGD with momentum 0.9 and the usual weight decay."""
    sgd = Optim(kind="sgd", momentum=0.9, weight_decay=5e-4, clip=run.optim.clip)
    for name, model in networks.items():
        for kind in KINDS:
            for rate in rates[kind]:
                cell = replace(
                    run,
                    name=f"optimizer {name} {kind} {rate:g}",
                    model=adapt_config(model, image_size=run.augmentation.size),
                    optim=replace(run.optim if kind == "adam" else sgd, lr=rate),
                )
                at = {"network": name, "optimizer": kind, "on": run.data.source, "lr": rate}
                yield from seed_cells(f"{name}-{kind}-lr{rate:g}", at, cell, seeds)


def iter_paper_cells(source: str) -> Iterator[Cell]:
    """Both networks with both optimisers on JFT-300M for 7 epochs, then every rate of Table 4 on each of five sets.

    The rate is selected on the dev split. The paper then trains again on all of train, and for ResNets also runs BiT's
    own fine-tuning and takes the better one."""
    for network, recipe in (("R50x1", bit_r50x1_jft), ("R152x2", bit_r152x2_jft)):
        adam = with_source(recipe(), source)
        for kind in KINDS:
            start = adam if kind == "adam" else replace(adam, optim=BIT, schedule=BIT_STEPS)
            before, at = f"{network}-{kind}-{JFT}", {"network": network, "optimizer": kind, "seed": 0}
            yield Cell(name=before, at={**at, "on": JFT, "lr": start.optim.lr}, run=replace(start, name=before))
            for task in AVERAGE_5:
                run = FINETUNINGS[task]()
                run = replace(run, model=adapt_config(start.model, image_size=run.augmentation.size))
                for rate in find_sweep_grid(run.name)["optim.lr"]:
                    yield Cell(
                        name=f"{network}-{kind}-{task}-lr{rate:g}",
                        at={**at, "on": task, "lr": rate},
                        run=replace(run, name=f"{before} {run.name} {rate:g}", optim=replace(run.optim, lr=rate)),
                        after=before,
                    )


def analyse(outcomes: Sequence[CellOutcome]) -> Findings:
    groups = group_by_seed(outcomes)
    places = dict.fromkeys((str(one.at["network"]), str(one.at["on"])) for one in groups if one.at["on"] != JFT)
    pairs = {
        (network, on): {
            kind: select_on_dev(groups, "accuracy", network=network, on=on, optimizer=kind) for kind in KINDS
        }
        for network, on in places
    }
    gaps = {
        place: gap
        for place, pair in pairs.items()
        if (gap := compare(spread_of(pair["adam"]), spread_of(pair["sgd"]))) is not None
    }
    parts = [f"{network} on {on} {gap} ({gap.reading})" for (network, on), gap in gaps.items()]
    return Findings(
        table=build_table(pairs, gaps),
        figure=partial(draw_figure, pairs),
        summary=f"Adam over SGD, each at its best rate on the dev split: {'; '.join(parts)}." if parts else "",
        paper="D.1: after pre-training on JFT-300M, Adam is ahead of SGD on most sets and on average, by 0.5 points "
        "for R50x1 and 0.3 for R152x2.",
        claims=[
            claim
            for (network, on), gap in gaps.items()
            for claim in judge_gap(f"Adam minus SGD, {network}, {on}:", gap)
        ],
    )


def spread_of(group: SeedGroup | None) -> Spread | None:
    return None if group is None else group.spread("accuracy")


def build_table(pairs: Pairs, gaps: Mapping[tuple[str, str], Gap]) -> ResultTable:
    rows: list[tuple[str, ...]] = []
    for (network, on), pair in pairs.items():
        ours = (text for kind in KINDS for text in format_best(pair[kind]))
        printed = (format_printed(TABLE_7.get((network, kind), {}).get(on)) for kind in KINDS)
        rows.append((network, on, *ours, str(gaps.get((network, on), NOTHING)), *printed))
    for network in dict.fromkeys(network for network, _ in pairs):
        rows += average_row(network, [pair for (name, _), pair in pairs.items() if name == network])
    columns = ("network", "data", "Adam [%]", "its rate", "SGD [%]", "its rate", "Adam over SGD")
    return ResultTable(columns=(*columns, "paper, Adam", "paper, SGD"), rows=tuple(rows))


def format_best(group: SeedGroup | None) -> tuple[str, str]:
    return format_percent(spread_of(group)), NOTHING if group is None else f"{group.at['lr']:g}"


def format_printed(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


def average_row(network: str, pairs: Sequence[Mapping[str, SeedGroup | None]]) -> list[tuple[str, ...]]:
    """Table 7's last row, if there are several data sets and all of them are done."""
    means = {kind: [spread.mean for pair in pairs if (spread := spread_of(pair[kind]))] for kind in KINDS}
    if len(pairs) < 2 or any(len(found) < len(pairs) for found in means.values()):
        return []
    adam, sgd = (100 * fmean(means[kind]) for kind in KINDS)
    printed = [list(TABLE_7.get((network, kind), {}).values()) for kind in KINDS]
    paper = (format_printed(fmean(values) if len(values) == len(pairs) else None) for values in printed)
    return [(network, "average", f"{adam:.1f}", "", f"{sgd:.1f}", "", f"{adam - sgd:+.1f} points", *paper)]


def draw_figure(pairs: Pairs) -> "Figure":
    dots = [
        SeedDot(name=f"{network}, {on}, {name}", value=spread_of(pair[kind]), family=name)
        for (network, on), pair in pairs.items()
        for kind, name in KINDS.items()
    ]
    return plot_dots([DotColumn(dots=dots or [SeedDot(name="", value=None)], along="test accuracy [%]")])
