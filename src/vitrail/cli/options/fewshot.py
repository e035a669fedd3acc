"""Few-shot accuracy of frozen features (Section 4.1): a linear classifier in closed form from a few images a class.

As the reference does it: features whitened by the images that are learnt from, a constant of 100 next to them, targets
of -1 and 1, a penalty of 1024, and three draws of the images. With --sweep its older way: the first images of each
class, every penalty from 2^-10 to 2^19, and for each number of shots the one that ranks best on average over all sets
given. Features are extracted once and kept for later, for `vitrail probe` and `vitrail knn`, too."""

import argparse
from dataclasses import dataclass
from typing import Final

from vitrail.cli.options.groups import FrozenOptions, add_frozen

ALL: Final = 1 << 53  # shots: every image of train, without a draw


@dataclass(frozen=True, kw_only=True, slots=True)
class FewshotOptions(FrozenOptions):
    """The options of `vitrail fewshot`."""

    data: tuple[str, ...]
    test: tuple[str, ...] | None = None
    shots: tuple[int, ...] | None = None
    seeds: tuple[int, ...] | None = None
    penalty: float | None = None
    sweep: bool = False


OPTIONS = FewshotOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_frozen(parser, several=True)
    parser.add_argument(
        "--shots",
        type=number_of,
        nargs="+",
        metavar="N",
        help='images a class to learn from, or "all" there are (default: 1 5 10 25)',
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", metavar="S", help="one draw of the images each (default: 0 1 2)"
    )
    parser.add_argument("--penalty", type=float, metavar="L2", help="of the weights (default: 1024)")
    parser.add_argument("--sweep", action="store_true", help="no draws, all penalties, the best one for all sets")


def number_of(text: str) -> int:
    if text != "all" and not text.removeprefix("-").isdecimal():
        raise argparse.ArgumentTypeError(f'{text!r} is not a number of images; give whole ones, or "all"')
    return ALL if text == "all" else int(text)
