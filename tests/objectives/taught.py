"""Objectives with a teacher, of a few thousand weights and the same in every process, and batches to deal out."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitrail.data.loader import Batch
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.transforms.augmentation import Mix
from vitrail.distributed.process_group import World
from vitrail.models.build import build
from vitrail.models.vit import ViT
from vitrail.models.vit_config import ViTConfig
from vitrail.objectives.dino import DINO, DINOObjective
from vitrail.objectives.moco import MoCo, MoCoObjective
from vitrail.objectives.objective import ObjectiveContext

ALONE = World(device=torch.device("cpu"))
# Neither the image nor the grid is square, so that a swapped axis shows.
MODEL = ViTConfig(width=16, depth=2, mlp_width=24, heads=2, image=(8, 12), patch=(2, 2), head="none", classes=0)
MOCO = MoCo(hidden=20, width=12)
DINO_ = DINO(outputs=12, hidden=20, bottleneck=8, local_views=3)
STEPS = 100


def network(**changes: Any) -> ViT:
    """One in which nothing is zero."""
    torch.manual_seed(0)
    model = build(replace(MODEL, **changes)).train()
    assert isinstance(model, ViT)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def contrast(world: World = ALONE, config: MoCo = MOCO, **changes: Any) -> MoCoObjective:
    return apart(MoCoObjective(network(**changes), config, ObjectiveContext(0, preprocessing(), Mix(), STEPS, world)))


def distil(world: World = ALONE, config: DINO = DINO_, **changes: Any) -> DINOObjective:
    objective = apart(
        DINOObjective(network(**changes), config, ObjectiveContext(0, preprocessing(), Mix(), STEPS, world))
    )
    objective.centre.copy_(torch.linspace(-0.3, 0.2, config.outputs))
    return objective


def preprocessing() -> Preprocessing:
    return Preprocessing(image=MODEL.image)


def apart(objective: Any) -> Any:
    """With a teacher that has lost touch a little: else nobody could tell it from the learner."""
    objective.on_start()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in objective.teacher.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return objective


def batch(count: int = 8, *, small: int = 0, seed: int = 1, absent: tuple[int, ...] = (2,)) -> Batch:
    """Two views and `small` smaller ones of so many images, of which some are absent."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [(8, 12)] * 2 + [(4, 6)] * small
    views = [torch.randint(0, 256, (count, 3, *size), dtype=torch.uint8, generator=generator) for size in sizes]
    nought = torch.zeros(count, dtype=torch.int64)
    valid = torch.tensor([place not in absent for place in range(count)])
    return Batch(step=0, views=tuple(views), targets=(nought,), sample=nought, epoch=nought, valid=valid)


def dealt(inputs: tuple[Tensor, ...], world: World) -> tuple[Tensor, ...]:
    """This process's part."""
    return tuple(tensor.chunk(world.size)[world.rank] for tensor in inputs)


def gradients(objective: Any) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in objective.named_parameters() if p.grad is not None}


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest difference, in units of the largest value."""
    assert list(found) == list(expected)
    scale = max(float(tensor.abs().max()) for tensor in expected.values())
    return max(float((found[name] - expected[name]).abs().max()) for name in expected) / scale
