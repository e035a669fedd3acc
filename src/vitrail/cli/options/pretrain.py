"""Train a network from scratch after a recipe. The same command again with --out goes on where it stopped."""

import argparse

from vitrail.cli.options.groups import add_training


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", default="", help="its name; `vitrail recipes` lists them")
    add_training(parser)
