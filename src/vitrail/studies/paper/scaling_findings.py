"""What the cells of `scaling` say: what equal accuracy costs each family, and a frontier through all of them.

Accuracy against compute (4.4, Figure 5): the frontier, a power law fitted to it, and what equal accuracy costs.

law = fitted(frontier(points))          # error = a · C^-b + c
cheaper(vit, resnet)                    # how many times the compute of the first the second needs
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vitrail.core.paper_tables import AVERAGE_5, TABLE_6
from vitrail.studies.framework.definition import Findings, Table
from vitrail.studies.framework.plots import Line, Panel, Point, Stroke, plot
from vitrail.studies.framework.results import NOTHING, Spread, percent, student
from vitrail.studies.framework.verdicts import listed, missing
from vitrail.train.grid.plan import CellOutcome, Coordinate

if TYPE_CHECKING:
    from matplotlib.figure import Figure


LIMITS: Final = 200  # values of c that are tried
LEVELS: Final = 25  # accuracies at which two families are compared
FREE: Final = 5  # points from which on the limit c is fitted, too; fewer cannot tell it from the slope


class Cost(NamedTuple):
    """A training: its compute, in whatever unit, and its accuracy as a share."""

    compute: float
    accuracy: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Law:
    """error = a · C^-b + c."""

    a: float
    b: float
    c: float

    def error(self, compute: float) -> float:
        return self.a * compute**-self.b + self.c

    def accuracy(self, compute: float) -> float:
        return 1 - self.error(compute)


def frontier(points: Iterable[Cost]) -> tuple[Cost, ...]:
    """Those that no cheaper or equally cheap training beats, by rising compute."""
    best, kept = -math.inf, list[Cost]()
    for point in sorted(points, key=lambda one: (one.compute, -one.accuracy)):
        if point.accuracy > best:
            kept.append(point)
            best = point.accuracy
    return tuple(kept)


def fitted(points: Sequence[Cost]) -> Law | None:
    """The power law through points, by least squares of the logarithm of the error. For each limit c that is a line;
    the one with the smallest squares wins, with c = 0 for few points. None for fewer than two, or where the error does
    not fall."""
    known = [point for point in points if point.accuracy < 1 and point.compute > 0]
    if len({point.compute for point in known}) < 2:
        return None
    x = np.log([point.compute for point in known])
    errors = np.array([1 - point.accuracy for point in known])
    limits = np.linspace(0, errors.min(), LIMITS, endpoint=False) if len(known) >= FREE else np.zeros(1)
    best: tuple[float, Law] | None = None
    for limit in limits.tolist():
        slope, height = line(x, np.log(errors - limit))
        law = Law(a=math.exp(height), b=-slope, c=limit)
        # Squares in the errors' own logarithm, so that limits compete on equal terms.
        misses = np.log([law.error(point.compute) for point in known]) - np.log(errors)
        squares = float(misses @ misses)
        if best is None or squares < best[0] - 1e-15:
            best = (squares, law)
    assert best is not None
    return best[1] if best[1].b > 0 else None


def line(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float]:
    """Slope and height at 0 of the least squares."""
    centred = x - x.mean()
    slope = float(centred @ y / (centred @ centred))
    return slope, float(y.mean() - slope * x.mean())


def compute_for(points: Sequence[Cost], accuracy: float) -> float | None:
    """What an accuracy costs along a frontier: between two of its points by the logarithm of the compute. None outside
    of what was reached; nothing is extrapolated."""
    edge = frontier(points)
    for low, high in itertools.pairwise(edge):
        if low.accuracy <= accuracy <= high.accuracy:
            way = (accuracy - low.accuracy) / (high.accuracy - low.accuracy)
            return low.compute * (high.compute / low.compute) ** way
    return None


def cheaper(one: Sequence[Cost], other: Sequence[Cost]) -> float | None:
    """How many times the compute of the first the other needs for the same accuracy: the geometric mean over the
    accuracies that both reach between their cheapest and their dearest point. None where there are none."""
    edges = [frontier(points) for points in (one, other)]
    if not all(edges):
        return None
    low, high = max(edge[0].accuracy for edge in edges), min(edge[-1].accuracy for edge in edges)
    logs: list[float] = []
    for level in np.linspace(low, high, LEVELS).tolist() if low <= high else ():
        first, second = (compute_for(edge, min(max(level, low), high)) for edge in edges)
        if first is not None and second is not None:
            logs.append(math.log(second / first))
    return math.exp(math.fsum(logs) / len(logs)) if logs else None


def accuracy_for(points: Sequence[Cost], compute: float) -> float | None:
    """The best that a compute buys along a frontier, between two of its points by the logarithm of the compute; beyond
    its dearest point that one's. None below the cheapest."""
    edge = frontier(points)
    if not edge or compute < edge[0].compute:
        return None
    for low, high in itertools.pairwise(edge):
        if compute <= high.compute:
            way = math.log(compute / low.compute) / math.log(high.compute / low.compute)
            return low.accuracy + way * (high.accuracy - low.accuracy)
    return edge[-1].accuracy


ITSELF: Final = "itself"  # what a network is scored on that is not tuned any further
BEFORE: Final = "pre-training"  # a training whose fine-tunings are scored
FAMILIES: Final = {"ViT": "ViTs", "BiT": "BiT ResNets", "hybrid": "hybrids"}
LESS: Final = (2.0, 4.0)  # times the compute of a ViT that a ResNet needs in the paper
CURVE: Final = 40  # points of a fitted line


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """A row of the table: a network and its training, so and so long, with compute and accuracy by seed."""

    family: str
    name: str
    length: str
    costs: Mapping[Coordinate, Cost]

    @property
    def exaflops(self) -> float:
        return Spread(tuple(cost.compute for cost in self.costs.values())).mean

    @property
    def accuracy(self) -> Spread:
        return Spread(tuple(cost.accuracy for cost in self.costs.values()))

    @property
    def mean(self) -> Cost:
        return Cost(compute=self.exaflops, accuracy=self.accuracy.mean)


def conclude(outcomes: Sequence[CellOutcome]) -> Findings:
    networks = networks_of(outcomes)
    return Findings(
        table=table(networks),
        figure=lambda: figure(networks),
        sentence=sentence(networks) + missing(outcomes),
        beside=beside(networks),
    )


def networks_of(outcomes: Sequence[CellOutcome]) -> tuple[Network, ...]:
    """Networks that have compute and accuracy: their own, or the mean over the five tasks where they were tuned."""
    found: dict[tuple[str, str, str], dict[Coordinate, dict[str, CellOutcome]]] = {}
    for one in outcomes:
        if not one.fault:
            at = (str(one.at["family"]), str(one.at["network"]), str(one.at["length"]))
            found.setdefault(at, {}).setdefault(one.at["seed"], {})[str(one.at["task"])] = one
    networks: list[Network] = []
    for (family, name, length), seeds in found.items():
        costs = {seed: cost for seed, tasks in seeds.items() if (cost := cost_of(tasks)) is not None}
        if costs:
            networks.append(Network(family=family, name=name, length=length, costs=costs))
    return tuple(networks)


def cost_of(tasks: Mapping[str, CellOutcome]) -> Cost | None:
    """A pre-training is not set next to others by its own accuracy: its tunings count, once all are there."""
    trained = tasks.get(ITSELF) or tasks.get(BEFORE)
    scored = [tasks.get(task) for task in ((ITSELF,) if ITSELF in tasks else AVERAGE_5)]
    found = [one.values["accuracy"] for one in scored if one is not None and "accuracy" in one.values]
    if trained is None or not trained.values.get("exaflops") or len(found) < len(scored):
        return None
    return Cost(compute=trained.values["exaflops"], accuracy=sum(found) / len(found))


def by_seed(networks: Sequence[Network], family: str) -> dict[Coordinate, list[Cost]]:
    """The curve of a family for each seed."""
    curves: dict[Coordinate, list[Cost]] = {}
    for one in networks:
        for seed, cost in one.costs.items() if one.family == family else ():
            curves.setdefault(seed, []).append(cost)
    return curves


def times(networks: Sequence[Network], one: str, other: str) -> Spread | None:
    """How many times the compute of one family the other needs, as a logarithm by seed."""
    first, second = by_seed(networks, one), by_seed(networks, other)
    found = [cheaper(first[seed], second[seed]) for seed in first if seed in second]
    logs = tuple(math.log(ratio) for ratio in found if ratio is not None)
    return Spread(logs) if logs else None


def bounds(logs: Spread) -> tuple[float, float] | None:
    """The 95 % interval of the ratio over the seeds; none for a single one."""
    if logs.error is None:
        return None
    margin = student(logs.count - 1) * logs.error
    return math.exp(logs.mean - margin), math.exp(logs.mean + margin)


def apart(networks: Sequence[Network], one: str, other: str) -> float | None:
    """Where already the cheapest network of the other family is above all of the one, with every seed: how many times
    the compute of the best of the one it has, at the most."""
    first, second = by_seed(networks, one), by_seed(networks, other)
    ends = [(frontier(first[seed])[-1], frontier(second[seed])[0]) for seed in first if seed in second]
    if not ends or any(cheapest.accuracy <= best.accuracy for best, cheapest in ends):
        return None
    return max(cheapest.compute / best.compute for best, cheapest in ends)


def above(networks: Sequence[Network], one: str, other: str) -> str:
    """ "already the cheapest of the BiT ResNets is above every ViT", the one or the other; "" where neither is."""
    for below, over in ((one, other), (other, one)):
        ratio = apart(networks, below, over)
        if ratio is not None:
            best = f"the best of the {FAMILIES[below]}"
            told = f"already the cheapest of the {FAMILIES[over]} is above {best}"
            return f"{told}, with at most {ratio:.2g} times its compute"
    return ""


def leads(networks: Sequence[Network]) -> tuple[Spread, Spread] | None:
    """How far the best hybrid is ahead of the best ViT at the least and at the greatest compute that both have, by
    seed."""
    first, second = by_seed(networks, "ViT"), by_seed(networks, "hybrid")
    found: list[tuple[float, float]] = []
    for seed in first:
        curves = [first[seed], second.get(seed, [])]
        if not all(curves):
            continue
        low, high = (
            pick(most(cost.compute for cost in curve) for curve in curves) for pick, most in ((max, min), (min, max))
        )
        ends = [[accuracy_for(curve, compute) for curve in curves] for compute in (low, high)]
        gaps = [other - one for one, other in ends if one is not None and other is not None]
        if len(gaps) == 2 and low < high:
            found.append((gaps[0], gaps[1]))
    if not found:
        return None
    return Spread(tuple(low for low, _ in found)), Spread(tuple(high for _, high in found))


def in_times(logs: Spread) -> str:
    inside = bounds(logs)
    said = f"{math.exp(logs.mean):.2g} times"
    return said if inside is None else f"{said} (95 % interval {inside[0]:.2g} to {inside[1]:.2g})"


def sentence(networks: Sequence[Network]) -> str:
    parts: list[str] = []
    for family in ("BiT", "hybrid"):
        logs = times(networks, "ViT", family)
        if logs is not None:
            parts.append(f"{FAMILIES[family]} need {in_times(logs)} the compute of ViTs for the same accuracy")
        elif (told := above(networks, "ViT", family)) != "":
            parts.append(told)
    parts += falls(networks)
    if not parts:
        return "Too few cells are done to compare the families."
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def falls(networks: Sequence[Network]) -> list[str]:
    """How the error falls with compute, along the frontier of all and along that of each family."""
    law = law_of(networks)
    if law is None:
        return []
    limit = f" down to a limit of {law.c:.3f}" if law.c > 0 else ""
    told = f"along the frontier of all {len(networks)} trainings the error falls as compute^-{law.b:.2f}{limit}"
    families = list(dict.fromkeys(one.family for one in networks))
    own = [(family, law_of([one for one in networks if one.family == family])) for family in families]
    if len(own) < 2:
        return [told]
    slopes = [f"compute^-{law.b:.2f} for {FAMILIES[family]}" for family, law in own if law is not None]
    stand = [f"not at all for {FAMILIES[family]}" for family, law in own if law is None]
    return [f"{told}; along that of each family as {listed([*slopes, *stand])}"]


def law_of(networks: Sequence[Network]) -> Law | None:
    return fitted(frontier(one.mean for one in networks))


def beside(networks: Sequence[Network]) -> str:
    paper = (
        "In the paper ViTs need 2 to 4 times less compute than ResNets for the same accuracy, and hybrids are ahead of "
        "ViTs at small budgets, a lead that vanishes for large ones."
    )
    return f"{paper} Here: {against_resnets(networks)}; {against_hybrids(leads(networks))}."


def against_resnets(networks: Sequence[Network]) -> str:
    logs = times(networks, "ViT", "BiT")
    if logs is None:
        found = above(networks, "ViT", "BiT")
        agrees = "disagrees" if apart(networks, "ViT", "BiT") is not None else "agrees"
        nothing = "ViTs and ResNets reach no accuracy in common, so that their compute cannot be set side by side"
        if found and len(by_seed(networks, "BiT")) < 2:
            return f"{found}, of one seed, so that nothing is decided"
        return f"{agrees}, {found}" if found else nothing
    inside = bounds(logs)
    if inside is None:
        return f"ResNets need {in_times(logs)} as much, of one seed, so that nothing is decided"
    low, high = inside
    if high < 1:
        return f"disagrees, ResNets need less compute than ViTs, {in_times(logs)} as much"
    if low <= 1:
        return f"the seeds do not tell which needs less (ResNets {in_times(logs)} as much)"
    if low <= LESS[1] and high >= LESS[0]:
        return f"agrees, ResNets need {in_times(logs)} as much"
    return f"agrees that ViTs need less, by another factor: ResNets need {in_times(logs)} as much"


def against_hybrids(found: tuple[Spread, Spread] | None) -> str:
    if found is None:
        return "hybrids and ViTs have no compute in common"
    low, high = found
    told = f"{100 * low.mean:+.1f} points at the least compute that both have, {100 * high.mean:+.1f} at the greatest"
    moved = Spread(tuple(one - other for one, other in zip(low.values, high.values, strict=True)))
    if moved.error is None or low.error is None:
        return f"hybrids against ViTs: {told}, of one seed, so that nothing is decided"
    reach = student(moved.count - 1)
    if low.mean <= reach * low.error:
        return f"hybrids are not ahead at small budgets beyond the spread over seeds ({told})"
    if moved.mean > reach * moved.error:
        return f"agrees, hybrids are ahead and their lead shrinks ({told})"
    return f"hybrids are ahead, as there, but their lead does not shrink beyond the spread over seeds ({told})"


def table(networks: Sequence[Network]) -> Table:
    printed = {(row.network, f"{row.epochs} epochs"): row for row in TABLE_6}
    rows: list[tuple[str, ...]] = []
    for one in sorted(networks, key=lambda one: (list(FAMILIES).index(one.family), one.exaflops)):
        row = printed.get((one.name, one.length))
        beside = (f"{row.exaflops:g}", f"{row.average_5:.2f}") if row else (NOTHING, NOTHING)
        told = (f"{one.name}, {one.length}", one.family, f"{one.exaflops:.3g}", percent(one.accuracy))
        rows.append((*told, str(len(one.costs)), *beside))
    columns = ("network", "family", "exaFLOPs", "accuracy [%]", "seeds", "paper: exaFLOPs", "paper: Average-5 [%]")
    return Table(columns=columns, rows=tuple(rows))


def lines_of(networks: Sequence[Network]) -> list[Line]:
    """A line a family; where networks were trained for several lengths, one for each of them."""
    lines: list[Line] = []
    strokes: tuple[Stroke, ...] = ("solid", "dashed", "dotted")
    for family, called in FAMILIES.items():
        ours = [one for one in networks if one.family == family]
        names = list(dict.fromkeys(one.name for one in ours))
        several = len(names) < len(ours)
        for at, name in enumerate(names if several else [called] * bool(ours)):
            points = [Point(x=one.exaflops, y=one.accuracy) for one in ours if not several or one.name == name]
            lines.append(Line(name=name, family=family, points=points, stroke=strokes[at % 3], hollow=at % 2 > 0))
    return lines


def figure(networks: Sequence[Network]) -> "Figure":
    """Ours next to Figure 5."""
    ours, law = lines_of(networks), law_of(networks)
    if law is not None:
        ends = [math.log(pick(one.exaflops for one in networks)) for pick in (min, max)]
        places = [math.exp(ends[0] + (ends[1] - ends[0]) * at / (CURVE - 1)) for at in range(CURVE)]
        curve = [Point(x=place, y=Spread((law.accuracy(place),))) for place in places]
        ours.append(Line(name="frontier, fitted", family="frontier", points=curve, stroke="dotted", dots=False))
    theirs = [
        Line(
            name=FAMILIES[family],
            family=family,
            stroke="none",
            points=[
                Point(x=row.exaflops, y=Spread((row.average_5 / 100,)))
                for row in TABLE_6
                if ("BiT" if row.network.startswith("BiT") else "hybrid" if "+" in row.network else "ViT") == family
            ],
        )
        for family in FAMILIES
    ]
    along = "compute of the training [exaFLOPs]"
    return plot(
        [
            Panel(lines=ours, along=along, up="accuracy [%]", title="here", log=True),
            Panel(lines=theirs, along=along, up="mean over five sets [%]", title="the paper, Figure 5", log=True),
        ]
    )
