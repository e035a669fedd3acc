"""Objectives of a few thousand weights, the same in every process, and batches that can be dealt out."""

from dataclasses import replace

import torch
from torch import Tensor, nn

from tests.models.tiny import HYBRID, RESNET, VARIANTS, VIT
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.transforms.augmentation import Mix
from vitrail.distributed.process_group import World
from vitrail.models.build import build
from vitrail.models.family import ModelConfig
from vitrail.objectives.objective import ObjectiveContext
from vitrail.tasks.classification.objective import Classification, ClassificationObjective

KINDS: dict[str, ModelConfig] = {
    "vit": VIT,
    "resnet": RESNET,
    "hybrid": HYBRID,
    "sine": replace(VIT, position="sincos2d", pool="mean"),
    "dropout": replace(VIT, dropout=0.3, stochastic_depth=0.3),
    **{name: VARIANTS[name] for name in ("dinov3", "rotary, mixed", "siglip", "eva02", "beit, shared table", "sam")},
}
LATER = tuple(KINDS)[5:]


def wrapped(network: nn.Module, config: ModelConfig) -> ClassificationObjective:
    """Around any network, also one without storage."""
    world = World(device=torch.device("cpu"))
    context = ObjectiveContext(config.classes, Preprocessing(image=config.image), Mix(), 1, world)
    return ClassificationObjective(network, Classification(), context)


def objective(kind: str) -> ClassificationObjective:
    """With weights from a fixed seed; the head is drawn too, for at zero it would let no gradient through."""
    torch.manual_seed(0)
    network = build(KINDS[kind])
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            if name.startswith("head."):
                parameter.normal_(std=0.5)
    return wrapped(network, KINDS[kind])


def inputs(kind: str, count: int = 8, *, seed: int = 1) -> tuple[Tensor, ...]:
    """What the objective takes, for a whole batch; one of its places does not count."""
    generator = torch.Generator().manual_seed(seed)
    classes = KINDS[kind].classes
    pixels = torch.randint(0, 256, (count, 3, *KINDS[kind].image), dtype=torch.uint8, generator=generator)
    label = torch.randint(0, classes, (count,), generator=generator)
    targets = torch.nn.functional.one_hot(label, classes).float()
    return pixels, targets, label, torch.arange(count) != 2


def dealt(batch: tuple[Tensor, ...], rank: int, size: int) -> tuple[Tensor, ...]:
    return tuple(tensor.chunk(size)[rank] for tensor in batch)
