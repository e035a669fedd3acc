"""3.2: pre-trained at a low resolution, fine-tuned at higher ones, with positions resized and with new ones.

The patch stays, so the grid grows. New positions ("drawn") are initialised as in a new network of the higher resolution
(the class token keeps its position): this is fine-tuning without interpolation, since a table of the old grid does not
fit the new one.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Final

from vitrail.core.text import join_words
from vitrail.data.transforms.augmentation import cifar
from vitrail.models.zoo import adapt_config
from vitrail.optim.config import Optim
from vitrail.recipes.digits import finetune_digits
from vitrail.recipes.run_overrides import with_image_size
from vitrail.recipes.table3 import vit_b16_imagenet21k
from vitrail.recipes.table4 import finetune_imagenet
from vitrail.studies import statistics as stats
from vitrail.studies.base_runs import build_cpu_run, build_gpu_run, with_source, with_steps
from vitrail.studies.definition import Findings, ResultTable, Scale, judge_gaps
from vitrail.studies.plots import Panel, SeedLine
from vitrail.studies.statistics import NOTHING, Gap, SeedGroup
from vitrail.train.config import AnyRun, Positions, Run, RunRequest, to_stage
from vitrail.train.grid.plan import Cell, CellOutcome

PRETRAINING: Final = "pre-training"
METHODS: Final[Mapping[Positions, str]] = {"resized": "positions resized", "drawn": "new positions"}
TABLE_5: Final = {384: "83.97"}  # ViT-B/16 from ImageNet-21k


def build_stages(scale: Scale, source: str) -> tuple[Run, RunRequest, tuple[int, ...], int]:
    """A pre-training at the lowest size, a fine-tuning, the sizes it is run at, and the number of seeds. At the paper's
    scale ViT-B/16 goes from ImageNet-21k at 224 px to ImageNet, at a rate of Table 4's grid; a given source is the one
    it is fine-tuned on."""
    if scale == "paper":
        return vit_b16_imagenet21k(), with_source(finetune_imagenet(), source), (224, 384, 512), 3
    if scale == "tiny":
        first = build_cpu_run(source, steps=250)
        return first, with_steps(replace(finetune_digits(), data=first.data), 60, scorings=1), (16, 24, 32), 2
    full = build_gpu_run(source, steps=8000)
    finetuning = to_stage(RunRequest, full, model=None, optim=Optim(kind="sgd", lr=0.03, momentum=0.9, clip=1.0))
    return at_size(full, 16), with_steps(finetuning, 1500), (16, 24, 32, 48), 3


def at_size(run: AnyRun, size: int) -> AnyRun:
    """The run at another size, with padding in proportion for its padded crop."""
    flip = run.augmentation.flip
    unpadded = replace(run, augmentation=replace(cifar(run.augmentation.size, padding=0), flip=flip))
    return replace(with_image_size(unpadded, size), augmentation=replace(cifar(size, padding=size // 8), flip=flip))


def cells(scale: Scale, source: str) -> Iterator[Cell]:
    pretraining, finetuning, sizes, seeds = build_stages(scale, source)
    low = pretraining.augmentation.size[0]
    for seed in range(seeds):
        first = f"before-{low}px-seed{0 if scale == 'paper' else seed}"
        at = {"from": low, "seed": seed}
        if scale != "paper" or seed == 0:  # three fine-tunings of one pre-training, as in the paper
            run = replace(pretraining, name="resolution before", seed=seed)
            yield Cell(name=first, at={**at, "stage": PRETRAINING, "size": low, "positions": "new"}, run=run)
        for size in sizes:
            tuned = at_size(finetuning, size) if scale == "small" else with_image_size(finetuning, size)
            tuned = replace(tuned, model=adapt_config(pretraining.model, image_size=size), seed=seed)
            for method in METHODS if size != low else ("resized",):  # at the old size there is nothing to resize
                run = replace(tuned, name=f"resolution {size} {method}", positions=method)
                place = {**at, "stage": "fine-tuning", "size": size, "positions": method}
                yield Cell(name=f"tuned-{size}px-{method}-seed{seed}", at=place, run=run, after=first)


def analyse(outcomes: Sequence[CellOutcome]) -> Findings:
    groups = [group for group in stats.group_by_seed(outcomes) if group.at["stage"] != PRETRAINING]
    sizes, low = sorted({int(one.at["size"]) for one in groups}), next((int(one.at["from"]) for one in groups), -1)
    above = [size for size in sizes if size != low]
    higher = compare_resized(groups, dict.fromkeys(above, (low, "resized")))
    resizing = compare_resized(groups, {size: (size, "drawn") for size in above})
    texts = {
        f"fine-tuning above the {low} px of pre-training changes test accuracy by": higher,
        "resized positions over new ones:": resizing,
    }
    parts = [
        f"{text} {join_words(f'{gap} at {size} px' for size, gap in gaps.items())}"
        for text, gaps in texts.items()
        if gaps
    ]
    spreads = {
        method: [stats.find_spread(groups, "accuracy", size=size, positions=method) for size in sizes]
        for method in METHODS
    }
    rows = [
        (
            f"{size} px",
            *(stats.format_spread(spreads[method][at]) for method in METHODS),
            str(resizing.get(size, NOTHING)),
            str(higher.get(size, NOTHING)),
            TABLE_5.get(size, NOTHING),
        )
        for at, size in enumerate(sizes)
    ]
    columns = ("fine-tuned at", "positions resized [%]", "new positions [%]", "resized over new")
    lines = [  # both start at the size of pre-training, where positions are neither resized nor new
        SeedLine(
            name=name,
            points=[(size, spreads["resized" if size == low else method][at]) for at, size in enumerate(sizes)],
        )
        for method, name in METHODS.items()
    ]
    ticks = {float(size): f"{size}" for size in sizes}
    return Findings(
        table=ResultTable((*columns, "over the low resolution", "paper, Table 5"), rows),
        panels=[Panel(lines=lines, along="fine-tuning resolution [px]", up="test accuracy [%]", log=True, ticks=ticks)],
        summary=f"{'; '.join(parts)}." if parts else "",
        paper="3.2: fine-tuning at a higher resolution is often beneficial, and needs the positions resized.",
        claims=[
            *judge_gaps((f"over the low resolution at {size} px:", gap) for size, gap in higher.items()),
            *judge_gaps((f"resizing over new positions at {size} px:", gap) for size, gap in resizing.items()),
        ],
    )


def compare_resized(groups: Sequence[SeedGroup], others: Mapping[int, tuple[int, str]]) -> dict[int, Gap]:
    """By size, resized positions against those of another size or method. Seed by seed, since fine-tunings of a seed
    start from the same weights; the deviation is pooled over the sizes."""
    pairs = {
        size: stats.pair_by_seed(
            stats.find_group(groups, size=size, positions="resized"),
            stats.find_group(groups, size=other, positions=method),
            "accuracy",
        )
        for size, (other, method) in others.items()
    }
    known = {size: spread for size, spread in pairs.items() if spread is not None}
    return {size: stats.compare_pairs(spread, tuple(known.values())) for size, spread in known.items()}
