"""Runs of every objective that needs no labels, a second each."""

from dataclasses import replace
from typing import Any

from tests.train.tiny import MODEL, tiny_run
from vitrail.data.transforms.augmentation import Augmentation, Mix
from vitrail.data.transforms.crop import InceptionCrop
from vitrail.objectives.dino import DINO
from vitrail.objectives.mae import MAE
from vitrail.objectives.masked_patches import MaskedPatches
from vitrail.objectives.moco import MoCo
from vitrail.objectives.registry import ObjectiveConfig
from vitrail.train.config import Data, Keep, Run, Scoring

UNLABELLED: dict[str, ObjectiveConfig] = {
    "masked": MaskedPatches(),
    "mae": MAE(decoder_width=16, decoder_depth=1, decoder_heads=2),
    "moco": MoCo(hidden=16, width=8),
    "dino": DINO(outputs=12, hidden=16, bottleneck=8, local_views=1, local_size=4, local_scale=(0.3, 0.6)),
}


def selfsup_run(kind: str, **changes: Any) -> Run:
    """8 steps of 16 digits, of 16 patches each, from their images alone."""
    run = tiny_run(
        name=f"tiny-{kind}",
        model=replace(MODEL, patch=(2, 2), classes=0, head="none"),
        augmentation=Augmentation(crop=InceptionCrop(size=(8, 8), area=(0.5, 1.0))),
        objective=UNLABELLED[kind],
        data=Data(source="digits", watch="none", test="none", workers=0),
        mix=Mix(),
        micro=0 if UNLABELLED[kind].needs_whole_batch else 8,
        average=0.0,
        steps=8,
        evaluation=Scoring(every=8),
        keep=Keep(steps=2),
    )
    return replace(run, **changes)
