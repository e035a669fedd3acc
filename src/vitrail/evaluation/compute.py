"""What training costs by the paper's formula (4.4, Table 6): 6 FLOPs a multiply-accumulate, image and epoch. No torch.

2 FLOPs a multiply-accumulate, and 3 for forward and backward. Table 6 counts no taps of a convolution that fall on its
padding: without them the formula gives every row within 3 %, with them the ResNets come out up to 5 % too high. For a
ViT there is no difference.
"""

from math import prod

from vitrail.models.config import ModelConfig, ResNetConfig
from vitrail.models.walk import macs

FLOPS_A_MAC = 6.0
TPUV3_CORE_FLOPS = 1567e18 / (680 * 86400)  # of the paper's ViT-L/16 on JFT: 1567 exaFLOPs in 680 core-days


def training_flops(macs_an_image: float, images: float) -> float:
    """Of so many images, each seen once: forward and backward."""
    return FLOPS_A_MAC * macs_an_image * images


def tpuv3_core_days(flops: float) -> float:
    """How long a TPUv3 core takes at the pace of the paper's ViT-L/16, to set a run beside Table 2."""
    return flops / TPUV3_CORE_FLOPS / 86400


def counted_macs(config: ModelConfig) -> int:
    """Multiply-accumulates of one image as the paper counts them: without the taps that fall on padding."""
    return macs(config) - padding_macs(config)


def padding_macs(config: ModelConfig) -> int:
    """Multiply-accumulates of one image that only multiply padding."""
    if not isinstance(config, ResNetConfig):
        return 0 if config.backbone is None else padding_macs(config.backbone)
    side, stride = (7, 2) if config.root == "7x7" else (3, 1)
    wasted = _on_padding(config, config.image, side, stride) * config.channels * config.root_width
    if config.mixing != "convolution":
        return wasted
    grid = config.pooled
    for stage, count in enumerate(config.blocks):
        inner = config.bottleneck(stage) ** 2
        wasted += _on_padding(config, grid, 3, 2 if stage else 1) * inner
        grid = config.stage_grid(grid, stage)
        wasted += (count - 1) * _on_padding(config, grid, 3, 1) * inner
    return wasted


def _on_padding(config: ResNetConfig, size: tuple[int, int], side: int, stride: int) -> int:
    """Taps of a convolution over a plane that lie outside of it."""
    outputs = prod(-(-length // stride) for length in size)
    inside = prod(_taps_inside(config.padding == "same", length, side, stride) for length in size)
    return outputs * side * side - inside


def _taps_inside(same: bool, length: int, side: int, stride: int) -> int:
    """Along one axis, over all outputs. The SAME rule puts the odd pixel of padding behind."""
    outputs = -(-length // stride)
    before = max((outputs - 1) * stride + side - length, 0) // 2 if same else side // 2
    starts = (at * stride - before for at in range(outputs))
    return sum(min(start + side, length) - max(start, 0) for start in starts)
