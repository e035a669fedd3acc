"""Segmentation: softmax cross-entropy of every pixel against its class."""

from dataclasses import dataclass
from typing import ClassVar, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.core.errors import ConfigError
from vitrail.data.loader import Batch
from vitrail.data.targets import IGNORED
from vitrail.models.backbone import Backbone
from vitrail.models.family import ModelConfig
from vitrail.objectives.objective import Objective, ObjectiveConfig, ObjectiveContext, ObjectiveOutput


@dataclass(frozen=True, kw_only=True, slots=True)
class Segmentation(ObjectiveConfig):
    """The loss of an image is the mean over its pixels that count; those marked 255 in its mask do not."""

    task: ClassVar[str] = "segmentation"

    smoothing: float = 0.0

    def __post_init__(self) -> None:
        if not 0 <= self.smoothing < 1:
            raise ConfigError(f"objective.smoothing={self.smoothing} must be at least 0 and below 1")

    def macs_per_image(self, model: ModelConfig) -> float:
        return model.macs

    def build(self, network: Backbone, context: ObjectiveContext) -> Objective:
        return SegmentationObjective(network, self, context)


class SegmentationObjective(Objective):
    """Logits per pixel [B, K, H, W] against masks [B, H, W]. An image none of whose pixels count counts for nothing."""

    config: Segmentation

    def __init__(self, network: Backbone, config: Segmentation, context: ObjectiveContext) -> None:
        super().__init__(network, context.preprocessing)
        self.config = config

    def inputs(self, batch: Batch, *, seed: int, step: int) -> tuple[Tensor, ...]:
        """Pixels as bytes [B, 3, H, W], masks [B, H, W], and which images are there [B]."""
        del seed, step
        return batch.pixels, batch.target, batch.valid

    def forward(self, *inputs: Tensor) -> ObjectiveOutput:
        pixels, mask, valid = inputs
        logits = cast(Tensor, self.network(self.normalised(pixels))).float()
        smoothing = self.config.smoothing
        losses = F.cross_entropy(logits, mask.long(), ignore_index=IGNORED, label_smoothing=smoothing, reduction="none")
        seen = mask != IGNORED
        pixels_seen = seen.sum((1, 2)).clamp(min=1)
        right = ((logits.argmax(1) == mask) & seen).sum((1, 2)) / pixels_seen
        counted = valid & seen.flatten(1).any(1)
        total = torch.where(counted, losses.sum((1, 2)) / pixels_seen, 0.0).sum()
        tallies = {"pixel_accuracy": torch.where(counted, right, 0.0).sum()}
        return ObjectiveOutput(total, counted.float().sum(), tallies)
