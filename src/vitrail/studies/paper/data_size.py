"""4.3, Figures 3 and 4: how much data a ViT needs next to a BiT ResNet and a hybrid.

Nested subsets, the same hyper-parameters and the same number of steps for all of them, and early stopping: what counts
is the score of the weights that were best on a part held out. A search over weight decay, dropout and label smoothing
is made of cells next to these; it is chosen by what was held out, too.

At the paper's scale there are two series. Figure 3: pre-training on ImageNet, ImageNet-21k and JFT, then tuning on
ImageNet at 384 px. Figure 4: subsets of JFT, and 5-shot accuracy on ImageNet.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from vitrail.core.paper_tables import JFT_IMAGES
from vitrail.models.family import ModelConfig
from vitrail.models.vit_config import ViTConfig, vit_config
from vitrail.models.zoo import model_config, slug, with_known_fields
from vitrail.recipes import table3
from vitrail.studies.framework.base_runs import (
    at_8_px,
    for_card,
    for_cores,
    given,
    hybrid_of,
    resnet_of,
    vit_of,
    with_dev,
)
from vitrail.studies.framework.definition import Scale, Study
from vitrail.studies.paper.data_size_findings import PLAIN, SEARCHED, TUNED, conclude
from vitrail.studies.paper.scaling import finetuning, with_network
from vitrail.tasks.classification.objective import Classification
from vitrail.train.config import Evaluation, Run
from vitrail.train.grid.plan import Cell

Network = Callable[[ViTConfig], ModelConfig]


@dataclass(frozen=True, kw_only=True, slots=True)
class Regularisers:
    """What the search varies; the first of a list is what the plain cells have."""

    decay: float
    dropout: float = 0.0
    smoothing: float = 0.0

    @property
    def name(self) -> str:
        return f"wd{self.decay:g}-do{self.dropout:g}-ls{self.smoothing:g}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Networks by family, shares of the training split, how often a run is scored, and the search: its network, its
    shares and its settings."""

    networks: Mapping[str, Mapping[str, Network]]
    parts: tuple[float, ...]
    seeds: int
    looks: int
    patience: int
    dev: float
    plain: Regularisers
    tried: tuple[Regularisers, ...]
    searched: tuple[str, ...]
    search_parts: tuple[float, ...]


TINY: Final = Grid(
    networks={
        "ViT": {"ViT 32x2": lambda model: vit_of(model, 32, 2)},
        "slim ViT": {"ViT 16x2": lambda model: vit_of(model, 16, 2)},
        "BiT": {"ResNet 11 x0.125": lambda model: resnet_of(model, (1, 1, 1), 0.125)},
        "hybrid": {"hybrid 32x1": lambda model: hybrid_of(model, (1, 1), 0.0625, 32, 1)},
    },
    parts=(0.1, 0.3, 1.0),
    seeds=2,
    looks=2,
    patience=2,
    dev=0.2,
    plain=Regularisers(decay=0.05),
    tried=(Regularisers(decay=0.3, dropout=0.1, smoothing=0.1),),
    searched=("ViT",),
    search_parts=(0.1,),
)
SMALL: Final = Grid(
    networks={
        # ViT and ResNet of about the same compute.
        "ViT": {"ViT 192x6": lambda model: vit_of(model, 192, 6)},
        "slim ViT": {"ViT 96x6": lambda model: vit_of(model, 96, 6)},
        "BiT": {"ResNet 14 x0.5": lambda model: resnet_of(model, (1, 1, 1, 1), 0.5)},
        "hybrid": {"hybrid 128x5": lambda model: hybrid_of(model, (1, 1, 1), 0.25, 128, 5)},
    },
    parts=(0.03, 0.1, 0.3, 1.0),  # as far apart as Figure 4's
    seeds=3,
    looks=6,
    patience=3,
    dev=0.1,
    plain=Regularisers(decay=0.05),
    tried=(
        Regularisers(decay=0.3),
        Regularisers(decay=0.05, dropout=0.1),
        Regularisers(decay=0.05, smoothing=0.1),
        Regularisers(decay=0.3, dropout=0.1, smoothing=0.1),
    ),
    searched=("ViT",),
    search_parts=(0.1,),
)
# Figure 4: 9M, 30M, 90M and all of JFT-300M.
JFT_PARTS: Final = (9e6 / JFT_IMAGES, 30e6 / JFT_IMAGES, 90e6 / JFT_IMAGES, 1.0)
JFT_STEPS: Final = round(7 * JFT_IMAGES / 4096)
JFT_DEV: Final = 0.001
FIGURE_4: Final[Mapping[str, Callable[[], Run]]] = {
    "ViT-B/32": table3.vit_b32_jft,
    "ViT-b/32": table3.vit_b32_jft,
    "ViT-L/32": table3.vit_l32_jft,
    "ViT-L/16": table3.vit_l16_jft,
    "BiT-R50x1": table3.bit_r50x1_jft,
    "BiT-R152x2": table3.bit_r152x2_jft,
}
# Figure 3, by what was pre-trained on; Table 3's values are what the search there chose. It has no row for H/14 on
# ImageNet-21k, which takes that of L/16 here.
FIGURE_3: Final[Mapping[str, Mapping[str, Callable[[], Run]]]] = {
    "ImageNet": {
        "ViT-B/32": table3.vit_b32_imagenet,
        "ViT-B/16": table3.vit_b16_imagenet,
        "ViT-L/32": table3.vit_l32_imagenet,
        "ViT-L/16": table3.vit_l16_imagenet,
    },
    "I21k": {
        "ViT-B/32": table3.vit_b32_imagenet21k,
        "ViT-B/16": table3.vit_b16_imagenet21k,
        "ViT-L/32": table3.vit_l32_imagenet21k,
        "ViT-L/16": table3.vit_l16_imagenet21k,
        "ViT-H/14": table3.vit_l16_imagenet21k,
    },
    "JFT": {
        "ViT-B/32": table3.vit_b32_jft,
        "ViT-B/16": table3.vit_b16_jft,
        "ViT-L/32": table3.vit_l32_jft,
        "ViT-L/16": table3.vit_l16_jft_14ep,
        "ViT-H/14": table3.vit_h14_jft,
    },
}


def cells(scale: Scale, source: str) -> Sequence[Cell]:
    if scale == "paper":
        return (*subsets_of_jft(source), *three_sets(source))
    grid = TINY if scale == "tiny" else SMALL
    # A plain ViT wants many updates, so the batch is small.
    card = replace(for_card(source, steps=10_000), batch=128)
    base = at_8_px(for_cores(source, steps=60)) if scale == "tiny" else card
    return (*main_cells(base, grid), *search_cells(base, grid))


def main_cells(base: Run, grid: Grid) -> Iterator[Cell]:
    for family, networks in grid.networks.items():
        for name in networks:
            for part in grid.parts:
                for seed in range(grid.seeds):
                    yield cell(base, grid, family, name, part, grid.plain, seed, kind=PLAIN)


def search_cells(base: Run, grid: Grid) -> Iterator[Cell]:
    """The settings next to the plain one, which is in the main cells already."""
    for family in grid.searched:
        for name in grid.networks[family]:
            for part in grid.search_parts:
                for tried in grid.tried:
                    for seed in range(grid.seeds):
                        yield cell(base, grid, family, name, part, tried, seed, kind=SEARCHED)


def cell(
    base: Run, grid: Grid, family: str, name: str, part: float, with_: Regularisers, seed: int, *, kind: str
) -> Cell:
    model = grid.networks[family][name](vit_config(base.model))
    model = with_known_fields(model, dropout=with_.dropout)
    run = with_network(with_dev(base, grid.dev), model)
    run = replace(
        run,
        name=f"data-size {name} {part:g}",
        seed=seed,
        objective=Classification(smoothing=with_.smoothing),
        optim=replace(run.optim, weight_decay=with_.decay),
        data=replace(run.data, part=part, part_seed=seed),
        evaluation=Evaluation(every=-(-run.steps // grid.looks), patience=grid.patience, fewshot=run.data.source),
    )
    at = {"series": kind, "family": family, "network": name, "part": part, "regularisers": with_.name, "seed": seed}
    return Cell(name=f"{slug(name)}-{100 * part:g}pc-{with_.name}-seed{seed}", at=at, run=run)


def subsets_of_jft(source: str) -> Iterator[Cell]:
    """Figure 4: one setting for all sizes, as many steps as the whole set has in 7 epochs, no other regularisation."""
    for name, recipe in FIGURE_4.items():
        for part in JFT_PARTS:
            run = given(recipe(), source)
            model = with_known_fields(model_config(name, classes=table3.JFT_CLASSES), head="tanh")
            run = replace(
                run,
                name=f"data-size {name} {part:.2g}",
                model=model,
                steps=JFT_STEPS,
                epochs=0.0,
                data=replace(run.data, part=part, dev=JFT_DEV, watch="dev", test="none"),
                # Twenty scorings, of which none ends the run: the best one counts.
                evaluation=Evaluation(fewshot="imagenet", patience=20),
            )
            family = "BiT" if name.startswith("BiT") else "slim ViT" if name == "ViT-b/32" else "ViT"
            at = {"series": PLAIN, "family": family, "network": name, "part": part, "regularisers": "", "seed": 0}
            yield Cell(name=f"{slug(name)}-jft-{part * JFT_IMAGES / 1e6:.0f}m", at=at, run=run)


def three_sets(source: str) -> Iterator[Cell]:
    """Figure 3: pre-trained on each of the three sets, then tuned on ImageNet at 384 px."""
    for upstream, recipes in FIGURE_3.items():
        for name, recipe in recipes.items():
            run = recipe()
            if name == "ViT-H/14" and upstream == "I21k":
                model = model_config(name, classes=table3.IMAGENET21K_CLASSES, head="tanh", dropout=0.1)
                run = replace(run, name="vit-h14-imagenet21k", model=model)
            run = given(run, source if upstream == "JFT" else "")
            first = f"{slug(name)}-{upstream.lower()}"
            at = {"family": "ViT", "network": name, "upstream": upstream, "seed": 0}
            yield Cell(name=first, at={**at, "series": "pre-training"}, run=run)
            yield Cell(name=f"{first}-tuned", at={**at, "series": TUNED}, run=finetuning("imagenet", name), after=first)


STUDY: Final = Study(
    name="data-size",
    title="How much data a ViT needs",
    anchor="4.3, Figures 3 and 4",
    cells=cells,
    conclude=conclude,
)
