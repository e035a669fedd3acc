"""Score weights on labelled images: top-1 and top-5 accuracy, the mean over classes, calibration and loss, each with
its 95% interval, and what is taken for what. Multi-label weights are scored by mean average precision and F1, weights
of another task (segmentation) by its own measures.

With --real, ImageNet's validation images are scored on their ReaL labels, too. Every image counts once; under
torchrun the processes share them and get the same numbers. Several image sizes give a row each.

Images that the weights were trained on are left out, as far as the weights record which those are: of the folder of a
fine-tuning, the images that it held out are scored."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from vitrail.cli.options.groups import (
    WeightsOptions,
    add_data,
    add_deduplicated,
    add_include_seen,
    add_labels,
    add_precision,
    add_weights,
)
from vitrail.evaluation.defaults import Precision


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluateOptions(WeightsOptions):
    """The options of `vitrail evaluate`."""

    data: str
    image_size: tuple[int, ...] | None = None
    real: Path | None = None
    labels: str | None = None
    by_number: bool = False
    threshold: float | None = None
    precision: Precision = "float32"
    out: Path | None = None
    page: Path | None = None
    answers: Path | None = None
    seed: int = 0
    deduplicated_by: Path | None = None
    without: Path | None = None
    include_seen: bool = False


OPTIONS = EvaluateOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_weights(parser, sizes=True)
    add_data(parser)
    parser.add_argument("--real", type=Path, metavar="FILE", help="real.json: ReaL labels of ImageNet's val")
    add_labels(parser, rename=False)
    parser.add_argument("--by-number", action="store_true", help="class 7 is output 7, whatever they are called")
    parser.add_argument(
        "--threshold",
        type=float,
        metavar="P",
        help="of a multi-label network: F1 is of the classes of this probability or more (default: 0.5)",
    )
    add_precision(parser)
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the result as JSON")
    parser.add_argument("--page", type=Path, metavar="FILE", help="write a page of HTML with images")
    parser.add_argument("--answers", type=Path, metavar="FILE", help="write what was said to each image, as CSV")
    parser.add_argument("--seed", type=int, default=0, help="of the bootstrap (default: 0)")
    add_deduplicated(parser)
    parser.add_argument(
        "--without",
        type=Path,
        metavar="FILE",
        help="leave out what `vitrail data dedup SOURCE --against TRAINED` found: its drop.json",
    )
    add_include_seen(parser)
