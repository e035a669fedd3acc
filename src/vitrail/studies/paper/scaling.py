"""4.4, Figure 5 and Table 6: accuracy against the compute of pre-training, for ViTs, BiT ResNets and hybrids."""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any, Final

import numpy as np

from vitrail.core.paper_tables import AVERAGE_5, JFT_CLASSES, TABLE_6, Compute
from vitrail.core.text import join_words
from vitrail.models.family import ModelConfig
from vitrail.models.vit_config import vit_config
from vitrail.models.zoo import model_config, slug
from vitrail.recipes.run_overrides import with_image_size
from vitrail.studies import base_runs as base
from vitrail.studies import statistics as stats
from vitrail.studies.definition import Findings, JudgedClaim, ResultTable, Scale, seed_cells
from vitrail.studies.plots import Panel, SeedLine, Stroke
from vitrail.studies.statistics import NOTHING, Cost, PowerLaw, Spread, Verdict
from vitrail.train.config import Run, RunRequest
from vitrail.train.data import hold_out_nothing
from vitrail.train.grid.plan import Cell, CellOutcome, Coordinate

FAMILIES: Final = {"ViT": "ViTs", "BiT": "BiT ResNets", "hybrid": "hybrids"}
# Family -> networks, with the arguments of its builder in base_runs.
TINY: Final[Mapping[str, Mapping[str, tuple[Any, ...]]]] = {
    "ViT": {"ViT 16x2": (16, 2), "ViT 32x4": (32, 4)},
    "BiT": {"ResNet 11 x0.0625": ((1, 1, 1), 0.0625), "ResNet 11 x0.125": ((1, 1, 1), 0.125)},
    "hybrid": {"hybrid 16x1": ((1, 1), 0.0625, 16, 1), "hybrid 32x2": ((1, 1), 0.0625, 32, 2)},
}
SMALL: Final[Mapping[str, Mapping[str, tuple[Any, ...]]]] = {
    "ViT": {"ViT 96x6": (96, 6), "ViT 192x6": (192, 6)},
    "BiT": {"ResNet 14 x0.125": ((1, 1, 1, 1), 0.125), "ResNet 26 x0.25": ((2, 2, 2, 2), 0.25)},
    "hybrid": {"hybrid 96x4": ((1, 1, 1), 0.25, 96, 4), "hybrid 192x6": ((1, 1, 1), 0.25, 192, 6)},
}
TINY_STEPS: Final = (50, 100)  # the paper has 7 and 14 epochs
SMALL_STEPS: Final = (2_000, 6_000, 20_000)
WIDE: Final = 256  # a ViT of this width needs a lower rate
NARROW, CONVOLUTIONS = 2.0, 4.0  # times that rate: at most for narrow ViTs, and for ResNets
ITSELF, PRETRAINING = "itself", "pre-training"  # scored as it is, or after fine-tuning
STROKES: Final[tuple[Stroke, ...]] = ("solid", "dotted", "dashed")

PAPER_RATIO: Final = (2.0, 4.0)  # compute of a ResNet over that of a ViT in the paper
CURVE: Final = 40  # points of a fitted line


def cells(scale: Scale, source: str) -> Iterator[Cell]:
    if scale == "paper":
        for row in TABLE_6:
            yield from iter_row_cells(row, source)
        return
    networks, lengths, seeds = (TINY, TINY_STEPS, 2) if scale == "tiny" else (SMALL, SMALL_STEPS, 3)
    for family, shapes in networks.items():
        for (name, shape), steps in itertools.product(shapes.items(), lengths):
            run, length = build_base(scale, source, steps), f"{steps:,} steps"
            model = base.BUILDERS[family](vit_config(run.model), *shape)
            at = {"family": family, "network": name, "length": length, "task": ITSELF}
            run = replace(with_network(run, model), name=f"scaling {name}, {length}")
            yield from seed_cells(f"{slug(name)}-{steps}", at, run, seeds)


def build_base(scale: Scale, source: str, steps: int) -> Run:
    """A plain ViT and a hybrid need many updates, so the batch is small. Positions are fixed, because the shortest runs
    end before learned ones are useful."""
    if scale == "tiny":
        return base.shrink_to_8_px(base.build_cpu_run(source, steps=steps))
    run = replace(base.build_gpu_run(source, steps=steps), batch=128)
    return replace(run, model=replace(vit_config(run.model), position="sincos2d"))


def with_network(run: Run, model: ModelConfig) -> Run:
    """The run with another network. If the run's own ViT is wide, its rate is that of a wide one: narrower ViTs and
    ResNets take more, according to short runs scored on a dev split. The paper's rates fall with size too (Table 3)."""
    own, factor = run.model, 1.0
    if own.tokens and own.features >= WIDE:
        factor = min(own.features / model.features, NARROW) if model.tokens else CONVOLUTIONS
    return replace(run, model=model, optim=replace(run.optim, lr=run.optim.lr * factor))


def iter_row_cells(row: Compute, source: str) -> Iterator[Cell]:
    """A row of Table 6: the pre-training, and a fine-tuning for each of the five accuracies. Each has the rate of its
    recipe and all of train; the paper first chose among the four rates of Table 4 on a dev split."""
    name, network = f"{slug(row.network)}-{row.epochs}ep", row.network
    run = base.load_pretraining("BiT-R152x2" if network == "BiT-R200x3" else network)
    if network == "BiT-R200x3":  # Table 3 has none, so the recipe of R152x2 is used
        run = replace(run, name="bit-r200x3-jft", model=model_config(network, classes=JFT_CLASSES))
    at = {"family": find_family(network), "network": network, "length": f"{row.epochs} epochs", "seed": 0}
    run = base.with_source(replace(run, epochs=row.epochs), source)
    yield Cell(name=name, at={**at, "task": PRETRAINING}, run=run)
    for task in AVERAGE_5:
        yield Cell(name=f"{name}-{task}", at={**at, "task": task}, run=build_finetuning(task, network), after=name)


def build_finetuning(task: str, network: str) -> RunRequest:
    """At 384 px; at 378 for a patch of 14, which does not divide 384."""
    run = base.load_finetuning(task)
    run = replace(run, data=hold_out_nothing(replace(run.data, watch="none")))
    return with_image_size(run, 378) if network.endswith("/14") else run


def find_family(network: str) -> str:
    return "BiT" if network.startswith("BiT") else "hybrid" if "+" in network else "ViT"


@dataclass(frozen=True, slots=True)
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
        return Cost(fmean(cost.compute for cost in self.costs.values()), self.accuracy.mean)


SeedCurves = Mapping[Coordinate, Sequence[Cost]]


def analyse(outcomes: Sequence[CellOutcome]) -> Findings:
    networks = collect_networks(outcomes)
    curves: dict[str, dict[Coordinate, list[Cost]]] = {family: {} for family in FAMILIES}
    for one in networks:
        for seed, cost in one.costs.items():
            curves[one.family].setdefault(seed, []).append(cost)
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
        panels=build_panels(networks),
        summary=f"{'; '.join(parts)}." if parts else "",
        paper="4.4: ViTs need 2 to 4 times less compute than ResNets for the same accuracy, and hybrids are ahead of "
        "ViTs at small budgets, a lead that vanishes for large ones.",
        claims=[*judge_resnets(curves), *judge_hybrids(curves)],
    )


def collect_networks(outcomes: Sequence[CellOutcome]) -> list[TrainedNetwork]:
    """Networks that have compute and accuracy: their own, or the mean over the five tasks if they were fine-tuned."""
    found: dict[tuple[str, str, str], dict[Coordinate, dict[str, Mapping[str, float]]]] = {}
    for one in outcomes:
        if not one.fault:
            at = (str(one.at["family"]), str(one.at["network"]), str(one.at["length"]))
            found.setdefault(at, {}).setdefault(one.at["seed"], {})[str(one.at["task"])] = one.values
    networks = [
        TrainedNetwork(*at, {seed: cost for seed, tasks in seeds.items() if (cost := find_cost(tasks)) is not None})
        for at, seeds in found.items()
    ]
    return [one for one in networks if one.costs]


def find_cost(tasks: Mapping[str, Mapping[str, float]]) -> Cost | None:
    """A pre-training counts by its fine-tunings, once all have finished."""
    names = (ITSELF,) if ITSELF in tasks else AVERAGE_5
    compute = tasks.get(ITSELF, tasks.get(PRETRAINING, {})).get("exaflops")
    accuracies = [tasks[name]["accuracy"] for name in names if "accuracy" in tasks.get(name, {})]
    return Cost(compute, fmean(accuracies)) if compute and len(accuracies) == len(names) else None


def compute_ratios(one: SeedCurves, other: SeedCurves) -> Spread | None:
    """The compute that the other family needs, as a multiple of this one's: logarithms by seed."""
    ratios = [stats.compare_compute(one[seed], other[seed]) for seed in one if seed in other]
    logs = tuple(math.log(ratio) for ratio in ratios if ratio is not None)
    return Spread(logs) if logs else None


def interval_of(logs: Spread) -> tuple[float, float] | None:
    """The 95 % interval of the ratio over the seeds; None for a single one."""
    margin = stats.compare_pairs(logs).margin
    return None if margin is None else (math.exp(logs.mean - margin), math.exp(logs.mean + margin))


def format_ratio(logs: Spread) -> str:
    interval, text = interval_of(logs), f"{math.exp(logs.mean):.2g} times"
    return text if interval is None else f"{text} (95 % interval {interval[0]:.2g} to {interval[1]:.2g})"


def find_family_above(curves: Mapping[str, SeedCurves], one: str, other: str) -> tuple[str, str] | None:
    """The family whose cheapest network is above every network of the other, with every seed, and a sentence on
    that."""
    for below, over in ((one, other), (other, one)):
        best, cheapest = (
            [stats.find_frontier(curves[family][seed])[end] for seed in curves[below] if seed in curves[over]]
            for family, end in ((below, -1), (over, 0))
        )
        if best and all(low.accuracy > high.accuracy for low, high in zip(cheapest, best, strict=True)):
            ratio = max(low.compute / high.compute for low, high in zip(cheapest, best, strict=True))
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
    return stats.fit_power_law(stats.find_frontier(one.mean for one in networks if family in ("", one.family)))


def judge_resnets(curves: Mapping[str, SeedCurves]) -> list[JudgedClaim]:
    logs = compute_ratios(curves["ViT"], curves["BiT"])
    if logs is None:
        above = find_family_above(curves, "ViT", "BiT")
        if above is None:
            return []
        verdict = Verdict.AGREES if above[0] == "ViT" else Verdict.DISAGREES
        return [JudgedClaim(above[1], Verdict.UNDECIDED if len(curves["BiT"]) < 2 else verdict)]
    low, high = interval_of(logs) or (0.0, math.inf)
    if low <= 1 <= high:
        verdict = Verdict.UNDECIDED
    elif high < 1:
        verdict = Verdict.DISAGREES
    else:  # by another factor, it agrees in part
        verdict = Verdict.AGREES if low <= PAPER_RATIO[1] and high >= PAPER_RATIO[0] else Verdict.PARTLY
    return [JudgedClaim(f"ResNets need {format_ratio(logs)} the compute of ViTs", verdict)]


def judge_hybrids(curves: Mapping[str, SeedCurves]) -> list[JudgedClaim]:
    """Hybrids against ViTs at the least and at the greatest compute that both have."""
    leads: list[tuple[float, float]] = []
    for seed in curves["ViT"].keys() & curves["hybrid"].keys():
        both = [curves[family][seed] for family in ("ViT", "hybrid")]
        low = max(min(cost.compute for cost in curve) for curve in both)
        high = min(max(cost.compute for cost in curve) for curve in both)
        ends = [[stats.interpolate_accuracy(curve, compute) for curve in both] for compute in (low, high)]
        gaps = [hybrid - vit for vit, hybrid in ends if vit is not None and hybrid is not None]
        if len(gaps) == 2 and low < high:
            leads.append((gaps[0], gaps[1]))
    if not leads:
        return []
    lead = stats.compare_pairs(Spread(tuple(low for low, _ in leads)))
    shrinks = stats.compare_pairs(Spread(tuple(low - high for low, high in leads)))
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
        ours = (f"{one.mean.compute:.3g}", stats.format_spread(one.accuracy), str(len(one.costs)))
        rows.append((f"{one.name}, {one.length}", one.family, *ours, *paper))
    columns = ("network", "family", "exaFLOPs", "accuracy [%]", "seeds", "paper: exaFLOPs", "paper: Average-5 [%]")
    return ResultTable(columns, rows)


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


def build_panels(networks: Sequence[TrainedNetwork]) -> list[Panel]:
    """Ours next to Figure 5."""
    ours, law = build_lines(networks), fit_frontier(networks)
    if law is not None:
        low, high = (pick(one.mean.compute for one in networks) for pick in (min, max))
        curve = [(x, Spread((1 - law.error(x),))) for x in np.geomspace(low, high, CURVE).tolist()]
        ours.append(SeedLine(name="frontier, fitted", family="frontier", points=curve, stroke="dotted", dots=False))
    printed: dict[str, list[tuple[float, Spread]]] = {family: [] for family in FAMILIES}
    for row in TABLE_6:
        printed[find_family(row.network)].append((row.exaflops, Spread((row.average_5 / 100,))))
    theirs = [SeedLine(name=FAMILIES[at], family=at, stroke="none", points=points) for at, points in printed.items()]
    along = "compute of the training [exaFLOPs]"
    return [
        Panel(lines=ours, along=along, up="accuracy [%]", title="here", log=True),
        Panel(lines=theirs, along=along, up="mean over five sets [%]", title="the paper, Figure 5", log=True),
    ]
