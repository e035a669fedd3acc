"""Hybrids (3.1): a ResNet's feature map in the place of the raw image, each position its own 1x1 patch."""

from torch import Tensor

from vitrail.core.shapes import Pair
from vitrail.models.embedding import PatchEmbedding
from vitrail.models.resnet import Trunk
from vitrail.models.resnet_config import ResNetConfig


class HybridEmbedding(PatchEmbedding):
    """Backbone, then the projection to width D: [B, C, H, W] -> [B, N, D]."""

    def __init__(self, backbone: ResNetConfig, width: int, patch: Pair):
        super().__init__(backbone.features, width, patch)
        self.backbone = Trunk(backbone)

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(self.backbone(images))

    def grid_of(self, images: Tensor) -> Pair:
        rows, columns = self.projection.stride
        stride = self.backbone.config.stride
        return images.shape[2] // (rows * stride), images.shape[3] // (columns * stride)

    @property
    def kernel(self) -> Tensor:
        return self.backbone.kernel
