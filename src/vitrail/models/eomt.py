"""EoMT (Kerssies et al. 2025, "Your ViT is Secretly an Image Segmentation Model"): queries in a ViT's last blocks.

The encoder's last blocks process queries and patches together and so take the place of a decoder; only a small head
follows.
"""

from functools import partial
from typing import ClassVar

from torch import Tensor

from vitrail.core.text import Pair
from vitrail.models.family import ModelConfig
from vitrail.models.query_configs import EoMTConfig
from vitrail.models.query_head import QueryHead
from vitrail.models.query_network import QueryViT
from vitrail.models.vit_config import ViTConfig


class EoMT(QueryViT):
    config_class: ClassVar[type[ModelConfig]] = EoMTConfig
    config: EoMTConfig  # pyright: ignore[reportIncompatibleVariableOverride] - narrower, as built

    def make_head(self, config: ViTConfig) -> QueryHead:
        assert isinstance(config, EoMTConfig)
        return QueryHead(config)

    def prepare(self, images: Tensor, grid: Pair) -> tuple[Tensor, Tensor | None]:
        z = self.embed(images)
        rotation = self.compute_rotation(z, grid)
        last = self.config.depth - self.config.query_blocks
        z = self.forward_blocks(z, self._other_grid(images), last=last, rotation=rotation)
        return self.head.add_queries(z), rotation

    def run_block(self, block: int, z: Tensor, grid: Pair, rotation: Tensor | None, hidden: Tensor | None) -> Tensor:
        c = self.config
        layer = c.depth - c.query_blocks + block
        layers = partial(self.forward_blocks, first=layer, last=layer + 1, rotation=rotation)
        return layers(z, grid, ahead=c.queries, hidden=hidden)

    def normalise(self, z: Tensor) -> Tensor:
        return self.norm(z)
