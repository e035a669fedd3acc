"""BiT's HyperRule (Kolesnikov et al. 2020): how to fine-tune, from the size of the pictures and of the set alone.

The paper runs its ResNets with it too. Batch 512, SGD with momentum 0.9, learning rate 0.003, no weight decay.
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
    decays: tuple[int, int, int]  # steps at which the learning rate is divided by 10
    mixup: float  # alpha; 0 for none


def hyper_rule(height: int, width: int, samples: int) -> HyperRule:
    """The rule for pictures of this typical size and a training set of this many."""
    if min(height, width, samples) < 1:
        raise ConfigError(f"no rule for {samples} pictures of {height}x{width}")
    resize, crop = (160, 128) if height * width < SMALL_AREA else (448, 384)
    if samples < 20_000:
        return HyperRule(resize=resize, crop=crop, steps=500, warmup=100, decays=(200, 300, 400), mixup=0.0)
    steps = 10_000 if samples < 500_000 else 20_000
    decays = (steps * 3 // 10, steps * 6 // 10, steps * 9 // 10)
    return HyperRule(resize=resize, crop=crop, steps=steps, warmup=500, decays=decays, mixup=0.1)
