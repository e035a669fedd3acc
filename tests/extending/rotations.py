"""An objective in one file: by how many quarter turns was an image rotated? (Gidaris et al., 2018)"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.data.loader import Batch
from vitrail.models.backbone import Backbone
from vitrail.models.family import ModelConfig
from vitrail.objectives.objective import (
    Objective,
    ObjectiveConfig,
    ObjectiveContext,
    ObjectiveOutput,
    register_objective,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rotations(ObjectiveConfig):
    turns: int = 4

    def macs_per_image(self, model: ModelConfig) -> float:
        return model.macs + self.turns * model.features

    def build(self, network: Backbone, context: ObjectiveContext) -> Objective:
        return GuessRotation(network, self, context)


class GuessRotation(Objective):
    config: Rotations

    def __init__(self, network: Backbone, config: Rotations, context: ObjectiveContext) -> None:
        super().__init__(network, context.preprocessing)
        self.config = config
        self.guess = nn.Linear(network.num_features, config.turns)

    def inputs(self, batch: Batch, *, seed: int, step: int) -> tuple[Tensor, ...]:
        turn = (batch.sample + seed + step) % self.config.turns
        turned = torch.stack([image.rot90(int(times), (1, 2)) for image, times in zip(batch.pixels, turn, strict=True)])
        return turned, turn, batch.valid

    def forward(self, *inputs: Tensor) -> ObjectiveOutput:
        pixels, turn, valid = inputs
        logits = self.guess(self.network.features(self.normalise(pixels))).float()
        losses = torch.where(valid, F.cross_entropy(logits, turn, reduction="none"), 0.0)
        right = torch.where(valid, (logits.argmax(-1) == turn).float(), 0.0)
        return ObjectiveOutput(losses.sum(), valid.float().sum(), {"right": right.sum()})


register_objective(Rotations)
