"""3.2: pre-trained at a low resolution, fine-tuned at higher ones, with positions resized and with ones drawn again.

The patch stays, so the grid grows. "Drawn again" is the start that a network of the higher resolution would have (the
class token keeps its position): what fine-tuning has without any interpolation, since no table of the old grid fits the
new one, and one laid over its corner would tell wrong places.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from vitrail.data.transforms.augmentation import cifar
from vitrail.models.zoo import adapt_config
from vitrail.optim.config import Optim
from vitrail.recipes.digits import finetune_digits
from vitrail.recipes.run_overrides import resized
from vitrail.recipes.table3 import vit_b16_imagenet21k
from vitrail.recipes.table4 import finetune_imagenet
from vitrail.studies.framework.base_runs import for_card, for_cores, given, shortened
from vitrail.studies.framework.definition import Findings, Scale, Study, Table
from vitrail.studies.framework.plots import Line, Panel, Point, plot
from vitrail.studies.framework.results import NOTHING, Gap, Group, Spread, group_at, groups, paired, paired_gap, percent
from vitrail.studies.framework.verdicts import in_words, listed, missing
from vitrail.train.config import AnyRun, Positions, Run, RunRequest, to_stage
from vitrail.train.grid.plan import Cell, CellOutcome

if TYPE_CHECKING:
    from matplotlib.figure import Figure


BEFORE: Final = "pre-training"
WAYS: Final[Mapping[Positions, str]] = {"resized": "positions resized", "drawn": "positions drawn again"}
PAPER: Final = {384: "83.97"}  # Table 5: ViT-B/16 from ImageNet-21k


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Pre-training at the lowest size, and a fine-tuning that is taken to each of the sizes."""

    before: Run
    tuning: RunRequest
    sizes: tuple[int, ...]
    seeds: int


def plan(scale: Scale, source: str) -> Plan:
    """At the paper's scale ViT-B/16 goes from ImageNet-21k at 224 px to ImageNet, at a rate of Table 4's grid; a source
    that is given is what it is fine-tuned on."""
    if scale == "paper":
        return Plan(
            before=vit_b16_imagenet21k(), tuning=given(finetune_imagenet(), source), sizes=(224, 384, 512), seeds=3
        )
    if scale == "tiny":
        before = for_cores(source, steps=250)
        tuning = replace(finetune_digits(), data=before.data)
        return Plan(before=before, tuning=shortened(tuning, 60, looks=1), sizes=(16, 24, 32), seeds=2)
    whole = for_card(source, steps=8000)
    before = at_size(whole, 16)
    tuning = to_stage(RunRequest, whole, model=None, optim=Optim(kind="sgd", lr=0.03, momentum=0.9, clip=1.0))
    return Plan(before=before, tuning=shortened(tuning, 1500), sizes=(16, 24, 32, 48), seeds=3)


def at_size(run: AnyRun, size: int) -> AnyRun:
    """The run at another size. A padded crop has its padding in proportion."""
    flip = run.augmentation.flip
    moved = resized(replace(run, augmentation=replace(cifar(run.augmentation.size, padding=0), flip=flip)), size)
    return replace(moved, augmentation=replace(cifar(size, padding=size // 8), flip=flip))


def tuned(plan: Plan, scale: Scale, size: int) -> RunRequest:
    """The fine-tuning at a size, with the network that it will have."""
    run = at_size(plan.tuning, size) if scale == "small" else resized(plan.tuning, size)
    return replace(run, model=adapt_config(plan.before.model, image_size=size))


def cells(scale: Scale, source: str) -> Sequence[Cell]:
    made = plan(scale, source)
    low = made.before.augmentation.size[0]
    out: list[Cell] = []
    for seed in range(made.seeds):
        before = f"before-{low}px-seed{0 if scale == 'paper' else seed}"
        if scale != "paper" or seed == 0:  # three fine-tunings of one pre-training, as in the paper
            at = {"stage": BEFORE, "from": low, "size": low, "positions": "new", "seed": seed}
            out.append(Cell(name=before, at=at, run=replace(made.before, name="resolution before", seed=seed)))
        for size in made.sizes:
            for way in WAYS if size != low else ("resized",):  # at the old size there is nothing to resize
                run = replace(tuned(made, scale, size), name=f"resolution {size} {way}", positions=way, seed=seed)
                at = {"stage": "fine-tuning", "from": low, "size": size, "positions": way, "seed": seed}
                out.append(Cell(name=f"tuned-{size}px-{way}-seed{seed}", at=at, run=run, after=before))
    return tuple(out)


def conclude(outcomes: Sequence[CellOutcome]) -> Findings:
    found = [group for group in groups(outcomes) if group.at["stage"] != BEFORE]
    return Findings(
        table=table(found),
        figure=partial(figure, found),
        sentence=sentence(found) + missing(outcomes),
        beside=beside(found),
    )


def sizes_in(found: Sequence[Group]) -> list[int]:
    return sorted({int(group.at["size"]) for group in found})


def group_of(found: Sequence[Group], size: int, way: str) -> Group | None:
    """The fine-tunings at a size. At that of the pre-training, positions are neither resized nor drawn."""
    return group_at(found, {"size": size, "positions": "resized" if size == low_in(found) else way})


def at(found: Sequence[Group], size: int, way: str) -> Spread | None:
    group = group_of(found, size, way)
    return None if group is None else group.spread("accuracy")


def low_in(found: Sequence[Group]) -> int:
    """The size of the pre-training; -1 where nothing is there yet."""
    return next((int(group.at["from"]) for group in found), -1)


def table(found: Sequence[Group]) -> Table:
    low, (higher, worth) = low_in(found), compared(found)
    rows = [
        (
            f"{size} px",
            percent(at(found, size, "resized")),
            percent(at(found, size, "drawn")) if size != low else NOTHING,
            str(worth.get(size, NOTHING)),
            str(higher.get(size, NOTHING)),
            PAPER.get(size, NOTHING),
        )
        for size in sizes_in(found)
    ]
    columns = ("fine-tuned at", "positions resized [%]", "drawn again [%]", "resized over drawn")
    return Table(columns=(*columns, "over the low resolution", "paper, Table 5"), rows=tuple(rows))


def compared(found: Sequence[Group]) -> tuple[dict[int, Gap], dict[int, Gap]]:
    """By size above the lowest: what the size brings with resized positions, and what resizing brings. Seed by seed,
    since fine-tunings of a seed start from the same weights."""
    low, above = low_in(found), [size for size in sizes_in(found) if size != low_in(found)]
    lowest = group_of(found, low, "resized")
    higher = {size: differences(group_of(found, size, "resized"), lowest) for size in above}
    worth = {size: differences(group_of(found, size, "resized"), group_of(found, size, "drawn")) for size in above}
    return gaps_of(higher), gaps_of(worth)


def differences(one: Group | None, other: Group | None) -> Spread | None:
    return None if one is None or other is None else paired(one, other, "accuracy")


def gaps_of(found: Mapping[int, Spread | None]) -> dict[int, Gap]:
    """Their deviation is pooled over the sizes."""
    there = {size: each for size, each in found.items() if each is not None}
    return {size: paired_gap(each, tuple(there.values())) for size, each in there.items()}


def sentence(found: Sequence[Group]) -> str:
    higher, worth = compared(found)
    parts: list[str] = []
    if higher:
        parts.append(
            f"fine-tuning above the {low_in(found)} px of pre-training changes test accuracy by "
            f"{listed([f'{each} at {size} px' for size, each in higher.items()])}"
        )
    if worth:
        parts.append(
            "resized positions over ones drawn again: "
            f"{listed([f'{each} at {size} px' for size, each in worth.items()])}"
        )
    if not parts:
        return "No two fine-tunings that can be compared have finished yet."
    text = "; ".join(parts)
    return f"{text[0].upper()}{text[1:]}."


def beside(found: Sequence[Group]) -> str:
    said = "3.2: fine-tuning at a higher resolution is often beneficial, and needs the positions resized."
    higher, worth = compared(found)
    if not higher or not worth:
        return f"{said} Not decided here: cells are missing."
    return (
        f"{said} Here: a higher resolution {verdict(higher, 'helps')}; "
        f"resizing instead of drawing again {verdict(worth, 'helps')}."
    )


def verdict(gaps: Mapping[int, Gap], word: str) -> str:
    """At which sizes it is so, by the spread over seeds."""
    kinds = {
        f"{word}, as there,": [size for size, each in gaps.items() if each.above],
        "harms, unlike there,": [size for size, each in gaps.items() if each.below],
        f"shows {in_words(next(iter(gaps.values())))}": [size for size, each in gaps.items() if each.margin is None],
        "makes no difference beyond the spread over seeds": [
            size for size, each in gaps.items() if each.margin is not None and each.open
        ],
    }
    return " and ".join(
        f"{text} at {listed([f'{size} px' for size in sizes])}" for text, sizes in kinds.items() if sizes
    )


def figure(found: Sequence[Group]) -> "Figure":
    sizes = sizes_in(found)
    lines = [
        Line(
            name=words,
            points=[Point(x=size, y=spread) for size in sizes if (spread := at(found, size, way)) is not None],
        )
        for way, words in WAYS.items()
    ]
    ticks = {float(size): f"{size}" for size in sizes}
    return plot(
        [Panel(lines=lines, along="fine-tuning resolution [px]", up="test accuracy [%]", log=True, ticks=ticks)]
    )


STUDY: Final = Study(
    name="resolution",
    title="Fine-tuning at higher resolutions, with and without resized positions",
    anchor="3.2",
    cells=cells,
    conclude=conclude,
)
