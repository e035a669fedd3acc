"""What a sweep tries: for each recipe the settings to vary, each with its values.

The learning rates of fine-tuning are Table 4's. What Section 4.3 varies in pre-training on the smaller sets (weight
decay, dropout, label smoothing) it names without values: these here are ours, around Table 3's.
"""

from typing import Final

from vitrail.core.errors import ConfigError
from vitrail.recipes.registry import find

Grid = dict[str, tuple[float, ...]]

RATES: Final[Grid] = {"optim.lr": (0.001, 0.003, 0.01, 0.03)}
RATES_IMAGENET: Final[Grid] = {"optim.lr": (0.003, 0.01, 0.03, 0.06)}  # 0.06 for ResNets and hybrids
REGULARISERS: Final[Grid] = {
    "optim.weight_decay": (0.03, 0.1, 0.3),
    "model.dropout": (0.0, 0.1),
    "objective.smoothing": (0.0, 0.1),
}

GRIDS: Final[dict[str, Grid]] = {
    **dict.fromkeys(("finetune-imagenet", "finetune-imagenet-512", "finetune-imagenet-518"), RATES_IMAGENET),
    **dict.fromkeys(("finetune-cifar10", "finetune-cifar100", "finetune-pets", "finetune-flowers"), RATES),
    "finetune-vtab": {"optim.lr": (0.01,)},
    **dict.fromkeys(("vit-b16-imagenet", "vit-b32-imagenet", "vit-l16-imagenet", "vit-l32-imagenet"), REGULARISERS),
    **dict.fromkeys(("vit-b16-imagenet21k", "vit-b32-imagenet21k"), REGULARISERS),
    **dict.fromkeys(("vit-l16-imagenet21k", "vit-l16-imagenet21k-30ep"), REGULARISERS),
    **dict.fromkeys(("vit-l32-imagenet21k", "vit-l32-imagenet21k-30ep"), REGULARISERS),
}


def grid(name: str) -> Grid:
    """What to vary in a recipe: its own grid, or the rates of Table 4 for any other fine-tuning."""
    name = find(name).name
    if name in GRIDS:
        return GRIDS[name]
    if "finetune" in name:
        return RATES
    raise ConfigError(
        f"{name} has no grid; give one, as in --sweep optim.lr=0.001,0.003 (recipes with one: {', '.join(GRIDS)})"
    )
