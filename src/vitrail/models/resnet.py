"""BiT ResNets: GroupNorm and weight-standardised convolutions, in the two forms that the paper uses.

The baselines are ResNet-v2, pre-activation, with fixed symmetric padding; the hybrid's backbone is post-activation with
SAME padding. They share the bottleneck's three convolutions and nothing else, so each has a unit of its own.
"""

from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.core.errors import ConfigError, ImageSizeError
from vitrail.core.shapes import Pair
from vitrail.models.attention import Attention, columns, from_columns, from_rows, rows
from vitrail.models.card import Card
from vitrail.models.config import ResNetConfig
from vitrail.models.convolution import StandardisedConv, root_pool


class AxialMixing(nn.Module):
    """Row and column attention with relative positions in the place of a 3x3 convolution (AxialResNet, D.6)."""

    def __init__(self, width: int, heads: int, grid: Pair, stride: int):
        super().__init__()
        self.grid, self.stride = grid, stride
        self.row = Attention(width, heads, qkv_bias=False, out_bias=False)
        self.column = Attention(width, heads, qkv_bias=False, out_bias=False)
        self.row_offsets = nn.Parameter(torch.empty(2 * grid[1] - 1, width // heads))
        self.column_offsets = nn.Parameter(torch.empty(2 * grid[0] - 1, width // heads))

    def initialise(self) -> None:
        nn.init.normal_(self.row_offsets, std=0.02)
        nn.init.normal_(self.column_offsets, std=0.02)

    def forward(self, x: Tensor) -> Tensor:
        z = x.flatten(2).transpose(1, 2)  # [B, C, H, W] -> [B, N, C]
        z = from_rows(self.row(rows(z, self.grid), self.row_offsets), self.grid)
        z = from_columns(self.column(columns(z, self.grid), self.column_offsets), self.grid)
        x = z.transpose(1, 2).unflatten(2, self.grid)
        return x if self.stride == 1 else F.avg_pool2d(x, self.stride, self.stride, ceil_mode=True)


class Unit(nn.Module):
    """What both bottlenecks have: 1x1, 3x3 with the stride, 1x1, and a projection where the shape changes."""

    def __init__(self, config: ResNetConfig, width: int, stage: int, stride: int, grid: Pair):
        super().__init__()
        inner, wide = config.bottleneck(stage), 4 * config.bottleneck(stage)
        self.conv1 = StandardisedConv(config, width, inner, 1)
        if config.mixing == "convolution":
            self.conv2: nn.Module = StandardisedConv(config, inner, inner, 3, stride)
        else:
            self.conv2 = AxialMixing(inner, config.axial_heads, grid, stride)
        self.conv3 = StandardisedConv(config, inner, wide, 1)
        changes = stride != 1 or width != wide
        self.project = StandardisedConv(config, width, wide, 1, stride) if changes else None


class PreActivationUnit(Unit):
    """ResNet-v2: norms come first, the shortcut reads the activated input, nothing follows the sum."""

    def __init__(self, config: ResNetConfig, width: int, stage: int, stride: int, grid: Pair):
        super().__init__(config, width, stage, stride, grid)
        inner = config.bottleneck(stage)
        self.norm1 = group_norm(config, width)
        self.norm2 = group_norm(config, inner)
        self.norm3 = group_norm(config, inner)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.norm1(x), inplace=True)
        shortcut = x if self.project is None else self.project(out)
        out = self.conv1(out)
        out = self.conv2(F.relu(self.norm2(out), inplace=True))
        out = self.conv3(F.relu(self.norm3(out), inplace=True))
        return out + shortcut


class PostActivationUnit(Unit):
    """The hybrid's unit: norms come last, the third starts at scale zero, a ReLU follows the sum."""

    def __init__(self, config: ResNetConfig, width: int, stage: int, stride: int, grid: Pair):
        super().__init__(config, width, stage, stride, grid)
        inner, wide = config.bottleneck(stage), 4 * config.bottleneck(stage)
        self.norm1 = group_norm(config, inner)
        self.norm2 = group_norm(config, inner)
        self.norm3 = group_norm(config, wide)
        self.norm_project = group_norm(config, wide) if self.project is not None else None

    def initialise(self) -> None:
        nn.init.zeros_(self.norm3.weight)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        if self.project is not None and self.norm_project is not None:
            shortcut = self.norm_project(self.project(x))
        out = F.relu(self.norm1(self.conv1(x)), inplace=True)
        out = F.relu(self.norm2(self.conv2(out)), inplace=True)
        return F.relu(self.norm3(self.conv3(out)) + shortcut, inplace=True)


class Trunk(nn.Module):
    """Root and stages: [B, C, H, W] -> [B, features, rows, columns]."""

    def __init__(self, config: ResNetConfig):
        super().__init__()
        self.config = config
        side, stride = (7, 2) if config.root == "7x7" else (3, 1)
        self.root = StandardisedConv(config, config.channels, config.root_width, side, stride)
        post = config.unit == "postactivation"
        self.norm_root = group_norm(config, config.root_width) if post else None
        unit = PostActivationUnit if post else PreActivationUnit
        self.stages = nn.ModuleList()
        grid, width = config.pooled, config.root_width
        for stage, count in enumerate(config.blocks):
            units: list[nn.Module] = []
            for block in range(count):
                units.append(unit(config, width, stage, 2 if stage and not block else 1, grid))
                grid = config.stage_grid(grid, stage) if not block else grid
                width = 4 * config.bottleneck(stage)
            self.stages.append(nn.Sequential(*units))

    def stem(self, images: Tensor) -> Tensor:
        """Root convolution and max-pool."""
        x = self.root(images)
        if self.norm_root is not None:
            x = F.relu(self.norm_root(x), inplace=True)
        return root_pool(x, self.config)

    def forward(self, images: Tensor) -> Tensor:
        x = self.stem(images)
        for stage in self.stages:
            x = stage(x)
        return x


class ResNet(nn.Module):
    """A BiT ResNet: images to logits [B, K], or to features [B, 2048w] where there is no head."""

    card: Card | None = None  # what travels with the weights; the checkpoint layer puts it here and reads it
    class_token_only: bool = False  # as a ViT has it; here there is no such token

    def __init__(self, config: ResNetConfig):
        super().__init__()
        self.config = config
        self.trunk = Trunk(config)
        self.norm = group_norm(config, config.features) if config.unit == "preactivation" else None
        self.head = self._head(config.classes)

    def _head(self, classes: int) -> nn.Linear | None:
        return nn.Linear(self.config.features, classes) if classes else None

    def initialise(self) -> None:
        if self.head is not None:
            nn.init.zeros_(self.head.weight)
            nn.init.zeros_(self.head.bias)

    def forward(self, images: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(images))

    @property
    def num_features(self) -> int:
        return self.config.features

    @property
    def num_classes(self) -> int:
        return self.config.classes

    def get_classifier(self) -> nn.Module:
        """The last layer, from features to logits; an identity where there is none."""
        return nn.Identity() if self.head is None else self.head

    def forward_features(self, images: Tensor) -> Tensor:
        """The feature map behind the last norm: [B, C, H, W] -> [B, features, rows, columns]."""
        if images.shape[1] != self.config.channels:
            raise ImageSizeError(
                f"images of {tuple(images.shape)} have not the {self.config.channels} channels of this network"
            )
        if self.config.mixing == "axial" and tuple(images.shape[2:]) != self.config.image:
            raise ImageSizeError(f"images of {tuple(images.shape)} do not fit axial tables for {self.config.image}")
        x = self.trunk(images)
        return x if self.norm is None else F.relu(self.norm(x), inplace=True)

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        y = features.mean(dim=(2, 3))
        return y if pre_logits or self.head is None else self.head(y)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new zero-initialised linear head; 0 leaves none. It reads the mean of the map: "avg", in timm's words."""
        if global_pool not in (None, "avg", "mean"):
            raise ConfigError(f"global_pool={global_pool!r}: a ResNet's head reads the mean of its map, which is 'avg'")
        self.config = replace(self.config, classes=num_classes)
        like = next(self.parameters())
        self.head = self._head(num_classes)
        if self.head is not None:
            self.head.to(like.device, like.dtype)
        self.initialise()
        self.card = None if self.card is None else self.card.without_labels()


def group_norm(config: ResNetConfig, channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(config.groups, channels, eps=config.norm_eps)
