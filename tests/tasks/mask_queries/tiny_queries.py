"""Tiny networks with queries, whose answers are sure, and images for them."""

from dataclasses import replace

import torch

from tests.models.tiny import VIT
from vitrail.checkpoint.bundle import Card
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.build import Model, build
from vitrail.models.query_configs import query_config

NAMES = ("cat", "dog", "sky")
THINGS = (True, True, False)


def make_network(task: str, *, size: tuple[int, int] = (16, 24), seed: int = 0, **changes: object) -> Model:
    """EoMT of two blocks for three classes, of which the last is stuff. Classes and masks are scaled up until most
    queries are sure."""
    config = query_config(replace(VIT, image=size, patch=(4, 4)), "eomt", len(NAMES), **{"queries": 12, **changes})
    torch.manual_seed(seed)
    model = build(config).eval().requires_grad_(False)
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.ndim > 1 or "classifier" in name:
            parameter.copy_(torch.randn(parameter.shape) * (3.0 if "classifier" in name else 0.4))
    things = THINGS if task == "panoptic" else None
    model.card = Card(preprocessing=Preprocessing(image=size), labels=NAMES, task=task, things=things)
    return model
