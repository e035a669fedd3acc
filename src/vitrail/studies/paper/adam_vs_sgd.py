"""D.1, Table 7: ResNets trained with Adam and with SGD.

Each optimiser has a sweep of its own, chosen on a part of the training split. On small sets the networks are trained
from scratch and scored there; at the paper's scale they are pre-trained on JFT-300M and fine-tuned on five sets.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.zoo import adapt_config, mini_bit
from vitrail.optim.config import Optim, Schedule
from vitrail.recipes import table4
from vitrail.recipes.run_overrides import grid, resized
from vitrail.recipes.table3 import bit_r50x1_jft, bit_r152x2_jft
from vitrail.studies.framework.base_runs import for_card, for_cores, given, with_dev
from vitrail.studies.framework.definition import Findings, Scale, Study, Table
from vitrail.studies.framework.plots import Dot, Dots, dotted
from vitrail.studies.framework.results import NOTHING, Gap, Group, Spread, groups, percent
from vitrail.studies.framework.verdicts import apart, in_words, known, missing, selected
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
TUNED: Final = (
    table4.finetune_imagenet,
    table4.finetune_cifar10,
    table4.finetune_cifar100,
    table4.finetune_pets,
    table4.finetune_flowers,
)
# BiT's pre-training: 0.03 for a batch of 256 and more in proportion, a tenth after 10, 23, 30 and 37 of 40 epochs each.
# Its decay of 1e-4 goes through a momentum of 0.9, which sums to ten times as much; ours does not.
BIT: Final = Optim(kind="sgd", lr=0.03 * 4096 / 256, momentum=0.9, weight_decay=1e-3)
BIT_STEPS: Final = Schedule(decay="steps", warmup=5_000, milestones=(10 / 40, 23 / 40, 30 / 40, 37 / 40))


def optim_of(kind: str, base: Optim) -> Optim:
    """At the scales that are ours: Adam as the recipe has it, or SGD with momentum 0.9 and the usual decay."""
    return base if kind == "adam" else Optim(kind="sgd", momentum=0.9, weight_decay=5e-4, clip=base.clip)


def cells(scale: Scale, source: str) -> Sequence[Cell]:
    if scale == "paper":
        return tuple(paper_cells(source))
    if scale == "tiny":
        run, seeds, share = replace(resized(for_cores(source, steps=80), 8), batch=32), 2, 0.2
        model = ResNetConfig(blocks=(1, 1), factor=0.25, root="3x3", groups=4, classes=10)
        networks = {"R8": model}
        rates = {"adam": (1e-3, 5e-3), "sgd": (0.03, 0.1)}
    else:
        run, seeds, share = for_card(source, steps=2000), 3, 0.1
        networks = {"mini-R14": mini_bit("mini-R14"), "mini-R26": mini_bit("mini-R26")}
        rates = {"adam": (3e-4, 1e-3, 3e-3), "sgd": (0.03, 0.1, 0.3)}
    return tuple(scratch_cells(with_dev(run, share), networks, rates, seeds))


def scratch_cells(
    run: Run, networks: Mapping[str, ResNetConfig], rates: Mapping[str, Sequence[float]], seeds: int
) -> Iterator[Cell]:
    for name, model in networks.items():
        for kind in KINDS:
            for rate in rates[kind]:
                for seed in range(seeds):
                    yield Cell(
                        name=f"{name}-{kind}-lr{rate:g}-seed{seed}",
                        at={"network": name, "optimizer": kind, "on": run.data.source, "lr": rate, "seed": seed},
                        run=replace(
                            run,
                            name=f"optimizer {name} {kind} {rate:g}",
                            model=adapt_config(model, image_size=run.augmentation.size),
                            optim=replace(optim_of(kind, run.optim), lr=rate),
                            seed=seed,
                        ),
                    )


def paper_cells(source: str) -> Iterator[Cell]:
    """Both networks with both optimisers on JFT-300M for 7 epochs, then every rate of Table 4 on each of five sets.

    The rate is chosen on the dev split; the paper then trains again on all of train, and for ResNets also takes BiT's
    own fine-tuning where that is better."""
    for network, recipe in (("R50x1", bit_r50x1_jft), ("R152x2", bit_r152x2_jft)):
        adam = given(recipe(), source)
        for kind in KINDS:
            start = adam if kind == "adam" else replace(adam, optim=BIT, schedule=BIT_STEPS)
            before = f"{network}-{kind}-{JFT}"
            yield Cell(
                name=before,
                at={"network": network, "optimizer": kind, "on": JFT, "lr": start.optim.lr, "seed": 0},
                run=replace(start, name=before),
            )
            for tune in TUNED:
                run = tune()
                run = replace(run, model=adapt_config(start.model, image_size=run.augmentation.size))
                for rate in grid(run.name)["optim.lr"]:
                    at = {"network": network, "optimizer": kind, "on": run.data.source, "lr": rate, "seed": 0}
                    yield Cell(
                        name=f"{network}-{kind}-{run.data.source}-lr{rate:g}",
                        at=at,
                        run=replace(run, name=f"{before} {run.name} {rate:g}", optim=replace(run.optim, lr=rate)),
                        after=before,
                    )


Compared = dict[tuple[str, str], dict[str, Group | None]]  # (network, set) -> by optimiser


def compared(found: Sequence[Group]) -> Compared:
    places = dict.fromkeys((str(group.at["network"]), str(group.at["on"])) for group in found if group.at["on"] != JFT)
    return {
        (network, on): {
            kind: selected(found, {"network": network, "on": on, "optimizer": kind}, "accuracy") for kind in KINDS
        }
        for network, on in places
    }


def between(pair: Mapping[str, Group | None]) -> Gap | None:
    """Adam over SGD, each at the rate that is best on the dev split."""
    return apart(spread_of(pair["adam"]), spread_of(pair["sgd"]))


def spread_of(group: Group | None) -> Spread | None:
    return None if group is None else group.spread("accuracy")


def conclude(outcomes: Sequence[CellOutcome]) -> Findings:
    found = groups(outcomes)
    best = compared(found)
    gaps = {place: each for place, pair in best.items() if (each := between(pair)) is not None}
    return Findings(
        table=table(best, gaps),
        figure=partial(figure, best),
        sentence=sentence(gaps) + missing(outcomes),
        beside=beside(gaps),
    )


def table(best: Compared, gaps: Mapping[tuple[str, str], Gap]) -> Table:
    rows: list[tuple[str, ...]] = []
    for (network, on), pair in best.items():
        ours = (text for kind in KINDS for text in (percent(spread_of(pair[kind])), rate_of(pair[kind])))
        printed = (shown(TABLE_7.get((network, kind), {}).get(on)) for kind in KINDS)
        between = gaps.get((network, on))
        rows.append((network, on, *ours, str(between) if between else NOTHING, *printed))
    for network in dict.fromkeys(network for network, _ in best):
        rows += average(network, {on: pair for (name, on), pair in best.items() if name == network})
    columns = ("network", "data", "Adam [%]", "its rate", "SGD [%]", "its rate", "Adam over SGD")
    return Table(columns=(*columns, "paper, Adam", "paper, SGD"), rows=tuple(rows))


def average(network: str, pairs: Mapping[str, Mapping[str, Group | None]]) -> list[tuple[str, ...]]:
    """Table 7's last row, where there are several sets and all of them are done."""
    means = {kind: known(spread_of(pair[kind]) for pair in pairs.values()) for kind in KINDS}
    if len(pairs) < 2 or any(len(found) < len(pairs) for found in means.values()):
        return []
    adam, sgd = (100 * sum(spread.mean for spread in means[kind]) / len(pairs) for kind in KINDS)
    printed = [list(TABLE_7.get((network, kind), {}).values()) for kind in KINDS]
    paper = (shown(sum(values) / len(values) if len(values) == len(pairs) else None) for values in printed)
    return [(network, "average", f"{adam:.1f}", "", f"{sgd:.1f}", "", f"{adam - sgd:+.1f} points", *paper)]


def rate_of(group: Group | None) -> str:
    return NOTHING if group is None else f"{group.at['lr']:g}"


def shown(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.2f}"


def sentence(gaps: Mapping[tuple[str, str], Gap]) -> str:
    if not gaps:
        return "No network has finished with both optimisers, so that nothing can be compared yet."
    parts = [f"{network} on {on} {each} ({in_words(each)})" for (network, on), each in gaps.items()]
    return f"Adam over SGD, each at its best rate on the dev split: {'; '.join(parts)}."


def beside(gaps: Mapping[tuple[str, str], Gap]) -> str:
    said = (
        "D.1: after pre-training on JFT-300M, Adam is ahead of SGD on most sets and on average, by 0.5 points for "
        "R50x1 and 0.3 for R152x2."
    )
    if not gaps:
        return f"{said} Not decided here: cells are missing."
    above, below = sum(each.above for each in gaps.values()), sum(each.below for each in gaps.values())
    undecided = len(gaps) - above - below
    counts = f"Adam ahead in {above}, SGD in {below}, open within the spread over seeds in {undecided} of {len(gaps)}"
    if all(each.margin is None for each in gaps.values()):
        mean = sum(each.difference for each in gaps.values()) / len(gaps)
        verdict = f"Adam less SGD is {100 * mean:+.1f} points on average; one seed, so that no single one is decided"
    elif above and not below:
        verdict = f"this agrees: {counts}"
    elif below and not above:
        verdict = f"this does not agree: {counts}"
    elif above:
        verdict = f"this agrees in part: {counts}"
    else:
        verdict = f"this does not decide it: {counts}"
    return f"{said} Here {verdict}."


def figure(best: Compared) -> "Figure":
    dots = [
        Dot(name=f"{network}, {on}, {words}", value=spread_of(pair[kind]), family=words)
        for (network, on), pair in best.items()
        for kind, words in KINDS.items()
    ]
    return dotted([Dots(dots=dots or [Dot(name="", value=None)], along="test accuracy [%]")])


STUDY: Final = Study(
    name="optimizer",
    title="ResNets trained with Adam and with SGD",
    anchor="D.1, Table 7",
    cells=cells,
    conclude=conclude,
)
