"""4.4, Figure 5 and Table 6: accuracy against the compute of pre-training, for ViTs, BiT ResNets and hybrids."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from vitrail.core.paper_tables import AVERAGE_5, TABLE_6, Compute
from vitrail.models.family import ModelConfig
from vitrail.models.vit_config import ViTConfig, vit_config
from vitrail.models.zoo import model_config, slug
from vitrail.recipes import table3, table4
from vitrail.recipes.run_overrides import resized
from vitrail.studies.framework.base_runs import at_8_px, for_card, for_cores, given, hybrid_of, resnet_of, vit_of
from vitrail.studies.framework.definition import Scale, Study
from vitrail.studies.paper.scaling_findings import BEFORE, ITSELF, conclude
from vitrail.train.config import Run, RunRequest
from vitrail.train.data import hold_out_nothing
from vitrail.train.grid.plan import Cell

Network = Callable[[ViTConfig], ModelConfig]

# By family, then by name: what is made of a ViT's image and classes.
TINY: Final[Mapping[str, Mapping[str, Network]]] = {
    "ViT": {
        "ViT 16x2": lambda model: vit_of(model, 16, 2),
        "ViT 32x4": lambda model: vit_of(model, 32, 4),
    },
    "BiT": {
        "ResNet 11 x0.0625": lambda model: resnet_of(model, (1, 1, 1), 0.0625),
        "ResNet 11 x0.125": lambda model: resnet_of(model, (1, 1, 1), 0.125),
    },
    "hybrid": {
        "hybrid 16x1": lambda model: hybrid_of(model, (1, 1), 0.0625, 16, 1),
        "hybrid 32x2": lambda model: hybrid_of(model, (1, 1), 0.0625, 32, 2),
    },
}
SMALL: Final[Mapping[str, Mapping[str, Network]]] = {
    "ViT": {
        "ViT 96x6": lambda model: vit_of(model, 96, 6),
        "ViT 192x6": lambda model: vit_of(model, 192, 6),
    },
    "BiT": {
        "ResNet 14 x0.125": lambda model: resnet_of(model, (1, 1, 1, 1), 0.125),
        "ResNet 26 x0.25": lambda model: resnet_of(model, (2, 2, 2, 2), 0.25),
    },
    "hybrid": {
        "hybrid 96x4": lambda model: hybrid_of(model, (1, 1, 1), 0.25, 96, 4),
        "hybrid 192x6": lambda model: hybrid_of(model, (1, 1, 1), 0.25, 192, 6),
    },
}
TINY_LENGTHS: Final = (50, 100)  # steps; the paper has 7 and 14 epochs
SMALL_LENGTHS: Final = (2_000, 6_000, 20_000)
WIDE: Final = 256  # a ViT of this width wants a lower rate
NARROW, CONVOLUTIONS = 2.0, 4.0  # times that rate: what the narrowest ViTs take at most, and a ResNet
FINETUNINGS: Final[Mapping[str, Callable[[], RunRequest]]] = {
    "imagenet": table4.finetune_imagenet,
    "cifar10": table4.finetune_cifar10,
    "cifar100": table4.finetune_cifar100,
    "pets": table4.finetune_pets,
    "flowers102": table4.finetune_flowers,
}


def cells(scale: Scale, source: str) -> Sequence[Cell]:
    if scale == "paper":
        return tuple(cell for row in TABLE_6 for cell in row_cells(row, source))
    networks, lengths, seeds = (TINY, TINY_LENGTHS, 2) if scale == "tiny" else (SMALL, SMALL_LENGTHS, 3)
    return tuple(
        cell(family, name, make, base_of(scale, source, steps), seed)
        for family, named in networks.items()
        for name, make in named.items()
        for steps in lengths
        for seed in range(seeds)
    )


def base_of(scale: Scale, source: str, steps: int) -> Run:
    """A plain ViT and a hybrid want many updates, so the batch is small; and positions that are there from the first
    step, for the shortest runs end before learned ones have become of use."""
    if scale == "tiny":
        return at_8_px(for_cores(source, steps=steps))
    run = replace(for_card(source, steps=steps), batch=128)
    return replace(run, model=replace(vit_config(run.model), position="sincos2d"))


def cell(family: str, name: str, make: Network, base: Run, seed: int) -> Cell:
    length = f"{base.steps:,} steps"
    return Cell(
        name=f"{slug(name)}-{base.steps}-seed{seed}",
        at={"family": family, "network": name, "length": length, "task": ITSELF, "seed": seed},
        run=replace(with_network(base, make(vit_config(base.model))), name=f"scaling {name}, {length}", seed=seed),
    )


def with_network(run: Run, model: ModelConfig) -> Run:
    """The run with another network. Where the run's own ViT is wide, its rate is that of a wide one: narrower ones and
    ResNets take more, as short runs scored on a dev split say. The paper's rates fall with size, too (Table 3)."""
    own, factor = run.model, 1.0
    if own.tokens and own.features >= WIDE:
        factor = min(own.features / model.features, NARROW) if model.tokens else CONVOLUTIONS
    return replace(run, model=model, optim=replace(run.optim, lr=run.optim.lr * factor))


def row_cells(row: Compute, source: str) -> list[Cell]:
    """A row of Table 6: the pre-training, and a fine-tuning for each of the five accuracies. Each has the rate of its
    recipe and all of train; the paper chose among the four of Table 4 on a dev split first."""
    name = f"{slug(row.network)}-{row.epochs}ep"
    at = {"family": family_of(row.network), "network": row.network, "length": f"{row.epochs} epochs", "seed": 0}
    first = Cell(name=name, at={**at, "task": BEFORE}, run=given(pretraining(row), source))
    later = [
        Cell(name=f"{name}-{task}", at={**at, "task": task}, run=finetuning(task, row.network), after=name)
        for task in AVERAGE_5
    ]
    return [first, *later]


def pretraining(row: Compute) -> Run:
    """The recipe of Table 3. It has none for R200x3, which takes that of R152x2 here."""
    known = {
        "ViT-B/32": table3.vit_b32_jft,
        "ViT-B/16": table3.vit_b16_jft,
        "ViT-L/32": table3.vit_l32_jft,
        "ViT-L/16": table3.vit_l16_jft,
        "ViT-H/14": table3.vit_h14_jft,
        "BiT-R50x1": table3.bit_r50x1_jft,
        "BiT-R50x2": table3.bit_r50x2_jft,
        "BiT-R101x1": table3.bit_r101x1_jft,
        "BiT-R152x1": table3.bit_r152x1_jft,
        "BiT-R152x2": table3.bit_r152x2_jft,
        "BiT-R200x3": table3.bit_r152x2_jft,
        "R50+ViT-B/32": table3.r50_vit_b32_jft,
        "R50+ViT-B/16": table3.r50_vit_b16_jft,
        "R50+ViT-L/32": table3.r50_vit_l32_jft,
        "R50+ViT-L/16": table3.r50_vit_l16_jft,
    }
    run = replace(known[row.network](), epochs=row.epochs)
    if row.network != "BiT-R200x3":
        return run
    return replace(run, name="bit-r200x3-jft", model=model_config(row.network, classes=table3.JFT_CLASSES))


def finetuning(task: str, network: str) -> RunRequest:
    """At 384 px; for a patch of 14 at 378, which is what is left of 384 in whole patches."""
    run = FINETUNINGS[task]()
    run = replace(run, data=hold_out_nothing(replace(run.data, watch="none")))
    return resized(run, 378) if network.endswith("/14") else run


def family_of(network: str) -> str:
    return "BiT" if network.startswith("BiT") else "hybrid" if "+" in network else "ViT"


STUDY: Final = Study(
    name="scaling",
    title="Accuracy against compute",
    anchor="4.4, Figure 5, Table 6",
    cells=cells,
    conclude=conclude,
)
