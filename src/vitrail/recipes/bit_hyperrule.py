"""BiT's HyperRule (Kolesnikov et al. 2020): how to fine-tune, from the size of the images and of the set alone.

The paper runs its ResNets with it too. Batch 512, SGD with momentum 0.9, learning rate 0.003, no weight decay.

Steps, warm-up, decays and MixUp are those of the released code (big_transfer's bit_hyperrule.py), which divides the
rate in the step behind each of its supports: at 200 the rate is still whole, at 201 it is a tenth. The sizes are those
of the BiT paper, 448 and 384, at which the ViT paper too compares its ResNets; the released code has 512 and 480, which
the BiT paper gives R152x4 alone. `released` takes these.

BiT's HyperRule (Kolesnikov et al. 2020) on the paper's sets: for ResNets the paper runs it next to Table 4 and keeps
the better of the two (B.1.1).

SGD with momentum 0.9 and a learning rate of 0.003, batch 512, no weight decay and no clipping; the rate is divided by
ten three times. Size, steps and MixUp follow from the images and their number alone. No number of the paper's is of
this rule alone; BiT-L (R152x4) has 87.54 on ImageNet, 99.37 on CIFAR-10, 93.51 on CIFAR-100, 96.62 on Pets and 99.63 on
Flowers (Table 2).
"""

from dataclasses import dataclass, replace

from vitrail.core.errors import ConfigError
from vitrail.data.splits import DEV
from vitrail.data.transforms.augmentation import Mix, bit
from vitrail.optim.config import Optim, Schedule
from vitrail.train.config import Data, RunRequest

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


def by_rule(name: str, source: str, *, side: int, samples: int) -> RunRequest:
    """What the rule says for images of a typical side and a training set of so many."""
    rule = hyper_rule(side, side, samples)
    return RunRequest(
        name=name,
        augmentation=bit(rule.resize, rule.crop),
        mix=Mix(mixup=rule.mixup),
        data=Data(source=source, dev=DEV[source], test="val" if source == "imagenet" else "auto"),
        optim=Optim(kind="sgd", lr=0.003, momentum=0.9),
        schedule=Schedule(
            decay="steps", warmup=rule.warmup, milestones=tuple(step / rule.steps for step in rule.decays)
        ),
        batch=512,
        steps=rule.steps,
    )


def bit_finetune_imagenet() -> RunRequest:
    """A BiT ResNet on ImageNet by the HyperRule: 384 px, 20,000 steps, MixUp 0.1."""
    return by_rule("bit-finetune-imagenet", "imagenet", side=400, samples=1_281_167)


def bit_finetune_cifar10() -> RunRequest:
    """A BiT ResNet on CIFAR-10 by the HyperRule: 128 px, 10,000 steps, MixUp 0.1."""
    return by_rule("bit-finetune-cifar10", "cifar10", side=32, samples=50_000)


def bit_finetune_cifar100() -> RunRequest:
    """A BiT ResNet on CIFAR-100 by the HyperRule: 128 px, 10,000 steps, MixUp 0.1."""
    data = Data(source="cifar100", dev=DEV["cifar100"])
    return replace(bit_finetune_cifar10(), name="bit-finetune-cifar100", data=data)


def bit_finetune_pets() -> RunRequest:
    """A BiT ResNet on Oxford-IIIT Pets by the HyperRule: 384 px, 500 steps, no MixUp."""
    return by_rule("bit-finetune-pets", "pets", side=400, samples=3_680)


def bit_finetune_flowers() -> RunRequest:
    """A BiT ResNet on Oxford Flowers-102 by the HyperRule: 384 px, 500 steps, no MixUp."""
    return by_rule("bit-finetune-flowers", "flowers102", side=500, samples=1_020)
