"""ViTs from scratch on images of 28 to 64 px: minutes on one GPU. The quick recipes are for two cores of a laptop.

Augmentation and regularisation make up for what a plain ViT lacks on 50,000 images: a padded crop, RandAugment, MixUp
and CutMix, erasing, label smoothing, stochastic depth. Patches are 4 px or fewer (with 8 a ViT fails on 32 px).
Positions are fixed sines and cosines, which are useful from the first step; learned ones start near zero and do worse
in so few steps. The head reads the mean of the tokens, and the weights are averaged over steps. The curve during
training is that of the test split, but it selects no weights: the last ones count.

Segmentation on the generated shapes: a network that learns the class of every pixel in minutes on two cores.
"""

from dataclasses import replace
from typing import Any

from vitrail.core.text import pair
from vitrail.data.transforms.augmentation import Augmentation, Mix, RandomErasing, cifar
from vitrail.data.transforms.crop import Squash
from vitrail.data.transforms.policy import RandAugment
from vitrail.models.family import ModelConfig
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.vit_config import ViTConfig
from vitrail.models.zoo import model_config
from vitrail.optim.config import Optim, Schedule
from vitrail.tasks.classification.objective import Classification
from vitrail.tasks.segmentation.task import Segmentation
from vitrail.train.config import Data, Run, Scoring


def _build_network(name: str, **fields: Any) -> ModelConfig:
    """A network of the zoo with fixed positions, mean pooling and stochastic depth."""
    return model_config(name, position="sincos2d", pool="mean", class_token=False, stochastic_depth=0.1, **fields)


def cifar10() -> Run:
    """CIFAR-10 from scratch, 290 epochs: ViT-Mini/4, 7 layers of width 256 with mean pooling, 3.7M parameters.

    On one H200: 93.91 ± 0.08 over three seeds (93.80, 93.94, 94.00), 8.7 minutes each with all three on one card;
    on the way 77.0 after 43 epochs, 86.4 after 72, 91.6 after 130, 93.4 after 188 (more in docs/results.md). 0.022
    exaFLOPs and 0.14 device-hours a seed. Public plain ViTs from scratch stand at 90 to 93.6."""
    return Run(
        name="cifar10",
        model=_build_network("ViT-Mini/4", classes=10),
        augmentation=replace(cifar(32), policy=RandAugment(ops=2, magnitude=9), erase=RandomErasing()),
        objective=Classification(smoothing=0.1),
        data=Data(source="cifar10", watch="any"),
        mix=Mix(mixup=0.8, cutmix=1.0, probability=0.8),
        optim=Optim(kind="adamw", lr=5e-4, weight_decay=0.06, clip=1.0),
        schedule=Schedule(decay="cosine", warmup=3900),
        batch=128,
        epochs=290,
        average=0.9998,
    )


def cifar100() -> Run:
    """CIFAR-100 from scratch, 290 epochs: as CIFAR-10.

    Public plain ViTs from scratch stand at 68 to 74."""
    run = cifar10()
    model = replace(run.model, classes=100)
    return replace(run, name="cifar100", model=model, data=replace(run.data, source="cifar100"))


def tiny() -> Run:
    """Images of 64 px from scratch (Tiny ImageNet and its like), 100 epochs: a ViT-S of 12 layers at patch 8.

    Public plain ViTs stand at 45 to 57 on Tiny ImageNet. The source is given with the run."""
    return replace(
        cifar10(),
        name="tiny",
        model=_build_network("ViT-S/16", classes=200, image_size=64, patch=8),
        augmentation=replace(cifar(64, padding=8), policy=RandAugment(ops=2, magnitude=9), erase=RandomErasing()),
        data=Data(source=""),
        schedule=Schedule(decay="cosine", warmup=7800),
        epochs=100,
    )


def svhn() -> Run:
    """SVHN (cropped digits of 32 px) from scratch, 60 epochs: as CIFAR-10, without flips or mixed images.

    A public plain ViT of 6 layers has 96.2."""
    augmentation = replace(cifar(32), flip=0.0, policy=RandAugment(ops=2, magnitude=9))
    data = Data(source="svhn", watch="any")
    return replace(cifar10(), name="svhn", augmentation=augmentation, mix=Mix(), data=data, epochs=60)


def fashion_mnist() -> Run:
    """Fashion-MNIST from scratch, 255 epochs: ViT-Mini/4 (49 tokens), mixed and erased less than CIFAR-10.

    On one H200: 94.96 ± 0.04 over three seeds (95.00, 94.97, 94.91), 9.1 minutes each with all three on one card;
    on the way 91.4 after 38 epochs, 93.2 after 64, 94.5 after 115, 94.7 after 140 (more in docs/results.md). 0.017
    exaFLOPs and 0.15 device-hours a seed. Public plain ViTs stand at 92.3 to 94."""
    model, mix = _build_network("ViT-Mini/4", classes=10, image_size=28), Mix(mixup=0.2, cutmix=1.0, probability=0.5)
    augmentation = replace(cifar(28, padding=2), erase=RandomErasing(probability=0.25))
    data, schedule = Data(source="fashion-mnist", watch="any"), Schedule(decay="cosine", warmup=4700)
    run = replace(cifar10(), name="fashion-mnist", model=model, augmentation=augmentation, epochs=255)
    return replace(run, data=data, mix=mix, schedule=schedule)


def mnist() -> Run:
    """MNIST from scratch, 30 epochs: as Fashion-MNIST, without flips or mixed images.

    Public plain ViTs have 99.4 to 99.5."""
    run = fashion_mnist()
    augmentation, data = replace(run.augmentation, flip=0.0), replace(run.data, source="mnist")
    return replace(run, name="mnist", augmentation=augmentation, mix=Mix(), data=data, epochs=30)


def quick_cifar10() -> Run:
    """CIFAR-10 on two cores: ViT-Nano/4, 5 epochs, flip alone.

    In so few epochs a network hardly overfits, so regularisation is left out."""
    return Run(
        name="quick-cifar10",
        model=model_config("ViT-Nano/4", classes=10, pool="mean", class_token=False),
        augmentation=cifar(32, padding=0),
        data=Data(source="cifar10", watch="any"),
        optim=Optim(kind="adamw", lr=1e-3, weight_decay=0.05, clip=1.0),
        schedule=Schedule(decay="cosine", warmup=200),
        batch=64,
        epochs=5,
    )


def quick_cifar100() -> Run:
    """CIFAR-100 on two cores: as quick-cifar10."""
    run = quick_cifar10()
    model = replace(run.model, classes=100)
    return replace(run, name="quick-cifar100", model=model, data=replace(run.data, source="cifar100"))


def quick_svhn() -> Run:
    """SVHN on two cores: as quick-cifar10, without flips."""
    run = quick_cifar10()
    augmentation = replace(run.augmentation, flip=0.0)
    return replace(run, name="quick-svhn", augmentation=augmentation, data=replace(run.data, source="svhn"))


def quick_fashion_mnist() -> Run:
    """Fashion-MNIST on two cores: ViT-Nano/4 (49 tokens), 5 epochs, flip alone.

    82.1 after 1.7 epochs of its own schedule, in 5 minutes of one core."""
    model = model_config("ViT-Nano/4", classes=10, image_size=28, pool="mean", class_token=False)
    data = Data(source="fashion-mnist", watch="any")
    run = replace(quick_cifar10(), name="quick-fashion-mnist")
    return replace(run, model=model, augmentation=cifar(28, padding=0), data=data)


def quick_mnist() -> Run:
    """MNIST on two cores: as quick-fashion-mnist, 3 epochs without flips."""
    run = quick_fashion_mnist()
    augmentation, data = replace(run.augmentation, flip=0.0), replace(run.data, source="mnist")
    return replace(run, name="quick-mnist", augmentation=augmentation, data=data, epochs=3)


def segment_shapes() -> Run:
    """The class of every pixel of the generated shapes, 2 epochs at 64 px: a small hybrid with 256 tokens.

    Seeds 0 and 1 reach 87.1 and 89.1 % mIoU on the 2,000 test images; docs/results.md says how long that takes."""
    image = pair(64)
    stem = ResNetConfig(
        image=image, blocks=(3,), factor=0.5, groups=4, classes=0, unit="postactivation", pool_padding="infinity"
    )
    model = ViTConfig(image=image, patch=(1, 1), backbone=stem, width=64, depth=2, heads=2, mlp_width=128, classes=9)
    return Run(
        name="segment-shapes",
        model=replace(model, head="patches", pool="mean", class_token=False),
        augmentation=Augmentation(crop=Squash(size=image)),
        objective=Segmentation(),
        data=Data(source="shapes", watch="test"),
        optim=Optim(kind="adamw", lr=3e-3, second=0.95, weight_decay=0.05, clip=1.0),
        schedule=Schedule(decay="cosine", warmup=100),
        batch=8,
        epochs=2,
        evaluation=Scoring(every=1250),
        log=20,
    )
