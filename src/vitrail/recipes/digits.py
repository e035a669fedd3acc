"""The demo, on the 1,797 digits of 8x8 pixels that are in the package: pre-training at a low resolution, fine-tuning at
a higher one with resized positions (3.2), as the paper does it from 224 to 384 px.
"""

from dataclasses import replace

from vitrail.data.transforms.augmentation import Augmentation
from vitrail.data.transforms.crop import InceptionCrop
from vitrail.models.zoo import model_config
from vitrail.optim.config import Optim, Schedule
from vitrail.train.config import Data, Run, RunRequest, Scoring, to_stage


def digits() -> Run:
    """Digits from scratch at 16 px, 22 epochs: a ViT of 4 layers and width 64, 16 patches.

    With seed 0, the last weights classify 98.1 % of the 360 held-out digits correctly."""
    crop = InceptionCrop(size=(16, 16), area=(0.8, 1.0), aspect=(0.8, 1.25))
    model = model_config("ViT-Nano/4", classes=10, image_size=16, width=64, depth=4, mlp_width=128, heads=4)
    return Run(
        name="digits",
        model=replace(model, head="tanh"),
        augmentation=Augmentation(crop=crop, flip=0.0),
        data=Data(source="digits", watch="test"),
        optim=Optim(kind="adamw", lr=3e-3, weight_decay=0.05, clip=1.0),
        schedule=Schedule(decay="cosine", warmup=50),
        batch=64,
        epochs=22,
        evaluation=Scoring(every=100),
        log=20,
    )


def finetune_digits() -> RunRequest:
    """Digits at 32 px, 5 epochs from weights of `digits`: 64 patches, positions resized, a new head.

    From weights of seed 0, the last weights classify 97.5 % of the 360 held-out digits correctly."""
    run = digits()
    return to_stage(
        RunRequest,
        run,
        name="finetune-digits",
        model=None,
        augmentation=replace(run.augmentation, crop=replace(run.augmentation.crop, size=(32, 32))),
        optim=Optim(kind="sgd", lr=0.03, momentum=0.9, clip=1.0),
        schedule=Schedule(decay="cosine", warmup=15),
        epochs=5,
        evaluation=Scoring(every=25),
    )
