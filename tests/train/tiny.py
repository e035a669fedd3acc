"""A run that takes a second and has a bit of everything: accumulation, dropout, mixing, averaging, scoring, saving."""

from dataclasses import replace
from typing import Any

from vitrail.data.transforms.augmentation import Mix, cifar
from vitrail.models.vit_config import ViTConfig
from vitrail.optim.config import Optim, Schedule
from vitrail.tasks.classification.objective import Classification
from vitrail.train.config import Data, Keep, Run, Scoring

MODEL = ViTConfig(
    width=16,
    depth=2,
    mlp_width=32,
    heads=2,
    patch=(4, 4),
    image=(8, 8),
    classes=10,
    dropout=0.1,
    stochastic_depth=0.1,
)


def tiny_run(**changes: Any) -> Run:
    """40 steps of 16 digits, in two micro-batches each."""
    run = Run(
        name="tiny",
        model=MODEL,
        augmentation=cifar(8, padding=1),
        objective=Classification(smoothing=0.1),
        data=Data(source="digits", dev=0.02, watch="dev", test="none", workers=0),
        mix=Mix(mixup=0.2, cutmix=1.0, probability=0.5),
        optim=Optim(lr=3e-3, weight_decay=0.1, clip=1.0, layer_decay=0.9),
        schedule=Schedule(warmup=5),
        batch=16,
        micro=8,
        steps=40,
        average=0.9,
        evaluation=Scoring(every=20),
        keep=Keep(steps=4),
        seed=7,
        log=5,
    )
    return replace(run, **changes)
