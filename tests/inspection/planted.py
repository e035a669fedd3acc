"""Planted images: the class is a small glyph at a random place on clouds and grain, and the place is known."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vitrail.checkpoint.weights import load
from vitrail.data.dataset import ArrayDataset, Labels
from vitrail.data.transforms.augmentation import cifar
from vitrail.distributed.process_group import World
from vitrail.models.vit import ViT
from vitrail.models.vit_config import ViTConfig
from vitrail.optim.config import Optim, Schedule
from vitrail.train.config import Data, Run
from vitrail.train.data import DataSplits
from vitrail.train.loop import train

SIDE, PATCH, GLYPH = 32, 4, 7
NAMES = ("cross", "frame", "stripes", "saltire")


def glyphs() -> NDArray[np.float64]:
    """[4, 7, 7], 1 where there is ink: a plus, a frame, bars, and a cross of diagonals."""
    y, x = np.mgrid[:GLYPH, :GLYPH] - GLYPH // 2
    cross = (abs(x) <= 1) | (abs(y) <= 1)
    frame = np.maximum(abs(x), abs(y)) >= GLYPH // 2 - 0.5
    stripes = y % 2 == 1
    saltire = abs(abs(x) - abs(y)) <= 0
    return np.stack([cross, frame, stripes, saltire]).astype(np.float64)


@dataclass(frozen=True)
class Planted:
    pixels: NDArray[np.uint8]  # [N, 32, 32, 3]
    labels: NDArray[np.int64]  # [N]
    corners: NDArray[np.int64]  # [N, 2], row and column of the glyph's upper left pixel

    def source(self, name: str) -> ArrayDataset:
        return ArrayDataset(self.pixels, Labels(self.labels), NAMES, called=name)

    def touched(self) -> Tensor:
        """The patches that the glyph reaches into: [N, 8, 8]."""
        grid = np.arange(SIDE // PATCH) * PATCH
        near = (grid < self.corners[:, :, None] + GLYPH) & (grid + PATCH > self.corners[:, :, None])  # [N, 2, 8]
        return torch.from_numpy(near[:, 0, :, None] & near[:, 1, None, :])


def planted(count: int, seed: int) -> Planted:
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, len(NAMES), count)
    corners = rng.integers(0, SIDE - GLYPH + 1, (count, 2))
    clouds = rng.normal(0, 25, (count, 4, 4, 3)).repeat(SIDE // 4, 1).repeat(SIDE // 4, 2)
    pixels = 118 + clouds + rng.normal(0, 12, (count, SIDE, SIDE, 3))
    ink = glyphs()[labels]
    colour = rng.choice([15.0, 240.0], (count, 1)) + rng.normal(0, 10, (count, 3))
    for index, (row, column) in enumerate(corners):
        part = pixels[index, row : row + GLYPH, column : column + GLYPH]
        part += ink[index, ..., None] * (colour[index] - part)
    return Planted(pixels.clip(0, 255).astype(np.uint8), labels, corners)


def trained(folder: Path, **changes: Any) -> ViT:
    """A small ViT after a minute or two of one core."""
    some, held = planted(6000, 0), planted(500, 1)
    model = ViTConfig(
        width=64, depth=3, mlp_width=128, heads=4, image=(SIDE, SIDE), patch=(PATCH, PATCH), classes=len(NAMES)
    )
    run = Run(
        name="planted",
        model=model,
        augmentation=cifar(SIDE, padding=0),
        data=Data(source="planted", watch="none", test="test", workers=0),
        optim=Optim(kind="adamw", lr=1.5e-3, weight_decay=0.05, clip=1.0),
        schedule=Schedule(decay="cosine", warmup=60),
        batch=64,
        steps=600,
        log=50,
    )
    run = replace(run, **changes)
    pictures = DataSplits(
        title="planted",
        class_names=NAMES,
        train=some.source("planted/train"),
        watch=None,
        test=held.source("planted/test"),
        watch_name="",
        test_name="test",
    )
    result = train(run, out=folder, world=World(device=torch.device("cpu")), splits=pictures)
    assert result.state == "done"
    network = load(folder / "last.safetensors")
    assert isinstance(network, ViT)
    return network
