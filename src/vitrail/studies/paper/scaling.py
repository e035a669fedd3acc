"""4.4, Figure 5 and Table 6: accuracy against the compute of pre-training, for ViTs, BiT ResNets and hybrids."""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from vitrail.core.paper_tables import AVERAGE_5, TABLE_6, Compute
from vitrail.core.text import join_words
from vitrail.models.family import ModelConfig
from vitrail.models.vit_config import ViTConfig, vit_config
from vitrail.models.zoo import model_config, slug
from vitrail.recipes import table3, table4
from vitrail.recipes.run_overrides import with_image_size
from vitrail.studies.base_runs import (
    build_cpu_run,
    build_gpu_run,
    build_hybrid,
    build_resnet,
    reshape_vit,
    shrink_to_8_px,
    with_source,
)
from vitrail.studies.definition import Findings, JudgedClaim, ResultTable, Scale, seed_cells
from vitrail.studies.plots import Panel, SeedLine, Stroke, plot_lines
from vitrail.studies.statistics import (
    NOTHING,
    Cost,
    PowerLaw,
    Spread,
    Verdict,
    compare_compute,
    compare_pairs,
    find_frontier,
    fit_power_law,
    format_percent,
    interpolate_accuracy,
    student_quantile,
)
from vitrail.train.config import Run, RunRequest
from vitrail.train.data import hold_out_nothing
from vitrail.train.grid.plan import Cell, CellOutcome, Coordinate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BuildNetwork = Callable[[ViTConfig], ModelConfig]  # for a ViT's image and classes

FAMILIES: Final = {"ViT": "ViTs", "BiT": "BiT ResNets", "hybrid": "hybrids"}
TINY: Final[Mapping[str, Mapping[str, BuildNetwork]]] = {
    "ViT": {
        "ViT 16x2": lambda model: reshape_vit(model, 16, 2),
        "ViT 32x4": lambda model: reshape_vit(model, 32, 4),
    },
    "BiT": {
        "ResNet 11 x0.0625": lambda model: build_resnet(model, (1, 1, 1), 0.0625),
        "ResNet 11 x0.125": lambda model: build_resnet(model, (1, 1, 1), 0.125),
    },
    "hybrid": {
        "hybrid 16x1": lambda model: build_hybrid(model, (1, 1), 0.0625, 16, 1),
        "hybrid 32x2": lambda model: build_hybrid(model, (1, 1), 0.0625, 32, 2),
    },
}
SMALL: Final[Mapping[str, Mapping[str, BuildNetwork]]] = {
    "ViT": {
        "ViT 96x6": lambda model: reshape_vit(model, 96, 6),
        "ViT 192x6": lambda model: reshape_vit(model, 192, 6),
    },
    "BiT": {
        "ResNet 14 x0.125": lambda model: build_resnet(model, (1, 1, 1, 1), 0.125),
        "ResNet 26 x0.25": lambda model: build_resnet(model, (2, 2, 2, 2), 0.25),
    },
    "hybrid": {
        "hybrid 96x4": lambda model: build_hybrid(model, (1, 1, 1), 0.25, 96, 4),
        "hybrid 192x6": lambda model: build_hybrid(model, (1, 1, 1), 0.25, 192, 6),
    },
}
TINY_STEPS: Final = (50, 100)  # the paper has 7 and 14 epochs
SMALL_STEPS: Final = (2_000, 6_000, 20_000)
WIDE: Final = 256  # a ViT of this width needs a lower rate
NARROW, CONVOLUTIONS = 2.0, 4.0  # times that rate: at most for narrow ViTs, and for ResNets
PRETRAININGS: Final[Mapping[str, Callable[[], Run]]] = {  # Table 3 has no R200x3, which takes the recipe of R152x2
    "ViT-B/32": table3.vit_b32_jft,
    "ViT-B/16": table3.vit_b16_jft,
    "ViT-L/32": table3.vit_l32_jft,
    "ViT-L/16": table3.vit_l16_jft,
    "ViT-H/14": table3.vit_h14_jft,
    "BiT-R50x1": table3.bit_r50x1_jft,
    "BiT-R50x2": table3.bit_r50x2_jft,
    "BiT-R101x1": table3.bit_r101x1_jft,
    "BiT-R152x1": table3.bit_r152x1_jft,
    "BiT-R152x2": table3.bit_r152x2_jft,
    "BiT-R200x3": table3.bit_r152x2_jft,
    "R50+ViT-B/32": table3.r50_vit_b32_jft,
    "R50+ViT-B/16": table3.r50_vit_b16_jft,
    "R50+ViT-L/32": table3.r50_vit_l32_jft,
    "R50+ViT-L/16": table3.r50_vit_l16_jft,
}
FINETUNINGS: Final[Mapping[str, Callable[[], RunRequest]]] = {
    "imagenet": table4.finetune_imagenet,
    "cifar10": table4.finetune_cifar10,
    "cifar100": table4.finetune_cifar100,
    "pets": table4.finetune_pets,
    "flowers102": table4.finetune_flowers,
}
ITSELF, PRETRAINING = "itself", "pre-training"  # scored as it is, or after fine-tuning
STROKES: Final[tuple[Stroke, ...]] = ("solid", "dotted", "dashed")

PAPER_RATIO: Final = (2.0, 4.0)  # compute of a ResNet over that of a ViT in the paper
CURVE: Final = 40  # points of a fitted line


def cells(scale: Scale, source: str) -> Sequence[Cell]:
    if scale == "paper":
        return tuple(cell for row in TABLE_6 for cell in build_row_cells(row, source))
    networks, lengths, seeds = (TINY, TINY_STEPS, 2) if scale == "tiny" else (SMALL, SMALL_STEPS, 3)
    out: list[Cell] = []
    for family, builders in networks.items():
        for (name, build), steps in itertools.product(builders.items(), lengths):
            base, length = build_base(scale, source, steps), f"{steps:,} steps"
            run = replace(with_network(base, build(vit_config(base.model))), name=f"scaling {name}, {length}")
            at = {"family": family, "network": name, "length": length, "task": ITSELF}
            out += seed_cells(f"{slug(name)}-{steps}", at, run, seeds)
    return tuple(out)


def build_base(scale: Scale, source: str, steps: int) -> Run:
    """A plain ViT and a hybrid need many updates, so the batch is small; and positions that are there from the first
    step, because the shortest runs end before learned ones are useful."""
    if scale == "tiny":
        return shrink_to_8_px(build_cpu_run(source, steps=steps))
    run = replace(build_gpu_run(source, steps=steps), batch=128)
    return replace(run, model=replace(vit_config(run.model), position="sincos2d"))


def with_network(run: Run, model: ModelConfig) -> Run:
    """The run with another network. If the run's own ViT is wide, its rate is that of a wide one: narrower ViTs and
    ResNets take more, according to short runs scored on a dev split. The paper's rates fall with size too (Table 3)."""
    own, factor = run.model, 1.0
    if own.tokens and own.features >= WIDE:
        factor = min(own.features / model.features, NARROW) if model.tokens else CONVOLUTIONS
    return replace(run, model=model, optim=replace(run.optim, lr=run.optim.lr * factor))


def build_row_cells(row: Compute, source: str) -> list[Cell]:
    """A row of Table 6: the pre-training, and a fine-tuning for each of the five accuracies. Each has the rate of its
    recipe and all of train; the paper first chose among the four rates of Table 4 on a dev split."""
    name, run = f"{slug(row.network)}-{row.epochs}ep", replace(PRETRAININGS[row.network](), epochs=row.epochs)
    if row.network == "BiT-R200x3":
        run = replace(run, name="bit-r200x3-jft", model=model_config(row.network, classes=table3.JFT_CLASSES))
    at = {"family": find_family(row.network), "network": row.network, "length": f"{row.epochs} epochs", "seed": 0}
    first = Cell(name=name, at={**at, "task": PRETRAINING}, run=with_source(run, source))
    later = [
        Cell(name=f"{name}-{task}", at={**at, "task": task}, run=build_finetuning(task, row.network), after=name)
        for task in AVERAGE_5
    ]
    return [first, *later]


def build_finetuning(task: str, network: str) -> RunRequest:
    """At 384 px; at 378 for a patch of 14, which does not divide 384."""
    run = FINETUNINGS[task]()
    run = replace(run, data=hold_out_nothing(replace(run.data, watch="none")))
    return with_image_size(run, 378) if network.endswith("/14") else run


def find_family(network: str) -> str:
    return "BiT" if network.startswith("BiT") else "hybrid" if "+" in network else "ViT"


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedNetwork:
    """A row of the table: a network and the length of its training, with compute and accuracy by seed."""

    family: str
    name: str
    length: str
    costs: Mapping[Coordinate, Cost]

    @property
    def accuracy(self) -> Spread:
        return Spread(tuple(cost.accuracy for cost in self.costs.values()))

    @property
    def mean(self) -> Cost:
        return Cost(Spread(tuple(cost.compute for cost in self.costs.values())).mean, self.accuracy.mean)


def analyse(outcomes: Sequence[CellOutcome]) -> Findings:
    networks = collect_networks(outcomes)
    curves = {family: costs_by_seed(networks, family) for family in FAMILIES}
    parts: list[str] = []
    for family in ("BiT", "hybrid"):
        logs = compute_ratios(curves["ViT"], curves[family])
        if logs is not None:
            parts.append(f"{FAMILIES[family]} need {format_ratio(logs)} the compute of ViTs for the same accuracy")
        elif above := find_family_above(curves, "ViT", family):
            parts.append(above[1])
    parts += describe_slopes(networks)
    return Findings(
        table=build_table(networks),
        figure=partial(draw_figure, networks),
        summary=f"{'; '.join(parts)}." if parts else "",
        paper="4.4: ViTs need 2 to 4 times less compute than ResNets for the same accuracy, and hybrids are ahead of "
        "ViTs at small budgets, a lead that vanishes for large ones.",
        claims=[*judge_resnets(curves), *judge_hybrids(curves)],
    )


def collect_networks(outcomes: Sequence[CellOutcome]) -> tuple[TrainedNetwork, ...]:
    """Networks that have compute and accuracy: their own, or the mean over the five tasks if they were fine-tuned."""
    found: dict[tuple[str, str, str], dict[Coordinate, dict[str, CellOutcome]]] = {}
    for one in outcomes:
        if not one.fault:
            at = (str(one.at["family"]), str(one.at["network"]), str(one.at["length"]))
            found.setdefault(at, {}).setdefault(one.at["seed"], {})[str(one.at["task"])] = one
    networks: list[TrainedNetwork] = []
    for (family, name, length), seeds in found.items():
        costs = {seed: cost for seed, tasks in seeds.items() if (cost := find_cost(tasks)) is not None}
        if costs:
            networks.append(TrainedNetwork(family=family, name=name, length=length, costs=costs))
    return tuple(networks)


def find_cost(tasks: Mapping[str, CellOutcome]) -> Cost | None:
    """A pre-training counts by its fine-tunings, once all have finished."""
    trained = tasks.get(ITSELF) or tasks.get(PRETRAINING)
    names = (ITSELF,) if ITSELF in tasks else AVERAGE_5
    accuracies = [
        tasks[name].values["accuracy"] for name in names if name in tasks and "accuracy" in tasks[name].values
    ]
    if trained is None or not trained.values.get("exaflops") or len(accuracies) < len(names):
        return None
    return Cost(compute=trained.values["exaflops"], accuracy=sum(accuracies) / len(accuracies))


SeedCurves = Mapping[Coordinate, Sequence[Cost]]


def costs_by_seed(networks: Sequence[TrainedNetwork], family: str) -> SeedCurves:
    """The curve of a family for each seed."""
    curves: dict[Coordinate, list[Cost]] = {}
    for one in networks:
        for seed, cost in one.costs.items() if one.family == family else ():
            curves.setdefault(seed, []).append(cost)
    return curves


def compute_ratios(one: SeedCurves, other: SeedCurves) -> Spread | None:
    """How many times the compute of one family the other needs, as logarithms by seed."""
    ratios = [compare_compute(one[seed], other[seed]) for seed in one if seed in other]
    logs = tuple(math.log(ratio) for ratio in ratios if ratio is not None)
    return Spread(logs) if logs else None


def interval_of(logs: Spread) -> tuple[float, float] | None:
    """The 95 % interval of the ratio over the seeds; None for a single one."""
    if logs.error is None:
        return None
    margin = student_quantile(logs.count - 1) * logs.error
    return math.exp(logs.mean - margin), math.exp(logs.mean + margin)


def format_ratio(logs: Spread) -> str:
    interval, text = interval_of(logs), f"{math.exp(logs.mean):.2g} times"
    return text if interval is None else f"{text} (95 % interval {interval[0]:.2g} to {interval[1]:.2g})"


def find_family_above(curves: Mapping[str, SeedCurves], one: str, other: str) -> tuple[str, str] | None:
    """The family whose cheapest network is above every network of the other, with every seed, and that in words."""
    for below, over in ((one, other), (other, one)):
        ends = [
            (find_frontier(curves[below][seed])[-1], find_frontier(curves[over][seed])[0])
            for seed in curves[below]
            if seed in curves[over]
        ]
        if ends and all(cheapest.accuracy > best.accuracy for best, cheapest in ends):
            ratio = max(cheapest.compute / best.compute for best, cheapest in ends)
            text = f"even the cheapest of the {FAMILIES[over]} is above the best of the {FAMILIES[below]}"
            return over, f"{text}, with at most {ratio:.2g} times its compute"
    return None


def describe_slopes(networks: Sequence[TrainedNetwork]) -> list[str]:
    """How the error falls with compute, along the frontier of all networks and of each family."""
    law = fit_frontier(networks)
    if law is None:
        return []
    limit = f" down to a limit of {law.c:.3f}" if law.c > 0 else ""
    text = f"along the frontier of all {len(networks)} trainings the error falls as compute^-{law.b:.2f}{limit}"
    families = {family: fit_frontier(networks, family) for family in dict.fromkeys(one.family for one in networks)}
    slopes = [
        f"{'not at all' if own is None else f'compute^-{own.b:.2f}'} for {FAMILIES[family]}"
        for family, own in families.items()
    ]
    return [text if len(slopes) < 2 else f"{text}; along that of each family as {join_words(slopes)}"]


def fit_frontier(networks: Sequence[TrainedNetwork], family: str = "") -> PowerLaw | None:
    return fit_power_law(find_frontier(one.mean for one in networks if family in ("", one.family)))


def judge_resnets(curves: Mapping[str, SeedCurves]) -> list[JudgedClaim]:
    logs = compute_ratios(curves["ViT"], curves["BiT"])
    if logs is None:
        above = find_family_above(curves, "ViT", "BiT")
        if above is None:
            return []
        verdict = Verdict.AGREES if above[0] == "ViT" else Verdict.DISAGREES
        return [JudgedClaim(above[1], Verdict.UNDECIDED if len(curves["BiT"]) < 2 else verdict)]
    interval = interval_of(logs)
    if interval is None or interval[0] <= 1 <= interval[1]:
        verdict = Verdict.UNDECIDED
    elif interval[1] < 1:
        verdict = Verdict.DISAGREES
    else:  # by another factor, it agrees in part
        within = interval[0] <= PAPER_RATIO[1] and interval[1] >= PAPER_RATIO[0]
        verdict = Verdict.AGREES if within else Verdict.PARTLY
    return [JudgedClaim(f"ResNets need {format_ratio(logs)} the compute of ViTs", verdict)]


def judge_hybrids(curves: Mapping[str, SeedCurves]) -> list[JudgedClaim]:
    """Hybrids against ViTs at the least and at the greatest compute that both have."""
    leads: list[tuple[float, float]] = []
    for seed in curves["ViT"].keys() & curves["hybrid"].keys():
        both = [curves[family][seed] for family in ("ViT", "hybrid")]
        low = max(min(cost.compute for cost in curve) for curve in both)
        high = min(max(cost.compute for cost in curve) for curve in both)
        ends = [[interpolate_accuracy(curve, compute) for curve in both] for compute in (low, high)]
        gaps = [hybrid - vit for vit, hybrid in ends if vit is not None and hybrid is not None]
        if len(gaps) == 2 and low < high:
            leads.append((gaps[0], gaps[1]))
    if not leads:
        return []
    lead = compare_pairs(Spread(tuple(low for low, _ in leads)))
    shrinks = compare_pairs(Spread(tuple(low - high for low, high in leads)))
    text = f"hybrids over ViTs {lead} at the least compute that both have, and the lead shrinks by {shrinks}"
    verdict = lead.judge()
    if verdict is Verdict.AGREES and not shrinks.is_above:
        verdict = Verdict.PARTLY
    return [JudgedClaim(text, verdict)]


def build_table(networks: Sequence[TrainedNetwork]) -> ResultTable:
    printed = {(row.network, f"{row.epochs} epochs"): row for row in TABLE_6}
    rows: list[tuple[str, ...]] = []
    for one in sorted(networks, key=lambda one: (list(FAMILIES).index(one.family), one.mean.compute)):
        row = printed.get((one.name, one.length))
        paper = (f"{row.exaflops:g}", f"{row.average_5:.2f}") if row else (NOTHING, NOTHING)
        ours = (f"{one.mean.compute:.3g}", format_percent(one.accuracy), str(len(one.costs)))
        rows.append((f"{one.name}, {one.length}", one.family, *ours, *paper))
    columns = ("network", "family", "exaFLOPs", "accuracy [%]", "seeds", "paper: exaFLOPs", "paper: Average-5 [%]")
    return ResultTable(columns=columns, rows=tuple(rows))


def build_lines(networks: Sequence[TrainedNetwork]) -> list[SeedLine]:
    """One line per family; if networks were trained for several lengths, one per network."""
    lines: list[SeedLine] = []
    for family, title in FAMILIES.items():
        ours = [one for one in networks if one.family == family]
        names = list(dict.fromkeys(one.name for one in ours))
        several = len(names) < len(ours)
        for at, name in enumerate(names if several else [title] * bool(ours)):
            points = [(one.mean.compute, one.accuracy) for one in ours if not several or one.name == name]
            lines.append(SeedLine(name=name, family=family, points=points, stroke=STROKES[at % 3], hollow=at % 2 > 0))
    return lines


def draw_figure(networks: Sequence[TrainedNetwork]) -> "Figure":
    """Ours next to Figure 5."""
    ours, law = build_lines(networks), fit_frontier(networks)
    if law is not None:
        low, high = (pick(one.mean.compute for one in networks) for pick in (min, max))
        curve = [(x, Spread((1 - law.error(x),))) for x in np.geomspace(low, high, CURVE).tolist()]
        ours.append(SeedLine(name="frontier, fitted", family="frontier", points=curve, stroke="dotted", dots=False))
    theirs = [
        SeedLine(
            name=title,
            family=family,
            stroke="none",
            points=[
                (row.exaflops, Spread((row.average_5 / 100,))) for row in TABLE_6 if find_family(row.network) == family
            ],
        )
        for family, title in FAMILIES.items()
    ]
    along = "compute of the training [exaFLOPs]"
    return plot_lines(
        [
            Panel(lines=ours, along=along, up="accuracy [%]", title="here", log=True),
            Panel(lines=theirs, along=along, up="mean over five sets [%]", title="the paper, Figure 5", log=True),
        ]
    )
