"""D.2, Figure 8: a ViT grown from one base along one dimension at a time, and along all of them together.

The base and the names of the lines are the paper's (8 layers, D = 1024, MLP 2048, patch 32); it does not give its heads
or the points along the lines. Heads keep their width here, and the points are ours. Compute is in multiply-accumulates
of one image, in multiples of the base's.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from vitrail.core.text import pair
from vitrail.models.vit_config import ViTConfig, vit_config
from vitrail.recipes.run_overrides import resized
from vitrail.recipes.table3 import vit_b32_jft
from vitrail.studies.framework.base_runs import for_card, for_cores, given
from vitrail.studies.framework.definition import Findings, Scale, Study, Table
from vitrail.studies.framework.plots import Line, Panel, Point, plot
from vitrail.studies.framework.results import NOTHING, Gap, Group, Spread, groups, percent
from vitrail.studies.framework.verdicts import WORDS, apart, measure, missing
from vitrail.train.config import Evaluation, Run
from vitrail.train.grid.plan import Cell, CellOutcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure


BASE: Final = "base"
SIDE: Final = 32  # px at the small scale, which all patches divide
LINES: Final = ("All", "Depth", "Patch size", "Width MLP", "Width")


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What a ViT costs by."""

    depth: int
    width: int
    mlp: int
    patch: int

    def __str__(self) -> str:
        return f"{self.depth} x {self.width}, MLP {self.mlp}, patch {self.patch}"

    def of(self, model: ViTConfig, head_width: int) -> ViTConfig:
        return replace(
            model,
            depth=self.depth,
            width=self.width,
            mlp_width=self.mlp,
            heads=self.width // head_width,
            patch=pair(self.patch),
        )


def grown(base: Shape, times: Mapping[str, Sequence[int]], together: Sequence[Shape]) -> dict[str, list[Shape]]:
    """The points of each line: the base's dimension times so much (a patch's side divided by it)."""
    return {
        "All": list(together),
        "Depth": [replace(base, depth=base.depth * by) for by in times["Depth"]],
        "Patch size": [replace(base, patch=base.patch // by) for by in times["Patch size"]],
        "Width MLP": [replace(base, mlp=base.mlp * by) for by in times["Width MLP"]],
        "Width": [replace(base, width=base.width * by) for by in times["Width"]],
    }


def grid_of(scale: Scale, source: str) -> tuple[Run, Shape, dict[str, list[Shape]], int, int]:
    """The run, the base, the lines, the width of a head, and the number of seeds."""
    if scale == "tiny":
        base = Shape(depth=1, width=16, mlp=32, patch=8)
        times = {"Depth": (2, 6), "Patch size": (2,), "Width MLP": (4, 16), "Width": (2, 4)}
        together = [Shape(depth=2, width=24, mlp=48, patch=8)]
        return for_cores(source, steps=120), base, grown(base, times, together), 8, 2
    if scale == "small":
        base = Shape(depth=4, width=128, mlp=256, patch=8)
        times = {"Depth": (2, 6), "Patch size": (2, 4), "Width MLP": (4, 16), "Width": (2, 4)}
        together = [Shape(depth=6, width=192, mlp=384, patch=8), Shape(depth=6, width=192, mlp=384, patch=4)]
        run = resized(for_card(source, steps=3000), SIDE)
        return run, base, grown(base, times, together), 32, 3
    base = Shape(depth=8, width=1024, mlp=2048, patch=32)
    times = {"Depth": (2, 4, 8), "Patch size": (2, 4), "Width MLP": (2, 4, 8), "Width": (2, 3)}
    together = [Shape(depth=12, width=1024, mlp=4096, patch=32), Shape(depth=16, width=1280, mlp=4096, patch=16)]
    run = replace(vit_b32_jft(), evaluation=Evaluation(fewshot="imagenet"))
    return given(run, source), base, grown(base, times, together), 64, 1


def cells(scale: Scale, source: str) -> Sequence[Cell]:
    run, base, lines, head_width, seeds = grid_of(scale, source)
    model = vit_config(run.model)
    unit = base.of(model, head_width).macs
    places = [(BASE, base), *((line, shape) for line in LINES for shape in lines[line])]
    out: list[Cell] = []
    for number, (line, shape) in enumerate(places):
        network = shape.of(model, head_width)
        at = {
            "line": line,
            "shape": str(shape),
            "compute": round(network.macs / unit, 3),
            "parameters": network.parameters,
        }
        name = f"{number:02d}-{line.lower().replace(' ', '-')}"
        out += [
            Cell(
                name=f"{name}-seed{seed}",
                at={**at, "seed": seed},
                run=replace(run, name=f"shape {line} {shape}", model=network, seed=seed),
            )
            for seed in range(seeds)
        ]
    return tuple(out)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gain:
    """What a line has gained at its last point: over the base, and for each doubling of compute."""

    compute: float
    over: Gap

    @property
    def each(self) -> Gap:
        doublings = math.log2(self.compute)
        margin = None if self.over.margin is None else self.over.margin / doublings
        return Gap(difference=self.over.difference / doublings, margin=margin)


def gains(found: Sequence[Group], value: str) -> dict[str, Gain]:
    """By line, at the largest compute that has finished; none without the base."""
    base = next((group.spread(value) for group in found if group.at["line"] == BASE), None)
    everything = [group.spread(value) for group in found]
    out: dict[str, Gain] = {}
    for line in LINES if base is not None else ():
        points = [
            (float(group.at["compute"]), spread)
            for group in found
            if group.at["line"] == line and (spread := group.spread(value)) is not None
        ]
        if points:
            compute, spread = max(points, key=lambda point: point[0])
            over = apart(spread, base, everything)
            assert over is not None
            out[line] = Gain(compute=compute, over=over)
    return out


def conclude(outcomes: Sequence[CellOutcome]) -> Findings:
    found, value = groups(outcomes), measure(outcomes)
    gained = gains(found, value)
    return Findings(
        table=table(found, value),
        figure=partial(figure, found, value),
        sentence=sentence(gained, value) + missing(outcomes),
        beside=beside(gained),
    )


def table(found: Sequence[Group], value: str) -> Table:
    base = next((group.spread(value) for group in found if group.at["line"] == BASE), None)
    everything = [group.spread(value) for group in found]
    rows: list[tuple[str, ...]] = []
    for group in found:
        spread = group.spread(value)
        over = apart(spread, base, everything) if group.at["line"] != BASE else None
        more = NOTHING if over is None else str(over).removesuffix(" points")
        size = f"{group.at['parameters']:,}"
        rows.append(
            (str(group.at["line"]), str(group.at["shape"]), size, f"{group.at['compute']:.2f}", percent(spread), more)
        )
    columns = ("line", "layers x width", "parameters", "compute", f"{WORDS[value]} [%]", "over the base [points]")
    return Table(columns=columns, rows=tuple(rows))


def sentence(gained: Mapping[str, Gain], value: str) -> str:
    if not gained:
        return "The base and a line are needed to say what growing brings; they have not finished."
    ranked = sorted(gained.items(), key=lambda item: -item[1].each.difference)
    parts = ", ".join(f"{line} {gain.each}" for line, gain in ranked)
    return f"For each doubling of compute, up to the last point of its line, {WORDS[value]} changes by: {parts}."


def beside(gained: Mapping[str, Gain]) -> str:
    """The paper's four statements, one by one."""
    said = "D.2: depth brings most, width least, smaller patches help without parameters, and so does all together."
    if set(gained) != set(LINES):
        return f"{said} Not decided here: {', '.join(line for line in LINES if line not in gained)} not finished."
    if any(gain.over.margin is None for gain in gained.values()):
        return f"{said} Not decided here: there is one seed, and no spread to judge by."
    each = {line: gained[line].each for line in LINES}
    single = [line for line in LINES if line != "All"]
    most, least = (max(single, key=lambda line: sign * each[line].difference) for sign in (1, -1))
    deeper = over(each["Depth"], each["Width"])
    verdicts = (
        f"most by {most}{' as there' if most == 'Depth' else ', not Depth'}, "
        f"least by {least}{' as there' if least == 'Width' else ', not Width'} (order of the means)",
        f"depth over width, a doubling: {deeper}, {decided(deeper)}",
        f"smaller patches over the base: {gained['Patch size'].over}, {decided(gained['Patch size'].over)}",
        f"all together over the base: {gained['All'].over}, {decided(gained['All'].over)}",
    )
    return f"{said} Here: {'; '.join(verdicts)}."


def over(one: Gap, other: Gap) -> Gap:
    assert one.margin is not None
    assert other.margin is not None
    return Gap(difference=one.difference - other.difference, margin=math.hypot(one.margin, other.margin))


def decided(found: Gap) -> str:
    return "agrees" if found.above else "disagrees" if found.below else "open within the spread over seeds"


def figure(found: Sequence[Group], value: str) -> "Figure":
    start: Spread | None = next((group.spread(value) for group in found if group.at["line"] == BASE), None)
    lines: list[Line] = []
    for line in LINES:
        points = [] if start is None else [Point(x=1.0, y=start)]
        points += [
            Point(x=float(group.at["compute"]), y=spread)
            for group in found
            if group.at["line"] == line and (spread := group.spread(value)) is not None
        ]
        lines.append(Line(name=line, points=points))
    return plot([Panel(lines=lines, along="relative compute", up=f"{WORDS[value]} [%]", log=True)])


STUDY: Final = Study(
    name="shape",
    title="Depth, width, MLP width and patch size from one base",
    anchor="D.2, Figure 8",
    cells=cells,
    conclude=conclude,
)
