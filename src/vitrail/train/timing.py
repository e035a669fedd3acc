"""How long an image takes to train on here: a few steps that nobody keeps."""

import time
from dataclasses import replace
from typing import Final

import torch

from vitrail.data.ledger import Ledger
from vitrail.data.transforms.mix import Mix
from vitrail.distributed.world import World
from vitrail.optim.config import Schedule
from vitrail.train.build import assemble
from vitrail.train.config import Run
from vitrail.train.pictures import Pictures
from vitrail.train.resolve import resolve

TRIED: Final = 8  # images a process in each step
TIMED: Final = 4  # steps after the first, at most
ENOUGH_S: Final = 6.0


def seconds_per_image(run: Run, pictures: Pictures, world: World) -> float:
    """Of training: reading, forward and backward, by the clock of the first process. The first step is not counted."""
    short = replace(
        run,
        batch=TRIED * world.size,
        micro=0,
        steps=1 + TIMED,
        epochs=0.0,
        mix=Mix(),
        schedule=Schedule(),
        start="zero",
        baseline="off",
        compile="off",
        evaluation=replace(run.evaluation, patience=0),
    )
    trial = resolve(short, pictures, world)
    cuda = world.device.type == "cuda"
    with torch.random.fork_rng(devices=[world.device] if cuda else []):
        parts = assemble(trial, pictures, world, Ledger(), saved=None)
        images, begun = 0, time.perf_counter()
        for batch in parts.feed.stream(0, trial.steps):
            parts.step(batch, step=batch.step, rate=0.0, micro=trial.micro)
            if cuda:
                torch.cuda.synchronize(world.device)
            if batch.step == 0:
                begun = time.perf_counter()
                continue
            images += trial.batch
            if world.agree(time.perf_counter() - begun > ENOUGH_S):
                break
    return world.agree((time.perf_counter() - begun) / images)
