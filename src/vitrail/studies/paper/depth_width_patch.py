"""D.2, Figure 8: a ViT grown from one base along one dimension at a time, and along all of them together.

The base and the names of the lines are the paper's (8 layers, D = 1024, MLP 2048, patch 32); it gives neither its heads
nor the points along the lines. Here heads keep their width, and the points are ours. Compute is in multiply-accumulates
of one image, relative to the base.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from vitrail.core.text import pair
from vitrail.models.vit_config import ViTConfig, vit_config
from vitrail.recipes.run_overrides import with_image_size
from vitrail.recipes.table3 import vit_b32_jft
from vitrail.studies import statistics as stats
from vitrail.studies.base_runs import build_cpu_run, build_gpu_run, build_paper_run
from vitrail.studies.definition import Findings, JudgedClaim, ResultTable, Scale, judge_gaps, seed_cells
from vitrail.studies.plots import Panel, SeedLine
from vitrail.studies.statistics import NOTHING, VALUE_NAMES, Gap, SeedGroup, Verdict
from vitrail.train.grid.plan import Cell, CellOutcome

BASE: Final = "base"
SIDE: Final = 32  # px at the small scale; divisible by all patches
FIELDS: Final = {"Depth": "depth", "Patch size": "patch", "Width MLP": "mlp", "Width": "width"}
LINES: Final = ("All", *FIELDS)


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


@dataclass(frozen=True, slots=True)
class ShapeGrid:
    """The base, the factors along each of FIELDS (a patch's side is divided by them), the shapes of "All", the width of
    a head, and the number of seeds."""

    base: Shape
    times: Sequence[Sequence[int]]
    together: Sequence[Shape]
    head_width: int
    seeds: int

    def shapes(self) -> Iterator[tuple[str, Shape]]:
        """The base, then those of each line."""
        yield BASE, self.base
        yield from (("All", shape) for shape in self.together)
        for (line, field), factors in zip(FIELDS.items(), self.times, strict=True):
            start: int = getattr(self.base, field)
            for by in factors:
                yield line, replace(self.base, **{field: start // by if field == "patch" else start * by})


GRIDS: Final[Mapping[Scale, ShapeGrid]] = {
    "tiny": ShapeGrid(Shape(1, 16, 32, 8), [(2, 6), (2,), (4, 16), (2, 4)], [Shape(2, 24, 48, 8)], 8, 2),
    "small": ShapeGrid(
        Shape(4, 128, 256, 8), [(2, 6), (2, 4), (4, 16), (2, 4)], [Shape(6, 192, 384, 8), Shape(6, 192, 384, 4)], 32, 3
    ),
    "paper": ShapeGrid(
        Shape(8, 1024, 2048, 32),
        [(2, 4, 8), (2, 4), (2, 4, 8), (2, 3)],
        [Shape(12, 1024, 4096, 32), Shape(16, 1280, 4096, 16)],
        head_width=64,
        seeds=1,
    ),
}


def cells(scale: Scale, source: str) -> Iterator[Cell]:
    if scale == "tiny":
        run = build_cpu_run(source, steps=120)
    elif scale == "small":
        run = with_image_size(build_gpu_run(source, steps=3000), SIDE)
    else:
        run = build_paper_run(vit_b32_jft(), source)
    grid, model = GRIDS[scale], vit_config(run.model)
    unit = grid.base.apply(model, grid.head_width).macs
    for number, (line, shape) in enumerate(grid.shapes()):
        network = shape.apply(model, grid.head_width)
        compute = round(network.macs / unit, 3)
        at = {"line": line, "shape": str(shape), "compute": compute, "parameters": network.parameters}
        name = f"{number:02d}-{line.lower().replace(' ', '-')}"
        yield from seed_cells(name, at, replace(run, name=f"shape {line} {shape}", model=network), grid.seeds)


class Gain(NamedTuple):
    """What a line has gained over the base at its last point, and per doubling of compute."""

    gap: Gap
    per_doubling: Gap


def measure_gains(groups: Sequence[SeedGroup], value: str) -> dict[str, Gain]:
    """By line, at the largest compute that has finished; empty without the base."""
    base, spreads = stats.find_spread(groups, value, line=BASE), [group.spread(value) for group in groups]
    out: dict[str, Gain] = {}
    for line in LINES:
        points = [
            (float(group.at["compute"]), gap)
            for group, spread in zip(groups, spreads, strict=True)
            if group.at["line"] == line and (gap := stats.compare(spread, base, spreads)) is not None
        ]
        if points:
            compute, gap = max(points, key=lambda point: point[0])
            margin = None if gap.margin is None else gap.margin / math.log2(compute)
            out[line] = Gain(gap, Gap(difference=gap.difference / math.log2(compute), margin=margin))
    return out


def analyse(outcomes: Sequence[CellOutcome]) -> Findings:
    groups, value = stats.group_by_seed(outcomes), stats.choose_value(outcomes)
    gains = measure_gains(groups, value)
    ranked = sorted(gains.items(), key=lambda item: -item[1].per_doubling.difference)
    parts = ", ".join(f"{line} {gain.per_doubling}" for line, gain in ranked)
    summary = f"Per doubling of compute, up to the last point of its line, {VALUE_NAMES[value]} changes by: {parts}."
    points = {
        line: [(float(one.at["compute"]), one.spread(value)) for one in groups if one.at["line"] in (BASE, line)]
        for line in LINES
    }
    lines = [SeedLine(name=line, points=points[line]) for line in LINES]
    return Findings(
        table=build_table(groups, value),
        panels=[Panel(lines=lines, along="relative compute", up=f"{VALUE_NAMES[value]} [%]", log=True)],
        summary=summary if parts else "",
        paper="D.2: depth brings most, width least, smaller patches help without parameters, and so does all together.",
        claims=compare_with_paper(gains) if set(gains) == set(LINES) else (),
    )


def compare_with_paper(gains: Mapping[str, Gain]) -> list[JudgedClaim]:
    """The paper's four statements."""
    each = {line: gains[line].per_doubling for line in LINES if line != "All"}
    most, least = (max(each, key=lambda line: sign * each[line].difference) for sign in (1, -1))
    depth, width = each["Depth"], each["Width"]
    order, margin = Verdict.UNDECIDED, None
    if depth.margin is not None and width.margin is not None:
        order = Verdict.AGREES if (most, least) == ("Depth", "Width") else Verdict.DISAGREES
        margin = math.hypot(depth.margin, width.margin)
    deeper = Gap(difference=depth.difference - width.difference, margin=margin)
    gaps = [
        ("depth over width, per doubling:", deeper),
        ("smaller patches over the base:", gains["Patch size"].gap),
        ("all together over the base:", gains["All"].gap),
    ]
    return [JudgedClaim(f"by their means {most} brings most and {least} least", order), *judge_gaps(gaps)]


def build_table(groups: Sequence[SeedGroup], value: str) -> ResultTable:
    base, spreads = stats.find_spread(groups, value, line=BASE), [group.spread(value) for group in groups]
    rows: list[tuple[str, ...]] = []
    for group, spread in zip(groups, spreads, strict=True):
        gap = stats.compare(spread, base, spreads) if group.at["line"] != BASE else None
        more = NOTHING if gap is None else str(gap).removesuffix(" points")
        costs = (f"{group.at['parameters']:,}", f"{group.at['compute']:.2f}")
        rows.append((str(group.at["line"]), str(group.at["shape"]), *costs, stats.format_spread(spread), more))
    columns = ("line", "layers x width", "parameters", "compute", f"{VALUE_NAMES[value]} [%]", "over the base [points]")
    return ResultTable(columns, rows)
