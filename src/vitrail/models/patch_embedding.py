"""The patch embedding x_p E of Eq. 1; in a hybrid (3.1), 1x1 patches of a ResNet's feature map."""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.core.text import Pair
from vitrail.models.layers import lecun_normal_
from vitrail.models.resampling.patch_kernels import PatchResize
from vitrail.models.resnet import Trunk
from vitrail.models.resnet_config import ResNetConfig


class PatchEmbedding(nn.Module):
    """x_p E: the image cut into patches in raster order, each projected to width D. [B, C, H, W] -> [B, N, D]."""

    as_convolution: bool = False  # for export: what runtimes outside PyTorch have a kernel for
    resize: PatchResize | None = None  # to another patch than its own, for as long as it is set

    def __init__(self, channels: int, width: int, patch: Pair, *, bias: bool = True):
        super().__init__()
        self.projection = nn.Conv2d(channels, width, patch, stride=patch, bias=bias)
        self.resizes: dict[object, PatchResize] = {}  # made once: a recorded graph reads them where they are

    def initialise(self) -> None:
        lecun_normal_(self.projection.weight)
        if self.projection.bias is not None:
            nn.init.zeros_(self.projection.bias)

    def forward(self, images: Tensor) -> Tensor:
        """As one matrix product on flattened patches: the same as the convolution, and quicker on accelerators."""
        if self.as_convolution and self.resize is None:
            return self.projection(images).flatten(2).transpose(1, 2)
        rows, columns = self.patch
        weight = self.projection.weight if self.resize is None else self.resize.apply(self.projection.weight)
        cut = images.unflatten(3, (-1, columns)).unflatten(2, (-1, rows))  # [B, C, H/P, P, W/P, P]
        patches = cut.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)  # [B, N, C·P·P]
        return F.linear(patches, weight.flatten(1), self.projection.bias)

    @property
    def patch(self) -> Pair:
        """The patch size that it cuts images into."""
        return cast(Pair, self.projection.stride) if self.resize is None else self.resize.patch

    def set_patch(self, patch: Pair | None) -> None:
        """Cuts images into patches of another size from now on, or of its own again."""
        own, weight = cast(Pair, self.projection.stride), self.projection.weight
        if patch is None or patch == own:
            self.resize = None
            return
        like = torch.empty((), dtype=torch.promote_types(weight.dtype, torch.float32), device=weight.device)
        key = (patch, like.dtype, like.device)
        if key not in self.resizes:
            self.resizes[key] = PatchResize.between(own, patch, like=like)
        self.resize = self.resizes[key]

    @property
    def kernel(self) -> Tensor:
        """The filters that see the image: [D, C, P, P]."""
        return self.projection.weight


class HybridEmbedding(PatchEmbedding):
    """Backbone, then the projection to width D: [B, C, H, W] -> [B, N, D]."""

    def __init__(self, backbone: ResNetConfig, width: int, patch: Pair, *, bias: bool = True):
        super().__init__(backbone.features, width, patch, bias=bias)
        self.backbone = Trunk(backbone)

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(self.backbone(images))

    @property
    def kernel(self) -> Tensor:
        return self.backbone.kernel
