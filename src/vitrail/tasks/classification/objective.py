"""Classification: softmax or sigmoid cross-entropy against labels, several labels, or mixed targets."""

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias, cast, get_args

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.core.errors import ConfigError, unknown_name
from vitrail.data.dataset import Labels
from vitrail.data.loader import Batch
from vitrail.data.transforms.augmentation import one_hot
from vitrail.models.backbone import Backbone
from vitrail.models.family import ModelConfig
from vitrail.objectives.objective import Objective, ObjectiveConfig, ObjectiveContext, ObjectiveOutput

Loss: TypeAlias = Literal["softmax", "sigmoid"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Classification(ObjectiveConfig):
    """The loss of a classifier. Sigmoid is summed over classes and averaged over images, as for ImageNet-21k.
    `head_bias` initialises the last layer's bias; ImageNet-21k uses -10, so that a fresh head rejects every class."""

    task: ClassVar[str] = "classification"

    loss: Loss = "softmax"
    smoothing: float = 0.0
    head_bias: float = 0.0

    def __post_init__(self) -> None:
        if self.loss not in get_args(Loss):
            raise unknown_name("objective.loss", str(self.loss), get_args(Loss))
        self.check_numbers("be at least 0 and below 1", lambda value: 0 <= value < 1, "smoothing")

    def is_multi_label(self, labels: Labels) -> bool:
        """Whether each class is decided separately: samples may have several labels, and the loss supports them."""
        return self.loss == "sigmoid" and labels.multi_label

    def prepare_head(self, network: Backbone) -> None:
        """Initialises the bias of a fresh head's last layer."""
        head = getattr(network, "head", None)
        bias = getattr(getattr(head, "classifier", head), "bias", None)
        if self.head_bias and not isinstance(bias, nn.Parameter):
            raise ConfigError(f"objective.head_bias={self.head_bias}: the network has no head with a bias")
        if self.head_bias and bias is not None:
            nn.init.constant_(bias, self.head_bias)

    def macs_per_image(self, model: ModelConfig) -> float:
        """The multiply-accumulates of one image, forward and backward."""
        return model.macs

    def build(self, network: Backbone, context: ObjectiveContext) -> Objective:
        if network.config.has_patch_head:
            raise ConfigError("classification learns one answer per image, not per pixel; use model.head=linear")
        return ClassificationObjective(network, self, context)


class ClassificationObjective(Objective):
    """Compares the network's logits with targets [B, K]. Places without an image are left out."""

    config: Classification

    def __init__(self, network: Backbone, config: Classification, context: ObjectiveContext) -> None:
        super().__init__(network, context.preprocessing)
        self.config, self.classes, self.mix = config, context.classes, context.mix

    def inputs(self, batch: Batch, *, seed: int, step: int) -> tuple[Tensor, ...]:
        """Returns pixels as bytes [B, 3, H, W], targets [B, K], classes to score against [B], and which samples count
        [B]."""
        targets = one_hot(batch.target, self.classes, self.config.smoothing)
        label = batch.target if batch.target.ndim == 1 else batch.target[:, 0]
        counted = batch.valid & (label >= 0)
        if batch.target.ndim == 2 and self.config.loss == "sigmoid":
            counted = batch.valid  # with several labels allowed, having none is valid
        pixels, targets = self.mix(batch.pixels, targets, seed=seed, step=step, valid=batch.valid)
        return pixels, targets, targets.argmax(-1), counted  # a mixed image is scored as its main class

    def forward(self, *inputs: Tensor) -> ObjectiveOutput:
        pixels, targets, label, counted = inputs
        logits = cast(Tensor, self.network(self.normalise(pixels))).float()
        if self.config.loss == "sigmoid":
            losses = F.binary_cross_entropy_with_logits(logits, targets, reduction="none").sum(-1)
        else:
            losses = -(targets * logits.log_softmax(-1)).sum(-1)
        keep = counted.float()
        right = (logits.argmax(-1) == label).float() * keep
        # A row that does not count may contain anything, even NaN, so it is replaced, not multiplied by zero.
        return ObjectiveOutput(torch.where(counted, losses, 0.0).sum(), keep.sum(), {"accuracy": right.sum()})
