"""Fine-tune weights on your pictures (Section 3.2): a new head at zero, positions resized to --image-size.

Weights and data are enough: size, batch, steps and learning rate are chosen from them, and printed before the start.
First comes the number to beat: what `vitrail fit` would get from the same pictures without any training.
"""

import argparse

from vitrail.cli.options.groups import add_training


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--from", dest="weights", default="", metavar="WEIGHTS", help="a weight file or folder, or NAME:TAG"
    )
    parser.add_argument("--recipe", default="", help="one of the paper's (Table 4) instead of what fits the data")
    add_training(parser)
