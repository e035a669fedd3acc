"""BiT's HyperRule (Kolesnikov et al. 2020): how to fine-tune, from the size of the images and of the set alone.

The paper runs its ResNets with it too. Batch 512, SGD with momentum 0.9, learning rate 0.003, no weight decay.

Steps, warm-up, decays and MixUp are those of the released code (big_transfer's bit_hyperrule.py), which divides the
rate in the step behind each of its supports: at 200 the rate is still whole, at 201 it is a tenth. The sizes are those
of the BiT paper, 448 and 384, at which the ViT paper too compares its ResNets; the released code has 512 and 480, which
the BiT paper gives R152x4 alone. `released` takes these.
"""

from dataclasses import dataclass

from vitrail.core.errors import ConfigError

SMALL_AREA = 96 * 96


@dataclass(frozen=True, kw_only=True, slots=True)
class HyperRule:
    resize: int  # to a square of this side
    crop: int  # then a random square of this side
    steps: int
    warmup: int
    decays: tuple[int, int, int]  # the first steps, counted from 0, whose learning rate is divided by 10 again
    mixup: float  # alpha; 0 for none


def hyper_rule(height: int, width: int, samples: int, *, released: bool = False) -> HyperRule:
    """The rule for images of this typical size and a training set of this many."""
    if min(height, width, samples) < 1:
        raise ConfigError(f"no rule for {samples} images of {height}x{width}")
    large = (512, 480) if released else (448, 384)
    resize, crop = (160, 128) if height * width < SMALL_AREA else large
    if samples < 20_000:
        return HyperRule(resize=resize, crop=crop, steps=500, warmup=100, decays=(201, 301, 401), mixup=0.0)
    steps = 10_000 if samples < 500_000 else 20_000
    decays = (steps * 3 // 10 + 1, steps * 6 // 10 + 1, steps * 9 // 10 + 1)
    return HyperRule(resize=resize, crop=crop, steps=steps, warmup=500, decays=decays, mixup=0.1)
