"""What `vitrail models` does."""

import argparse
import json

from vitrail.core.console import giga, millions, print_table
from vitrail.core.errors import UnknownName, unknown
from vitrail.models.config import ModelConfig, ViTConfig
from vitrail.models.walk import macs, parameters
from vitrail.models.zoo import SLUGS, ZOO, list_models, model_config, slug


def run(args: argparse.Namespace) -> int:
    names = list_models(args.pattern)
    if not names:
        raise no_match(args.pattern)
    if args.json:
        for name in names:
            print(json.dumps(record(name, args.classes)))
        return 0
    for sizes in ((224, 384), (32, 64)):
        rows = [row(name, sizes, args.classes) for name in names if sizes_of(name) == sizes]
        if rows:
            small, large = sizes
            heads = [f"tokens {small}", f"GMACs {small}", f"tokens {large}", f"GMACs {large}"]
            print_table(["network", "name", "parameters", *heads], rows, left=2)
    if any("/14" in name for name in names):
        print("Patch 14 does not divide 384: those columns are at 378.")
    print(f"{len(names)} networks; parameters with {args.classes} classes at the smaller size.")
    return 0


def no_match(pattern: str) -> UnknownName:
    return unknown("model", pattern, [*ZOO, *SLUGS])


def sizes_of(name: str) -> tuple[int, int]:
    """The two image sizes of a network's row: the paper's, or small ones for networks made for small images."""
    return (32, 64) if ZOO[name].image == (32, 32) else (224, 384)


def sized(name: str, size: int, classes: int) -> ModelConfig:
    """The config at an image size, or at the next smaller one that the patch divides."""
    patch = ZOO[name]
    side = patch.patch[0] if isinstance(patch, ViTConfig) and patch.backbone is None else 1
    return model_config(name, image_size=size - size % side, classes=classes)


def row(name: str, sizes: tuple[int, int], classes: int) -> list[str]:
    small, large = (sized(name, size, classes) for size in sizes)
    return [
        name,
        slug(name),
        millions(parameters(small)),
        *(cell for config in (small, large) for cell in (tokens(config), giga(macs(config)))),
    ]


def tokens(config: ModelConfig) -> str:
    """A convolutional network has no sequence."""
    return f"{config.tokens:,}" if isinstance(config, ViTConfig) else "-"


def record(name: str, classes: int) -> dict[str, object]:
    out: dict[str, object] = {"network": name, "name": slug(name)}
    for size in sizes_of(name):
        config = sized(name, size, classes)
        length = config.tokens if isinstance(config, ViTConfig) else None
        out[str(size)] = {
            "image": config.image,
            "parameters": parameters(config),
            "tokens": length,
            "macs": macs(config),
        }
    return out
