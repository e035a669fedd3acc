"""Building blocks of the networks: initialisation, stochastic depth, weight-standardised convolutions, and heads.

Every module initialises itself in `initialise`, as in the reference code. Stochastic depth (Huang et al. 2016) is
torchvision's; its package would import torch's compiler as well. A head reads pooled tokens (Eq. 4, D.3): none, a
linear layer, or a hidden tanh layer for pre-training; or it reads every patch token, for logits per pixel.
"""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.core.text import Pair
from vitrail.models.resnet_config import ResNetConfig, same_widths
from vitrail.models.vit_config import ViTConfig

TRUNCATED_STD = 0.87962566103423978  # of a standard normal cut off at two standard deviations


def lecun_normal_(weight: Tensor) -> Tensor:
    """Truncated normal of variance 1/fan_in, for [out, in, ...] weights."""
    std = math.sqrt(1 / weight[0].numel()) / TRUNCATED_STD
    return nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


@torch.no_grad()
def initialise(network: nn.Module) -> None:
    """Fresh weights from torch's current seed. Norms first, so that a module can set its own norms otherwise."""
    for module in network.modules():
        if isinstance(module, nn.LayerNorm | nn.GroupNorm):
            module.reset_parameters()
    for module in network.modules():
        if callable(own := getattr(module, "initialise", None)):
            own()


class StochasticDepth(nn.Module):
    """Drops the whole residual branch of a sample with probability `p` while training; the others are scaled up."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, z: Tensor) -> Tensor:
        """[B, ...] -> [B, ...]."""
        if not self.training or self.p == 0.0:
            return z
        kept = torch.empty([z.shape[0]] + [1] * (z.ndim - 1), dtype=z.dtype, device=z.device).bernoulli_(1.0 - self.p)
        return z * (kept.div_(1.0 - self.p) if self.p < 1.0 else kept)

    def extra_repr(self) -> str:
        return f"p={self.p}"


class StandardisedConv(nn.Conv2d):
    """A convolution whose kernel is shifted and scaled to mean 0 and deviation 1 for each output channel."""

    def __init__(self, config: ResNetConfig, channels: int, out: int, side: int, stride: int = 1):
        symmetric = config.padding == "symmetric"
        super().__init__(channels, out, side, stride=stride, padding=side // 2 if symmetric else 0, bias=False)
        self.same = not symmetric
        self.form = config.standardisation
        self.eps = config.standardisation_eps

    def initialise(self) -> None:
        lecun_normal_(self.weight)

    def standardise_kernel(self) -> Tensor:
        if self.form == "std+eps":
            variance, mean = torch.var_mean(self.weight, dim=(1, 2, 3), correction=0, keepdim=True)
            # Below the smallest normal number nothing changes but the root's gradient, which at 0 would be infinite.
            return (self.weight - mean) / (variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt() + self.eps)
        # Batch norm over [1, out, rest] is this very formula, in one pass instead of five.
        flat = self.weight.flatten(1)[None]
        return F.batch_norm(flat, None, None, training=True, eps=self.eps).view_as(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        if self.same:
            input = pad_same(input, self.kernel_size[0], self.stride[0])
        return F.conv2d(input, self.standardise_kernel(), None, self.stride, self.padding)


def pad_same(x: Tensor, side: int, stride: int, value: float = 0.0, *, open_size: bool = False) -> Tensor:
    """TensorFlow's SAME rule. An open size is a multiple of every stride, so the widths are the same for all."""
    sizes = (stride, stride) if open_size else (x.shape[3], x.shape[2])
    widths = [width for size in sizes for width in same_widths(size, side, stride)]
    return F.pad(x, widths, value=value) if any(widths) else x


class RootPool(nn.Module):
    """The root's 3x3 max-pool, which export replaces by one that survives other runtimes. No ReLU stands before BiT's,
    so padding by zero and by minus infinity differ there."""

    def __init__(self, config: ResNetConfig):
        super().__init__()
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        if self.config.root == "3x3":
            return x
        value = 0.0 if self.config.pool_padding == "zero" else float("-inf")
        same = self.config.padding == "same"
        x = pad_same(x, 3, 2, value) if same else F.pad(x, (1, 1, 1, 1), value=value)
        return F.max_pool2d(x, 3, stride=2)


def pool(z: Tensor, config: ViTConfig) -> Tensor:
    """The class token's row, or the mean over the patches: [B, T, D] -> [B, D]."""
    return z[:, 0] if config.pool == "token" else z[:, config.prefix :].mean(dim=1)


class ClassificationHead(nn.Module):
    """Representation to logits. The last layer starts at zero (3.2), so that a fresh head says nothing."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        self.hidden = nn.Linear(config.width, config.width) if config.head == "tanh" else None
        self.classifier = nn.Linear(config.width, config.classes) if config.classes else None

    def initialise(self) -> None:
        if self.hidden is not None:
            lecun_normal_(self.hidden.weight)
            nn.init.zeros_(self.hidden.bias)
        for parameter in () if self.classifier is None else self.classifier.parameters():
            nn.init.zeros_(parameter)

    def features(self, y: Tensor) -> Tensor:
        """What the last layer reads: y itself, or y through the hidden tanh layer (the paper's pre-logits)."""
        return y if self.hidden is None else self.hidden(y).tanh()

    def forward(self, y: Tensor) -> Tensor:
        y = self.features(y)
        return y if self.classifier is None else self.classifier(y)


class LinearPatchHead(ClassificationHead):
    """Patch tokens to logits per pixel: one linear layer, which starts at zero, on each of them. What it reads is
    `patch_map`; an image's features are its representation as it is."""

    def forward(self, y: Tensor, grid: Pair, size: Pair) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """[B, N, D] on a grid -> [B, K, height, width], resized bilinearly between the centres of the patches."""
        logits = super().forward(y).transpose(1, 2).unflatten(2, grid)  # [B, K, rows, columns]
        return F.interpolate(logits, size, mode="bilinear", align_corners=False)


def build_head(config: ViTConfig) -> ClassificationHead | LinearPatchHead:
    return LinearPatchHead(config) if config.has_patch_head else ClassificationHead(config)
