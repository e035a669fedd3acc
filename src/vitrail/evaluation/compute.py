"""What training costs by the paper's formula (4.4, Table 6): 6 FLOPs a multiply-accumulate, image and epoch. No torch.

2 FLOPs a multiply-accumulate, and 3 for forward and backward. Table 6 counts no taps of a convolution that fall on its
padding: without them the formula gives every row within 3 %, with them the ResNets come out up to 5 % too high. For a
ViT there is no difference.
"""

from vitrail.models.family import ModelConfig

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
    return config.macs - config.padding_macs
