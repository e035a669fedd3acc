"""The network as it is shipped: the same weights and arithmetic as models/, in operations that leave PyTorch unharmed.

Three things differ. Kernels are standardised once, not at every call. Zeros around a max-pool are laid on by
concatenation: a runtime that merges a zero pad into the pool behind it, as ONNX Runtime does, turns them into minus
infinity. And where the image size is left open, positions are resampled in the graph (3.2, `reference` numerics).
"""

from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.core.shapes import Pair
from vitrail.data.preprocessing import Preprocessing
from vitrail.export.positions import OpenPositions
from vitrail.models.build import Model, build_from
from vitrail.models.config import ResNetConfig
from vitrail.models.convolution import StandardisedConv, pad_same
from vitrail.models.heads import pooled
from vitrail.models.hybrid import HybridEmbedding
from vitrail.models.resnet import ResNet, Trunk
from vitrail.models.vit import PatchEmbedding, ViT


def shipped(model: Model, *, dynamic: bool = False, preprocessing: Preprocessing | None = None) -> nn.Module:
    """A module [B, C, H, W] -> [B, K] in evaluation mode, on the CPU and in float32. With `dynamic` it takes other
    image sizes, too; with `preprocessing` it takes bytes and normalises them itself."""
    tensors = {name: tensor.detach().to("cpu", torch.float32) for name, tensor in model.state_dict().items()}
    copy = build_from(model.config, tensors).eval()  # other modules around the same tensors: these get changed
    form = ShippedResNet(copy, dynamic) if isinstance(copy, ResNet) else ShippedViT(copy, dynamic)
    return (form if preprocessing is None else Normalised(form, preprocessing)).eval().requires_grad_(False)


class Normalised(nn.Module):
    """Bytes to what the network takes, then the network."""

    mean: Tensor
    std: Tensor

    def __init__(self, network: nn.Module, preprocessing: Preprocessing):
        super().__init__()
        self.network = network
        self.register_buffer("mean", torch.tensor(preprocessing.mean).view(3, 1, 1))
        self.register_buffer("std", torch.tensor(preprocessing.std).view(3, 1, 1))

    def forward(self, image: Tensor) -> Tensor:
        return self.network((image.float() / 255 - self.mean) / self.std)


class FixedConv(nn.Module):
    """A weight-standardised convolution with its kernel as it comes out."""

    def __init__(self, conv: StandardisedConv, dynamic: bool):
        super().__init__()
        self.weight = nn.Parameter(conv.standardised().detach(), requires_grad=False)
        self.stride, self.padding, self.same, self.dynamic = conv.stride, conv.padding, conv.same, dynamic

    def forward(self, x: Tensor) -> Tensor:
        if self.same:
            x = pad_for(x, self.weight.shape[2], self.stride[0], dynamic=self.dynamic)
        return F.conv2d(x, self.weight, None, self.stride, self.padding)


def pad_for(x: Tensor, side: int, stride: int, value: float = 0.0, *, dynamic: bool) -> Tensor:
    """SAME padding. Where the size is open it is a multiple of every stride, and the widths are the same for all."""
    if not dynamic:
        return pad_same(x, side, stride, value)
    before, behind = same_widths(side, stride)
    return F.pad(x, (before, behind, before, behind), value=value) if behind else x


def same_widths(side: int, stride: int) -> Pair:
    """Before and behind, for a multiple of the stride."""
    total = max(side - stride, 0)
    return (total // 2, total - total // 2)


def fix_convolutions(module: nn.Module, dynamic: bool) -> None:
    for name, child in module.named_children():
        if isinstance(child, StandardisedConv):
            setattr(module, name, FixedConv(child, dynamic))
        else:
            fix_convolutions(child, dynamic)


class ShippedTrunk(nn.Module):
    """Root and stages: [B, C, H, W] -> [B, features, rows, columns]."""

    def __init__(self, trunk: Trunk, dynamic: bool):
        super().__init__()
        fix_convolutions(trunk, dynamic)
        self.config, self.dynamic = trunk.config, dynamic
        self.root, self.norm_root, self.stages = trunk.root, trunk.norm_root, trunk.stages

    def forward(self, images: Tensor) -> Tensor:
        x = self.root(images)
        if self.norm_root is not None:
            x = F.relu(self.norm_root(x))
        x = root_pool(x, self.config, dynamic=self.dynamic)
        for stage in self.stages:
            x = stage(x)
        return x


def root_pool(x: Tensor, config: ResNetConfig, *, dynamic: bool) -> Tensor:
    """`models.convolution.root_pool` with a border of zeros that no optimiser takes for padding."""
    if config.root == "3x3":
        return x
    if config.pool_padding == "infinity":
        if config.padding == "symmetric":
            return F.max_pool2d(x, 3, stride=2, padding=1)
        return F.max_pool2d(pad_for(x, 3, 2, float("-inf"), dynamic=dynamic), 3, stride=2)
    for axis in (3, 2):
        if config.padding == "symmetric":
            widths = (1, 1)
        else:
            widths = same_widths(3, 2 if dynamic or x.shape[axis] % 2 == 0 else 1)
        x = bordered(x, axis, widths)
    return F.max_pool2d(x, 3, stride=2)


def bordered(x: Tensor, axis: int, widths: Pair) -> Tensor:
    """Zeros before and behind along one axis, by concatenation."""
    zeros = torch.zeros_like(x.narrow(axis, 0, 1))
    return torch.cat([*[zeros] * widths[0], x, *[zeros] * widths[1]], dim=axis)


class ShippedResNet(nn.Module):
    """A BiT ResNet: [B, C, H, W] -> [B, K]."""

    def __init__(self, model: ResNet, dynamic: bool):
        super().__init__()
        self.trunk, self.norm, self.head = ShippedTrunk(model.trunk, dynamic), model.norm, model.head

    def forward(self, image: Tensor) -> Tensor:
        x = self.trunk(image)
        x = x if self.norm is None else F.relu(self.norm(x))
        y = x.mean(dim=(2, 3))
        return y if self.head is None else self.head(y)


class ShippedViT(nn.Module):
    """A Vision Transformer or a hybrid (Eqs. 1-4): [B, C, H, W] -> [B, K]."""

    def __init__(self, model: ViT, dynamic: bool):
        super().__init__()
        self.config = model.config
        embedding = cast(PatchEmbedding, model.embedding)
        hybrid = isinstance(embedding, HybridEmbedding)
        self.backbone = ShippedTrunk(embedding.backbone, dynamic) if hybrid else None
        self.projection = embedding.projection
        self.class_token, self.registers = model.class_token, model.registers
        self.position = model.position
        self.open = OpenPositions(model.position, model.config) if dynamic else None
        self.blocks, self.norm, self.head = model.blocks, model.norm, model.head

    def forward(self, image: Tensor) -> Tensor:
        x = self.projection(image if self.backbone is None else self.backbone(image))
        grid = (x.shape[2], x.shape[3])
        patches = x.flatten(2).transpose(1, 2)  # [B, D, rows, columns] -> [B, N, D]
        prefix = [t.expand(patches.shape[0], -1, -1) for t in (self.class_token, self.registers) if t is not None]
        z = torch.cat([*prefix, patches], dim=1) if prefix else patches
        for layer, block in enumerate(self.blocks):
            z = block(self.placed(z, layer, grid), self.position.offsets(layer))  # Eqs. 1, 2 and 3
        if self.config.pool == "mean" and not self.config.norm_after_pool:
            return self.head(pooled(self.norm(z), self.config))
        return self.head(self.norm(pooled(z, self.config)))  # Eq. 4

    def placed(self, z: Tensor, layer: int, grid: Pair) -> Tensor:
        """Tokens with what positions add at the input of a layer."""
        return self.position(z, layer) if self.open is None else self.open(z, layer, grid)
