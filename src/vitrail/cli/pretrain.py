"""Train a network from scratch after a recipe. The same command again with --out goes on where it stopped."""

import argparse

from vitrail.cli import training
from vitrail.core.errors import ConfigError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", default="", help="its name; `vitrail recipes` lists them")
    training.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    if not args.recipe:
        if args.resume is not None:
            return training.run(args, None)
        raise ConfigError("which recipe? `vitrail recipes` lists them")
    return training.run(args, training.asked_by(args, "pretrain"))
