"""Changes to a run that affect more than one field: its source, image size, network, or initial weights.

The grids of sweeps: for each recipe, the settings to vary and their values.

The learning rates of fine-tuning are Table 4's. Section 4.3 names what it varies in pre-training on the smaller sets
(weight decay, dropout, label smoothing), but not the values: those here are ours, around Table 3's.
"""

import csv
import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

from vitrail.checkpoint.bundle import Card
from vitrail.core.config_overrides import apply_settings
from vitrail.core.errors import ConfigError
from vitrail.core.text import Pair, pair
from vitrail.data.datasets.catalogue import VTAB_TASKS
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.transforms.augmentation import Mix
from vitrail.data.transforms.crop import Crop, ResizeCrop, Squash
from vitrail.models.family import FAMILIES, ModelConfig
from vitrail.models.zoo import ZOO, adapt_config, resolve_name
from vitrail.objectives.registry import ObjectiveConfig
from vitrail.recipes.registry import find_recipe
from vitrail.tasks.registry import find_task
from vitrail.train.config import AnyRun, Run, RunRequest, to_stage


def setting_names(settings: Iterable[str]) -> set[str]:
    """The fields that settings change."""
    return {text.partition("=")[0].strip() for text in settings}


def with_changes(run: AnyRun, settings: Iterable[str]) -> AnyRun:
    """A run with "optim.lr=3e-4" and the like applied. "model=ViT-B/32" chooses a network by name, "objective=MAE" an
    objective; "steps=500" alone replaces the epochs, and vice versa."""
    texts = list(settings)
    named = setting_names(texts)
    for one, other in (("steps", "epochs"), ("epochs", "steps")):
        if one in named and other not in named:
            texts.append(f"{other}=0")
    makers = {"model": find_named_model, "objective": find_named_objective, "data.names": parse_class_names}
    return apply_settings(run, texts, makers)


def with_data(run: AnyRun, source: str) -> AnyRun:
    """The run on another source. For a task of VTAB, a crop or flip that would change the answer is removed."""
    run = replace(run, data=replace(run.data, source=source))
    name = re.split("[:@]", source.removeprefix("vtab/"))[0]  # without the folder or the split
    task = VTAB_TASKS.get(name) if source.startswith("vtab/") else None
    if task is None:
        return run
    crop = run.augmentation.crop if task.crop else Squash(size=run.augmentation.size)
    flip = run.augmentation.flip if task.flip else 0.0
    return replace(run, augmentation=replace(run.augmentation, crop=crop, flip=flip))


def with_task(run: AnyRun, name: str) -> AnyRun:
    """The run for another task: the task's objective replaces the recipe's, targets that cannot be mixed are not mixed,
    and whole images are scored if targets have positions in the image."""
    task = find_task(name)
    if run.objective.task == name:
        return run
    run = replace(run, objective=task.objective(), mix=run.mix if task.mixes else Mix())
    if task.targets.moves and run.preprocessing is not None:
        run = replace(run, preprocessing=replace(run.preprocessing, resize=None))
    return run


def find_named_model(old: ModelConfig | None, text: str) -> Any:
    """The named network, adapted to the run: with the same image size and classes and, if both are ViTs, the same head,
    pooling, positions and regularisers. NotImplemented for a text that names no network."""
    if text.strip().lower() in ("none", *(kind.__name__.lower() for kind in FAMILIES.values())):
        return NotImplemented
    config = ZOO[resolve_name(text.strip())]
    return config if old is None else config.configure_like(old)


def parse_class_names(old: tuple[str, ...], text: str) -> tuple[str, ...]:
    """Parses names from a line of CSV, so that a name that contains a comma can be quoted."""
    del old
    return tuple(next(csv.reader([text], skipinitialspace=True), ()))


def find_named_objective(old: ObjectiveConfig, text: str) -> Any:
    """The named objective with its own defaults: fields of the same name have another meaning there."""
    kinds = ObjectiveConfig.list_registered()
    kind = next((kind for kind in kinds if kind.__name__.lower() == text.strip().lower()), type(old))
    return NotImplemented if isinstance(old, kind) else kind()


def with_image_size(run: AnyRun, size: int | Pair, patch: int = 0) -> AnyRun:
    """The run at another image size, and optionally another patch size: network, crop and evaluation together."""
    image = pair(size)
    return replace(
        run,
        model=None if run.model is None else with_sizes(run.model, image, patch),
        augmentation=replace(run.augmentation, crop=resize_crop(run.augmentation.crop, image)),
        preprocessing=None if run.preprocessing is None else resize_preprocessing(run.preprocessing, image),
    )


def with_sizes(config: ModelConfig, image: Pair, patch: int) -> ModelConfig:
    """A network at another image size and, unless it is 0, patch size."""
    return adapt_config(config, image_size=image, **({"patch": patch} if patch else {}))


def resize_crop(crop: Crop, image: Pair) -> Crop:
    """A crop at another size; the image that it is cut from grows in proportion."""
    if not isinstance(crop, ResizeCrop):
        return replace(crop, size=image)
    if isinstance(crop.resize, tuple):
        down, across = (round(crop.resize[at] * image[at] / crop.size[at]) for at in (0, 1))
        return replace(crop, size=image, resize=(down, across))
    return replace(crop, size=image, resize=round(crop.resize * max(image) / max(crop.size)))


def resize_preprocessing(preprocessing: Preprocessing, image: Pair) -> Preprocessing:
    return Card(preprocessing=preprocessing).resize(image).preprocessing


def start_from(run: RunRequest, weights: str, config: ModelConfig, preprocessing: Preprocessing, patch: int = 0) -> Run:
    """A fine-tuning with the network of its weights, at the run's image size. Preprocessing is that of the weights,
    except that resizing antialiases like the training crops: a network is scored as it was tuned. `patch` sets another
    patch size."""
    image = run.augmentation.size
    interpolation = "bilinear" if preprocessing.interpolation == "area" else preprocessing.interpolation
    theirs = replace(resize_preprocessing(preprocessing, image), antialias=True, interpolation=interpolation)
    model = with_sizes(config, image, patch)
    return to_stage(Run, run, weights=weights, model=model, preprocessing=run.preprocessing or theirs)


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


def find_sweep_grid(name: str) -> Grid:
    """The settings to vary in a recipe: its own grid, or the rates of Table 4 for any other fine-tuning."""
    name = find_recipe(name).name
    if name not in GRIDS and "finetune" not in name:
        known = ", ".join(GRIDS)
        raise ConfigError(f"{name} has no grid; give one: --sweep optim.lr=0.001,0.003 (recipes with one: {known})")
    return GRIDS.get(name, RATES)
