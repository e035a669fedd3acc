"""PMT (2026): queries in a few blocks of their own, which read several layers of an encoder that may be frozen.

Everything outside the encoder is in `head`. If no parameter of the encoder is trained, it runs without gradients and
stores no activations for a backward pass.
"""

from typing import ClassVar, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from vitrail.core.text import Pair
from vitrail.models.attention import Places
from vitrail.models.family import ModelConfig
from vitrail.models.query_configs import PMTConfig
from vitrail.models.query_head import DecoderHead
from vitrail.models.query_network import QueryViT
from vitrail.models.vit_config import ViTConfig


class PMT(QueryViT):
    config_class: ClassVar[type[ModelConfig]] = PMTConfig
    config: PMTConfig  # pyright: ignore[reportIncompatibleVariableOverride] - narrower, as built
    head: DecoderHead  # pyright: ignore[reportIncompatibleVariableOverride]

    def make_head(self, config: ViTConfig) -> DecoderHead:
        assert isinstance(config, PMTConfig)
        return DecoderHead(config)

    @property
    def is_encoder_frozen(self) -> bool:
        """Whether no parameter outside the head is trained."""
        return not any(p.requires_grad for name, p in self.named_parameters() if not name.startswith("head."))

    def prepare(self, images: Tensor, grid: Pair) -> tuple[Tensor, Tensor | None]:
        learns = images.requires_grad or not self.is_encoder_frozen
        with torch.set_grad_enabled(torch.is_grad_enabled() and learns):
            levels = self.run_encoder(images)
        z = self.head.join(levels)
        return self.head.add_queries(z), self.head.rotary(grid, z)

    def run_encoder(self, images: Tensor) -> list[Tensor]:
        """The tokens of the tapped layers, each after the encoder's final norm: [B, T, D]."""
        z, first = self.embed(images), 0
        levels: list[Tensor] = []
        other, rotation = self._other_grid(images), self.compute_rotation(z, self._grid(images))
        for layer in self.config.tapped:
            z = self.forward_blocks(z, other, first=first, last=layer + 1, rotation=rotation)
            levels.append(self.norm(z))
            first = layer + 1
        return levels

    def run_block(self, block: int, z: Tensor, grid: Pair, rotation: Tensor | None, hidden: Tensor | None) -> Tensor:
        layer = self.head.blocks[block]
        args = z, Places(grid, rotation=rotation, ahead=self.config.queries, hidden=hidden)
        if self.grad_checkpointing and self.training and torch.is_grad_enabled():
            return cast(Tensor, checkpoint(layer, *args, use_reentrant=False))
        return layer(*args)

    def normalise(self, z: Tensor) -> Tensor:
        return self.head.norm(z)
