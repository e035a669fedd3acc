"""Runs on scenes that take a second: queries of a tiny network, for panoptic maps and for instances."""

from dataclasses import replace
from typing import Any

from vitrail.data.transforms.augmentation import Augmentation
from vitrail.data.transforms.crop import ScaleJitter
from vitrail.models.query_configs import EoMTConfig
from vitrail.optim.config import Optim, Schedule
from vitrail.tasks.mask_queries.objective import PanopticQueries
from vitrail.train.config import Data, Keep, Run, Scoring

QUERIES = EoMTConfig(
    width=16,
    depth=2,
    mlp_width=32,
    heads=2,
    patch=(8, 8),
    image=(32, 32),
    classes=10,
    queries=12,
    query_blocks=2,
    upscale=1,
    stochastic_depth=0.1,
)


def dense_run(**changes: Any) -> Run:
    """16 steps of 4 scenes, in two micro-batches each, with both warm-ups and the annealing of masks."""
    run = Run(
        name="dense",
        model=QUERIES,
        augmentation=Augmentation(crop=ScaleJitter(size=(32, 32), scale=(0.5, 1.5))),
        objective=PanopticQueries(points=32),
        data=Data(source="scenes/32", part=1.0, watch="none", test="none", workers=0, resident="off"),
        optim=Optim(lr=3e-3, weight_decay=0.05, clip=0.1, layer_decay=0.8),
        schedule=Schedule(decay="poly", warmup=2, encoder_warmup=3),
        batch=4,
        micro=2,
        steps=16,
        average=0.9,
        evaluation=Scoring(every=16),
        keep=Keep(steps=4),
        seed=3,
        log=4,
    )
    return replace(run, **changes)
