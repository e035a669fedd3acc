"""MoCo v3 (Chen et al. 2021): contrastive learning, which the paper names as a next step (Section 5): find the image of
a batch that another view shows.

The query (network, projector, predictor) of each view is compared with the keys (teacher) of the other view of every
image in all processes. The patch projection is frozen at its initial values, which keeps training stable.
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from vitrail.data.loader import Batch
from vitrail.data.transforms.augmentation import Augmentation
from vitrail.distributed.process_group import gather_rows
from vitrail.models.backbone import Backbone
from vitrail.models.family import ModelConfig
from vitrail.models.vit_config import ViTConfig, vit_config
from vitrail.objectives.multicrop import split_views
from vitrail.objectives.objective import Objective, ObjectiveConfig, ObjectiveContext, ObjectiveOutput
from vitrail.objectives.patch_ops import ViTObjective
from vitrail.objectives.projection_heads import NormedMLP, Teacher, ValidRows, mlp_macs, momentum_at, to_float32


@dataclass(frozen=True, kw_only=True, slots=True)
class MoCo(ObjectiveConfig):
    """`momentum` is the teacher's initial momentum, which rises to 1. `hidden` and `width` are those of the heads. Crop
    and colours are the run's augmentation, which should be strong for two views of small images."""

    needs_whole_batch: ClassVar[bool] = True

    temperature: float = 0.2
    momentum: float = 0.99
    hidden: int = 4096
    width: int = 256
    frozen_embedding: bool = True

    def __post_init__(self) -> None:
        self.check_numbers("be above 0", lambda value: value > 0, "temperature")
        self.check_numbers("lie in 0 to 1", lambda value: 0 <= value <= 1, "momentum")
        self.check_numbers("be at least 1", lambda value: value >= 1, "hidden", "width")

    def views(self, augmentation: Augmentation) -> tuple[Augmentation, ...]:
        return split_views(augmentation)

    def check_model(self, model: ModelConfig) -> ViTConfig:
        """The model as a ViT config; raises where this objective cannot train it."""
        return vit_config(model, "objective moco")

    def macs_per_image(self, model: ModelConfig) -> float:
        """MACs per image: two views through the student, and through the teacher without gradients."""
        config = replace(self.check_model(model), head="none", classes=0)
        project = mlp_macs(config.features, self.hidden, self.hidden, self.width)
        predict = mlp_macs(self.width, self.hidden, self.width)
        taught = config.macs + project
        return 2 * (taught + predict) + 2 * taught / 3

    def build(self, network: Backbone, context: ObjectiveContext) -> Objective:
        return MoCoObjective(network, self, context)


class MoCoObjective(ViTObjective):
    """The loss of an image is the sum of its two views' InfoNCE, times twice the temperature, as published. The heads'
    batch norms are over all processes, too, so that the number of processes does not affect what is learnt."""

    config: MoCo

    def __init__(self, network: Backbone, config: MoCo, context: ObjectiveContext) -> None:
        super().__init__(network, config, context)
        self.projector = NormedMLP(self.model.features, config.hidden, config.hidden, config.width)
        self.predictor = NormedMLP(config.width, config.hidden, config.width)
        if config.frozen_embedding:
            self.network.embedding.projection.requires_grad_(False)
        self.teacher = Teacher(self.network, self.projector)

    def inputs(self, batch: Batch, *, seed: int, step: int) -> tuple[Tensor, ...]:
        """Two views as bytes [B, 3, H, W], and which images count [B]."""
        first, second = batch.views
        return first, second, batch.valid

    def forward(self, *inputs: Tensor) -> ObjectiveOutput:
        *views, valid = inputs
        images = self.cast(self.normalise(torch.cat(views)))
        rows = ValidRows.from_mask(valid, self.world)
        y = self.network.represent(images).unflatten(0, (2, -1))
        queries = F.normalize(self.predictor(self.projector(y, rows), rows), dim=-1)  # [2, B, width]
        with torch.no_grad():
            y = self.teacher.network.represent(images).unflatten(0, (2, -1))
            own = F.normalize(self.teacher.head(y, rows), dim=-1)
        keys = gather_rows(own.transpose(0, 1), self.world).transpose(0, 1)  # of all processes [2, B', width]
        known = gather_rows(valid, self.world)
        count, temperature = valid.float().sum(), self.config.temperature
        (loss, hit), (other_loss, other_hit) = (
            info_nce(query, key, known, first=self.world.rank * len(valid), temperature=temperature)
            for query, key in zip(queries, keys.flip(0), strict=True)  # each view against the other
        )
        losses, hits = 2 * temperature * (loss + other_loss), (hit + other_hit) / 2
        tallies = {"agreement": torch.where(valid, hits, 0.0).sum(), "spread": feature_spread(keys, known) * count}
        return ObjectiveOutput(torch.where(valid, losses, 0.0).sum().float(), count, tallies)

    def on_start(self) -> None:
        self.teacher.copy_from(self.network, self.projector)

    def after_step(self, step: int) -> None:
        momentum = momentum_at(step, start=self.config.momentum, steps=self.steps)
        self.teacher.follow(self.network, self.projector, momentum)


def info_nce(queries: Tensor, keys: Tensor, known: Tensor, *, first: int, temperature: float) -> tuple[Tensor, Tensor]:
    """-log softmax(q·k/τ) at each query's own key: queries [B, D] and keys [B', D] have unit length, and query i
    belongs to key first + i. Keys that are not `known` [B'] are ignored. Returns per query [B] the loss, and 1 if its
    own key is the most similar."""
    with torch.autocast(queries.device.type, enabled=False):
        logits = queries @ to_float32(keys).T / temperature
    place = torch.arange(first, first + len(queries), device=queries.device)
    own = logits.gather(1, place[:, None])[:, 0]
    # The lowest number, not minus infinity: a query may have no key at all, and its gradient must still be finite.
    others = logits.masked_fill(~known, torch.finfo(logits.dtype).min)
    return others.logsumexp(1) - own, (others.argmax(1) == place).float()


def feature_spread(keys: Tensor, known: Tensor) -> Tensor:
    """The standard deviation of features of unit length over a batch, times the root of their number: 1 if they are
    isotropic, 0 if all are the same. [views, B, D] -> []."""
    there, count = known[:, None], known.sum().clamp(min=1)
    mean = torch.where(there, keys, 0.0).sum(1, keepdim=True) / count
    variance = torch.where(there, (keys - mean).square(), 0.0).sum(1) / count
    return (variance.sqrt().mean() * keys.shape[-1] ** 0.5).float()
