"""Train a network from scratch after a recipe. The same command again with --out resumes where it stopped."""

import argparse
from dataclasses import dataclass

from vitrail.cli.options.grammar import add_data_word
from vitrail.cli.options.groups import SOURCE, TrainingOptions, add_training


@dataclass(frozen=True, kw_only=True, slots=True)
class PretrainOptions(TrainingOptions):
    """The options of `vitrail pretrain`."""


OPTIONS = PretrainOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", nargs="?", default="", metavar="RECIPE", help="`vitrail recipes` lists them")
    add_data_word(parser, f"{SOURCE} (default: the recipe's)", needed=False)
    own = "the recipe's"
    add_training(parser, epochs=own, steps=own, batch=own, lr=own)
