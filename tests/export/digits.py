"""Networks that know digits after a second or two of training, and the digits that they were not trained on."""

from dataclasses import replace

import torch
from torch.nn import functional as F

from vitrail.checkpoint.bundle import Card
from vitrail.data.collection import open_collection
from vitrail.data.loader import eval_batches
from vitrail.data.preprocessing import Preprocessing
from vitrail.export import ExportImages
from vitrail.models.build import Model, build
from vitrail.models.family import ModelConfig
from vitrail.models.resnet_config import ResNetConfig
from vitrail.models.vit_config import ViTConfig
from vitrail.models.zoo import hybrid_backbone

VIT = ViTConfig(width=32, depth=2, mlp_width=64, heads=2, image=(16, 16), patch=(4, 4), classes=10)
BIT = ResNetConfig(blocks=(1, 1), factor=0.25, groups=4, root="3x3", image=(16, 16), classes=10)
HYBRID = ViTConfig(
    width=32,
    depth=2,
    mlp_width=64,
    heads=2,
    image=(16, 16),
    patch=(1, 1),
    classes=10,
    backbone=replace(hybrid_backbone((1, 1, 1), (16, 16)), factor=0.25, groups=4, root="3x3"),
)
DIGITS = open_collection("digits")


def trained(config: ModelConfig, steps: int = 120, lr: float = 3e-3) -> Model:
    """A network with a card, in evaluation mode."""
    preprocessing = Preprocessing(image=config.image)
    (batch,) = eval_batches(DIGITS.splits["train"], preprocessing, batch=len(DIGITS.splits["train"]))
    images, labels = preprocessing.normalise(batch.pixels), batch.target
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = build(config)
        optimiser = torch.optim.AdamW(model.parameters(), lr=lr)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, lr, total_steps=steps)
        for _ in range(steps):
            chosen = torch.randint(len(images), (128,))
            F.cross_entropy(model(images[chosen]), labels[chosen]).backward()
            optimiser.step()
            optimiser.zero_grad()
            schedule.step()
    model.card = Card(preprocessing=preprocessing, labels=DIGITS.classes)
    return model.eval()


def held_out() -> ExportImages:
    test = DIGITS.splits["test"]
    return ExportImages(source=test, has_targets=True, calibration=DIGITS.splits["train"])
