"""BiT ResNets: GroupNorm and weight-standardised convolutions, in the two forms that the paper uses.

The baselines are ResNet-v2, pre-activation, with fixed symmetric padding; the hybrid's backbone is post-activation with
SAME padding. They share the bottleneck's three convolutions and nothing else, so each has a unit of its own.
"""

from dataclasses import replace
from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.core.errors import ConfigError, ImageSizeError
from vitrail.core.text import Pair
from vitrail.models.attention import Attention, Places, merge_lines, split_lines
from vitrail.models.backbone import Backbone, Intermediates, Layers, resolve_layers
from vitrail.models.family import ModelConfig
from vitrail.models.layers import RootPool, StandardisedConv
from vitrail.models.resnet_config import ResNetConfig


class AxialMixing(nn.Module):
    """Row and column attention with relative positions instead of a 3x3 convolution (AxialResNet, D.6)."""

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
        for columns, mix, offsets in ((False, self.row, self.row_offsets), (True, self.column, self.column_offsets)):
            lines = mix(split_lines(z, self.grid, columns=columns), Places(self.grid, offsets))
            z = merge_lines(lines, self.grid, columns=columns)
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
        self.root = StandardisedConv(config, config.channels, config.root_width, *config.root_size)
        post = config.unit == "postactivation"
        self.norm_root = group_norm(config, config.root_width) if post else None
        self.pool = RootPool(config)
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
        return self.pool(x)

    def forward(self, images: Tensor, found: list[Tensor] | None = None) -> Tensor:
        """With `found` the map behind each stage is left there."""
        x = self.stem(images)
        for stage in self.stages:
            x = stage(x)
            if found is not None:
                found.append(x)
        return x

    @property
    def kernel(self) -> Tensor:
        """The filters that see the image, as standardised: [D, C, P, P]."""
        return self.root.standardise_kernel()


class ResNet(Backbone):
    """A BiT ResNet: images to logits [B, K], or to features [B, 2048w] without a head."""

    config_class: ClassVar[type[ModelConfig]] = ResNetConfig
    config: ResNetConfig

    @classmethod
    def from_config(cls, config: ModelConfig) -> Self:
        assert isinstance(config, ResNetConfig)
        return cls(config)

    @classmethod
    def first_layer(cls, config: ModelConfig) -> str:
        return "trunk.root"

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
    def blocks(self) -> nn.ModuleList:  # pyright: ignore[reportIncompatibleVariableOverride] - held by the trunk
        return self.trunk.stages

    def units(self) -> list[nn.Module]:
        return [unit for stage in self.trunk.stages for unit in stage.children()]

    def no_weight_decay(self) -> set[str]:
        return {name for name, _ in self.named_parameters() if name.endswith("_offsets")}

    def get_classifier(self) -> nn.Module:
        """The last layer, from features to logits; an identity where there is none."""
        return nn.Identity() if self.head is None else self.head

    def forward_features(self, images: Tensor) -> Tensor:
        """The feature map behind the last norm: [B, C, H, W] -> [B, features, rows, columns]."""
        return self._forward_map(images, None)

    def _forward_map(self, images: Tensor, found: list[Tensor] | None) -> Tensor:
        shape, channels = tuple(images.shape), self.config.channels
        if shape[1] != channels:
            raise ImageSizeError(f"images of {shape} do not have the {channels} channels of this network")
        if self.config.mixing == "axial" and shape[2:] != self.config.image:
            raise ImageSizeError(f"images of {shape} do not fit axial tables for {self.config.image}")
        x = self.trunk(images, found)
        return x if self.norm is None else F.relu(self.norm(x), inplace=True)

    @property
    def kernel(self) -> Tensor:
        return self.trunk.kernel

    def features(self, images: Tensor) -> Tensor:
        return self.forward_head(self.forward_features(images), pre_logits=True)

    def patch_map(self, images: Tensor) -> Tensor:
        return self.forward_features(images)

    def run_layers(
        self, images: Tensor, layers: Layers, *, norm: bool, prefix: bool, attention: bool, qkv: bool
    ) -> tuple[Tensor, Intermediates]:
        """The map behind each stage; the last norm fits the last stage alone, so `norm` means that one."""
        if attention or qkv:
            raise ConfigError("a ResNet has no attention; use a ViT or a hybrid")
        stages: list[Tensor] = []  # torch.compile cannot trace list[Tensor]()
        out = self._forward_map(images, stages)
        wanted = resolve_layers(layers, len(stages))
        last = out if norm else stages[-1]
        maps = tuple(last if stage == len(stages) - 1 else stages[stage] for stage in wanted)
        return out, Intermediates(layers=wanted, tokens=tuple(x.flatten(2).transpose(1, 2) for x in maps), maps=maps)

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Tensor:
        y = features.mean(dim=(2, 3))
        return y if pre_logits or self.head is None else self.head(y)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """A new zero-initialised linear head; 0 leaves none. It reads the mean of the map: "avg", in timm's words."""
        if global_pool not in (None, "avg", "mean"):
            raise ConfigError(f"global_pool={global_pool!r}: a ResNet's head reads the mean of its map, which is 'avg'")
        self.config = replace(  # pyright: ignore[reportIncompatibleVariableOverride] - narrower, as built
            self.config, classes=num_classes
        )
        like = next(self.parameters())
        self.head = self._head(num_classes)
        if self.head is not None:
            self.head.to(like.device, like.dtype)
        self.initialise()
        self.forget_labels()


def group_norm(config: ResNetConfig, channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(config.groups, channels, eps=config.norm_eps)
