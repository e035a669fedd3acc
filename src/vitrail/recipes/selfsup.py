"""Pre-training from images alone (4.6, B.1.2): masked patches, MAE, MoCo v3, DINO; no labels are needed.

    vitrail pretrain selfsup/mae-cifar10 cifar10
    vitrail finetune runs/selfsup-mae-cifar10/last.safetensors cifar10

The results are weights without a head, for `finetune`, `fewshot`, `knn`, `probe` and `inspect`. If the images have
labels, the features are scored during training by nearest neighbours; nothing is learnt from the labels, and the test
split selects no weights.

The large recipes have the settings of their papers, whose batches are made for a cluster. `batch` is split over
processes and, unless the objective compares the samples of a batch, over micro-batches; the result is the same.
"""

from dataclasses import replace

from vitrail.data.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from vitrail.data.transforms.augmentation import Augmentation, cifar
from vitrail.data.transforms.crop import InceptionCrop
from vitrail.data.transforms.policy import Distort
from vitrail.models.zoo import adapt_config, model_config
from vitrail.objectives.dino import DINO
from vitrail.objectives.mae import MAE
from vitrail.objectives.masked_patches import MaskedPatches
from vitrail.objectives.moco import MoCo
from vitrail.optim.config import Optim, Schedule
from vitrail.recipes.digits import digits
from vitrail.recipes.table3 import vit_b16_jft
from vitrail.train.config import Data, Run, Scoring


def masked_b16_jft() -> Run:
    """Masked patches of ViT-B/16 on JFT-300M (B.1.2), 1M steps: the paper has 79.9 on ImageNet after fine-tuning.

    Half of the patches are corrupted, and each predicts its mean colour at 3 bits per channel. Adam at 2e-4, batch
    4096, 10,000 steps of warm-up, cosine decay, Inception crop and flip: about 14 epochs. From scratch the same network
    has 77.9 on ImageNet, after supervised pre-training 84.0. The paper states no weight decay; here there is none."""
    return replace(
        vit_b16_jft(),
        name="selfsup/masked-b16-jft",
        model=model_config("ViT-B/16", classes=0),
        objective=MaskedPatches(target="mean-colour", rate=0.5),
        optim=Optim(kind="adamw", lr=2e-4, momentum=0.9, second=0.999),
        schedule=Schedule(decay="cosine", warmup=10_000),
        steps=1_000_000,
        epochs=0.0,
    )


def mae_b16_imagenet() -> Run:
    """MAE of ViT-B/16 on ImageNet, 800 epochs (He et al. 2022, arXiv 2111.06377, Table 8).

    Three quarters of the patches are hidden; a decoder of 8 layers and width 512 predicts them, each normalised by its
    own mean and deviation. Adam with β = (0.9, 0.95) at 1.5e-4 for 256 images, hence 2.4e-3; 40 epochs of warm-up;
    crops of a fifth of the image or more."""
    crop = InceptionCrop(size=(224, 224), area=(0.2, 1.0), interpolation="bicubic")
    return Run(
        name="selfsup/mae-b16-imagenet",
        model=model_config("ViT-B/16", classes=0, position="sincos2d"),
        augmentation=Augmentation(crop=crop),
        preprocessing=Preprocessing(
            image=(224, 224), resize=256, mean=IMAGENET_MEAN, std=IMAGENET_STD, interpolation="bicubic"
        ),
        objective=MAE(),
        data=Data(source="imagenet", watch="val", test="val"),
        optim=Optim(kind="adamw", lr=2.4e-3, weight_decay=0.05, momentum=0.9, second=0.95),
        schedule=Schedule(decay="cosine", warmup=12_500),
        batch=4096,
        epochs=800,
    )


def moco_b16_imagenet() -> Run:
    """MoCo v3 of ViT-B/16 on ImageNet, 300 epochs (Chen et al. 2021, arXiv 2104.02057).

    Two views, a patch projection frozen at its initial values, sine-cosine positions, temperature 0.2, a teacher whose
    momentum goes from 0.99 to 1. Adam at 1.5e-4 for 256 images, hence 2.4e-3; weight decay 0.1; 40 epochs of warm-up.
    All images of a batch are compared, so it takes enough devices to hold all 4096 at once."""
    crop = InceptionCrop(size=(224, 224), area=(0.08, 1.0), interpolation="bicubic")
    augmentation, optim = Augmentation(crop=crop, policy=Distort()), Optim(kind="adamw", lr=2.4e-3, weight_decay=0.1)
    run = replace(mae_b16_imagenet(), name="selfsup/moco-b16-imagenet", objective=MoCo())
    return replace(run, augmentation=augmentation, optim=optim, epochs=300)


def dino_s16_imagenet() -> Run:
    """DINO of ViT-S/16 on ImageNet, 800 epochs (Caron et al. 2021, arXiv 2104.14294).

    Two views of 224 px and eight of 96, 65,536 outputs, a teacher of temperature 0.04 to 0.07 and momentum 0.996 to 1.
    Adam at 5e-4 for 256 images, hence 2e-3, down to 1e-6; 10 epochs of warm-up. Theirs has a weight decay that grows
    from 0.04 to 0.4, ours stays at 0.1. As there, the saved weights are the teacher's."""
    crop = InceptionCrop(size=(224, 224), area=(0.4, 1.0), interpolation="bicubic")
    objective = DINO(outputs=65_536, local_size=96, teacher_start=0.04, teacher_temperature=0.07)
    objective = replace(objective, warmup=30 / 800, freeze_last=1 / 800)
    model = model_config("ViT-S/16", classes=0, stochastic_depth=0.1)
    optim = Optim(kind="adamw", lr=2e-3, weight_decay=0.1, clip=3.0)
    run = replace(mae_b16_imagenet(), name="selfsup/dino-s16-imagenet", model=model, objective=objective, optim=optim)
    augmentation, schedule = Augmentation(crop=crop, policy=Distort()), replace(run.schedule, end=1e-6)
    return replace(run, augmentation=augmentation, schedule=schedule, batch=1024)


def masked_cifar10() -> Run:
    """Masked patches on CIFAR-10 without its labels, 200 epochs: ViT-Mini/4, 7 layers of width 256, tokens averaged.

    In a quarter of these epochs: with 1 % and 10 % of the labels 42.4 and 63.0 after fine-tuning, 35.6 and 55.9 from
    scratch (one H200, three seeds, docs/results.md)."""
    return Run(
        name="selfsup/masked-cifar10",
        model=model_config("ViT-Mini/4", classes=0, position="sincos2d", pool="mean", class_token=False),
        augmentation=cifar(32),
        objective=MaskedPatches(),
        data=Data(source="cifar10", watch="any"),
        optim=Optim(kind="adamw", lr=1e-3, weight_decay=0.05, clip=1.0),
        schedule=Schedule(decay="cosine", warmup=1000),
        batch=512,
        epochs=200,
    )


def mae_cifar10() -> Run:
    """MAE on CIFAR-10 without its labels, 200 epochs: ViT-Mini/4 that sees 16 of 64 patches, a decoder of 4 layers.

    In 111 epochs: with 1 % and 10 % of the labels 50.1 and 72.0 after fine-tuning, 35.6 and 55.9 from scratch (one
    H200, three seeds, docs/results.md)."""
    augmentation = Augmentation(crop=InceptionCrop(size=(32, 32), area=(0.2, 1.0)))
    objective = MAE(decoder_width=128, decoder_depth=4, decoder_heads=4)
    optim = Optim(kind="adamw", lr=1e-3, weight_decay=0.05, momentum=0.9, second=0.95)
    run = replace(masked_cifar10(), name="selfsup/mae-cifar10")
    return replace(run, augmentation=augmentation, objective=objective, optim=optim)


def moco_cifar10() -> Run:
    """MoCo v3 on CIFAR-10 without its labels, 200 epochs: ViT-Mini/4, two distorted views, 512 images compared."""
    objective, optim = MoCo(hidden=1024, width=128), Optim(kind="adamw", lr=1e-3, weight_decay=0.1)
    run = replace(masked_cifar10(), name="selfsup/moco-cifar10")
    return replace(run, augmentation=_small_views(), objective=objective, optim=optim)


def dino_cifar10() -> Run:
    """DINO on CIFAR-10 without its labels, 100 epochs: ViT-Mini/4 with a class token; two views of 32 px, four of 16.

    Adam at 5e-4 for 256 images. The features are those of the class token, whose attention shows what it looks at."""
    model = model_config("ViT-Mini/4", classes=0, position="sincos2d")
    objective = DINO(hidden=1024, bottleneck=128, local_views=4, local_scale=(0.1, 0.4))
    optim = Optim(kind="adamw", lr=5e-4, weight_decay=0.1, clip=3.0)
    schedule = Schedule(decay="cosine", warmup=2000, end=1e-6)
    run = replace(masked_cifar10(), name="selfsup/dino-cifar10", model=model, objective=objective, optim=optim)
    return replace(run, augmentation=_small_views(), schedule=schedule, batch=256, epochs=100)


def _small_views() -> Augmentation:
    """For images of 32 px: crops of a fifth or more, distorted colours, and no blur, which would destroy too much
    detail. Hues are kept, so that whole batches can be augmented on the device."""
    policy = Distort(jitter=(0.4, 0.4, 0.2, 0.0), blur=0.0)
    return Augmentation(crop=InceptionCrop(size=(32, 32), area=(0.2, 1.0)), policy=policy)


def masked_fashion_mnist() -> Run:
    """Masked patches on Fashion-MNIST without its labels, 100 epochs: as on CIFAR-10, with 49 patches of 4 px.

    The images are grey, so a mean colour is one of 8 shades."""
    return _on_fashion_mnist(masked_cifar10(), "selfsup/masked-fashion-mnist")


def mae_fashion_mnist() -> Run:
    """MAE on Fashion-MNIST without its labels, 100 epochs: as on CIFAR-10, with 12 of 49 patches in sight."""
    return _on_fashion_mnist(mae_cifar10(), "selfsup/mae-fashion-mnist")


def _on_fashion_mnist(base: Run, name: str) -> Run:
    crop = base.augmentation.crop
    small = replace(crop, size=(28, 28)) if isinstance(crop, InceptionCrop) else cifar(28, padding=2).crop
    model, augmentation = adapt_config(base.model, image_size=28), replace(base.augmentation, crop=small)
    data = replace(base.data, source="fashion-mnist")
    return replace(base, name=name, model=model, augmentation=augmentation, data=data, epochs=100)


def masked_digits() -> Run:
    """Masked patches on the package's digits, 30 epochs at 16 px: half a minute of one core."""
    crop = InceptionCrop(size=(16, 16), area=(0.6, 1.0), aspect=(0.8, 1.25))
    run = replace(digits(), name="selfsup/masked-digits", objective=MaskedPatches(), epochs=30, evaluation=Scoring())
    model = adapt_config(run.model, classes=0, pool="mean", class_token=False)
    augmentation, data = Augmentation(crop=crop, flip=0.0), Data(source="digits", watch="any")
    return replace(run, model=model, augmentation=augmentation, data=data)


def mae_digits() -> Run:
    """MAE on the package's digits, 30 epochs at 16 px: an encoder that sees 4 of 16 patches."""
    objective = MAE(decoder_width=64, decoder_depth=2, decoder_heads=4)
    return replace(masked_digits(), name="selfsup/mae-digits", objective=objective)


def moco_digits() -> Run:
    """MoCo v3 on the package's digits, 30 epochs at 16 px: two crops of each, 64 digits compared."""
    base = masked_digits()
    crop = InceptionCrop(size=(16, 16), area=(0.4, 1.0), aspect=(0.8, 1.25))
    augmentation, optim = replace(base.augmentation, crop=crop), replace(base.optim, lr=1e-3)
    objective = MoCo(hidden=128, width=32)
    return replace(base, name="selfsup/moco-digits", augmentation=augmentation, objective=objective, optim=optim)


def dino_digits() -> Run:
    """DINO on the package's digits, 30 epochs: two views of 16 px and two of 8 px of each; a minute of one core."""
    base = moco_digits()
    model = adapt_config(base.model, class_token=True, pool="token")
    objective = DINO(outputs=256, hidden=128, bottleneck=32, local_views=2, local_scale=(0.3, 0.6), momentum=0.99)
    return replace(base, name="selfsup/dino-digits", model=model, objective=objective)
