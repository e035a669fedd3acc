"""Weight-standardised convolutions and the two padding rules of the paper's ResNets."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from vitrail.models.initialise import lecun_normal_
from vitrail.models.resnet_config import ResNetConfig


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

    def standardised(self) -> Tensor:
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
        return F.conv2d(input, self.standardised(), None, self.stride, self.padding)


def pad_same(x: Tensor, side: int, stride: int, value: float = 0.0) -> Tensor:
    """TensorFlow's SAME rule: as many outputs as strides fit, the odd pixel of padding behind."""
    widths: list[int] = []
    for size in (x.shape[3], x.shape[2]):
        total = max((-(-size // stride) - 1) * stride + side - size, 0)
        widths += [total // 2, total - total // 2]
    return F.pad(x, widths, value=value) if any(widths) else x


class RootPool(nn.Module):
    """The root's max-pool as a module, which export replaces by one that survives other runtimes."""

    def __init__(self, config: ResNetConfig):
        super().__init__()
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        return root_pool(x, self.config)


def root_pool(x: Tensor, config: ResNetConfig) -> Tensor:
    """The root's 3x3 max-pool. No ReLU stands before BiT's, so padding by zero and by minus infinity differ there."""
    if config.root == "3x3":
        return x
    value = 0.0 if config.pool_padding == "zero" else float("-inf")
    if config.padding == "same":
        return F.max_pool2d(pad_same(x, 3, 2, value=value), 3, stride=2)
    return F.max_pool2d(F.pad(x, (1, 1, 1, 1), value=value), 3, stride=2)
