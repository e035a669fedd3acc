"""Make a classifier of your images in seconds: no training, a CPU will do.

The features that the network has learnt stay as they are; a linear classifier on top of them is computed in closed form
(least squares, Section 4.1), with its l2 chosen on a part of the images that is held out, and put into the network as
its last layer. The file is a network like any other, for predict, serve, evaluate or as a start for finetune. Features
are kept, so that another --l2 or --shots takes a moment."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from vitrail.cli.options.grammar import add_data_word
from vitrail.cli.options.groups import SOURCE, WeightsOptions, add_labels, add_loading, add_weights
from vitrail.evaluation.defaults import SHARE

SUFFIX = ".safetensors"


@dataclass(frozen=True, kw_only=True, slots=True)
class FitOptions(WeightsOptions):
    """The options of `vitrail fit`."""

    data: str
    out: Path
    image_size: int | None = None
    test: str | None = None
    l2: float | None = None
    dev: float = SHARE
    shots: int | None = None
    labels: str | None = None
    rename: tuple[str, ...] = ()
    no_cache: bool = False


OPTIONS = FitOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_weights(parser)
    add_data_word(parser, f"{SOURCE}; its train split is learnt")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help=f"the network to write, {SUFFIX}")
    parser.add_argument("--test", metavar="DATA", help="images to score, if they are not the test or val split of DATA")
    parser.add_argument("--l2", type=float, metavar="L2", help="penalty of the weights (default: the best on dev)")
    parser.add_argument(
        "--dev",
        type=float,
        default=SHARE,
        metavar="SHARE",
        help=f"of every class, held out to choose l2 and the scale of the logits; all count afterwards "
        f"(default: {SHARE:g})",
    )
    parser.add_argument("--shots", type=int, metavar="N", help="learn from at most N images of each class")
    add_labels(parser)
    parser.add_argument("--no-cache", action="store_true", help="extract the features again, and do not keep them")
    add_loading(parser)
