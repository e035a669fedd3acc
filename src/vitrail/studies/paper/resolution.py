"""3.2: pre-trained at a low resolution, fine-tuned at higher ones, with positions resized and with new ones.

The patch stays, so the grid grows. New positions ("drawn") are the start that a network of the higher resolution would
have (the class token keeps its position): what fine-tuning has without any interpolation, since no table of the old
grid fits the new one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from vitrail.core.text import join_words
from vitrail.data.transforms.augmentation import cifar
from vitrail.models.zoo import adapt_config
from vitrail.optim.config import Optim
from vitrail.recipes.digits import finetune_digits
from vitrail.recipes.run_overrides import with_image_size
from vitrail.recipes.table3 import vit_b16_imagenet21k
from vitrail.recipes.table4 import finetune_imagenet
from vitrail.studies.base_runs import build_cpu_run, build_gpu_run, with_source, with_steps
from vitrail.studies.definition import Findings, ResultTable, Scale, judge_gap
from vitrail.studies.plots import Panel, SeedLine, plot_lines
from vitrail.studies.statistics import (
    NOTHING,
    Gap,
    SeedGroup,
    compare_pairs,
    find_group,
    find_spread,
    format_percent,
    group_by_seed,
    pair_by_seed,
)
from vitrail.train.config import AnyRun, Positions, Run, RunRequest, to_stage
from vitrail.train.grid.plan import Cell, CellOutcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure


PRETRAINING: Final = "pre-training"
METHODS: Final[Mapping[Positions, str]] = {"resized": "positions resized", "drawn": "new positions"}
TABLE_5: Final = {384: "83.97"}  # ViT-B/16 from ImageNet-21k


@dataclass(frozen=True, kw_only=True, slots=True)
class ResolutionStages:
    """A pre-training at the lowest size, and a fine-tuning that is run at each of the sizes."""

    pretraining: Run
    finetuning: RunRequest
    sizes: tuple[int, ...]
    seeds: int


def build_stages(scale: Scale, source: str) -> ResolutionStages:
    """At the paper's scale ViT-B/16 goes from ImageNet-21k at 224 px to ImageNet, at a rate of Table 4's grid; a given
    source is the one it is fine-tuned on."""
    if scale == "paper":
        finetuning = with_source(finetune_imagenet(), source)
        return ResolutionStages(
            pretraining=vit_b16_imagenet21k(), finetuning=finetuning, sizes=(224, 384, 512), seeds=3
        )
    if scale == "tiny":
        first = build_cpu_run(source, steps=250)
        finetuning = with_steps(replace(finetune_digits(), data=first.data), 60, scorings=1)
        return ResolutionStages(pretraining=first, finetuning=finetuning, sizes=(16, 24, 32), seeds=2)
    full = build_gpu_run(source, steps=8000)
    finetuning = to_stage(RunRequest, full, model=None, optim=Optim(kind="sgd", lr=0.03, momentum=0.9, clip=1.0))
    sizes = (16, 24, 32, 48)
    return ResolutionStages(
        pretraining=at_size(full, 16), finetuning=with_steps(finetuning, 1500), sizes=sizes, seeds=3
    )


def at_size(run: AnyRun, size: int) -> AnyRun:
    """The run at another size, with padding in proportion for its padded crop."""
    flip = run.augmentation.flip
    moved = with_image_size(
        replace(run, augmentation=replace(cifar(run.augmentation.size, padding=0), flip=flip)), size
    )
    return replace(moved, augmentation=replace(cifar(size, padding=size // 8), flip=flip))


def cells(scale: Scale, source: str) -> Sequence[Cell]:
    return tuple(iter_cells(scale, build_stages(scale, source)))


def iter_cells(scale: Scale, stages: ResolutionStages) -> Iterator[Cell]:
    low = stages.pretraining.augmentation.size[0]
    for seed in range(stages.seeds):
        first = f"before-{low}px-seed{0 if scale == 'paper' else seed}"
        at = {"from": low, "seed": seed}
        if scale != "paper" or seed == 0:  # three fine-tunings of one pre-training, as in the paper
            run = replace(stages.pretraining, name="resolution before", seed=seed)
            yield Cell(name=first, at={**at, "stage": PRETRAINING, "size": low, "positions": "new"}, run=run)
        for size in stages.sizes:
            tuned = at_size(stages.finetuning, size) if scale == "small" else with_image_size(stages.finetuning, size)
            tuned = replace(tuned, model=adapt_config(stages.pretraining.model, image_size=size))
            for method in METHODS if size != low else ("resized",):  # at the old size there is nothing to resize
                yield Cell(
                    name=f"tuned-{size}px-{method}-seed{seed}",
                    at={**at, "stage": "fine-tuning", "size": size, "positions": method},
                    run=replace(tuned, name=f"resolution {size} {method}", positions=method, seed=seed),
                    after=first,
                )


def analyse(outcomes: Sequence[CellOutcome]) -> Findings:
    groups = [group for group in group_by_seed(outcomes) if group.at["stage"] != PRETRAINING]
    sizes, low = sorted({int(one.at["size"]) for one in groups}), next((int(one.at["from"]) for one in groups), -1)
    higher = compare_by_size(groups, sizes, low, against_low=True)
    resizing = compare_by_size(groups, sizes, low, against_low=False)
    parts = [
        f"{text} {join_words(f'{gap} at {size} px' for size, gap in gaps.items())}"
        for text, gaps in (
            (f"fine-tuning above the {low} px of pre-training changes test accuracy by", higher),
            ("resized positions over new ones:", resizing),
        )
        if gaps
    ]
    return Findings(
        table=build_table(groups, sizes, higher, resizing),
        figure=partial(draw_figure, groups, sizes, low),
        summary=f"{'; '.join(parts)}." if parts else "",
        paper="3.2: fine-tuning at a higher resolution is often beneficial, and needs the positions resized.",
        claims=[
            claim
            for text, gaps in (("over the low resolution", higher), ("resizing over new positions", resizing))
            for size, gap in gaps.items()
            for claim in judge_gap(f"{text} at {size} px:", gap)
        ],
    )


def compare_by_size(
    groups: Sequence[SeedGroup], sizes: Sequence[int], low: int, *, against_low: bool
) -> dict[int, Gap]:
    """By size above the lowest: resized positions against the low resolution, or against new positions. Seed by seed,
    since fine-tunings of a seed start from the same weights; the deviation is pooled over the sizes."""
    pairs = {
        size: spread
        for size in sizes
        if size != low
        and (
            spread := pair_by_seed(
                find_group(groups, size=size, positions="resized"),
                find_group(groups, size=low, positions="resized")
                if against_low
                else find_group(groups, size=size, positions="drawn"),
                "accuracy",
            )
        )
        is not None
    }
    return {size: compare_pairs(spread, tuple(pairs.values())) for size, spread in pairs.items()}


def build_table(
    groups: Sequence[SeedGroup], sizes: Sequence[int], higher: Mapping[int, Gap], resizing: Mapping[int, Gap]
) -> ResultTable:
    rows = [
        (
            f"{size} px",
            *(format_percent(find_spread(groups, "accuracy", size=size, positions=method)) for method in METHODS),
            str(resizing.get(size, NOTHING)),
            str(higher.get(size, NOTHING)),
            TABLE_5.get(size, NOTHING),
        )
        for size in sizes
    ]
    columns = ("fine-tuned at", "positions resized [%]", "new positions [%]", "resized over new")
    return ResultTable(columns=(*columns, "over the low resolution", "paper, Table 5"), rows=tuple(rows))


def draw_figure(groups: Sequence[SeedGroup], sizes: Sequence[int], low: int) -> "Figure":
    """Both lines start at the pre-training's size, where positions are neither resized nor new."""
    lines = [
        SeedLine(
            name=name,
            points=[
                (size, find_spread(groups, "accuracy", size=size, positions="resized" if size == low else method))
                for size in sizes
            ],
        )
        for method, name in METHODS.items()
    ]
    ticks = {float(size): f"{size}" for size in sizes}
    return plot_lines(
        [Panel(lines=lines, along="fine-tuning resolution [px]", up="test accuracy [%]", log=True, ticks=ticks)]
    )
