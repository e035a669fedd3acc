"""D.2, Figure 8: a ViT grown from one base along one dimension at a time, and along all of them together.

The base and the names of the lines are the paper's (8 layers, D = 1024, MLP 2048, patch 32); it gives neither its heads
nor the points along the lines. Here heads keep their width, and the points are ours. Compute is in multiply-accumulates
of one image, relative to the base.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from vitrail.core.text import pair
from vitrail.models.vit_config import ViTConfig, vit_config
from vitrail.recipes.run_overrides import with_image_size
from vitrail.recipes.table3 import vit_b32_jft
from vitrail.studies.base_runs import build_cpu_run, build_gpu_run, build_paper_run
from vitrail.studies.definition import Findings, JudgedClaim, ResultTable, Scale, judge_gap, seed_cells
from vitrail.studies.plots import Panel, SeedLine, plot_lines
from vitrail.studies.statistics import (
    NOTHING,
    VALUE_NAMES,
    Gap,
    SeedGroup,
    Verdict,
    choose_value,
    compare,
    find_spread,
    format_percent,
    group_by_seed,
)
from vitrail.train.config import Run
from vitrail.train.grid.plan import Cell, CellOutcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure


BASE: Final = "base"
SIDE: Final = 32  # px at the small scale; divisible by all patches
LINES: Final = ("All", "Depth", "Patch size", "Width MLP", "Width")


@dataclass(frozen=True, slots=True)
class Shape:
    """The dimensions that a ViT's cost depends on."""

    depth: int
    width: int
    mlp: int
    patch: int

    def __str__(self) -> str:
        return f"{self.depth} x {self.width}, MLP {self.mlp}, patch {self.patch}"

    def apply(self, model: ViTConfig, head_width: int) -> ViTConfig:
        heads, patch = self.width // head_width, pair(self.patch)
        return replace(model, depth=self.depth, width=self.width, mlp_width=self.mlp, heads=heads, patch=patch)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShapeGrid:
    """The base, the factors along each line (a patch's side is divided by them), the shapes of "All"."""

    base: Shape
    times: Mapping[str, Sequence[int]]
    together: Sequence[Shape]
    head_width: int
    seeds: int

    def shapes(self, line: str) -> Sequence[Shape]:
        if line == "All":
            return self.together
        field = {"Depth": "depth", "Patch size": "patch", "Width MLP": "mlp", "Width": "width"}[line]
        start: int = getattr(self.base, field)
        return [
            replace(self.base, **{field: start // by if line == "Patch size" else start * by})
            for by in self.times[line]
        ]


GRIDS: Final[Mapping[Scale, ShapeGrid]] = {
    "tiny": ShapeGrid(
        base=Shape(1, 16, 32, 8),
        times={"Depth": (2, 6), "Patch size": (2,), "Width MLP": (4, 16), "Width": (2, 4)},
        together=[Shape(2, 24, 48, 8)],
        head_width=8,
        seeds=2,
    ),
    "small": ShapeGrid(
        base=Shape(4, 128, 256, 8),
        times={"Depth": (2, 6), "Patch size": (2, 4), "Width MLP": (4, 16), "Width": (2, 4)},
        together=[Shape(6, 192, 384, 8), Shape(6, 192, 384, 4)],
        head_width=32,
        seeds=3,
    ),
    "paper": ShapeGrid(
        base=Shape(8, 1024, 2048, 32),
        times={"Depth": (2, 4, 8), "Patch size": (2, 4), "Width MLP": (2, 4, 8), "Width": (2, 3)},
        together=[Shape(12, 1024, 4096, 32), Shape(16, 1280, 4096, 16)],
        head_width=64,
        seeds=1,
    ),
}


def build_base(scale: Scale, source: str) -> Run:
    if scale == "tiny":
        return build_cpu_run(source, steps=120)
    return (
        with_image_size(build_gpu_run(source, steps=3000), SIDE)
        if scale == "small"
        else build_paper_run(vit_b32_jft(), source)
    )


def cells(scale: Scale, source: str) -> Sequence[Cell]:
    run, grid = build_base(scale, source), GRIDS[scale]
    model = vit_config(run.model)
    unit = grid.base.apply(model, grid.head_width).macs
    out: list[Cell] = []
    places = [(BASE, grid.base), *((line, shape) for line in LINES for shape in grid.shapes(line))]
    for number, (line, shape) in enumerate(places):
        network = shape.apply(model, grid.head_width)
        compute = round(network.macs / unit, 3)
        at = {"line": line, "shape": str(shape), "compute": compute, "parameters": network.parameters}
        name = f"{number:02d}-{line.lower().replace(' ', '-')}"
        out += seed_cells(name, at, replace(run, name=f"shape {line} {shape}", model=network), grid.seeds)
    return tuple(out)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """What a line has gained over the base at its last point, and per doubling of compute."""

    compute: float
    gap: Gap

    @property
    def per_doubling(self) -> Gap:
        doublings = math.log2(self.compute)
        margin = None if self.gap.margin is None else self.gap.margin / doublings
        return Gap(difference=self.gap.difference / doublings, margin=margin)


def measure_gains(groups: Sequence[SeedGroup], value: str) -> dict[str, Gain]:
    """By line, at the largest compute that has finished; empty without the base."""
    base, spreads = find_spread(groups, value, line=BASE), [group.spread(value) for group in groups]
    out: dict[str, Gain] = {}
    for line in LINES:
        points = [
            (float(group.at["compute"]), gap)
            for group, spread in zip(groups, spreads, strict=True)
            if group.at["line"] == line and (gap := compare(spread, base, spreads)) is not None
        ]
        if points:
            compute, gap = max(points, key=lambda point: point[0])
            out[line] = Gain(compute=compute, gap=gap)
    return out


def analyse(outcomes: Sequence[CellOutcome]) -> Findings:
    groups, value = group_by_seed(outcomes), choose_value(outcomes)
    gains = measure_gains(groups, value)
    ranked = sorted(gains.items(), key=lambda item: -item[1].per_doubling.difference)
    parts = ", ".join(f"{line} {gain.per_doubling}" for line, gain in ranked)
    return Findings(
        table=build_table(groups, value),
        figure=partial(draw_figure, groups, value),
        summary=f"Per doubling of compute, up to the last point of its line, {VALUE_NAMES[value]} changes by: {parts}."
        if parts
        else "",
        paper="D.2: depth brings most, width least, smaller patches help without parameters, and so does all together.",
        claims=compare_with_paper(gains) if set(gains) == set(LINES) else (),
    )


def compare_with_paper(gains: Mapping[str, Gain]) -> list[JudgedClaim]:
    """The paper's four statements."""
    each = {line: gains[line].per_doubling for line in LINES if line != "All"}
    most, least = (max(each, key=lambda line: sign * each[line].difference) for sign in (1, -1))
    depth, width = each["Depth"], each["Width"]
    known = depth.margin is not None and width.margin is not None
    deeper = Gap(
        difference=depth.difference - width.difference,
        margin=math.hypot(depth.margin or 0.0, width.margin or 0.0) if known else None,
    )
    order = Verdict.AGREES if (most, least) == ("Depth", "Width") else Verdict.DISAGREES
    return [
        JudgedClaim(f"by their means {most} brings most and {least} least", order if known else Verdict.UNDECIDED),
        *judge_gap("depth over width, per doubling:", deeper),
        *judge_gap("smaller patches over the base:", gains["Patch size"].gap),
        *judge_gap("all together over the base:", gains["All"].gap),
    ]


def build_table(groups: Sequence[SeedGroup], value: str) -> ResultTable:
    base, spreads = find_spread(groups, value, line=BASE), [group.spread(value) for group in groups]
    rows: list[tuple[str, ...]] = []
    for group, spread in zip(groups, spreads, strict=True):
        gap = compare(spread, base, spreads) if group.at["line"] != BASE else None
        more = NOTHING if gap is None else str(gap).removesuffix(" points")
        costs = (f"{group.at['parameters']:,}", f"{group.at['compute']:.2f}")
        rows.append((str(group.at["line"]), str(group.at["shape"]), *costs, format_percent(spread), more))
    columns = ("line", "layers x width", "parameters", "compute", f"{VALUE_NAMES[value]} [%]", "over the base [points]")
    return ResultTable(columns=columns, rows=tuple(rows))


def draw_figure(groups: Sequence[SeedGroup], value: str) -> "Figure":
    lines = [
        SeedLine(
            name=line,
            points=[
                (float(group.at["compute"]), group.spread(value))
                for group in groups
                if group.at["line"] in (BASE, line)
            ],
        )
        for line in LINES
    ]
    return plot_lines([Panel(lines=lines, along="relative compute", up=f"{VALUE_NAMES[value]} [%]", log=True)])
