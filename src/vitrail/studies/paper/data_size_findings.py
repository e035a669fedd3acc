"""What the cells of `data-size` say: how far a ViT is behind a ResNet at each size, and how that moves with data."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from vitrail.core.paper_tables import JFT_IMAGES, TABLE_5
from vitrail.studies.framework.definition import Findings, Table
from vitrail.studies.framework.plots import Line, Panel, Point, Stroke, plot
from vitrail.studies.framework.results import (
    NOTHING,
    Gap,
    Group,
    Spread,
    gap,
    group_at,
    groups,
    percent,
    pooled,
    student,
)
from vitrail.studies.framework.verdicts import FEWSHOT, WATCHED, WORDS, listed, missing
from vitrail.train.grid.plan import CellOutcome, Coordinate

if TYPE_CHECKING:
    from matplotlib.figure import Figure


PLAIN, SEARCHED, TUNED = "plain", "searched", "tuned"
VALUES: Final = ("accuracy", FEWSHOT)
# A ViT and the ResNet that it is set next to: the paper's two pairs, and one for the small networks by their families.
PAIRS: Final = (("ViT-B/32", "BiT-R50x1"), ("ViT-L/16", "BiT-R152x2"))
MEDIUM: Final = 90e6 / JFT_IMAGES  # of JFT, from which on ViTs are ahead in the paper


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """How far a ViT is ahead of a ResNet, by share of the data; below 0 it is behind."""

    vit: str
    resnet: str
    value: str
    gaps: Mapping[float, Gap]
    moved: Gap  # from the smallest share to the largest
    errors: tuple[float, float]  # how many times those of the ResNet the ViT makes, at either end

    @property
    def ends(self) -> tuple[float, float]:
        return min(self.gaps), max(self.gaps)


def conclude(outcomes: Sequence[CellOutcome]) -> Findings:
    found = groups(outcomes)
    return Findings(
        table=table(outcomes, found),
        figure=lambda: figure(outcomes, found),
        sentence=sentence(outcomes, found) + missing(outcomes),
        beside=beside(found),
    )


def curves(found: Iterable[Group], series: str = PLAIN) -> dict[str, dict[float, Group]]:
    """Networks with their groups by share."""
    out: dict[str, dict[float, Group]] = {}
    for group in found:
        if group.at.get("series") == series and group.outcomes:
            out.setdefault(str(group.at["network"]), {})[float(group.at["part"])] = group
    return out


def best_of_search(outcomes: Iterable[CellOutcome], value: str) -> dict[str, dict[float, Spread]]:
    """By network and share, the value of the setting that was best on what was held out, chosen for each seed by itself
    among all settings, the plain one included. Only where something was searched."""
    tried: dict[tuple[str, float], dict[Coordinate, list[CellOutcome]]] = {}
    searched: set[tuple[str, float]] = set()
    for one in outcomes:
        if one.fault or one.at.get("series") not in (PLAIN, SEARCHED) or WATCHED not in one.values:
            continue
        place = (str(one.at["network"]), float(one.at["part"]))
        tried.setdefault(place, {}).setdefault(one.at["seed"], []).append(one)
        if one.at["series"] == SEARCHED:
            searched.add(place)
    out: dict[str, dict[float, Spread]] = {}
    for network, part in searched:
        chosen = [max(runs, key=lambda one: one.values[WATCHED]) for runs in tried[network, part].values()]
        values = tuple(one.values[value] for one in chosen if value in one.values)
        if values:
            out.setdefault(network, {})[part] = Spread(values)
    return {network: dict(sorted(parts.items())) for network, parts in sorted(out.items())}


def pairs(found: Sequence[Group]) -> list[Pair]:
    """Each ViT next to its ResNet, at the shares that both have."""
    known = curves(found)
    out: list[Pair] = []
    for vit, resnet in (*PAIRS, small_pair(found)):
        shares = sorted(known.get(vit, {}).keys() & known.get(resnet, {}).keys())
        value = FEWSHOT if (vit, resnet) in PAIRS else "accuracy"
        both = {part: (known[vit][part].spread(value), known[resnet][part].spread(value)) for part in shares}
        whole = {part: (one, other) for part, (one, other) in both.items() if one is not None and other is not None}
        if len(whole) > 1:
            out.append(pair_of(vit, resnet, value, whole))
    return out


def small_pair(found: Sequence[Group]) -> tuple[str, str]:
    """The ViT and the ResNet of a small grid, which has one of each."""
    names = {str(group.at.get("family")): str(group.at.get("network")) for group in reversed(found)}
    return names.get("ViT", ""), names.get("BiT", "")


def pair_of(vit: str, resnet: str, value: str, both: Mapping[float, tuple[Spread, Spread]]) -> Pair:
    everything = [spread for two in both.values() for spread in two]
    gaps = {part: gap(one, other, everything) for part, (one, other) in both.items()}
    low, high = min(both), max(both)
    pool = pooled(everything)
    margin = None
    if pool is not None:  # a difference of two differences: four means
        shares = sum(1 / spread.count for part in (low, high) for spread in both[part])
        margin = student(pool[1]) * pool[0] * shares**0.5
    moved = Gap(difference=gaps[high].difference - gaps[low].difference, margin=margin)
    first, last = (times_as_many(*both[part]) for part in (low, high))
    return Pair(vit=vit, resnet=resnet, value=value, gaps=gaps, moved=moved, errors=(first, last))


def times_as_many(one: Spread, other: Spread) -> float:
    """The errors of the one over those of the other; points alone would call it a gain when both near their best."""
    return (1 - one.mean) / (1 - other.mean) if other.mean < 1 else math.inf


def of_data(part: float) -> str:
    return "all of the images" if part == 1 else f"{100 * part:.3g} % of the images"


def stands(found: Gap) -> str:
    """ "8.1 ± 0.9 points behind"."""
    side = "ahead of" if found.difference > 0 else "behind"
    return f"{str(Gap(difference=abs(found.difference), margin=found.margin)).lstrip('+')} {side}"


def sentence(outcomes: Sequence[CellOutcome], found: Sequence[Group]) -> str:
    said: list[str] = []
    for pair in pairs(found):
        low, high = pair.ends
        first, last = pair.gaps[low], pair.gaps[high]
        said.append(
            f"with {of_data(low)} {pair.vit} is {stands(first)} {pair.resnet} in {WORDS[pair.value]}, "
            f"with {of_data(high)} {stands(last)} it"
        )
    gains = [gain for gain in searched_gains(outcomes, found) if gain]
    if not said and not gains:
        return "Too few cells are done to set a ViT next to a ResNet at two sizes."
    text = "; ".join([*said, *gains])
    return f"{text[0].upper()}{text[1:]}."


def searched_gains(outcomes: Sequence[CellOutcome], found: Sequence[Group]) -> list[str]:
    """What the search brings at the smallest share where there was one."""
    out: list[str] = []
    plain = curves(found)
    for network, parts in best_of_search(outcomes, "accuracy").items():
        part = min(parts)
        group = plain.get(network, {}).get(part)
        base = None if group is None else group.spread("accuracy")
        if base is not None:
            more = gap(parts[part], base)
            sure = "" if not more.open else ", within the spread over seeds"
            out.append(f"the search changes {network} by {more} with {of_data(part)}{sure}")
    return out


def beside(found: Sequence[Group]) -> str:
    paper = (
        "In the paper (4.3) ViTs are far behind ResNets of about their compute with the smallest subset of JFT (9M "
        "images), ahead from 90M on, and the larger the set the more they gain."
    )
    said = [verdict(pair) for pair in pairs(found)]
    said += [of_figure_3(found)] if any(group.at.get("series") == TUNED for group in found) else []
    told = "; ".join(text for text in said if text)
    return f"{paper} Here: {told or 'too few cells are done to say'}."


def verdict(pair: Pair) -> str:
    low, high = pair.ends
    first, last = pair.gaps[low], pair.gaps[high]
    name = f"{pair.vit} against {pair.resnet}"
    if pair.moved.margin is None:
        return f"{name} is of one seed, so that nothing is decided"
    less, more = pair.errors
    moved = f"{pair.moved}; it makes {less:.1f} times the errors of the ResNet with the least and {more:.1f} with all"
    behind = "agrees, the ViT is behind with the least data" if first.below else (
        "disagrees, the ViT is ahead with the least data" if first.above
        else "with the least data the seeds tell neither ahead"
    )  # fmt: skip
    if pair.moved.above:
        moves = f"agrees, the ViT gains on the ResNet with more data ({moved})"
    elif pair.moved.below:
        moves = f"disagrees, the ViT falls back with more data ({moved})"
    else:
        moves = f"how the gap moves with more data is within the spread over seeds ({moved})"
    crossed = [part for part, one in pair.gaps.items() if one.above]
    if crossed:
        over = (
            f"it is ahead from {of_data(min(crossed))} on"
            if last.above
            else "it is ahead at some sizes, not at the largest"
        )
    else:
        over = "it is not ahead of the ResNet at any size, so no crossing was seen"
    return f"{name}: {behind}; {moves}; {over}"


def of_figure_3(found: Sequence[Group]) -> str:
    """Large against Base after tuning: below on ImageNet, about equal on ImageNet-21k, above on JFT."""
    said: list[str] = []
    for upstream in TABLE_5:
        found_here = {
            network: group_at(found, {"series": TUNED, "upstream": upstream, "network": network})
            for network in ("ViT-B/16", "ViT-L/16")
        }
        means = [None if group is None else group.mean("accuracy") for group in found_here.values()]
        if means[0] is not None and means[1] is not None:
            printed = TABLE_5[upstream]["imagenet"]
            theirs = printed["ViT-L/16"] - printed["ViT-B/16"]
            said.append(f"{upstream} {100 * (means[1] - means[0]):+.2f} points (there {theirs:+.2f})")
    return f"ViT-L/16 against ViT-B/16 pre-trained on {listed(said)}" if said else ""


def table(outcomes: Sequence[CellOutcome], found: Sequence[Group]) -> Table:
    """Figure 4 has no printed numbers; those of Figure 3 are the ImageNet rows of Table 5."""
    rows: list[tuple[str, ...]] = []
    best = {value: best_of_search(outcomes, value) for value in VALUES}
    for group in found:
        if group.at.get("series") != PLAIN:
            continue
        network, part = str(group.at["network"]), float(group.at["part"])
        plain = [percent(group.spread(value)) for value in VALUES]
        chosen = [percent(best[value].get(network, {}).get(part)) for value in VALUES]
        rows.append((network, f"{100 * part:.3g} %", *plain, *chosen, str(len(group.outcomes)), NOTHING))
    for group in found:
        if group.at.get("series") == TUNED:
            network, upstream = str(group.at["network"]), str(group.at["upstream"])
            printed = TABLE_5[upstream]["imagenet"].get(network)
            paper = NOTHING if printed is None else f"{printed:.2f}"
            tuned = percent(group.spread("accuracy"), 2)
            rows.append((network, f"{upstream}, tuned", tuned, *(NOTHING,) * 3, str(len(group.outcomes)), paper))
    columns = (
        *("network", "data", "accuracy [%]", "5-shot accuracy [%]", "accuracy, searched [%]", "5-shot, searched [%]"),
        *("seeds", "paper: Table 5 [%]"),
    )
    return Table(columns=columns, rows=tuple(rows))


def figure(outcomes: Sequence[CellOutcome], found: Sequence[Group]) -> "Figure":
    """Accuracy and few-shot accuracy over the share of the data; what a search found is dashed."""
    panels: list[Panel] = []
    for value in VALUES:
        lines = [*lines_of(curves(found), value), *searched_lines(outcomes, found, value)]
        parts = sorted({point.x for line in lines for point in line.points})
        if parts or value == "accuracy":
            panels.append(
                Panel(
                    lines=lines,
                    along="share of the training images [%]",
                    up=f"{WORDS[value]} [%]",
                    log=bool(parts),
                    ticks={part: f"{part:.3g}" for part in parts},
                )
            )
    return plot(panels)


def lines_of(known: Mapping[str, Mapping[float, Group]], value: str) -> list[Line]:
    """A line a network; of two of a family the second is dotted."""
    out: list[Line] = []
    seen: dict[str, int] = {}
    for network, parts in known.items():
        points = [
            Point(x=100 * part, y=spread)
            for part, group in sorted(parts.items())
            if (spread := group.spread(value)) is not None
        ]
        family = str(next(iter(parts.values())).at["family"])
        strokes: tuple[Stroke, ...] = ("solid", "dotted", "dashed")
        if points:
            out.append(Line(name=network, family=family, points=points, stroke=strokes[seen.get(family, 0) % 3]))
            seen[family] = seen.get(family, 0) + 1
    return out


def searched_lines(outcomes: Sequence[CellOutcome], found: Sequence[Group], value: str) -> list[Line]:
    known = curves(found)
    return [
        Line(
            name=f"{network}, searched",
            family=str(next(iter(known[network].values())).at["family"]),
            points=[Point(x=100 * part, y=spread) for part, spread in parts.items()],
            stroke="dashed",
            hollow=True,
        )
        for network, parts in best_of_search(outcomes, value).items()
        if network in known
    ]
