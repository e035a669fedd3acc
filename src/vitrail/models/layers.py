"""Building blocks of the networks: initialisation, norms, stochastic depth, LayerScale, MLPs, weight-standardised
convolutions, and heads.

Every module initialises itself in `initialise`, as in the reference code. Stochastic depth (Huang et al. 2016) matches
torchvision's, whose package would also import torch's compiler. A head reads pooled tokens (Eq. 4, D.3) with no layer,
a linear layer, or a hidden tanh layer for pre-training; or it reads every patch token, for logits per pixel.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.core.text import Pair
from vitrail.models.kernels import cpu_ops, float8_layers
from vitrail.models.kernels.float8_layers import Float8
from vitrail.models.kernels.fused_ops import TensorFacts, can_fuse_gelu, can_fuse_linear, fused_gelu, fused_gelu_linear
from vitrail.models.resnet_config import ResNetConfig, same_widths
from vitrail.models.vit_config import ViTConfig

TRUNCATED_STD = 0.87962566103423978  # standard deviation of a standard normal truncated at two standard deviations


def lecun_normal_(weight: Tensor) -> Tensor:
    """Fills [out, in, ...] weights from a truncated normal of variance 1/fan_in."""
    std = math.sqrt(1 / weight[0].numel()) / TRUNCATED_STD
    return nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


@torch.no_grad()
def initialise(network: nn.Module) -> None:
    """Draws fresh weights from torch's current seed. Norms come first, so that a module can override its own."""
    for module in network.modules():
        if isinstance(module, nn.LayerNorm | nn.GroupNorm | nn.RMSNorm):
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


class RMSNorm(nn.RMSNorm):
    """x / √(mean x² + ε), times a weight, in the weight's type: float32 under autocast, as torch does only for LN."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.to(self.weight.dtype))


def make_norm(config: ViTConfig, width: int) -> nn.Module:
    """Makes a LayerNorm over the last dimension, or an RMSNorm, which neither centres nor shifts."""
    return (nn.LayerNorm if config.norm == "layer" else RMSNorm)(width, eps=config.norm_eps)


class LayerScale(nn.Module):
    """A learned factor for each channel of a residual branch (Touvron et al. 2021), all equal at the start."""

    def __init__(self, width: int, start: float):
        super().__init__()
        self.start = start
        self.gamma = nn.Parameter(torch.empty(width))

    def initialise(self) -> None:
        nn.init.constant_(self.gamma, self.start)

    def forward(self, z: Tensor) -> Tensor:
        return z * self.gamma


class MLP(nn.Module):
    """Dense, GELU, Dense, with dropout after each dense layer. A gated MLP has silu(gate) times value instead of GELU;
    `expand` computes both, stacked in that order."""

    def __init__(self, config: ViTConfig, hidden: int = 0):
        super().__init__()
        hidden, bias = hidden or config.mlp_width, config.mlp_bias
        self.gated = config.gated
        self.expand = nn.Linear(config.width, hidden * (2 if self.gated else 1), bias=bias)
        self.quick, self.tanh = config.gelu == "quick", config.gelu == "tanh"
        self.gelu = nn.GELU(approximate="tanh" if self.tanh else "none")
        self.norm = make_norm(config, hidden) if config.norm_inner_mlp else None
        self.contract = nn.Linear(hidden, config.width, bias=bias)
        self.dropout = nn.Dropout(config.dropout)

    def initialise(self) -> None:
        for layer, parts in ((self.expand, 2 if self.gated else 1), (self.contract, 1)):
            for part in layer.weight.chunk(parts):
                nn.init.xavier_uniform_(part)
            if layer.bias is not None:
                nn.init.normal_(layer.bias, std=1e-6)

    def forward(self, z: Tensor) -> Tensor:
        return self.dropout(self.contract(self._hide(z)))

    def hide(self, z: Tensor | Float8) -> Tensor | Float8:
        """Computes everything before the last product, in fp8 if the input is: [..., D] -> [..., M]."""
        if not isinstance(z, Float8):
            return self._hide(z)
        if not self.gated and not self.quick and self.norm is None and self.expand.bias is not None:
            return float8_layers.gelu_linear(z, self.expand, self.tanh)
        return float8_layers.round_tensor(self._hide(z))

    def _hide(self, z: Tensor | Float8) -> Tensor:
        hidden = self.dropout(self.activate(z))
        return hidden if self.norm is None else self.norm(hidden)

    def fuses(self, z: Tensor | TensorFacts) -> bool:
        """Whether GELU and its gradient run as one fused pass each."""
        return not self.gated and not self.quick and can_fuse_linear(z, self.expand)

    def activate(self, z: Tensor | Float8) -> Tensor:
        """Computes the hidden layer: [..., D] -> [..., M]."""
        if isinstance(z, Tensor) and self.fuses(z):
            return fused_gelu_linear(z, self.expand, self.tanh)
        plain = not self.gated and not self.quick
        if plain and isinstance(z, Tensor) and cpu_ops.can_fuse_gelu_linear(z, self.expand, self.gelu):
            return cpu_ops.gelu_linear(z, self.expand, self.gelu.approximate)
        eight = isinstance(z, Float8)
        hidden = float8_layers.linear(z, self.expand.weight, self.expand.bias) if eight else self.expand(z)
        if self.gated:
            gate, value = hidden.chunk(2, dim=-1)
            return F.silu(gate) * value
        if self.quick:
            return hidden * torch.sigmoid(1.702 * hidden)
        return fused_gelu(hidden, self.tanh) if can_fuse_gelu(hidden) else self.gelu(hidden)


class AttentionPool(nn.Module):
    """Multi-head attention of one learned query over all tokens, or only over the patches, then an MLP with a residual
    (SigLIP). In AIMv2's style the query is not projected, and no MLP follows. [B, T, D] -> [B, D]."""

    def __init__(self, config: ViTConfig):
        super().__init__()
        width, self.heads = config.width, config.map_heads or config.heads
        self.skipped = 0 if config.map_prefix else config.prefix  # leading tokens that it does not read
        full = config.map_style == "siglip"
        self.query = nn.Parameter(torch.empty(1, 1, width))
        self.q = nn.Linear(width, width) if full else None
        self.kv = nn.Linear(width, 2 * width, bias=full)
        self.out = nn.Linear(width, width)
        self.norm = make_norm(config, width) if full else None
        plain = replace(config, gated=False, norm_inner_mlp=False, mlp_bias=True)
        self.mlp = MLP(plain, config.map_mlp_width) if full else None

    def initialise(self) -> None:
        nn.init.normal_(self.query, std=self.query.shape[-1] ** -0.5)
        for layer in (self.q, self.kv, self.out):
            for part in () if layer is None else layer.weight.chunk(layer.out_features // layer.in_features):
                nn.init.xavier_uniform_(part)
            if layer is not None and layer.bias is not None:
                nn.init.zeros_(layer.bias)

    def forward(self, z: Tensor) -> Tensor:
        mixed = F.scaled_dot_product_attention(*self.project_tokens(z))
        y = self.out(mixed.transpose(1, 2).flatten(2))[:, 0]
        return y if self.mlp is None or self.norm is None else y + self.mlp(self.norm(y))

    def project_tokens(self, z: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Computes q [B, k, 1, D_h] of the query, and k and v [B, k, T, D_h] of the tokens that it reads."""
        query, both = self.query if self.q is None else self.q(self.query), self.kv(z[:, self.skipped :])
        parts = (query.to(both.dtype).expand(z.shape[0], -1, -1), *both.chunk(2, dim=-1))
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        return q, k, v

    def weights(self, z: Tensor) -> Tensor:
        """Computes the weight of each token in every head, for inspection: [B, T, D] -> [B, k, T]."""
        q, k, _ = self.project_tokens(z)
        return F.pad((q * q.shape[-1] ** -0.5 @ k.transpose(-2, -1)).softmax(dim=-1)[:, :, 0], (self.skipped, 0))


class ChannelNorm(nn.LayerNorm):
    """LN over the channels of a map: [B, C, H, W] -> [B, C, H, W]."""

    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Neck(nn.Module):
    """SAM's two convolutions after the last block, each with a norm: [B, D, H, W] -> [B, C, H, W]."""

    def __init__(self, width: int, channels: int):
        super().__init__()
        self.reduce = nn.Conv2d(width, channels, 1, bias=False)
        self.norm_reduce = ChannelNorm(channels, eps=1e-6)
        self.smooth = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm_smooth = ChannelNorm(channels, eps=1e-6)

    def initialise(self) -> None:
        lecun_normal_(self.reduce.weight)
        lecun_normal_(self.smooth.weight)

    def forward(self, patches: Tensor) -> Tensor:
        # As a product: the gradient of a 1x1 convolution may have another memory layout than its weight, and DDP warns.
        narrow = F.linear(patches.movedim(1, -1), self.reduce.weight.flatten(1)).movedim(-1, 1)
        return self.norm_smooth(self.smooth(self.norm_reduce(narrow)))


class StandardisedConv(nn.Conv2d):
    """A convolution whose kernel is standardised to mean 0 and standard deviation 1 for each output channel."""

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
            # The clamp changes only variances below the smallest normal number: the root's gradient at 0 is infinite.
            return (self.weight - mean) / (variance.clamp_min(torch.finfo(variance.dtype).tiny).sqrt() + self.eps)
        # Batch norm over [1, out, rest] computes the same formula in one pass instead of five.
        flat = self.weight.flatten(1)[None]
        return F.batch_norm(flat, None, None, training=True, eps=self.eps).view_as(self.weight)

    def forward(self, input: Tensor) -> Tensor:
        if self.same:
            input = pad_same(input, self.kernel_size[0], self.stride[0])
        return F.conv2d(input, self.standardise_kernel(), None, self.stride, self.padding)


def pad_same(x: Tensor, side: int, stride: int, value: float = 0.0, *, open_size: bool = False) -> Tensor:
    """Pads by TensorFlow's SAME rule. An open size is a multiple of every stride, so its widths are constant."""
    sizes = (stride, stride) if open_size else (x.shape[3], x.shape[2])
    widths = [width for size in sizes for width in same_widths(size, side, stride)]
    return F.pad(x, widths, value=value) if any(widths) else x


class RootPool(nn.Module):
    """The root's 3x3 max-pool, which export replaces by one that other runtimes support. BiT has no ReLU before it, so
    padding by zero and by minus infinity differ there."""

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
    """Pools tokens: the class token, the mean over the patches, or both concatenated: [B, T, D] -> [B, D] or [B, 2D].
    For a distilled head, the class and distillation tokens: [B, 2, D]."""
    if config.pool == "mean":
        return z[:, config.prefix :].mean(dim=1)
    if config.head == "distilled":
        return z[:, :2]
    token = z[:, 0] if config.class_tokens == 1 else z[:, : config.class_tokens].mean(dim=1)
    return token if config.pool == "token" else torch.cat([token, z[:, config.prefix :].mean(dim=1)], dim=-1)


class ClassificationHead(nn.Module):
    """Representation to logits. The last layer starts at zero (3.2), so that a fresh head prefers no class."""

    def __init__(self, config: ViTConfig, width: int = 0):
        super().__init__()
        width = width or config.features
        self.hidden = nn.Linear(width, width) if config.head == "tanh" else None
        self.classifier = nn.Linear(width, config.classes) if config.classes else None

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


class DistilledHead(ClassificationHead):
    """Two linear layers, on the class token and on the distillation token, whose logits are averaged (DeiT):
    [B, 2, D] -> [B, K]. The features of an image are the mean of both tokens."""

    def __init__(self, config: ViTConfig):
        super().__init__(config)
        self.distilled = nn.Linear(config.features, config.classes)

    def initialise(self) -> None:
        super().initialise()
        nn.init.zeros_(self.distilled.weight)
        nn.init.zeros_(self.distilled.bias)

    def features(self, y: Tensor) -> Tensor:
        return y.mean(dim=1)

    def forward(self, y: Tensor) -> Tensor:
        assert self.classifier is not None
        return (self.classifier(y[:, 0]) + self.distilled(y[:, 1])) / 2


class LinearPatchHead(ClassificationHead):
    """Patch tokens to logits per pixel: one linear layer, which starts at zero, on every token of `patch_map`. The
    features of an image are its representation, unchanged."""

    def __init__(self, config: ViTConfig):
        super().__init__(config, config.patch_features)

    def forward(self, y: Tensor, grid: Pair, size: Pair) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        """[B, N, D] on a grid -> [B, K, height, width], resized bilinearly between the centres of the patches."""
        logits = super().forward(y).transpose(1, 2).unflatten(2, grid)  # [B, K, rows, columns]
        return F.interpolate(logits, size, mode="bilinear", align_corners=False)


def build_head(config: ViTConfig) -> ClassificationHead | LinearPatchHead:
    if config.head == "distilled":
        return DistilledHead(config)
    return LinearPatchHead(config) if config.has_patch_head else ClassificationHead(config)
