"""D.6, Figure 13: plain and axial ViTs, and AxialResNet next to ResNet, against compute and against speed.

An axial block attends along rows and then along columns, each with an MLP of its own. Without a class token all tokens
lie on the grid, so the plain ViTs average their patches here too. Speed is that of training as it was measured in the
cells: those that share a device slow each other down, so speeds compare within one run of the study alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from vitrail.core.text import pair
from vitrail.models.family import ModelConfig
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.vit_config import vit_config
from vitrail.models.zoo import adapt_config, axial, axial_resnet50, mini_bit
from vitrail.recipes.run_overrides import resized
from vitrail.recipes.table3 import bit_r50x1_jft, vit_b16_jft, vit_b32_jft
from vitrail.studies.framework.base_runs import for_card, for_cores, given
from vitrail.studies.framework.definition import Findings, Scale, Study, Table
from vitrail.studies.framework.plots import Line, Panel, Point, plot
from vitrail.studies.framework.results import NOTHING, Gap, Group, Spread, groups, percent, shown
from vitrail.studies.framework.verdicts import WORDS, apart, in_words, listed, measure, missing
from vitrail.train.config import Evaluation, Run
from vitrail.train.grid.plan import Cell, CellOutcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure


SIDE: Final = 32  # px at the small scale, which both patches divide
# Read off Figure 13, in per cent; it prints no numbers.
READINGS: Final[Mapping[str, str]] = {
    "ViT-B/16": "about 64",
    "Axial-ViT-B/16": "about 65",
    "ViT-B/32": "about 56 to 57",
    "Axial-ViT-B/32": "about 58 to 59",
    "BiT-R50x1": "about 50",
    "AxialResNet50": "about 56 to 57",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Network:
    """A network of the grid: `kind` is "plain" or "axial", and a pair has one of each."""

    name: str
    pair: str
    kind: str
    run: Run


def networks(scale: Scale, source: str) -> tuple[tuple[Network, ...], int]:
    """All of them with their runs, and the number of seeds."""
    if scale == "paper":
        return paper_networks(source), 1
    if scale == "tiny":
        run, seeds, patches = replace(for_cores(source, steps=80), batch=32), 2, (4, 2)
        run = resized(
            replace(run, model=replace(vit_config(run.model), patch=(2, 2))), 8
        )  # as many pixels as the digits have
        resnet = ResNetConfig(blocks=(1, 1), factor=0.25, root="3x3", groups=4, axial_heads=4)
        names, resnet_name = {patch: f"ViT/{patch}" for patch in patches}, "R8"
    else:
        run, seeds, patches = resized(for_card(source, steps=3000), SIDE), 3, (8, 4)
        resnet = mini_bit("mini-R14")
        names, resnet_name = {patch: f"ViT-Mini/{patch}" for patch in patches}, "mini-R14"
    model, found = vit_config(run.model), list[Network]()
    for patch in patches:
        plain = replace(model, patch=pair(patch), pool="mean", class_token=False)
        found += both(run, names[patch], plain, f"Axial-{names[patch]}", replace(plain, attention="axial"))
    resnet = adapt_config(resnet, image_size=run.augmentation.size, classes=model.classes)
    crosswise = replace(resnet, mixing="axial")
    return (*found, *both(run, resnet_name, resnet, f"Axial-{resnet_name}", crosswise)), seeds


def both(run: Run, plain_name: str, plain: ModelConfig, axial_name: str, crosswise: ModelConfig) -> tuple[Network, ...]:
    return (
        Network(name=plain_name, pair=plain_name, kind="plain", run=replace(run, name=plain_name, model=plain)),
        Network(name=axial_name, pair=plain_name, kind="axial", run=replace(run, name=axial_name, model=crosswise)),
    )


def paper_networks(source: str) -> tuple[Network, ...]:
    """On JFT-300M, with Table 3's values for the plain network of each pair."""
    found: list[Network] = []
    for name, patch, recipe in (("ViT-B/32", 32, vit_b32_jft), ("ViT-B/16", 16, vit_b16_jft)):
        run = paper_run(recipe(), source)
        model = vit_config(run.model)
        crosswise = replace(axial("B", patch), classes=model.classes, head=model.head)
        found += both(run, name, model, f"Axial-{name}", crosswise)
    run = paper_run(bit_r50x1_jft(), source)
    crosswise = replace(axial_resnet50(), classes=run.model.classes)
    return (*found, *both(run, "BiT-R50x1", run.model, "AxialResNet50", crosswise))


def paper_run(run: Run, source: str) -> Run:
    return given(replace(run, evaluation=Evaluation(fewshot="imagenet")), source)


def cells(scale: Scale, source: str) -> Sequence[Cell]:
    found, seeds = networks(scale, source)
    return tuple(
        Cell(
            name=f"{network.name.replace('/', '-')}-seed{seed}",
            at={"network": network.name, "pair": network.pair, "attention": network.kind, "seed": seed},
            run=replace(network.run, seed=seed),
        )
        for network in found
        for seed in range(seeds)
    )


def speed(group: Group) -> Spread | None:
    """Training images a second and device."""
    found = [
        one.values["images"] / (3600 * one.values["device_hours"])
        for one in group.outcomes
        if "images" in one.values and one.values.get("device_hours", 0.0) > 0
    ]
    return Spread(tuple(found)) if found else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Beside:
    """An axial network next to its plain one: accuracy over it, and multiples of its compute and its speed."""

    plain: str
    over: Gap
    compute: float | None
    speed: float | None

    def __str__(self) -> str:
        costs = [
            text
            for text in (
                f"{self.compute:.2g} times the compute" if self.compute else "",
                f"{self.speed:.2g} times the speed" if self.speed else "",
            )
            if text
        ]
        return f"{self.plain} {self.over}{f' at {listed(costs)}' if costs else ''}"


def pairs(found: Sequence[Group], value: str) -> list[Beside]:
    """Those of which both have finished."""
    everything = [group.spread(value) for group in found]
    out: list[Beside] = []
    for name in dict.fromkeys(str(group.at["pair"]) for group in found):
        plain, crosswise = (
            next((group for group in found if (group.at["pair"], group.at["attention"]) == (name, kind)), None)
            for kind in ("plain", "axial")
        )
        if plain is None or crosswise is None:
            continue
        over = apart(crosswise.spread(value), plain.spread(value), everything)
        if over is None:
            continue
        out.append(
            Beside(
                plain=name,
                over=over,
                compute=ratio(crosswise.spread("exaflops"), plain.spread("exaflops")),
                speed=ratio(speed(crosswise), speed(plain)),
            )
        )
    return out


def ratio(one: Spread | None, other: Spread | None) -> float | None:
    return None if one is None or other is None or not other.mean else one.mean / other.mean


def conclude(outcomes: Sequence[CellOutcome]) -> Findings:
    found, value = groups(outcomes), measure(outcomes)
    compared = pairs(found, value)
    return Findings(
        table=table(found, value),
        figure=partial(figure, found, value),
        sentence=sentence(compared, value) + missing(outcomes),
        beside=beside(compared),
    )


def table(found: Sequence[Group], value: str) -> Table:
    rows: list[tuple[str, ...]] = []
    for group in found:
        name, compute, pace = str(group.at["network"]), group.mean("exaflops"), speed(group)
        rows.append(
            (
                name,
                percent(group.spread(value)),
                NOTHING if compute is None else f"{compute:.3g}",
                NOTHING if pace is None else shown(pace, digits=0),
                READINGS.get(name, NOTHING),
            )
        )
    columns = ("network", f"{WORDS[value]} [%]", "exaFLOPs", "training images/s")
    return Table(columns=(*columns, "paper, Figure 13 (5-shot, read off)"), rows=tuple(rows))


def sentence(compared: Sequence[Beside], value: str) -> str:
    if not compared:
        return "No axial network has finished together with its plain one, so that nothing can be compared yet."
    return f"Axial over plain, in {WORDS[value]}: {'; '.join(str(each) for each in compared)}."


def beside(compared: Sequence[Beside]) -> str:
    said = (
        "D.6: axial ViTs are better than plain ones at the cost of more compute; AxialResNet50 is better than ResNet50 "
        "but very slow."
    )
    if not compared:
        return f"{said} Not decided here: cells are missing."
    verdicts: list[str] = []
    for each in compared:
        dearer = each.compute is not None and each.compute > 1
        verdict = "better, as there" if each.over.above else "worse, unlike there" if each.over.below else "undecided"
        because = f" ({in_words(each.over)})" if each.over.open else ""
        slower = "" if each.speed is None else ", slower" if each.speed < 1 else ", not slower"
        cost = "" if each.compute is None else ", at more compute" if dearer else ", at no more compute"
        verdicts.append(f"{each.plain} made axial is {verdict}{because}{cost}{slower}")
    return f"{said} Here {'; '.join(verdicts)}."


def figure(found: Sequence[Group], value: str) -> "Figure":
    """Figure 13: the same accuracies twice."""
    up = f"{WORDS[value]} [%]"
    compute, pace = lines(found, value, "exaflops"), lines(found, value, "")
    return plot(
        [
            Panel(lines=compute, along="training compute [exaFLOPs]", up=up, log=True),
            Panel(lines=pace, along="training speed [images/s]", up=up, log=True),
        ]
    )


def lines(found: Sequence[Group], value: str, along: str) -> list[Line]:
    """A line a pair, from plain (hollow) to axial; along the named value, or along speed."""
    out: list[Line] = []
    for name in dict.fromkeys(str(group.at["pair"]) for group in found):
        points: dict[str, Point] = {}
        for group in found:
            x, y = group.spread(along) if along else speed(group), group.spread(value)
            if group.at["pair"] == name and x is not None and y is not None and x.mean > 0:
                points[str(group.at["attention"])] = Point(x=x.mean, y=y)
        out.append(Line(name="", family=name, points=list(points.values()), dots=False))
        out += [
            Line(name=f"{name}, {kind}", family=name, points=[point], stroke="none", hollow=kind == "plain")
            for kind, point in points.items()
        ]
    return out


STUDY: Final = Study(
    name="axial",
    title="Axial attention in ViTs and ResNets, against compute and speed",
    anchor="D.6, Figure 13",
    cells=cells,
    conclude=conclude,
)
