"""A few steps of self-supervision on digits, and how many directions the features have afterwards."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vitrail.data.datasets import builtin_sets as digits
from vitrail.data.loader import BatchStream, train_batches
from vitrail.data.preprocessing import Preprocessing
from vitrail.data.transforms.augmentation import cifar
from vitrail.models.build import build
from vitrail.models.vit import ViT
from vitrail.models.vit_config import ViTConfig
from vitrail.objectives.objective import Objective, ObjectiveOutput

AUGMENTATION = replace(cifar(8, padding=1), flip=0.0)
WARMUP = 10


def digits_network() -> ViT:
    torch.manual_seed(0)
    model = build(
        ViTConfig(
            width=32,
            depth=2,
            mlp_width=64,
            heads=2,
            image=(8, 8),
            patch=(2, 2),
            head="none",
            classes=0,
            pool="mean",
        )
    )
    assert isinstance(model, ViT)
    return model.train()


def digits_preprocessing() -> Preprocessing:
    return Preprocessing(image=(8, 8), mean=(0.3, 0.3, 0.3), std=(0.38, 0.38, 0.38))


def learnt_rows(objective: Objective, *, steps: int, rate: float, same: bool = False) -> Tensor:
    """Loss and tallies of each step, as means over samples; with `same` all steps see the first batch."""
    objective.on_start()
    weights = [parameter for parameter in objective.parameters() if parameter.requires_grad]
    optimiser = torch.optim.AdamW(weights, lr=rate, weight_decay=0.05)
    rows: list[list[float]] = []
    source = digits.read_digits()["train"]
    batches = list(
        train_batches(source, objective.views(AUGMENTATION), BatchStream(batch=32, stop=1 if same else steps))
    )
    for step in range(steps):
        given = batches[0 if same else step]
        outcome: ObjectiveOutput = objective(*objective.inputs(given, seed=0, step=step))
        (outcome.total / outcome.count).backward()
        for group in optimiser.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / WARMUP)
        optimiser.step()
        optimiser.zero_grad()
        objective.after_step(step)
        sums = (outcome.total.detach(), *outcome.tallies.values())
        rows.append([float(value / outcome.count) for value in sums])
    return torch.tensor(rows)


def feature_rank(objective: Objective) -> float:
    """The exponential of the entropy of the features' normalised singular values."""
    given: Any = next(
        iter(train_batches(digits.read_digits()["train"], AUGMENTATION, BatchStream(batch=128, seed=1, stop=1)))
    )
    network = objective.eval_network
    training = network.training
    with torch.no_grad():
        features: Tensor = network.eval()(objective.normalise(given.pixels))
    network.train(training)
    shares = torch.linalg.svdvals(features - features.mean(0))
    shares = shares / shares.sum()
    return float((-(shares * shares.clamp(min=1e-12).log()).sum()).exp())
