"""BiT's HyperRule (Kolesnikov et al. 2020) on the paper's sets: for ResNets the paper runs it next to Table 4 and keeps
the better of the two (B.1.1).

SGD with momentum 0.9 and a learning rate of 0.003, batch 512, no weight decay and no clipping; the rate is divided by
ten three times. Size, steps and MixUp follow from the images and their number alone. No number of the paper's is of
this rule alone; BiT-L (R152x4) has 87.54 on ImageNet, 99.37 on CIFAR-10, 93.51 on CIFAR-100, 96.62 on Pets and 99.63 on
Flowers (Table 2).
"""

from dataclasses import replace

from vitrail.data.splits import DEV
from vitrail.data.transforms.augmentation import bit
from vitrail.data.transforms.hyper_rule import hyper_rule
from vitrail.data.transforms.mixup_cutmix import Mix
from vitrail.optim.config import Optim, Schedule
from vitrail.train.config import Data, RunRequest


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
