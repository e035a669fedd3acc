"""D.6, Figure 13: plain and axial ViTs, and AxialResNet next to ResNet, against compute and against speed.

An axial block attends along rows and then along columns, each with its own MLP. Without a class token all tokens lie on
the grid, so the plain ViTs average their patches here too. Speed is that of training as measured in the cells: those
that share a device slow each other down, so speeds compare only within one run of the study.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from vitrail.core.text import join_words, pair
from vitrail.models.family import ModelConfig
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.vit_config import vit_config
from vitrail.models.zoo import adapt_config, axial, axial_resnet50, mini_bit
from vitrail.recipes.run_overrides import with_image_size
from vitrail.recipes.table3 import bit_r50x1_jft, vit_b16_jft, vit_b32_jft
from vitrail.studies import statistics as stats
from vitrail.studies.base_runs import build_cpu_run, build_gpu_run, build_paper_run, shrink_to_8_px
from vitrail.studies.definition import Findings, ResultTable, Scale, judge_gaps, seed_cells
from vitrail.studies.plots import Panel, SeedLine
from vitrail.studies.statistics import NOTHING, VALUE_NAMES, Gap, SeedGroup, Spread
from vitrail.train.config import Run
from vitrail.train.grid.plan import Cell, CellOutcome

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
    """Yields for each pair the run, and the name and config of the plain and of the axial network. At the paper's scale
    on JFT-300M, with Table 3's values for the plain network."""
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


def cells(scale: Scale, source: str) -> Iterator[Cell]:
    seeds = {"tiny": 2, "small": 3, "paper": 1}[scale]
    for run, plain_name, plain, axial_name, crosswise in iter_pairs(scale, source):
        for kind, name, model in (("plain", plain_name, plain), ("axial", axial_name, crosswise)):
            at = {"network": name, "pair": plain_name, "attention": kind}
            yield from seed_cells(name.replace("/", "-"), at, replace(run, name=name, model=model), seeds)


def measure_speed(group: SeedGroup) -> Spread | None:
    """Training images per second and device."""
    known = [one.values for one in group.outcomes if "images" in one.values and one.values.get("device_hours", 0.0) > 0]
    return Spread(tuple(one["images"] / (3600 * one["device_hours"]) for one in known)) if known else None


def compare_pairs(groups: Sequence[SeedGroup], value: str) -> Iterator[tuple[str, Gap, str]]:
    """For each pair whose two networks have finished: the name of the plain one, the gain of the axial one over it, and
    its compute and speed as multiples."""
    for name in dict.fromkeys(str(group.at["pair"]) for group in groups):
        plain, crosswise = (stats.find_group(groups, pair=name, attention=kind) for kind in ("plain", "axial"))
        if plain is not None and crosswise is not None:
            gap = stats.compare(crosswise.spread(value), plain.spread(value), (group.spread(value) for group in groups))
            compute = divide(crosswise.spread("exaflops"), plain.spread("exaflops"))
            ratios = {"compute": compute, "speed": divide(measure_speed(crosswise), measure_speed(plain))}
            if gap is not None:
                costs = join_words(f"{ratio:.2g} times the {cost}" for cost, ratio in ratios.items() if ratio)
                yield name, gap, costs


def divide(one: Spread | None, other: Spread | None) -> float | None:
    return None if one is None or other is None or not other.mean else one.mean / other.mean


def analyse(outcomes: Sequence[CellOutcome]) -> Findings:
    groups, value = stats.group_by_seed(outcomes), stats.choose_value(outcomes)
    pairs = list(compare_pairs(groups, value))
    parts = [f"{plain} {gap}{f' at {costs}' if costs else ''}" for plain, gap, costs in pairs]
    speeds = [measure_speed(group) for group in groups]
    rows = [
        (
            str(group.at["network"]),
            stats.format_spread(group.spread(value)),
            NOTHING if (compute := group.mean("exaflops")) is None else f"{compute:.3g}",
            stats.format_spread(speed, 0, scale=1),
            READINGS.get(str(group.at["network"]), NOTHING),
        )
        for group, speed in zip(groups, speeds, strict=True)
    ]
    columns = ("network", f"{VALUE_NAMES[value]} [%]", "exaFLOPs", "training images/s")
    along = {
        "training compute [exaFLOPs]": [group.spread("exaflops") for group in groups],
        "training speed [images/s]": speeds,
    }
    return Findings(
        table=ResultTable((*columns, "paper, Figure 13 (5-shot, read off)"), rows),
        panels=[  # Figure 13: the same accuracies against compute and against speed
            Panel(lines=build_lines(groups, value, costs), along=name, up=f"{VALUE_NAMES[value]} [%]", log=True)
            for name, costs in along.items()
        ],
        summary=f"Axial over plain, in {VALUE_NAMES[value]}: {'; '.join(parts)}." if parts else "",
        paper="D.6: axial ViTs are better than plain ones at the cost of more compute; AxialResNet50 is better than "
        "ResNet50 but very slow.",
        claims=judge_gaps((f"axial over plain {plain}, {costs}:", gap) for plain, gap, costs in pairs),
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
