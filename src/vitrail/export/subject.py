"""What is exported: a bundle, the image sizes that one file of it can take, and the networks to hold it against."""

from dataclasses import replace
from pathlib import Path
from typing import Final, TypeAlias

import torch
from torch import Tensor

from vitrail.checkpoint.bundle import Bundle
from vitrail.checkpoint.find import find_weights
from vitrail.checkpoint.weights import bundle_of, network, operate
from vitrail.core.shapes import Pair
from vitrail.export.check import Forward
from vitrail.models.build import Model
from vitrail.models.family import ImageSizes
from vitrail.tasks.registry import TASKS

Weights: TypeAlias = str | Path | Model | Bundle
FURTHER: Final = (2, 1)  # steps that the second size of a check is larger by: not square, so that a swapped axis shows


def taken(weights: Weights, image_size: int | Pair | None = None, *, exact: bool = False) -> Bundle:
    """The bundle of weights however they are given, with positions resized where that is asked for; in float32 where it
    is to be exact, for half precision would round resampled positions."""
    match weights:
        case str() | Path():
            bundle = find_weights(weights)
        case Bundle():
            bundle = weights
        case _:
            bundle = bundle_of(weights)
    kind = torch.float32 if exact else None
    bundle = replace(bundle, tensors={name: tensor.to("cpu", kind) for name, tensor in bundle.tensors.items()})
    return bundle if image_size is None else operate(bundle, image_size=image_size)


def path_of(weights: Weights) -> Path | None:
    """Where they are read from, if from a file or folder: no export may go there."""
    return Path(weights) if isinstance(weights, str | Path) and Path(weights).exists() else None


def count_choices(bundle: Bundle) -> int:
    """The classes that the largest output chooses from; 0 for features, and where the task has no classes or is not
    registered here."""
    task = TASKS.get(bundle.card.task)
    return bundle.config.classes if task is not None and task.has_classes else 0


def references(bundle: Bundle, open_sizes: ImageSizes, *, pixels: bool = False) -> dict[Pair, Forward]:
    """The networks that a file is held against: at its own size, and where sizes are open at a larger, oblong one."""
    own = bundle.config.image
    wanted = [own]
    if open_sizes.step is not None:
        wanted.append((own[0] + FURTHER[0] * open_sizes.step[0], own[1] + FURTHER[1] * open_sizes.step[1]))
    if open_sizes.any:
        wanted.append((own[0] + 1, own[1] + 3))  # an odd one, too
    return {image: reference(bundle, image, pixels=pixels) for image in wanted}


def reference(bundle: Bundle, image: Pair, *, pixels: bool = False) -> Forward:
    """The network itself at one size, in float32 on the CPU; with `pixels` it takes bytes."""
    model = network(operate(bundle, image_size=image)).requires_grad_(False)
    preprocessing = bundle.card.preprocessing

    @torch.inference_mode()
    def forward(images: Tensor) -> Tensor:
        return model(preprocessing.normalise(images) if pixels else images)

    return forward
