"""Fine-tune weights on your images (Section 3.2): a new head that starts at zero, positions resized to --image-size.

Weights and data are enough: image size, batch, length and learning rate are chosen from them, and printed before the
start. For comparison, a linear classifier on the frozen features is scored first: what `vitrail fit` would give.
"""

import argparse
from dataclasses import dataclass

from vitrail.cli.options.grammar import Word, add_data_word
from vitrail.cli.options.groups import SOURCE, TrainingOptions, add_training
from vitrail.recipes.defaults import BATCH, EPOCHS, LEAST_STEPS, RATE


@dataclass(frozen=True, kw_only=True, slots=True)
class FinetuneOptions(TrainingOptions):
    """The options of `vitrail finetune`."""

    weights: str | None = None
    start: str = ""


OPTIONS = FinetuneOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "weights", action=Word, nargs="?", metavar="WEIGHTS", help="a weight file, a folder, a run, or NAME:TAG"
    )
    parser.add_argument("--from", dest="start", default="", metavar="WEIGHTS", help=argparse.SUPPRESS)  # the older form
    add_data_word(parser, SOURCE, needed=False)
    parser.add_argument("--recipe", default="", help="one of the paper's (Table 4) instead of what fits the data")
    add_training(
        parser,
        epochs=f"auto, {EPOCHS}, fewer on very large sets",
        steps=f"auto, as the epochs give, at least {LEAST_STEPS}",
        batch=f"auto, a sixteenth of the images, at most {BATCH}",
        lr=f"auto, {RATE:g}; --sweep tries others",
    )
