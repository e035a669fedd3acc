"""The objective of networks with queries: Mask2Former's loss on the output of every query block, with EoMT's annealing.

The three configs differ in their targets. The loss of a step is normalised over the whole batch: mask and dice losses
by the number of segments, the class loss by the weights of all queries. In an image without segments every query learns
"no object"; an unreadable image has no loss. Crowds are not matched, so queries on them learn "no object"; ignored
pixels are outside all masks.
"""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Protocol, cast

import torch
from torch import Tensor

from vitrail.core.errors import ConfigError
from vitrail.data.loader import Batch
from vitrail.models.backbone import Backbone
from vitrail.models.family import ModelConfig
from vitrail.models.query_configs import QueryConfig
from vitrail.models.query_output import QueryOutput
from vitrail.objectives.objective import Objective, ObjectiveConfig, ObjectiveContext, ObjectiveOutput
from vitrail.objectives.patch_ops import draw_bits
from vitrail.tasks.mask_queries.annealing import count_masked_blocks, draw_masked, masking_chance
from vitrail.tasks.mask_queries.loss import (
    LearntSegments,
    LossSums,
    LossWeights,
    Normalisers,
    compute_costs,
    count_normalisers,
    sum_losses,
)
from vitrail.tasks.mask_queries.matching import match
from vitrail.tasks.mask_queries.points import PointCounts, count_points, draw_loss_points, draw_points, split_keys
from vitrail.tasks.mask_queries.semantic_segments import list_class_segments


class QueryNetwork(Protocol):
    """What the objective needs from a network beyond the common interface."""

    def forward_layers(self, images: Tensor, masked: Tensor | None = None) -> list[QueryOutput]: ...
    def set_masked_blocks(self, count: int) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class MaskQueries(ObjectiveConfig):
    """Weights of the class, mask and dice terms, in matching as well as in the loss; `no_object` is the weight of an
    unmatched query in the class loss.

    Masks are compared at `points` points, or at as many as a predicted mask has pixels, if that is fewer. A share of
    `importance` is chosen among `oversample` times as many candidates, where the network is least certain. Without
    `annealing` all query blocks use masked attention to the end of training and in inference.
    """

    class_weight: float = 2.0
    mask_weight: float = 5.0
    dice_weight: float = 5.0
    no_object: float = 0.1
    points: int = 12544
    oversample: float = 3.0
    importance: float = 0.75
    annealing: bool = True

    def __post_init__(self) -> None:
        self.check_numbers("not be below 0", lambda value: value >= 0, "class_weight", "mask_weight", "dice_weight")
        self.check_numbers("be above 0", lambda value: value > 0, "no_object")
        self.check_numbers("be at least 1", lambda value: value >= 1, "points", "oversample")
        self.check_numbers("lie in 0 to 1", lambda value: 0 <= value <= 1, "importance")

    @property
    def weights(self) -> LossWeights:
        return LossWeights(self.class_weight, self.mask_weight, self.dice_weight, self.no_object)

    def count_points(self, masks: Tensor) -> PointCounts:
        """The number of points of each kind, for predicted masks [B, Q, h, w]."""
        most = masks.shape[2] * masks.shape[3]
        return count_points(min(self.points, most), self.oversample, self.importance)

    def check_model(self, model: ModelConfig) -> ModelConfig:
        """Returns the model; ConfigError if it has no queries."""
        if not getattr(model, "has_queries", False):
            name = type(self).__name__
            raise ConfigError(f"objective {name} trains queries, but {model.title} has none; use family eomt or pmt")
        return model

    def macs_per_image(self, model: ModelConfig) -> float:
        """The cost of a forward pass in training, which predicts classes and masks before every query block, because
        each of these predictions has a loss. That is the cost of inference if every query block masks. `model.macs` is
        that of inference as configured: a single prediction once masked attention is annealed away."""
        if not isinstance(model, QueryConfig):
            return model.macs
        return replace(model, masked_blocks=model.query_blocks).macs

    def build(self, network: Backbone, context: ObjectiveContext) -> Objective:
        return MaskQueriesObjective(network, self, context)

    @abstractmethod
    def list_segments(self, batch: Batch, classes: int) -> tuple[Tensor, Tensor]:
        """The ground-truth segments: planes [B, N / 8, H, W] and classes [B, N], -1 where there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SemanticQueries(MaskQueries):
    """Semantic segmentation: each class in an image is one segment."""

    task: ClassVar[str] = "segmentation"

    def list_segments(self, batch: Batch, classes: int) -> tuple[Tensor, Tensor]:
        return list_class_segments(batch.target, classes)


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceQueries(MaskQueries):
    """Instance segmentation: each object is one segment."""

    task: ClassVar[str] = "instances"

    def list_segments(self, batch: Batch, classes: int) -> tuple[Tensor, Tensor]:
        return list_own_segments(batch)


@dataclass(frozen=True, kw_only=True, slots=True)
class PanopticQueries(MaskQueries):
    """Panoptic segmentation: each object is one segment, and so is each stuff class in an image."""

    task: ClassVar[str] = "panoptic"

    def list_segments(self, batch: Batch, classes: int) -> tuple[Tensor, Tensor]:
        return list_own_segments(batch)


def list_own_segments(batch: Batch) -> tuple[Tensor, Tensor]:
    """The segments of the batch, except crowds."""
    planes, classes, crowd = batch.segments
    return planes, torch.where(crowd, -1, classes)


class MaskQueriesObjective(Objective):
    """Sums the losses of the outputs before each query block and after the last. Each output is matched separately."""

    config: MaskQueries

    def __init__(self, network: Backbone, config: MaskQueries, context: ObjectiveContext) -> None:
        super().__init__(network, context.preprocessing)
        model: Any = config.check_model(network.config)
        self.config = config
        self.classes, self.steps = context.classes, context.steps
        self.queries: int = model.queries
        self.blocks: int = model.query_blocks
        self.masked_blocks = -1  # the network's current setting; -1: not set yet

    @property
    def query_network(self) -> QueryNetwork:
        return cast(QueryNetwork, self.network)

    def inputs(self, batch: Batch, *, seed: int, step: int) -> tuple[Tensor, ...]:
        """Pixels as bytes [B, 3, H, W]; planes [B, N / 8, H, W] and classes [B, N] of the segments, none for an invalid
        image; which images are valid [B]; which queries are masked in which block [B, L, Q]; point keys [B]."""
        self.set_progress(step)
        planes, classes = self.config.list_segments(batch, self.classes)
        classes = torch.where(batch.valid[:, None], classes, -1)
        blocks = range(self.blocks)
        chances = [masking_chance(block, self.blocks, step, self.steps) for block in blocks]
        count, (epoch, sample) = self.blocks * self.queries, (batch.epoch, batch.sample)
        bits = draw_bits("mask queries", 1 + count, seed=seed, step=step, epoch=epoch, sample=sample)
        chances = chances if self.config.annealing else [1.0] * self.blocks
        masked = draw_masked(bits[:, 1:].unflatten(1, (self.blocks, self.queries)), chances)
        return batch.pixels, planes, classes, batch.valid, masked, bits[:, 0]

    def normalisers(self, inputs: tuple[Tensor, ...]) -> Tensor:
        _, planes, classes, valid, *_ = inputs
        return count_normalisers(LearntSegments(planes, classes, valid), self.queries, self.config.no_object)

    def forward(self, *inputs: Tensor) -> ObjectiveOutput:
        pixels, planes, classes, valid, masked, keys, sums = inputs
        outputs = self.query_network.forward_layers(self.normalise(pixels), masked)
        with torch.autocast(pixels.device.type, enabled=False):
            segments = LearntSegments(planes, classes, valid)
            queries, parts = self.compare(outputs, segments, keys)
            step = Normalisers(*sums[0].unbind())
            losses = [self.combine(part, step) for part in parts]
            last, size = losses[-1], step.images
            # The parts of a step must add up to its loss; the factor makes them like sums over samples.
            total = torch.stack([part.sum() for part in losses]).sum() * size
        names = ("class_loss", "mask_loss", "dice_loss")
        tallies = {name: (value * size).detach() for name, value in zip(names, last, strict=True)}
        tallies["matched"] = (queries >= 0).sum().float()
        return ObjectiveOutput(total, valid.float().sum(), tallies)

    def compare(
        self, outputs: list[QueryOutput], segments: LearntSegments, keys: Tensor
    ) -> tuple[Tensor, list[LossSums]]:
        """Matches every output. Returns the last output's matched queries [B, N] and the losses of all outputs."""
        weights, places = self.config.weights, segments.classes.shape[1]
        counts = self.config.count_points(outputs[0].masks)
        seeds = split_keys(keys, 2 * len(outputs)).unbind(1)
        costs: list[Tensor] = []
        for output, seed in zip(outputs, seeds[: len(outputs)], strict=True):
            costs.append(compute_costs(output, segments, draw_points(seed, counts.matching), weights))
        present = (segments.classes >= 0).repeat(len(outputs), 1)
        queries = match(torch.cat(costs), present).chunk(len(outputs))  # one call, as slow as its slowest problem
        parts: list[LossSums] = []
        for output, seed, found in zip(outputs, seeds[len(outputs) :], queries, strict=True):
            points = draw_loss_points(seed, places, counts)
            parts.append(sum_losses(output, segments, found, points, weights))
        return queries[-1], parts

    def combine(self, sums: LossSums, step: Normalisers) -> Tensor:
        """The weighted class, mask and dice losses of one output [3], normalised over the step."""
        config, segments = self.config, step.segments.clamp(min=1)
        losses = (
            config.class_weight * sums.classes.sum() / step.weights.clamp(min=config.no_object),
            config.mask_weight * sums.mask.sum() / segments,
            config.dice_weight * sums.dice.sum() / segments,
        )
        return torch.stack(losses)

    def after_step(self, step: int) -> None:
        self.set_progress(step + 1)

    def set_progress(self, done: int) -> None:
        """Sets how many of the network's query blocks use masked attention in inference."""
        count = count_masked_blocks(self.blocks, done, self.steps) if self.config.annealing else self.blocks
        if count != self.masked_blocks:
            self.query_network.set_masked_blocks(count)
            self.masked_blocks = count
