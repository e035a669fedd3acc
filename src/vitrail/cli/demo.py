"""Classify the bundled picture with a ViT-B/16 of random weights, then list the models."""

import argparse
import time
from importlib import resources

import torch
from PIL import Image
from torch import Tensor, nn

import vitrail
from vitrail.cli import models
from vitrail.data.preprocessing import Preprocessing
from vitrail.models.vit import ViT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seed", type=int, default=0, help="seed of the random weights (default: 0)")


def run(args: argparse.Namespace) -> int:
    start = time.perf_counter()
    model = random_model(args.seed)
    built = time.perf_counter()
    probability = classify(model, sample())
    done = time.perf_counter()
    print(f"ViT-B/16 built in {built - start:.2f} s, the sample picture classified in {done - built:.2f} s.")
    print(
        f"The weights are random (seed {args.seed}), so the answer means nothing: it only shows that every part runs.\n"
    )
    for value, index in zip(*probability.topk(5), strict=True):
        print(f"  class {int(index):>4}  {float(value):7.3%}")
    print()
    table = argparse.ArgumentParser()
    models.add_arguments(table)
    return models.run(table.parse_args([]))


def random_model(seed: int) -> ViT:
    """A ViT-B/16 that favours some classes: a fresh head is zero (3.2) and would call all equally likely."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = vitrail.create_model("ViT-B/16")
        assert isinstance(model, ViT)
        assert model.head.classifier is not None
        nn.init.normal_(model.head.classifier.weight, std=0.02)
    return model.eval()


@torch.inference_mode()
def classify(model: ViT, picture: Image.Image) -> Tensor:
    """The probabilities of one picture's classes: [K]."""
    return model(Preprocessing(image=model.config.image)(picture)[None])[0].softmax(-1)


def sample() -> Image.Image:
    """The picture that comes with the package."""
    with resources.files("vitrail").joinpath("assets", "window.png").open("rb") as file:
        return Image.open(file).convert("RGB")
