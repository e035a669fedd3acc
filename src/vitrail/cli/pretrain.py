"""Train a network from scratch after a recipe. The same command again with --out goes on where it stopped."""

import argparse

from vitrail.cli import training
from vitrail.core.errors import ConfigError
from vitrail.recipes.asked import Asked


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", default="", help="its name; `vitrail recipes` lists them")
    training.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if not args.recipe:
        if args.resume is not None:
            return training.run(args, None)
        raise ConfigError("which recipe? `vitrail recipes` lists them")
    asked = Asked(
        verb="pretrain",
        recipe=args.recipe,
        data=args.data,
        image_size=args.image_size,
        seed=args.seed,
        settings=tuple(args.settings),
        sweep=None if args.sweep is None else tuple(args.sweep),
    )
    return training.run(args, asked)
