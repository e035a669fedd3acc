"""Write the features of a whole collection to one file: a row an image, with its name and its label.

A feature is what the last layer of the network reads. The work is done in parts, so that the same command goes on where
it was stopped, however it was; under torchrun the processes share the parts. The file is the same to the byte."""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from vitrail.cli.options.grammar import add_data_word, add_out
from vitrail.cli.options.groups import WeightsOptions, add_loading, add_precision, add_weights
from vitrail.evaluation.defaults import Precision, Stored


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbedOptions(WeightsOptions):
    """The options of `vitrail embed`."""

    data: str
    out: Path
    image_size: int | None = None
    split: str | None = None
    type: Stored = "float32"
    force: bool = False
    precision: Precision = "float32"


OPTIONS = EmbedOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_weights(parser)
    add_data_word(parser, "a folder, a list, shards, or a data set by name; all of its splits")
    add_out(parser, "FILE.parquet, or FILE.npz for a small collection")
    parser.add_argument("--split", metavar="NAME", help="one split only; the same as DATA@NAME")
    parser.add_argument(
        "--type", choices=get_args(Stored), default="float32", help="of the numbers in the file (default: float32)"
    )
    parser.add_argument("--force", action="store_true", help="replace a file of other weights, images or settings")
    add_precision(parser)
    add_loading(parser)
