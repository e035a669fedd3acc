"""Nearest neighbours of frozen features: every image is given the class that its most similar images vote for.

Similar is what has a large cosine. A neighbour's vote weighs exp(cosine / temperature), or as much as any other's;
both are shown. Every pair is compared. Features are extracted once and kept for later, for `vitrail fewshot` and
`vitrail probe`, too."""

import argparse
from dataclasses import dataclass

from vitrail.cli.options.groups import FrozenOptions, add_frozen
from vitrail.evaluation.defaults import TEMPERATURE


@dataclass(frozen=True, kw_only=True, slots=True)
class KnnOptions(FrozenOptions):
    """The options of `vitrail knn`."""

    data: str
    test: str | None = None
    neighbours: tuple[int, ...] | None = None
    temperature: float = TEMPERATURE


OPTIONS = KnnOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_frozen(parser)
    parser.add_argument(
        "-k",
        type=int,
        nargs="+",
        metavar="N",
        dest="neighbours",
        help="that vote (default: 1 5 10 20 50, where there are)",
    )
    parser.add_argument(
        "--temperature", type=float, default=TEMPERATURE, metavar="T", help=f"of the weights (default: {TEMPERATURE})"
    )
