"""A family in one file: a ViT whose residual branches are each scaled by a learned vector (LayerScale)."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from vitrail.models.attention import Places
from vitrail.models.backbone import Taps
from vitrail.models.blocks import Block
from vitrail.models.build import register_family
from vitrail.models.family import CostStep, ModelConfig
from vitrail.models.vit import ViT
from vitrail.models.vit_config import ViTConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ScaledConfig(ViTConfig):
    family: ClassVar[str] = "scaled-vit"

    scale: float = 0.1  # where the vectors start

    def walk(self) -> Iterator[CostStep]:
        for step in ViTConfig.walk(self):
            yield replace(step, params=step.params + self.width) if step.name.endswith("residual") else step


class ScaledBlock(Block):
    def __init__(self, config: ScaledConfig, layer: int):
        super().__init__(config, layer)
        self.start = config.scale
        self.scales = nn.Parameter(torch.empty(2, config.width))

    def initialise(self) -> None:
        nn.init.constant_(self.scales, self.start)

    def attend(self, z: Tensor, places: Places, queries: int | None, taps: Taps | None) -> Tensor:
        return self.scales[0] * super().attend(z, places, queries, taps)

    def transform(self, z: Tensor) -> Tensor:
        return self.scales[1] * super().transform(z)


class ScaledViT(ViT):
    config_class: ClassVar[type[ModelConfig]] = ScaledConfig

    def make_block(self, config: ViTConfig, layer: int) -> Block:
        assert isinstance(config, ScaledConfig)
        return ScaledBlock(config, layer)


register_family(ScaledViT)
