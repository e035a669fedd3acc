"""D.6, Figure 13: plain and axial ViTs, and AxialResNet next to ResNet, against compute and against speed.

An axial block attends along rows and then along columns, each with its own MLP. Without a class token all tokens lie on
the grid, so the plain ViTs average their patches here too. Speed is that of training as measured in the cells: those
that share a device slow each other down, so speeds compare only within one run of the study.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from vitrail.core.text import join_words, pair
from vitrail.models.family import ModelConfig
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.vit_config import vit_config
from vitrail.models.zoo import adapt_config, axial, axial_resnet50, mini_bit
from vitrail.recipes.run_overrides import with_image_size
from vitrail.recipes.table3 import bit_r50x1_jft, vit_b16_jft, vit_b32_jft
from vitrail.studies.base_runs import build_cpu_run, build_gpu_run, build_paper_run, shrink_to_8_px
from vitrail.studies.definition import Findings, ResultTable, Scale, judge_gap, seed_cells
from vitrail.studies.plots import Panel, SeedLine, plot_lines
from vitrail.studies.statistics import (
    NOTHING,
    VALUE_NAMES,
    Gap,
    SeedGroup,
    Spread,
    choose_value,
    compare,
    find_group,
    format_percent,
    format_spread,
    group_by_seed,
)
from vitrail.train.config import Run
from vitrail.train.grid.plan import Cell, CellOutcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure


SIDE: Final = 32  # px at the small scale; divisible by both patches
# Read off Figure 13, in per cent; it prints no numbers.
READINGS: Final[Mapping[str, str]] = {
    "ViT-B/16": "about 64",
    "Axial-ViT-B/16": "about 65",
    "ViT-B/32": "about 56 to 57",
    "Axial-ViT-B/32": "about 58 to 59",
    "BiT-R50x1": "about 50",
    "AxialResNet50": "about 56 to 57",
}


def iter_pairs(scale: Scale, source: str) -> Iterator[tuple[Run, str, ModelConfig, str, ModelConfig]]:
    """For each pair the run, and the name and config of the plain and of the axial network. At the paper's scale on
    JFT-300M, with Table 3's values for the plain network."""
    if scale == "paper":
        for name, patch, recipe in (("ViT-B/32", 32, vit_b32_jft), ("ViT-B/16", 16, vit_b16_jft)):
            run = build_paper_run(recipe(), source)
            model = vit_config(run.model)
            crosswise = replace(axial("B", patch), classes=model.classes, head=model.head)
            yield run, name, model, f"Axial-{name}", crosswise
        run = build_paper_run(bit_r50x1_jft(), source)
        crosswise = replace(axial_resnet50(), classes=run.model.classes)
        yield run, "BiT-R50x1", run.model, "AxialResNet50", crosswise
        return
    if scale == "tiny":  # as many pixels as the digits have
        run, patches, prefix = shrink_to_8_px(replace(build_cpu_run(source, steps=80), batch=32)), (4, 2), "ViT"
        resnet = ResNetConfig(blocks=(1, 1), factor=0.25, root="3x3", groups=4, axial_heads=4)
    else:
        run, patches, prefix = with_image_size(build_gpu_run(source, steps=3000), SIDE), (8, 4), "ViT-Mini"
        resnet = mini_bit("mini-R14")
    model = vit_config(run.model)
    for patch in patches:
        plain = replace(model, patch=pair(patch), pool="mean", class_token=False)
        name = f"{prefix}/{patch}"
        yield run, name, plain, f"Axial-{name}", replace(plain, attention="axial")
    resnet = adapt_config(resnet, image_size=run.augmentation.size, classes=model.classes)
    name = "R8" if scale == "tiny" else "mini-R14"
    yield run, name, resnet, f"Axial-{name}", replace(resnet, mixing="axial")


def cells(scale: Scale, source: str) -> Sequence[Cell]:
    seeds = {"tiny": 2, "small": 3, "paper": 1}[scale]
    return tuple(
        cell
        for run, plain_name, plain, axial_name, crosswise in iter_pairs(scale, source)
        for kind, name, model in (("plain", plain_name, plain), ("axial", axial_name, crosswise))
        for cell in seed_cells(
            name.replace("/", "-"),
            {"network": name, "pair": plain_name, "attention": kind},
            replace(run, name=name, model=model),
            seeds,
        )
    )


def measure_speed(group: SeedGroup) -> Spread | None:
    """Training images per second and device."""
    speeds = [
        one.values["images"] / (3600 * one.values["device_hours"])
        for one in group.outcomes
        if "images" in one.values and one.values.get("device_hours", 0.0) > 0
    ]
    return Spread(tuple(speeds)) if speeds else None


@dataclass(frozen=True, kw_only=True, slots=True)
class AxialPair:
    """An axial network next to its plain one: its accuracy over it, and multiples of its compute and its speed."""

    plain: str
    gap: Gap
    compute: float | None
    speed: float | None

    @property
    def costs(self) -> str:
        known = (("compute", self.compute), ("speed", self.speed))
        return join_words(f"{ratio:.2g} times the {name}" for name, ratio in known if ratio)


def compare_pairs(groups: Sequence[SeedGroup], value: str) -> list[AxialPair]:
    """The pairs whose two networks have finished."""
    found: list[AxialPair] = []
    for name in dict.fromkeys(str(group.at["pair"]) for group in groups):
        plain, crosswise = (find_group(groups, pair=name, attention=kind) for kind in ("plain", "axial"))
        if plain is None or crosswise is None:
            continue
        gap = compare(crosswise.spread(value), plain.spread(value), (group.spread(value) for group in groups))
        compute = divide(crosswise.spread("exaflops"), plain.spread("exaflops"))
        speed = divide(measure_speed(crosswise), measure_speed(plain))
        found += [] if gap is None else [AxialPair(plain=name, gap=gap, compute=compute, speed=speed)]
    return found


def divide(one: Spread | None, other: Spread | None) -> float | None:
    return None if one is None or other is None or not other.mean else one.mean / other.mean


def analyse(outcomes: Sequence[CellOutcome]) -> Findings:
    groups, value = group_by_seed(outcomes), choose_value(outcomes)
    pairs = compare_pairs(groups, value)
    parts = [f"{one.plain} {one.gap}{f' at {one.costs}' if one.costs else ''}" for one in pairs]
    return Findings(
        table=build_table(groups, value),
        figure=partial(draw_figure, groups, value),
        summary=f"Axial over plain, in {VALUE_NAMES[value]}: {'; '.join(parts)}." if parts else "",
        paper="D.6: axial ViTs are better than plain ones at the cost of more compute; AxialResNet50 is better than "
        "ResNet50 but very slow.",
        claims=[claim for one in pairs for claim in judge_gap(f"axial over plain {one.plain}, {one.costs}:", one.gap)],
    )


def build_table(groups: Sequence[SeedGroup], value: str) -> ResultTable:
    rows: list[tuple[str, ...]] = []
    for group in groups:
        name, compute, speed = str(group.at["network"]), group.mean("exaflops"), measure_speed(group)
        costs = (
            NOTHING if compute is None else f"{compute:.3g}",
            NOTHING if speed is None else format_spread(speed, digits=0),
        )
        rows.append((name, format_percent(group.spread(value)), *costs, READINGS.get(name, NOTHING)))
    columns = ("network", f"{VALUE_NAMES[value]} [%]", "exaFLOPs", "training images/s")
    return ResultTable(columns=(*columns, "paper, Figure 13 (5-shot, read off)"), rows=tuple(rows))


def draw_figure(groups: Sequence[SeedGroup], value: str) -> "Figure":
    """Figure 13: the same accuracies against compute and against speed."""
    up = f"{VALUE_NAMES[value]} [%]"
    compute = build_lines(groups, value, [group.spread("exaflops") for group in groups])
    speed = build_lines(groups, value, [measure_speed(group) for group in groups])
    return plot_lines(
        [
            Panel(lines=compute, along="training compute [exaFLOPs]", up=up, log=True),
            Panel(lines=speed, along="training speed [images/s]", up=up, log=True),
        ]
    )


def build_lines(groups: Sequence[SeedGroup], value: str, along: Sequence[Spread | None]) -> list[SeedLine]:
    """One line per pair, from plain (hollow) to axial."""
    lines: list[SeedLine] = []
    for name in dict.fromkeys(str(group.at["pair"]) for group in groups):
        points = {
            str(group.at["attention"]): (x.mean, group.spread(value))
            for group, x in zip(groups, along, strict=True)
            if group.at["pair"] == name and x is not None and x.mean > 0
        }
        lines.append(SeedLine(name="", family=name, points=list(points.values()), dots=False))
        lines += [
            SeedLine(name=f"{name}, {kind}", family=name, points=[point], stroke="none", hollow=kind == "plain")
            for kind, point in points.items()
        ]
    return lines
