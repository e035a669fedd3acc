"""Weights with names for their classes, and images for them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from tests.models.tiny import HYBRID, RESNET, VIT, awake
from vitrail.checkpoint.bundle import Card
from vitrail.checkpoint.weights import save
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.build import Model
from vitrail.models.family import ModelConfig

CLASSES = ("a", "b", "c", "d", "wood pigeon")
NETWORKS: dict[str, ModelConfig] = {
    "vit": VIT,
    "mean, norm last": replace(VIT, pool="mean", norm_after_pool=True, registers=2),
    "tanh": replace(VIT, head="tanh"),
    "hybrid": HYBRID,
    "bit": RESNET,
}


def network(config: ModelConfig, labels: tuple[str, ...] | None = CLASSES, resize: int | None = 21) -> Model:
    """In float32, its card included; wide awake, so that probabilities differ."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = awake(config, torch.float32)
    resize = None if resize is None else max(resize, *config.image)
    preprocessing = Preprocessing(image=config.image, resize=resize, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))
    model.card = Card(preprocessing=preprocessing, labels=labels if config.classes else None)
    return model


def weights(folder: Path, config: ModelConfig = VIT, name: str = "w.safetensors", **card: object) -> str:
    save(network(config, **card), folder / name)  # type: ignore[arg-type]
    return str(folder / name)


def drawn(count: int, seed: int = 0) -> list[Image.Image]:
    """Images of several sizes."""
    draw = np.random.default_rng(seed)
    return [
        Image.fromarray(draw.integers(0, 256, (20 + 3 * at % 17, 40 - 5 * at % 19, 3), dtype=np.uint8))
        for at in range(count)
    ]


def folder_of(folder: Path, count: int, suffix: str = "png") -> list[str]:
    folder.mkdir(parents=True, exist_ok=True)
    names = [str(folder / f"{at:02d}.{suffix}") for at in range(count)]
    for name, picture in zip(names, drawn(count), strict=True):
        picture.save(name)
    return names
